//! The decoder as a VMM meets it.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};

use kvm_bindings::*;

use super::*;
use crate::numbers::*;

fn system_fd() -> OwnedFd {
    crate::system::open(true).unwrap()
}

fn call_on(fd: &OwnedFd, number: u32, arg: u64) -> std::result::Result<i32, i32> {
    ioctl(fd.as_raw_fd(), number, arg).map_err(Errno::get)
}

/// `struct kvm_cpuid2` and `kvm_msr_list` as a caller lays them out.
#[repr(C)]
struct CpuidList {
    nent: u32,
    padding: u32,
    entries: [kvm_cpuid_entry2; 256],
}

fn cpuid_list(nent: u32) -> Box<CpuidList> {
    Box::new(CpuidList {
        nent,
        padding: 0,
        entries: [kvm_cpuid_entry2::default(); 256],
    })
}

#[test]
fn each_number_is_once_in_a_table() {
    fn check<T>(rows: &[Row<T>]) {
        let numbers: BTreeSet<_> = rows.iter().map(|row| row.number).collect();
        assert_eq!(numbers.len(), rows.len());
        for row in rows {
            assert_eq!(row.number >> 8 & 0xff, KVMIO, "{}", row.name);
            if let Status::Refused(errno, reason) = row.status {
                assert!(!reason.is_empty() && errno > 0, "{}", row.name);
            }
        }
    }
    check(system::TABLE);
    check(vm::TABLE);
    check(vcpu::TABLE);
    check(device::TABLE);
}

#[test]
fn system_calls_answer_and_refuse_arguments_as_kvm() {
    let fd = system_fd();
    let cap = u64::from(KVM_CAP_USER_MEMORY);
    for (number, arg, result) in [
        (KVM_GET_API_VERSION, 0, Ok(12)),
        (KVM_GET_API_VERSION, 1, Err(libc::EINVAL)),
        (KVM_GET_VCPU_MMAP_SIZE, 0, Ok(12288)),
        (KVM_GET_VCPU_MMAP_SIZE, 1, Err(libc::EINVAL)),
        (KVM_CHECK_EXTENSION, cap, Ok(1)),
        (KVM_CHECK_EXTENSION, 696_969, Ok(0)),
        (KVM_CREATE_VM, 77, Err(libc::EINVAL)),
        (KVM_RUN, 0, Err(libc::EINVAL)),
        (KVM_CREATE_VCPU, 0, Err(libc::EINVAL)),
        // Another driver's ioctl: TCGETS.
        (0x5401, 0, Err(libc::ENOTTY)),
    ] {
        assert_eq!(call_on(&fd, number, arg), result, "{number:#x}({arg})");
    }
}

#[test]
fn cpuid_lists_need_room() {
    let fd = system_fd();
    let mut list = cpuid_list(1);
    let arg = &raw mut *list as u64;
    assert_eq!(call_on(&fd, KVM_GET_SUPPORTED_CPUID, arg), Err(libc::E2BIG));
    list = cpuid_list(256);
    let arg = &raw mut *list as u64;
    assert_eq!(call_on(&fd, KVM_GET_SUPPORTED_CPUID, arg), Ok(0));
    let len = list.nent as usize;
    assert!((3..256).contains(&len));
    assert!(list.entries[..len].iter().any(|entry| entry.function == 1));
    assert_eq!(list.padding, 0);
}

#[test]
fn msr_lists_tell_their_length_when_too_big() {
    let fd = system_fd();
    let mut list = [0u32; 512];
    let arg = list.as_mut_ptr() as u64;
    assert_eq!(call_on(&fd, KVM_GET_MSR_INDEX_LIST, arg), Err(libc::E2BIG));
    let len = Arg(arg).read::<u32>().unwrap();
    assert!(len > 2);
    assert_eq!(call_on(&fd, KVM_GET_MSR_INDEX_LIST, arg), Ok(0));
    let indices = Arg(arg).offset(4).read_list::<u32>(len as usize).unwrap();
    assert!(indices.contains(&0xc000_0080), "IA32_EFER");
}

#[test]
fn bad_pointers_are_efault() {
    let fd = system_fd();
    for number in [
        KVM_GET_SUPPORTED_CPUID,
        KVM_GET_MSR_INDEX_LIST,
        KVM_GET_MSRS,
        KVM_X86_GET_MCE_CAP_SUPPORTED,
        KVM_GET_DEVICE_ATTR,
    ] {
        for arg in [0, 8, u64::MAX - 7] {
            assert_eq!(call_on(&fd, number, arg), Err(libc::EFAULT), "{number:#x}");
        }
    }
}

#[test]
fn too_many_msrs_are_too_big_before_they_are_read() {
    let fd = system_fd();
    let header = [256u32, 0];
    let arg = header.as_ptr() as u64;
    assert_eq!(call_on(&fd, KVM_GET_MSRS, arg), Err(libc::E2BIG));
}

#[test]
fn refusals_are_counted() {
    let fd = system_fd();
    let vm = call_on(&fd, KVM_CREATE_VM, 0).unwrap();
    let before = refused_count();
    let refused = ioctl(vm, KVM_MEMORY_ENCRYPT_OP, 0).map_err(Errno::get);
    assert_eq!(refused, Err(libc::ENOTTY));
    assert!(refused_count() > before);
    crate::objects::close(vm).unwrap();
    assert_eq!(ioctl(-2, KVM_RUN, 0).map_err(Errno::get), Err(libc::EBADF));
}
