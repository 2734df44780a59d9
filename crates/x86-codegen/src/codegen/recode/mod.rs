//! Re-encoding from the guest's own bytes, with other registers and another memory operand.
//!
//! The encoder of the decoder's library does all of this as well, at several times the cost; it is left those
//! instructions that this does not know.

use crate::{
    asm::{Mem, Out, Reg, WINDOW},
    frame::words::TLB,
    ir::lowering::Shape,
};

/// The host register of each of the guest's general registers, by number.
pub(crate) type Map = [Reg; 16];

/// What the operand of ModRM.rm becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rm {
    /// The host's register in place of the guest's.
    Register,
    /// `[r14 + disp]` in place of memory.
    Host(i32),
    /// This operand, which has a base, in place of memory.
    At(Mem),
    /// `[r11 + disp]` in place of a register.
    Slot(i8),
}

/// An instruction made by [`recode`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recoded {
    /// The bytes up to ModR/M and SIB.
    head: Out,
    disp: i32,
    /// Length of the displacement in bytes.
    disp_len: usize,
    /// Immediate operands.
    tail: u64,
    tail_len: usize,
}

impl Recoded {
    /// Writes the instruction; returns its length.
    #[inline(always)]
    pub(crate) fn write(&self, to: &mut [u8; WINDOW]) -> usize {
        let at = self.head.len() % 16;
        to[..8].copy_from_slice(&self.head.bytes().to_le_bytes());
        to[at..at + 4].copy_from_slice(&self.disp.to_le_bytes());
        let at = (at + self.disp_len) % 24;
        to[at..at + 8].copy_from_slice(&self.tail.to_le_bytes());
        at + self.tail_len
    }
}

/// The guest's bytes, taken one by one; zeros follow them.
#[derive(Clone, Copy, Debug)]
struct Raw {
    rest: u128,
    used: usize,
}

impl Raw {
    #[inline(always)]
    fn peek(&self) -> u8 {
        self.rest as u8
    }
    #[inline(always)]
    fn next(&mut self) -> u8 {
        let byte = self.rest as u8;
        self.skip(1);
        byte
    }
    #[inline(always)]
    fn skip(&mut self, n: usize) {
        self.rest = self.rest.wrapping_shr(8 * n as u32);
        self.used += n;
    }
    /// Takes what is left of an instruction of `len` bytes as the tail. `None`: the instruction is shorter than what
    /// was taken, or becomes too long.
    #[inline(always)]
    fn finish(self, len: usize, head: Out, (disp, disp_len): (i32, usize)) -> Option<Recoded> {
        let tail_len = len.checked_sub(self.used)?;
        let tail = self.rest as u64;
        // No instruction is longer than fifteen bytes.
        (head.len() + disp_len + tail_len <= 15 && tail_len <= 8).then_some(Recoded {
            head,
            disp,
            disp_len,
            tail,
            tail_len,
        })
    }
}

/// Re-encodes an instruction of `len` bytes, with registers as `map` has them, and `rm`. `high`: the instruction names
/// AH, CH, DH or BH. `None`: this is not an instruction that is known here.
pub(crate) fn recode(
    (bytes, len): (&[u8; 16], usize),
    shape: Shape,
    map: &Map,
    rm: Rm,
    high: bool,
) -> Option<Recoded> {
    let mut out = Out::default();
    let (mut lock, mut size, mut repeat) = (false, false, 0);
    let mut raw = Raw {
        rest: u128::from_le_bytes(*bytes),
        used: 0,
    };
    loop {
        match raw.peek() {
            0xf0 => lock = true,
            0x66 => size = true,
            b @ (0xf2 | 0xf3) if repeat != 0 && repeat != b => return None,
            b @ (0xf2 | 0xf3) => repeat = b,
            // Segments and address sizes are dropped: the operand, if there is one, is a host address.
            0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x67 => {}
            _ => break,
        }
        raw.skip(1);
        if raw.used == 15 {
            return None;
        }
    }
    out.push_if(lock, 0xf0);
    if matches!(raw.peek(), 0xc4 | 0xc5) {
        if lock || size || repeat != 0 {
            return None;
        }
        return vex(raw, len, shape, map, rm);
    }
    // A repeat prefix that is not part of the opcode is a hint, or has no effect.
    if repeat != 0 && shape.prefix.is_some_and(|p| size || repeat != p) {
        return None;
    }
    out.push_if(size, 0x66);
    if let Some(prefix) = shape.prefix {
        out.push(prefix);
    }
    let mut rex = 0;
    if raw.peek() & 0xf0 == 0x40 {
        rex = raw.next();
    }
    // Legacy opcodes: one byte, 0F and one, 0F 38 or 0F 3A and one.
    let mut low = raw.next();
    // A prefix after REX, or an encoding of another kind.
    if is_prefix(low) {
        return None;
    }
    // In x87 instructions, the byte after the opcode names registers of the x87.
    let mut modrm = shape.modrm || (0xd8..=0xdf).contains(&low);
    let (mut opcode, mut length) = (0, 1);
    if low == 0x0f {
        (opcode, length) = (0x0f, 2);
        modrm = shape.modrm;
        low = raw.next();
        if matches!(low, 0x38 | 0x3a) {
            opcode |= u64::from(low) << 8;
            length = 3;
            low = raw.next();
        }
    }
    let mut new = rex & 0x48;
    if shape.opcode {
        let n = map[usize::from(low & 7 | (rex & 1) << 3)];
        if high && n != low & 7 {
            return None;
        }
        low = low & !7 | n & 7;
        new |= n >> 3;
    } else if !modrm {
        new |= rex & 7;
    }
    opcode |= u64::from(low) << (8 * (length - 1));
    let mut operand = Operand::default();
    if modrm {
        let byte = raw.peek();
        let (reg, rm_high) = (rex << 1 & 8 | byte >> 3 & 7, rex << 3 & 8);
        operand = Operand::new(&mut raw, reg, rm_high, shape, map, rm)?;
        new |= operand.rex;
    }
    if high && (new != 0 || rex != 0 || operand.renamed) {
        return None;
    }
    out.push_if(rex != 0 || new != 0, 0x40 | new);
    out.push_all(opcode, length);
    if modrm {
        out.push(operand.modrm);
        out.push_if(operand.has_sib, operand.sib);
    }
    raw.finish(len, out, operand.disp)
}

