//! Performance counters: they count what a trace of single steps does, to the instruction.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod counting;
mod guest;
mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use counting::*;
use guest::{Ram, add_slot, ioctl, set_msr};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, code_asm::*};
use kvm_bindings::*;
use long_mode::{Machine, start};

const CODE: u64 = 0x1000;
const FUNCTION: u64 = 0x1800;
const PORT: u8 = 0x10;
/// Of the program: so that it has ten thousand instructions.
const TURNS: u32 = 320;
/// Overflows after each number of instructions up to this.
const MOST: usize = 10_000;

/// A bit of everything: loops, calls, indirect branches, string instructions, an interpreted one.
fn program(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut turn, mut skip, mut inner, mut other, mut on, mut end] =
        [(); 6].map(|()| a.create_label());
    a.mov(r12d, TURNS)?;
    a.set_label(&mut turn)?;
    a.add(rbx, r12)?;
    a.mov(qword_ptr(0x5000), rbx)?;
    a.test(ebx, 3)?;
    a.jne(skip)?;
    a.call(FUNCTION)?;
    a.set_label(&mut skip)?;
    a.mov(rax, FUNCTION)?;
    a.call(rax)?;
    a.mov(edi, 0x5100)?;
    a.mov(ecx, 5)?;
    a.rep().stosb()?;
    a.mov(ecx, 3)?;
    a.set_label(&mut inner)?;
    a.lea(rdx, qword_ptr(rdx + 1))?;
    a.loop_(inner)?;
    a.mov(ecx, 5)?;
    a.set_label(&mut other)?;
    a.cmp(ecx, 3)?;
    a.loopne(other)?;
    a.xor(ecx, ecx)?;
    a.jrcxz(on)?;
    a.nop()?;
    a.set_label(&mut on)?;
    a.push(rdx)?;
    a.pop(rsi)?;
    a.xor(eax, eax)?;
    a.push(rbx)?;
    a.cpuid()?;
    a.pop(rbx)?;
    a.mov(ecx, 4)?;
    a.mov(esi, 0x5200)?;
    a.rep().movsb()?;
    a.dec(r12)?;
    a.jne(turn)?;
    a.jmp(end)?;
    a.nop()?;
    a.set_label(&mut end)?;
    a.out(u32::from(PORT), al)
}

fn function(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut odd = a.create_label();
    a.test(bl, 1)?;
    a.jne(odd)?;
    a.add(rbx, 3)?;
    a.set_label(&mut odd)?;
    a.mov(ecx, 0)?;
    a.ret()
}

fn machine(has_chips: bool) -> Machine {
    let m = Machine::new();
    if has_chips {
        m.vm.create_irq_chip().unwrap();
    }
    m.load(CODE, program);
    m.load(FUNCTION, function);
    m
}

/// Runs until the OUT at the end, which is not complete then.
fn finish(vcpu: &mut VcpuFd) {
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(port, _) => assert_eq!(port, u16::from(PORT)),
        other => panic!("{other:?}"),
    }
}

/// Of each instruction that a single-stepped run completes: the streams, as [`Vendor::events`], and
/// RIP and the program's counter of turns after it.
fn trace(vendor: Vendor) -> Vec<([bool; 4], [u64; 2])> {
    let m = machine(false);
    let mut vcpu = vendor.vcpu(&m, CODE);
    vcpu.set_guest_debug(&kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    })
    .unwrap();
    let mut steps = Vec::new();
    loop {
        let rip = vcpu.get_regs().unwrap().rip;
        let bytes = m.read::<15>(rip);
        let mut i = Instruction::default();
        Decoder::new(64, &bytes, DecoderOptions::NONE).decode_out(&mut i);
        match vcpu.run().unwrap() {
            VcpuExit::Debug(_) => {}
            VcpuExit::IoOut(..) => return steps,
            other => panic!("{other:?}"),
        }
        let regs = vcpu.get_regs().unwrap();
        let next = regs.rip;
        // One turn of several.
        if next == rip {
            continue;
        }
        let flow = i.flow_control();
        let streams = [
            true,
            flow != FlowControl::Next,
            flow == FlowControl::ConditionalBranch,
            i.mnemonic() == Mnemonic::Ret,
        ];
        steps.push((streams, [next, regs.r12]));
    }
}

