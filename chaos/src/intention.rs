//! What the clients want, as a function of the seed: the same seed gives the same intentions, in whatever order they run.

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

/// Accounts 1 to this many. The first [`POOR`] hold little, so that debits of them are refused now and then.
pub const ACCOUNTS: i64 = 64;
/// How many accounts are poor.
pub const POOR: i64 = 8;
/// Where clients meet.
pub const HOT: std::ops::Range<i64> = POOR + 1..POOR + 5;
/// An account that never exists.
pub const UNKNOWN_ACCOUNT: i64 = 1_000_000;

/// What an account holds before the run.
pub fn initial_balance(account: i64) -> i64 {
    if account <= POOR { 1_000_000 } else { 1_000_000_000_000 }
}

/// Which function an intention is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// `debit_once`
    Debit,
    /// `credit_once`
    Credit,
    /// `run_once` with a handler that moves money between two accounts
    Transfer,
    /// `apply_message_once`
    Apply,
    /// `accept_message`, and the effect by the client's own statement in the same transaction
    Accept,
}

impl Kind {
    /// The operation under which its record is kept, or the subscriber, for a message.
    pub fn scope(self) -> &'static str {
        match self {
            Self::Debit => "debit:v1",
            Self::Credit => "credit:v1",
            Self::Transfer => "transfer:v1",
            Self::Apply => "apply",
            Self::Accept => "accept",
        }
    }

    /// Whether it is a message, whose record keeps no answer.
    pub fn is_message(self) -> bool {
        matches!(self, Self::Apply | Self::Accept)
    }
}

/// One thing that a client wants to happen once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intention {
    /// Its number, in the order of its client's work.
    pub n: u64,
    /// The key, or the message's id.
    pub key: String,
    /// What is to happen.
    pub kind: Kind,
    /// To which account.
    pub account: i64,
    /// Where a transfer goes to; 0 for everything else.
    pub to: i64,
    /// How much, above zero.
    pub amount: i64,
}

impl Intention {
    /// The `n`th intention of this client.
    pub fn generate(seed: u64, client: usize, n: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&(client as u64).to_le_bytes());
        bytes[16..24].copy_from_slice(&n.to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(bytes);
        let kind = match random.random_range(0..100) {
            // More goes out than comes in, so that the poor stay poor.
            0..46 => Kind::Debit,
            46..64 => Kind::Credit,
            64..84 => Kind::Transfer,
            84..92 => Kind::Apply,
            _ => Kind::Accept,
        };
        // A few accounts get more than their share, so that clients meet, and transfers deadlock.
        let range = if random.random_range(0..3) == 0 { HOT } else { 1..ACCOUNTS + 1 };
        let mut account = random.random_range(range.clone());
        let to = match kind {
            // Any account of them but its own.
            Kind::Transfer => {
                let other = random.random_range(range.start..range.end - 1);
                other + i64::from(other >= account)
            }
            _ => 0,
        };
        if kind == Kind::Debit && random.random_range(0..100) == 0 {
            account = UNKNOWN_ACCOUNT;
        }
        // From a wide range, so that an amount nearly names its intention when the checker asks what ran twice.
        let amount = random.random_range(1..=1_000_000);
        let id: u128 = random.random();
        let hex = format!("{id:032x}");
        // Version 4: of version 7 the first bits would be a date, and these are none.
        let key = format!("{}-{}-4{}-{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[16..20], &hex[20..]);
        Self { n, key, kind, account, to, amount }
    }

    /// Another request under the same key, which has to be refused.
    pub fn altered(&self) -> Self {
        Self { amount: self.amount + 1, ..self.clone() }
    }

    /// By how much it changes which balance.
    pub fn effects(&self) -> Vec<(i64, i64)> {
        match self.kind {
            Kind::Debit => vec![(self.account, -self.amount)],
            Kind::Transfer => vec![(self.account, -self.amount), (self.to, self.amount)],
            Kind::Credit | Kind::Apply | Kind::Accept => vec![(self.account, self.amount)],
        }
    }

    /// Whether this SQLSTATE is a definite refusal that can be right.
    pub fn may_be_refused_with(&self, sqlstate: &str) -> bool {
        match sqlstate {
            "P0001" => matches!(self.kind, Kind::Debit | Kind::Transfer),
            "23503" => self.account == UNKNOWN_ACCOUNT,
            _ => false,
        }
    }
}
