//! The gate, where vCPUs wait while the machine stands still, after they have left their state.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anykvm_ioctls::VcpuStopper;

use crate::error::BootError;
use crate::lock::lock;

/// How often vCPUs that are still in the guest are kicked again, and vCPUs that wait look whether the machine ends.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Default)]
struct State {
    /// How often the gate was closed.
    round: u64,
    stoppers: Vec<VcpuStopper>,
    /// By vCPU, the state that it has left, while it waits.
    saved: Vec<Option<Result<Vec<u8>, BootError>>>,
    /// By vCPU, nanoseconds that dirty logging had taken when the vCPU came to the gate last.
    stalls: Vec<u64>,
}

/// The gate that all vCPUs pass before they enter the guest.
#[derive(Default)]
pub(crate) struct Gate {
    is_closed: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    /// Adds a vCPU, in the order of their numbers.
    pub(crate) fn add(&self, stopper: VcpuStopper) {
        let mut state = lock(&self.state);
        state.stoppers.push(stopper);
        state.saved.push(None);
        state.stalls.push(0);
    }

    /// Returns true if vCPUs have to wait. It is cheap, as it is called for every exit.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Returns what dirty logging had taken of the vCPUs' time when they came to the gate last.
    pub(crate) fn stalled(&self) -> Duration {
        Duration::from_nanos(lock(&self.state).stalls.iter().sum())
    }

    /// Makes vCPU `id` wait, which has left `saved`, until the gate is opened or `is_ending`. Dirty logging has taken
    /// `stall` nanoseconds of its time so far.
    pub(super) fn wait(
        &self,
        id: u8,
        saved: Result<Vec<u8>, BootError>,
        stall: u64,
        is_ending: &AtomicBool,
    ) {
        let mut state = lock(&self.state);
        if !self.is_closed() {
            return;
        }
        let round = state.round;
        if let Some(place) = state.saved.get_mut(usize::from(id)) {
            *place = Some(saved);
        }
        if let Some(place) = state.stalls.get_mut(usize::from(id)) {
            *place = stall;
        }
        self.changed.notify_all();
        // If the gate is closed once more, this returns and the vCPU leaves its state once more.
        while self.is_closed() && state.round == round && !is_ending.load(Ordering::SeqCst) {
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes the gate, and calls `stand_still` to make all else stand still. Returns the states that the vCPUs have
    /// left once nothing moves any more.
    ///
    /// States are read twice. An interrupt from a vCPU or a device that still moves may reach a vCPU that has left its
    /// state already, and the first state would not have it.
    ///
    /// # Errors
    /// If a vCPU's state cannot be read. The gate is open again then.
    pub(crate) fn close(&self, stand_still: impl FnOnce()) -> Result<Vec<Vec<u8>>, BootError> {
        self.gather()?;
        stand_still();
        self.gather()
    }

    /// Closes the gate, if it is open. Returns the states that the vCPUs have left since, when all of them wait.
    fn gather(&self) -> Result<Vec<Vec<u8>>, BootError> {
        let mut state = lock(&self.state);
        // vCPUs that wait already leave their state once more, too.
        state.saved.iter_mut().for_each(|saved| *saved = None);
        state.round += 1;
        self.is_closed.store(true, Ordering::Release);
        loop {
            if state.stoppers.is_empty() {
                drop(state);
                self.open();
                return Err(BootError::Usage("the machine ends".into()));
            }
            let waiting = state.saved.iter().filter(|saved| saved.is_some()).count();
            if waiting == state.saved.len() {
                break;
            }
            for (stopper, _) in state
                .stoppers
                .iter()
                .zip(&state.saved)
                .filter(|(_, saved)| saved.is_none())
            {
                stopper.kick();
            }
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut all = Vec::new();
        let mut failed = None;
        for saved in state.saved.iter_mut().flatten() {
            // The entries of vCPUs that wait stay in place.
            match std::mem::replace(saved, Ok(Vec::new())) {
                Ok(bytes) => all.push(bytes),
                Err(error) => failed = Some(error),
            }
        }
        drop(state);
        match failed {
            Some(error) => {
                self.open();
                Err(error)
            }
            None => Ok(all),
        }
    }

    /// Opens the gate: the vCPUs go on.
    pub(crate) fn open(&self) {
        let mut state = lock(&self.state);
        state.saved.iter_mut().for_each(|saved| *saved = None);
        self.is_closed.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    /// Drops what keeps vCPUs alive.
    pub(crate) fn clear(&self) {
        lock(&self.state).stoppers.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;
    use std::thread;

    use anykvm_ioctls::Kvm;

    use super::*;

    /// The second vCPU's last act is an interrupt for the first one, which waits already; a device's is an interrupt
    /// for both.
    #[test]
    fn states_are_those_after_everything_has_stopped() {
        let gate = Gate::default();
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        let vcpus = [0, 1].map(|id| vm.create_vcpu(id).unwrap());
        vcpus
            .iter()
            .for_each(|vcpu| gate.add(vcpu.stopper().unwrap()));
        let interrupts = [AtomicU8::new(0), AtomicU8::new(0)];
        let is_ending = AtomicBool::new(false);
        thread::scope(|threads| {
            for id in [0, 1] {
                let (gate, interrupts, is_ending) = (&gate, &interrupts, &is_ending);
                threads.spawn(move || {
                    while !gate.is_closed() {
                        thread::yield_now();
                    }
                    if id == 1 {
                        while lock(&gate.state).saved[0].is_none() {
                            thread::yield_now();
                        }
                        interrupts[0].fetch_add(1, Ordering::SeqCst);
                    }
                    while !is_ending.load(Ordering::SeqCst) {
                        let state = interrupts[usize::from(id)].load(Ordering::SeqCst);
                        gate.wait(id, Ok(vec![state]), 0, is_ending);
                    }
                });
            }
            let all = gate.close(|| {
                for of in &interrupts {
                    of.fetch_add(10, Ordering::SeqCst);
                }
            });
            is_ending.store(true, Ordering::SeqCst);
            gate.open();
            assert_eq!(all.unwrap(), [[11], [10]]);
        });
    }
}
