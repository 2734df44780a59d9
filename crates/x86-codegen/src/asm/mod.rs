//! The emitter of the code around guest instructions: a few encodings, made by hand.
//!
//! Guest instructions themselves are re-encoded by the decoder's library. This emitter is for code that is emitted many
//! times per block, where the speed of translation counts.

mod isa;
mod literals;

pub use isa::Isa;

/// A host general register by number.
pub(crate) type Reg = u8;

pub(crate) const RAX: Reg = 0;
pub(crate) const RCX: Reg = 1;
pub(crate) const RDX: Reg = 2;
pub(crate) const RBX: Reg = 3;
pub(crate) const RSP: Reg = 4;
pub(crate) const RBP: Reg = 5;
pub(crate) const RSI: Reg = 6;
pub(crate) const RDI: Reg = 7;

/// A memory operand of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mem {
    pub(crate) base: Option<Reg>,
    pub(crate) index: Option<(Reg, u8)>,
    pub(crate) disp: i32,
    /// Relative to GS: a field of the vCPU's state.
    pub(crate) gs: bool,
}

impl Mem {
    /// Returns the operand plus `index << scale`.
    pub(crate) const fn plus(self, index: Reg, scale: u8) -> Self {
        Self {
            index: Some((index, scale)),
            ..self
        }
    }
}

/// Returns the field of the vCPU's state at `offset`.
pub(crate) const fn gs(offset: usize) -> Mem {
    Mem {
        base: None,
        index: None,
        disp: offset as i32,
        gs: true,
    }
}

/// `[base + disp]`.
pub(crate) const fn at(base: Reg, disp: i32) -> Mem {
    Mem {
        base: Some(base),
        index: None,
        disp,
        gs: false,
    }
}

/// ALU operations with a register destination: opcode of `op r, r/m`.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(crate) enum Alu {
    Add = 0x03,
    Or = 0x0b,
    And = 0x23,
    Sub = 0x2b,
    Xor = 0x33,
    Cmp = 0x3b,
}

/// Condition codes.
pub(crate) mod cc {
    pub(crate) const O: u8 = 0;
    pub(crate) const B: u8 = 2;
    pub(crate) const AE: u8 = 3;
    pub(crate) const E: u8 = 4;
    pub(crate) const NE: u8 = 5;
    pub(crate) const BE: u8 = 6;
    pub(crate) const A: u8 = 7;
    pub(crate) const S: u8 = 8;
    pub(crate) const NS: u8 = 9;
    pub(crate) const P: u8 = 10;
    pub(crate) const L: u8 = 12;
    pub(crate) const LE: u8 = 14;
}

/// An instruction under construction: its bytes from the lowest on.
///
/// It grows in a register, because processors stall when what was written byte by byte is read as a whole.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Out {
    bytes: u64,
    bits: u32,
}

impl Out {
    /// Returns the number of bytes, at most eight.
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        (self.bits / 8) as usize
    }
    #[inline(always)]
    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }
    #[inline(always)]
    pub(crate) fn push(&mut self, byte: u8) {
        self.push_all(byte.into(), 1);
    }
    /// Appends the low `len` bytes, from the lowest on. The others must be zero.
    #[inline(always)]
    pub(crate) fn push_all(&mut self, bytes: u64, len: u32) {
        self.bytes |= bytes.wrapping_shl(self.bits);
        self.bits += 8 * len;
    }
    /// Appends the byte if `is` is true.
    #[inline(always)]
    pub(crate) fn push_if(&mut self, is: bool, byte: u8) {
        let is = u8::from(is);
        self.push_all((byte * is).into(), is.into());
    }
}

/// Bytes of a line of the host's caches.
pub const CACHE_LINE: usize = 64;

/// Maximum length of each part of a block.
pub const MAX_BLOCK: usize = 32 << 10;
/// Bytes of [`Asm`] that are used: both parts of the longest block.
const ROOM: usize = 2 * MAX_BLOCK;
/// Bytes that are written at once.
pub(crate) const WINDOW: usize = 64;

/// Code that is emitted often, with places to fill in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Template<const N: usize> {
    bytes: [u8; WINDOW],
    len: usize,
    /// The places, as offsets of words of four bytes.
    places: [usize; N],
}

