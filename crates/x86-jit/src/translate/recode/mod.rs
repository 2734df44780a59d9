//! Re-encoding from the guest's own bytes: other registers, another memory operand.
//!
//! The encoder of the decoder's library does all of this as well, at several times the cost;
//! it is left what this does not know.

use crate::{
    asm::{Out, Reg},
    kind::Shape,
};

/// The guest's general registers on the host, by number.
pub(crate) type Map = [Reg; 16];

/// The instruction with registers as `map` has them and `[r14 + memory]` for its memory
/// operand; `high`: it names AH, CH, DH or BH. `None`: not known how.
pub(crate) fn recode(
    raw: &[u8],
    shape: Shape,
    map: &Map,
    memory: Option<i32>,
    high: bool,
) -> Option<(u128, usize)> {
    let mut out = Out::default();
    let (mut lock, mut size, mut repeat) = (false, false, None);
    let mut rest = raw;
    loop {
        let (first, others) = rest.split_first()?;
        match first {
            0xf0 => lock = true,
            0x66 => size = true,
            0xf2 | 0xf3 if repeat.is_some_and(|r| r != *first) => return None,
            0xf2 | 0xf3 => repeat = Some(*first),
            // The operand, if there is one, is a host address.
            0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 | 0x67 => {}
            _ => break,
        }
        rest = others;
    }
    if lock {
        out.push(0xf0);
    }
    let (first, others) = rest.split_first()?;
    if matches!(first, 0xc4 | 0xc5) {
        if lock || size || repeat.is_some() {
            return None;
        }
        return vex(out, *first, others, shape, map, memory);
    }
    // What is not part of the opcode is a hint, or nothing.
    if repeat.is_some() && shape.prefix.is_some() && (size || repeat != shape.prefix) {
        return None;
    }
    if size {
        out.push(0x66);
    }
    if let Some(prefix) = shape.prefix {
        out.push(prefix);
    }
    let (rex, mut rest) = match first {
        0x40..=0x4f => (*first, others),
        _ => (0, rest),
    };
    // Legacy opcodes: one byte, 0F and one, 0F 38 or 0F 3A and one.
    let mut opcode = 0_u32;
    let mut length = 0;
    loop {
        let (byte, others) = rest.split_first()?;
        rest = others;
        opcode |= u32::from(*byte) << (8 * length);
        length += 1;
        let more = length == 1 && *byte == 0x0f
            || length == 2 && matches!(*byte, 0x38 | 0x3a) && opcode & 0xff == 0x0f;
        if !more {
            break;
        }
        if length == 3 {
            return None;
        }
    }
    let last = 8 * (length - 1);
    let low = (opcode >> last) as u8;
    // x87: what follows names registers of its own kind.
    let modrm = shape.modrm || length == 1 && (0xd8..=0xdf).contains(&low);
    // A prefix after REX, or an encoding of another kind.
    if length == 1 && is_prefix(low) {
        return None;
    }
    let mut new = rex & 0x48;
    if shape.opcode {
        let n = map[usize::from(low & 7 | (rex & 1) << 3)];
        if high && n != low & 7 {
            return None;
        }
        opcode = opcode & !(7 << last) | u32::from(n & 7) << last;
        new |= n >> 3;
    } else if !modrm {
        new |= rex & 7;
    }
    let mut operand = Operand::default();
    if modrm {
        let (byte, others) = rest.split_first()?;
        operand = Operand::new(
            *byte,
            others,
            rex << 1 & 8 | byte >> 3 & 7,
            rex << 3 & 8,
            shape,
            map,
            memory,
        )?;
        new |= operand.rex;
    }
    if high && (new != 0 || rex != 0 || operand.renamed) {
        return None;
    }
    if rex != 0 || new != 0 {
        out.push(0x40 | new);
    }
    (0..length).for_each(|n| out.push((opcode >> (8 * n)) as u8));
    if modrm {
        operand.emit(&mut out);
        rest = rest.get(operand.length..)?;
    }
    rest.iter().for_each(|b| out.push(*b));
    finish(out)
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

/// After C4 or C5.
fn vex(
    mut out: Out,
    first: u8,
    rest: &[u8],
    shape: Shape,
    map: &Map,
    memory: Option<i32>,
) -> Option<(u128, usize)> {
    let (rxb, wvlp, rest) = match (first, rest) {
        (0xc4, [a, b, rest @ ..]) => (*a, *b, rest),
        (_, [a, rest @ ..]) => (a & 0x80 | 0x61, a & 0x7f, rest),
        _ => return None,
    };
    let [opcode, byte, others @ ..] = rest else {
        // VZEROUPPER has no operands; the decoder has seen that nothing is missing.
        return None;
    };
    if !shape.modrm {
        return None;
    }
    let (reg, rm) = (!rxb >> 4 & 8 | byte >> 3 & 7, !rxb >> 2 & 8);
    let operand = Operand::new(*byte, others, reg, rm, shape, map, memory)?;
    // The register in VEX.vvvv is not looked at: callers leave general ones to the encoder.
    let rxb = rxb & 0x1f | (operand.rex << 5 & 0x80 | operand.rex << 5 & 0x20) ^ 0xa0 | 0x40;
    out.push(0xc4);
    out.push(rxb);
    out.push(wvlp);
    out.push(*opcode);
    operand.emit(&mut out);
    others
        .get(operand.length - 1..)?
        .iter()
        .for_each(|b| out.push(*b));
    finish(out)
}

/// A ModR/M byte and what belongs to it.
#[derive(Clone, Copy, Debug, Default)]
struct Operand {
    modrm: u8,
    disp: Option<i32>,
    /// REX.R and REX.B.
    rex: u8,
    /// How long the guest's was, ModR/M included.
    length: usize,
    /// A register has another number.
    renamed: bool,
}

impl Operand {
    fn new(
        byte: u8,
        after: &[u8],
        reg: u8,
        rm_high: u8,
        shape: Shape,
        map: &Map,
        memory: Option<i32>,
    ) -> Option<Self> {
        let new_reg = if shape.reg {
            map[usize::from(reg)]
        } else {
            reg
        };
        let mut operand = Self {
            modrm: (new_reg & 7) << 3,
            disp: None,
            rex: new_reg >> 1 & 4,
            length: 1,
            renamed: new_reg != reg,
        };
        let (mode, rm) = (byte >> 6, byte & 7);
        match memory {
            None if mode == 3 => {
                let rm = rm | rm_high;
                let new = if shape.rm { map[usize::from(rm)] } else { rm };
                operand.modrm |= 0xc0 | new & 7;
                operand.rex |= new >> 3;
                operand.renamed |= new != rm;
            }
            Some(disp) if mode != 3 => {
                let scaled = usize::from(rm == 4);
                let base = if scaled == 1 { *after.first()? & 7 } else { rm };
                operand.length += scaled
                    + match mode {
                        1 => 1,
                        2 => 4,
                        _ if base == 5 => 4,
                        _ => 0,
                    };
                // [r14 + disp]
                operand.modrm |= 6 | match disp {
                    0 => 0,
                    -128..=127 => 0x40,
                    _ => 0x80,
                };
                operand.rex |= 1;
                operand.disp = (disp != 0).then_some(disp);
            }
            _ => return None,
        }
        Some(operand)
    }

    fn emit(&self, out: &mut Out) {
        out.push(self.modrm);
        if let Some(disp) = self.disp {
            let n = if self.modrm >> 6 == 1 { 1 } else { 4 };
            disp.to_le_bytes().iter().take(n).for_each(|b| out.push(*b));
        }
    }
}

/// No instruction is longer than fifteen bytes.
fn finish(out: Out) -> Option<(u128, usize)> {
    (out.len <= 15).then_some((out.bytes, out.len))
}

#[cfg(test)]
mod tests;
