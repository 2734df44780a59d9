//! An access's place in its group, as the plan notes it at the instruction.

/// An instruction's place in its group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// Number of the group in the block.
    pub(crate) group: u16,
    /// It probes.
    pub(crate) first: bool,
    /// The group has writes.
    pub(crate) write: bool,
    /// It is on the stack.
    pub(crate) stack: bool,
    /// A miss may be refilled: the first access is itself of the group's kind.
    pub(crate) refill: bool,
    /// What members have to be aligned to, or 1, and where in the group such a place is.
    pub(crate) align: Align,
    /// Bytes of the group.
    pub(crate) span: u32,
    /// Offset of the access in them.
    pub(crate) offset: i32,
    /// Where the pointer is kept, as others use it after it is no longer in its register.
    pub(crate) slot: Option<u8>,
    /// The block is a loop, and the group is in the same place in each of its turns.
    pub(crate) stays: bool,
    /// There are no others in the group.
    pub(crate) alone: bool,
    /// Where the group is, if that is known from what the block begins with.
    pub(crate) induction: Option<Induction>,
    /// Where the access is from the group's anchor (see [`Induction`]) plus what the operand has of the register that moves.
    pub(crate) from_anchor: i32,
}

/// Where a group is, relative to registers, one of which the block may change by a constant: at its anchor, which stays, plus
/// that register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Induction {
    pub(crate) base: Base,
    /// The index's number, and log2 of its scale.
    pub(crate) index: Option<(u8, u8)>,
    /// What has to be added to what they are when the block begins.
    pub(crate) from: i32,
    /// What the block adds to the address.
    pub(crate) stride: i32,
    pub(crate) moves: Moves,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    None,
    Register(u8),
    /// The page that is executed.
    Page,
}

/// What the block changes of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    Nothing,
    Base,
    Index,
}

/// Offsets that are aligned: `at` plus multiples of `to`, a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Align {
    pub(crate) to: u8,
    pub(crate) at: u8,
}

impl Align {
    pub(crate) const NONE: Self = Self { to: 1, at: 0 };

    /// What both ask for; `None` if one of them is misaligned wherever the other is aligned.
    pub(crate) fn and(self, other: Self) -> Option<Self> {
        let (less, more) = if self.to < other.to {
            (self, other)
        } else {
            (other, self)
        };
        (more.at % less.to == less.at).then_some(more)
    }

    /// The same of offsets from `start`.
    pub(crate) fn from(self, start: i64) -> Self {
        let at = (i64::from(self.at) - start).rem_euclid(self.to.into());
        Self {
            at: at as u8,
            ..self
        }
    }
}
