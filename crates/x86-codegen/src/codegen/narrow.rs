//! Words of the mode's size, on the stack and in addresses; and VZEROUPPER and VZEROALL where there are eight vector
//! registers.

use iced_x86::Mnemonic;

use super::Translator;
use crate::{asm::*, frame::words::GUEST_RSP, ir::decoded::Decoded, ir::mode::Mode};

impl Translator {
    /// Returns the length of a word on the stack in bytes.
    pub(super) const fn word(&self) -> i32 {
        self.input.word
    }
    /// Loads a word, zero-extended.
    pub(super) fn load_word(&mut self, r: Reg, m: Mem) {
        match self.input.word {
            2 => self.asm.rm(false, &[0x0f, 0xb7], r, m), // movzx
            _ => self.asm.rm(self.input.long, &[0x8b], r, m),
        }
    }
    /// Moves a word between registers, zero-extended.
    pub(super) fn move_word(&mut self, r: Reg, from: Reg) {
        match self.input.word {
            2 => self.asm.rr(false, &[0x0f, 0xb7], r, from), // movzx
            _ => self.asm.rr(self.input.long, &[0x8b], r, from),
        }
    }
    /// Loads a word to a register of the guest's. A word of 16 bits leaves the other bits as they are.
    pub(super) fn load_to_register(&mut self, r: Reg, m: Mem) {
        self.operand_size();
        self.asm.rm(self.input.long, &[0x8b], r, m);
    }
    pub(super) fn store_word(&mut self, m: Mem, r: Reg) {
        self.operand_size();
        self.asm.rm(self.input.long, &[0x89], r, m);
    }
    /// Stores an immediate, which is sign-extended.
    pub(super) fn store_word_imm(&mut self, m: Mem, v: i32) {
        self.operand_size();
        self.asm.rm(self.input.long, &[0xc7], 0, m);
        match self.input.word {
            2 => self.asm.bytes(&(v as u16).to_le_bytes()),
            _ => self.asm.bytes(&v.to_le_bytes()),
        }
    }
    /// Emits the operand-size prefix for a word of 16 bits.
    fn operand_size(&mut self) {
        if self.input.word == 2 {
            self.asm.bytes(&[0x66]);
        }
    }
    /// Loads `r` with an address.
    pub(super) fn lea_word(&mut self, r: Reg, m: Mem) {
        self.asm.rm(self.input.long, &[0x8d], r, m);
    }
    /// Translates VZEROUPPER and VZEROALL by moves to XMM registers, which clear what is above.
    pub(super) fn zero_vectors(&mut self, d: &Decoded) {
        // VXORPS with itself clears a register, VMOVAPS to itself only what is above.
        let all = d.i.mnemonic() == Mnemonic::Vzeroall;
        for n in 0..8 {
            let (v, opcode) = if all { (!n & 15, 0x57) } else { (15, 0x28) };
            self.asm
                .bytes(&[0xc5, 0x80 | v << 3, opcode, 0xc0 | n << 3 | n]);
        }
    }
    /// Sets the guest's stack pointer to an address.
    pub(super) fn set_stack(&mut self, m: Mem) {
        if self.input.mode.has(Mode::STACK16) {
            // The bits above SP stay.
            self.asm.bytes(&[0x66]);
        }
        self.lea_word(GUEST_RSP, m);
    }
    /// Adds to the guest's stack pointer.
    pub(super) fn move_stack(&mut self, by: i32) {
        self.set_stack(at(GUEST_RSP, by));
    }
}
