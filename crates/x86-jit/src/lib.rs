//! Same-ISA translation: guest code copied where harmless, rewritten where not.
//!
//! [`Jit`] runs a vCPU's 64-bit code from blocks of host code and leaves single
//! instructions, and every other mode, to the interpreter. Registers stay in
//! host registers (`frame::words`), arithmetic flags in the host's, memory operands
//! go through the MMU's first-level tables inline. A block is keyed by its page
//! in guest-physical memory and the mode, so code that several processes share
//! is translated once, wherever it is mapped.
//!
//! Exits are exact: RIP, registers and memory are as after the last completed
//! instruction. (One exception about flags: see `codegen`.)

mod asm;
mod code;
mod codegen;
mod frame;
#[cfg(test)]
mod golden;
mod ir;
mod plan;
mod profile;
mod region;
mod runtime;

use core::sync::atomic::{AtomicU8, AtomicU32};

use mmu::{Front, Ram};
use x86_cpu::{CpuState, GuestBus};

pub use code::perf::Profiler;
pub use ir::cause::Cause;
pub use runtime::Jit;
pub use runtime::lockstep::LockstepStats;
pub use runtime::stats::Stats;

/// How long translated code may go on without a look of the run loop's, which costs it all returns
/// that the processor would have predicted.
#[derive(Clone, Copy, Debug)]
pub struct RunLimit<'a> {
    /// The host's TSC; at most a quarter of a millisecond from now, or it counts as passed.
    pub until_tsc: u64,
    /// While this byte is not zero, the run loop wants to be returned to at once.
    pub stop: &'a AtomicU8,
}

/// What translated code needs of the outside, besides [`GuestBus`].
pub trait JitBus: GuestBus {
    /// The MMU behind the bus, as translated code sees it.
    fn mmu(&mut self) -> Front<'_>;
    /// The memory behind the bus, without its devices: for the second run in lock-step.
    fn ram(&mut self) -> Ram<'_>;
    /// Becomes non-zero when the run loop has to be returned to. The same word
    /// for the bus's whole life.
    fn request_word(&self) -> &AtomicU32;
    /// An interrupt waits for RFLAGS.IF.
    fn interrupt_waits(&self) -> bool;
    /// True if the run loop has to be returned to before anything else is
    /// executed: [`GuestBus::poll`] without its budget.
    fn must_return(&self, cpu: &CpuState) -> bool;
    /// Guest TSC less host TSC, if that is all their difference.
    fn tsc_offset(&self) -> Option<u64>;
}
