//! [`Now`]: the time at which something happens, given by the caller.

/// One instant on the two clocks that the chips count.
///
/// `ns` is monotonic; its origin is the caller's choice but must not change
/// while timers run. `tsc` is the *guest's* time-stamp counter at that instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Monotonic nanoseconds.
    pub ns: u64,
    /// Guest TSC.
    pub tsc: u64,
    /// Guest TSC frequency in kHz; 0 means that the TSC does not advance.
    pub tsc_khz: u32,
}

impl Now {
    /// Returns an instant for chips that do not use the TSC.
    pub const fn from_ns(ns: u64) -> Self {
        Self {
            ns,
            tsc: 0,
            tsc_khz: 0,
        }
    }

    /// Returns the time on the ns clock at which the TSC reaches `deadline`, rounded up so that a timer armed for it
    /// never fires early. `None` if the TSC never reaches it.
    pub fn ns_at_tsc(&self, deadline: u64) -> Option<u64> {
        let Some(ahead) = deadline.checked_sub(self.tsc) else {
            return Some(self.ns);
        };
        if ahead == 0 {
            return Some(self.ns);
        }
        if self.tsc_khz == 0 {
            return None;
        }
        let ns = (u128::from(ahead) * 1_000_000).div_ceil(u128::from(self.tsc_khz));
        u64::try_from(ns).ok()?.checked_add(self.ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tsc_deadline_is_rounded_up() {
        let now = Now {
            ns: 1_000,
            tsc: 500,
            tsc_khz: 3_000_000,
        };
        assert_eq!(now.ns_at_tsc(499), Some(1_000));
        assert_eq!(now.ns_at_tsc(500), Some(1_000));
        assert_eq!(now.ns_at_tsc(501), Some(1_001));
        assert_eq!(now.ns_at_tsc(3_500), Some(2_000));
        assert_eq!(now.ns_at_tsc(u64::MAX), Some(6_148_914_691_236_518_039));
        assert_eq!(Now { tsc_khz: 0, ..now }.ns_at_tsc(501), None);
        assert_eq!(Now { tsc_khz: 1, ..now }.ns_at_tsc(u64::MAX), None);
    }
}
