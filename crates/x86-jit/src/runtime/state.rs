//! Which states of the vCPU are translated, and which parts of the state are kept elsewhere meanwhile.

use core::arch::asm;

use x86_cpu::{CodeSize, CpuState, Shadow};
use x86_defs::{
    control::{cr0, cr4},
    reg, rflags, xsave,
};
use x86_interp::RunStop;

use crate::{
    Jit, JitBus,
    runtime::breakpoints::{has_io_breakpoint, is_enabled},
    runtime::flat,
};
use x86_codegen::{
    codegen::countdown::{self, exact},
    frame::state::{MXCSR_FREE, X87_MASKED, X87_PENDING},
    ir::mode::Mode,
    ir::streams::Streams,
};

/// Returns the target key that `Jit::set_view` has set, and its salt.
pub(crate) fn target_key(cpu: &CpuState) -> (u64, u64) {
    let frame = &cpu.engine;
    (frame.key, frame.salt)
}

/// Returns true if translated code can count what is to be counted, for a while before a counter can overflow.
pub(crate) fn is_countable(cpu: &CpuState) -> bool {
    let r = &cpu.retired;
    // If no stream is counted, only `left` counts down, and nothing is translated for that.
    r.streams != 0 && r.left >= exact::LEAST
}

/// Returns true if nothing has to be looked at between two instructions. Code with segments is not translated while it
/// is counted.
pub(crate) fn is_translatable(cpu: &CpuState) -> bool {
    let is_flat = cpu.code_size == CodeSize::Bits64 || flat::is_flat(cpu);
    let is_counted = cpu.retired.counts_at(cpu.cpl);
    (is_flat || flat::has_plain_segments(cpu))
        && !needs_stepping(cpu)
        && (!is_counted || is_flat && is_countable(cpu))
        && !(cpu.cpl == 3 && cpu.cr0 & cr0::AM != 0 && cpu.rflags & rflags::AC != 0)
}

/// Clears RF where only a breakpoint could tell, and none is enabled: the instruction that begins now ends RF. (An
/// interrupt before that instruction would show RF in its frame, but callers have just looked for one.) Returns the
/// instruction's address if RF was set: see [`keep_resume_flag`].
pub(crate) fn drop_resume_flag(cpu: &mut CpuState) -> Option<u64> {
    if cpu.rflags & (rflags::TF | rflags::RF) == rflags::RF
        && !is_enabled(cpu)
        && cpu.shadow == Shadow::None
    {
        cpu.rflags &= !rflags::RF;
        return Some(cpu.rip());
    }
    None
}

/// Returns true if code that is gone on with here, `left` instructions before the next poll, may poll before its first
/// instruction. After that poll nothing would say whether the instruction that RF is for has been executed.
pub(crate) fn may_poll_first(cpu: &CpuState, left: u64) -> bool {
    countdown::may_poll_first(left, cpu.retired.streams != 0)
}

/// Sets RF again if the instruction at `resumed`, which [`drop_resume_flag`] returned, has stopped in its middle for
/// the VMM: it will begin again.
pub(crate) fn keep_resume_flag(cpu: &mut CpuState, stop: RunStop, resumed: Option<u64>) {
    if stop == RunStop::Exit && resumed == Some(cpu.rip()) {
        cpu.rflags |= rflags::RF;
    }
}

/// Returns true if the interpreter has to execute instruction by instruction. Other breakpoints than those on I/O do not
/// need that: see [`crate::runtime::breakpoints`].
pub(crate) fn needs_stepping(cpu: &CpuState) -> bool {
    cpu.shadow != Shadow::None
        || cpu.rflags & (rflags::TF | rflags::RF | rflags::VIF | rflags::VIP) != 0
        || has_io_breakpoint(cpu)
}

/// Returns the mode of blocks for this state.
pub(crate) fn mode_of(cpu: &CpuState, plain_tsc: bool) -> Mode {
    let mut mode = flat::mode_of(cpu);
    if has_plain_fp(cpu) {
        mode |= Mode::FP;
    }
    if cpu.cr4 & cr4::OSFXSR != 0 {
        mode |= Mode::SSE;
    }
    if cpu.cr4 & cr4::OSXSAVE != 0 && cpu.xcr0 & 7 == 7 {
        mode |= Mode::AVX;
    }
    if cpu.cpl == 0 && cpu.rflags & rflags::NT == 0 {
        mode |= Mode::KERNEL;
    }
    if cpu.retired.counts_at(cpu.cpl) {
        let r = &cpu.retired;
        mode |= Mode::counting(Streams::of(r.streams, r.bounded));
    }
    if plain_tsc && (cpu.cpl == 0 || cpu.cr4 & cr4::TSD == 0) {
        mode |= Mode::TSC;
    }
    mode
}

/// Returns true if x87 and MMX instructions are enabled, and FP and SIMD instructions raise no exceptions.
pub(crate) fn has_plain_fp(cpu: &CpuState) -> bool {
    // FP state in the host's registers is plain, as it would not have been loaded otherwise.
    let live = cpu.engine.fp_live != 0;
    let plain = live
        || cpu.fp.mxcsr() & !MXCSR_FREE == xsave::MXCSR_DEFAULT
            && cpu.fp.u16_at(xsave::FCW) & X87_MASKED == X87_MASKED
            && cpu.fp.u16_at(xsave::FSW) & X87_PENDING == 0;
    plain && cpu.cr0 & (cr0::EM | cr0::TS) == 0
}

impl<B: JitBus> Jit<B> {
    /// Returns the target key of this state. No key is zero.
    pub(crate) fn target_key_of(&mut self, cpu: &CpuState, bus: &mut B) -> u64 {
        let epoch = bus.mmu().target_epoch(cpu);
        let name = if self.session.mode.has(Mode::SEGMENTED) {
            // Under another code segment, the same instruction pointer is another linear address.
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
        // SAFETY: reading GS's base has no effect, and the kernel allows it.
        unsafe { asm!("rdgsbase {}", out(reg) now, options(nomem, nostack, preserves_flags)) };
        if now != base {
            // SAFETY: the kernel allows it, and user space on x86-64 Linux does not use GS.
            unsafe { asm!("wrgsbase {}", in(reg) base, options(nostack, preserves_flags)) };
        }
        return;
    }
    const ARCH_SET_GS: i32 = 0x1001;
    // SAFETY: the system call sets GS's base, and user space on x86-64 Linux does not use GS.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
}

/// Returns true if the kernel lets user space execute RDGSBASE and WRGSBASE (AT_HWCAP2 bit 1).
pub(crate) fn has_fsgsbase() -> bool {
    static ALLOWED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    // SAFETY: getauxval reads the process's auxiliary vector.
    *ALLOWED.get_or_init(|| unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0)
}

/// Adds `by` to the stack pointer, for a branch.
pub(crate) fn move_stack(cpu: &mut CpuState, by: u64) {
    let old = cpu.gpr[reg::RSP];
    let new = old.wrapping_add(by);
    cpu.gpr[reg::RSP] = if cpu.is_64bit() || cpu.seg[reg::SS].attr.is_big() {
        new & word_mask(cpu)
    } else {
        old & !0xffff | new & 0xffff
    };
}

/// Returns the mask of an address in the current mode.
pub(crate) fn word_mask(cpu: &CpuState) -> u64 {
    if cpu.is_64bit() {
        u64::MAX
    } else {
        0xffff_ffff
    }
}
