//! A process that may have few descriptors, as with most users' limits.
//!
//! In a file of its own: the limit is the process's.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use anykvm_ioctls::{IoEventAddress, NoDatamatch, VcpuExit};
use guest::Guest;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const LIMIT: u64 = 200;
const DOORBELLS: u64 = 1000;

fn limit_descriptors() {
    let limit = libc::rlimit {
        rlim_cur: LIMIT,
        rlim_max: LIMIT,
    };
    // SAFETY: a limit that is read.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

#[test]
fn doorbells_of_one_eventfd_take_one_and_others_are_refused_by_its_name() {
    // out 0x20, al; out 0x81, al
    let mut g = Guest::new(&[0xe6, 0x20, 0xe6, 0x81], false);
    limit_descriptors();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let port = IoEventAddress::Pio(0x20);
    g.vm.register_ioevent(&event, &port, NoDatamatch).unwrap();
    let address = |n: u64| IoEventAddress::Mmio(0x1000_0000 + 8 * n);
    for n in 0..DOORBELLS {
        let added = g.vm.register_ioevent(&event, &address(n), NoDatamatch);
        added.unwrap_or_else(|e| panic!("{n}: {e}"));
    }
    let mut others = Vec::new();
    let refused = loop {
        let other = EventFd::new(EFD_NONBLOCK).unwrap();
        let place = address(DOORBELLS + others.len() as u64);
        let added = g.vm.register_ioevent(&other, &place, NoDatamatch);
        others.push(other);
        if let Err(error) = added {
            break error;
        }
    };
    assert_eq!(refused.errno(), libc::EMFILE);
    drop(others);
    for n in 0..DOORBELLS {
        g.vm.unregister_ioevent(&event, &address(n), NoDatamatch)
            .unwrap();
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    assert_eq!(event.read().unwrap(), 1);
}
