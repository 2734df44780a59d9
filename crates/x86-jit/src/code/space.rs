//! [`CodeSpace`]: the code buffer, what is where in it, and the only writer of published code.
//!
//! Code is emitted into a buffer of the emitter's own ([`x86_codegen::asm::Asm`]). It is published once, by
//! [`CodeSpace::publish`], and changed afterwards only by the functions below that one: each says what it changes. Only
//! the vCPU that owns the space executes its code, and never while it is in one of these functions, so none of the
//! writes is seen half done.

use host::{CodeBuffer, CodeViews};

use crate::{
    code::cache::Cache,
    code::layout::CodeLayout,
    code::perf::{self, Perf, Profiler},
};
use x86_codegen::{
    asm::{Isa, MAX_BLOCK},
    codegen::trampolines::AllTrampolines,
};

/// Alignment of the trampolines, and of the first block behind them.
const TRAMPOLINES_ALIGN: usize = 64;
/// Length of a `jmp rel32`.
const JMP_LEN: usize = 5;
/// Bytes of a relative address.
pub(crate) const REL32: usize = 4;

/// The code of a block's first or second part.
#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: usize,
    len: usize,
    /// The guest's instruction pointer at the block's begin.
    rip: u64,
}

/// Where translated code is, and what is known of it.
#[derive(Debug)]
pub(crate) struct CodeSpace {
    buffer: CodeBuffer,
    layout: CodeLayout,
    pub(crate) trampolines: AllTrampolines,
    pub(crate) cache: Cache,
    /// The pieces of all blocks, if [`Self::keep_pieces`] was called.
    pieces: Option<Vec<Piece>>,
    /// The file that names for a profiler are written to.
    perf: Option<&'static Perf>,
}

impl CodeSpace {
    /// Makes a space with a buffer of at least `bytes` bytes and trampolines that call the functions `serve` and
    /// `handle`. `None` if the host does not allow that.
    pub(crate) fn new(bytes: usize, isa: Isa, [serve, handle]: [u64; 2]) -> Option<Self> {
        let mut code = Vec::new();
        let trampolines = AllTrampolines::emit(isa, serve, handle, |at, part| {
            code.resize(at, 0);
            code.extend_from_slice(part);
        });
        let end = code.len().next_multiple_of(TRAMPOLINES_ALIGN);
        let mut buffer = CodeBuffer::new(bytes.max(end + CodeLayout::LEAST)).ok()?;
        buffer.write(0, &code);
        Some(Self {
            layout: CodeLayout::new(end..buffer.len()),
            buffer,
            trampolines,
            cache: Cache::new(),
            pieces: None,
            perf: None,
        })
    }

    /// Keeps from now on where the code of each block is.
    pub(crate) fn keep_pieces(&mut self) {
        self.pieces.get_or_insert_default();
    }

    /// Names the code that is published from now on for a profiler. Calls `tell` with the reason if that is impossible.
    pub(crate) fn name_for(&mut self, profiler: Profiler, tell: fn(&str)) {
        self.perf = perf::open(profiler, tell);
    }

    /// Returns the host address at which the code at an offset is executed.
    #[inline]
    pub(crate) fn address(&self, offset: usize) -> u64 {
        self.buffer.rx() as u64 + offset as u64
    }

    /// Returns the offset of the code that is executed at a host address.
    #[inline]
    pub(crate) fn offset(&self, address: u64) -> usize {
        address.wrapping_sub(self.buffer.rx() as u64) as usize
    }

    /// Returns the buffer's views, for a [`host::ServiceThread`].
    pub(crate) fn views(&self) -> &std::sync::Arc<CodeViews> {
        self.buffer.views()
    }

    /// Returns the offsets of the next block's two parts: the one that is executed often, and the one that rarely is.
    pub(crate) fn next(&self) -> (usize, usize) {
        self.layout.next()
    }

    /// Returns true if the next block may not fit.
    pub(crate) fn is_full(&self) -> bool {
        self.layout.is_full()
    }

    /// Returns where the last block's first part ends.
    pub(crate) fn end(&self) -> usize {
        self.layout.end()
    }

    /// Frees the whole buffer and forgets all blocks.
    pub(crate) fn clear(&mut self) {
        self.cache.clear();
        self.layout.clear();
        if let Some(pieces) = &mut self.pieces {
            pieces.clear();
        }
    }

    /// Returns the code of the blocks at a guest instruction pointer: offsets in the buffer, and bytes.
    pub(crate) fn code_of(&self, rip: u64) -> Vec<(usize, Vec<u8>)> {
        let of = self.pieces.iter().flatten().filter(|p| p.rip == rip);
        of.map(|p| (p.offset, self.buffer.read(p.offset, p.len)))
            .collect()
    }

