//! DIV and IDIV.

use iced_x86::{OpKind, Register};

use super::{Emit, Flags, Stub, Translator};
use crate::{
    asm::*, codegen::flags::restore_flags, frame::words::*, ir::decoded::Decoded,
    ir::lowering::Lowering,
};

/// The prefix of instructions on 16 bits.
const WORD: u8 = 0x66;

impl Translator {
    /// Translates DIV and IDIV. The interpreter executes those that could raise #DE.
    pub(super) fn divide(&mut self, d: &Decoded) -> Emit {
        let signed = d.kind == Lowering::Idiv;
        let memory = d.i.op0_kind() == OpKind::Memory;
        let size = if memory {
            d.i.memory_size().size()
        } else {
            d.i.op0_register().size()
        };
        let wide = size == 8;
        self.spill_flags(d);
        self.divisor(d, size, signed)?;
        let a = &mut self.asm;
        let mut bails = [None; 2];
        if signed {
            // The host divides only where the dividend is its lower half sign-extended, and the divisor is neither 0 nor -1.
            match size {
                1 => {
                    a.rr(false, &[0x0f, 0xbe], S0, RAX); // movsx
                    a.bytes(&[WORD]);
                    a.alu_rr(false, Alu::Cmp, S0, RAX);
                }
                2 => {
                    a.rr(false, &[0x0f, 0xbf], S0, RAX); // movsx
                    a.shift(false, 7, S0, 15);
                    a.bytes(&[WORD]);
                    a.alu_rr(false, Alu::Cmp, S0, RDX);
                }
                _ => {
                    a.rr(wide, &[0x8b], S0, RAX);
                    a.shift(wide, 7, S0, if wide { 63 } else { 31 });
                    a.alu_rr(wide, Alu::Cmp, S0, RDX);
                }
            }
            bails[0] = Some(a.jcc(cc::NE));
            a.rm(wide, &[0x8d], S0, at(S1, 1));
            a.alu_imm(wide, Alu::Cmp, S0, 1);
            bails[1] = Some(a.jcc(cc::BE));
        } else {
            // The upper half of the dividend is less than the divisor.
            match size {
                1 => {
                    a.rr(false, &[0x0f, 0xb7], S0, RAX); // movzx
                    a.shift(false, 5, S0, 8);
                    a.alu_rr(false, Alu::Cmp, S0, S1);
                }
                2 => {
                    a.rr(false, &[0x0f, 0xb7], S0, RDX); // movzx
                    a.alu_rr(false, Alu::Cmp, S0, S1);
                }
                _ => a.alu_rr(wide, Alu::Cmp, RDX, S1),
            }
            bails[0] = Some(a.jcc(cc::AE));
        }
        if d.live_in != 0 {
            restore_flags(a, S0);
        }
        if size == 2 {
            a.bytes(&[WORD]);
        }
        let opcode = if size == 1 { 0xf6 } else { 0xf7 };
        a.rr(wide, &[opcode], if signed { 7 } else { 6 }, S1);
        self.state.flags = Flags::Register;
        for from in bails.into_iter().flatten() {
            self.stubs.push(Stub::Bail {
                from,
                offset: d.offset,
            });
        }
        Ok(())
    }

    /// Loads the divisor of `size` bytes into r13; a small one is extended to 32 bits.
    fn divisor(&mut self, d: &Decoded, size: usize, signed: bool) -> Emit {
        // MOVSX and MOVZX.
        let extended = match (size, signed) {
            (1, false) => Some([0x0f, 0xb6]),
            (1, true) => Some([0x0f, 0xbe]),
            (2, false) => Some([0x0f, 0xb7]),
            (2, true) => Some([0x0f, 0xbf]),
            _ => None,
        };
        let wide = size == 8;
        if d.i.op0_kind() == OpKind::Memory {
            self.read_operand(d, size as u32)?;
            match extended {
                Some(opcode) => self.asm.rm(false, &opcode, S1, at(S0, 0)),
                None => self.asm.rm(wide, &[0x8b], S1, at(S0, 0)),
            }
            return Ok(());
        }
        let register = d.i.op0_register();
        let mut r = self.read_register(register.full_register(), S1);
        let a = &mut self.asm;
        if matches!(
            register,
            Register::AH | Register::CH | Register::DH | Register::BH
        ) {
            a.mov32(S1, r);
            a.shift(false, 5, S1, 8);
            r = S1;
        }
        match extended {
            Some(opcode) => a.rr(false, &opcode, S1, r),
            None => a.rr(wide, &[0x8b], S1, r),
        }
        Ok(())
    }
}
