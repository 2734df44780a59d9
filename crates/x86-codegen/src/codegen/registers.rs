//! Moves between general registers or memory and registers of the system.

use iced_x86::{Code, Mnemonic, OpKind, Register};
use x86_defs::{control::cr4, xsave};

use super::{Emit, Translator, Unsupported, memory::Finds};
use crate::{
    asm::*,
    codegen::Stub,
    codegen::countdown::{self, exact},
    frame::state::{MXCSR_FREE, X87_MASKED},
    frame::words::*,
    ir::decoded::Decoded,
    ir::lowering::Lowering,
    ir::mode::Mode,
};

impl Translator {
    /// Returns the host register that has a 64-bit general register; one that lives in memory is loaded to `scratch`.
    pub(super) fn read_register(&mut self, r: Register, scratch: Reg) -> Reg {
        let n = r.full_register().number() as u8;
        host_reg(n).unwrap_or_else(|| {
            self.load_slot(scratch, n);
            scratch
        })
    }

    /// Loads a guest register that lives in memory to r13 or r14, if it is not there.
    pub(super) fn load_slot(&mut self, to: Reg, n: u8) {
        if to != S1 {
            self.asm.load(to, gpr_slot(n));
        } else if self.state.cached != Some(n) {
            self.asm.load(to, gpr_slot(n));
            self.state.cached = Some(n);
        }
    }

    /// Emits a check that loads FP state to the host's registers if it is not there.
    pub(super) fn need_fp(&mut self) {
        let a = &mut self.asm;
        a.alu_mem_imm8(false, Alu::Cmp, SHORT_FP_LIVE, 0);
        let from = a.jcc(cc::E);
        let resume = a.here();
        self.stubs.push(Stub::LoadFp { from, resume });
    }

    /// MOV from a segment register.
    pub(super) fn segment_to_general(&mut self, d: &Decoded) -> Emit {
        let segment = selector(d.i.op1_register().number());
        if d.i.op0_kind() == OpKind::Memory {
            self.operand(d, 2, true, false, Finds::Address)?;
            self.asm.rm(false, &[0x0f, 0xb7], S1, segment); // movzx
            self.asm.bytes(&[0x66]);
            self.asm.store32(at(S0, 0), S1);
            return Ok(());
        }
        let n = d.i.op0_register().full_register().number() as u8;
        let a = &mut self.asm;
        match (d.i.op0_register().size(), host_reg(n)) {
            (2, Some(r)) => {
                a.bytes(&[0x66]);
                a.rm(false, &[0x8b], r, segment);
            }
            (2, None) => {
                a.load32(S1, segment);
                a.bytes(&[0x66]);
                a.store32(gpr_slot(n), S1);
            }
            (_, Some(r)) => a.rm(false, &[0x0f, 0xb7], r, segment),
            (_, None) => {
                a.rm(false, &[0x0f, 0xb7], S0, segment);
                a.store(gpr_slot(n), S0);
            }
        }
        Ok(())
    }

    /// MOV from CR0, CR2, CR3 or CR4, at CPL 0.
    pub(super) fn control_to_general(&mut self, d: &Decoded) -> Emit {
        let from = gs(match d.i.op1_register() {
            Register::CR0 => CR0,
            Register::CR2 => CR2,
            Register::CR3 => CR3,
            Register::CR4 => CR4,
            _ => return Err(Unsupported),
        });
        let n = d.i.op0_register().number() as u8;
        let r = host_reg(n).unwrap_or(S0);
        self.load_word(r, from);
        if host_reg(n).is_none() {
            self.asm.store(gpr_slot(n), r);
        }
        Ok(())
    }

    /// Translates RDFSBASE, RDGSBASE, WRFSBASE and WRGSBASE of 64 bits.
    pub(super) fn segment_base_access(&mut self, d: &Decoded) -> Emit {
        let code = d.i.code();
        let base = segment_base(match code {
            Code::Rdfsbase_r64 | Code::Wrfsbase_r64 => 4,
            _ => 5,
        });
        self.spill_flags(d);
        // test dword [cr4], FSGSBASE
        self.asm.rm(false, &[0xf7], 0, gs(CR4));
        self.asm.bytes(&(cr4::FSGSBASE as u32).to_le_bytes());
        self.bail_if(cc::E, d.offset);
        let register = d.i.op0_register();
        let n = register.number() as u8;
        if matches!(code, Code::Rdfsbase_r64 | Code::Rdgsbase_r64) {
            let r = host_reg(n).unwrap_or(S0);
            self.asm.load(r, base);
            if host_reg(n).is_none() {
                self.asm.store(gpr_slot(n), r);
            }
        } else {
            let r = self.read_register(register, S0);
            let a = &mut self.asm;
            // A base that is not canonical raises #GP, which is the interpreter's.
            a.mov(S1, r);
            a.shift(true, 4, S1, 16);
            a.shift(true, 7, S1, 16);
            a.alu_rr(true, Alu::Cmp, S1, r);
            self.bail_if(cc::NE, d.offset);
            self.asm.store(base, r);
        }
        Ok(())
    }

