//! What a block is translated for, besides its bytes: the vCPU's mode, and with it a block's key.

use core::ops::{BitOr, BitOrAssign};

use crate::ir::streams::Streams;

/// A set of mode bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Mode(u32);

impl Mode {
    pub(crate) const NONE: Self = Self(0);
    /// FP and SIMD instructions are enabled and raise no exceptions.
    pub(crate) const FP: Self = Self(1);
    /// CPL 0, and IOPL, NT and DF are clear.
    pub(crate) const KERNEL: Self = Self(2);
    /// RDTSC is allowed, and an addition.
    pub(crate) const TSC: Self = Self(4);
    /// The operating system has enabled AVX.
    pub(crate) const AVX: Self = Self(8);
    /// 32-bit code: compatibility or protected mode, with flat segments but FS and GS, if nothing else is said.
    pub(crate) const BITS32: Self = Self(0x10);
    /// 32-bit code whose FS, or GS, has any base and no limit.
    pub(crate) const FS: Self = Self(0x20);
    pub(crate) const GS: Self = Self(0x80);
    /// Every access probes for itself: see [`crate::plan::groups`].
    pub(crate) const SPLIT: Self = Self(0x40);
    /// 64-bit code that is executed at one address only: see [`crate::code::cache::BlockTable::mode_at`].
    pub(crate) const BOUND: Self = Self(0x100);

    /// Beside [`Self::BITS32`]: segments have bases and limits, which are compared and added at each access.
    pub(crate) const SEGMENTED: Self = Self(0x200);
    /// Beside [`Self::SEGMENTED`]: 16-bit code.
    pub(crate) const BITS16: Self = Self(0x400);
    /// Beside [`Self::SEGMENTED`]: the stack is addressed by SP.
    pub(crate) const STACK16: Self = Self(0x800);
    /// Beside [`Self::SEGMENTED`]: real mode, or virtual-8086 mode, where a segment's base is what was loaded to its register.
    pub(crate) const REAL: Self = Self(0x1000);
    /// What is retired is counted exactly: see [`crate::codegen::countdown::exact`].
    pub(crate) const COUNTS: Self = Self(0x2000);
    /// With that, the streams that are counted besides instructions: four bits.
    const STREAMS: u32 = 14;

    /// How many bits there may be.
    pub(crate) const WIDTH: u32 = 18;

    /// It has all of these.
    pub(crate) const fn has(self, bits: Self) -> bool {
        self.0 & bits.0 == bits.0
    }
    /// These and its own.
    #[must_use]
    pub(crate) const fn with(self, bits: Self) -> Self {
        Self(self.0 | bits.0)
    }
    /// All but these.
    #[must_use]
    pub(crate) const fn without(self, bits: Self) -> Self {
        Self(self.0 & !bits.0)
    }
    /// With [`Self::SPLIT`] or without it.
    #[must_use]
    pub(crate) const fn split(self, is_split: bool) -> Self {
        if is_split {
            self.with(Self::SPLIT)
        } else {
            self.without(Self::SPLIT)
        }
    }
    /// 64-bit code.
    pub(crate) const fn is_long(self) -> bool {
        !self.has(Self::BITS32)
    }
    /// Accesses share probes: they do not where each may come to a segment's limit.
    pub(crate) const fn has_groups(self) -> bool {
        !self.has(Self::SPLIT) && !self.has(Self::SEGMENTED)
    }
    /// What the decoder is to be told.
    pub(crate) const fn bits(self) -> u32 {
        match (self.is_long(), self.has(Self::BITS16)) {
            (true, _) => 64,
            (false, false) => 32,
            (false, true) => 16,
        }
    }
    /// It is 64-bit code, and no kernel's: other pages are compared by page guards.
    pub(crate) const fn has_page_guards(self) -> bool {
        self.is_long() && !self.has(Self::KERNEL)
    }
    /// It counts what is retired, and events of these streams.
    pub(crate) const fn counting(streams: Streams) -> Self {
        Self::COUNTS.with(Self((streams.number() as u32) << Self::STREAMS))
    }
    /// The streams that are counted besides instructions, if anything is.
    pub(crate) const fn streams(self) -> Option<Streams> {
        if self.has(Self::COUNTS) {
            Some(Streams::of_number((self.0 >> Self::STREAMS) as u64))
        } else {
            None
        }
    }
    /// As a number of [`Self::WIDTH`] bits.
    pub(crate) const fn number(self) -> u64 {
        self.0 as u64
    }
    /// Of the low bits of a key of targets.
    pub(crate) const fn of_key(key: u64) -> Self {
        Self(key as u32 & ((1 << Self::WIDTH) - 1))
    }
    /// The gva of the page at `gva` if blocks of the mode are executed there only.
    pub(crate) fn bound(self, gva: u64) -> Option<i32> {
        if self.is_long() && self.has(Self::BOUND) {
            low(gva)
        } else {
            None
        }
    }
}

impl BitOr for Mode {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        self.with(other)
    }
}

impl BitOrAssign for Mode {
    fn bitor_assign(&mut self, other: Self) {
        *self = self.with(other);
    }
}

/// The gva of the page at `gva`, if that is one of 32 bits with its sign.
pub(crate) fn low(gva: u64) -> Option<i32> {
    i32::try_from((gva & !0xfff) as i64).ok()
}

/// What a block is found by: what is in which page and where, and for which mode it is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey {
    /// Page identity plus offset in the page.
    pub(crate) at: u64,
    pub(crate) mode: Mode,
}

impl BlockKey {
    pub(crate) const fn new(at: u64, mode: Mode) -> Self {
        Self { at, mode }
    }
    /// The page's identity.
    pub(crate) const fn page(self) -> u64 {
        self.at & !0xfff
    }
    /// The key of the page in its mode.
    pub(crate) const fn of_page(self) -> Self {
        Self::new(self.page(), self.mode)
    }
    pub(crate) const fn offset(self) -> u64 {
        self.at & 0xfff
    }
    /// The block at another offset of the page.
    pub(crate) const fn beside(self, offset: u64) -> Self {
        Self::new(self.page() | offset, self.mode)
    }
    /// The block's other translation, or itself.
    pub(crate) const fn split(self, is_split: bool) -> Self {
        Self::new(self.at, self.mode.split(is_split))
    }
}
