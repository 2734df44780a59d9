//! Translated blocks by page and mode, and the target table of indirect branches.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::atomic::{AtomicU64, Ordering},
};

use mmu::hash::ByIdentity;
use x86_cpu::CodePage;

use crate::JitBus;
use crate::code::targets::no_targets;
use x86_codegen::{
    codegen::Entries,
    frame::page_guard::PageGuard,
    frame::targets::{Target, empty, place},
    ir::mode::{BlockKey, Mode, low},
};

/// A translated block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TranslatedBlock {
    pub(crate) entries: Entries,
    /// Generation of the page's code that the block was translated from.
    pub(crate) generation: u32,
    /// The block is one instruction whose last bytes are on another page: [`Cache::second`].
    pub(crate) straddles: bool,
    /// Branches of other pages have entered the block.
    pub(crate) is_target: bool,
    /// The block probes the software TLB by an index, or calls, so it is translated again if it is hot.
    pub(crate) may_gain: bool,
    /// Number of instructions.
    pub(crate) len: u8,
}

/// The blocks of a page in one mode. A lookup touches few cache lines.
#[derive(Debug)]
pub(crate) struct PageBlocks {
    /// One bit per offset, set if a block begins there.
    offsets: [u64; 64],
    /// For each word of `offsets`, how many blocks begin at lower offsets than its own.
    before: [u16; 64],
    /// The blocks, in ascending order of offset.
    blocks: Vec<TranslatedBlock>,
    /// The blocks that branches of other pages have entered.
    targets: Vec<Outer>,
    /// The gva of the page, if its blocks are executed at no other address.
    bound: Option<i32>,
    /// Generation of the code that the newest block was translated from.
    generation: u32,
    /// The page's guard, given when a branch that compares one first leads here.
    page_guard: Option<PageGuard>,
}

/// A block that branches of other pages have entered: what [`Cache::fill`] needs to enter it under another key.
#[derive(Clone, Copy, Debug)]
struct Outer {
    /// [`TranslatedBlock::generation`], and the outer entry: 0 if the block has none that other pages can use.
    generation: u32,
    entry: u32,
    offset: u16,
}

impl Outer {
    fn of(offset: u64, block: &TranslatedBlock) -> Self {
        Self {
            generation: block.generation,
            entry: match block.straddles {
                false => block.entries.outer,
                true => 0,
            },
            offset: offset as u16,
        }
    }
}

impl PageBlocks {
    fn new() -> Box<Self> {
        Box::new(Self {
            offsets: [0; 64],
            before: [0; 64],
            blocks: Vec::new(),
            targets: Vec::new(),
            bound: None,
            generation: 0,
            page_guard: None,
        })
    }
    /// Returns how many blocks begin before `offset`, and whether one begins at it.
    #[inline]
    fn rank(&self, offset: u64) -> (usize, bool) {
        let n = (offset / 64 % 64) as usize;
        let (bits, bit) = (self.offsets[n], offset % 64);
        let below = (bits & ((1 << bit) - 1)).count_ones();
        (
            usize::from(self.before[n]) + below as usize,
            bits >> bit & 1 != 0,
        )
    }
    /// Returns the block at an offset.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<TranslatedBlock> {
        let (at, is_there) = self.rank(offset);
        self.blocks.get(at).filter(|_| is_there).copied()
    }
    fn insert(&mut self, offset: u64, block: TranslatedBlock) -> Option<TranslatedBlock> {
        let (at, is_there) = self.rank(offset);
        self.generation = self.generation.max(block.generation);
        if is_there {
            let old = self.blocks.get_mut(at)?;
            let is_target = old.is_target;
            if is_target
                && let Some(t) = self
                    .targets
                    .iter_mut()
                    .find(|t| u64::from(t.offset) == offset)
            {
                *t = Outer::of(offset, &block);
            }
            return Some(core::mem::replace(
                old,
                TranslatedBlock { is_target, ..block },
            ));
        }
        let n = (offset / 64 % 64) as usize;
        self.offsets[n] |= 1 << (offset % 64);
        self.before[n + 1..]
            .iter_mut()
            .for_each(|before| *before += 1);
        self.blocks.insert(at, block);
        None
    }
}

/// Blocks by address and mode. The blocks of a page are stored together, because a lookup is mostly followed by lookups
/// of neighbours.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    /// Keyed by page identity and mode.
    pages: HashMap<BlockKey, Box<PageBlocks>, ByIdentity>,
}

