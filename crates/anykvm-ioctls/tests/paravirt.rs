//! Paravirtual features of KVM guests (KVM documents "msr" and "hypercalls").

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use guest::{Guest, IRR, ISR, RAM, Ram, add_slot, enable_lapic, lapic_bit, protected, set_msr};
use kvm_bindings::*;

const SYSTEM_TIME: u32 = 0x4b56_4d01;
const ASYNC_PF_EN: u32 = 0x4b56_4d02;
const STEAL_TIME: u32 = 0x4b56_4d03;
const PV_EOI_EN: u32 = 0x4b56_4d04;
const WALL_CLOCK: u32 = 0x4b56_4d00;
const POLL_CONTROL: u32 = 0x4b56_4d05;
const ASYNC_PF_INT: u32 = 0x4b56_4d06;

/// `vmcall`.
const VMCALL: [u8; 3] = [0x0f, 0x01, 0xc1];

fn set_gprs(vcpu: &VcpuFd, rip: u64, [rax, rbx, rcx, rdx, rsi]: [u64; 5]) {
    let regs = kvm_regs {
        rip,
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rsp: 0x4f00,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
}

#[test]
fn msrs_check_their_values() {
    let g = Guest::new(&[], true);
    for (index, value, is_good) in [
        (STEAL_TIME, 0x3001, true),
        (STEAL_TIME, 0x3041, true),
        (STEAL_TIME, 0x3003, false),
        (STEAL_TIME, 0x3021, false),
        (PV_EOI_EN, 0x3005, true),
        (PV_EOI_EN, 0x3003, false),
        (ASYNC_PF_EN, 0x3009, true),
        (ASYNC_PF_EN, 0x3011, false),
        (ASYNC_PF_INT, 0xf3, true),
        (ASYNC_PF_INT, 0x1f3, false),
        (POLL_CONTROL, 0, true),
        (POLL_CONTROL, 1, true),
        (POLL_CONTROL, 2, false),
    ] {
        assert_eq!(
            set_msr(&g.vcpu, index, value),
            is_good,
            "{index:#x} {value:#x}"
        );
    }
    let features = Kvm::new()
        .unwrap()
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap()
        .as_slice()
        .iter()
        .find(|e| e.function == 0x4000_0001)
        .unwrap()
        .eax;
    for bit in [0, 3, 4, 5, 6, 7, 9, 11, 12, 13, 24] {
        assert_ne!(features >> bit & 1, 0, "{bit}");
    }
    // Asynchronous page faults are never sent, so their interrupt is not promised.
    assert_eq!(features >> 14 & 1, 0);
}

#[test]
fn the_wall_clock_is_written_where_the_guest_says() {
    let g = Guest::new(&[], true);
    let low = Ram::new(0x1000);
    add_slot(&g.vm, 1, 0, &low, 0);
    // A version, seconds and nanoseconds; the version may have been anything.
    for (before, after) in [(0u32, 2u32), (2, 4), (7, 10)] {
        low.write(0x100, &before.to_le_bytes());
        assert!(set_msr(&g.vcpu, WALL_CLOCK, 0x100));
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
        let word = |at| u32::from_le_bytes(low.read(at));
        assert_eq!(word(0x100), after);
        assert!(word(0x104).abs_diff(now.as_secs() as u32) < 5);
        assert!(word(0x108) < 1_000_000_000);
    }
    // What VMMs write at a reset is no address.
    low.write(0, &[0x55; 12]);
    assert!(set_msr(&g.vcpu, WALL_CLOCK, 0));
    assert_eq!(low.read(0), [0x55; 12]);
}

#[test]
fn the_clocks_version_goes_on_from_what_the_guest_has_seen() {
    let g = Guest::new(&[], true);
    let low = Ram::new(0x1000);
    add_slot(&g.vm, 1, 0, &low, 0);
    let version = || u32::from_le_bytes(low.read(0x100));
    let is_stopped = || low.read::<1>(0x100 + 29)[0] & 2 != 0;
    // As after a migration: another process has written it before.
    low.write(0x100, &20u32.to_le_bytes());
    assert!(set_msr(&g.vcpu, SYSTEM_TIME, 0x101));
    assert_eq!(version(), 22);
    assert!(set_msr(&g.vcpu, SYSTEM_TIME, 0x101));
    assert_eq!((version(), is_stopped()), (24, false));
    // Interrupted in the middle.
    low.write(0x100, &31u32.to_le_bytes());
    g.vcpu.kvmclock_ctrl().unwrap();
    assert_eq!((version(), is_stopped()), (34, true));
    // The guest takes the mark away when it has seen it, nobody else does.
    assert!(set_msr(&g.vcpu, SYSTEM_TIME, 0x101));
    assert!(is_stopped());
    low.write(0x100 + 29, &[1]);
    assert!(set_msr(&g.vcpu, SYSTEM_TIME, 0x101));
    assert!(!is_stopped());
}

#[test]
fn ipis_by_hypercall() {
    let code = [&VMCALL[..], &[0xe7, 0x80]].concat(); // out 0x80, eax
    let mut g = Guest::new(&code, true);
    let others: Vec<VcpuFd> = [1, 2, 3]
        .into_iter()
        .map(|id| g.vm.create_vcpu(id).unwrap())
        .collect();
    for vcpu in &others[..2] {
        enable_lapic(vcpu);
    }
    protected(&g.vcpu);
    // vCPUs 1 to 3 from APIC id 1; the third LAPIC is not enabled, ids above do not exist.
    set_gprs(&g.vcpu, RAM, [10, 0b1111, 0, 1, 0x41]);
    match g.vcpu.run().unwrap() {
        VcpuExit::IoOut(0x80, data) => assert_eq!(data, [2, 0, 0, 0]),
        exit => panic!("{exit:?}"),
    }
    let got: Vec<bool> = others.iter().map(|v| lapic_bit(v, IRR, 0x41)).collect();
    assert_eq!(got, [true, true, false]);
    // A shorthand contradicts the bitmap; unknown calls and rings are refused.
    for (nr, icr, want) in [(10, 1 << 18 | 0x41, -22), (99, 0, -1000)] {
        set_gprs(&g.vcpu, RAM, [nr, 1, 0, 1, icr]);
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x80, data) => assert_eq!(data, i32::to_le_bytes(want)),
            exit => panic!("{exit:?}"),
        }
    }
}

