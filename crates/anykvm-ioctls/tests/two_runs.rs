//! Two threads call KVM_RUN of one vCPU: the second waits for the first, which sleeps and has to be woken all the same.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::{
    os::fd::AsRawFd,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use host::EventFd;
use kvm_abi::numbers::{KVM_IRQFD, KVM_RUN};
use kvm_bindings::*;

#[test]
fn a_halted_vcpu_that_another_thread_waits_for_is_woken() {
    // sti; hlt; jmp -3. The handler at 0x1800: out 0x80, al; out 0x81, al
    let (vm, ram) = guest::vm(&[0xfb, 0xf4, 0xeb, 0xfd], true, 0);
    let ivt = guest::Ram::new(0x1000);
    ivt.write(0x40 * 4, &[0x00, 0x18, 0, 0]);
    guest::add_slot(&vm, 1, 0, &ivt, 0);
    ram.write(0x800, &[0xe6, 0x80, 0xe6, 0x81]);
    let event = EventFd::new(0).unwrap();
    let mut routing = KvmIrqRouting::new(1).unwrap();
    let entry = &mut routing.as_mut_slice()[0];
    entry.gsi = 5;
    entry.type_ = KVM_IRQ_ROUTING_MSI;
    entry.u.msi.address_lo = 0xfee0_0000;
    entry.u.msi.data = 0x40;
    vm.set_gsi_routing(&routing).unwrap();
    let mut irqfd = kvm_irqfd {
        fd: event.as_raw_fd() as u32,
        gsi: 5,
        ..Default::default()
    };
    guest::ioctl(&vm, KVM_IRQFD, &mut irqfd).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut lapic = vcpu.get_lapic().unwrap();
    // Software-enabled.
    lapic.regs[0xf1] = 1;
    vcpu.set_lapic(&lapic).unwrap();
    guest::start(&vcpu);

    let fd = vcpu.as_raw_fd();
    let (done, results) = mpsc::channel();
    for _ in 0..2 {
        let done = done.clone();
        thread::spawn(move || done.send(kvm_abi::ioctl(fd, KVM_RUN, 0)));
        thread::sleep(Duration::from_millis(50));
    }
    let begin = Instant::now();
    event.signal(1).unwrap();
    for _ in 0..2 {
        let result = results.recv_timeout(Duration::from_secs(20));
        assert_eq!(result.unwrap().map_err(|e| e.get()), Ok(0));
    }
    assert!(begin.elapsed() < Duration::from_secs(20));
}
