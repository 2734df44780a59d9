//! [`Flushes`]: which flushes happened while a context was not the current one.

use zerocopy::FromZeros;

/// Number of page flushes that are remembered one by one.
const LOG: usize = 64;
/// Number of PCIDs and, behind them, of promised roots ([`super::promised`]).
const PCIDS: usize = super::promised::FIRST as usize + super::promised::MAX_ROOTS;

/// The last pages that were flushed, as a ring.
#[derive(Debug)]
struct Log {
    /// Number of flushes ever logged.
    seq: u64,
    pages: [(u64, Option<u16>); LOG],
}

impl Default for Log {
    fn default() -> Self {
        Self {
            seq: 0,
            pages: [(0, None); LOG],
        }
    }
}

impl Log {
    fn push(&mut self, gva: u64, pcid: Option<u16>) {
        self.pages[(self.seq % LOG as u64) as usize] = (gva, pcid);
        self.seq += 1;
    }

    /// Returns the pages logged after `seen` that concern a context of `pcid`, and brings `seen` up to date. `None` if
    /// the ring has lost some of them.
    fn since(&self, seen: &mut u64, pcid: u16) -> Option<impl Iterator<Item = u64> + use<'_>> {
        let from = core::mem::replace(seen, self.seq);
        (self.seq - from <= LOG as u64).then(|| {
            let pages = (from..self.seq).map(|n| self.pages[(n % LOG as u64) as usize]);
            pages
                .filter(move |(_, p)| p.is_none_or(|p| p == pcid))
                .map(|(gva, _)| gva)
        })
    }
}

/// Up to where a context has seen each log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    private: u64,
    global: u64,
}

/// Ticks of whole flushes, and logs of page flushes.
#[derive(Debug)]
pub(crate) struct Flushes {
    /// Tick of the last flush of everything.
    pub(crate) everything: u64,
    /// Tick of the last flush of all translations that are not global, in all PCIDs.
    all: u64,
    /// Tick of the last flush of translations that are not global, for each PCID.
    pcid: Box<[u64; PCIDS]>,
    /// Flushes of pages that cannot be global.
    private: Log,
    global: Log,
    /// The guest has had a user page that is global.
    pub(crate) has_global_users: bool,
}

impl Default for Flushes {
    fn default() -> Self {
        Self {
            everything: 0,
            all: 0,
            pcid: FromZeros::new_box_zeroed().expect("memory for a vCPU"),
            private: Log::default(),
            global: Log::default(),
            has_global_users: false,
        }
    }
}

impl Flushes {
    /// Returns the tick of the last flush of translations that are not global in a PCID.
    pub(crate) fn non_global(&self, pcid: u16) -> u64 {
        self.all.max(self.pcid[usize::from(pcid) % PCIDS])
    }

    pub(crate) fn note_non_global(&mut self, pcid: Option<u16>, tick: u64) {
        match pcid {
            Some(pcid) => self.pcid[usize::from(pcid) % PCIDS] = tick,
            None => self.all = tick,
        }
    }

    /// Logs the flush of a page: by INVLPG with PCID `current` in CR3, or by INVPCID with a `pcid`, which leaves global
    /// pages alone.
    pub(crate) fn note_page(&mut self, gva: u64, current: u16, pcid: Option<u16>) {
        let may_be_global = gva >> 63 != 0 || self.has_global_users;
        match pcid {
            None if may_be_global => self.global.push(gva, None),
            None => self.private.push(gva, Some(current)),
            Some(pcid) => self.private.push(gva, Some(pcid)),
        }
    }

    /// Returns the position of a new context, which has nothing to drop.
    pub(crate) fn seen(&self) -> Seen {
        Seen {
            private: self.private.seq,
            global: self.global.seq,
        }
    }

    /// Returns the flushed pages that may be global, as [`Log::since`] does.
    pub(crate) fn global_since(
        &self,
        seen: &mut Seen,
        pcid: u16,
    ) -> Option<impl Iterator<Item = u64> + use<'_>> {
        self.global.since(&mut seen.global, pcid)
    }

    pub(crate) fn private_since(
        &self,
        seen: &mut Seen,
        pcid: u16,
    ) -> Option<impl Iterator<Item = u64> + use<'_>> {
        self.private.since(&mut seen.private, pcid)
    }
}
