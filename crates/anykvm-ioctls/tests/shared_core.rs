//! Two vCPUs that wait for each other in PAUSE, on one core of the host of which the VM knows nothing (the other
//! cores are taken): who waits gives way, as with pause-loop exits of a processor under KVM.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::thread;
use std::time::Duration;

use anykvm_ioctls::VcpuExit;
use guest::RAM;
use kvm_bindings::kvm_regs;

/// Where it is written whose turn it is.
const TURN: u64 = 0x3000;
/// Turns of each.
const TURNS: u64 = 500;
/// What the host's scheduler gives to a thread at once is about 3 ms: half a turn each, 3 s together.
const LIMIT: Duration = Duration::from_secs(1);

/// 1: pause; cmp [TURN + RAM], ebx; jne 1b; mov [TURN + RAM], ecx; dec edi; jne 1b; hlt
const WAITS: [u8; 20] = [
    0xf3, 0x90, 0x39, 0x1d, 0, 0x40, 0, 0, 0x75, 0xf6, 0x89, 0x0d, 0, 0x40, 0, 0, 0x4f, 0x75, 0xed,
    0xf4,
];
/// With "in al, 0x60" behind the PAUSE: waits until a timer of the VMM's says that it is too long.
const READS_TIMER: [u8; 22] = [
    0xf3, 0x90, 0xe4, 0x60, 0x39, 0x1d, 0, 0x40, 0, 0, 0x75, 0xf4, 0x89, 0x0d, 0, 0x40, 0, 0, 0x4f,
    0x75, 0xeb, 0xf4,
];

/// Binds the calling thread to a processor.
fn bind(processor: usize) {
    // SAFETY: a set of processors of ours, for the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

/// What the calling thread has computed.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a structure of ours.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(result, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The processor time that the turns take with this code for the first vCPU.
fn turns(first: &[u8]) -> Duration {
    let (vm, ram) = guest::vm(&WAITS, false, 0);
    ram.write(0x100, first);
    // SAFETY: no arguments.
    let processor = unsafe { libc::sched_getcpu() } as usize;
    let vcpus = [0, 1].map(|i| {
        let vcpu = vm.create_vcpu(i).unwrap();
        guest::start(&vcpu);
        guest::protected(&vcpu);
        let regs = kvm_regs {
            rip: if i == 0 { RAM + 0x100 } else { RAM },
            rbx: i,
            rcx: 1 - i,
            rdi: TURNS,
            rflags: 2,
            ..Default::default()
        };
        vcpu.set_regs(&regs).unwrap();
        vcpu
    });
    let threads = vcpus.map(|mut vcpu| {
        thread::spawn(move || {
            bind(processor);
            loop {
                match vcpu.run().unwrap() {
                    VcpuExit::IoIn(0x60, data) => data.fill(0),
                    VcpuExit::Hlt => return cpu_time(),
                    exit => panic!("{exit:?}"),
                }
            }
        })
    });
    let time = threads.map(|t| t.join().unwrap()).iter().sum();
    assert_eq!(ram.read::<4>(TURN), [0; 4]);
    time
}

#[test]
fn a_vcpu_that_waits_gives_way_on_a_shared_core() {
    for first in [&WAITS[..], &READS_TIMER[..]] {
        let time = turns(first);
        assert!(time < LIMIT, "{} bytes: {time:?}", first.len());
    }
}