#[test]
fn counters_agree_with_single_steps() {
    for vendor in Vendor::ALL {
        let steps = trace(vendor);
        assert!(steps.len() > MOST);
        let m = machine(false);
        let mut vcpu = vendor.vcpu(&m, CODE);
        for round in 0..20 {
            for (n, event) in (1..).zip(&vendor.events()[1..]) {
                for (at, event) in [(0, vendor.events()[0]), (1, *event)] {
                    assert!(set_msr(&vcpu, vendor.counter(at), 0));
                    assert!(set_msr(&vcpu, vendor.select(at), ON | event));
                }
                start(&vcpu, CODE);
                finish(&mut vcpu);
                for (at, stream) in [(0, 0), (1, n)] {
                    let expected = steps.iter().filter(|(s, _)| s[stream]).count();
                    let got = msr(&vcpu, vendor.counter(at));
                    assert_eq!(got, expected as u64, "{vendor:?} {stream}, round {round}");
                }
            }
        }
        for round in 0..20 {
            for (n, event) in (0..).zip(vendor.events()) {
                assert!(set_msr(&vcpu, vendor.counter(n), 0));
                assert!(set_msr(&vcpu, vendor.select(n), ON | event));
            }
            start(&vcpu, CODE);
            finish(&mut vcpu);
            for n in 0..4 {
                let expected = steps.iter().filter(|(s, _)| s[n as usize]).count();
                let got = msr(&vcpu, vendor.counter(n));
                assert_eq!(got, expected as u64, "{vendor:?} {n}, round {round}");
            }
        }
    }
}

/// Counters at the user's level only count none of this.
#[test]
fn a_counter_of_another_level_stands_still() {
    for vendor in Vendor::ALL {
        let m = machine(false);
        let mut vcpu = vendor.vcpu(&m, CODE);
        assert!(set_msr(&vcpu, vendor.select(0), 0x41_00c0));
        finish(&mut vcpu);
        assert_eq!(msr(&vcpu, vendor.counter(0)), 0);
    }
}

#[test]
fn an_overflow_interrupts_after_exactly_so_many_events() {
    for vendor in Vendor::ALL {
        let steps = trace(vendor);
        let m = machine(true);
        let mut vcpu = vendor.vcpu(&m, CODE);
        handle_nmis(&m, &vcpu);
        // Alone, and beside all the others: translated code counts in two ways.
        for (others, stream) in (0..8).map(|n| (n / 4 != 0, n % 4)) {
            let event = vendor.events()[stream];
            for (n, other) in (1..).zip(vendor.events()) {
                let select = if others { ON | other } else { 0 };
                assert!(set_msr(&vcpu, vendor.select(n), select));
            }
            let ends: Vec<[u64; 2]> = steps
                .iter()
                .filter(|(s, _)| s[stream])
                .map(|(_, next)| *next)
                .collect();
            let most = ends.len().min(MOST);
            for n in (1..=most).step_by(if stream == 0 { 1 } else { 13 }) {
                route_to_nmi(&m, &vcpu);
                assert!(set_msr(&vcpu, vendor.select(0), 0));
                assert!(set_msr(&vcpu, vendor.status(), 0));
                let from = (n as u64).wrapping_neg() & 0xffff_ffff_ffff;
                assert!(set_msr(&vcpu, vendor.counter(0), from));
                assert!(set_msr(&vcpu, vendor.select(0), ON | INT | event));
                start(&vcpu, CODE);
                finish(&mut vcpu);
                let [at, times, turns, _] = seen(&m);
                let [rip, turn] = ends[n - 1];
                let what = (vendor, others, event, n);
                assert_eq!([at, times, turns], [rip, 1, turn], "{what:x?}");
                assert_eq!(msr(&vcpu, vendor.status()), 1, "{what:x?}");
            }
        }
    }
}

