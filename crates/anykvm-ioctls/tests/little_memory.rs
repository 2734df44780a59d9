//! A process that may have little memory: vCPUs are refused, and those that exist run.
//!
//! In a file of its own: the limit is the process's.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::fs;

use anykvm_ioctls::VcpuExit;
use guest::{Guest, set_limit};

/// Lets the process have `more` bytes of address space beyond what it has.
fn limit_memory(more: u64) {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    set_limit(libc::RLIMIT_AS, pages * 4096 + more);
}

#[test]
fn vcpus_that_memory_does_not_suffice_for_are_refused_and_others_run() {
    // out 0x80, al
    let mut g = Guest::new(&[0xe6, 0x80], false);
    limit_memory(512 << 20);
    let mut vcpus = Vec::new();
    let refused = (1..1024).find_map(|id| match g.vm.create_vcpu(id) {
        Ok(vcpu) => {
            vcpus.push(vcpu);
            None
        }
        Err(error) => Some(error),
    });
    assert_eq!(refused.expect("a limit").errno(), libc::ENOMEM);
    assert!(vcpus.len() > 2, "{}", vcpus.len());
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}