impl<const N: usize> Template<N> {
    /// Makes a template of what `f` emits, which fits in a window. `f` returns the places.
    pub(crate) fn new(isa: Isa, f: impl FnOnce(&mut Asm) -> [usize; N]) -> Self {
        let mut a = Asm::new(isa);
        let places = f(&mut a);
        let len = a.len();
        assert!(len <= WINDOW, "a template of {len} bytes");
        a.start(0);
        Self {
            bytes: *a.window(),
            len,
            places,
        }
    }
}

/// Machine code under construction. Addresses are offsets in the code buffer.
///
/// Bytes are written in words of a fixed size, and the length then says how many of them count: there is always room
/// behind it.
pub struct Asm {
    /// Positions wrap at [`ROOM`]: longer code is refused by [`Self::parts`].
    buf: Box<[u8; ROOM + WINDOW]>,
    len: usize,
    /// Offset in the code buffer of the first byte of `buf`.
    base: usize,
    /// Number of bytes of the first part, and the offset in the code buffer of the second.
    apart: Option<(usize, usize)>,
    /// Places of displacements of operands of 64 bits in memory, and those operands.
    literals: Vec<(usize, u64)>,
    /// Number of bytes that are instructions, once the operands behind them are emitted.
    instructions: usize,
    isa: Isa,
}

