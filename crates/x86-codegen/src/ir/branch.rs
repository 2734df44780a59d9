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

/// Bytes of instructions that are behind a call only to keep the processor from executing there speculatively: UD2,
/// INT3, and PAUSE, with which a retpoline's loop begins.
const TRAPS: [&[u8]; 3] = [&[0x0f, 0x0b], &[0xcc], &[0xf3, 0x90]];

/// Returns true for a direct call whose return address the callee takes off the stack or overwrites, as it seems by what
/// is behind the call: retpolines, safe returns, and what fills the processor's stack of return addresses. This is a
/// hint, as a return compares where it leads to.
pub(crate) fn is_one_way(d: &Decoded) -> bool {
    let behind = d.raw.get(d.i.len()..).unwrap_or_default();
    d.kind == Lowering::Call && TRAPS.iter().any(|trap| behind.starts_with(trap))
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
