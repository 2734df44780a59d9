//! [`HostPage`]: accesses to one page of guest RAM.
//!
//! JUSTIFICATION for inline assembly: guest accesses are of any alignment and
//! race with other vCPUs and with the VMM's own threads. Rust has no unaligned
//! atomics and a plain access would be a data race; one `mov` is what the guest
//! would have executed, ordering (x86-TSO) included.

use std::{
    arch::{
        asm,
        x86_64::{
            __m128i, __m256i, _mm256_or_si256, _mm256_setzero_si256, _mm256_testz_si256,
            _mm256_xor_si256,
        },
    },
    fmt,
    sync::{Mutex, PoisonError, atomic::Ordering},
};

use x86_defs::paging::PAGE_SIZE;

use crate::PageCopy;

/// The host address of a page of guest RAM.
///
/// Obtained from a [`crate::Slot`] only; all methods check that the access
/// stays inside the page. After the slot is gone the value must be forgotten:
/// holders synchronise as the crate's documentation says.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct HostPage(*mut u8);

// SAFETY: an address; every access through it may race by design (see above).
unsafe impl Send for HostPage {}
// SAFETY: an address; every access through it may race by design (see the file's documentation).
unsafe impl Sync for HostPage {}

impl fmt::Debug for HostPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPage({:p})", self.0)
    }
}

/// The host address of eight aligned bytes of a page of guest RAM, under the rules of [`HostPage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct HostWord(*const u64);

// SAFETY: as of `HostPage`.
unsafe impl Send for HostWord {}
// SAFETY: as of `HostPage`.
unsafe impl Sync for HostWord {}

impl HostWord {
    /// Reads the word by one load.
    #[inline(always)]
    pub fn load(self) -> u64 {
        // SAFETY: aligned and in its page (`HostPage::word`), which is mapped for as long as its slot exists.
        unsafe { self.0.read_volatile() }
    }
}

#[repr(align(4096))]
struct Nowhere(core::cell::UnsafeCell<[u8; 4096]>);
// SAFETY: accessed only through `HostPage`, whose accesses may race.
unsafe impl Sync for Nowhere {}
static NOWHERE: Nowhere = Nowhere(core::cell::UnsafeCell::new([0; 4096]));

macro_rules! cmpxchg {
    ($p:expr, $old:expr, $new:expr, $t:ty, $class:ident, $fmt:literal, $acc:tt) => {{
        let seen: $t;
        asm!(
            concat!("lock cmpxchg [{p}], {n", $fmt, "}"),
            p = in(reg) $p,
            n = in($class) $new as $t,
            inout($acc) $old as $t => seen,
            options(nostack)
        );
        seen as u128
    }};
}

/// Copies of more bytes go by REP MOVSB. It takes long to begin, and waits for stores under way to what it reads.
const MOVS_PAYS: usize = 1024;

impl HostPage {
    /// Wraps `base`, the page-aligned first byte of a page that belongs to a slot.
    pub(crate) fn new(base: *mut u8) -> Self {
        Self(base)
    }

    /// A page that belongs to no guest. Empty TLB entries point to it, so that even a wrong hit stays harmless.
    pub fn nowhere() -> Self {
        Self(NOWHERE.0.get().cast())
    }

    /// The host address, for identity and for generated code.
    #[inline(always)]
    pub fn hva(self) -> u64 {
        self.0 as u64
    }

    #[inline(always)]
    fn at(self, offset: u64, size: usize) -> Option<*mut u8> {
        if offset > PAGE_SIZE - size as u64 {
            return None;
        }
        Some(self.0.wrapping_add(offset as usize))
    }

    /// Returns the word that contains the byte at `offset` (modulo the page's size).
    #[inline(always)]
    pub fn word(self, offset: u64) -> HostWord {
        HostWord(
            self.0
                .wrapping_add((offset & (PAGE_SIZE - 8)) as usize)
                .cast(),
        )
    }

    /// Reads 1, 2, 4, 8 or 16 bytes; `None` if they are not all in the page.
    #[inline(always)]
    pub fn load(self, offset: u64, size: usize) -> Option<u128> {
        let p = self.at(offset, size)?;
        // SAFETY: `at` checked that the bytes are in the page, which is mapped
        // for as long as its slot exists (crate documentation).
        Some(unsafe { load(p, size) })
    }

