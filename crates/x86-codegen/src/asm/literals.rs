//! Operands of 64 bits in memory, behind the instructions.

use super::{Alu, Asm, Mem, Reg};

impl Asm {
    /// `op qword/dword [mem], imm`, the shorter form.
    pub(crate) fn alu_mem_imm(&mut self, wide: bool, op: Alu, m: Mem, v: i32) {
        match i8::try_from(v) {
            Ok(v) => self.alu_mem_imm8(wide, op, m, v),
            Err(_) => {
                self.rm(wide, &[0x81], op as u8 >> 3, m);
                self.imm32(v);
            }
        }
    }
    /// `op reg, value`, of 64 bits. The value is in memory (see [`Self::emit_literals`]).
    pub(crate) fn alu_literal(&mut self, op: Alu, reg: Reg, value: u64) {
        self.bytes(&[0x48 | (reg >> 3) << 2, op as u8, (reg & 7) << 3 | 5]);
        self.imm32(0);
        self.literals.push((self.here() - 4, value));
    }
    /// `test reg, value`, of 64 bits. The value is in memory.
    pub(crate) fn test_literal(&mut self, reg: Reg, value: u64) {
        self.bytes(&[0x48 | (reg >> 3) << 2, 0x85, (reg & 7) << 3 | 5]);
        self.imm32(0);
        self.literals.push((self.here() - 4, value));
    }
    /// `mov reg, value`, of 64 bits. The value is in memory.
    pub(crate) fn load_literal(&mut self, reg: Reg, value: u64) {
        self.bytes(&[0x48 | (reg >> 3) << 2, 0x8b, (reg & 7) << 3 | 5]);
        self.imm32(0);
        self.literals.push((self.here() - 4, value));
    }
    /// Emits the values in memory behind all instructions.
    pub(crate) fn emit_literals(&mut self) {
        self.instructions = self.len;
        let mut literals = core::mem::take(&mut self.literals);
        literals.sort_unstable_by_key(|(_, value)| *value);
        let mut last = None;
        for (site, value) in literals.drain(..) {
            if last != Some(value) {
                while last.is_none() && !self.here().is_multiple_of(8) {
                    self.byte(0xcc);
                }
                self.bytes(&value.to_le_bytes());
                last = Some(value);
            }
            let place = self.here() - 8;
            self.patch(site, place);
        }
        self.literals = literals;
    }
    /// Returns how many bytes of the last part are instructions.
    #[cfg(test)]
    pub(crate) fn instructions(&self) -> usize {
        let from = self.apart.map_or(0, |(at, _)| at);
        self.instructions.saturating_sub(from)
    }
}
