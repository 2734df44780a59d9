//! How long a vCPU ran, could have run, slept and was away (Xen's public headers, vcpu.h).

use crate::{Error, Result, vcpu::bus::Bus};

/// RUNSTATE_running.
const RUNNING: u32 = 0;
/// RUNSTATE_runnable.
const RUNNABLE: usize = 1;
/// RUNSTATE_offline.
const OFFLINE: u32 = 3;
/// XEN_RUNSTATE_UPDATE, in the last byte of the time.
const UPDATE: u8 = 0x80;
/// Size of the times in `struct vcpu_runstate_info`.
const TIMES: usize = 40;

/// Times of a vCPU (`u.runstate` of `struct kvm_xen_vcpu_attr`), in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XenRunstate {
    /// RUNSTATE_*; all ones: the present one.
    pub state: u64,
    /// Since when, on kvmclock. It is the sum of all times.
    pub entry_ns: u64,
    /// Time in each state: running, runnable, blocked, offline.
    pub times: [u64; 4],
}

/// The times, and where the guest sees them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Runstate {
    /// Address of `struct vcpu_runstate_info`.
    gpa: Option<u64>,
    state: u32,
    entry_ns: u64,
    times: [u64; 4],
    /// Stolen time that is in the times.
    stolen_ns: u64,
}

impl Runstate {
    /// Counts the time since the last change, of which the scheduler has stolen a part, and enters a state.
    fn enter(&mut self, state: u32, now_ns: u64, stolen_ns: u64) {
        if self.entry_ns == 0 {
            self.state = OFFLINE;
        }
        let mut passed_ns = now_ns.saturating_sub(self.entry_ns);
        if self.state == RUNNING {
            let stolen = stolen_ns.saturating_sub(self.stolen_ns).min(passed_ns);
            passed_ns -= stolen;
            self.times[RUNNABLE] = self.times[RUNNABLE].wrapping_add(stolen);
            self.stolen_ns += stolen;
        } else {
            self.stolen_ns = stolen_ns;
        }
        if let Some(time) = self.times.get_mut(self.state as usize) {
            *time = time.wrapping_add(passed_ns);
        }
        self.state = state;
        self.entry_ns = self.entry_ns.max(now_ns);
    }
}

impl Bus {
    /// Notes that the vCPU runs, if it is Xen's.
    #[inline]
    pub(in crate::vcpu) fn note_running(&mut self) {
        if self.vm.xen.is_on() {
            self.enter_runstate(RUNNING);
        }
    }

    #[cold]
    pub(super) fn enter_runstate(&mut self, state: u32) {
        let (now_ns, _) = self.vm.clock.now();
        let stolen_ns = self.stolen_ns();
        self.xen.runstate.enter(state, now_ns, stolen_ns);
        self.write_runstate();
    }

    /// Writes the times to where the guest sees them. They may be anywhere in memory, in two pages, too.
    fn write_runstate(&self) {
        let state = &self.xen.runstate;
        let Some(gpa) = state.gpa else { return };
        let times_at = self.vm.xen.layout().times();
        let mut bytes = [0; 48];
        bytes[..4].copy_from_slice(&state.state.to_le_bytes());
        let [a, b, c, d] = state.times;
        let times = [state.entry_ns, a, b, c, d].map(u64::to_le_bytes);
        bytes[times_at..times_at + TIMES].copy_from_slice(times.as_flattened());
        let memory = &self.vm.memory;
        // The last byte of the time when the state was entered: the guest reads without a lock.
        let last = times_at + 7;
        let flag_at = gpa.wrapping_add(last as u64);
        let flags = self.vm.xen.flags_updates();
        if flags {
            bytes[last] |= UPDATE;
            let _ = memory.write_gpa(flag_at, 1, bytes[last].into());
        }
        let _ = memory.write_bytes(gpa, &bytes[..times_at + TIMES]);
        if flags {
            let _ = memory.write_gpa(flag_at, 1, (bytes[last] & !UPDATE).into());
        }
    }

    /// Returns the state and the times.
    pub(super) fn runstate(&self) -> XenRunstate {
        let runstate = &self.xen.runstate;
        XenRunstate {
            state: runstate.state.into(),
            entry_ns: runstate.entry_ns,
            times: runstate.times,
        }
    }

    /// Returns where the guest sees them.
    pub(super) const fn runstate_address(&self) -> Option<u64> {
        self.xen.runstate.gpa
    }

    /// Shows them to the guest there. EFAULT, and nowhere, if that is no memory.
    pub(super) fn show_runstate(&mut self, gpa: u64) -> Result<()> {
        let len = self.vm.xen.layout().times() + TIMES;
        let address = self.xen_address(gpa, len);
        let gpa = address.unwrap_or(None);
        self.xen.runstate.gpa = gpa;
        self.count_steal_for_xen(gpa.is_some());
        self.write_runstate();
        address.map(drop)
    }

    /// KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_DATA. EINVAL for times that do not add up, or are in the future.
    pub(super) fn set_runstate(&mut self, data: &XenRunstate) -> Result<()> {
        let state = possible(data.state)?;
        let (now_ns, _) = self.vm.clock.now();
        if !adds_up(data) || now_ns < data.entry_ns {
            return Err(Error::InvalidArgument);
        }
        self.xen.runstate = Runstate {
            gpa: self.xen.runstate.gpa,
            state,
            entry_ns: data.entry_ns,
            times: data.times,
            stolen_ns: self.stolen_ns(),
        };
        Ok(())
    }

    /// KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADJUST. EINVAL as above.
    pub(super) fn adjust_runstate(&mut self, data: &XenRunstate) -> Result<()> {
        let state = match data.state {
            u64::MAX => None,
            state => Some(possible(state)?),
        };
        let (now_ns, _) = self.vm.clock.now();
        let runstate = &mut self.xen.runstate;
        let entry_ns = runstate.entry_ns.wrapping_add(data.entry_ns);
        if !adds_up(data) || now_ns < entry_ns {
            return Err(Error::InvalidArgument);
        }
        runstate.entry_ns = entry_ns;
        for (time, more) in runstate.times.iter_mut().zip(data.times) {
            *time = time.wrapping_add(more);
        }
        match state {
            Some(state) => self.enter_runstate(state),
            None => self.write_runstate(),
        }
        Ok(())
    }
}

/// Returns the state if it is one of Xen's.
pub(super) fn possible(state: u64) -> Result<u32> {
    u32::try_from(state)
        .ok()
        .filter(|state| *state <= OFFLINE)
        .ok_or(Error::InvalidArgument)
}

fn adds_up(data: &XenRunstate) -> bool {
    let sum = data
        .times
        .iter()
        .fold(0, |sum: u64, t| sum.wrapping_add(*t));
    sum == data.entry_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_add_up_to_the_time_of_the_last_change() {
        let mut r = Runstate::default();
        for (state, now_ns, stolen_ns, want) in [
            // Before the first change it is offline.
            (RUNNING, 100, 7, [0, 0, 0, 100]),
            (RUNNING, 150, 17, [40, 10, 0, 100]),
            // More is stolen than has passed: the rest counts later.
            (2, 160, 47, [40, 20, 0, 100]),
            (RUNNING, 200, 60, [40, 20, 40, 100]),
            (OFFLINE, 230, 60, [70, 20, 40, 100]),
            (RUNNING, 300, 90, [70, 20, 40, 170]),
        ] {
            r.enter(state, now_ns, stolen_ns);
            assert_eq!(r.times, want, "{now_ns}");
            assert_eq!(r.times.iter().sum::<u64>(), r.entry_ns);
            assert_eq!(r.state, state);
        }
    }
}