/// Between two WRMSRs: what the first enables does not count itself, and the other one is counted.
fn enables_and_disables(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(ecx, GLOBAL_CTRL)?;
    a.mov(eax, 1)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    for _ in 0..100 {
        a.nop()?;
    }
    a.mov(ecx, 0)?;
    a.rdpmc()?;
    a.mov(rbx, rax)?;
    a.mov(ecx, GLOBAL_CTRL)?;
    a.xor(eax, eax)?;
    a.wrmsr()?;
    a.nop()?;
    a.out(u32::from(PORT), al)
}

#[test]
fn a_write_counts_where_it_disables() {
    let m = Machine::new();
    m.load(CODE, enables_and_disables);
    let mut vcpu = Vendor::Intel.vcpu(&m, CODE);
    for _ in 0..3 {
        assert!(set_msr(&vcpu, GLOBAL_CTRL, 0));
        assert!(set_msr(&vcpu, PMC0, 0));
        assert!(set_msr(&vcpu, PERFEVTSEL0, ON | 0xc0));
        start(&vcpu, CODE);
        finish(&mut vcpu);
        // NOPs, and the MOV before RDPMC.
        assert_eq!(vcpu.get_regs().unwrap().rbx, 101);
        assert_eq!(msr(&vcpu, PMC0), 100 + 6);
    }
}

/// In each of [`ROUNDS`]: a load, a store, an instruction that is both at one place, and one at two places. The last is
/// RET, a load.
fn loads_and_stores(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut turn, mut function, mut end] = [(); 3].map(|()| a.create_label());
    a.mov(r8d, ROUNDS as u32)?;
    a.mov(rsi, 0x5000_u64)?;
    a.set_label(&mut turn)?;
    a.mov(eax, dword_ptr(rsi))?;
    a.mov(dword_ptr(rsi), eax)?;
    a.inc(dword_ptr(rsi))?;
    a.push(qword_ptr(rsi))?;
    a.lea(rsp, qword_ptr(rsp + 8))?;
    a.dec(r8d)?;
    a.jne(turn)?;
    a.call(function)?;
    a.jmp(end)?;
    a.set_label(&mut function)?;
    a.ret()?;
    a.set_label(&mut end)?;
    a.out(u32::from(PORT), al)
}

const ROUNDS: u64 = 5000;

#[test]
fn loads_and_stores_count() {
    let [loads, stores] = [ROUNDS * 2 + 1; 2];
    for (vendor, events) in [
        (
            Vendor::Intel,
            // Loads, stores, either.
            vec![
                (0x81d0, loads + ROUNDS),
                (0x82d0, stores + ROUNDS),
                (0x83d0, 4 * ROUNDS + 2),
                (0x80d0, 0),
            ],
        ),
        (
            Vendor::Amd,
            // Loads, stores, both at one place, and sums of these.
            vec![
                (0x129, loads),
                (0x229, stores),
                (0x429, ROUNDS),
                (0x329, loads + stores),
                (0x729, loads + stores + ROUNDS),
            ],
        ),
    ] {
        let m = Machine::new();
        m.load(CODE, loads_and_stores);
        let mut vcpu = vendor.vcpu(&m, CODE);
        // First of all the code has been translated.
        start(&vcpu, CODE);
        finish(&mut vcpu);
        for (n, (event, _)) in (0..).zip(&events) {
            assert!(set_msr(&vcpu, vendor.select(n), ON | event));
        }
        start(&vcpu, CODE);
        finish(&mut vcpu);
        for (n, (event, expected)) in (0..).zip(&events) {
            let counted = msr(&vcpu, vendor.counter(n));
            assert_eq!(counted, *expected, "{vendor:?} {event:#x}");
        }
    }
}

/// Where the guest has a page and no memory.
const DEVICE: u64 = 0x20_0000;
const DEVICE_ENTRY: (u64, u64) = (long_mode::PML4 + 0x2008, DEVICE | 0x83);

/// As [`loads_and_stores`], but of a device's register. `push` and `inc` are executed again after the VMM's answer.
fn loads_and_stores_of_a_device(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut turn = a.create_label();
    a.mov(r8d, DEVICE_ROUNDS as u32)?;
    a.mov(rsi, DEVICE)?;
    a.set_label(&mut turn)?;
    a.mov(eax, dword_ptr(rsi))?;
    a.mov(dword_ptr(rsi), eax)?;
    a.mov(byte_ptr(rsi + 8), 1)?;
    a.inc(dword_ptr(rsi))?;
    a.push(qword_ptr(rsi))?;
    a.lea(rsp, qword_ptr(rsp + 8))?;
    a.dec(r8d)?;
    a.jne(turn)?;
    a.out(u32::from(PORT), al)
}

