//! An access's place in its group, as the plan notes it at the instruction.

/// An instruction's place in its group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// Number of the group in the block.
    pub(crate) group: u16,
    /// The access probes for the group.
    pub(crate) first: bool,
    /// The group has writes.
    pub(crate) write: bool,
    /// The group is on the stack.
    pub(crate) stack: bool,
    /// A miss may be refilled, because the first access writes if any of the group does.
    pub(crate) refill: bool,
    /// What members have to be aligned to, or 1, and where in the group such an address is.
    pub(crate) align: Align,
    /// Length of the group in bytes.
    pub(crate) span: u32,
    /// Offset of the access in the group.
    pub(crate) offset: i32,
    /// The slot that the host pointer is kept in, if members use it after its register has held something else.
    pub(crate) slot: Option<u8>,
    /// The block is a loop, and the group is in the same place in each of its iterations.
    pub(crate) stays: bool,
    /// The group has no other members.
    pub(crate) alone: bool,
    /// Where the group is, if that follows from the registers at the block's begin.
    pub(crate) induction: Option<Induction>,
    /// The access's address less the group's anchor (see [`Induction`]) and less what the operand takes from the
    /// register that moves.
    pub(crate) from_anchor: i32,
}

/// Where a group is: at the sum of a base and an index, of which the block changes at most one by a constant. What
/// stays of the sum is the group's *anchor*; the register that moves is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Induction {
    pub(crate) base: Base,
    /// Number of the index register, and log2 of its scale.
    pub(crate) index: Option<(u8, u8)>,
    /// Distance of the group from the sum of base and index when the block begins.
    pub(crate) from: i32,
    /// What one pass of the block adds to the address.
    pub(crate) stride: i32,
    pub(crate) moves: Moves,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    None,
    Register(u8),
    /// The page of the executed code.
    Page,
}

/// Which part of an address the block changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    Nothing,
    Base,
    Index,
}

/// A set of aligned offsets: `at` plus multiples of `to`, a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Align {
    pub(crate) to: u8,
    pub(crate) at: u8,
}

impl Align {
    pub(crate) const NONE: Self = Self { to: 1, at: 0 };

    /// Returns the offsets that both sets contain. `None` if they have none in common.
    pub(crate) fn and(self, other: Self) -> Option<Self> {
        let (less, more) = if self.to < other.to {
            (self, other)
        } else {
            (other, self)
        };
        (more.at % less.to == less.at).then_some(more)
    }

    /// Returns the same set for offsets that are counted from `start`.
    pub(crate) fn from(self, start: i64) -> Self {
        let at = (i64::from(self.at) - start).rem_euclid(self.to.into());
        Self {
            at: at as u8,
            ..self
        }
    }
}