    /// Translates LDMXCSR and FLDCW. Values that a block with FP instructions may not run with are the interpreter's:
    /// see `state::mode_of`.
    pub(super) fn load_fp_control(&mut self, d: &Decoded) -> Emit {
        let x87 = d.i.mnemonic() == Mnemonic::Fldcw;
        self.spill_flags(d);
        self.address(d, 0, if x87 { 2 } else { 4 })?;
        self.probe(d.offset, if x87 { 2 } else { 4 }, false);
        let a = &mut self.asm;
        // The value is read once, so that what is loaded is what was checked.
        if x87 {
            a.rm(false, &[0x0f, 0xb7], S0, at(S0, 0)); // movzx
        } else {
            a.load32(S0, at(S0, 0));
        }
        a.store32(gs(SPILL), S0);
        let (mask, plain) = if x87 {
            (X87_MASKED.into(), X87_MASKED.into())
        } else {
            (!MXCSR_FREE, xsave::MXCSR_DEFAULT)
        };
        a.alu_imm(false, Alu::And, S0, mask as i32);
        a.alu_imm(false, Alu::Cmp, S0, plain as i32);
        self.bail_if(cc::NE, d.offset);
        let a = &mut self.asm;
        if x87 {
            a.rm(false, &[0xd9], 5, gs(SPILL)); // fldcw
        } else {
            a.rm(false, &[0x0f, 0xae], 2, gs(SPILL)); // ldmxcsr
        }
        Ok(())
    }

    /// Translates XLAT.
    pub(super) fn translate_byte(&mut self, d: &Decoded) -> Emit {
        let (base, segment) = (d.i.memory_base(), d.i.memory_segment());
        let is_segmented = self.input.mode.has(Mode::SEGMENTED);
        if base.is_gpr16() && !is_segmented || !segment.is_segment_register() {
            return Err(Unsupported);
        }
        self.spill_flags(d);
        self.state.cached = None;
        let a = &mut self.asm;
        a.rr(false, &[0x0f, 0xb6], S1, RAX); // movzx
        a.rm(base.is_gpr64(), &[0x8d], S0, at(RBX, 0).plus(S1, 0)); // lea
        if base.is_gpr16() {
            a.rr(false, &[0x0f, 0xb7], S0, S0); // movzx
        }
        if is_segmented {
            self.add_base(d.offset, segment.number(), 1);
        } else {
            self.add_flat_base(&d.i);
        }
        self.probe(d.offset, 1, false);
        self.asm.rm(false, &[0x8a], RAX, at(S0, 0));
        Ok(())
    }

    /// Translates CLFLUSH, CLFLUSHOPT and CLWB.
    pub(super) fn flush_line(&mut self, d: &Decoded) -> Emit {
        self.spill_flags(d);
        self.read_operand(d, 1)
    }

    /// Translates RDPID and XGETBV.
    pub(super) fn processor_state(&mut self, d: &Decoded) {
        if d.kind == Lowering::ProcessorId {
            self.processor_id(d);
        } else {
            self.extended_control(d);
        }
    }

    fn processor_id(&mut self, d: &Decoded) {
        let n = d.i.op0_register().full_register().number() as u8;
        let r = host_reg(n).unwrap_or(S1);
        self.asm.load32(r, gs(TSC_AUX));
        if r == S1 {
            self.state.cached = None;
            self.asm.store(gpr_slot(n), S1);
        }
    }

    /// Translates XGETBV of XCR0.
    fn extended_control(&mut self, d: &Decoded) {
        self.spill_flags(d);
        self.asm.alu_imm(false, Alu::Cmp, RCX, 0);
        self.bail_if(cc::NE, d.offset);
        self.asm.load32(RAX, gs(XCR0));
        self.asm.load32(RDX, gs(XCR0 + 4));
    }

    /// Translates CLD and STD.
    pub(super) fn direction(&mut self, d: &Decoded) {
        self.spill_flags(d);
        let (op, byte) = if d.kind == Lowering::Std {
            (1, 0x04) // or
        } else {
            (4, 0xfb) // and
        };
        self.asm.rm(false, &[0x80], op, gs(RFLAGS + 1));
        self.asm.bytes(&[byte]);
    }

    /// Translates PAUSE. It shortens the countdown by more than one instruction, as a guest that pauses often may wait
    /// for another vCPU: the run loop decides who gets the core.
    pub(super) fn pause(&mut self) {
        let a = &mut self.asm;
        a.bytes(&[0xf3, 0x90]);
        a.load(S1, gs(PAUSES));
        a.lea(S1, at(S1, 1));
        a.store(gs(PAUSES), S1);
        match self.state.tally.layout() {
            Some(layout) => exact::charge(a, layout, countdown::PAUSE),
            None => countdown::charge(a, countdown::PAUSE),
        }
    }
}
