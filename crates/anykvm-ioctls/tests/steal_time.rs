//! MSR_KVM_STEAL_TIME (KVM document "msr"): what the vCPU's thread waits for its processor, inside
//! of KVM_RUN and outside, as the host's scheduler counts it.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{VcpuExit, VcpuFd};
use guest::{Guest, RAM, Ram, protected, set_msr};

const STEAL_TIME: u32 = 0x4b56_4d03;
/// Where the structure is, in RAM, and the MSR's value for it.
const AT: u64 = 0x3800;
const ON: u64 = (RAM + AT) | 1;
const STEAL: u64 = AT;
const VERSION: u64 = AT + 8;

fn steal(ram: &Ram) -> u64 {
    u64::from_le_bytes(ram.read(STEAL))
}

fn version(ram: &Ram) -> u32 {
    u32::from_le_bytes(ram.read(VERSION))
}

/// The calling thread's run-queue delay.
fn run_delay() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Binds the calling thread, and those that it starts, to the processor that it is on.
fn stay() {
    // SAFETY: a set of processors of ours, for the calling thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu() as usize, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
    }
}

fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        spin_loop();
    }
}

/// `code` at the beginning of RAM, in real mode or (for the translator) in flat protected mode.
fn guest(code: &[u8], is_protected: bool) -> Guest {
    let g = Guest::new(code, false);
    if is_protected {
        protected(&g.vcpu);
    }
    g
}

/// 1: out 0x80, al; jmp 1b
const EXITS: [u8; 4] = [0xe6, 0x80, 0xeb, 0xfc];
/// 1: jmp 1b
const SPINS: [u8; 2] = [0xeb, 0xfe];

fn exit(vcpu: &mut VcpuFd) {
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}

#[test]
fn what_is_stolen_between_two_runs_is_told_by_the_second() {
    for is_protected in [false, true] {
        thread::spawn(move || {
            let mut g = guest(&EXITS, is_protected);
            let before = run_delay();
            assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
            // The first entry says from when on delays count, if the keeper gets the processor in time.
            stay();
            for round in 0..20 {
                exit(&mut g.vcpu);
                let told = steal(&g.ram);
                let had = run_delay();
                let thief = thread::spawn(|| spin(Duration::from_millis(2)));
                while run_delay() - had < 1_000_000 && !thief.is_finished() {
                    thread::yield_now();
                }
                thief.join().unwrap();
                let stolen = run_delay() - had;
                // Others may have kept the keeper from answering at once.
                let begin = Instant::now();
                let mut entries = 0;
                while steal(&g.ram) - told < stolen {
                    assert!(begin.elapsed() < Duration::from_secs(10), "{round}");
                    exit(&mut g.vcpu);
                    spin(Duration::from_millis(1));
                    entries += 1;
                }
                assert!(steal(&g.ram) <= run_delay() - before, "{round}");
                assert_eq!(version(&g.ram) % 2, 0);
                assert!(entries < 5000);
            }
        })
        .join()
        .unwrap();
    }
}

#[test]
fn each_entry_is_a_new_version() {
    let mut g = guest(&EXITS, false);
    assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
    for _ in 0..200 {
        let before = version(&g.ram);
        exit(&mut g.vcpu);
        let after = version(&g.ram);
        assert!(
            after >= before + 2 && after.is_multiple_of(2),
            "{before} {after}"
        );
    }
}

/// As KVM's own test: a thief takes the processor for as long as it likes between two runs.
#[test]
fn what_is_stolen_in_a_long_pause_is_told_by_the_next_entry() {
    for is_protected in [false, true] {
        thread::spawn(move || stolen_in_pauses(is_protected))
            .join()
            .unwrap();
    }
}

fn stolen_in_pauses(is_protected: bool) {
    let mut g = guest(&EXITS, is_protected);
    assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
    stay();
    exit(&mut g.vcpu);
    for round in 0..5 {
        let (told, had) = (steal(&g.ram), run_delay());
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    spin_loop();
                }
            });
            while run_delay() - had < 50_000_000 {
                thread::yield_now();
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let stolen = run_delay() - had;
        exit(&mut g.vcpu);
        assert!(steal(&g.ram) - told >= stolen, "{round}");
    }
}

#[test]
fn what_is_stolen_while_the_guest_computes_is_told_meanwhile() {
    for is_protected in [false, true] {
        let mut g = guest(&SPINS, is_protected);
        assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
        let stopper = g.vcpu.stopper().unwrap();
        let (vcpu, ram) = (&mut g.vcpu, &g.ram);
        let is_over = &AtomicBool::new(false);
        let waited = thread::scope(|scope| {
            let runner = scope.spawn(move || {
                stay();
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        spin_loop();
                    }
                });
                assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR);
                run_delay()
            });
            let begin = Instant::now();
            let (mut last, mut steps) = (0, 0);
            while (steps < 5 || last < 20_000_000) && begin.elapsed() < LIMIT {
                let now = steal(ram);
                assert!(now >= last, "{last} {now}");
                steps += u32::from(now != last);
                last = now;
                thread::sleep(Duration::from_millis(1));
            }
            is_over.store(true, Ordering::Relaxed);
            stopper.kick();
            assert!(last >= 20_000_000 && steps >= 5, "{last} {steps}");
            runner.join().unwrap()
        });
        assert!(steal(&g.ram) <= waited);
    }
}
const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn a_restored_guest_goes_on_from_its_own_figure() {
    let mut g = guest(&EXITS, false);
    let had = 1_u64 << 40;
    for (before, after) in [(6_u32, 8), (7, 8)] {
        g.ram.write(STEAL, &had.to_le_bytes());
        g.ram.write(VERSION, &before.to_le_bytes());
        assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
        assert_eq!((steal(&g.ram), version(&g.ram)), (had, after));
        assert!(set_msr(&g.vcpu, STEAL_TIME, 0));
    }
    assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
    for _ in 0..10 {
        exit(&mut g.vcpu);
        thread::sleep(Duration::from_millis(1));
    }
    let new = steal(&g.ram) - had;
    assert!(new <= run_delay(), "{new}");
}

#[test]
fn each_thread_brings_its_own_delays() {
    let mut g = guest(&EXITS, false);
    assert!(set_msr(&g.vcpu, STEAL_TIME, ON));
    let mut all = 0;
    for _ in 0..10 {
        let vcpu = &mut g.vcpu;
        let told = steal(&g.ram);
        let delay = thread::scope(|scope| {
            let thread = scope.spawn(|| {
                for _ in 0..20 {
                    exit(vcpu);
                    thread::sleep(Duration::from_micros(200));
                }
                run_delay()
            });
            thread.join().unwrap()
        });
        all += delay;
        assert!((told..=all).contains(&steal(&g.ram)), "{told} {all}");
    }
}

#[test]
fn nothing_is_written_where_nothing_is_asked_for() {
    let mut g = guest(&EXITS, false);
    assert!(set_msr(&g.vcpu, STEAL_TIME, RAM + AT));
    for _ in 0..5 {
        exit(&mut g.vcpu);
        thread::sleep(Duration::from_millis(2));
    }
    assert_eq!((steal(&g.ram), version(&g.ram)), (0, 0));
    // No memory there.
    assert!(set_msr(&g.vcpu, STEAL_TIME, 0x1000_0001));
    exit(&mut g.vcpu);
}
