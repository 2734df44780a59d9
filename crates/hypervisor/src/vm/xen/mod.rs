//! Xen's interface, for VMMs that play Xen (KVM API document, KVM_XEN_HVM_CONFIG and KVM_XEN_HVM_SET_ATTR): the guest has a
//! page of hypercalls, a page that it shares with the hypervisor, and event channels. The VMM answers what is not done here.

pub(crate) mod events;

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
};

use kvm_bindings::*;

use self::events::Ports;
use super::{Vm, VmState};
use crate::{
    Error, Result,
    limits::XEN_CONFIG,
    shared::{NOWHERE, request, somewhere},
};

/// Size in bytes of a page of calls.
pub(crate) const PAGE: usize = 4096;
/// KVM_IRQ_ROUTING_XEN_EVTCHN_PRIO_2LEVEL: the priority of all events.
pub const XEN_PRIORITY: u32 = u32::MAX;
/// Lowest vector that an upcall may have; below are those of exceptions.
pub(crate) const FIRST_VECTOR: u8 = 0x10;

/// What KVM_XEN_HVM_CONFIG and KVM_XEN_HVM_SET_ATTR have set.
#[derive(Debug)]
pub(crate) struct Xen {
    /// The MSR by which the guest has a page written; 0: none.
    msr: AtomicU32,
    /// KVM_XEN_HVM_CONFIG_*.
    flags: AtomicU32,
    /// The VMM's own pages, for 32-bit guests and for 64-bit ones.
    pages: Mutex<[Vec<u8>; 2]>,
    is_long: AtomicBool,
    /// Address of the page that the guest shares, or [`NOWHERE`].
    shared_info: AtomicU64,
    /// The vector by which any vCPU is told of its events; 0: none.
    upcall_vector: AtomicU8,
    /// What XENVER_version gives; 0: the VMM answers.
    version: AtomicU32,
    /// Guests are told while their run state changes.
    flags_updates: AtomicBool,
    ports: Ports,
}

impl Default for Xen {
    fn default() -> Self {
        Self {
            msr: AtomicU32::default(),
            flags: AtomicU32::default(),
            pages: Mutex::default(),
            is_long: AtomicBool::default(),
            shared_info: AtomicU64::new(NOWHERE),
            upcall_vector: AtomicU8::default(),
            version: AtomicU32::default(),
            flags_updates: AtomicBool::default(),
            ports: Ports::default(),
        }
    }
}

/// An attribute of KVM_XEN_HVM_SET_ATTR and KVM_XEN_HVM_GET_ATTR (KVM_XEN_ATTR_TYPE_*).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XenAttr {
    /// The guest is a 64-bit one.
    LongMode(bool),
    /// Number of the page that the guest shares; all ones: none.
    SharedInfo(u64),
    /// The vector by which any vCPU is told of its events; 0: none.
    UpcallVector(u8),
    /// Where an event goes that the guest sends. It can only be set.
    Event(XenPort),
    /// What XENVER_version gives; 0: the VMM answers.
    Version(u32),
    /// XEN_RUNSTATE_UPDATE is set while a run state changes.
    RunstateUpdateFlag(bool),
}

/// Where an event goes that the guest sends (`u.evtchn` of `struct kvm_xen_hvm_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XenPort {
    /// The port that the guest names.
    pub send_port: u32,
    /// EVTCHNSTAT_*.
    pub kind: u32,
    /// KVM_XEN_EVTCHN_*.
    pub flags: u32,
    /// The port that is raised; 0: an eventfd is signalled.
    pub port: u32,
    /// Id of the vCPU that it is raised on.
    pub vcpu: u32,
    /// KVM_IRQ_ROUTING_XEN_EVTCHN_PRIO_2LEVEL.
    pub priority: u32,
    /// The eventfd.
    pub fd: i32,
}

/// Offsets in Xen's structures, which depend on the width of the guest's words (Xen's public headers, xen.h).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    is_long: bool,
}

/// Offset of the pending bits in `struct shared_info`, behind 32 of `struct vcpu_info`.
const PENDING: u64 = 0x800;

