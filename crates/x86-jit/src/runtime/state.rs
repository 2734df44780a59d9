//! Which states translated code is for, and what of the state is kept elsewhere while it runs.

use core::arch::asm;

use x86_cpu::{CodeSize, CpuState, Shadow};
use x86_defs::{
    control::{cr0, cr4},
    dr, reg, rflags, xsave,
};
use x86_interp::RunStop;

use crate::{
    Jit, JitBus,
    codegen::countdown::exact,
    frame::state::{MXCSR_FREE, X87_MASKED, X87_PENDING},
    ir::mode::Mode,
    ir::streams::Streams,
    runtime::flat,
};

/// What `Jit::set_view` has set: the key of targets, and its salt.
pub(crate) fn target_key(cpu: &CpuState) -> (u64, u64) {
    let frame = &cpu.engine;
    (frame.key, frame.salt)
}

/// IA32_DEBUGCTL.FREEZE_WHILE_SMM.
const FREEZE_WHILE_SMM: u64 = 1 << 14;

/// Translated code counts what is to be counted, and may go on for a while until a counter can overflow.
pub(crate) fn is_countable(cpu: &CpuState) -> bool {
    let r = &cpu.retired;
    // Where no stream is counted, instructions are interpreted before a sample: nothing is translated for that. Who has counters stand
    // still in SMM looks at them whenever the view changes, in the middle of a block.
    cpu.msr.debugctl & FREEZE_WHILE_SMM == 0 && r.streams != 0 && r.left >= exact::LEAST
}

/// Code with nothing to be looked at between two instructions. Code of segments is not translated to count.
pub(crate) fn is_translatable(cpu: &CpuState) -> bool {
    let is_flat = cpu.code_size == CodeSize::Bits64 || flat::is_flat(cpu);
    let is_counted = cpu.retired.counts_at(cpu.cpl);
    (is_flat || flat::has_plain_segments(cpu))
        && !needs_stepping(cpu)
        && (!is_counted || is_flat && is_countable(cpu))
        && !(cpu.cpl == 3 && cpu.cr0 & cr0::AM != 0 && cpu.rflags & rflags::AC != 0)
}

/// RF only matters while breakpoints are enabled: without any, the instruction
/// that begins now ends it. (An interrupt before it would show it in its frame;
/// callers have just looked for one.)
/// If it was set, its instruction's address is returned: see [`keep_resume_flag`].
pub(crate) fn drop_resume_flag(cpu: &mut CpuState) -> Option<u64> {
    if cpu.rflags & (rflags::TF | rflags::RF) == rflags::RF
        && cpu.effective_dr7() & dr::DR7_ENABLES == 0
        && cpu.shadow == Shadow::None
    {
        cpu.rflags &= !rflags::RF;
        return Some(cpu.rip());
    }
    None
}

/// An exit to the VMM in the middle of the instruction at `resumed`, which
/// [`drop_resume_flag`] returned: it begins again, with RF set.
pub(crate) fn keep_resume_flag(cpu: &mut CpuState, stop: RunStop, resumed: Option<u64>) {
    if stop == RunStop::Exit && resumed == Some(cpu.rip()) {
        cpu.rflags |= rflags::RF;
    }
}

pub(crate) fn needs_stepping(cpu: &CpuState) -> bool {
    cpu.shadow != Shadow::None
        || cpu.rflags & (rflags::TF | rflags::RF | rflags::VIF | rflags::VIP) != 0
        || cpu.effective_dr7() & dr::DR7_ENABLES != 0
}

/// The mode bits of blocks for this state.
pub(crate) fn mode_of(cpu: &CpuState, plain_tsc: bool) -> Mode {
    let mut mode = flat::mode_of(cpu);
    if has_plain_fp(cpu) {
        mode |= Mode::FP;
    }
    if cpu.cr4 & cr4::OSXSAVE != 0 && cpu.xcr0 & 7 == 7 {
        mode |= Mode::AVX;
    }
    if cpu.cpl == 0 && cpu.rflags & (rflags::IOPL | rflags::NT | rflags::DF) == 0 {
        mode |= Mode::KERNEL;
    }
    if cpu.retired.counts_at(cpu.cpl) {
        let streams = cpu.retired.streams;
        mode |= Mode::counting(match cpu.retired.held {
            0 => Streams::of(streams),
            _ => Streams::held(streams),
        });
    }
    if plain_tsc && (cpu.cpl == 0 || cpu.cr4 & cr4::TSD == 0) {
        mode |= Mode::TSC;
    }
    mode
}

/// FP and SIMD instructions are enabled, and raise no exceptions.
pub(crate) fn has_plain_fp(cpu: &CpuState) -> bool {
    // What is in the host's registers got there because it is plain.
    let live = cpu.engine.fp_live != 0;
    let plain = live
        || cpu.fp.mxcsr() & !MXCSR_FREE == xsave::MXCSR_DEFAULT
            && cpu.fp.u16_at(xsave::FCW) & X87_MASKED == X87_MASKED
            && cpu.fp.u16_at(xsave::FSW) & X87_PENDING == 0;
    plain && cpu.cr0 & (cr0::EM | cr0::TS) == 0 && cpu.cr4 & cr4::OSFXSR != 0
}

impl<B: JitBus> Jit<B> {
    /// No key is zero.
    pub(crate) fn target_key_of(&mut self, cpu: &CpuState, bus: &mut B) -> u64 {
        let epoch = bus.mmu().target_epoch(cpu);
        let name = if self.session.mode.has(Mode::SEGMENTED) {
            // The same instruction pointer is elsewhere under another code segment.
            self.session.code_segments.name(cpu, epoch)
        } else {
            epoch + 1
        };
        name << Mode::WIDTH | self.session.mode.number()
    }
}

/// Makes GS address `cpu`.
pub(crate) fn set_gs_base(cpu: &CpuState) {
    let base = &raw const *cpu as u64;
    if has_fsgsbase() {
        let now: u64;
        // SAFETY: reading GS's base has no effect; the kernel allows it.
        unsafe { asm!("rdgsbase {}", out(reg) now, options(nomem, nostack, preserves_flags)) };
        if now != base {
            // SAFETY: user space on x86-64 Linux does not use GS.
            unsafe { asm!("wrgsbase {}", in(reg) base, options(nostack, preserves_flags)) };
        }
        return;
    }
    const ARCH_SET_GS: i32 = 0x1001;
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
}

/// The kernel lets user space execute RDGSBASE (AT_HWCAP2 bit 1).
pub(crate) fn has_fsgsbase() -> bool {
    static ALLOWED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    // SAFETY: getauxval reads the process's auxiliary vector.
    *ALLOWED.get_or_init(|| unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0)
}

/// A branch moves the stack pointer.
pub(crate) fn move_stack(cpu: &mut CpuState, by: u64) {
    let old = cpu.gpr[reg::RSP];
    let new = old.wrapping_add(by);
    cpu.gpr[reg::RSP] = if cpu.is_64bit() || cpu.seg[reg::SS].attr.is_big() {
        new & word_mask(cpu)
    } else {
        old & !0xffff | new & 0xffff
    };
}

/// Bits of an address in the mode.
pub(crate) fn word_mask(cpu: &CpuState) -> u64 {
    if cpu.is_64bit() {
        u64::MAX
    } else {
        0xffff_ffff
    }
}
