//! Where branches lead, and what they do to the stack.

use iced_x86::{Instruction, OpKind};

use super::{decoded::Decoded, lowering::Lowering};

/// Returns the branch target relative to the page: the block is decoded with IP 0 at the page's start.
pub(crate) fn target(i: &Instruction) -> i64 {
    match i.op0_kind() {
        OpKind::NearBranch16 => {
            // The difference is taken in 16 bits, so that a target is right unless it goes around the end of 16-bit
            // addresses.
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

/// Returns how many bytes a return takes off the stack besides its address.
pub(crate) fn popped(i: &Instruction) -> i32 {
    match i.op_count() {
        1 => i.immediate16().into(),
        _ => 0,
    }
}

/// Returns true for an indirect call whose only access is the write of its return address: that can be a group's
/// member.
pub(crate) fn pushes_only(d: &Decoded) -> bool {
    d.kind == Lowering::CallIndirect && d.i.op0_kind() == OpKind::Register
}

/// Returns true if the block ends with a branch to where it begins.
pub(crate) fn is_loop(insns: &[Decoded]) -> bool {
    let (Some(first), Some(last)) = (insns.first(), insns.last()) else {
        return false;
    };
    matches!(last.kind, Lowering::Jcc | Lowering::Jmp)
        && target(&last.i) == i64::from(first.offset)
        && insns.iter().all(|d| d.onto.is_none())
}
