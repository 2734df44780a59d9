//! Xen's hypercalls, for VMMs that play Xen (KVM API document, KVM_XEN_HVM_CONFIG): the guest has a page of calls written
//! by an MSR, and the VMM answers them.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

use kvm_bindings::{KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL, kvm_xen_hvm_config};

use super::Vm;
use crate::{Error, Result};

/// Size in bytes of a page of calls.
pub(crate) const PAGE: usize = 4096;

/// What KVM_XEN_HVM_CONFIG has set.
#[derive(Debug, Default)]
pub(crate) struct Xen {
    /// The MSR by which the guest has a page written; 0: none.
    msr: AtomicU32,
    /// VMCALL and VMMCALL are Xen's hypercalls.
    intercepts: AtomicBool,
    /// The VMM's own pages, for 32-bit guests and for 64-bit ones.
    pages: Mutex<[Vec<u8>; 2]>,
}

impl Xen {
    /// Returns true if the MSR is the one that writes a page.
    #[inline]
    pub(crate) fn is_msr(&self, index: u32) -> bool {
        index != 0 && self.msr.load(Ordering::Relaxed) == index
    }
    /// Returns true if VMCALL and VMMCALL are Xen's hypercalls.
    #[inline]
    pub(crate) fn has_hypercalls(&self) -> bool {
        self.intercepts.load(Ordering::Relaxed)
    }
    /// Returns the VMM's page `n`, for 64-bit guests if `is_long`.
    pub(crate) fn page(&self, is_long: bool, n: usize) -> Option<Vec<u8>> {
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let [short, long] = &*pages;
        let pages = if is_long { long } else { short };
        pages.chunks_exact(PAGE).nth(n).map(<[u8]>::to_vec)
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
        if config.flags & !KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL != 0 || intercepts && has_pages {
            return Err(Error::InvalidArgument);
        }
        let xen = &self.state.xen;
        *xen.pages.lock().unwrap_or_else(PoisonError::into_inner) = pages;
        xen.intercepts.store(intercepts, Ordering::Relaxed);
        xen.msr.store(config.msr, Ordering::Relaxed);
        Ok(())
    }
}
