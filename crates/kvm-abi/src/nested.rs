//! KVM_GET_NESTED_STATE and KVM_SET_NESTED_STATE (KVM API document, 4.114 and 4.115) of vCPUs that never run a nested
//! guest.
//!
//! KVM does not distinguish a guest without nested virtualization from one that does not use it: the state is a header
//! without a payload, in the format of the host's vendor. VMMs that save a VM ask for it in any case.
//! a header without a payload, in the format of the host's vendor. VMMs that save a VM ask for it in any case.

use kvm_bindings::*;

use crate::errno::{Errno, Result};
use crate::user_memory::{Arg, Plain};

/// `struct kvm_nested_state` without the payload. KVM_CAP_NESTED_STATE reports its size.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    flags: u16,
    format: u16,
    size: u32,
    /// VMX: the addresses of the VMXON region and of the current VMCS.
    addresses: [u64; 2],
    /// VMX: its first 16 bits are flags of SMM.
    rest: [u64; 13],
}

// SAFETY: integers and arrays of them, without padding.
unsafe impl Plain for Header {}

const SIZE: u32 = size_of::<Header>() as u32;
/// Offset of the size in the structure.
const SIZE_AT: usize = 4;
/// No address.
const NONE: u64 = u64::MAX;

impl Header {
    /// Returns the state that KVM shows outside of nested guests.
    fn idle(is_svm: bool) -> Self {
        let (flags, format, address) = if is_svm {
            (KVM_STATE_NESTED_GIF_SET, KVM_STATE_NESTED_FORMAT_SVM, 0)
        } else {
            (0, KVM_STATE_NESTED_FORMAT_VMX, NONE)
        };
        Self {
            flags: flags as u16,
            format: format as u16,
            size: SIZE,
            addresses: [address; 2],
            rest: [0; 13],
        }
    }

    /// True if a vCPU without nested guests can be in this state.
    fn is_possible(&self, is_svm: bool) -> bool {
        let idle = Self::idle(is_svm);
        let same = self.flags == idle.flags && self.format == idle.format && self.size >= SIZE;
        same && (is_svm || self.addresses == idle.addresses && self.rest[0] & 0xffff == 0)
    }
}

/// KVM_GET_NESTED_STATE. EFAULT; E2BIG, with the size that is needed, if the caller has less room.
pub(crate) fn get(arg: Arg) -> Result<i32> {
    let room: u32 = arg.offset(SIZE_AT).read()?;
    if room < SIZE {
        arg.offset(SIZE_AT).write(&SIZE)?;
        return Err(Errno::new(libc::E2BIG));
    }
    arg.write(&Header::idle(hypervisor::system::is_amd()))
}

/// KVM_SET_NESTED_STATE. EFAULT; EINVAL for a state that is not possible here.
pub(crate) fn set(arg: Arg) -> Result<i32> {
    let header: Header = arg.read()?;
    if header.is_possible(hypervisor::system::is_amd()) {
        Ok(0)
    } else {
        Err(Errno::new(libc::EINVAL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_can_be_written_and_nothing_else() {
        assert_eq!(SIZE, 128);
        for is_svm in [true, false] {
            let idle = Header::idle(is_svm);
            assert!(idle.is_possible(is_svm) && !idle.is_possible(!is_svm));
            let longer = Header { size: 4096, ..idle };
            assert!(longer.is_possible(is_svm));
            let in_guest = idle.flags | KVM_STATE_NESTED_GUEST_MODE as u16;
            for other in [
                Header { size: 127, ..idle },
                Header {
                    flags: in_guest,
                    ..idle
                },
                Header {
                    flags: idle.flags ^ 0x100,
                    ..idle
                },
            ] {
                assert!(!other.is_possible(is_svm), "{other:?}");
            }
        }
        let mut on = Header::idle(false);
        on.addresses[0] = 0x1000;
        assert!(!on.is_possible(false));
    }
}
