//! What a block is translated for besides its bytes: the vCPU's mode, and the key of a block, which contains it.

use core::ops::{BitOr, BitOrAssign};

use crate::ir::streams::Streams;

/// A set of mode bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mode(u32);

impl Mode {
    /// No bit is set.
    pub const NONE: Self = Self(0);
    /// x87 and MMX instructions are enabled, and FP and SIMD instructions raise no exceptions.
    pub const FP: Self = Self(1);
    /// CPL is 0, and NT is clear.
    pub const KERNEL: Self = Self(2);
    /// RDTSC is allowed, and the guest's TSC is the host's plus a constant.
    pub const TSC: Self = Self(4);
    /// The operating system has enabled AVX.
    pub const AVX: Self = Self(8);
    /// 32-bit code in compatibility mode or protected mode. Segments other than FS and GS are flat, unless
    /// [`Self::SEGMENTED`] is set.
    pub const BITS32: Self = Self(0x10);
    /// 32-bit code whose FS may have a base but no limit.
    pub const FS: Self = Self(0x20);
    /// The same of GS.
    pub const GS: Self = Self(0x80);
    /// Every access probes for itself: no group shares a probe (see [`crate::plan::groups`]).
    pub const SPLIT: Self = Self(0x40);
    /// 64-bit code that is executed at one address only (see `BlockTable::mode_at` of x86-jit).
    pub const BOUND: Self = Self(0x100);

    /// With [`Self::BITS32`]: each access compares with the segment's limit and adds its base.
    pub const SEGMENTED: Self = Self(0x200);
    /// With [`Self::SEGMENTED`]: 16-bit code.
    pub const BITS16: Self = Self(0x400);
    /// With [`Self::SEGMENTED`]: the stack is addressed by SP.
    pub const STACK16: Self = Self(0x800);
    /// With [`Self::SEGMENTED`]: real mode or virtual-8086 mode, in which a segment's base is its selector times 16.
    pub const REAL: Self = Self(0x1000);
    /// What is retired is counted exactly (see [`crate::codegen::countdown::exact`]).
    pub(crate) const COUNTS: Self = Self(0x2000);
    /// With [`Self::COUNTS`]: the lowest of the bits that name the streams that are counted besides instructions.
    pub(crate) const STREAMS: u32 = 14;

    /// The operating system has enabled SSE. Those from before SSE, and some of its time, do not.
    pub const SSE: Self = Self(0x40_0000);

    /// With [`Self::SEGMENTED`], which is never translated with [`Self::COUNTS`]: the lowest of the eight bits that say
    /// where CS begins in its page.
    const BEGIN: u32 = 14;
    const _APART: () = assert!(
        Self::SSE.0 >> (Self::STREAMS + Streams::BITS) != 0
            && Self::SSE.0 >> (Self::BEGIN + 8) != 0
    );

    /// Number of mode bits.
    pub const WIDTH: u32 = 23;

    /// Returns true if all of these bits are set.
    pub const fn has(self, bits: Self) -> bool {
        self.0 & bits.0 == bits.0
    }
    /// Returns the mode with these bits set.
    #[must_use]
    pub(crate) const fn with(self, bits: Self) -> Self {
        Self(self.0 | bits.0)
    }
    /// Returns the mode with these bits clear.
    #[must_use]
    pub const fn without(self, bits: Self) -> Self {
        Self(self.0 & !bits.0)
    }
    /// Returns the mode with or without [`Self::SPLIT`].
    #[must_use]
    pub const fn split(self, is_split: bool) -> Self {
        if is_split {
            self.with(Self::SPLIT)
        } else {
            self.without(Self::SPLIT)
        }
    }
    /// Returns true for 64-bit code.
    pub const fn is_long(self) -> bool {
        !self.has(Self::BITS32)
    }
    /// Returns true if accesses may share probes. They may not where each access has to be compared with a segment's
    /// limit.
    pub const fn has_groups(self) -> bool {
        !self.has(Self::SPLIT) && !self.has(Self::SEGMENTED)
    }
    /// Returns the bitness for the decoder.
    pub(crate) const fn bits(self) -> u32 {
        match (self.is_long(), self.has(Self::BITS16)) {
            (true, _) => 64,
            (false, false) => 32,
            (false, true) => 16,
        }
    }
    /// Returns true for 64-bit code that is no kernel's: its cross-page branches compare page guards.
    pub const fn has_page_guards(self) -> bool {
        self.is_long() && !self.has(Self::KERNEL)
    }
    /// Returns the bits of code that counts what is retired, with these streams besides instructions.
    pub const fn counting(streams: Streams) -> Self {
        Self::COUNTS.with(Self((streams.number() as u32) << Self::STREAMS))
    }
    /// Returns the streams that are counted besides instructions, if anything is counted.
    pub const fn streams(self) -> Option<Streams> {
        if self.has(Self::COUNTS) {
            Some(Streams::of_number((self.0 >> Self::STREAMS) as u64))
        } else {
            None
        }
    }
    /// Returns the bits for a CS that begins at that offset in its page, a multiple of 16.
    pub const fn beginning(offset: u32) -> Self {
        Self((offset >> 4 & 0xff) << Self::BEGIN)
    }
    /// Returns the offset at which CS begins in its page. No code of CS is before it in that page; other pages have code
    /// there, too.
    pub(crate) const fn begin(self) -> u32 {
        if !self.has(Self::SEGMENTED) {
            return 0;
        }
        (self.0 >> Self::BEGIN & 0xff) << 4
    }
    /// Returns true if a branch from `offset` to `target` stays in its page, in whichever page of CS it is.
    pub(crate) const fn is_near(self, offset: u32, target: i64) -> bool {
        let begin = self.begin();
        let first = if offset < begin { 0 } else { begin as i64 };
        first <= target && target < 0x1000
    }
    /// Returns the bits as a number of [`Self::WIDTH`] bits.
    pub const fn number(self) -> u64 {
        self.0 as u64
    }
    /// Returns the mode in the low bits of a target key.
    pub const fn of_key(key: u64) -> Self {
        Self(key as u32 & ((1 << Self::WIDTH) - 1))
    }
    /// Returns the gva of the page at `gva` if blocks of the mode are executed there only.
    pub fn bound(self, gva: u64) -> Option<i32> {
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

/// Returns the gva of the page at `gva` if it is a sign-extended number of 32 bits.
pub fn low(gva: u64) -> Option<i32> {
    i32::try_from((gva & !0xfff) as i64).ok()
}

/// What a block is found by: its place in guest-physical memory and the mode that it is translated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The page's identity plus the offset in the page.
    pub at: u64,
    /// The mode that it is translated for.
    pub mode: Mode,
}

impl BlockKey {
    /// Returns the key of the block at `at`, a page's identity plus the offset in the page.
    pub const fn new(at: u64, mode: Mode) -> Self {
        Self { at, mode }
    }
    /// Returns the page's identity.
    pub const fn page(self) -> u64 {
        self.at & !0xfff
    }
    /// Returns the key of the block at the page's first byte, in the same mode.
    pub const fn of_page(self) -> Self {
        Self::new(self.page(), self.mode)
    }
    /// Returns the block's offset in its page.
    pub const fn offset(self) -> u64 {
        self.at & 0xfff
    }
    /// Returns the key of the block at another offset of the page.
    pub const fn beside(self, offset: u64) -> Self {
        Self::new(self.page() | offset, self.mode)
    }
    /// Returns the key of the block's split translation, or of the other one.
    pub const fn split(self, is_split: bool) -> Self {
        Self::new(self.at, self.mode.split(is_split))
    }
}
