//! A process that may have few descriptors, as with most users' limits.
//!
//! In a file of its own: the limit is the process's.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::os::fd::AsRawFd;

use anykvm_ioctls::{IoEventAddress, NoDatamatch, VcpuExit};
use guest::{Guest, set_limit};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const DOORBELLS: u64 = 1000;

/// Doorbells that each have an eventfd of their own: more than the descriptors that are left.
const OTHERS: u64 = 100;

/// Leaves the process at most fifty descriptors behind `last`, which is the one that was opened last.
///
/// The limit is relative: a test inherits descriptors from whatever started it.
fn limit_descriptors(last: &EventFd) {
    let limit = u64::try_from(last.as_raw_fd()).unwrap() + 50;
    set_limit(libc::RLIMIT_NOFILE, limit);
}

#[test]
fn doorbells_of_one_eventfd_take_one_and_others_are_refused_by_its_name() {
    // out 0x20, al; out 0x81, al
    let mut g = Guest::new(&[0xe6, 0x20, 0xe6, 0x81], false);
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let others: Vec<_> = (0..OTHERS)
        .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
        .collect();
    limit_descriptors(others.last().unwrap());
    let port = IoEventAddress::Pio(0x20);
    g.vm.register_ioevent(&event, &port, NoDatamatch).unwrap();
    let address = |n: u64| IoEventAddress::Mmio(0x1000_0000 + 8 * n);
    for n in 0..DOORBELLS {
        let added = g.vm.register_ioevent(&event, &address(n), NoDatamatch);
        added.unwrap_or_else(|e| panic!("{n}: {e}"));
    }
    let refused = (DOORBELLS..)
        .zip(&others)
        .find_map(|(n, other)| g.vm.register_ioevent(other, &address(n), NoDatamatch).err())
        .expect("fewer descriptors than eventfds");
    assert_eq!(refused.errno(), libc::EMFILE);
    drop(others);
    for n in 0..DOORBELLS {
        g.vm.unregister_ioevent(&event, &address(n), NoDatamatch)
            .unwrap();
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    assert_eq!(event.read().unwrap(), 1);
}
