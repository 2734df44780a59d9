//! Where vCPUs wait while the machine stands still, having left their state.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anykvm_ioctls::VcpuStopper;

use crate::error::BootError;
use crate::lock::lock;

/// How often those that are still in the guest are asked again, and those that wait look whether the machine ends.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Default)]
struct State {
    /// How often it was closed.
    round: u64,
    stoppers: Vec<VcpuStopper>,
    /// By vCPU: what it has left, while it waits.
    saved: Vec<Option<Result<Vec<u8>, BootError>>>,
    /// By vCPU: nanoseconds that dirty logging had taken when it came here last.
    stalls: Vec<u64>,
}

/// All vCPUs go through it before they enter the guest.
#[derive(Default)]
pub(crate) struct Gate {
    is_closed: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    /// Another vCPU, in the order of their numbers.
    pub(crate) fn add(&self, stopper: VcpuStopper) {
        let mut state = lock(&self.state);
        state.stoppers.push(stopper);
        state.saved.push(None);
        state.stalls.push(0);
    }

    /// Whether vCPUs are to wait. Cheap: for every exit.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// What dirty logging had taken of the vCPUs' time when they came here last.
    pub(crate) fn stalled(&self) -> Duration {
        Duration::from_nanos(lock(&self.state).stalls.iter().sum())
    }

    /// vCPU `id` waits, having left `saved`, until the gate is opened or `is_ending`. Dirty logging has taken `stall` nanoseconds of
    /// its time so far.
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
        // Closed once more, it asks for the state once more.
        while self.is_closed() && state.round == round && !is_ending.load(Ordering::SeqCst) {
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes it, and has all else stand still by `stand_still`; returns what the vCPUs have left once nothing moves any more.
    ///
    /// States are read twice. An interrupt from a vCPU or a device that still moves may reach a vCPU that has left its state
    /// already, and would be in nobody's.
    ///
    /// # Errors
    /// A state that could not be had: the gate is open again.
    pub(crate) fn close(&self, stand_still: impl FnOnce()) -> Result<Vec<Vec<u8>>, BootError> {
        self.gather()?;
        stand_still();
        self.gather()
    }

    /// Closes it, if it is not; returns when all vCPUs wait, with what they have left since.
    fn gather(&self) -> Result<Vec<Vec<u8>>, BootError> {
        let mut state = lock(&self.state);
        // Also those that wait already leave their state once more.
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
            // Those that wait keep their place.
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

    /// The vCPUs go on.
    pub(crate) fn open(&self) {
        let mut state = lock(&self.state);
        state.saved.iter_mut().for_each(|saved| *saved = None);
        self.is_closed.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    /// Nothing keeps a vCPU any more.
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

    /// The second vCPU's last act is an interrupt for the first one, which waits already; a device's is one for both.
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