const fn is_prefix(byte: u8) -> bool {
    matches!(
        byte,
        0x26 | 0x2e
            | 0x36
            | 0x3e
            | 0x40..=0x4f
            | 0x62
            | 0x64..=0x67
            | 0x8f
            | 0xc4
            | 0xc5
            | 0xf0
            | 0xf2
            | 0xf3
    )
}

/// Re-encodes an instruction with a VEX prefix, from C4 or C5 on.
fn vex(mut raw: Raw, len: usize, shape: Shape, map: &Map, rm: Rm) -> Option<Recoded> {
    let first = raw.next();
    let second = raw.next();
    let (rxb, wvlp) = if first == 0xc4 {
        (second, raw.next())
    } else {
        (second & 0x80 | 0x61, second & 0x7f)
    };
    let opcode = raw.next();
    // VZEROUPPER has no operands.
    if !shape.modrm {
        return None;
    }
    let (reg, rm_high) = (!rxb >> 4 & 8 | raw.peek() >> 3 & 7, !rxb >> 2 & 8);
    let operand = Operand::new(&mut raw, reg, rm_high, shape, map, rm)?;
    // The register in VEX.vvvv stays: callers leave instructions with a general register there to the encoder.
    let rxb = rxb & 0x1f | (operand.rex << 5 & 0xe0) ^ 0xe0;
    let mut out = Out::default();
    let bytes = [0xc4, rxb, wvlp, opcode, operand.modrm];
    bytes.into_iter().for_each(|b| out.push(b));
    out.push_if(operand.has_sib, operand.sib);
    raw.finish(len, out, operand.disp)
}

/// A ModR/M byte and what belongs to it.
#[derive(Clone, Copy, Debug, Default)]
struct Operand {
    modrm: u8,
    /// The SIB byte, if there is one.
    sib: u8,
    has_sib: bool,
    /// Displacement, and its length in bytes.
    disp: (i32, usize),
    /// REX.R, REX.X and REX.B.
    rex: u8,
    /// A register has another number on the host.
    renamed: bool,
}

impl Operand {
    /// Takes the guest's operand, from ModR/M on, and makes the host's.
    #[inline(always)]
    fn new(raw: &mut Raw, reg: u8, rm_high: u8, shape: Shape, map: &Map, to: Rm) -> Option<Self> {
        let byte = raw.next();
        let new_reg = if shape.reg {
            map[usize::from(reg & 15)]
        } else {
            reg
        };
        let mut operand = Self {
            modrm: (new_reg & 7) << 3,
            sib: 0,
            has_sib: false,
            disp: (0, 0),
            rex: new_reg >> 1 & 4,
            renamed: new_reg != reg,
        };
        let (mode, rm) = (byte >> 6, byte & 7);
        match to {
            Rm::Register if mode == 3 => {
                let rm = rm | rm_high;
                let new = if shape.rm {
                    map[usize::from(rm & 15)]
                } else {
                    rm
                };
                operand.modrm |= 0xc0 | new & 7;
                operand.rex |= new >> 3;
                operand.renamed |= new != rm;
            }
            Rm::Slot(disp) if mode == 3 => {
                operand.modrm |= 0x40 | TLB & 7;
                operand.rex |= TLB >> 3;
                operand.disp = (disp.into(), 1);
            }
            Rm::Host(disp) if mode != 3 => {
                skip_memory(raw, mode, rm);
                // [r14 + disp]
                let (mode, length) = displacement(disp, 6);
                operand.modrm |= 6 | mode;
                operand.rex |= 1;
                operand.disp = (disp, length);
            }
            Rm::At(m) if mode != 3 => {
                skip_memory(raw, mode, rm);
                let base = m.base?;
                // As an index, RSP means none.
                let (index, scale) = m.index.unwrap_or((4, 0));
                let (mode, length) = displacement(m.disp, base);
                operand.modrm |= 4 | mode;
                operand.has_sib = true;
                operand.sib = scale << 6 | (index & 7) << 3 | base & 7;
                operand.rex |= index >> 2 & 2 | base >> 3;
                operand.disp = (m.disp, length);
            }
            _ => return None,
        }
        Some(operand)
    }
}

/// Skips what belongs to the guest's memory operand behind ModR/M.
#[inline(always)]
fn skip_memory(raw: &mut Raw, mode: u8, rm: u8) {
    let mut base = rm;
    if rm == 4 {
        base = raw.next() & 7;
    }
    raw.skip(match mode {
        1 => 1,
        2 => 4,
        _ if base == 5 => 4,
        _ => 0,
    });
}

/// Returns the mode of ModR/M for a displacement from a base register, and the displacement's length.
#[inline(always)]
const fn displacement(disp: i32, base: Reg) -> (u8, usize) {
    match disp {
        0 if base & 7 != 5 => (0, 0),
        -128..=127 => (0x40, 1),
        _ => (0x80, 4),
    }
}

#[cfg(test)]
mod tests;
