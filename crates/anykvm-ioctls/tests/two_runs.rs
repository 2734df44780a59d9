//! Two threads call KVM_RUN of one vCPU: the second waits for the first, which sleeps and has to be woken all the same.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::{
    os::fd::AsRawFd,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use kvm_abi::numbers::KVM_RUN;

#[test]
fn a_halted_vcpu_that_another_thread_waits_for_is_woken() {
    // sti; hlt; jmp -3. The handler at 0x1800: out 0x80, al; out 0x81, al
    let (vm, ram) = guest::vm(&[0xfb, 0xf4, 0xeb, 0xfd], true, 0);
    let (event, _ivt) = guest::message(&vm);
    ram.write(0x800, &[0xe6, 0x80, 0xe6, 0x81]);
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
