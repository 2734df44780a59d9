//! The caller's memory, read and written without trusting its pointers.
//!
//! KVM answers EFAULT for a bad pointer. If the VMM's handlers are wrapped ([`faults`]), anykvm does so, too: the copy
//! ends at the fault. Otherwise the kernel is asked for each page before it is touched; a page that another thread
//! unmaps meanwhile is then a fault of the VMM's (DEVIATION).
//!
//! [`faults`]: crate::faults

use std::mem::{MaybeUninit, size_of};

use host::probe::{is_readable, is_writable};
use kvm_bindings::*;

use crate::errno::{Errno, Result};
use crate::faults;

const FAULT: Errno = Errno::new(libc::EFAULT);

/// A C structure for which every bit pattern is a value, so that it may be filled
/// with whatever bytes the caller has.
///
/// # Safety
///
/// The type must be `repr(C)` without references, `bool`, `char` or enums. Padding is allowed:
/// it is only ever copied as part of the whole.
pub(crate) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ty),* $(,)?) => {
        $(
            // SAFETY: a bindgen structure of integers, arrays and unions of those.
            unsafe impl Plain for $name {}
        )*
    };
}

plain!(
    u8,
    u32,
    u64,
    kvm_clear_dirty_log,
    kvm_hyperv_eventfd,
    kvm_clock_data,
    kvm_coalesced_mmio_zone,
    kvm_cpuid_entry,
    kvm_cpuid_entry2,
    kvm_create_device,
    kvm_debugregs,
    kvm_device_attr,
    kvm_dirty_log,
    kvm_enable_cap,
    kvm_fpu,
    kvm_guest_debug,
    kvm_interrupt,
    kvm_ioeventfd,
    kvm_irq_level,
    kvm_irq_routing_entry,
    kvm_irqchip,
    kvm_irqfd,
    kvm_lapic_state,
    kvm_mp_state,
    kvm_msi,
    kvm_msr_entry,
    kvm_msr_filter,
    kvm_one_reg,
    kvm_pit_config,
    kvm_pit_state,
    kvm_pit_state2,
    kvm_pre_fault_memory,
    kvm_regs,
    kvm_reinject_control,
    kvm_sregs,
    kvm_sregs2,
    kvm_tpr_access_ctl,
    kvm_translation,
    kvm_userspace_memory_region,
    kvm_userspace_memory_region2,
    kvm_vapic_addr,
    kvm_vcpu_events,
    kvm_irq_routing_xen_evtchn,
    kvm_xen_hvm_attr,
    kvm_xen_hvm_config,
    kvm_xen_vcpu_attr,
    kvm_x86_mce,
    kvm_xcrs,
);

/// The third argument of `ioctl(2)`: a number or the address of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arg(pub(crate) u64);

impl Arg {
    /// The structure at this address.
    pub(crate) fn read<T: Plain>(self) -> Result<T> {
        let mut value = MaybeUninit::<T>::uninit();
        copy_in(self.0, value.as_mut_ptr().cast(), size_of::<T>())?;
        // SAFETY: `copy_in` filled all bytes, and any bytes are a `T` (`Plain`).
        Ok(unsafe { value.assume_init() })
    }

    /// Stores the structure at this address. Returns 0, the result of such an ioctl.
    pub(crate) fn write<T: Plain>(self, value: &T) -> Result<i32> {
        self.write_bytes(std::ptr::from_ref(value).cast(), size_of::<T>())
    }

    /// Reads `count` elements from this address on. The caller has bounded `count`.
    pub(crate) fn read_list<T: Plain>(self, count: usize) -> Result<Vec<T>> {
        let mut list = Vec::<T>::with_capacity(count);
        copy_in(
            self.0,
            list.as_mut_ptr().cast(),
            size_of::<T>().saturating_mul(count),
        )?;
        // SAFETY: `copy_in` filled `count` elements within the capacity, and any bytes
        // are a `T` (`Plain`).
        unsafe { list.set_len(count) };
        Ok(list)
    }

    /// Fills `words` from this address on.
    pub(crate) fn read_words(self, words: &mut [u64]) -> Result<()> {
        copy_in(self.0, words.as_mut_ptr().cast(), size_of_val(words))
    }

