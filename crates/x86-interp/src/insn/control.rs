//! Near control transfers, and the undefined opcode.

use iced_x86::Instruction;
use x86_cpu::{Exception, GuestBus};

use super::{Handler, Insn, Selector};
use crate::{Exec, Step};

/// The handler of a near control transfer.
pub(crate) fn select<B: GuestBus>(
    _i: &Instruction,
    _insn: &mut Insn<B>,
    _s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    None
}

/// UD0, UD1, UD2, every reserved encoding, and what CPUID does not promise.
pub(crate) fn undefined<B: GuestBus>(_: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    Err(Exception::UD.into())
}