const DEVICE_ROUNDS: u64 = 500;

#[test]
fn accesses_to_devices_count_once() {
    let m = Machine::new();
    m.load(CODE, loads_and_stores_of_a_device);
    let (at, entry) = DEVICE_ENTRY;
    m.write(at, &entry.to_le_bytes());
    let mut vcpu = Vendor::Intel.vcpu(&m, CODE);
    // Loads, stores, either, and instructions.
    let expected = [
        (0x81d0, 3 * DEVICE_ROUNDS),
        (0x82d0, 4 * DEVICE_ROUNDS),
        (0x83d0, 5 * DEVICE_ROUNDS),
        (0xc0, 8 * DEVICE_ROUNDS + 2),
    ];
    for (n, (event, _)) in (0..).zip(expected) {
        assert!(set_msr(&vcpu, PERFEVTSEL0 + n, ON | event));
    }
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::IoOut(..) => break,
            VcpuExit::MmioRead(DEVICE, data) => data.fill(7),
            VcpuExit::MmioWrite(..) => {}
            other => panic!("{other:?}"),
        }
    }
    for (n, (event, expected)) in (0..).zip(expected) {
        assert_eq!(msr(&vcpu, PMC0 + n), expected, "{event:#x}");
    }
}

/// IA32_A_PMC0 of a counter with more bits than WRMSR to IA32_PMC0 could set.
fn reads_in_full_width(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(ecx, FULL_WIDTH_PMC0)?;
    a.mov(eax, 0x9000_0001_u32)?;
    a.mov(edx, 0x1234)?;
    a.wrmsr()?;
    a.xor(eax, eax)?;
    a.rdmsr()?;
    a.mov(ebx, eax)?;
    a.shl(rdx, 32)?;
    a.or(rbx, rdx)?;
    a.out(u32::from(PORT), al)
}

#[test]
fn a_guest_reads_a_counter_in_full_width() {
    let m = Machine::new();
    m.load(CODE, reads_in_full_width);
    let mut vcpu = Vendor::Intel.vcpu(&m, CODE);
    assert!(set_msr(&vcpu, PERF_CAPABILITIES, 1 << 13));
    finish(&mut vcpu);
    assert_eq!(vcpu.get_regs().unwrap().rbx, 0x1234_9000_0001);
    assert_eq!(msr(&vcpu, FULL_WIDTH_PMC0), 0x1234_9000_0001);
}

#[test]
fn that_counters_can_freeze_in_smm_is_not_shown() {
    let m = Machine::new();
    let vcpu = Vendor::Intel.vcpu(&m, CODE);
    let shown = msr(&vcpu, PERF_CAPABILITIES);
    assert_eq!(shown & 1 << 12, 0);
    assert!(!set_msr(&vcpu, PERF_CAPABILITIES, shown | 1 << 12));
    freeze_in_smm(&vcpu, true);
    assert_eq!(msr(&vcpu, DEBUGCTL), 1 << 14);
}

/// A loop between two exits.
fn loops(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut turn = a.create_label();
    a.out(u32::from(PORT), al)?;
    a.mov(ecx, 1000)?;
    a.set_label(&mut turn)?;
    a.loop_(turn)?;
    a.out(u32::from(PORT), al)
}