impl Layout {
    /// Number of ports, and of bits in each of the two bitmaps.
    pub(crate) const fn ports(self) -> u32 {
        if self.is_long { 4096 } else { 1024 }
    }
    /// Number of ports that one bit of a vCPU's selector stands for.
    pub(crate) const fn ports_of_word(self) -> u32 {
        if self.is_long { 64 } else { 32 }
    }
    const fn mask(self) -> u64 {
        PENDING + self.ports() as u64 / 8
    }
    /// `struct pvclock_wall_clock`.
    const fn wall_clock(self) -> u64 {
        PENDING + self.ports() as u64 / 4
    }
    /// The upper half of the wall clock's seconds.
    const fn wall_clock_high(self) -> u64 {
        self.wall_clock() + if self.is_long { 0xc } else { 0x24 }
    }
    /// Offset of the selector in `struct vcpu_info`.
    pub(crate) const fn selector(self) -> u64 {
        if self.is_long { 8 } else { 4 }
    }
    /// Offset of the times in `struct vcpu_runstate_info`.
    pub(crate) const fn times(self) -> usize {
        if self.is_long { 8 } else { 4 }
    }
}

impl Xen {
    /// Returns true if the MSR is the one that writes a page.
    #[inline]
    pub(crate) fn is_msr(&self, index: u32) -> bool {
        index != 0 && self.msr.load(Ordering::Relaxed) == index
    }
    /// Returns true if the guest is Xen's: there is an MSR that writes a page.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.msr.load(Ordering::Relaxed) != 0
    }
    fn has_flag(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }
    /// Returns true if VMCALL and VMMCALL are Xen's hypercalls.
    #[inline]
    pub(crate) fn has_hypercalls(&self) -> bool {
        self.has_flag(KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL)
    }
    /// Returns true if the VMM sends all events by calls, so that waiting for one is done here.
    pub(crate) fn has_all_events(&self) -> bool {
        self.has_flag(KVM_XEN_HVM_CONFIG_EVTCHN_SEND)
    }
    /// Returns true if the guest is not to take the clock for stable.
    pub(crate) fn has_unstable_clock(&self) -> bool {
        self.has_flag(KVM_XEN_HVM_CONFIG_PVCLOCK_TSC_UNSTABLE)
    }
    /// Returns true if guests are told while their run state changes.
    pub(crate) fn flags_updates(&self) -> bool {
        self.flags_updates.load(Ordering::Relaxed)
    }
    /// Returns the vector by which any vCPU is told of its events; 0: none.
    #[inline]
    pub(crate) fn upcall_vector(&self) -> u8 {
        self.upcall_vector.load(Ordering::Relaxed)
    }
    /// Returns what XENVER_version gives, unless the VMM answers.
    pub(crate) fn version(&self) -> Option<u32> {
        Some(self.version.load(Ordering::Relaxed)).filter(|version| *version != 0)
    }
    pub(crate) fn layout(&self) -> Layout {
        Layout {
            is_long: self.is_long.load(Ordering::Relaxed),
        }
    }
    fn shared_info(&self) -> Option<u64> {
        somewhere(self.shared_info.load(Ordering::Acquire))
    }
    /// Returns the VMM's page `n`, for 64-bit guests if `is_long`.
    pub(crate) fn page(&self, is_long: bool, n: usize) -> Option<Vec<u8>> {
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let [short, long] = &*pages;
        let pages = if is_long { long } else { short };
        pages.chunks_exact(PAGE).nth(n).map(<[u8]>::to_vec)
    }
}

impl VmState {
    /// Sets the width of the guest's words. The wall clock is at another place then.
    pub(crate) fn set_xen_long_mode(&self, is_long: bool) {
        self.xen.is_long.store(is_long, Ordering::Relaxed);
        self.write_xen_wall_clock();
    }

    /// Writes the wall time at which kvmclock was zero into the page that the guest shares.
    fn write_xen_wall_clock(&self) {
        if let Some(page) = self.xen.shared_info() {
            let layout = self.xen.layout();
            let high = page.wrapping_add(layout.wall_clock_high());
            let clock = page.wrapping_add(layout.wall_clock());
            self.write_wall_clock(clock, Some(high));
        }
    }

    /// Sets the page that the guest shares. EFAULT if it is no memory.
    fn set_shared_info(&self, gfn: u64) -> Result<()> {
        let xen = &self.xen;
        if gfn == NOWHERE {
            xen.shared_info.store(NOWHERE, Ordering::Release);
            return Ok(());
        }
        let gpa = gfn.checked_mul(PAGE as u64).ok_or(Error::Fault)?;
        if !self.is_writable(gpa, PAGE) {
            return Err(Error::Fault);
        }
        xen.shared_info.store(gpa, Ordering::Release);
        self.write_xen_wall_clock();
        self.request_all(request::CLOCK);
        Ok(())
    }

