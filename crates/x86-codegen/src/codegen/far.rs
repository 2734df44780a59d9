//! JMP, CALL and RET to another code segment, in real mode and virtual-8086 mode.
//!
//! Rust loads CS, which makes the next block one of another key, and the branch leads there by the target table.

use iced_x86::Mnemonic;
use x86_defs::reg;

use super::{Emit, Translator, memory::Finds};
use crate::{asm::*, frame::requests, frame::words::*, ir::decoded::Decoded};

/// Where a CALL keeps the stack's place on the host, and what it pushes.
const PLACE: usize = BOUNCED;
const OLD_SELECTOR: usize = BOUNCED + 8;
const RETURN: usize = BOUNCED + 16;

impl Translator {
    pub(super) fn far_branch(&mut self, d: &Decoded) -> Emit {
        let word = self.word();
        self.state.cached = None;
        let moves = match d.i.mnemonic() {
            Mnemonic::Retf => {
                self.words_of_stack(d, 0, 2 * word as u32, false);
                self.load_far_pointer(d, at(S0, 0));
                let released = if d.i.op_count() == 0 {
                    0
                } else {
                    i32::from(d.i.immediate16())
                };
                2 * word + released
            }
            Mnemonic::Call => {
                self.far_target(d)?;
                self.asm.store(gs(SLOT), S0);
                self.words_of_stack(d, -2 * word, 2 * word as u32, true);
                // Nothing is pushed before Rust has said that there is such a target.
                let a = &mut self.asm;
                a.store(gs(PLACE), S0);
                a.rm(false, &[0x0f, 0xb7], S1, selector(reg::CS)); // movzx
                a.store(gs(OLD_SELECTOR), S1);
                a.load(S1, SHORT_PAGE);
                a.lea(S1, at(S1, d.end() as i32));
                a.store(gs(RETURN), S1);
                a.load(S0, gs(SLOT));
                -2 * word
            }
            _ => {
                self.far_target(d)?;
                0
            }
        };
        let a = &mut self.asm;
        a.mov_imm(S1, requests::segment(d.offset, requests::FAR).into());
        a.call_to(self.trampolines.switch);
        if moves < 0 {
            a.store(gs(SLOT), S0);
            a.load(S0, gs(PLACE));
            for (from, disp) in [(OLD_SELECTOR, word), (RETURN, 0)] {
                self.asm.load(S1, gs(from));
                self.store_word(at(S0, disp), S1);
            }
            self.asm.load(S0, gs(SLOT));
        }
        if moves != 0 {
            self.move_stack(moves);
        }
        self.asm.load(RSP, gs(STACK));
        self.jump(d.offset);
        Ok(())
    }

    /// Makes r14 what the request wants to know of the branch's operand.
    fn far_target(&mut self, d: &Decoded) -> Emit {
        let word = self.word();
        if d.memory.is_some() {
            let operand = self.operand(d, word as u32 + 2, false, false, Finds::Address)?;
            self.load_far_pointer(d, operand);
            return Ok(());
        }
        let target = match word {
            2 => d.i.far_branch16().into(),
            _ => d.i.far_branch32(),
        };
        self.asm.mov_imm(S0, target.into());
        self.compare_far_target(d);
        let selector = u64::from(d.i.far_branch_selector());
        self.asm.mov_imm(S0, u64::from(target) << 16 | selector);
        Ok(())
    }

    /// Makes r14 the same for the pointer at `m`.
    fn load_far_pointer(&mut self, d: &Decoded, m: Mem) {
        let behind = Mem {
            disp: m.disp + self.word(),
            ..m
        };
        self.asm.rm(false, &[0x0f, 0xb7], S1, behind); // movzx
        self.load_word(S0, m);
        self.compare_far_target(d);
        self.asm.shift(true, 4, S0, 16);
        self.asm.alu_rr(true, Alu::Or, S0, S1);
    }

    /// Leaves for the interpreter if the instruction pointer in r14 is beyond CS's limit.
    fn compare_far_target(&mut self, d: &Decoded) {
        self.asm.alu(false, Alu::Cmp, S0, bound(reg::CS, 1));
        self.bail_if(cc::A, d.offset);
    }
}
