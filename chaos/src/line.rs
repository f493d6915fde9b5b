//! A client's connection, which can be cut at a chosen moment of the next request.

use std::io::{Error, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

/// When to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Moment {
    /// After half of the request was sent: it cannot be executed.
    MidRequest = 1,
    /// After the request was sent: it may be executed, later than the client tries again.
    AfterRequest = 2,
    /// When the answer is there and before it is read: what was to be committed is.
    BeforeAnswer = 3,
}

/// What is armed for one connection, if anything, and how many connections were cut.
#[derive(Clone)]
pub struct Scissors {
    armed: Arc<AtomicU8>,
    cuts: Arc<AtomicU64>,
}

const CLOSED: u8 = 0;
/// Between the request that was sent and the flush that ends it.
const SENT: u8 = 4;

impl Scissors {
    /// For a new connection, with the run's count of cuts.
    pub fn new(cuts: Arc<AtomicU64>) -> Self {
        Self { armed: Arc::default(), cuts }
    }

    /// Cuts the connection during the next request, or not, if this is no [`Moment`].
    pub fn arm(&self, moment: u8) {
        self.armed.store(moment, Ordering::SeqCst);
    }

    fn is(&self, moment: u8) -> bool {
        self.armed.load(Ordering::SeqCst) == moment
    }

    fn cut(&self) -> Error {
        self.arm(CLOSED);
        self.cuts.fetch_add(1, Ordering::Relaxed);
        // The caller drops the stream on an error, and with it closes the socket.
        Error::from(ErrorKind::ConnectionReset)
    }
}

/// A socket with scissors.
pub struct Line {
    /// The socket.
    pub stream: UnixStream,
    /// When to cut it.
    pub scissors: Scissors,
}

impl AsyncRead for Line {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        if self.scissors.is(Moment::BeforeAnswer as u8) {
            ready!(self.stream.poll_read_ready(cx))?;
            return Poll::Ready(Err(self.scissors.cut()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        if self.scissors.is(Moment::MidRequest as u8) {
            ready!(Pin::new(&mut self.stream).poll_write(cx, &buf[..buf.len() / 2]))?;
            return Poll::Ready(Err(self.scissors.cut()));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        if self.scissors.is(Moment::AfterRequest as u8) {
            self.scissors.arm(SENT);
        }
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        if self.scissors.is(SENT) {
            return Poll::Ready(Err(self.scissors.cut()));
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
