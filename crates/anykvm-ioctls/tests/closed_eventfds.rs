//! A thread that names eventfds which another one closes and makes anew, by the same numbers.
//!
//! In a file of its own: the thread would take eventfds of other tests.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use anykvm_ioctls::{Kvm, VmFd};
use guest::ioctl;
use kvm_abi::numbers::KVM_IRQFD;
use kvm_bindings::*;
use vmm_sys_util::eventfd::EventFd;

const ROUNDS: usize = 3000;

fn irqfd(vm: &VmFd, fd: i32, gsi: u32, flags: u32) -> Result<(), i32> {
    let mut irqfd = kvm_irqfd {
        fd: fd as u32,
        gsi,
        flags,
        ..Default::default()
    };
    ioctl(vm, KVM_IRQFD, &mut irqfd).map(|_| ())
}

#[test]
fn do_not_stay_in_the_way() {
    let kvm = Kvm::new().unwrap();
    let vms = [kvm.create_vm().unwrap(), kvm.create_vm().unwrap()];
    vms.iter().for_each(|vm| vm.create_irq_chip().unwrap());
    // The threads that wait for irqfds start with the first vCPUs.
    let _vcpus = vms.each_ref().map(|vm| vm.create_vcpu(0).unwrap());
    let number = AtomicI32::new(-1);
    std::thread::scope(|s| {
        let owner = s.spawn(|| {
            for round in 0..ROUNDS {
                let event = EventFd::new(0).unwrap();
                let fd = event.as_raw_fd();
                number.store(fd, Ordering::Relaxed);
                vms.iter().for_each(|vm| assign_twice(vm, fd, round));
            }
        });
        while !owner.is_finished() {
            for vm in &vms {
                let fd = number.load(Ordering::Relaxed);
                let assigned = irqfd(vm, fd, 0x30, 0);
                let allowed = [Ok(()), Err(libc::EBUSY), Err(libc::EBADF)];
                assert!(allowed.contains(&assigned), "{assigned:?}");
                let removed = irqfd(vm, fd, 0x30, KVM_IRQFD_FLAG_DEASSIGN);
                assert!([Ok(()), Err(libc::EBADF)].contains(&removed), "{removed:?}");
            }
        }
    });
}

/// One of the two is refused, and both can be removed.
fn assign_twice(vm: &VmFd, fd: i32, round: usize) {
    let first = irqfd(vm, fd, 0x20, 0);
    assert!(
        [Ok(()), Err(libc::EBUSY)].contains(&first),
        "{round}: {first:?}"
    );
    let second = irqfd(vm, fd, 0x21, 0);
    assert!(
        first.is_err() || second == Err(libc::EBUSY),
        "{round}: {second:?}"
    );
    for gsi in [0x20, 0x21] {
        assert_eq!(irqfd(vm, fd, gsi, KVM_IRQFD_FLAG_DEASSIGN), Ok(()));
    }
}
