//! KVM_SET_PMU_EVENT_FILTER (KVM API document, 4.120).

/// Maximum number of a filter's events.
pub const MAX_EVENTS: usize = 300;

/// The error of a filter that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidFilter;

/// The events that may be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    allows: bool,
    fixed: u32,
    entries: Vec<Entry>,
}

/// Unit masks of an event: those that are equal to `wanted` in the bits of `mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    event: u16,
    mask: u8,
    wanted: u8,
    excludes: bool,
}

/// Bits of a masked entry.
const EXCLUDE: u64 = 1 << 55;
const MASKED_VALID: u64 = 0xff | 0xff << 8 | 0xf << 32 | EXCLUDE | 0xff << 56;

impl Filter {
    /// Makes a filter. `allows`: the listed events may be counted; otherwise all others may. `fixed` has a bit for each
    /// fixed counter. `is_masked`: entries have the layout of KVM_PMU_EVENT_FLAG_MASKED_EVENTS.
    pub fn new(
        allows: bool,
        fixed: u32,
        is_masked: bool,
        events: &[u64],
    ) -> Result<Self, InvalidFilter> {
        let mut entries = Vec::with_capacity(events.len());
        for &e in events {
            let event = event_of(e);
            if is_masked {
                if e & !MASKED_VALID != 0 {
                    return Err(InvalidFilter);
                }
                entries.push(Entry {
                    event,
                    mask: (e >> 56) as u8,
                    wanted: (e >> 8) as u8,
                    excludes: e & EXCLUDE != 0,
                });
            } else if e & !(0xffff | 0xf << 32) == 0 {
                // An entry with other bits matches no event.
                entries.push(Entry {
                    event,
                    mask: 0xff,
                    wanted: (e >> 8) as u8,
                    excludes: false,
                });
            }
        }
        Ok(Self {
            allows,
            fixed,
            entries,
        })
    }

    /// Returns true if the event of a select may be counted. `is_amd`: events have twelve bits.
    pub(crate) fn allows(&self, is_amd: bool, select: u64) -> bool {
        let select = if is_amd { select } else { select & 0xffff };
        let (event, unit) = (event_of(select), (select >> 8) as u8);
        let matches = |excludes: bool| {
            self.entries
                .iter()
                .any(|e| e.excludes == excludes && e.event == event && unit & e.mask == e.wanted)
        };
        (matches(false) && !matches(true)) == self.allows
    }
    /// Returns true if the fixed counter may count.
    pub(crate) const fn allows_fixed(&self, n: usize) -> bool {
        (self.fixed >> n & 1 != 0) == self.allows
    }
}

const fn event_of(select: u64) -> u16 {
    (select & 0xff | select >> 24 & 0xf00) as u16
}
