//! x87, MMX, SSE and AVX instructions (SDM vol. 1, chapters 8 to 14).

use iced_x86::Instruction;
use x86_cpu::GuestBus;
use x86_native::Native;

use super::Insn;
use crate::Handler;

/// The handler of an FP/SIMD/XSAVE instruction, or `None` if it is not one of
/// them or the host cannot execute it. Fills `insn.extra` and `insn.imm2` as
/// the handler needs them; everything else of `insn` is already decoded.
pub(crate) fn select<B: GuestBus>(
    _native: &mut Native,
    _instruction: &Instruction,
    _insn: &mut Insn<B>,
) -> Option<Handler<B>> {
    None
}