impl core::fmt::Debug for Asm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Asm")
            .field("len", &self.len)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl Asm {
    /// Makes an empty one at offset 0, for a host with these extensions.
    pub(crate) fn new(isa: Isa) -> Self {
        Self {
            buf: Box::new([0; ROOM + WINDOW]),
            len: 0,
            base: 0,
            apart: None,
            literals: Vec::new(),
            instructions: 0,
            isa,
        }
    }
    #[inline(always)]
    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }
    /// Begins anew, for code at offset `base` of the buffer.
    pub fn start(&mut self, base: usize) {
        self.len = 0;
        self.base = base;
        self.apart = None;
        self.literals.clear();
        self.instructions = 0;
    }
    /// Begins the second part, at the offset `base` of the buffer.
    pub(crate) fn go_on_at(&mut self, base: usize) {
        self.apart = Some((self.len, base));
    }
    /// Returns the code before and after [`Self::go_on_at`]. `None` if it is too long.
    pub fn parts(&self) -> Option<(&[u8], &[u8])> {
        let all = self.buf.get(..self.len).filter(|b| b.len() <= ROOM)?;
        Some(all.split_at(self.apart.map_or(self.len, |(at, _)| at)))
    }
    /// Returns the number of bytes so far.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
    /// Drops all bytes but the first `len`, which include all of the first part.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = len;
        let here = self.here();
        self.literals.retain(|(site, _)| *site < here);
    }
    /// Returns the offset of the next byte.
    #[inline]
    pub(crate) fn here(&self) -> usize {
        match self.apart {
            Some((at, base)) => base + (self.len - at),
            None => self.base + self.len,
        }
    }
    /// Returns the place of the next bytes.
    #[inline(always)]
    pub(crate) fn window(&mut self) -> &mut [u8; WINDOW] {
        let at = self.len % ROOM;
        let Some(window) = self.buf[at..].first_chunk_mut() else {
            unreachable!("as long as a window");
        };
        window
    }
    /// Emits a template. Returns the offsets of its places.
    #[inline(always)]
    pub(crate) fn stamp<const N: usize>(&mut self, t: &Template<N>) -> [usize; N] {
        let here = self.here();
        *self.window() = t.bytes;
        self.advance(t.len);
        t.places.map(|at| here + at)
    }
    /// Counts the first `len` bytes of the window as emitted.
    #[inline(always)]
    pub(crate) fn advance(&mut self, len: usize) {
        self.len += len;
    }
    #[inline(always)]
    pub(crate) fn bytes<const N: usize>(&mut self, b: &[u8; N]) {
        const { assert!(N <= WINDOW) };
        self.window()[..N].copy_from_slice(b);
        self.advance(N);
    }
    /// Does what [`Self::bytes`] does for an instruction of any length.
    pub(crate) fn slice(&mut self, b: &[u8]) {
        if let Some(to) = self.window().get_mut(..b.len()) {
            to.copy_from_slice(b);
            self.advance(b.len());
        }
    }
    /// Emits the bytes from offset `from` to offset `to` of the first part once more.
    pub(crate) fn repeat(&mut self, from: usize, to: usize) {
        for at in from - self.base..to - self.base {
            self.byte(self.buf[at]);
        }
    }
    #[inline(always)]
    fn byte(&mut self, b: u8) {
        self.bytes(&[b]);
    }
    #[inline(always)]
    pub(crate) fn imm32(&mut self, v: i32) {
        self.bytes(&v.to_le_bytes());
    }

    /// `op reg, mem`; `wide` sets REX.W.
    #[inline(always)]
    pub(crate) fn rm<const N: usize>(&mut self, wide: bool, op: &[u8; N], reg: Reg, m: Mem) {
        self.memory_form(wide, opcode(op), N as u32, reg, m);
    }
    fn memory_form(&mut self, wide: bool, op: u64, len: u32, reg: Reg, m: Mem) {
        let mut out = Out::default();
        out.push_if(m.gs, 0x65);
        let b = m.base.unwrap_or(0);
        let x = m.index.map_or(0, |(i, _)| i);
        let rex = u8::from(wide) << 3 | (reg >> 3) << 2 | (x >> 3) << 1 | b >> 3;
        out.push_if(rex != 0, 0x40 | rex);
        out.push_all(op, len);
        let reg = (reg & 7) << 3;
        // Bytes of displacement.
        let mut disp = 4;
        let sib = |base: u8| {
            let (i, s) = m.index.map_or((4, 0), |(i, s)| (i & 7, s));
            s << 6 | i << 3 | base
        };
        match m.base {
            None => {
                out.push(reg | 4);
                out.push(sib(5));
            }
            Some(b) => {
                let mode;
                (mode, disp) = match m.disp {
                    0 if b & 7 != 5 => (0x00, 0),
                    -128..=127 => (0x40, 1),
                    _ => (0x80, 4),
                };
                if m.index.is_some() || b & 7 == 4 {
                    out.push(mode | reg | 4);
                    out.push(sib(b & 7));
                } else {
                    out.push(mode | reg | b & 7);
                }
            }
        }
        let at = out.len() % 16;
        let window = self.window();
        window[..8].copy_from_slice(&out.bytes().to_le_bytes());
        window[at..at + 4].copy_from_slice(&m.disp.to_le_bytes());
        self.advance(at + disp);
    }
    /// `op reg, reg`.
    #[inline(always)]
    pub(crate) fn rr<const N: usize>(&mut self, wide: bool, op: &[u8; N], reg: Reg, rm: Reg) {
        let rex = u8::from(wide) << 3 | (reg >> 3) << 2 | rm >> 3;
        let mut out = Out::default();
        out.push_if(rex != 0, 0x40 | rex);
        out.push_all(opcode(op), N as u32);
        out.push(0xc0 | (reg & 7) << 3 | rm & 7);
        self.window()[..8].copy_from_slice(&out.bytes().to_le_bytes());
        self.advance(out.len());
    }
    /// `mov reg, [mem]`, 64 bits.
    pub(crate) fn load(&mut self, reg: Reg, m: Mem) {
        self.rm(true, &[0x8b], reg, m);
    }
    /// `mov reg, [mem]`, 32 bits, zero-extended.
    pub(crate) fn load32(&mut self, reg: Reg, m: Mem) {
        self.rm(false, &[0x8b], reg, m);
    }
    /// `mov [mem], reg`, 64 bits.
    pub(crate) fn store(&mut self, m: Mem, reg: Reg) {
        self.rm(true, &[0x89], reg, m);
    }
    /// `mov [mem], reg`, 32 bits.
    pub(crate) fn store32(&mut self, m: Mem, reg: Reg) {
        self.rm(false, &[0x89], reg, m);
    }
    /// `mov [mem], reg`, 16 bits.
    pub(crate) fn store16(&mut self, m: Mem, reg: Reg) {
        self.byte(0x66);
        self.rm(false, &[0x89], reg, m);
    }
    /// `mov qword [mem], imm32`, sign-extended.
    pub(crate) fn store_imm(&mut self, m: Mem, v: i32) {
        self.rm(true, &[0xc7], 0, m);
        self.imm32(v);
    }
    /// `mov dword [mem], imm32`.
    pub(crate) fn store32_imm(&mut self, m: Mem, v: i32) {
        self.rm(false, &[0xc7], 0, m);
        self.imm32(v);
    }
    /// `cmp qword/dword [mem], imm32`; returns the offset of the immediate.
    pub(crate) fn cmp_mem_imm32(&mut self, wide: bool, m: Mem) -> usize {
        self.rm(wide, &[0x81], 7, m);
        self.imm32(0);
        self.here() - 4
    }
    /// `mov to, from`.
    pub(crate) fn mov(&mut self, to: Reg, from: Reg) {
        self.rr(true, &[0x8b], to, from);
    }
    /// `mov to32, from32`.
    pub(crate) fn mov32(&mut self, to: Reg, from: Reg) {
        self.rr(false, &[0x8b], to, from);
    }
    /// `mov reg, imm`, in the shortest form.
    pub fn mov_imm(&mut self, reg: Reg, v: u64) {
        if v <= 0xffff_ffff {
            if reg >= 8 {
                self.byte(0x41);
            }
            self.byte(0xb8 | reg & 7);
            self.imm32(v as i32);
        } else {
            self.bytes(&[0x48 | reg >> 3, 0xb8 | reg & 7]);
            self.bytes(&v.to_le_bytes());
        }
    }
    /// `mov reg, imm32`, sign-extended if `wide`.
    pub(crate) fn mov_signed(&mut self, wide: bool, reg: Reg, v: i32) {
        if wide && v < 0 {
            self.rr(true, &[0xc7], 0, reg);
            self.imm32(v);
        } else {
            self.mov_imm(reg, u64::from(v as u32));
        }
    }
    /// `push imm32`, sign-extended.
    pub(crate) fn push_imm(&mut self, v: i32) {
        self.byte(0x68);
        self.imm32(v);
    }
    /// `mov reg, imm64` with eight bytes of any value; returns their offset.
    pub(crate) fn mov_imm64(&mut self, reg: Reg, v: u64) -> usize {
        self.bytes(&[0x48 | reg >> 3, 0xb8 | reg & 7]);
        self.bytes(&v.to_le_bytes());
        self.here() - 8
    }
    pub(crate) fn lea(&mut self, reg: Reg, m: Mem) {
        self.rm(true, &[0x8d], reg, m);
    }
    pub(crate) fn alu(&mut self, wide: bool, op: Alu, reg: Reg, m: Mem) {
        self.rm(wide, &[op as u8], reg, m);
    }
    pub(crate) fn alu_rr(&mut self, wide: bool, op: Alu, reg: Reg, rm: Reg) {
        self.rr(wide, &[op as u8], reg, rm);
    }
    /// `op reg, imm32` (the /n group of 81).
    pub(crate) fn alu_imm(&mut self, wide: bool, op: Alu, reg: Reg, v: i32) {
        let n = op as u8 >> 3;
        if (-128..=127).contains(&v) {
            self.rr(wide, &[0x83], n, reg);
            self.byte(v as u8);
        } else {
            self.rr(wide, &[0x81], n, reg);
            self.imm32(v);
        }
    }
    /// `op qword/dword [mem], imm8`.
    pub(crate) fn alu_mem_imm8(&mut self, wide: bool, op: Alu, m: Mem, v: i8) {
        self.rm(wide, &[0x83], op as u8 >> 3, m);
        self.byte(v as u8);
    }
    /// `shr`/`shl`/`sar reg, n` (`n` of the C1 group).
    pub(crate) fn shift(&mut self, wide: bool, group: u8, reg: Reg, n: u8) {
        self.rr(wide, &[0xc1], group, reg);
        self.byte(n);
    }
    /// `imul to, from, by`.
    pub(crate) fn imul(&mut self, wide: bool, to: Reg, from: Reg, by: i32) {
        self.rr(wide, &[0x69], to, from);
        self.imm32(by);
    }
    /// `rorx to, from, n`, 64 bits; changes no flags.
    pub(crate) fn rorx(&mut self, to: Reg, from: Reg, n: u8) {
        let rxb = u8::from(to < 8) << 7 | 1 << 6 | u8::from(from < 8) << 5;
        let modrm = 0xc0 | (to & 7) << 3 | from & 7;
        self.bytes(&[0xc4, rxb | 3, 0xfb, 0xf0, modrm, n]);
    }
    /// `bextr to, from, control`, 64 bits.
    pub(crate) fn bextr(&mut self, to: Reg, from: Reg, control: Reg) {
        let rxb = u8::from(to < 8) << 7 | 1 << 6 | u8::from(from < 8) << 5;
        let modrm = 0xc0 | (to & 7) << 3 | from & 7;
        self.bytes(&[0xc4, rxb | 2, 0x80 | (!control & 15) << 3, 0xf7, modrm]);
    }
    /// Pads to the next cache line, as loops that begin there are faster.
    pub(crate) fn align(&mut self) {
        /// `nop [rax + rax + …]`, of up to nine bytes.
        const NOPS: [&[u8]; 9] = [
            &[0x90],
            &[0x66, 0x90],
            &[0x0f, 0x1f, 0],
            &[0x0f, 0x1f, 0x40, 0],
            &[0x0f, 0x1f, 0x44, 0, 0],
            &[0x66, 0x0f, 0x1f, 0x44, 0, 0],
            &[0x0f, 0x1f, 0x80, 0, 0, 0, 0],
            &[0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
            &[0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
        ];
        let mut left = self.here().wrapping_neg() % CACHE_LINE;
        while let Some(nop) = left.checked_sub(1).map(|n| NOPS[n.min(8)]) {
            self.slice(nop);
            left -= nop.len();
        }
    }
    /// `jcc` with a target to be filled in; returns the site for [`Self::patch`].
    pub(crate) fn jcc(&mut self, cc: u8) -> usize {
        self.bytes(&[0x0f, 0x80 | cc]);
        self.imm32(0);
        self.here() - 4
    }
    /// `lea reg, [rip + …]` of code, with a target to be filled in.
    pub(crate) fn lea_code(&mut self, reg: Reg) -> usize {
        self.bytes(&[0x48 | reg >> 3 << 2, 0x8d, 0x05 | (reg & 7) << 3]);
        self.imm32(0);
        self.here() - 4
    }
    /// `jmp` with a target to be filled in.
    pub(crate) fn jmp(&mut self) -> usize {
        self.byte(0xe9);
        self.imm32(0);
        self.here() - 4
    }
    /// `jmp` to an offset in the buffer.
    pub fn jmp_to(&mut self, target: usize) {
        let site = self.jmp();
        self.patch(site, target);
    }
    pub(crate) fn call_to(&mut self, target: usize) {
        let site = self.call();
        self.patch(site, target);
    }
    /// `call` with a target to be filled in.
    pub(crate) fn call(&mut self) -> usize {
        self.byte(0xe8);
        self.imm32(0);
        self.here() - 4
    }
    /// Makes the rel32 at `site` lead to `target`.
    #[inline]
    pub(crate) fn patch(&mut self, site: usize, target: usize) {
        self.patch32(site, (target as i64 - (site as i64 + 4)) as i32);
    }
    /// Replaces the word at `site`.
    #[inline]
    pub(crate) fn patch32(&mut self, site: usize, word: i32) {
        let i = match self.apart {
            Some((at, base)) if site >= base => at + (site - base),
            _ => site - self.base,
        };
        let i = i % ROOM;
        self.buf[i..i + 4].copy_from_slice(&word.to_le_bytes());
    }
    /// `jmp [mem]`.
    pub(crate) fn jmp_mem(&mut self, m: Mem) {
        self.rm(false, &[0xff], 4, m);
    }
    /// `call [mem]`.
    pub(crate) fn call_mem(&mut self, m: Mem) {
        self.rm(false, &[0xff], 2, m);
    }
    pub(crate) fn ret(&mut self) {
        self.byte(0xc3);
    }
}

/// `push r`
pub(crate) fn push(a: &mut Asm, r: Reg) {
    if r >= 8 {
        a.bytes(&[0x41]);
    }
    a.bytes(&[0x50 | r & 7]);
}

/// `pop r`
pub(crate) fn pop(a: &mut Asm, r: Reg) {
    if r >= 8 {
        a.bytes(&[0x41]);
    }
    a.bytes(&[0x58 | r & 7]);
}

/// Returns an opcode's bytes, as [`Out::push_all`] takes them.
#[inline(always)]
fn opcode<const N: usize>(op: &[u8; N]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(op);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests;
