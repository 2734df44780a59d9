//! Which groups of a loop have an anchor, and which host registers may have it.

use iced_x86::InstructionInfoFactory;

use crate::{
    ir::decoded::Decoded,
    ir::lowering::Lowering,
    ir::member::{Induction, Member},
};

/// Maximum stride in bytes: fewer than eight iterations per page are not worth it.
const MAX_STRIDE: u32 = 512;
/// Guest registers whose host registers may hold anchors. RAX is not one, because flags are saved by it, nor is R12,
/// which is left for instructions that need more registers to work with.
pub(super) const TO_BORROW: [u8; 8] = [3, 5, 6, 7, 2, 1, 8, 9];

/// A group whose place is known for some iterations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Anchor {
    pub(super) group: u16,
    pub(super) induction: Induction,
    /// The guest register whose host register holds the anchor.
    pub(super) borrowed: Option<u8>,
}

/// Returns where a group begins, if its stride is short and keeps its alignment.
pub(super) fn short_induction(m: &Member) -> Option<Induction> {
    let induction = m.induction?;
    let is_short = induction.stride.unsigned_abs() <= MAX_STRIDE;
    (is_short && induction.stride % i32::from(m.align.to) == 0).then_some(induction)
}

/// Returns the guest registers of [`TO_BORROW`] that the instructions do not use; none if an instruction may leave the
/// loop other than by a stub.
pub(super) fn unused(insns: &[Decoded]) -> impl Iterator<Item = u8> {
    use Lowering as K;
    let mut factory = InstructionInfoFactory::new();
    let mut used = 0_u16;
    for d in insns {
        let is_plain = matches!(
            d.kind,
            K::Nop
                | K::Copy
                | K::CopyAligned
                | K::CopyFp
                | K::CopyFpAligned
                | K::Lea
                | K::Push
                | K::Pop
                | K::Jcc
                | K::Jmp
                | K::Followed
        );
        if !is_plain {
            used = !0;
        }
        for r in factory.info(&d.i).used_registers() {
            let r = r.register();
            if r.is_gpr() {
                used |= 1 << (r.full_register().number() & 15);
            }
        }
    }
    TO_BORROW.into_iter().filter(move |n| used >> n & 1 == 0)
}

/// Returns the first members of groups, with the groups' anchors.
pub(super) fn anchors(
    insns: &[Decoded],
    inductions: &[(Member, Induction)],
) -> Vec<(Member, Anchor)> {
    let mut free = unused(insns);
    let anchors = inductions.iter().map(|(m, induction)| {
        let is_member = |d: &Decoded| d.member.is_some_and(|other| other.group == m.group);
        let by_operand = !insns
            .iter()
            .any(|d| is_member(d) && d.kind.stack_base().is_some());
        let anchor = Anchor {
            group: m.group,
            induction: *induction,
            borrowed: by_operand.then(|| free.next()).flatten(),
        };
        (*m, anchor)
    });
    anchors.collect()
}

/// Returns how many iterations of the loop a pass of the block has, if it has several and each accesses the same places
/// of each group, by an anchor in a register: then a pass may begin with any of them. Also returns the groups as they
/// are for one iteration.
pub(super) fn single_turns(
    insns: &[Decoded],
    anchors: &[(Member, Anchor)],
) -> Option<(u32, Vec<(Member, Induction)>)> {
    let first = insns.first()?.offset;
    let turns = insns.iter().filter(|d| d.offset == first).count();
    if turns < 2 || !insns.len().is_multiple_of(turns) {
        return None;
    }
    let stride = |a: &Anchor| a.induction.stride / turns as i32;
    let (turn, others) = insns.split_at(insns.len() / turns);
    let are_alike = others.chunks(turn.len()).zip(1..).all(|(other, n)| {
        turn.iter().zip(other).all(|(one, other)| {
            let Some(m) = one.member else {
                return other.member.is_none();
            };
            let mut anchors = anchors.iter().map(|(_, a)| a);
            let anchor = anchors.find(|a| a.group == m.group && a.borrowed.is_some());
            anchor.is_some_and(|a| {
                let offset = m.offset + n * stride(a);
                one.offset == other.offset
                    && other
                        .member
                        .is_some_and(|m| (m.group, m.offset) == (a.group, offset))
            })
        })
    });
    let inductions = anchors.iter().map(|(m, a)| {
        let stride = stride(a);
        let more = stride.abs() * (turns as i32 - 1);
        let is_whole =
            a.induction.stride % turns as i32 == 0 && stride % i32::from(m.align.to) == 0;
        let from = if stride < 0 { more } else { 0 };
        let induction = Induction {
            stride,
            from: a.induction.from.checked_add(from)?,
            ..a.induction
        };
        let span = m.span.checked_sub(more as u32)?;
        is_whole.then_some((Member { span, ..*m }, induction))
    });
    let inductions = inductions.collect::<Option<_>>()?;
    are_alike.then_some((turns as u32, inductions))
}
