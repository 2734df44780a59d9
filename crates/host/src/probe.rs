//! Finds out whether memory can be accessed.
//!
//! If faults are caught ([`faults`]), the memory is accessed. Otherwise the kernel is asked, by system calls that most
//! filters of vCPU threads allow. As when a kernel copies, pages are made present, and userfaultfd is served.

use crate::{faults, system};

/// True if the aligned eight bytes that contain the address can be read.
pub fn is_readable(address: u64) -> bool {
    const NO_SUCH_OPERATION: libc::c_int = -1;
    // A null pointer would mean "no set of signals", which is valid.
    if address < crate::PAGE_SIZE as u64 {
        return false;
    }
    if let Some(is) = faults::is_readable(address) {
        return is;
    }
    // SAFETY: the kernel reads a signal set, finds that there is nothing to be done with it,
    // and changes nothing.
    let result = unsafe {
        let arguments = [
            NO_SUCH_OPERATION as usize,
            address as usize & !7,
            0,
            size_of::<u64>(),
        ];
        system::call(libc::SYS_rt_sigprocmask, arguments)
    };
    result.map_or_else(|error| error.raw_os_error() != Some(libc::EFAULT), |_| true)
}

/// True if the aligned four bytes that contain the address can be written: zero is added to them.
pub fn is_writable(address: u64) -> bool {
    if let Some(is) = faults::is_writable(address) {
        return is;
    }
    let word = 0u32;
    // FUTEX_OP_ADD of 0, then FUTEX_OP_CMP_LT with the smallest number, so that no thread is woken.
    const ADD_NOTHING: u32 = 1 << 28 | 2 << 24 | 0x800;
    // SAFETY: the word behind `address` keeps its value, in one atomic step; nobody sleeps on ours.
    let result = unsafe {
        let operation = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
        let word = &raw const word as usize;
        let other = address as usize & !3;
        let arguments = [word, operation as usize, 0, 0, other, ADD_NOTHING as usize];
        system::call(libc::SYS_futex, arguments)
    };
    result.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_what_they_are_mapped_as() {
        static CONSTANT: u64 = 5;
        let mapping = crate::Mapping::anonymous(crate::PAGE_SIZE).unwrap();
        let hole = crate::Mapping::reserve(crate::PAGE_SIZE).unwrap();
        for (address, readable, writable) in [
            (mapping.as_ptr() as u64, true, true),
            (mapping.as_ptr() as u64 + 4095, true, true),
            (&raw const CONSTANT as u64, true, false),
            (hole.as_ptr() as u64 + 7, false, false),
            (0, false, false),
            (0x7fff_ffff_f000, false, false),
            (u64::MAX, false, false),
        ] {
            assert_eq!(is_readable(address), readable, "{address:#x}");
            assert_eq!(is_writable(address), writable, "{address:#x}");
        }
        assert_eq!(CONSTANT, 5);
    }
}
