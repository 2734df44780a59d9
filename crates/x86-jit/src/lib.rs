//! Translation to the same instruction set: guest code is copied where it is harmless, and rewritten where it is not.
//!
//! [`Jit`] executes a vCPU's code as blocks of host code. It leaves single instructions, and states that are not
//! translated, to the interpreter. Guest registers are in host registers (`x86_codegen::frame::words`), and arithmetic flags in the
//! host's. Memory operands go inline through the MMU's first-level tables. A block is keyed by its page in guest
//! physical memory and the mode, so that code that several processes share is translated once, wherever it is mapped.
//!
//! Exits are exact: RIP, registers and memory are as after the last completed
//! instruction. (One exception about flags: see [`x86_codegen::codegen`].)

mod code;
mod profile;
mod runtime;

use core::sync::atomic::{AtomicU8, AtomicU32};

use mmu::{Front, Ram};
use x86_cpu::{CpuState, GuestBus};

pub use code::perf::Profiler;
pub use runtime::lockstep::LockstepStats;
pub use runtime::stats::Stats;
pub use runtime::{CACHE_SIZE, Jit};
pub use x86_codegen::ir::cause::Cause;

/// How long translated code may go on without returning to the run loop. Each return drops the host's stack, so the
/// processor mispredicts the guest's next returns.
#[derive(Clone, Copy, Debug)]
pub struct RunLimit<'a> {
    /// The host's TSC at which the limit is reached. A value more than a quarter of a millisecond ahead counts as
    /// reached.
    pub until_tsc: u64,
    /// The host's TSC at which a counter of cycles overflows, if any does: it is come to as exactly as possible. The
    /// limit is no later.
    pub overflow_tsc: Option<u64>,
    /// Not 0 if the run loop has to be returned to at once.
    pub stop: &'a AtomicU8,
}

/// What translated code needs from outside, besides [`GuestBus`].
pub trait JitBus: GuestBus {
    /// Returns the MMU behind the bus, as translated code sees it.
    fn mmu(&mut self) -> Front<'_>;
    /// Returns the memory behind the bus, without its devices: for the second run in lock-step.
    fn ram(&mut self) -> Ram<'_>;
    /// Returns the word that becomes non-zero when the run loop has to be returned to. It is the same word for the
    /// bus's whole life.
    fn request_word(&self) -> &AtomicU32;
    /// Returns true if an interrupt waits for RFLAGS.IF.
    fn interrupt_waits(&self) -> bool;
    /// Returns true if the run loop has to be returned to before anything else is executed: [`GuestBus::poll`] without
    /// its budget.
    fn must_return(&self, cpu: &CpuState) -> bool;
    /// Returns true if each change of the privilege level has to be told at once, by [`GuestBus::select_view`].
    fn follows_levels(&self) -> bool;
    /// Returns the guest's TSC less the host's, if their difference is constant.
    fn tsc_offset(&self) -> Option<u64>;
}
