//! The emitter of the code around guest instructions: a few encodings, by hand.
//!
//! Guest instructions themselves are re-encoded by the decoder's library; this
//! is for what is emitted many times per block, where speed of translation counts.

/// A host general register by number.
pub(crate) type Reg = u8;

pub(crate) const RAX: Reg = 0;
pub(crate) const RCX: Reg = 1;
pub(crate) const RDX: Reg = 2;
pub(crate) const RSP: Reg = 4;
pub(crate) const RBP: Reg = 5;
pub(crate) const RSI: Reg = 6;
pub(crate) const RDI: Reg = 7;

/// A memory operand of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mem {
    pub(crate) base: Option<Reg>,
    pub(crate) index: Option<(Reg, u8)>,
    pub(crate) disp: i32,
    /// Relative to GS: a field of the vCPU's state.
    pub(crate) gs: bool,
}

/// The field of the vCPU's state at `offset`.
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
    pub(crate) const B: u8 = 2;
    pub(crate) const AE: u8 = 3;
    pub(crate) const E: u8 = 4;
    pub(crate) const NE: u8 = 5;
    pub(crate) const BE: u8 = 6;
    pub(crate) const A: u8 = 7;
    pub(crate) const S: u8 = 8;
    pub(crate) const P: u8 = 10;
}

/// An instruction under construction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Out {
    pub(crate) bytes: u128,
    pub(crate) len: usize,
}

impl Out {
    #[inline]
    pub(crate) fn push(&mut self, byte: u8) {
        self.bytes |= u128::from(byte).wrapping_shl(8 * self.len as u32);
        self.len += 1;
    }
    #[inline]
    pub(crate) fn push32(&mut self, v: i32) {
        self.bytes |= u128::from(v as u32).wrapping_shl(8 * self.len as u32);
        self.len += 4;
    }
}

/// Machine code under construction; addresses are offsets in the code buffer.
#[derive(Debug, Default)]
pub(crate) struct Asm {
    pub(crate) buf: Vec<u8>,
    /// Offset of `buf`'s first byte.
    pub(crate) base: usize,
    /// How many bytes are there, and where the others are.
    apart: Option<(usize, usize)>,
}

impl Asm {
    pub(crate) fn start(&mut self, base: usize) {
        self.buf.clear();
        self.base = base;
        self.apart = None;
    }
    /// What follows goes to `base`, behind everything before.
    pub(crate) fn go_on_at(&mut self, base: usize) {
        self.apart = Some((self.buf.len(), base));
    }
    /// The code before and after [`Self::go_on_at`].
    pub(crate) fn parts(&self) -> (&[u8], &[u8]) {
        let at = self.apart.map_or(self.buf.len(), |(at, _)| at);
        self.buf.split_at(at)
    }
    /// Offset of the next byte.
    pub(crate) fn here(&self) -> usize {
        match self.apart {
            Some((at, base)) => base + (self.buf.len() - at),
            None => self.base + self.buf.len(),
        }
    }
    pub(crate) fn bytes(&mut self, b: &[u8]) {
        self.buf.extend_from_slice(b);
    }
    fn imm32(&mut self, v: i32) {
        self.bytes(&v.to_le_bytes());
    }
    /// The low `len` bytes: one copy of a known size, and a shorter length.
    #[inline]
    pub(crate) fn put(&mut self, bytes: u128, len: usize) {
        let end = self.buf.len() + len;
        self.buf.extend_from_slice(&bytes.to_le_bytes());
        self.buf.truncate(end);
    }

