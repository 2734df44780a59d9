//! FNINIT, FNSTENV and FLDENV: the x87 environment, whose last instruction and operand are in memory
//! ([`fp_state`](super::fp_state)), and the rest in the host's registers.

use iced_x86::Mnemonic;
use x86_defs::xsave;

use super::{Emit, Translator, memory::Finds};
use crate::{asm::*, frame::state::X87_MASKED, frame::words::*, ir::decoded::Decoded};

/// Size of the environment's image in bytes.
const ENVIRONMENT: u32 = 28;
/// Where the image is before it is stored, and before it is loaded.
const IMAGE: usize = GATHERED;
/// Bits of FSW that are not summaries of the exceptions.
const NO_SUMMARY: i32 = 0x7f7f;

/// Where an address of the last instruction is: the offset, and the selector or the upper half behind it.
const FIP: usize = FP_AREA + 8;
const FDP: usize = FP_AREA + 16;
const FOP: usize = FP_AREA + 6;

impl Translator {
    pub(super) fn x87_environment(&mut self, d: &Decoded) -> Emit {
        const { assert!(FP_AREA + xsave::MXCSR == FDP + 8) };
        match d.i.mnemonic() {
            Mnemonic::Fninit => {
                self.state.cached = None;
                let a = &mut self.asm;
                a.bytes(&[0xdb, 0xe3]);
                a.mov_imm(S1, 0);
                a.store16(gs(FOP), S1);
                a.store(gs(FIP), S1);
                a.store(gs(FDP), S1);
                Ok(())
            }
            Mnemonic::Fnstenv => self.store_environment(d),
            _ => self.load_environment(d),
        }
    }

    /// Translates FNSTENV of 28 bytes. All exceptions are masked already.
    fn store_environment(&mut self, d: &Decoded) -> Emit {
        let to = self.operand(d, ENVIRONMENT, true, false, Finds::Address)?;
        self.state.cached = None;
        let long = self.input.long;
        let a = &mut self.asm;
        // The host's addresses are never where the guest could see them.
        a.rm(false, &[0xd9], 6, gs(IMAGE)); // fnstenv
        a.rm(false, &[0x0f, 0xb7], S1, gs(FOP)); // movzx
        a.alu_imm(false, Alu::And, S1, 0x7ff);
        a.shift(false, 4, S1, 16);
        a.store32(gs(IMAGE + 16), S1);
        for (n, from) in [(12, FIP), (20, FDP)] {
            a.load32(S1, gs(from));
            a.store32(gs(IMAGE + n), S1);
        }
        a.mov_imm(S1, 0xffff_0000);
        a.store32(gs(IMAGE + 24), S1);
        if !long {
            for (n, from) in [(16, FIP), (24, FDP)] {
                a.rm(false, &[0x0f, 0xb7], S1, gs(from + 4)); // movzx
                a.store16(gs(IMAGE + n), S1);
            }
        }
        copy_environment(a, |n| gs(IMAGE + n), |n| moved(to, n));
        Ok(())
    }

    /// Translates FLDENV of 28 bytes, if it unmasks no exception.
    fn load_environment(&mut self, d: &Decoded) -> Emit {
        let from = self.operand(d, ENVIRONMENT, false, false, Finds::Address)?;
        self.state.cached = None;
        let long = self.input.long;
        let a = &mut self.asm;
        copy_environment(a, |n| moved(from, n), |n| gs(IMAGE + n));
        a.load32(S1, gs(IMAGE));
        a.alu_imm(false, Alu::And, S1, X87_MASKED.into());
        a.alu_imm(false, Alu::Cmp, S1, X87_MASKED.into());
        self.bail_if(cc::NE, d.offset);
        let a = &mut self.asm;
        a.rm(false, &[0x81], 4, gs(IMAGE + 4)); // and
        a.bytes(&NO_SUMMARY.to_le_bytes());
        a.rm(false, &[0xd9], 4, gs(IMAGE)); // fldenv
        a.load32(S1, gs(IMAGE + 16));
        a.shift(false, 5, S1, 16);
        a.alu_imm(false, Alu::And, S1, 0x7ff);
        a.store16(gs(FOP), S1);
        for (n, selector, to) in [(12, 16, FIP), (20, 24, FDP)] {
            // The upper half becomes 0.
            a.load32(S1, gs(IMAGE + n));
            a.store(gs(to), S1);
            if !long {
                a.rm(false, &[0x0f, 0xb7], S1, gs(IMAGE + selector)); // movzx
                a.store16(gs(to + 4), S1);
            }
        }
        Ok(())
    }
}

/// Copies an environment by r13. `from` and `to` return where its byte `n` is.
fn copy_environment(a: &mut Asm, from: impl Fn(usize) -> Mem, to: impl Fn(usize) -> Mem) {
    for n in [0, 8, 16] {
        a.load(S1, from(n));
        a.store(to(n), S1);
    }
    a.load32(S1, from(24));
    a.store32(to(24), S1);
}

/// Returns the operand `n` bytes behind `m`.
fn moved(m: Mem, n: usize) -> Mem {
    Mem {
        disp: m.disp + n as i32,
        ..m
    }
}
