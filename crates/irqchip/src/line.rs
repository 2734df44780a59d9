//! Interrupt lines that several sources drive, and the outcome of a change.

/// Sources that may drive one line; each owns one bit of the line's state.
pub mod source {
    /// KVM_IRQ_LINE and irqfds without resampling.
    pub const USERSPACE: u8 = 0;
    /// Irqfds with resampling: they are all lowered together at EOI.
    pub const RESAMPLE: u8 = 1;
    /// The PIT.
    pub const PIT: u8 = 2;
}

/// A line whose level is the OR of its sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line(u32);

impl Line {
    /// Drives the line from one source and returns the line's level.
    pub(crate) fn drive(&mut self, source: u8, level: bool) -> bool {
        let bit = 1u32 << (source & 31);
        if level {
            self.0 |= bit;
        } else {
            self.0 &= !bit;
        }
        self.0 != 0
    }
}

/// The outcome of driving a line, as KVM_IRQ_LINE_STATUS reports it: negative if it was ignored (masked, or without a
/// destination), 0 if it was coalesced with an interrupt that is still pending, otherwise the number of deliveries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineStatus(pub i32);

impl LineStatus {
    /// Masked, or without a destination.
    pub const IGNORED: Self = Self(-1);
    /// Already pending.
    pub const COALESCED: Self = Self(0);
    /// Delivered once.
    pub const DELIVERED: Self = Self(1);

    /// Combines the outcomes of several destinations. Ignored ones do not count.
    #[must_use]
    pub const fn merge(self, other: Self) -> Self {
        match (self.0 < 0, other.0 < 0) {
            (_, true) => self,
            (true, false) => other,
            (false, false) => Self(self.0.saturating_add(other.0)),
        }
    }
    /// True if at least one destination accepted it.
    pub const fn is_delivered(self) -> bool {
        self.0 > 0
    }
    /// True unless it was ignored.
    pub const fn is_accepted(self) -> bool {
        self.0 >= 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_the_or_of_its_sources() {
        let mut l = Line::default();
        assert!(l.drive(source::USERSPACE, true));
        assert!(l.drive(source::RESAMPLE, true));
        assert!(l.drive(source::USERSPACE, false));
        assert!(!l.drive(source::RESAMPLE, false));
    }

    #[test]
    fn merged_status_ignores_the_ignored() {
        let (i, c, d) = (
            LineStatus::IGNORED,
            LineStatus::COALESCED,
            LineStatus::DELIVERED,
        );
        for (a, b, want) in [
            (i, i, i),
            (i, c, c),
            (c, i, c),
            (i, d, d),
            (d, c, d),
            (c, c, c),
            (d, d, LineStatus(2)),
        ] {
            assert_eq!(a.merge(b), want, "{a:?} {b:?}");
        }
    }
}
