//! Gathers and masked moves of AVX in 64-bit code.
//!
//! A gather's elements are loaded one by one. The guest's registers change only once all are there, so a fault, or a
//! device, leaves the whole instruction to the interpreter.
//!
//! A masked move is executed as it is where all its elements are in one page that may be accessed. Where no element is
//! selected, nothing is accessed. The interpreter executes others.

use iced_x86::{Mnemonic, Register};

use super::{
    Emit, Translator, Unsupported,
    copy::HOST,
    recode::{Rm, recode},
};
use crate::{asm::*, frame::words::*, ir::decoded::Decoded, ir::lowering::Form};

/// Where the three vectors are meanwhile.
const DATA: usize = GATHERED;
const MASK: usize = GATHERED + 32;
const INDEXES: usize = GATHERED + 64;

impl Translator {
    pub(super) fn gather(&mut self, d: &Decoded) -> Emit {
        let i = &d.i;
        let (data, mask, indexes) = (i.op0_register(), i.op2_register(), i.memory_index());
        let number = |r: Register| r.number() as u8;
        let is_same = |a: Register, b: Register| a.number() == b.number();
        // The interpreter raises #UD.
        let is_undefined = is_same(data, mask) || is_same(data, indexes) || is_same(mask, indexes);
        let base = i.memory_base();
        let is_wide = base.is_gpr64() || base == Register::None && i.memory_displ_size() == 8;
        let disp = i32::try_from(i.memory_displacement64() as i64).map_err(|_| Unsupported)?;
        if is_undefined || !is_wide {
            return Err(Unsupported);
        }
        let Shape {
            index,
            element,
            count,
        } = Shape::of(d)?;
        self.spill_flags(d);
        self.state.cached = None;
        let a = &mut self.asm;
        store_vector(a, DATA, number(data), data.size());
        store_vector(a, MASK, number(mask), mask.size());
        store_vector(a, INDEXES, number(indexes), indexes.size());
        let base = (base != Register::None).then(|| number(base));
        for n in 0..count {
            let a = &mut self.asm;
            let sign = gs(MASK + element * n + element - 4);
            a.alu_mem_imm8(false, Alu::Cmp, sign, 0);
            let is_left_out = a.jcc(cc::NS);
            match index {
                4 => a.rm(true, &[0x63], S0, gs(INDEXES + 4 * n)), // movsxd
                _ => a.load(S0, gs(INDEXES + 8 * n)),
            }
            let base = base.map(|n| {
                host_reg(n).unwrap_or_else(|| {
                    a.load(S1, gpr_slot(n));
                    S1
                })
            });
            let scale = i.memory_index_scale().trailing_zeros() as u8;
            a.lea(
                S0,
                Mem {
                    base,
                    index: Some((S0, scale)),
                    disp,
                    gs: false,
                },
            );
            self.add_flat_base(i);
            self.probe(d.offset, element as u32, false);
            let a = &mut self.asm;
            a.rm(element == 8, &[0x8b], S0, at(S0, 0)); // mov
            a.rm(element == 8, &[0x89], S0, gs(DATA + element * n)); // mov
            let here = a.here();
            a.patch(is_left_out, here);
        }
        let a = &mut self.asm;
        load_vector(a, number(data), DATA, element * count);
        clear_vector(a, number(mask));
        Ok(())
    }

