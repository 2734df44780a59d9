//! How long a vCPU ran, could have run, slept and was away (Xen's public headers, vcpu.h), and the attributes of a vCPU.

use kvm_bindings::*;

use crate::{
    Error, Result,
    limits::MAX_VCPUS,
    shared::{NOWHERE, request},
    vcpu::{Vcpu, bus::Bus},
    vm::XEN_PRIORITY,
};

/// RUNSTATE_running.
const RUNNING: u32 = 0;
/// RUNSTATE_runnable.
const RUNNABLE: usize = 1;
/// RUNSTATE_offline.
const OFFLINE: u32 = 3;
/// XEN_RUNSTATE_UPDATE, in the last byte of the time.
const UPDATE: u8 = 0x80;
/// Size of `struct vcpu_info`.
const VCPU_INFO: usize = 64;
/// Size of a `struct pvclock_vcpu_time_info`.
const TIME_INFO: usize = 32;

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
#[derive(Clone, Copy, Debug)]
pub(super) struct Runstate {
    /// Address of `struct vcpu_runstate_info`, or [`NOWHERE`].
    gpa: u64,
    state: u32,
    entry_ns: u64,
    times: [u64; 4],
    /// Stolen time that is in the times.
    stolen_ns: u64,
}

impl Default for Runstate {
    fn default() -> Self {
        Self {
            gpa: NOWHERE,
            state: RUNNING,
            entry_ns: 0,
            times: [0; 4],
            stolen_ns: 0,
        }
    }
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

/// An attribute of KVM_XEN_VCPU_SET_ATTR and KVM_XEN_VCPU_GET_ATTR (KVM_XEN_VCPU_ATTR_TYPE_*). Addresses are
/// guest-physical; all ones: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XenVcpuAttr {
    /// Address of `struct vcpu_info`.
    VcpuInfo(u64),
    /// Address of a second `struct pvclock_vcpu_time_info`.
    TimeInfo(u64),
    /// Address of `struct vcpu_runstate_info`.
    RunstateAddr(u64),
    /// The present state.
    RunstateCurrent(u64),
    /// State and times.
    RunstateData(XenRunstate),
    /// A state, and what is to be added to the times. It can only be set.
    RunstateAdjust(XenRunstate),
    /// The vCPU's number among Xen's.
    VcpuId(u32),
    /// The timer.
    Timer {
        /// The port; 0: there is no timer.
        port: u32,
        /// [`XEN_PRIORITY`].
        priority: u32,
        /// When it fires, on kvmclock, in nanoseconds; 0: it does not run.
        expires_ns: u64,
    },
    /// The vector that the vCPU's own LAPIC gets for events; 0: none.
    UpcallVector(u8),
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
    fn enter_runstate(&mut self, state: u32) {
        let (now_ns, _) = self.vm.clock.now();
        let stolen_ns = self.stolen_ns();
        self.xen.runstate.enter(state, now_ns, stolen_ns);
        self.write_runstate();
    }

    /// Writes the times to where the guest sees them. They may be anywhere in memory, in two pages, too.
    fn write_runstate(&self) {
        let state = &self.xen.runstate;
        if state.gpa == NOWHERE {
            return;
        }
        let times_at = self.vm.xen.layout().times();
        let mut bytes = [0; 48];
        bytes[..4].copy_from_slice(&state.state.to_le_bytes());
        let [a, b, c, d] = state.times;
        let times = [state.entry_ns, a, b, c, d].map(u64::to_le_bytes);
        bytes[times_at..times_at + 40].copy_from_slice(times.as_flattened());
        let memory = &self.vm.memory;
        // The last byte of the time when the state was entered: the guest reads without a lock.
        let last = times_at + 7;
        let flag_at = state.gpa.wrapping_add(last as u64);
        let flags = self.vm.xen.flags_updates();
        if flags {
            bytes[last] |= UPDATE;
            let _ = memory.write_gpa(flag_at, 1, bytes[last].into());
        }
        let _ = memory.write_bytes(state.gpa, &bytes[..times_at + 40]);
        if flags {
            let _ = memory.write_gpa(flag_at, 1, (bytes[last] & !UPDATE).into());
        }
    }

    /// Returns the address if it is memory, and none if it is all ones. EFAULT otherwise.
    fn xen_address(&self, gpa: u64, len: usize) -> Result<u64> {
        if gpa == NOWHERE || self.vm.is_writable(gpa, len) {
            Ok(gpa)
        } else {
            Err(Error::Fault)
        }
    }

