//! Instructions on several words of the stack: PUSHA and POPA by one probe, ENTER of an outermost procedure.

use super::{
    Emit, Translator, Unsupported,
    memory::{Finds, Probe},
};
use crate::{
    asm::*, frame::requests::site, frame::words::*, ir::decoded::Decoded, ir::lowering::Lowering,
    ir::mode::Mode,
};

/// Registers that PUSHA pushes.
const ALL: i32 = 8;

impl Translator {
    pub(super) fn frame(&mut self, d: &Decoded) -> Emit {
        match d.kind {
            Lowering::PushAll => self.push_all(d),
            Lowering::PopAll => self.pop_all(d),
            _ => self.enter(d)?,
        }
        Ok(())
    }

    fn push_all(&mut self, d: &Decoded) {
        let word = self.word();
        self.words_of_stack(d, -ALL * word, (ALL * word) as u32, true);
        // EDI is pushed last, and ESP as it is before.
        for (n, disp) in (0..8).rev().zip((0..).step_by(word as usize)) {
            if let Some(r) = host_reg(n) {
                self.store_word(at(S0, disp), r);
            }
        }
        self.move_stack(-ALL * word);
    }

    fn pop_all(&mut self, d: &Decoded) {
        let word = self.word();
        self.words_of_stack(d, 0, (ALL * word) as u32, false);
        for (n, disp) in (0..8).rev().zip((0..).step_by(word as usize)) {
            if let Some(r) = host_reg(n).filter(|r| *r != GUEST_RSP) {
                self.load_to_register(r, at(S0, disp));
            }
        }
        self.move_stack(ALL * word);
    }

    /// Translates ENTER without enclosing procedures. The new top of the stack has to be writable (SDM vol. 2).
    fn enter(&mut self, d: &Decoded) -> Emit {
        if d.i.immediate8_2nd() & 31 != 0 {
            return Err(Unsupported);
        }
        let word = self.word();
        let locals = i32::from(d.i.immediate16());
        if locals != 0 {
            self.words_of_stack(d, -word - locals, word as u32, true);
        }
        self.words_of_stack(d, -word, word as u32, true);
        self.store_word(at(S0, 0), RBP);
        self.move_stack(-word);
        if word == 2 {
            self.asm.bytes(&[0x66]);
        }
        self.asm.rr(self.input.long, &[0x8b], RBP, GUEST_RSP);
        self.move_stack(-locals);
        Ok(())
    }

    /// Makes r14 the host address of `size` bytes at the guest's stack pointer plus `disp`.
    pub(super) fn words_of_stack(&mut self, d: &Decoded, disp: i32, size: u32, write: bool) {
        self.spill_flags(d);
        if self.input.mode.has(Mode::STACK16) && size as i32 > self.word() {
            // SP wraps around between two words.
            self.state.cached = None;
            self.lea_word(S1, at(GUEST_RSP, disp));
            let a = &mut self.asm;
            a.rr(false, &[0x0f, 0xb7], S1, S1); // movzx
            a.alu_imm(false, Alu::Cmp, S1, 0x1_0000 - size as i32);
            self.bail_if(cc::A, d.offset);
        }
        self.stack_bytes(d.offset, (GUEST_RSP, disp), size);
        let site = site(d.offset, size, write);
        self.probe_for(site, size, Probe::Stack, Finds::Address);
    }
}