    /// True if these bytes are memory that the guest may write.
    pub(crate) fn is_writable(&self, gpa: u64, len: usize) -> bool {
        let last = gpa.wrapping_add(len as u64 - 1);
        let is = |gpa| self.memory.rmw_gpa(gpa, 1, |byte| byte).is_some();
        is(gpa) && is(last)
    }
}

impl Vm {
    /// KVM_XEN_HVM_CONFIG. `pages` are those that `config` names, for 32-bit guests and for 64-bit ones. EINVAL for unknown
    /// flags, or for pages where VMCALL and VMMCALL are intercepted.
    ///
    /// DEVIATION: the pages are read now; KVM reads them when the guest writes the MSR.
    pub fn set_xen_hvm_config(
        &self,
        config: &kvm_xen_hvm_config,
        pages: [Vec<u8>; 2],
    ) -> Result<()> {
        let intercepts = config.flags & KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL != 0;
        let has_pages = config.blob_addr_32 | config.blob_addr_64 != 0
            || config.blob_size_32 | config.blob_size_64 != 0;
        if config.flags & !XEN_CONFIG != 0 || intercepts && has_pages {
            return Err(Error::InvalidArgument);
        }
        let xen = &self.state.xen;
        *xen.pages.lock().unwrap_or_else(PoisonError::into_inner) = pages;
        xen.flags.store(config.flags, Ordering::Relaxed);
        xen.msr.store(config.msr, Ordering::Relaxed);
        self.state.request_all(request::CLOCK);
        Ok(())
    }

    /// KVM_XEN_HVM_SET_ATTR. EINVAL for the vector of an exception, EFAULT for a page that is no memory, and for
    /// [`XenAttr::Event`] as [`Self::set_xen_port`].
    ///
    /// DEVIATION: Xen's pages are named by their guest-physical addresses alone
    /// (KVM_XEN_HVM_CONFIG_SHARED_INFO_HVA is not offered).
    pub fn set_xen_attr(&self, attr: &XenAttr) -> Result<()> {
        let xen = &self.state.xen;
        match *attr {
            XenAttr::LongMode(is_long) => self.state.set_xen_long_mode(is_long),
            XenAttr::SharedInfo(gfn) => self.state.set_shared_info(gfn)?,
            XenAttr::UpcallVector(1..FIRST_VECTOR) => return Err(Error::InvalidArgument),
            XenAttr::UpcallVector(vector) => {
                xen.upcall_vector.store(vector, Ordering::Relaxed);
                self.state.request_all(request::EVENT);
            }
            XenAttr::Event(port) => self.set_xen_port(&port)?,
            XenAttr::Version(version) => xen.version.store(version, Ordering::Relaxed),
            XenAttr::RunstateUpdateFlag(on) => xen.flags_updates.store(on, Ordering::Relaxed),
        }
        Ok(())
    }

    /// KVM_XEN_HVM_GET_ATTR. ENOENT for a type that is not there, and for KVM_XEN_ATTR_TYPE_EVTCHN.
    pub fn xen_attr(&self, kind: u32) -> Result<XenAttr> {
        let xen = &self.state.xen;
        Ok(match kind {
            KVM_XEN_ATTR_TYPE_LONG_MODE => XenAttr::LongMode(xen.layout().is_long),
            KVM_XEN_ATTR_TYPE_SHARED_INFO => {
                let gfn = xen.shared_info().map(|gpa| gpa / PAGE as u64);
                XenAttr::SharedInfo(gfn.unwrap_or(NOWHERE))
            }
            KVM_XEN_ATTR_TYPE_UPCALL_VECTOR => XenAttr::UpcallVector(xen.upcall_vector()),
            KVM_XEN_ATTR_TYPE_XEN_VERSION => XenAttr::Version(xen.version().unwrap_or(0)),
            KVM_XEN_ATTR_TYPE_RUNSTATE_UPDATE_FLAG => {
                XenAttr::RunstateUpdateFlag(xen.flags_updates())
            }
            _ => return Err(Error::NotFound),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_xens_headers() {
        let places = |is_long| {
            let l = Layout { is_long };
            [
                l.mask(),
                l.wall_clock(),
                l.wall_clock_high(),
                l.selector(),
                l.times() as u64,
            ]
        };
        assert_eq!(places(true), [0xa00, 0xc00, 0xc0c, 8, 8]);
        assert_eq!(places(false), [0x880, 0x900, 0x924, 4, 4]);
    }
}