impl BlockTable {
    /// Returns the block at `key`: page identity plus offset, and mode.
    pub(crate) fn get(&self, key: BlockKey) -> Option<TranslatedBlock> {
        self.page(key)?.get(key.offset())
    }
    /// Returns the blocks of the page and mode of `key`.
    pub(crate) fn page(&self, key: BlockKey) -> Option<&PageBlocks> {
        self.pages.get(&key.of_page()).map(|page| &**page)
    }
    /// Returns true if the page of this identity has blocks, in any mode.
    pub(crate) fn has_page(&self, page: u64) -> bool {
        self.pages.keys().any(|key| key.page() == page)
    }
    /// Enters a block. Returns the block that it replaces.
    pub(crate) fn insert(
        &mut self,
        key: BlockKey,
        block: TranslatedBlock,
    ) -> Option<TranslatedBlock> {
        let page = self.pages.entry(key.of_page());
        let page = page.or_insert_with(PageBlocks::new);
        page.insert(key.offset(), block)
    }
    /// Returns the mode of blocks that are executed at `gva`, where `page` is mapped. In 64-bit code, the first address
    /// at which a page is executed gets blocks of [`Mode::BOUND`], which know their address, if the address is a
    /// sign-extended 32-bit number. Kernels, and programs that are not position-independent, are executed at no other
    /// address. Once the page's code has changed, another address may take its place.
    pub(crate) fn mode_at(&self, gva: u64, page: &CodePage, mode: Mode) -> Mode {
        let Some(low) = low(gva).filter(|_| mode.is_long()) else {
            return mode;
        };
        match self.page(BlockKey::new(page.id, mode | Mode::BOUND)) {
            Some(p) if p.bound != Some(low) && p.generation == page.generation => mode,
            _ => mode | Mode::BOUND,
        }
    }
    /// Binds the blocks of the page and mode of `key` to `gva`. Returns the outer entries of the blocks that were bound
    /// to another address and are dropped.
    pub(crate) fn bind(&mut self, key: BlockKey, gva: i32) -> Vec<u32> {
        let mut old = Vec::new();
        // The split and the other blocks of a page are always bound together, so one check covers both.
        if self.page(key).is_some_and(|p| p.bound == Some(gva)) {
            return old;
        }
        for is_split in [false, true] {
            if let Entry::Occupied(page) = self.pages.entry(key.of_page().split(is_split))
                && page.get().bound != Some(gva)
            {
                old.extend(page.remove().blocks.iter().map(|b| b.entries.outer));
            }
        }
        let page = self.pages.entry(key.of_page());
        page.or_insert_with(PageBlocks::new).bound = Some(gva);
        old
    }
    /// Notes that a branch of another page has entered the block.
    pub(crate) fn note_target(&mut self, key: BlockKey) {
        if let Some(page) = self.pages.get_mut(&key.of_page())
            && let (at, true) = page.rank(key.offset())
            && let Some(block) = page.blocks.get_mut(at)
            && !core::mem::replace(&mut block.is_target, true)
        {
            let target = Outer::of(key.offset(), block);
            page.targets.push(target);
        }
    }
    /// Returns the page guard of the page and mode of `key`, if it has one. `next`: gives the page the guard of this
    /// number if it has none.
    fn page_guard(&mut self, key: BlockKey, next: Option<&mut usize>) -> Option<PageGuard> {
        let page = self.pages.get_mut(&key.of_page())?;
        if let Some(next) = next.filter(|_| page.page_guard.is_none()) {
            page.page_guard = PageGuard::new(*next);
            *next += 1;
        }
        page.page_guard
    }
    /// Returns the offsets and outer entries of the page's blocks that branches of other pages have entered, if they
    /// were translated from code of this generation.
    fn targets(&self, of: BlockKey, generation: u32) -> impl Iterator<Item = (u64, u32)> {
        let page = self.page(of).into_iter();
        page.flat_map(|page| &page.targets)
            .filter(move |t| t.generation == generation && t.entry != 0)
            .map(|t| (t.offset.into(), t.entry))
    }
    fn clear(&mut self) {
        self.pages.clear();
    }
}

/// Entries of [`Cache::filled`].
const FILLED: usize = 4096;
/// [`Cache::numbers`] has this many sets of [`WAYS`] keys each. (Two keys that alternate, as those of kernel and user
/// level do, must both stay known.)
const NUMBERED: usize = 64;
const WAYS: usize = 4;

/// Returns the set in which the key's number is looked for.
fn set_of(key: u64) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % NUMBERED
}

/// Blocks and targets of one vCPU.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Keyed by page identity, offset and mode.
    pub(crate) blocks: BlockTable,
    /// The second page of each instruction that straddles two.
    pub(crate) second: HashMap<BlockKey, CodePage, ByIdentity>,
    pub(crate) targets: Box<[Target]>,
    /// By offset of an outer entry: numbers of the direct branches of other pages that are linked to it
    /// ([`x86_codegen::codegen::CrossPageSite`]).
    pub(crate) remembered: HashMap<usize, Vec<u32>, ByIdentity>,
    /// Pages and keys that [`Self::is_new`] has seen.
    filled: Box<[(u64, u64)]>,
    /// Keys and the numbers given to them.
    numbers: [[(u64, u32); WAYS]; NUMBERED],
    /// The last number given.
    number: u32,
    /// How many page guards have been given to pages.
    page_guards: usize,
    /// Generation of the page guards in the MMU's tables. It changes when the cache is cleared, because other pages are
    /// given the guards then.
    pub(crate) page_guards_generation: u64,
}

