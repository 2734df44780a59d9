//! MOVS, STOS, LODS, SCAS and CMPS of one element in code with segments. The interpreter executes them
//! where DF is set.

use iced_x86::OpKind;
use x86_defs::reg;

use super::{Emit, Flags, Translator, Unsupported, string::test_direction};
use crate::{
    asm::*,
    frame::words::*,
    ir::decoded::Decoded,
    ir::string::{Op, operation},
};

impl Translator {
    pub(super) fn element(&mut self, d: &Decoded) -> Emit {
        let (op, size) = operation(&d.i).ok_or(Unsupported)?;
        let segment = d.i.memory_segment();
        let is_short = (0..d.i.op_count())
            .any(|n| matches!(d.i.op_kind(n), OpKind::MemorySegSI | OpKind::MemoryESDI));
        if size > 2 || op.uses_rsi() && !segment.is_segment_register() {
            return Err(Unsupported);
        }
        self.spill_flags(d);
        test_direction(&mut self.asm);
        self.bail_if(cc::NE, d.offset);
        let place = |r: Reg| {
            let n = if r == RDI { reg::ES } else { segment.number() };
            (r, n, is_short)
        };
        match op {
            Op::Lods => {
                self.find_element(d, place(RSI), size, false);
                self.sized(size, 0x8a, RAX);
            }
            Op::Stos => {
                self.find_element(d, place(RDI), size, true);
                self.sized(size, 0x88, RAX);
            }
            Op::Scas => {
                self.find_element(d, place(RDI), size, false);
                self.sized(size, 0x3a, RAX);
                self.state.flags = Flags::Register;
            }
            // The accesses have the interpreter's order.
            Op::Movs | Op::Cmps => {
                let [first, second] = if op == Op::Movs {
                    [RSI, RDI]
                } else {
                    [RDI, RSI]
                };
                self.find_element(d, place(first), size, false);
                self.sized(size, 0x8a, S1);
                self.asm.store(gs(SPILL), S1);
                self.find_element(d, place(second), size, op == Op::Movs);
                self.asm.load(S1, gs(SPILL));
                if op == Op::Movs {
                    self.sized(size, 0x88, S1);
                } else {
                    self.sized(size, 0x38, S1);
                    self.state.flags = Flags::Register;
                }
            }
        }
        for (r, uses) in [(RSI, op.uses_rsi()), (RDI, op.uses_rdi())] {
            if uses {
                if is_short {
                    self.asm.bytes(&[0x66]);
                }
                self.asm.rm(false, &[0x8d], r, at(r, 1 << size)); // lea
            }
        }
        Ok(())
    }

    /// Makes r14 the host address of the element at `r` in segment `n`.
    fn find_element(
        &mut self,
        d: &Decoded,
        (r, n, is_short): (Reg, usize, bool),
        size: usize,
        write: bool,
    ) {
        if is_short {
            self.asm.rr(false, &[0x0f, 0xb7], S0, r); // movzx
        } else {
            self.asm.mov32(S0, r);
        }
        self.add_base(d.offset, n, 1 << size);
        self.probe(d.offset, 1 << size, write);
        self.state.cached = None;
    }

    /// Emits an instruction on `r` and `[r14]`; `opcode` is that for bytes.
    fn sized(&mut self, size: usize, opcode: u8, r: Reg) {
        if size == 1 {
            self.asm.bytes(&[0x66]);
        }
        self.asm
            .rm(false, &[opcode | u8::from(size != 0)], r, at(S0, 0));
    }
}