    /// `op reg, mem`; `wide` sets REX.W.
    pub(crate) fn rm(&mut self, wide: bool, op: &[u8], reg: Reg, m: Mem) {
        let mut out = Out::default();
        if m.gs {
            out.push(0x65);
        }
        let b = m.base.unwrap_or(0);
        let x = m.index.map_or(0, |(i, _)| i);
        let rex = u8::from(wide) << 3 | (reg >> 3) << 2 | (x >> 3) << 1 | b >> 3;
        if rex != 0 {
            out.push(0x40 | rex);
        }
        op.iter().for_each(|b| out.push(*b));
        let reg = (reg & 7) << 3;
        match (m.base, m.index) {
            (None, _) => {
                let (i, s) = m.index.map_or((4, 0), |(i, s)| (i & 7, s));
                out.push(reg | 4);
                out.push(s << 6 | i << 3 | 5);
                out.push32(m.disp);
            }
            (Some(b), index) => {
                let mode = match m.disp {
                    0 if b & 7 != 5 => 0x00,
                    -128..=127 => 0x40,
                    _ => 0x80,
                };
                if index.is_some() || b & 7 == 4 {
                    let (i, s) = index.map_or((4, 0), |(i, s)| (i & 7, s));
                    out.push(mode | reg | 4);
                    out.push(s << 6 | i << 3 | b & 7);
                } else {
                    out.push(mode | reg | b & 7);
                }
                match mode {
                    0x40 => out.push(m.disp as u8),
                    0x80 => out.push32(m.disp),
                    _ => {}
                }
            }
        }
        self.put(out.bytes, out.len);
    }
    /// `op reg, reg`.
    pub(crate) fn rr(&mut self, wide: bool, op: &[u8], reg: Reg, rm: Reg) {
        let rex = u8::from(wide) << 3 | (reg >> 3) << 2 | rm >> 3;
        if rex != 0 {
            self.buf.push(0x40 | rex);
        }
        self.bytes(op);
        self.buf.push(0xc0 | (reg & 7) << 3 | rm & 7);
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
    /// `mov qword [mem], imm32`, sign-extended.
    pub(crate) fn store_imm(&mut self, m: Mem, v: i32) {
        self.rm(true, &[0xc7], 0, m);
        self.imm32(v);
    }
    /// `mov byte [mem], imm8`.
    pub(crate) fn store8(&mut self, m: Mem, v: u8) {
        self.rm(false, &[0xc6], 0, m);
        self.buf.push(v);
    }
    /// `mov to, from`.
    pub(crate) fn mov(&mut self, to: Reg, from: Reg) {
        self.rr(true, &[0x8b], to, from);
    }
    /// `mov to32, from32`.
    pub(crate) fn mov32(&mut self, to: Reg, from: Reg) {
        self.rr(false, &[0x8b], to, from);
    }
    /// `mov reg, imm`, the shortest form.
    pub(crate) fn mov_imm(&mut self, reg: Reg, v: u64) {
        if v <= 0xffff_ffff {
            if reg >= 8 {
                self.buf.push(0x41);
            }
            self.buf.push(0xb8 | reg & 7);
            self.imm32(v as i32);
        } else {
            self.bytes(&[0x48 | reg >> 3, 0xb8 | reg & 7]);
            self.bytes(&v.to_le_bytes());
        }
    }
    /// `mov reg, imm64`, eight bytes whatever the value; returns where they are.
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
            self.buf.push(v as u8);
        } else {
            self.rr(wide, &[0x81], n, reg);
            self.imm32(v);
        }
    }
    /// `op qword/dword [mem], imm8`.
    pub(crate) fn alu_mem_imm8(&mut self, wide: bool, op: Alu, m: Mem, v: i8) {
        self.rm(wide, &[0x83], op as u8 >> 3, m);
        self.buf.push(v as u8);
    }
    /// `shr`/`shl`/`sar reg, n` (`n` of the C1 group).
    pub(crate) fn shift(&mut self, wide: bool, group: u8, reg: Reg, n: u8) {
        self.rr(wide, &[0xc1], group, reg);
        self.buf.push(n);
    }
    /// `rorx to, from, n`, 64 bits: flags stay.
    pub(crate) fn rorx(&mut self, to: Reg, from: Reg, n: u8) {
        let rxb = u8::from(to < 8) << 7 | 1 << 6 | u8::from(from < 8) << 5;
        let modrm = 0xc0 | (to & 7) << 3 | from & 7;
        self.bytes(&[0xc4, rxb | 3, 0xfb, 0xf0, modrm, n]);
    }
    /// `jcc` to be filled in; returns the position for [`Self::patch`].
    pub(crate) fn jcc(&mut self, cc: u8) -> usize {
        self.bytes(&[0x0f, 0x80 | cc]);
        self.imm32(0);
        self.here() - 4
    }
    /// `jmp` to be filled in.
    pub(crate) fn jmp(&mut self) -> usize {
        self.buf.push(0xe9);
        self.imm32(0);
        self.here() - 4
    }
    pub(crate) fn jmp_to(&mut self, target: usize) {
        let site = self.jmp();
        self.patch(site, target);
    }
    pub(crate) fn call_to(&mut self, target: usize) {
        let site = self.call();
        self.patch(site, target);
    }
    /// `call` to be filled in.
    pub(crate) fn call(&mut self) -> usize {
        self.buf.push(0xe8);
        self.imm32(0);
        self.here() - 4
    }
    /// Makes the rel32 at `site` lead to `target`.
    pub(crate) fn patch(&mut self, site: usize, target: usize) {
        let rel = (target as i64 - (site as i64 + 4)) as i32;
        let i = match self.apart {
            Some((at, base)) if site >= base => at + (site - base),
            _ => site - self.base,
        };
        self.buf[i..i + 4].copy_from_slice(&rel.to_le_bytes());
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
        self.buf.push(0xc3);
    }
}