/// Returns a generation that no page guards have had before.
fn new_generation() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Cache {
    pub(crate) fn new() -> Self {
        x86_codegen::frame::targets::make_secret();
        Self {
            blocks: BlockTable::default(),
            second: HashMap::default(),
            targets: no_targets(),
            remembered: HashMap::default(),
            // A vector, as the thread's stack may be small.
            filled: vec![(0, 0); FILLED].into(),
            numbers: [[(0, 0); WAYS]; NUMBERED],
            number: 0,
            page_guards: 0,
            page_guards_generation: new_generation(),
        }
    }
    pub(crate) fn clear(&mut self) {
        // Without blocks there are no targets. Memory that no vCPU has touched yet stays untouched.
        if !self.blocks.pages.is_empty() {
            let all = self.targets.iter_mut().enumerate();
            let used = all.filter(|(_, t)| t.key != 0);
            used.for_each(|(at, t)| *t = empty(at));
            self.filled.fill((0, 0));
        }
        self.blocks.clear();
        self.second.clear();
        self.remembered.clear();
        self.page_guards = 0;
        self.page_guards_generation = new_generation();
    }
    /// Returns the page guard of the page and mode of `key`, if it has one.
    pub(crate) fn page_guard(&mut self, key: BlockKey) -> Option<PageGuard> {
        self.blocks.page_guard(key, None)
    }
    /// Returns the page guard of the page and mode of `key`, giving it one if it has none and any are left.
    pub(crate) fn take_page_guard(&mut self, key: BlockKey) -> Option<PageGuard> {
        self.blocks.page_guard(key, Some(&mut self.page_guards))
    }
    /// Notes in the live view's table that the page guard's page is mapped where `rip` is.
    pub(crate) fn set_page_guard<B: JitBus>(&self, bus: &mut B, page_guard: PageGuard, rip: u64) {
        let tables = bus.mmu().live_page_guards(self.page_guards_generation);
        let tag = u64::from(page_guard.tag.unsigned_abs());
        tables.set_page_guard(page_guard.number, (rip & !0xfff) + tag);
    }
    /// Returns a number for the key, which no other key has had. `None`: all numbers have been used. The caller must
    /// forget them all, and the next call begins again with the first.
    pub(crate) fn number(&mut self, key: u64) -> Option<u32> {
        let set = &mut self.numbers[set_of(key)];
        if let Some((_, number)) = set.iter().find(|(known, _)| *known == key) {
            return Some(*number);
        }
        let Some(next) = self.number.checked_add(1) else {
            self.number = 0;
            self.numbers.fill([(0, 0); WAYS]);
            return None;
        };
        self.number = next;
        set[next as usize % WAYS] = (key, next);
        Some(next)
    }
    /// Returns true the first time for the page at `page` under a key, and again if another page or key has displaced
    /// it since.
    pub(crate) fn is_new(&mut self, page: u64, key: u64) -> bool {
        let at = (page >> 12 ^ key >> (Mode::WIDTH + 1)) as usize % FILLED;
        let before = core::mem::replace(&mut self.filled[at], (page, key));
        before != (page, key)
    }
    /// Enters all blocks of the page of `at` that branches of other pages have entered into the target table, for the
    /// page at `page` under the key: the next program that starts branches there too. `code` is the host address of the
    /// code buffer.
    pub(crate) fn fill(
        &mut self,
        (at, generation): (BlockKey, u32),
        (page, key, salt): (u64, u64, u64),
        code: u64,
    ) {
        for (offset, outer) in self.blocks.targets(at, generation) {
            let tag = page.wrapping_add(offset) ^ salt;
            if let Some(t) = self.targets.get_mut(place(tag))
                && t.key != key
            {
                *t = Target {
                    tag,
                    key,
                    code: code + u64::from(outer),
                    page,
                };
            }
        }
    }
    /// Returns the address of the outer entry for `rip`, if the target table has it.
    pub(crate) fn target(&self, rip: u64, salt: u64) -> Option<u64> {
        let tag = rip ^ salt;
        let t = self.targets.get(place(tag))?;
        (t.tag == tag).then_some(t.code)
    }
    pub(crate) fn set_target(&mut self, (rip, page): (u64, u64), key: u64, salt: u64, code: u64) {
        let tag = rip ^ salt;
        if let Some(t) = self.targets.get_mut(place(tag)) {
            *t = Target {
                tag,
                key,
                code,
                page,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86_codegen::frame::targets::salt_of;

    #[test]
    fn blocks_are_found_where_they_were_put() {
        let block = |n| block(0, n);
        let mut blocks = BlockTable::default();
        let key = |n: u32| {
            let page = u64::from(n % 7) << 12 | 1 << 63;
            let mode = [Mode::NONE, Mode::FP, Mode::KERNEL][n as usize % 3];
            BlockKey::new(page | u64::from(n * 37 % 4096), mode)
        };
        for n in 0..500 {
            assert!(blocks.insert(key(n), block(n)).is_none());
        }
        for n in (0..500).step_by(2) {
            let old = blocks.insert(key(n), block(n + 1000));
            assert_eq!(old.map(|b| b.generation), Some(n));
        }
        for n in 0..500 {
            let wanted = if n % 2 == 0 { n + 1000 } else { n };
            assert_eq!(blocks.get(key(n)).map(|b| b.generation), Some(wanted));
        }
        assert!(
            blocks
                .get(BlockKey::new(key(0).at + 1, key(0).mode))
                .is_none()
        );
        assert!(blocks.get(BlockKey::new(key(0).at, Mode::TSC)).is_none());
        blocks.clear();
        assert!(blocks.get(key(0)).is_none());
    }

    fn block(outer: u32, generation: u32) -> TranslatedBlock {
        TranslatedBlock {
            entries: Entries {
                outer,
                ..Entries::default()
            },
            generation,
            straddles: false,
            is_target: false,
            may_gain: false,
            len: 1,
        }
    }

    /// A page is filled with blocks that were noted, are current, and are found by their page alone.
    #[test]
    fn targets_that_come_back() {
        const ID: u64 = 0x7000;
        const MODE: Mode = Mode::KERNEL;
        let mut c = Cache::new();
        let straddling = TranslatedBlock {
            straddles: true,
            ..block(60, 7)
        };
        for (at, mode, b) in [
            (0x10, MODE, block(10, 7)),
            (0x20, MODE, block(20, 7)),
            (0x30, MODE, block(30, 6)),
            (0x40, Mode::NONE, block(40, 7)),
            (0x50, MODE, block(0, 7)),
            (0x60, MODE, straddling),
        ] {
            assert!(c.blocks.insert(BlockKey::new(ID | at, mode), b).is_none());
            if at != 0x20 {
                c.blocks.note_target(BlockKey::new(ID | at, mode));
            }
        }
        let (page, key, salt) = (0x40_0000, 0x1234, salt_of(0x1234));
        let known = |c: &Cache, at: u64| c.target(page | at, salt);
        c.fill((BlockKey::new(ID, MODE), 7), (page, key, salt), 1000);
        let found: Vec<_> = (0..0x1000).filter_map(|at| known(&c, at)).collect();
        assert_eq!(found, [1010]);
        // A new translation is entered from other pages as the old one was.
        assert!(
            c.blocks
                .insert(BlockKey::new(ID | 0x30, MODE), block(31, 7))
                .is_some()
        );
        c.fill((BlockKey::new(ID, MODE), 7), (page, key, salt), 1000);
        assert_eq!(known(&c, 0x30), Some(1031));
        assert_eq!(c.target(page | 0x30, salt_of(key + 1)), None);
    }

    #[test]
    fn numbers_of_keys_are_their_own() {
        let mut c = Cache::new();
        let mut given = HashMap::new();
        for key in (1..2000_u64).chain(1..2000) {
            let number = c.number(key << 8).unwrap();
            assert_eq!(c.number(key << 8), Some(number));
            assert!(number != 0 && *given.entry(number).or_insert(key) == key);
        }
        // Two keys of a set that alternate are soon both known.
        let same: Vec<_> = (5000..).filter(|k| set_of(*k) == 7).take(2).collect();
        let mut turn = || [same[0], same[1]].map(|key| c.number(key));
        turn();
        turn();
        assert_eq!(turn(), turn());
        c.number = u32::MAX - 1;
        assert_eq!(c.number(1 << 40), Some(u32::MAX));
        assert_eq!(c.number(2 << 40), None);
        assert_eq!([c.number(2 << 40), c.number(1 << 40)], [Some(1), Some(2)]);
    }

    #[test]
    fn a_page_is_new_once_under_a_key() {
        let mut c = Cache::new();
        assert!(c.is_new(0x1000, 0x300));
        assert!(!c.is_new(0x1000, 0x300));
        assert!(c.is_new(0x1000, 0x500));
        c.blocks
            .insert(BlockKey::new(1 << 63, Mode::NONE), block(0, 1));
        c.clear();
        assert!(c.is_new(0x1000, 0x500));
    }
}
