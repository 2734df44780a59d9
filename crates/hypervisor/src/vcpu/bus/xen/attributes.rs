//! The attributes of a vCPU that the VMM sets and saves.

use std::sync::atomic::Ordering;

use kvm_bindings::*;

use super::{XenRunstate, runstate::possible};
use crate::{
    Error, Result,
    limits::MAX_VCPUS,
    shared::{NOWHERE, request, somewhere},
    vcpu::{Vcpu, bus::Bus},
    vm::XEN_PRIORITY,
};

/// Size of `struct vcpu_info`.
const VCPU_INFO: usize = 64;
/// Size of a `struct pvclock_vcpu_time_info`.
const TIME_INFO: usize = 32;

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
    /// Returns the address if it is memory, and none if it is all ones. EFAULT otherwise.
    pub(super) fn xen_address(&self, gpa: u64, len: usize) -> Result<Option<u64>> {
        let gpa = somewhere(gpa);
        match gpa {
            Some(gpa) if !self.vm.is_writable(gpa, len) => Err(Error::Fault),
            _ => Ok(gpa),
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
            XenVcpuAttr::RunstateAddr(gpa) => self.show_runstate(gpa)?,
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

    fn xen_attr(&mut self, kind: u32) -> Result<XenVcpuAttr> {
        Ok(match kind {
            KVM_XEN_VCPU_ATTR_TYPE_VCPU_INFO => {
                XenVcpuAttr::VcpuInfo(self.shared.xen.info().unwrap_or(NOWHERE))
            }
            KVM_XEN_VCPU_ATTR_TYPE_VCPU_TIME_INFO => {
                XenVcpuAttr::TimeInfo(self.xen.time_info.unwrap_or(NOWHERE))
            }
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_ADDR => {
                XenVcpuAttr::RunstateAddr(self.runstate_address().ok_or(Error::NotFound)?)
            }
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_CURRENT => {
                XenVcpuAttr::RunstateCurrent(self.runstate().state)
            }
            KVM_XEN_VCPU_ATTR_TYPE_RUNSTATE_DATA => XenVcpuAttr::RunstateData(self.runstate()),
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
                XenVcpuAttr::UpcallVector(vector.load(Ordering::Relaxed))
            }
            _ => return Err(Error::NotFound),
        })
    }
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
