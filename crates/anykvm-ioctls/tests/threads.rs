//! Threads of ours in a VMM's process: none before the first vCPU, so that a VMM that checks that it
//! has only one thread can fork processes for its devices.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use anykvm_ioctls::VcpuExit;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn an_irqfd_makes_no_thread_before_there_is_a_vcpu() {
    let before = threads();
    // sti; nop; jmp -3: waits for the interrupt, whose handler at 0x1800 does out 0x80, al
    let (vm, ram) = guest::vm(&[0xfb, 0x90, 0xeb, 0xfd], true, 0);
    let (event, _ivt) = guest::message(&vm);
    ram.write(0x800, &[0xe6, 0x80]);
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
