//! What a program and its kernel retire counts at their levels, however often SYSCALL and SYSRETQ have led from one to the
//! other, and while the kernel changes what counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod counting;
mod guest;
mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use counting::*;
use guest::set_msr;
use iced_x86::code_asm::*;
use kvm_bindings::kvm_regs;
use long_mode::{Machine, PML4, STACK, become_user};

const CALLS: u32 = 20_000;
const USER_CODE: u64 = 0x5000;
const KERNEL_CODE: u64 = 0x6000;
const ENDLESS: u64 = 0x7000;
const GDT: u64 = 0x8000;
const IDT: u64 = 0x9000;
/// gpa 0 for the user.
const USER: u64 = 0x20_0000;
const END: i32 = 0xff;
const PORT: u32 = 0x10;

/// Bits of an event select: enabled, and counting at a level.
const ENABLED: u64 = 1 << 22;
const OS: u64 = 1 << 17 | ENABLED;
const USR: u64 = 1 << 16 | ENABLED;

/// The counter that the kernel enables and disables.
const TOGGLED: u32 = 3;

/// Calls that do little. In every 64th, the kernel enables or disables a counter.
fn program(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut again, mut even, mut function] = [(); 3].map(|()| a.create_label());
    a.mov(r12d, CALLS)?;
    a.set_label(&mut again)?;
    a.mov(edi, r12d)?;
    a.and(edi, 63)?;
    a.syscall()?;
    a.test(r12d, 1)?;
    a.je(even)?;
    a.inc(rbx)?;
    a.set_label(&mut even)?;
    a.call(function)?;
    a.dec(r12d)?;
    a.jne(again)?;
    a.mov(edi, END)?;
    a.syscall()?;
    a.set_label(&mut function)?;
    a.inc(rbp)?;
    a.ret()
}

/// Calls without end, each in one block with so many PAUSEs that more is charged than was left until the next poll.
fn endless(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(edi, 1)?;
    a.set_label(&mut again)?;
    for _ in 0..110 {
        a.pause()?;
    }
    a.syscall()?;
    a.jmp(again)
}

fn kernel(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut end, mut back] = [(); 2].map(|()| a.create_label());
    a.cmp(edi, END)?;
    a.je(end)?;
    a.inc(r14)?;
    a.test(edi, edi)?;
    a.jne(back)?;
    a.mov(r13, rcx)?;
    a.mov(ecx, PERFEVTSEL0 + TOGGLED)?;
    a.rdmsr()?;
    a.btc(eax, 22)?;
    a.wrmsr()?;
    a.mov(rcx, r13)?;
    a.set_label(&mut back)?;
    a.sysretq()?;
    a.set_label(&mut end)?;
    a.out(PORT, al)
}

fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    for (at, entry) in [
        (PML4, PML4 + 0x1007),
        (PML4 + 0x1000, PML4 + 0x2007),
        (PML4 + 0x2008, 0x87),
    ] {
        m.write(at, &u64::to_le_bytes(entry));
    }
    m.load(USER_CODE, program);
    m.load(ENDLESS, endless);
    m.load(KERNEL_CODE, kernel);
    let vcpu = Vendor::Intel.vcpu(&m, KERNEL_CODE);
    m.handle_page_faults(&vcpu, [GDT, IDT], KERNEL_CODE);
    (m, vcpu)
}

/// Has the vCPU execute user code from `rip` on, with these event selects, and the first counter so many events before its
/// overflow.
fn begin(vcpu: &VcpuFd, rip: u64, selects: &[u64], left: u64) {
    for n in 0..8 {
        assert!(set_msr(vcpu, PERFEVTSEL0 + n, 0));
        assert!(set_msr(vcpu, PMC0 + n, 0));
    }
    assert!(set_msr(vcpu, GLOBAL_CTRL, 0xff));
    let first = left.wrapping_neg() & 0xffff_ffff_ffff;
    assert!(set_msr(vcpu, PMC0, first));
    for (n, select) in (0..).zip(selects) {
        assert!(set_msr(vcpu, PERFEVTSEL0 + n, *select));
    }
    become_user(vcpu, KERNEL_CODE);
    vcpu.set_regs(&kvm_regs {
        rip,
        rsp: USER + STACK,
        rflags: 2,
        ..Default::default()
    })
    .unwrap();
}

/// Runs the program with these event selects, and the first counter so many events before its overflow. Returns what has
/// been counted, and the counters that have overflowed.
fn run(vcpu: &mut VcpuFd, selects: &[u64], left: u64) -> (Vec<u64>, u64) {
    begin(vcpu, USER + USER_CODE, selects, left);
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(..) => {}
        other => panic!("{other:?}"),
    }
    let counts = (0..).zip(selects).map(|(n, _)| msr(vcpu, PMC0 + n));
    let overflows = msr(vcpu, GLOBAL_STATUS);
    assert!(set_msr(vcpu, GLOBAL_OVF_CTRL, overflows));
    (counts.collect(), overflows)
}

#[test]
fn each_level_counts_what_it_retires() {
    let (_m, mut vcpu) = machine();
    const FAR: u64 = 1 << 46;
    // Instructions and one kind of branches, and several.
    let events: [&[u64]; 4] = [
        &[0xc0, 0xc4],
        &[0xc4],
        &[0xc0, 0xc4, 0x8c4],
        &[0xc0, 0xc4, 0x20c4, 0xc0, 0x81d0],
    ];
    // The levels of the first counter, of the second, and so on.
    let levels = [[USR; 2], [OS; 2], [OS | USR; 2], [USR, OS], [OS | USR, USR]];
    for events in events {
        for levels in levels {
            for left in [FAR, 1, 5_000, 70_000, 200_000] {
                let select = |(n, event): (usize, &u64)| event | levels[n % 2];
                let mut selects: Vec<u64> = events.iter().enumerate().map(select).collect();
                selects[0] |= INT;
                // What is not among the events counts branches at first, or nothing.
                if selects.len() == TOGGLED as usize {
                    selects.push(0xc4 | USR);
                }
                interpret(&vcpu, true);
                let expected = run(&mut vcpu, &selects, left);
                interpret(&vcpu, false);
                for _ in 0..2 {
                    let found = run(&mut vcpu, &selects, left);
                    assert_eq!(found, expected, "{selects:x?}, {left}");
                }
            }
        }
    }
    let insns = stats_fd::counter(&vcpu, "jit_interpreted");
    run(&mut vcpu, &[0xc0 | USR, 0xc4 | USR], FAR);
    let interpreted = stats_fd::counter(&vcpu, "jit_interpreted") - insns;
    let is_translated = std::env::var("ANYKVM_ENGINE").as_deref() != Ok("interp");
    assert!(!is_translated || interpreted < 10 * u64::from(CALLS / 64));
}

#[test]
fn a_guest_that_calls_without_end_can_be_stopped() {
    let (_m, mut vcpu) = machine();
    for levels in [USR, OS, OS | USR] {
        for events in [&[0xc0][..], &[0xc0, 0xc4], &[0xc4, 0x8c4, 0x81d0]] {
            let selects: Vec<u64> = events.iter().map(|event| event | levels).collect();
            begin(&vcpu, USER + ENDLESS, &selects, 1 << 46);
            for _ in 0..3 {
                let stopper = vcpu.stopper().unwrap();
                let stops = std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    stopper.kick();
                });
                let begun = std::time::Instant::now();
                assert_eq!(vcpu.run().unwrap_err().errno(), libc::EINTR);
                assert!(begun.elapsed().as_secs() < 5);
                stops.join().unwrap();
            }
        }
    }
}
