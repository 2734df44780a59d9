//! Addresses in segments: compared with the limit, then the base is added. What may be beyond the limit is the interpreter's.

use iced_x86::Instruction;
use x86_defs::reg;

use super::{Emit, Translator, Unsupported, has_short_address};
use crate::{asm::*, frame::area::*, ir::decoded::Decoded, ir::mode::Mode};

impl Translator {
    /// The linear address of the memory operand's `size` bytes, in r14. Changes flags.
    pub(super) fn address_in_segment(&mut self, d: &Decoded, size: u32) -> Emit {
        let segment = d.i.memory_segment();
        if !segment.is_segment_register() {
            return Err(Unsupported);
        }
        self.offset_in_segment(&d.i)?;
        self.add_base(d.offset, segment.number(), size);
        Ok(())
    }

    /// The offset that is the memory operand's, in r14.
    fn offset_in_segment(&mut self, i: &Instruction) -> Emit {
        let (m, _) = self.effective(i, 0, true)?;
        self.asm.rm(false, &[0x8d], S0, m); // lea
        if has_short_address(i) {
            self.asm.rr(false, &[0x0f, 0xb7], S0, S0); // movzx
        }
        Ok(())
    }

    /// From the offset of `size` bytes in segment `n`, in r14, to their linear address.
    fn add_base(&mut self, offset: u32, n: usize, size: u32) {
        self.asm.alu(false, Alu::Cmp, S0, bound(n, size));
        self.bail_if(cc::A, offset);
        self.asm.alu(false, Alu::Add, S0, segment_base(n));
    }

    /// The address of the word of the stack at `r + disp`, in r14; with segments, this changes flags.
    pub(super) fn stack_address(&mut self, offset: u32, r: Reg, disp: i32) {
        self.lea_word(S0, at(r, disp));
        if !self.mode.has(Mode::SEGMENTED) {
            return;
        }
        if self.mode.has(Mode::STACK16) {
            self.asm.rr(false, &[0x0f, 0xb7], S0, S0); // movzx
        }
        self.add_base(offset, reg::SS, self.word() as u32);
    }

    /// LEA, which knows no segments.
    pub(super) fn lea_in_segment(&mut self, d: &Decoded) -> Emit {
        let to = d.i.op0_register();
        self.offset_in_segment(&d.i)?;
        let r = host_reg(to.full_register().number() as u8).ok_or(Unsupported)?;
        if to.size() == 2 {
            self.asm.bytes(&[0x66]);
        }
        self.asm.rr(false, &[0x8b], r, S0);
        Ok(())
    }
}
