//! What a client writes down: each intention before it is sent for the first time, and each definite answer. A client
//! that is killed knows nothing else when it starts again.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::intention::Intention;

/// A definite answer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Got {
    /// Executed or replayed; the answer, byte for byte.
    Done(String),
    /// Refused with this SQLSTATE.
    Refused(String),
    /// Refused, and cancelled because an earlier attempt, of which no answer came, could still have been under way.
    Cancelled,
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// Written before the first attempt.
    Intend(Intention),
    /// The intention's definite answer.
    Answer {
        /// Which intention of this client.
        n: u64,
        /// What came.
        got: Got,
    },
    /// The same request once more, although it was answered.
    Again {
        /// Which intention of this client.
        n: u64,
        /// What came.
        got: Got,
    },
    /// Another request with the same key.
    Probe {
        /// Which intention of this client.
        n: u64,
        /// What came.
        got: Got,
    },
}

/// The file of a client.
pub struct Journal {
    file: File,
    fsync: bool,
}

impl Journal {
    /// Opens it for appending, and returns what is in it already.
    pub fn open(path: &Path, fsync: bool) -> (Self, Vec<Entry>) {
        let file = File::options().create(true).append(true).open(path).expect("a journal");
        (Self { file, fsync }, read(path))
    }

    /// Adds a line, with one write, which is there when this returns, whatever becomes of the client then.
    pub fn write(&mut self, entry: &Entry) {
        let mut line = serde_json::to_vec(entry).expect("an entry is JSON");
        line.push(b'\n');
        self.file.write_all(&line).expect("the journal is writable");
        if self.fsync {
            self.file.sync_data().expect("the journal is durable");
        }
    }
}

/// Everything that a client wrote down.
pub fn read(path: &Path) -> Vec<Entry> {
    let lines = BufReader::new(File::open(path).expect("a journal")).lines();
    lines.map(|line| serde_json::from_str(&line.expect("a line")).expect("an entry")).collect()
}