#[test]
fn counters_stand_still_in_smm_if_they_are_to() {
    /// The processor's SMBASE at reset, and the slot of SMM's address space.
    const SMBASE: u64 = 0x3_0000;
    const SLOT: u32 = 1 << 16;
    let m = Machine::new();
    m.load(CODE, loops);
    let smram = Ram::new(0x1_0000);
    add_slot(&m.vm, SLOT, SMBASE, &smram, 0);
    // mov cx, 500; l: loop l; rsm
    smram.write(0x8000, &[0xb9, 0xf4, 0x01, 0xe2, 0xfe, 0x0f, 0xaa]);
    let mut vcpu = Vendor::Intel.vcpu(&m, CODE);
    assert!(set_msr(&vcpu, PERFEVTSEL0, ON | 0xc0));
    let mut count = |freezes: bool, has_smi: bool| {
        freeze_in_smm(&vcpu, freezes);
        start(&vcpu, CODE);
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(..)));
        let before = msr(&vcpu, PMC0);
        if has_smi {
            vcpu.smi().unwrap();
        }
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(..)));
        assert_eq!(vcpu.get_vcpu_events().unwrap().smi.smm, 0);
        msr(&vcpu, PMC0) - before
    };
    let plain = count(true, false);
    assert_eq!(count(false, false), plain);
    // In SMM are 501 instructions and RSM.
    assert_eq!(count(false, true), plain + 502);
    assert!(count(true, true) - plain <= 1);
}

#[test]
fn capabilities_are_zero_where_cpuid_does_not_show_them() {
    const PDCM: u32 = 1 << 15;
    let m = Machine::new();
    let vcpu = Vendor::Intel.vcpu(&m, CODE);
    // On AMD hosts, KVM's vCPUs begin with 0, whatever CPUID shows.
    assert!(set_msr(&vcpu, PERF_CAPABILITIES, 1 << 13));
    let shown = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
    let mut entries = shown.as_slice().to_vec();
    for entry in entries.iter_mut().filter(|e| e.function == 1) {
        entry.ecx &= !PDCM;
    }
    let without = CpuId::from_entries(&entries).unwrap();
    vcpu.set_cpuid2(&without).unwrap();
    assert_eq!(msr(&vcpu, PERF_CAPABILITIES), 0);
    assert!(set_msr(&vcpu, PERF_CAPABILITIES, 0));
    assert!(!set_msr(&vcpu, PERF_CAPABILITIES, 1 << 13));
    vcpu.set_cpuid2(&shown).unwrap();
    assert_eq!(msr(&vcpu, PERF_CAPABILITIES), 1 << 13);
}

#[test]
fn capabilities_stay_once_the_vcpu_has_run() {
    let m = Machine::new();
    m.load(CODE, |a| a.out(u32::from(PORT), al));
    let mut vcpu = Vendor::Intel.vcpu(&m, CODE);
    assert!(set_msr(&vcpu, PERF_CAPABILITIES, 1 << 13));
    // IA32_ARCH_CAPABILITIES, IA32_BIOS_SIGN_ID.
    let others = [0x10a, 0x8b].map(|index| (index, msr(&vcpu, index)));
    finish(&mut vcpu);
    assert!(!set_msr(&vcpu, PERF_CAPABILITIES, 0));
    assert!(set_msr(&vcpu, PERF_CAPABILITIES, 1 << 13));
    assert_eq!(msr(&vcpu, PERF_CAPABILITIES), 1 << 13);
    let [(capabilities, shown), (microcode, version)] = others;
    assert!(set_msr(&vcpu, capabilities, shown));
    assert!(!set_msr(&vcpu, capabilities, shown ^ 1));
    // Microcode may be loaded while a guest runs.
    assert!(set_msr(&vcpu, microcode, version + (1 << 32)));
}

#[test]
fn what_is_listed_is_saved_and_restored() {
    let m = machine(false);
    let vcpu = m.vcpu(0, CODE);
    let list = m.kvm.get_msr_index_list().unwrap();
    let is_counter = |i: u32| matches!(i, 0xc1..=0xc8 | 0x186..=0x18d | 0x309..=0x390 | 0xc001_0000..=0xc001_0007 | 0xc001_0200..=0xc001_020b | 0xc000_0300..=0xc000_0303);
    let counters = list.as_slice().iter().filter(|i| is_counter(**i));
    assert!(counters.clone().count() >= 20);
    for &index in counters {
        let value = msr(&vcpu, index);
        assert!(set_msr(&vcpu, index, value), "{index:#x}");
    }
}

