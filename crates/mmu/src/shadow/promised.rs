//! Roots of a guest that promises to say when their translations must go: docs/paravirt.md.
//!
//! Translations then belong to a root as they otherwise belong to a PCID: each kept root has a number above all PCIDs,
//! and all rules for PCIDs hold for that number. There are few numbers, so a root may lose its number to another root;
//! its next load then flushes.
//!
//! Guest memory has an entry of 16 bytes for each kept root, which the guest reads and writes: CR3 in the first eight
//! bytes, then a 32-bit state. The state is [`KEPT`], or anything else for a root whose next load must flush.

use std::collections::HashMap;

use x86_cpu::{CpuState, Flush};
use x86_defs::control::cr4;

use crate::{Mmu, Mode, hash::ByIdentity};

/// The first number that stands for a root.
pub(crate) const FIRST: u16 = 1 << 12;
/// Largest number of roots that are kept.
pub(crate) const MAX_ROOTS: usize = 128;

/// Size of an entry in bytes.
const ENTRY: u64 = 16;
/// Offset in an entry of the word that says whether the root is kept.
const STATE: u64 = 8;
const KEPT: u32 = 1;

/// How long a root's translations are kept when it is loaded without a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootIsKept {
    /// While its PCID is loaded with no other root ([`SwitchEpochs`](crate::SwitchEpochs)).
    WhileLast,
    /// While the guest leaves a 32-bit word at 1.
    WhileOne {
        /// Its host address, which is valid while [`Front::switch_epoch`](crate::Front::switch_epoch) is unchanged.
        word: u64,
    },
}

/// The guest memory that says which roots are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootArea {
    /// gpa of the first entry, a multiple of 16. All entries are on its page.
    pub gpa: u64,
    /// Number of entries. With 0, every load flushes.
    pub entries: u16,
}

impl RootArea {
    /// Largest number of entries.
    pub const MAX_ENTRIES: u16 = MAX_ROOTS as u16;

    fn entry(self, n: u16) -> u64 {
        self.gpa.wrapping_add(ENTRY * u64::from(n))
    }
}

/// The roots that have numbers.
#[derive(Debug)]
pub(crate) struct Promised {
    area: RootArea,
    /// Roots by number, as far as numbers have been assigned.
    roots: Vec<u64>,
    numbers: HashMap<u64, u16, ByIdentity>,
    random: u32,
}

impl Promised {
    /// Returns the number of a root, and whether the root got it just now.
    fn number(&mut self, root: u64) -> (u16, bool) {
        if let Some(n) = self.numbers.get(&root) {
            return (*n, false);
        }
        if self.roots.len() < usize::from(self.area.entries) {
            self.roots.push(root);
        }
        let last = self.roots.len() as u16 - 1;
        let n = match self.roots.last() {
            Some(new) if *new == root => last,
            // The root that loses its number is chosen at random: if it were the oldest, more roots taking turns than
            // there are numbers would never find theirs.
            _ => {
                self.random = self
                    .random
                    .wrapping_mul(0x0019_660d)
                    .wrapping_add(0x3c6e_f35f);
                (self.random >> 16) as u16 % (last + 1)
            }
        };
        if let Some(old) = self.roots.get_mut(usize::from(n)) {
            let old = core::mem::replace(old, root);
            self.numbers.remove(&old);
        }
        self.numbers.insert(root, n);
        (n, true)
    }
}

impl Mmu {
    /// Begins or, without an `area`, ends the promise. While it holds, a load of CR3 with bit 63 set keeps the root's
    /// translations, and one without drops those of the root alone. All entries are written such that no root is kept.
    pub fn set_promise(&mut self, cpu: &CpuState, area: Option<RootArea>) {
        self.flush_everything();
        self.forget_contexts();
        self.promised = area.map(|area| {
            Box::new(Promised {
                area: RootArea {
                    entries: area.entries.min(RootArea::MAX_ENTRIES),
                    ..area
                },
                roots: Vec::new(),
                numbers: HashMap::default(),
                random: 1,
            })
        });
        if let Some(area) = area {
            for n in 0..area.entries {
                self.write_entry(area.entry(n), 0, 0);
            }
        }
        self.set_root(cpu);
    }

    /// True if a load of CR3 may have bit 63 set although CR4.PCIDE is clear.
    pub fn has_promise(&self) -> bool {
        self.promised.is_some()
    }

    /// Largest number of roots that may be kept now.
    pub(crate) fn promised_roots(&self) -> usize {
        self.promised.as_ref().map_or(0, |p| p.area.entries.into())
    }

    /// True if the current root has a number, and so may be kept.
    pub(crate) fn is_promised(&self) -> bool {
        self.paging.pcid >= FIRST
    }

    /// Forgets all numbers, because the slots have changed.
    pub(crate) fn forget_promised(&mut self) {
        if let Some(p) = &mut self.promised {
            p.roots.clear();
            p.numbers.clear();
        }
    }

    /// Gives the root in `paging` its number after a load of CR3. Returns true if the root's translations must be
    /// flushed.
    pub(crate) fn take_promised(&mut self, cpu: &CpuState) -> bool {
        let is_long = matches!(self.paging.mode, Mode::Level4 | Mode::Level5);
        let Some(promised) = &mut self.promised else {
            return false;
        };
        if !is_long || self.paging.space != 0 || cpu.cr4 & cr4::PCIDE != 0 {
            return false;
        }
        if promised.area.entries == 0 {
            return true;
        }
        let root = self.paging.root;
        let (n, is_new) = promised.number(root);
        let entry = promised.area.entry(n);
        self.paging.pcid = FIRST + n;
        let is_kept = !is_new && self.memory.read_gpa(entry + STATE, 4) == Some(KEPT.into());
        if !is_kept {
            // Before the flush: if the guest takes the word back after this, the next load sees it.
            self.write_entry(entry, root, KEPT);
        }
        !is_kept
    }

    fn write_entry(&mut self, entry: u64, root: u64, state: u32) {
        // If there is no memory, the word never reads as kept, and the next load flushes again.
        let _ = self.memory.write_gpa(entry, 8, root.into());
        let _ = self.memory.write_gpa(entry + STATE, 4, state.into());
    }

    /// Translates a flush of PCID 0, by which a guest without PCIDs means the current root.
    pub(crate) fn own(&self, what: Flush) -> Flush {
        let own = self.paging.pcid;
        match what {
            Flush::Pcid(0) if self.is_promised() => Flush::Pcid(own),
            Flush::PcidPage(0, gva) if self.is_promised() => Flush::PcidPage(own, gva),
            what => what,
        }
    }

    /// See [`Front::root_is_kept`](crate::Front::root_is_kept).
    pub(crate) fn root_is_kept(&self) -> Option<RootIsKept> {
        let promised = match &self.promised {
            Some(promised) if self.is_promised() => promised,
            // Each load flushes.
            Some(promised) if promised.area.entries == 0 => return None,
            _ => return Some(RootIsKept::WhileLast),
        };
        let entry = promised.area.entry(self.paging.pcid - FIRST);
        let page = self.table.host_page(0, entry, true)?;
        let word = page.hva() + (entry + STATE) % 0x1000;
        Some(RootIsKept::WhileOne { word })
    }
}