    /// Publishes the two parts of the block at `rip`, at the offsets `base`. These are those of [`Self::next`], but the
    /// first part may also begin where the jump at the end of the last block is, and takes its place then. Returns
    /// false if the block does not fit. Nothing has changed then, except that the code behind the last block may have
    /// been overwritten.
    pub(crate) fn publish(
        &mut self,
        rip: u64,
        base: (usize, usize),
        (hot, cold): (&[u8], &[u8]),
    ) -> bool {
        // The layout leaves room for a block of `MAX_BLOCK` bytes, so this fails only for one that is too large.
        let fits = hot.len().max(cold.len()) <= MAX_BLOCK
            && self.buffer.write(base.0, hot)
            && self.buffer.write(base.1, cold);
        if !fits {
            return false;
        }
        for (offset, code) in [(base.0, hot), (base.1, cold)] {
            if let Some(perf) = self.perf {
                perf.note(rip, self.address(offset), code);
            }
            if let Some(pieces) = &mut self.pieces {
                let len = code.len();
                pieces.push(Piece { offset, len, rip });
            }
        }
        self.layout.take(base.0 + hot.len(), cold.len());
        let (hot, cold) = self.layout.next();
        self.buffer.views().grows(hot);
        self.buffer.views().grows(cold);
        true
    }

    /// Publishes code that is no block where the second part of the next block would begin; that begins behind it.
    pub(crate) fn publish_cold(&mut self, code: &[u8]) {
        let (_, cold) = self.layout.next();
        self.buffer.write(cold, code);
        self.layout.take(self.layout.end(), code.len());
    }

    /// Makes the branch whose relative address is at `at` lead to `to`.
    pub(crate) fn set_branch(&mut self, at: usize, to: usize) {
        self.buffer.write(at, &relative(at + REL32, to));
    }

    /// Overwrites the code at `from` with a jump to `to`.
    pub(crate) fn redirect(&mut self, from: usize, to: usize) {
        let [a, b, c, d] = relative(from + JMP_LEN, to);
        self.buffer.write(from, &[0xe9, a, b, c, d]);
    }

    /// Sets the operand of 4 bytes at `at`.
    pub(crate) fn set_operand(&mut self, at: usize, value: i32) {
        self.buffer.write(at, &value.to_le_bytes());
    }

    /// Sets the operand of 1 byte at `at`.
    pub(crate) fn set_short_operand(&mut self, at: usize, value: i8) {
        self.buffer.write(at, &value.to_le_bytes());
    }

    /// Sets the gva of 8 bytes at `at`.
    pub(crate) fn set_gva(&mut self, at: usize, gva: u64) {
        self.buffer.write(at, &gva.to_le_bytes());
    }
}

/// Returns the relative address of a branch that ends at `from` and leads to `to`.
fn relative(from: usize, to: usize) -> [u8; REL32] {
    ((to as i64 - from as i64) as i32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86_native::HostFeatures;

    fn space() -> CodeSpace {
        let isa = Isa::of_host(&HostFeatures::detected());
        CodeSpace::new(0, isa, [0, 0]).unwrap()
    }

    #[test]
    fn what_is_published_is_found_where_it_is() {
        let mut space = space();
        space.keep_pieces();
        let base = space.next();
        assert!(space.publish(0x1000, base, (&[1, 2], &[3])));
        let found = space.code_of(0x1000);
        assert_eq!(found, [(base.0, vec![1, 2]), (base.1, vec![3])]);
        assert_eq!(space.end(), base.0 + 2);
        assert_eq!(space.offset(space.address(base.0)), base.0);
        let (hot, cold) = space.next();
        assert!(hot >= base.0 + 2 && cold > base.1);
        space.publish_cold(&[0x90; 7]);
        assert_eq!(space.next(), (hot, cold + 7));
        assert_eq!(space.end(), base.0 + 2);
        space.clear();
        assert!(space.code_of(0x1000).is_empty());
    }

    #[test]
    fn a_block_too_large_is_not_published() {
        let mut space = space();
        let base = space.next();
        let large = vec![0x90; MAX_BLOCK + 1];
        assert!(!space.publish(0, base, (&large, &[])));
        assert!(!space.publish(0, base, (&[], &large)));
        assert_eq!(space.next(), base);
    }

    #[test]
    fn branches_are_relative_to_their_end() {
        let mut space = space();
        space.keep_pieces();
        let base = space.next();
        assert!(space.publish(0, base, (&[0; 16], &[])));
        space.redirect(base.0, base.0 + 5);
        space.set_branch(base.0 + 5, base.0 + 8);
        space.set_operand(base.0 + 9, -2);
        space.set_short_operand(base.0 + 13, -3);
        let (_, code) = space.code_of(0).swap_remove(0);
        assert_eq!(code[..5], [0xe9, 0, 0, 0, 0]);
        assert_eq!(code[5..9], (-1_i32).to_le_bytes());
        assert_eq!(code[9..14], [0xfe, 0xff, 0xff, 0xff, 0xfd]);
    }
}