    /// Stores all elements from this address on.
    pub(crate) fn write_list<T: Plain>(self, list: &[T]) -> Result<i32> {
        self.write_bytes(list.as_ptr().cast(), size_of_val(list))
    }

    /// The argument plus `bytes`. It may wrap: an address beyond the end faults anyway.
    #[must_use]
    pub(crate) fn offset(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes as u64))
    }

    fn write_bytes(self, from: *const libc::c_void, len: usize) -> Result<i32> {
        if len == 0 {
            return Ok(0);
        }
        // SAFETY: `from` has `len` readable bytes, by the caller of this method.
        if let Some(done) = unsafe { faults::copy(from.cast(), self.0 as *mut u8, len) } {
            return if done { Ok(0) } else { Err(FAULT) };
        }
        check_pages(self.0, len, is_writable)?;
        // SAFETY: `from` has `len` readable bytes, by the caller of this method; the other range
        // was found writable, and is the VMM's to give.
        unsafe { std::ptr::copy(from.cast::<u8>(), self.0 as *mut u8, len) };
        Ok(0)
    }
}

/// Fills `len` bytes at `to` from the caller's address `from`.
fn copy_in(from: u64, to: *mut libc::c_void, len: usize) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    // SAFETY: `to` has `len` writable bytes, by the caller of this function.
    if let Some(done) = unsafe { faults::copy(from as *const u8, to.cast(), len) } {
        return if done { Ok(()) } else { Err(FAULT) };
    }
    check_pages(from, len, is_readable)?;
    // SAFETY: `to` has `len` writable bytes, by the caller of this function; the other range
    // was found readable.
    unsafe { std::ptr::copy(from as *const u8, to.cast::<u8>(), len) };
    Ok(())
}

/// EFAULT unless `is_good` returns true for one address in each page of the range.
fn check_pages(address: u64, len: usize, is_good: fn(u64) -> bool) -> Result<()> {
    const PAGE: u64 = crate::run_page::PAGE_SIZE as u64;
    let fault = FAULT;
    let end = address.checked_add(len as u64).ok_or(fault)?;
    // A null pointer would mean "no set of signals" to the probe, and not be a fault.
    if address < PAGE {
        return Err(fault);
    }
    let mut at = address;
    while at < end {
        if !is_good(at) {
            return Err(fault);
        }
        at = (at | (PAGE - 1)).checked_add(1).ok_or(fault)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_pointers_copy_both_ways() {
        let mut clock = kvm_clock_data {
            clock: 7,
            ..Default::default()
        };
        let arg = Arg(&raw mut clock as u64);
        let mut copy: kvm_clock_data = arg.read().unwrap();
        assert_eq!(copy.clock, 7);
        copy.clock = 9;
        assert_eq!(arg.write(&copy), Ok(0));
        // SAFETY: `clock` is alive and was last written through its address.
        assert_eq!(unsafe { (&raw const clock).read_volatile() }.clock, 9);
    }

    #[test]
    fn bad_pointers_fault_and_nothing_crashes() {
        let efault = Err(Errno::new(libc::EFAULT));
        for address in [0, 1, 0x1000, 0x7fff_ffff_f000, u64::MAX - 3, 1 << 63] {
            assert_eq!(Arg(address).read::<u64>(), efault, "{address:#x}");
            assert_eq!(
                Arg(address).write(&0u64).map(|_| 0),
                efault.clone(),
                "{address:#x}"
            );
        }
        static READ_ONLY: u64 = 5;
        assert_eq!(Arg(&raw const READ_ONLY as u64).read::<u64>(), Ok(5));
        assert!(Arg(&raw const READ_ONLY as u64).write(&6u64).is_err());
    }

    #[test]
    fn lists_fault_when_their_tail_is_not_mapped() {
        let list = [1u32, 2, 3];
        let arg = Arg(list.as_ptr() as u64);
        assert_eq!(arg.read_list::<u32>(3).unwrap(), list);
        assert_eq!(arg.offset(4).read::<u32>(), Ok(2));
        assert_eq!(arg.read_list::<u32>(0).unwrap(), []);
        let len = 1 << 34;
        assert_eq!(
            Arg(0x1000)
                .read_list::<u8>(len.min(1 << 20))
                .unwrap_err()
                .get(),
            libc::EFAULT
        );
    }
}
