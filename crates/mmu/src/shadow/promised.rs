//! Roots whose guest promises to say when their translations are to go: docs/paravirt.md.
//!
//! Translations then belong to a root as they belong to a PCID otherwise: each root that is kept
//! has a number above all PCIDs, and everything that holds for a PCID holds for it. The numbers
//! are few, so a root may lose its own to another; then it begins anew.
//!
//! The guest sees in its memory which roots are kept, in entries of 16 bytes: CR3 in the first
//! eight, then four that are [`KEPT`], or anything else for a root that is to be flushed when it
//! is loaded next.

use std::collections::HashMap;

use x86_cpu::{CpuState, Flush};
use x86_defs::control::cr4;

use crate::{Mmu, Mode, hash::ByIdentity};

/// The first number.
pub(crate) const FIRST: u16 = 1 << 12;
/// Roots that may be kept.
pub(crate) const MAX_ROOTS: usize = 128;

/// Bytes of an entry.
const ENTRY: u64 = 16;
/// Where the word is in it that says whether the root is kept.
const STATE: u64 = 8;
const KEPT: u32 = 1;

/// Where the guest sees which roots are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootArea {
    /// gpa of the first entry, a multiple of 16. All entries are on its page.
    pub gpa: u64,
    /// How many there are. 0: every load flushes.
    pub entries: u16,
}

impl RootArea {
    /// Entries that there may be.
    pub const MAX_ENTRIES: u16 = MAX_ROOTS as u16;

    fn entry(self, n: u16) -> u64 {
        self.gpa.wrapping_add(ENTRY * u64::from(n))
    }
}

/// What is kept of them.
#[derive(Debug)]
pub(crate) struct Promised {
    area: RootArea,
    /// By number, as far as they have been given.
    roots: Vec<u64>,
    numbers: HashMap<u64, u16, ByIdentity>,
    random: u32,
}

impl Promised {
    /// The number of a root, and whether it is new.
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
            // With the oldest, more roots in turn than there are numbers would never find theirs.
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
    /// From now on a load of CR3 with bit 63 leaves the root's translations as they are, and one
    /// without drops those of the root alone; or no more. All entries are made such that no root
    /// is kept.
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

    /// A load of CR3 may have bit 63 set although there are no PCIDs.
    pub fn has_promise(&self) -> bool {
        self.promised.is_some()
    }

    /// Roots that may be kept.
    pub(crate) fn promised_roots(&self) -> usize {
        self.promised.as_ref().map_or(0, |p| p.area.entries.into())
    }

    /// The current root is one that is kept.
    pub(crate) fn is_promised(&self) -> bool {
        self.paging.pcid >= FIRST
    }

    /// The slots are others: no root is kept any more.
    pub(crate) fn forget_promised(&mut self) {
        if let Some(p) = &mut self.promised {
            p.roots.clear();
            p.numbers.clear();
        }
    }

    /// `paging` is CR3's: the root gets its number. True if its translations are to go.
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
            // Before the flush: what the guest takes back after this is seen by the next load.
            self.write_entry(entry, root, KEPT);
        }
        !is_kept
    }

    fn write_entry(&mut self, entry: u64, root: u64, state: u32) {
        // Without memory there the next load flushes again.
        let _ = self.memory.write_gpa(entry, 8, root.into());
        let _ = self.memory.write_gpa(entry + STATE, 4, state.into());
    }

    /// Without PCIDs the guest means the current root by PCID 0.
    pub(crate) fn own(&self, what: Flush) -> Flush {
        let own = self.paging.pcid;
        match what {
            Flush::Pcid(0) if self.is_promised() => Flush::Pcid(own),
            Flush::PcidPage(0, gva) if self.is_promised() => Flush::PcidPage(own, gva),
            what => what,
        }
    }

    /// Host address of the 32-bit word that has to be 1 for the current root's translations to be
    /// kept when it is loaded without a flush. `Ok(None)`: there is none. It stays there as long as
    /// [`Self::switches_epoch`] stays.
    ///
    /// # Errors
    /// They cannot be kept.
    #[expect(clippy::result_unit_err, reason = "nothing else to say")]
    pub fn kept_page_guard(&self) -> Result<Option<u64>, ()> {
        let Some(promised) = self.promised.as_ref().filter(|_| self.is_promised()) else {
            return Ok(None);
        };
        let entry = promised.area.entry(self.paging.pcid - FIRST);
        let page = self.table.host_page(0, entry, true).ok_or(())?;
        Ok(Some(page.hva() + (entry + STATE) % 0x1000))
    }
}