    fn set_xen_attr(&mut self, attr: &XenVcpuAttr) -> Result<()> {
        match *attr {
            XenVcpuAttr::VcpuInfo(gpa) => {
                if gpa != NOWHERE && !gpa.is_multiple_of(4) {
                    return Err(Error::NoSuchDevice);
                }
                let gpa = self.xen_address(gpa, VCPU_INFO)?;
                self.shared.xen.set_info(gpa);
                self.shared.request(request::CLOCK | request::EVENT);
            }
            XenVcpuAttr::TimeInfo(gpa) => {
                self.xen.time_info = self.xen_address(gpa, TIME_INFO)?;
                self.shared.request(request::CLOCK);
            }
            XenVcpuAttr::RunstateAddr(gpa) => {
                let len = self.vm.xen.layout().times() + 40;
                let address = self.xen_address(gpa, len);
                self.xen.runstate.gpa = *address.as_ref().unwrap_or(&NOWHERE);
                self.count_steal_for_xen(self.xen.runstate.gpa != NOWHERE);
                address?;
                self.write_runstate();
            }
            XenVcpuAttr::RunstateCurrent(state) => self.enter_runstate(possible(state)?),
            XenVcpuAttr::RunstateData(data) => self.set_runstate(&data)?,
            XenVcpuAttr::RunstateAdjust(data) => self.adjust_runstate(&data)?,
            XenVcpuAttr::VcpuId(id) if id >= MAX_VCPUS as u32 => {
                return Err(Error::InvalidArgument);
            }
            XenVcpuAttr::VcpuId(id) => self.xen.id = id,
            XenVcpuAttr::Timer {
                port,
                priority,
                expires_ns,
            } => {
                if port != 0 && priority != XEN_PRIORITY {
                    return Err(Error::InvalidArgument);
                }
                self.set_xen_timer(port, expires_ns);
            }
            XenVcpuAttr::UpcallVector(vector) => self.set_upcall_vector(vector)?,
        }
        Ok(())
    }

    fn set_runstate(&mut self, data: &XenRunstate) -> Result<()> {
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

    fn adjust_runstate(&mut self, data: &XenRunstate) -> Result<()> {
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

    fn xen_attr(&mut self, kind: u32) -> Result<XenVcpuAttr> {
        let runstate = &self.xen.runstate;
        Ok(match kind {
            KVM_XEN_VCPU_ATTR_TYPE_VCPU_INFO => {
                XenVcpuAttr::VcpuInfo(self.shared.xen.info().unwrap_or(NOWHERE))
            }
            KVM_XEN_VCPU_ATTR_TYPE_VCPU_TIME_INFO => XenVcpuAttr::TimeInfo(self.xen.time_info),
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADDR if runstate.gpa != NOWHERE => {
                XenVcpuAttr::RunstateAddr(runstate.gpa)
            }
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_CURRENT => {
                XenVcpuAttr::RunstateCurrent(runstate.state.into())
            }
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_DATA => XenVcpuAttr::RunstateData(XenRunstate {
                state: runstate.state.into(),
                entry_ns: runstate.entry_ns,
                times: runstate.times,
            }),
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADJUST => return Err(Error::InvalidArgument),
            KVM_XEN_VCPU_ATTR_TYPE_VCPU_ID => XenVcpuAttr::VcpuId(self.xen.id),
            KVM_XEN_VCPU_ATTR_TYPE_TIMER => {
                let (port, expires_ns) = self.xen_timer();
                XenVcpuAttr::Timer {
                    port,
                    priority: XEN_PRIORITY,
                    expires_ns,
                }
            }
            KVM_XEN_VCPU_ATTR_TYPE_UPCALL_VECTOR => {
                let vector = &self.shared.xen.vector;
                XenVcpuAttr::UpcallVector(vector.load(std::sync::atomic::Ordering::Relaxed))
            }
            _ => return Err(Error::NotFound),
        })
    }
}

/// Returns the state if it is one of Xen's.
fn possible(state: u64) -> Result<u32> {
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

impl Vcpu {
    /// KVM_XEN_VCPU_SET_ATTR. EINVAL for a value that does not exist or times that do not add up, ENXIO for an address that is
    /// not aligned, EFAULT for one that is no memory.
    pub fn set_xen_attr(&self, attr: &XenVcpuAttr) -> Result<()> {
        self.lock().bus.set_xen_attr(attr)
    }
    /// KVM_XEN_VCPU_GET_ATTR. ENOENT for a type that does not exist and for the address of times that has not been set, EINVAL
    /// for what can only be set.
    pub fn xen_attr(&self, kind: u32) -> Result<XenVcpuAttr> {
        self.lock().bus.xen_attr(kind)
    }
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
