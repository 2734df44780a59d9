//! Words of the mode's size: on the stack, in addresses, and what 32-bit code has of vectors.

use iced_x86::Mnemonic;

use super::Translator;
use crate::{asm::*, frame::area::GUEST_RSP, ir::decoded::Decoded};

/// Words of the mode's size.
impl Translator {
    /// Bytes of a word on the stack.
    pub(super) const fn word(&self) -> i32 {
        if self.long { 8 } else { 4 }
    }
    pub(super) fn load_word(&mut self, r: Reg, m: Mem) {
        self.asm.rm(self.long, &[0x8b], r, m);
    }
    pub(super) fn store_word(&mut self, m: Mem, r: Reg) {
        self.asm.rm(self.long, &[0x89], r, m);
    }
    /// The immediate is sign-extended.
    pub(super) fn store_word_imm(&mut self, m: Mem, v: i32) {
        self.asm.rm(self.long, &[0xc7], 0, m);
        self.asm.bytes(&v.to_le_bytes());
    }
    /// An address.
    pub(super) fn lea_word(&mut self, r: Reg, m: Mem) {
        self.asm.rm(self.long, &[0x8d], r, m);
    }
    /// VZEROUPPER, VZEROALL: by moves to XMM registers, which clear what is above.
    pub(super) fn zero_vectors(&mut self, d: &Decoded) {
        // VXORPS with itself, or VMOVAPS.
        let all = d.i.mnemonic() == Mnemonic::Vzeroall;
        for n in 0..8 {
            let (v, opcode) = if all { (!n & 15, 0x57) } else { (15, 0x28) };
            self.asm
                .bytes(&[0xc5, 0x80 | v << 3, opcode, 0xc0 | n << 3 | n]);
        }
    }
    /// Moves the guest's stack pointer.
    pub(super) fn move_stack(&mut self, by: i32) {
        self.lea_word(GUEST_RSP, at(GUEST_RSP, by));
    }
}