    /// Returns the 64 bytes from offset `64 * n` (modulo the page's size) as words, each read by one load.
    #[inline(always)]
    pub fn chunk(self, n: usize) -> [u64; 8] {
        let p = self.0.wrapping_add(n % 64 * 64).cast::<u64>();
        // SAFETY: aligned, as pages are, and in the page, which is mapped for as long as its slot
        // exists; racing writes of the guest give some mix of old and new words.
        core::array::from_fn(|i| unsafe { p.add(i).read_volatile() })
    }

    /// Returns true if each 64 bytes whose bit is set in `chunks` are those of `copy`. While the page is written, some
    /// mix of old and new bytes is compared.
    #[inline]
    pub fn has_chunks(self, chunks: u64, copy: &PageCopy) -> bool {
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the host has AVX2.
            unsafe { self.has_chunks_avx2(chunks, copy) }
        } else {
            self.has_chunks_by_words(chunks, copy)
        }
    }

    /// As [`Self::has_chunks`].
    #[target_feature(enable = "avx2")]
    fn has_chunks_avx2(self, mut chunks: u64, copy: &PageCopy) -> bool {
        let mut differences = _mm256_setzero_si256();
        while chunks != 0 {
            let offset = chunks.trailing_zeros() as usize * 64;
            chunks &= chunks - 1;
            let now = self.0.wrapping_add(offset).cast::<__m256i>();
            let before = copy.0.as_ptr().wrapping_byte_add(offset).cast::<__m256i>();
            for half in 0..2 {
                // SAFETY: aligned and in both pages, as `offset` is below 4,096; see `Self::chunk`.
                let (now, before) =
                    unsafe { (now.add(half).read_volatile(), before.add(half).read()) };
                differences = _mm256_or_si256(differences, _mm256_xor_si256(now, before));
            }
        }
        _mm256_testz_si256(differences, differences) != 0
    }

    /// As [`Self::has_chunks`].
    pub(crate) fn has_chunks_by_words(self, mut chunks: u64, copy: &PageCopy) -> bool {
        let mut is_same = true;
        while is_same && chunks != 0 {
            let chunk = chunks.trailing_zeros() as usize % 64;
            chunks &= chunks - 1;
            is_same = self.chunk(chunk) == copy.0[chunk];
        }
        is_same
    }

    /// Writes the low 1, 2, 4, 8 or 16 bytes of `value`; `None` if they are not all in the page.
    #[inline(always)]
    pub fn store(self, offset: u64, size: usize, value: u128) -> Option<()> {
        let p = self.at(offset, size)?;
        // SAFETY: `at` checked that the bytes are in the page, which is mapped for as long as its slot
        // exists; guest RAM holds nothing that Rust knows of.
        unsafe { store(p, size, value) };
        Some(())
    }

    /// Replaces the word at `offset` by `f` of it and returns the old word. With `lock` the replacement is atomic, and
    /// `f` may run more than once. `None` if the word is not wholly in the page.
    ///
    /// DEVIATION: a locked access that crosses a 16-byte boundary is atomic only against other such accesses
    /// (`split_lock`), not against aligned ones: the host's own split locks stall or kill the process on current
    /// kernels.
    #[inline]
    pub fn rmw(
        self,
        offset: u64,
        size: usize,
        lock: Option<&Mutex<()>>,
        mut f: impl FnMut(u128) -> u128,
    ) -> Option<u128> {
        let p = self.at(offset, size)?;
        let Some(split_lock) = lock else {
            // SAFETY: `at` checked that the bytes are in the page, which its slot keeps mapped.
            let old = unsafe { load(p, size) };
            // SAFETY: in the page (`at`); guest RAM holds nothing that Rust knows of.
            unsafe { store(p, size, f(old)) };
            return Some(old);
        };
        if offset.is_multiple_of(size as u64) && size <= 8 {
            // SAFETY: `at` checked that the bytes are in the page, which its slot keeps mapped.
            let mut old = unsafe { load(p, size) };
            loop {
                // SAFETY: `p` is in the page (`at`) and aligned to `size`; guest RAM holds nothing that
                // Rust knows of.
                let seen = unsafe { compare_exchange(p, size, old, f(old)) };
                if seen == old {
                    return Some(old);
                }
                old = seen;
            }
        }
        let in8 = (offset & 7) + size as u64 <= 8;
        let in16 = (offset & 15) + size as u64 <= 16 && is_x86_feature_detected!("cmpxchg16b");
        if in8 || in16 {
            let window = if in8 { 8 } else { 16 };
            return Some(self.rmw_in_window(offset, size, window, f));
        }
        let _guard = split_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `at` checked that the bytes are in the page, which its slot keeps mapped.
        let old = unsafe { load(p, size) };
        // SAFETY: in the page (`at`); guest RAM holds nothing that Rust knows of.
        unsafe { store(p, size, f(old)) };
        core::sync::atomic::fence(Ordering::SeqCst);
        Some(old)
    }

    /// Exchanges a misaligned word together with the aligned 8 or 16 bytes around it.
    fn rmw_in_window(
        self,
        offset: u64,
        size: usize,
        window: usize,
        mut f: impl FnMut(u128) -> u128,
    ) -> u128 {
        let start = offset & !(window as u64 - 1);
        let p = self.0.wrapping_add(start as usize);
        let shift = (offset - start) * 8;
        let mask = u128::MAX >> (128 - 8 * size);
        // SAFETY: the window is aligned and inside the page.
        let mut around = unsafe { load(p, window) };
        loop {
            let old = around >> shift & mask;
            let new = around & !(mask << shift) | (f(old) & mask) << shift;
            // SAFETY: the window is aligned and inside the page; the caller checked for CMPXCHG16B if
            // `window` is 16.
            let seen = unsafe { compare_exchange(p, window, around, new) };
            if seen == around {
                return old;
            }
            around = seen;
        }
    }

    /// Atomically replaces an aligned 4- or 8-byte word. Returns false if the word was not `old`, is misaligned, or is
    /// not in the page.
    #[inline]
    pub fn compare_exchange(self, offset: u64, size: usize, old: u64, new: u64) -> bool {
        if !matches!(size, 4 | 8) || !offset.is_multiple_of(size as u64) {
            return false;
        }
        let Some(p) = self.at(offset, size) else {
            return false;
        };
        // SAFETY: inside the page and aligned.
        unsafe { compare_exchange(p, size, old.into(), new.into()) == old.into() }
    }

    /// Reads bytes; false (and nothing read) if they are not all in the page.
    pub fn read_bytes(self, offset: u64, buf: &mut [u8]) -> bool {
        if offset > PAGE_SIZE || buf.len() as u64 > PAGE_SIZE - offset {
            return false;
        }
        let mut p = self.0.wrapping_add(offset as usize);
        let mut rest = buf;
        if rest.len() > MOVS_PAYS {
            // SAFETY: both sides are valid for the length; a guest write that
            // races gives some mix of old and new bytes, as on hardware.
            unsafe { rep_movs(rest.as_mut_ptr(), p, rest.len(), 1) };
            return true;
        }
        let (pieces, last) = rest.as_chunks_mut::<16>();
        for piece in pieces {
            // SAFETY: the 16 bytes are part of the range checked above.
            *piece = unsafe { load(p, 16) }.to_le_bytes();
            p = p.wrapping_add(16);
        }
        rest = last;
        while !rest.is_empty() {
            let n = piece(rest.len());
            let (now, later) = rest.split_at_mut(n);
            // SAFETY: the `n` bytes are part of the range checked above.
            let v = unsafe { load(p, n) };
            now.copy_from_slice(&v.to_le_bytes()[..n]);
            p = p.wrapping_add(n);
            rest = later;
        }
        true
    }

    /// Writes bytes; false (and nothing written) if they are not all in the page.
    pub fn write_bytes(self, offset: u64, buf: &[u8]) -> bool {
        if offset > PAGE_SIZE || buf.len() as u64 > PAGE_SIZE - offset {
            return false;
        }
        let mut p = self.0.wrapping_add(offset as usize);
        let mut rest = buf;
        if rest.len() > MOVS_PAYS {
            // SAFETY: both sides are valid for the length, and guest RAM never
            // overlaps a Rust object.
            unsafe { rep_movs(p, rest.as_ptr(), rest.len(), 1) };
            return true;
        }
        let (pieces, last) = rest.as_chunks::<16>();
        for piece in pieces {
            // SAFETY: the 16 bytes are part of the range checked above.
            unsafe { store(p, 16, u128::from_le_bytes(*piece)) };
            p = p.wrapping_add(16);
        }
        rest = last;
        while !rest.is_empty() {
            let n = piece(rest.len());
            let (now, later) = rest.split_at(n);
            let mut v = [0; 16];
            v[..n].copy_from_slice(now);
            // SAFETY: the `n` bytes are part of the range checked above.
            unsafe { store(p, n, u128::from_le_bytes(v)) };
            p = p.wrapping_add(n);
            rest = later;
        }
        true
    }

    /// Copies `count` elements of `unit` (1, 2, 4 or 8) bytes upwards, one after
    /// another, so that overlap behaves as in the guest's own `rep movs`.
    /// False (and nothing copied) if either range leaves its page.
    pub fn copy_elements(
        self,
        offset: u64,
        from: Self,
        from_offset: u64,
        count: u64,
        unit: u64,
    ) -> bool {
        let Some(len) = elements_len(count, unit) else {
            return false;
        };
        if offset > PAGE_SIZE - len || from_offset > PAGE_SIZE - len {
            return false;
        }
        let (to, from) = (
            self.0.wrapping_add(offset as usize),
            from.0.wrapping_add(from_offset as usize),
        );
        // SAFETY: both ranges are in their pages; overlap is what REP MOVS defines.
        unsafe { rep_movs(to, from, count as usize, unit) };
        true
    }

    /// As [`Self::copy_elements`], downwards: the offsets are those of the highest elements, which are copied first.
    pub fn copy_elements_down(
        self,
        offset: u64,
        from: Self,
        from_offset: u64,
        count: u64,
        unit: u64,
    ) -> bool {
        let Some(len) = elements_len(count, unit) else {
            return false;
        };
        let fits = |at: u64| at <= PAGE_SIZE - unit && at + unit >= len;
        if !fits(offset) || !fits(from_offset) {
            return false;
        }
        let (to, from) = (
            self.0.wrapping_add(offset as usize),
            from.0.wrapping_add(from_offset as usize),
        );
        // SAFETY: both ranges are in their pages; overlap is what REP MOVS defines.
        unsafe { rep_movs_down(to, from, count as usize, unit) };
        true
    }

    /// Fills `count` elements of `unit` (1, 2, 4 or 8) bytes with the low bytes
    /// of `value`. False (and nothing written) if the range leaves the page.
    pub fn fill_elements(self, offset: u64, value: u64, count: u64, unit: u64) -> bool {
        let Some(len) = elements_len(count, unit) else {
            return false;
        };
        if offset > PAGE_SIZE - len {
            return false;
        }
        let p = self.0.wrapping_add(offset as usize);
        // SAFETY: the range is in the page; the direction flag is clear by the ABI.
        unsafe {
            match unit {
                1 => {
                    asm!("rep stosb", inout("rcx") count => _, inout("rdi") p => _, in("rax") value, options(nostack, preserves_flags));
                }
                2 => {
                    asm!("rep stosw", inout("rcx") count => _, inout("rdi") p => _, in("rax") value, options(nostack, preserves_flags));
                }
                4 => {
                    asm!("rep stosd", inout("rcx") count => _, inout("rdi") p => _, in("rax") value, options(nostack, preserves_flags));
                }
                _ => {
                    asm!("rep stosq", inout("rcx") count => _, inout("rdi") p => _, in("rax") value, options(nostack, preserves_flags));
                }
            }
        }
        true
    }
}