/// Nothing says that there are last-branch records, nor do registers of theirs: a guest's kernel that looks for them finds none.
#[test]
fn last_branch_records_are_not_shown() {
    for vendor in Vendor::ALL {
        let m = machine(false);
        let vcpu = vendor.vcpu(&m, CODE);
        let table = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let leaf = |function: u32| {
            let all = table.as_slice().iter();
            all.filter(move |e| e.function == function)
        };
        // Architectural records; BRS of Zen 3; LBR v2 of Zen 4.
        assert!(leaf(7).all(|e| e.index != 0 || e.edx & 1 << 19 == 0));
        assert!(leaf(0x1c).all(|e| e.eax == 0));
        assert!(leaf(0x8000_0008).all(|e| e.ebx & 1 << 31 == 0));
        assert!(leaf(0x8000_0022).all(|e| e.eax & 2 == 0));
        // Tops of stacks, first records of each kind, their control.
        for index in [
            0x1c9,
            0x40,
            0x680,
            0x6c0,
            0xdc0,
            0x14ce,
            0x1200,
            0xc001_0300,
            0xc000_010f,
        ] {
            assert!(!set_msr(&vcpu, index, 1), "{index:#x}");
        }
        // The format of records in IA32_PERF_CAPABILITIES: 0 is that of the oldest, whose registers are not there.
        assert_eq!(msr(&vcpu, 0x345) & 0x3f, 0);
        // A guest that switches them on has not.
        assert!(set_msr(&vcpu, 0x1d9, 1));
        assert_eq!(msr(&vcpu, 0x1d9), 0);
    }
}

/// KVM_SET_PMU_EVENT_FILTER, KVM_PMU_EVENT_FLAG_MASKED_EVENTS.
const SET_FILTER: u32 = 0x4020_aeb2;
const MASKED: u32 = 1;

#[repr(C)]
struct EventFilter {
    head: [u32; 8],
    events: [u64; 301],
}

fn filter(m: &Machine, action: u32, flags: u32, events: &[u64]) -> Result<i32, i32> {
    let mut list = EventFilter {
        head: [action, events.len() as u32, 0, flags, 0, 0, 0, 0],
        events: [0; 301],
    };
    list.events[..events.len()].copy_from_slice(events);
    ioctl(&m.vm, SET_FILTER, &mut list)
}

#[test]
fn an_event_filter_denies_what_it_lists() {
    let vendor = Vendor::Amd;
    let m = machine(false);
    let mut vcpu = vendor.vcpu(&m, CODE);
    let events = vendor.events();
    assert_eq!(filter(&m, 2, 0, &[]), Err(libc::EINVAL));
    assert_eq!(filter(&m, 0, 2, &[]), Err(libc::EINVAL));
    assert_eq!(filter(&m, 0, MASKED, &[1 << 20]), Err(libc::EINVAL));
    assert_eq!(filter(&m, 0, 0, &[0; 301]), Err(libc::E2BIG));
    for (n, event) in (0..).zip(events) {
        assert!(set_msr(&vcpu, vendor.select(n), ON | event));
    }
    for (action, expected) in [
        (0, [false, true, false, false]),
        (1, [true, false, true, true]),
    ] {
        assert_eq!(filter(&m, action, 0, &events[1..2]), Ok(0));
        for n in 0..4 {
            assert!(set_msr(&vcpu, vendor.counter(n), 0));
        }
        start(&vcpu, CODE);
        finish(&mut vcpu);
        let counted = [0, 1, 2, 3].map(|n| msr(&vcpu, vendor.counter(n)) != 0);
        assert_eq!(counted, expected, "action {action}");
    }
}

#[test]
fn counters_can_be_switched_off_before_there_are_vcpus() {
    let m = machine(false);
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        ..Default::default()
    };
    cap.args[0] = 2;
    assert_eq!(m.vm.enable_cap(&cap).unwrap_err().errno(), libc::EINVAL);
    cap.args[0] = KVM_PMU_CAP_DISABLE.into();
    m.vm.enable_cap(&cap).unwrap();
    let vendor = Vendor::Amd;
    let mut vcpu = vendor.vcpu(&m, CODE);
    assert!(!set_msr(&vcpu, vendor.select(0), ON | 0xc0));
    finish(&mut vcpu);
    assert_eq!(msr(&vcpu, vendor.counter(0)), 0);
    assert_eq!(m.vm.enable_cap(&cap).unwrap_err().errno(), libc::EINVAL);
}
