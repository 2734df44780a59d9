//! System instructions (SDM vol. 3, 2.8), far transfers and port I/O.

mod control;
mod debug;
mod far;
mod flags;
mod interrupt;
mod io;
mod iret;
mod privileged;
mod segments;
mod syscall;
mod tables;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod virtual_tests;

pub use control::cr4_valid_bits;
use iced_x86::Instruction;
use x86_cpu::{Exception, GuestBus};

use super::{Handler, Insn, Selector};
use crate::{Exec, Stop};

/// The handler of a system instruction.
pub(crate) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    segments::select(i)
        .or_else(|| flags::select(i))
        .or_else(|| privileged::select(i))
        .or_else(|| interrupt::select(i))
        .or_else(|| syscall::select(i))
        .or_else(|| control::select(i))
        .or_else(|| io::select(i, insn))
        .or_else(|| far::select(i, insn))
        .or_else(|| debug::select(i))
        .or_else(|| tables::select(i, insn, s))
}

impl<B: GuestBus> Exec<'_, B> {
    /// #GP(0) unless CPL is 0.
    fn require_cpl0(&self) -> Result<(), Stop> {
        if self.cpu.cpl == 0 {
            Ok(())
        } else {
            Err(Exception::GP0.into())
        }
    }
}
