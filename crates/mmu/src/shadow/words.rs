//! [`Words`]: the entries of guest tables that a context's translations were derived from, as they are compared with
//! memory. Generated code does that too, at loads of CR3 that flush.

use core::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

use guest_memory::HostWord;
use x86_defs::paging::{A, D};

use crate::walk::Step;

/// Number of comparisons after which entries that are not used any more are looked for.
const USES: u32 = 1024;

/// Maximum number of words by which it is decided whether all are gone.
const LOOKED_AT: usize = 4;

/// The word of guest memory with an entry of a guest table, as the walk saw it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word {
    at: HostWord,
    /// The entry, with the flags that the walk has set.
    value: u64,
    /// The bits that are compared.
    mask: u64,
}

impl Word {
    pub(crate) fn of(step: &Step) -> Self {
        let (bytes, shift) = match step.size {
            4 => (u64::from(u32::MAX), step.offset % 8 * 8),
            _ => (u64::MAX, 0),
        };
        Self {
            at: step.page.word(step.offset),
            value: (step.value & bytes) << shift,
            mask: ((step.value | !(A | D)) & bytes) << shift,
        }
    }

    /// The bits that have changed in memory.
    #[inline(always)]
    fn changed(&self) -> u64 {
        (self.at.load() ^ self.value) & self.mask
    }

    /// Returns true if `new` differs in accessed and dirty flags only.
    fn is_same(&self, new: &Self) -> bool {
        (self.value ^ new.value) & self.mask & new.mask == 0
    }
}

/// Where the words of a context are, for generated code.
#[repr(C)]
#[derive(Debug, Default)]
struct Head {
    first: u64,
    end: u64,
    /// Comparisons until [`Words::take_use`] says that there were many. With 0, only Rust compares. (Atomic, as generated
    /// code writes it by the address alone; both are on one thread.)
    uses_left: AtomicU32,
}

/// Offset of the address of the first word in what [`Front::compared`](crate::Front::compared) returns.
pub const FIRST: i32 = offset_of!(Head, first) as i32;
/// Offset of the address behind the last word.
pub const END: i32 = offset_of!(Head, end) as i32;
/// Offset of the number, 32 bits, of comparisons that generated code may make, and counts there.
pub const USES_LEFT: i32 = offset_of!(Head, uses_left) as i32;
/// Offset in a word of the host address of eight aligned bytes of guest memory.
pub const AT: i32 = offset_of!(Word, at) as i32;
/// Offset in a word of what these bytes have to be.
pub const VALUE: i32 = offset_of!(Word, value) as i32;
/// Offset in a word of the bits that have to be so.
pub const MASK: i32 = offset_of!(Word, mask) as i32;
/// Size of a word.
pub const SIZE: i8 = size_of::<Word>() as i8;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Words {
    all: Vec<Word>,
    head: Box<Head>,
}

impl Words {
    pub(crate) fn new() -> Self {
        let mut words = Self {
            all: Vec::new(),
            head: Box::default(),
        };
        words.clear();
        words
    }

    /// Returns the address of what generated code reads.
    pub(crate) fn head(&self) -> u64 {
        &raw const *self.head as u64
    }

    /// Sets what generated code reads, after a change of the list.
    fn publish(&mut self) {
        let range = self.all.as_ptr_range();
        self.head.first = range.start as u64;
        self.head.end = range.end as u64;
    }

    /// Forgets all words.
    pub(crate) fn clear(&mut self) {
        self.all.clear();
        self.set_uses(USES);
        self.publish();
    }

    pub(crate) fn push(&mut self, word: Word) {
        self.all.push(word);
        self.publish();
    }

    pub(crate) fn swap_remove(&mut self, n: usize) {
        self.all.swap_remove(n);
        self.publish();
    }

    /// Takes the flags of `new` into word `n`, if that differs in accessed and dirty flags only.
    pub(crate) fn merge(&mut self, n: usize, new: &Word) -> bool {
        let Some(old) = self.all.get_mut(n).filter(|old| old.is_same(new)) else {
            return false;
        };
        old.value |= new.value;
        old.mask |= new.mask;
        true
    }

    /// From now on generated code does not compare the words, as they are not all.
    pub(crate) fn are_not_all(&self) {
        self.set_uses(0);
    }

    /// Counts a comparison. Returns true if there were many since this was said last.
    pub(crate) fn take_use(&self) -> bool {
        let left = self.head.uses_left.load(Ordering::Relaxed);
        self.set_uses(left.checked_sub(1).unwrap_or(USES));
        left == 0
    }

    fn set_uses(&self, left: u32) {
        self.head.uses_left.store(left, Ordering::Relaxed);
    }

    /// Returns true if no word has changed in memory. (Without branches, as that is the usual case.)
    #[inline]
    pub(crate) fn are_same(&self) -> bool {
        self.all.iter().fold(0, |all, w| all | w.changed()) == 0
    }

    /// Returns true if none of a few words is what it was.
    pub(crate) fn are_gone(&self) -> bool {
        let step = self.all.len().div_ceil(LOOKED_AT).max(1);
        !self.all.is_empty() && self.all.iter().step_by(step).all(|w| w.changed() != 0)
    }

    /// Returns true if word `n` has changed in memory.
    pub(crate) fn has_changed(&self, n: usize) -> bool {
        self.all.get(n).is_some_and(|word| word.changed() != 0)
    }
}

#[cfg(test)]
mod tests {
    use guest_memory::{GuestMemory, SlotConfig};
    use host::Mapping;
    use x86_defs::paging::{P, RW};

    use super::*;

    /// Of two entries of four bytes in one word.
    #[test]
    fn the_other_half_of_a_word_is_not_compared() {
        let ram = Mapping::anonymous(0x1000).unwrap();
        let memory = GuestMemory::new();
        let config = SlotConfig {
            slot: 0,
            flags: 0,
            gpa: 0,
            size: 0x1000,
            hva: ram.as_ptr() as u64,
        };
        memory.set_slot(config).unwrap();
        let page = memory.table().host_page(0, 0, true).unwrap();
        let value = 0x8000_5000 | P | RW | A;
        for (offset, other) in [(0x10, 0x14), (0x14, 0x10)] {
            page.store(offset, 4, value.into()).unwrap();
            let word = Word::of(&Step {
                level: 1,
                page,
                offset,
                size: 4,
                value,
            });
            let changed = |at, now: u64| {
                page.store(at, 4, now.into()).unwrap();
                word.changed() != 0
            };
            assert!(!changed(other, 0x1234_5678));
            assert!(!changed(offset, value | D));
            assert!(changed(offset, value & !A));
            assert!(changed(offset, value ^ 0x8000_0000));
            assert!(!changed(offset, value));
            assert!(!changed(other, 0));
        }
    }
}
