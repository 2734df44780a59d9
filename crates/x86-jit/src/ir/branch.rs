//! Where branches lead, and what they do to the stack.

use iced_x86::{Instruction, OpKind};

use super::{decoded::Decoded, lowering::Lowering};

/// Branch target relative to the page, as the block was decoded with IP 0 at its start.
pub(crate) fn target(i: &Instruction) -> i64 {
    match i.op0_kind() {
        OpKind::NearBranch16 => {
            // So that what does not go around the end of addresses of 16 bits is where it is.
            let next = i.next_ip();
            next as i64 + i64::from(i.near_branch16().wrapping_sub(next as u16) as i16)
        }
        OpKind::NearBranch32 => i64::from(i.near_branch32() as i32),
        _ => i.near_branch64() as i64,
    }
}

/// Makes a direct branch lead to an offset in the page.
pub(crate) fn set_target(i: &mut Instruction, to: u32) {
    match i.op0_kind() {
        OpKind::NearBranch16 => i.set_near_branch16(to as u16),
        OpKind::NearBranch32 => i.set_near_branch32(to),
        _ => i.set_near_branch64(to.into()),
    }
}

/// Bytes that a return takes off the stack besides its address.
pub(crate) fn popped(i: &Instruction) -> i32 {
    match i.op_count() {
        1 => i.immediate16().into(),
        _ => 0,
    }
}

/// The word that an indirect call to what comes next writes can be a group's member.
pub(crate) fn pushes_only(d: &Decoded) -> bool {
    d.kind == Lowering::CallIndirect && d.i.op0_kind() == OpKind::Register
}

/// The block ends with a branch to where it begins.
pub(crate) fn is_loop(insns: &[Decoded]) -> bool {
    let (Some(first), Some(last)) = (insns.first(), insns.last()) else {
        return false;
    };
    matches!(last.kind, Lowering::Jcc | Lowering::Jmp)
        && target(&last.i) == i64::from(first.offset)
        && insns.iter().all(|d| d.onto.is_none())
}
