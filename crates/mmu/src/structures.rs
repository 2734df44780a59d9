//! [`Structures`]: paging-structure caches (SDM vol. 3, 4.10.3). For an address they say where the page table, or the page
//! directory, is and what the entries above it allow, so that a walk begins there.
//!
//! An entry is made by a walk from the root, of tables whose accessed flags are all set above, and belongs to the context
//! that walked. It carries the tick of its making, as L2's entries do: whatever moves one of these marks beyond it drops it
//!
//! * [`Structures::flush_all`]: a flush of everything, and any change of slots or of the host pages under them, which the
//!   entry points to;
//! * [`Owner::flushed`]: a flush of what is not global, also where global pages are on;
//! * [`Owner::flushed_structures`]: INVLPG and INVPCID of any page of the context.
//!
//! A tracked context's entries are made by walks that [`crate::shadow::derived`] has noted whole. So a comparison that finds
//! the entries above the lowest level unchanged vouches for these, too.
//!
//! A walk that begins here and finds no translation, or one that denies the access, decides nothing: the walk from the root
//! does.

use crate::{Mode, l2::Owner, walk::Table};

/// Number of page tables that are kept: those of 1 GiB side by side.
const TABLES: usize = 512;
/// Number of page directories that are kept.
const DIRECTORIES: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// gva >> shift.
    key: u64,
    tick: u64,
    context: u16,
    world: u8,
    table: Table,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Structures {
    /// By level, from 1 on. Empty before the first entry: a VM may have a thousand vCPUs that do nothing.
    levels: [Box<[Option<Entry>]>; 2],
    /// Entries up to this tick are flushed.
    flushed: u64,
}

/// Returns log2 of the bytes that a table of this level maps. `None`: tables of this level are not kept.
fn shift(mode: Mode, level: usize) -> Option<u32> {
    match (mode, level) {
        (Mode::Bits32, 1) => Some(22),
        (Mode::Pae | Mode::Level4 | Mode::Level5, 1) => Some(21),
        // In the other modes walks begin there anyway.
        (Mode::Level4 | Mode::Level5, 2) => Some(30),
        _ => None,
    }
}

fn place(key: u64, context: u16, size: usize) -> usize {
    // Contexts that take turns map the same addresses.
    let hash = (u64::from(context) << 48 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash >> 40) as usize % size
}

impl Structures {
    pub(crate) fn new() -> Self {
        Self {
            levels: Default::default(),
            flushed: 0,
        }
    }

    /// Returns the lowest known table on the way to `gva`, and its level.
    #[inline]
    pub(crate) fn find(&self, mode: Mode, gva: u64, owner: Owner) -> Option<(usize, Table)> {
        let since = self.flushed.max(owner.flushed_structures);
        self.levels.iter().zip(1..).find_map(|(entries, level)| {
            if entries.is_empty() {
                return None;
            }
            let key = gva >> shift(mode, level)?;
            let e = entries[place(key, owner.context, entries.len())].as_ref()?;
            let is_it = e.key == key && e.context == owner.context && e.world == owner.world;
            (is_it && e.tick > since).then_some((level, e.table))
        })
    }

    /// Remembers a table of this level on the way to `gva`.
    pub(crate) fn insert(
        &mut self,
        mode: Mode,
        gva: u64,
        (level, table): (usize, Table),
        owner: Owner,
        tick: u64,
    ) {
        let Some((shift, n)) = shift(mode, level).zip(level.checked_sub(1)) else {
            return;
        };
        let entries = &mut self.levels[n];
        if entries.is_empty() {
            let size = if level == 1 { TABLES } else { DIRECTORIES };
            *entries = vec![None; size].into_boxed_slice();
        }
        let key = gva >> shift;
        entries[place(key, owner.context, entries.len())] = Some(Entry {
            key,
            tick,
            context: owner.context,
            world: owner.world,
            table,
        });
    }

    /// Forgets everything made up to `tick`.
    pub(crate) fn flush_all(&mut self, tick: u64) {
        self.flushed = tick;
    }
}
