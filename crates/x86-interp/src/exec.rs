//! [`Exec`]: what a handler works on, and what it returns.

use x86_cpu::{CpuState, Exception, Fault, GuestBus};
use x86_defs::rflags;
use x86_native::Native;

use crate::LazyFlags;

/// What follows an instruction that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// The next one in memory.
    Next,
    /// RIP was set; the block ends.
    Jump,
    /// The next one in memory, but decode or state assumptions may have
    /// changed (mode, mapping, code, shadow, TF, IF): the block ends.
    EndBlock,
}

/// Why an instruction did not complete, or completed and left execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Deliver this; RIP still points at the instruction. (Traps such as INT n
    /// and single step are delivered by their handlers and the run loop.)
    Exception(Exception),
    /// The bus has recorded an exit for the VMM; restart the instruction afterwards.
    Exit,
    /// HLT completed: RIP is after it.
    Halt,
    /// Delivery ended in a triple fault.
    TripleFault,
}

impl From<Exception> for Stop {
    #[inline(always)]
    fn from(e: Exception) -> Self {
        Self::Exception(e)
    }
}

impl From<Fault> for Stop {
    #[inline(always)]
    fn from(f: Fault) -> Self {
        match f {
            Fault::Exception(e) => Self::Exception(e),
            Fault::Exit => Self::Exit,
        }
    }
}

/// A handler's result.
pub type Step = Result<Flow, Stop>;

/// The machine as a handler sees it.
#[derive(Debug)]
pub struct Exec<'a, B> {
    /// Registers. `cpu.rflags`' arithmetic bits are stale here: use [`Exec::rflags`].
    pub cpu: &'a mut CpuState,
    /// The outside.
    pub bus: &'a mut B,
    /// Arithmetic flags.
    pub flags: LazyFlags,
    /// Executes FP and SIMD instructions on the host; owned by [`crate::Interp`].
    pub native: &'a mut Native,
}

impl<B: GuestBus> Exec<'_, B> {
    /// RFLAGS, exact.
    #[inline]
    pub fn rflags(&self) -> u64 {
        self.cpu.rflags & !rflags::ARITH | self.flags.get()
    }
    /// Sets RFLAGS; the caller has applied masks and privilege rules, and
    /// returns [`Flow::EndBlock`] or [`Flow::Jump`] if TF, IF, AC or VM changed.
    #[inline]
    pub fn set_rflags(&mut self, v: u64) {
        self.cpu.rflags = v | rflags::FIXED1;
        self.flags.set(v);
    }
    /// Stores the exact arithmetic flags in `cpu.rflags`.
    #[inline]
    pub fn sync_flags(&mut self) {
        self.cpu.rflags = self.rflags();
    }
}
