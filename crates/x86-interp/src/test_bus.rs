//! The machine of the unit tests: a megabyte of flat memory with a GDT, an IDT and a TSS.

use testkit::FlatBus;
use x86_cpu::CpuState;

/// Flat memory in which exceptions are delivered.
pub(crate) type TestBus = FlatBus;

/// A megabyte of memory at address 0.
pub(crate) fn memory() -> TestBus {
    let mut bus = TestBus::new();
    bus.map(0, 1 << 20);
    bus.deliver = true;
    bus.input = 0x1234_5678;
    bus
}

/// Layout of the test machine.
pub(crate) mod at {
    pub(crate) const CODE: u64 = 0x1000;
    pub(crate) const GDT: u64 = 0x2000;
    pub(crate) const IDT: u64 = 0x3000;
    pub(crate) const TSS: u64 = 0x5000;
    pub(crate) const TSS2: u64 = 0x5800;
    pub(crate) const STACK0: u64 = 0x8000;
    pub(crate) const IST1: u64 = 0x9000;
    pub(crate) const STACK: u64 = 0xa000;
    pub(crate) const HANDLER: u64 = 0x1800;
}

/// Selectors of the test GDT.
pub(crate) mod sel {
    pub(crate) const CODE0: u16 = 0x08;
    pub(crate) const DATA0: u16 = 0x10;
    pub(crate) const DATA3: u16 = 0x1b;
    pub(crate) const CODE3: u16 = 0x23;
    pub(crate) const CODE32: u16 = 0x28;
    pub(crate) const TSS: u16 = 0x30;
    pub(crate) const GATE: u16 = 0x43;
    pub(crate) const TSS2: u16 = 0x50;
}

use x86_defs::{
    control::{cr0, cr4, efer},
    reg, rflags,
    segment::{Attr, DescriptorTable, Segment},
};

fn system_descriptor(base: u64, limit: u64, kind: u64) -> u64 {
    limit & 0xffff | (base & 0xff_ffff) << 16 | (0x80 | kind) << 40 | (base >> 24 & 0xff) << 56
}

/// GDT, TSS and a CPU in 64-bit or 32-bit protected mode at `cpl`.
pub(crate) fn machine(long: bool, cpl: u8) -> (CpuState, TestBus) {
    let mut bus = memory();
    let code = if long {
        0x00af_9a00_0000_ffff
    } else {
        0x00cf_9a00_0000_ffff
    };
    let dpl3 = 3 << 45;
    for (selector, d) in [
        (sel::CODE0, code),
        (sel::DATA0, 0x00cf_9200_0000_ffff),
        (sel::DATA3, 0x00cf_9200_0000_ffff | dpl3),
        (sel::CODE3, code | dpl3),
        (sel::CODE32, 0x00cf_9a00_0000_ffff),
        (sel::TSS, system_descriptor(at::TSS, 0x2fff, 9)),
        (sel::TSS2, system_descriptor(at::TSS2, 0x67, 9)),
    ] {
        bus.put64(at::GDT + u64::from(selector & !7), d);
    }
    let mut cpu = CpuState::default();
    let flat = |attr: u32, dpl: u8, selector: u16| Segment {
        base: 0,
        limit: u32::MAX,
        attr: Attr(attr | u32::from(dpl) << 5),
        selector: selector & !3 | u16::from(dpl),
    };
    cpu.cpl = cpl;
    let (cs, ss) = if cpl == 0 {
        (sel::CODE0, sel::DATA0)
    } else {
        (sel::CODE3, sel::DATA3)
    };
    for s in &mut cpu.seg {
        *s = flat(0xc093, 3, sel::DATA3);
    }
    cpu.seg[reg::CS] = flat(if long { 0xa09b } else { 0xc09b }, cpl, cs);
    cpu.seg[reg::SS] = flat(0xc093, cpl, ss);
    cpu.tr = Segment {
        base: at::TSS,
        limit: 0x2fff,
        attr: Attr(0x8b),
        selector: sel::TSS,
    };
    cpu.ldtr.attr = Attr(Attr::UNUSABLE);
    cpu.gdtr = DescriptorTable {
        base: at::GDT,
        limit: 0xff,
    };
    cpu.idtr = DescriptorTable {
        base: at::IDT,
        limit: 0xfff,
    };
    cpu.cr0 = cr0::PE | cr0::ET;
    if long {
        cpu.cr0 |= cr0::PG;
        cpu.cr4 = cr4::PAE;
        cpu.efer = efer::LMA | efer::LME;
        bus.put64(at::TSS + 4, at::STACK0 + 8);
        bus.put64(at::TSS + 36, at::IST1);
    } else {
        bus.put(at::TSS + 4, &(at::STACK0 as u32).to_le_bytes());
        bus.put(at::TSS + 8, &u32::from(sel::DATA0).to_le_bytes());
    }
    cpu.gpr[reg::RSP] = at::STACK;
    cpu.set_rip(at::CODE);
    cpu.rflags = rflags::FIXED1 | rflags::IF | rflags::CF;
    cpu.update_mode();
    (cpu, bus)
}

/// Installs a gate to [`at::HANDLER`] in CODE0: `kind` 14 or 15, with DPL and IST.
pub(crate) fn gate(bus: &mut TestBus, long: bool, vector: u8, kind: u64, dpl: u64, ist: u64) {
    let d = at::HANDLER | u64::from(sel::CODE0) << 16 | ist << 32 | (0x80 | dpl << 5 | kind) << 40;
    bus.put64(at::IDT + u64::from(vector) * if long { 16 } else { 8 }, d);
}
