//! Bytes of ours on their way to a port of the guest.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use crate::fields::{Malformed, Reader, Writer};
use crate::lock::lock;

/// A function that rings the doorbell of the port's receive queue.
type Bell = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct State {
    bytes: VecDeque<u8>,
    /// True if nothing comes any more.
    is_ended: bool,
}

/// A queue of bytes.
#[derive(Default)]
pub(crate) struct PortInput {
    state: Mutex<State>,
    taken: Condvar,
    /// The doorbell, once there is a device.
    bell: OnceLock<Bell>,
}

impl PortInput {
    /// Queues bytes. They wait until the guest takes them.
    pub(crate) fn feed(&self, bytes: &[u8]) {
        lock(&self.state).bytes.extend(bytes);
        self.ring();
    }

    /// Ends the input behind what is queued.
    pub(crate) fn end(&self) {
        lock(&self.state).is_ended = true;
        self.ring();
    }

    /// Returns how many bytes wait.
    pub(crate) fn backlog(&self) -> usize {
        lock(&self.state).bytes.len()
    }

    /// Saves the bytes that wait.
    pub(crate) fn save(&self, w: &mut Writer) {
        let state = lock(&self.state);
        let (first, second) = state.bytes.as_slices();
        w.bytes(&[first, second].concat());
        w.flag(state.is_ended);
    }

    /// Loads saved bytes, which come before what is fed from now on.
    pub(crate) fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let mut state = lock(&self.state);
        state.bytes = r.bytes()?.to_vec().into();
        state.is_ended = r.flag()?;
        Ok(())
    }

    /// Waits until at most `max` bytes wait.
    pub(crate) fn wait_for_room(&self, max: usize) {
        let mut state = lock(&self.state);
        while state.bytes.len() > max {
            state = self
                .taken
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns true if nothing comes any more.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.state).is_ended
    }

    /// Returns true if all bytes were taken and nothing comes any more.
    pub(super) fn is_at_end(&self) -> bool {
        let state = lock(&self.state);
        state.is_ended && state.bytes.is_empty()
    }

    /// Gives `sink` up to `max` bytes in one or two pieces. Returns how many.
    pub(super) fn take(
        &self,
        max: usize,
        mut sink: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<usize> {
        let mut state = lock(&self.state);
        let len = state.bytes.len().min(max);
        let (first, second) = state.bytes.as_slices();
        let in_first = len.min(first.len());
        sink(first.get(..in_first).unwrap_or_default())?;
        sink(second.get(..len - in_first).unwrap_or_default())?;
        state.bytes.drain(..len);
        self.taken.notify_all();
        Ok(len)
    }

    /// Connects the input to its device. Only the first call has an effect.
    pub(super) fn connect(&self, bell: Bell) {
        let _ = self.bell.set(bell);
    }

    fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell();
        }
    }
}
