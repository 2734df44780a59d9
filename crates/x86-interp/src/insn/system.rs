//! System instructions.

use iced_x86::Instruction;
use x86_cpu::GuestBus;

use super::{Handler, Insn, Selector};

/// The handler of a system instruction.
pub(crate) fn select<B: GuestBus>(
    _i: &Instruction,
    _insn: &mut Insn<B>,
    _s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    None
}