/// Returns the length in bytes of `count` elements, or `None` if it exceeds a page.
fn elements_len(count: u64, unit: u64) -> Option<u64> {
    if !matches!(unit, 1 | 2 | 4 | 8) {
        return None;
    }
    count.checked_mul(unit).filter(|len| *len <= PAGE_SIZE)
}

/// Returns the size of the largest single access that fits `len`, which is less than 16.
fn piece(len: usize) -> usize {
    match len {
        8.. => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// # Safety
/// `p` is readable for `size` bytes.
#[inline(always)]
unsafe fn load(p: *const u8, size: usize) -> u128 {
    // SAFETY: the caller's; each arm reads exactly `size` bytes.
    unsafe {
        match size {
            1 => {
                let v: u32;
                asm!("movzx {v:e}, byte ptr [{p}]", v = lateout(reg) v, p = in(reg) p, options(nostack, preserves_flags, readonly));
                u128::from(v)
            }
            2 => {
                let v: u32;
                asm!("movzx {v:e}, word ptr [{p}]", v = lateout(reg) v, p = in(reg) p, options(nostack, preserves_flags, readonly));
                u128::from(v)
            }
            4 => {
                let v: u32;
                asm!("mov {v:e}, [{p}]", v = lateout(reg) v, p = in(reg) p, options(nostack, preserves_flags, readonly));
                u128::from(v)
            }
            8 => {
                let v: u64;
                asm!("mov {v}, [{p}]", v = lateout(reg) v, p = in(reg) p, options(nostack, preserves_flags, readonly));
                u128::from(v)
            }
            _ => {
                let v: __m128i;
                asm!("movdqu {v}, [{p}]", v = lateout(xmm_reg) v, p = in(reg) p, options(nostack, preserves_flags, readonly));
                core::mem::transmute::<__m128i, u128>(v)
            }
        }
    }
}

/// # Safety
/// `p` is writable for `size` bytes, which no Rust object occupies.
#[inline(always)]
unsafe fn store(p: *mut u8, size: usize, value: u128) {
    // SAFETY: the caller's; each arm writes exactly `size` bytes.
    unsafe {
        match size {
            1 => {
                asm!("mov [{p}], {v}", v = in(reg_byte) value as u8, p = in(reg) p, options(nostack, preserves_flags));
            }
            2 => {
                asm!("mov [{p}], {v:x}", v = in(reg) value as u16, p = in(reg) p, options(nostack, preserves_flags));
            }
            4 => {
                asm!("mov [{p}], {v:e}", v = in(reg) value as u32, p = in(reg) p, options(nostack, preserves_flags));
            }
            8 => {
                asm!("mov [{p}], {v}", v = in(reg) value as u64, p = in(reg) p, options(nostack, preserves_flags));
            }
            _ => {
                let v = core::mem::transmute::<u128, __m128i>(value);
                asm!("movdqu [{p}], {v}", v = in(xmm_reg) v, p = in(reg) p, options(nostack, preserves_flags));
            }
        }
    }
}

/// Returns the previous value; the exchange happened if that equals `old`.
///
/// # Safety
/// `p` is writable for `size` bytes and aligned to it; 16 needs CMPXCHG16B.
#[inline(always)]
unsafe fn compare_exchange(p: *mut u8, size: usize, old: u128, new: u128) -> u128 {
    // SAFETY: the caller's.
    unsafe {
        match size {
            1 => cmpxchg!(p, old, new, u8, reg_byte, "", "al"),
            2 => cmpxchg!(p, old, new, u16, reg, ":x", "ax"),
            4 => cmpxchg!(p, old, new, u32, reg, ":e", "eax"),
            8 => cmpxchg!(p, old, new, u64, reg, "", "rax"),
            _ => compare_exchange_16(p, old, new),
        }
    }
}

/// Compare-exchange of 16 bytes. Written by hand: the intrinsic, when inlined into code for the baseline CPU, becomes a
/// call of a library function that is not linked.
///
/// # Safety
/// As [`compare_exchange`], and the host has CMPXCHG16B.
unsafe fn compare_exchange_16(p: *mut u8, old: u128, new: u128) -> u128 {
    let (low, high): (u64, u64);
    // SAFETY: the caller's. RBX is the compiler's and is put back.
    unsafe {
        asm!(
            "xchg rsi, rbx",
            "lock cmpxchg16b [rdi]",
            "mov rbx, rsi",
            // A fixed register: the compiler might choose RBX, which the XCHG replaces.
            in("rdi") p,
            inout("rsi") new as u64 => _,
            in("rcx") (new >> 64) as u64,
            inout("rax") old as u64 => low,
            inout("rdx") (old >> 64) as u64 => high,
            options(nostack)
        );
    }
    u128::from(high) << 64 | u128::from(low)
}

/// # Safety
/// Both sides are valid for `count * unit` bytes.
unsafe fn rep_movs(to: *mut u8, from: *const u8, count: usize, unit: u64) {
    // SAFETY: the caller's; the direction flag is clear by the ABI.
    unsafe {
        match unit {
            1 => {
                asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
            }
            2 => {
                asm!("rep movsw", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
            }
            4 => {
                asm!("rep movsd", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
            }
            _ => {
                asm!("rep movsq", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
            }
        }
    }
}

/// # Safety
/// Both sides are valid for `count * unit` bytes.
unsafe fn rep_movs_down(to: *mut u8, from: *const u8, count: usize, unit: u64) {
    // SAFETY: the caller's; the direction flag is clear by the ABI, and afterwards.
    unsafe {
        match unit {
            1 => {
                asm!("std", "rep movsb", "cld", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack));
            }
            2 => {
                asm!("std", "rep movsw", "cld", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack));
            }
            4 => {
                asm!("std", "rep movsd", "cld", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack));
            }
            _ => {
                asm!("std", "rep movsq", "cld", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack));
            }
        }
    }
}
