//! SYSCALL and SYSRETQ between 64-bit levels, without leaving translated code (SDM vol. 2; AMD APM vol. 3). Every other
//! case returns 0 with nothing changed, and is left to the interpreter.

use x86_cpu::CpuState;
use x86_defs::{
    control::{cr4, efer},
    reg, rflags,
    segment::{Attr, Segment},
};

use crate::{Jit, JitBus, runtime::state::target_key};
use x86_codegen::{
    frame::levels::LevelChange,
    frame::state::{SYSRET_FLAGS, pack, unpack},
    ir::{mode::Mode, streams::Streams},
};

fn load_segments(cpu: &mut CpuState, cs: u16, ss: u16, cpl: u8) {
    let flat = |selector: u16, attr: u32| Segment {
        base: 0,
        limit: u32::MAX,
        attr: Attr(attr | u32::from(cpl) << 5),
        selector: selector & !3 | u16::from(cpl),
    };
    cpu.seg[reg::CS] = flat(cs, Attr::FLAT_CODE64);
    cpu.seg[reg::SS] = flat(ss, Attr::FLAT_DATA);
    cpu.cpl = cpl;
}

pub(crate) fn set_flags(cpu: &mut CpuState, flags: u64) {
    cpu.rflags = flags | rflags::FIXED1;
    cpu.engine.flags = pack(flags);
}

/// Returns the facts that a change of the level depends on besides the views and keys, CR0 and PKRU.
pub(crate) fn facts(cpu: &CpuState, plain_tsc: bool, follows_levels: bool) -> u64 {
    let bits = [
        plain_tsc,
        cpu.cr4 & cr4::TSD != 0,
        cpu.efer & efer::SCE != 0,
        cpu.is_canonical(cpu.msr.lstar),
        follows_levels,
    ];
    let bits = bits.iter().fold(0, |all, bit| all << 1 | u64::from(*bit));
    let r = &cpu.retired;
    let streams = match r.levels {
        0 => 0,
        _ => Streams::of(r.streams, r.bounded).number().into(),
    };
    streams << 16 | bits << 8 | u64::from(r.levels)
}

impl<B: JitBus> Jit<B> {
    /// Notes where SYSCALL or SYSRETQ has led to from the view with the tables `from` and the key `from_key`, so that
    /// generated code executes the next one itself.
    pub(crate) fn note_level_change(
        &mut self,
        cpu: &CpuState,
        bus: &mut B,
        (from, from_key): (u64, u64),
    ) {
        let frame = &cpu.engine;
        let modes = [Mode::of_key(from_key), self.session.mode].map(Mode::streams);
        let [before, after] = modes;
        // What is counted of one stream is added to the counts by generated code, and of several by Rust, later.
        let changes_level = before.is_some() && after.is_some_and(|s| s.are_several());
        let is_bounded = modes.iter().flatten().any(|s| s.are_bounded());
        if frame.log() != 0 || bus.follows_levels() || changes_level || is_bounded {
            return;
        }
        let (key, mut salt) = target_key(cpu);
        if before.is_some() != after.is_some() {
            // Nothing goes on if what is to be counted next cannot be.
            if frame.counted_go_on() == 0 {
                return;
            }
            salt = frame.counted_salt;
        }
        self.session.levels.set(LevelChange {
            from: LevelChange::from(from, frame.address_space),
            from_key,
            epoch: bus.mmu().switch_epoch(true),
            cr0: cpu.cr0 as u32,
            pkru: cpu.pkru,
            tables: frame.tables(),
            key,
            salt,
            number: frame.number as u32,
            facts: frame.level_facts as u32,
        });
    }
}

/// Executes SYSCALL at an offset of the current page. Returns the target.
pub(crate) fn enter<B: JitBus>(cpu: &mut CpuState, bus: &mut B, offset: u64) -> u64 {
    const NOT_TAKEN: u64 = rflags::NT | rflags::TF | rflags::AC;
    let frame = &cpu.engine;
    let flags = cpu.rflags & !rflags::ARITH | unpack(frame.flags);
    let after = flags & !cpu.msr.fmask;
    let is_taken = cpu.efer & efer::SCE != 0 && cpu.is_canonical(cpu.msr.lstar);
    if !is_taken || after & NOT_TAKEN != 0 {
        return 0;
    }
    cpu.gpr[reg::RCX] = frame.page + offset + 2;
    cpu.gpr[reg::R11] = flags & !rflags::RF;
    set_flags(cpu, after & !rflags::RF);
    let cs = (cpu.msr.star >> 32) as u16 & !3;
    load_segments(cpu, cs, cs.wrapping_add(8), 0);
    bus.select_view(cpu);
    cpu.msr.lstar
}

/// Returns true if a request or an interrupt has to be looked at before the guest goes on with interrupts enabled.
pub(crate) fn interrupt_waits<B: JitBus>(cpu: &CpuState, bus: &B) -> bool {
    cpu.engine.irq_waiting != 0
        || bus
            .request_word()
            .load(core::sync::atomic::Ordering::Relaxed)
            != 0
}

/// Executes SYSRETQ; RCX and R11 are in memory. Returns the target.
pub(crate) fn leave<B: JitBus>(cpu: &mut CpuState, bus: &mut B) -> u64 {
    let flags = cpu.gpr[reg::R11];
    let target = cpu.gpr[reg::RCX];
    let waits = interrupt_waits(cpu, bus);
    if cpu.efer & efer::SCE == 0
        || flags & !SYSRET_FLAGS != 0
        || target >> 47 != 0
        || flags & rflags::IF != 0 && waits
    {
        return 0;
    }
    set_flags(cpu, flags);
    let base = (cpu.msr.star >> 48) as u16;
    load_segments(cpu, base.wrapping_add(16), base.wrapping_add(8), 3);
    bus.select_view(cpu);
    target
}
