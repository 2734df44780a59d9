//! Threads of ours in a VMM's process: none before the first vCPU, so that a VMM that checks that it
//! has only one thread can fork processes for its devices.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use anykvm_ioctls::VcpuExit;
use host::EventFd;
use kvm_bindings::*;
use std::os::fd::AsRawFd;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn an_irqfd_makes_no_thread_before_there_is_a_vcpu() {
    let before = threads();
    // sti; nop; jmp -3: waits for the interrupt, whose handler at 0x1800 does out 0x80, al
    let (vm, ram) = guest::vm(&[0xfb, 0x90, 0xeb, 0xfd], true, 0);
    let ivt = guest::Ram::new(0x1000);
    ivt.write(0x40 * 4, &[0x00, 0x18, 0, 0]);
    guest::add_slot(&vm, 1, 0, &ivt, 0);
    ram.write(0x800, &[0xe6, 0x80]);
    let event = EventFd::new(0).unwrap();
    let mut routing = KvmIrqRouting::new(1).unwrap();
    let entry = &mut routing.as_mut_slice()[0];
    entry.gsi = 5;
    entry.type_ = KVM_IRQ_ROUTING_MSI;
    entry.u.msi.address_lo = 0xfee0_0000;
    entry.u.msi.data = 0x40;
    vm.set_gsi_routing(&routing).unwrap();
    let irqfd = kvm_irqfd {
        fd: event.as_raw_fd() as u32,
        gsi: 5,
        ..Default::default()
    };
    guest::ioctl(&vm, kvm_abi::numbers::KVM_IRQFD, &mut irqfd.clone()).unwrap();
    assert_eq!(threads(), before);

    let mut vcpu = vm.create_vcpu(0).unwrap();
    // For irqfds, and for pages of translated code.
    assert!(threads() > before);
    let mut lapic = vcpu.get_lapic().unwrap();
    // Software-enabled.
    lapic.regs[0xf1] = 1;
    vcpu.set_lapic(&lapic).unwrap();
    guest::start(&vcpu);
    event.signal(1).unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(0x80, _) => {}
        exit => panic!("{exit:?}"),
    }
}
