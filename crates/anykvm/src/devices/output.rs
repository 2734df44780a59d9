//! Guest output on its way to our standard output or error: a thread writes it from a buffer.
//!
//! A UART gives one byte per exit. Writing each would cost a system call in the vCPU's run path;
//! here bytes are gathered for a millisecond and then written together. A full buffer makes the
//! vCPU wait, so a slow reader slows the guest instead of growing our memory.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Maximum number of bytes that wait.
const BUFFER_MAX: usize = 1 << 20;
/// How long the first byte of a batch waits for more.
const GATHER: Duration = Duration::from_millis(1);

/// One of our standard streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

#[derive(Default)]
struct State {
    buffer: Vec<u8>,
    is_writing: bool,
    is_closed: bool,
    /// Functions that are called when there is room again.
    when_room: Vec<Box<dyn Fn() + Send>>,
}

/// A stream that the guest writes to.
#[derive(Default)]
pub(crate) struct Output {
    state: Mutex<State>,
    changed: Condvar,
}

/// The reason why a stream cannot be written to any more.
type Closed = rustix::io::Errno;

impl Output {
    /// Starts the writer. `on_closed` is called once if the stream cannot be written to any more, because its reader is
    /// gone or its disk is full. Later output is dropped.
    pub(crate) fn start(
        stream: Stream,
        on_closed: impl Fn(Closed) + Send + 'static,
    ) -> std::io::Result<Arc<Self>> {
        let output = Arc::new(Self::default());
        let ours = Arc::clone(&output);
        thread::Builder::new()
            .name("output".into())
            .spawn(move || ours.write_batches(stream, &on_closed))?;
        Ok(output)
    }

    /// Returns true if [`Self::push`] would wait.
    pub(crate) fn is_full(&self) -> bool {
        let state = lock(&self.state);
        state.buffer.len() >= BUFFER_MAX && !state.is_closed
    }

    /// Has `ring` called whenever there is room again after the buffer was full.
    pub(crate) fn when_room(&self, ring: Box<dyn Fn() + Send>) {
        lock(&self.state).when_room.push(ring);
    }

    /// Adds bytes. Waits while the buffer is full.
    pub(crate) fn push(&self, bytes: &[u8]) {
        let mut state = lock(&self.state);
        while state.buffer.len() >= BUFFER_MAX && !state.is_closed {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_closed {
            return;
        }
        if state.buffer.is_empty() {
            self.changed.notify_all();
        }
        state.buffer.extend_from_slice(bytes);
    }

    /// Waits until everything is written, but for a limited time, because the reader may be stopped.
    pub(crate) fn drain(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = lock(&self.state);
        while (state.is_writing || !state.buffer.is_empty()) && !state.is_closed {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return;
            };
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Makes an output without a writer.
    #[cfg(test)]
    pub(crate) fn for_test() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Makes an output whose reader is gone.
    #[cfg(test)]
    pub(crate) fn for_nobody() -> Arc<Self> {
        let output = Self::for_test();
        lock(&output.state).is_closed = true;
        output
    }

    /// Returns the bytes that wait.
    #[cfg(test)]
    pub(crate) fn take(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.state).buffer)
    }

    fn write_batches(&self, stream: Stream, on_closed: &dyn Fn(Closed)) {
        loop {
            let mut state = lock(&self.state);
            while state.buffer.is_empty() {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let is_full = state.buffer.len() >= BUFFER_MAX;
            drop(state);
            if !is_full {
                thread::sleep(GATHER);
            }
            let mut state = lock(&self.state);
            let batch = std::mem::take(&mut state.buffer);
            state.is_writing = true;
            drop(state);
            let closed = write_all(stream, &batch).err();
            let mut state = lock(&self.state);
            state.is_writing = false;
            state.is_closed = closed.is_some();
            self.changed.notify_all();
            if batch.len() >= BUFFER_MAX || closed.is_some() {
                state.when_room.iter().for_each(|ring| ring());
            }
            if let Some(errno) = closed {
                drop(state);
                on_closed(errno);
                return;
            }
        }
    }
}

/// Writes all bytes. `std::io::stdout` is not used, because its line buffer would split and hold back the guest's
/// output.
fn write_all(stream: Stream, mut bytes: &[u8]) -> rustix::io::Result<()> {
    let fd = match stream {
        Stream::Out => rustix::stdio::stdout(),
        Stream::Err => rustix::stdio::stderr(),
    };
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(0) => return Err(rustix::io::Errno::IO),
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            // Another program has made our terminal non-blocking.
            Err(rustix::io::Errno::AGAIN) => thread::sleep(GATHER),
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
