//! DIV and IDIV.

use iced_x86::OpKind;

use super::{Emit, Flags, Stub, Translator};
use crate::{
    asm::*, codegen::flags::restore_flags, frame::words::*, ir::decoded::Decoded,
    ir::lowering::Lowering,
};

impl Translator {
    /// Translates DIV and IDIV of 32 and 64 bits. The interpreter executes those that could raise #DE.
    pub(super) fn divide(&mut self, d: &Decoded) -> Emit {
        let signed = d.kind == Lowering::Idiv;
        let memory = d.i.op0_kind() == OpKind::Memory;
        let wide = if memory {
            d.i.memory_size().size() == 8
        } else {
            d.i.op0_register().size() == 8
        };
        self.spill_flags(d);
        if memory {
            self.read_operand(d, if wide { 8 } else { 4 })?;
            self.asm.rm(wide, &[0x8b], S1, at(S0, 0));
        } else {
            let r = self.read_register(d.i.op0_register(), S1);
            self.asm.rr(wide, &[0x8b], S1, r);
        }
        let a = &mut self.asm;
        let mut bails = [None; 2];
        if signed {
            // The host divides only where RDX:RAX is RAX sign-extended and the divisor is neither 0 nor -1.
            a.rr(wide, &[0x8b], S0, RAX);
            a.shift(wide, 7, S0, if wide { 63 } else { 31 });
            a.alu_rr(wide, Alu::Cmp, S0, RDX);
            bails[0] = Some(a.jcc(cc::NE));
            a.rm(wide, &[0x8d], S0, at(S1, 1));
            a.alu_imm(wide, Alu::Cmp, S0, 1);
            bails[1] = Some(a.jcc(cc::BE));
        } else {
            a.alu_rr(wide, Alu::Cmp, RDX, S1);
            bails[0] = Some(a.jcc(cc::AE));
        }
        if d.live_in != 0 {
            restore_flags(a, S0);
        }
        a.rr(wide, &[0xf7], if signed { 7 } else { 6 }, S1);
        self.state.flags = Flags::Register;
        for from in bails.into_iter().flatten() {
            self.stubs.push(Stub::Bail {
                from,
                offset: d.offset,
            });
        }
        Ok(())
    }
}