#[test]
fn a_kick_wakes_from_halt_now_or_later() {
    // vmcall; out 0x80, eax
    let code = [&VMCALL[..], &[0xe7, 0x80]].concat();
    let mut g = Guest::new(&code, true);
    g.ram.write(0x100, &[0xf4, 0xe7, 0x81]); // hlt; out 0x81, eax
    protected(&g.vcpu);
    let mut other = g.vm.create_vcpu(1).unwrap();
    other
        .set_mp_state(kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        })
        .unwrap();
    protected(&other);
    let kick = |g: &mut Guest| {
        set_gprs(&g.vcpu, RAM, [5, 0, 1, 0, 0]);
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    };
    // Interrupts are off: nothing else could wake it.
    set_gprs(&other, RAM + 0x100, [0; 5]);
    kick(&mut g);
    assert!(matches!(other.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    set_gprs(&other, RAM + 0x100, [0; 5]);
    thread::scope(|s| {
        s.spawn(|| assert!(matches!(other.run().unwrap(), VcpuExit::IoOut(0x81, _))));
        thread::sleep(Duration::from_millis(30));
        kick(&mut g);
    });
}

/// While it sleeps a vCPU is marked, and does the TLB flush that was left for it.
#[test]
fn a_sleeping_vcpu_is_marked_and_flushes_later() {
    // mov eax, [0x7000]; hlt; mov ebx, [0x7000]; out 0x80, eax
    let code = [
        0xa1, 0x00, 0x70, 0, 0, 0xf4, 0x8b, 0x1d, 0x00, 0x70, 0, 0, 0xe7, 0x80,
    ];
    for leave_a_flush in [false, true] {
        let mut g = Guest::new(&code, true);
        protected(&g.vcpu);
        // Page directory at 0x2000, table at 0x3000: identity, and 0x7000 → 0x4000.
        let entry = |page: u32| (page | 3).to_le_bytes();
        g.ram.write(0x2000 - RAM, &entry(0x3000));
        for page in 1..5u64 {
            g.ram
                .write(0x3000 - RAM + 4 * page, &entry(page as u32 * 0x1000));
        }
        g.ram.write(0x3000 - RAM + 4 * 7, &entry(0x4000));
        g.ram.write(0x4000 - RAM, &[1, 1, 1, 1]);
        g.ram.write(0x4800 - RAM, &[0; 64]);
        let data = Ram::new(0x1000);
        data.write(0, &[2, 2, 2, 2]);
        add_slot(&g.vm, 1, 0x8000, &data, 0);
        let mut s = g.vcpu.get_sregs().unwrap();
        s.cr0 |= 1 << 31;
        s.cr3 = 0x2000;
        g.vcpu.set_sregs(&s).unwrap();
        set_gprs(&g.vcpu, RAM, [0; 5]);
        assert!(set_msr(&g.vcpu, STEAL_TIME, 0x4801));
        let stopper = g.vcpu.stopper().unwrap();
        let (vcpu, ram) = (&mut g.vcpu, &g.ram);
        let mark = || ram.read::<1>(0x4810 - RAM)[0];
        thread::scope(|scope| {
            let runner = scope.spawn(|| vcpu.run().map(|_| ()).unwrap_err().errno());
            let begin = Instant::now();
            while mark() != 1 {
                assert!(begin.elapsed() < Duration::from_secs(5));
                thread::sleep(Duration::from_millis(1));
            }
            ram.write(0x3000 - RAM + 4 * 7, &entry(0x8000));
            if leave_a_flush {
                ram.write(0x4810 - RAM, &[3]);
            }
            stopper.kick();
            assert_eq!(runner.join().unwrap(), libc::EINTR);
        });
        assert_eq!(mark(), 0);
        let [version, ..] = g.ram.read::<4>(0x4808 - RAM);
        assert_eq!(version % 2, 0);
        // Out of HLT by a non-maskable way that needs no handler.
        let mp_state = KVM_MP_STATE_RUNNABLE;
        g.vcpu.set_mp_state(kvm_mp_state { mp_state }).unwrap();
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        let regs = g.vcpu.get_regs().unwrap();
        assert_eq!(regs.rax, 0x0101_0101);
        let want = if leave_a_flush {
            0x0202_0202
        } else {
            0x0101_0101
        };
        assert_eq!(regs.rbx, want);
    }
}

/// The end of an interrupt by clearing a bit, offered only when nothing else waits.
#[test]
fn eoi_by_memory() {
    for vectors in [&[0x40_u8][..], &[0x40, 0x51]] {
        // sti; jmp $
        let mut g = Guest::new(&[0xfb, 0xeb, 0xfe], true);
        let ivt = Ram::new(0x1000);
        for v in [0x40, 0x51] {
            ivt.write(v * 4, &[0x00, 0x18, 0, 0]);
        }
        add_slot(&g.vm, 1, 0, &ivt, 0);
        // btr word [0x3000], 0; setc al; out 0x80, al; iret
        g.ram.write(
            0x800,
            &[
                0x0f, 0xba, 0x36, 0x00, 0x30, 0x00, 0x0f, 0x92, 0xc0, 0xe6, 0x80, 0xcf,
            ],
        );
        enable_lapic(&g.vcpu);
        assert!(set_msr(&g.vcpu, PV_EOI_EN, 0x3001));
        for vector in vectors {
            let msi = kvm_msi {
                address_lo: 0xfee0_0000,
                data: (*vector).into(),
                ..Default::default()
            };
            assert_eq!(g.vm.signal_msi(msi).unwrap(), 1);
        }
        let highest = *vectors.last().unwrap();
        let alone = vectors.len() == 1;
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x80, data) => assert_eq!(data, [u8::from(alone)]),
            exit => panic!("{exit:?}"),
        }
        assert_eq!(lapic_bit(&g.vcpu, ISR, highest), !alone);
    }
}

/// As KVM does it: kernels enable it whatever LAPIC they have.
#[test]
fn eoi_by_memory_may_be_enabled_without_a_lapic_of_ours() {
    let g = Guest::new(&[0xf4], false);
    assert!(set_msr(&g.vcpu, PV_EOI_EN, 0x3001));
    assert!(!set_msr(&g.vcpu, PV_EOI_EN, 0x3003));
}