    pub(super) fn masked_move(&mut self, d: &Decoded, form: &Form) -> Emit {
        let shape = form.shape.ok_or(Unsupported)?;
        let size = u32::from(form.size);
        self.spill_flags(d);
        // What is left out is not accessed: neither of a page that has nothing else, nor in a second page.
        test_signs(&mut self.asm, d);
        let nothing = self.asm.jcc(cc::E);
        self.address(d, 0, size)?;
        self.state.cached = None;
        let a = &mut self.asm;
        a.mov32(S1, S0);
        a.alu_imm(false, Alu::And, S1, 0xfff);
        a.alu_imm(false, Alu::Cmp, S1, 4096 - size as i32);
        self.bail_if(cc::A, d.offset);
        self.probe(d.offset, size, d.memory == Some(true));
        let made = recode((&d.raw, d.i.len()), shape, &HOST, Rm::Host(0), false);
        let len = made.ok_or(Unsupported)?.write(self.asm.window());
        let a = &mut self.asm;
        a.advance(len);
        let end = (d.memory != Some(true)).then(|| {
            let end = a.jmp();
            let here = a.here();
            a.patch(nothing, here);
            clear_vector(a, d.i.op0_register().number() as u8);
            end
        });
        let here = a.here();
        a.patch(end.unwrap_or(nothing), here);
        Ok(())
    }
}

/// Emits VPXOR of a vector with itself.
fn clear_vector(a: &mut Asm, n: u8) {
    let (r, b) = (0x80 & !(n << 4), 0x20 & !(n << 2));
    let names = 0xc0 | (n & 7) << 3 | n & 7;
    a.bytes(&[0xc4, r | 0x40 | b | 1, (!n & 15) << 3 | 1, 0xef, names]);
}

/// Emits VTESTPS or VTESTPD of the mask: ZF becomes 1 if it selects no element.
fn test_signs(a: &mut Asm, d: &Decoded) {
    let is_of_words = matches!(d.i.mnemonic(), Mnemonic::Vmaskmovps | Mnemonic::Vpmaskmovd);
    let (mask, wide) = (
        d.i.op1_register().number() as u8,
        d.i.op1_register().is_ymm(),
    );
    let high = if mask >= 8 { 0 } else { 0xa0 };
    let opcode = if is_of_words { 0x0e } else { 0x0f };
    let names = 0xc0 | (mask & 7) << 3 | mask & 7;
    a.bytes(&[0xc4, high | 0x42, 0x79 | u8::from(wide) << 2, opcode, names]);
}

/// What a gather loads.
struct Shape {
    /// Size of an index in bytes.
    index: usize,
    /// Size of an element in bytes.
    element: usize,
    /// Number of elements.
    count: usize,
}

impl Shape {
    fn of(d: &Decoded) -> Result<Self, Unsupported> {
        let (index, element) = match d.i.mnemonic() {
            Mnemonic::Vpgatherdd | Mnemonic::Vgatherdps => (4, 4),
            Mnemonic::Vpgatherdq | Mnemonic::Vgatherdpd => (4, 8),
            Mnemonic::Vpgatherqd | Mnemonic::Vgatherqps => (8, 4),
            Mnemonic::Vpgatherqq | Mnemonic::Vgatherqpd => (8, 8),
            _ => return Err(Unsupported),
        };
        let indexes = d.i.memory_index().size() / index;
        let elements = d.i.op0_register().size() / element;
        Ok(Self {
            index,
            element,
            count: indexes.min(elements),
        })
    }
}

/// Emits VMOVDQU of a vector of `size` bytes to the frame.
fn store_vector(a: &mut Asm, to: usize, n: u8, size: usize) {
    frame_access(a, size, 0x7f, n, to);
}

/// Emits VMOVDQU, or VMOVQ, from the frame; what is above `size` bytes becomes zero.
fn load_vector(a: &mut Asm, n: u8, from: usize, size: usize) {
    let opcode = if size == 8 { 0x7e } else { 0x6f };
    frame_access(a, size, opcode, n, from);
}

/// Emits an instruction with VEX.F3.0F on vector `n`, of 32 or fewer bytes, and a place in the frame.
fn frame_access(a: &mut Asm, size: usize, opcode: u8, n: u8, at: usize) {
    let r = if n >= 8 { 0 } else { 0x80 };
    let vex = r | 0x7a | u8::from(size == 32) << 2;
    a.bytes(&[0x65, 0xc5, vex, opcode, (n & 7) << 3 | 4, 0x25]);
    a.bytes(&(at as i32).to_le_bytes());
}
