//! Where arithmetic flags are: the guest's instructions leave them in RFLAGS, which
//! the translator's own code changes, and blocks are entered with them in [`FLAGS`].
//!
//! Flags are moved once in each direction: what the translator does in between to RFLAGS (a probe of the TLB, say)
//! costs nothing if they are in memory already, and they come back for an instruction that reads some of them or leaves
//! some as they are. CF alone, between additions with carry or over INC and DEC, is moved by an instruction of its own.

use iced_x86::{Instruction, Mnemonic, OpKind, RflagsBits};

use super::Translator;
use crate::{asm::*, frame::words::*, ir::decoded::Decoded, ir::lowering::Form};

/// The byte that LAHF makes; CF is its lowest bit.
const LAHF: Mem = Mem {
    disp: SHORT_FLAGS.disp + 1,
    ..SHORT_FLAGS
};

/// Where the live arithmetic flags are; the others are unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flags {
    /// RFLAGS.
    Register,
    /// RFLAGS, with what XOR or SUB of a register with itself leaves there.
    Zero,
    /// [`FLAGS`].
    Memory,
    Both,
}

impl Flags {
    /// Returns true if they are nowhere but in RFLAGS.
    pub(super) fn is_register(self) -> bool {
        matches!(self, Self::Register | Self::Zero)
    }
}

/// [`FLAGS`] after a result of zero: ZF, PF, and the bit that is always set.
const OF_ZERO: i32 = 0x4600;

/// Returns true for XOR or SUB of a register with itself.
fn makes_zero(i: &Instruction) -> bool {
    matches!(i.mnemonic(), Mnemonic::Xor | Mnemonic::Sub)
        && i.op0_kind() == OpKind::Register
        && i.op1_kind() == OpKind::Register
        && i.op0_register() == i.op1_register()
}

impl Translator {
    /// Moves live flags to memory before code of the translator's own that changes RFLAGS.
    pub(super) fn spill_flags(&mut self, d: &Decoded) {
        if d.live_in == RflagsBits::CF && self.state.flags.is_register() {
            // setc [LAHF]
            self.asm.rm(false, &[0x0f, 0x92], 0, LAHF);
        } else if d.live_in != 0 {
            self.flags_in_memory();
        }
        self.state.flags = Flags::Memory;
    }

    /// Moves flags to memory, if they are not there.
    pub(super) fn flags_in_memory(&mut self) {
        match self.state.flags {
            Flags::Register => {
                save_flags(&mut self.asm);
                self.state.cached = None;
            }
            Flags::Zero => self.asm.store32_imm(SHORT_FLAGS, OF_ZERO),
            Flags::Memory | Flags::Both => {}
        }
        self.state.flags = Flags::Memory;
    }

    /// Moves flags to RFLAGS, if they are not there; they stay in memory, too. Changes r13.
    pub(super) fn flags_in_register(&mut self) {
        if self.state.flags == Flags::Memory {
            restore_flags(&mut self.asm, S1);
            self.state.cached = None;
            self.state.flags = Flags::Both;
        }
    }

    /// Moves flags to RFLAGS before an instruction that is executed as it is and touches flags. Changes r13.
    pub(super) fn flags_before(&mut self, d: &Decoded, form: &Form) {
        if !form.touches_flags || d.live_in == 0 {
            return;
        }
        if d.live_in == RflagsBits::CF && self.state.flags == Flags::Memory {
            let a = &mut self.asm;
            a.rm(false, &[0x0f, 0xb6], S1, LAHF); // movzx
            a.rr(false, &[0x0f, 0xba], 4, S1); // bt
            a.bytes(&[0]);
            self.state.cached = None;
            self.state.flags = Flags::Both;
        } else {
            self.flags_in_register();
        }
    }

    /// Notes where flags are after an instruction that was executed as it is.
    pub(super) fn flags_after(&mut self, d: &Decoded, form: &Form) {
        if form.changes_flags {
            self.state.flags = if makes_zero(&d.i) {
                Flags::Zero
            } else {
                Flags::Register
            };
        }
    }

    /// Returns the condition to test on the host for one of the guest's.
    pub(super) fn condition(&mut self, condition: u8) -> u8 {
        if self.state.flags != Flags::Memory {
            return condition;
        }
        let (at, mask) = match condition & !1 {
            0 => (SHORT_FLAGS, 1),
            cc::B => (LAHF, 0x01),
            cc::E => (LAHF, 0x40),
            cc::BE => (LAHF, 0x41),
            cc::S => (LAHF, 0x80),
            cc::P => (LAHF, 0x04),
            // The other conditions compare SF with OF.
            _ => {
                self.flags_in_register();
                return condition;
            }
        };
        // test byte [at], mask
        self.asm.rm(false, &[0xf6], 0, at);
        self.asm.bytes(&[mask]);
        cc::NE ^ (condition & 1)
    }
}

/// `mov rax → r13; lahf; seto al; mov [FLAGS], eax; mov rax ← r13`.
pub(crate) fn save_flags(a: &mut Asm) {
    a.mov(S1, RAX);
    a.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
    a.store32(SHORT_FLAGS, RAX);
    a.mov(RAX, S1);
}

/// The reverse: adding 127 to a byte of 0 or 1 makes OF; SAHF does the rest.
pub(crate) fn restore_flags(a: &mut Asm, scratch: Reg) {
    a.mov(scratch, RAX);
    a.load32(RAX, SHORT_FLAGS);
    a.bytes(&[0x04, 127, 0x9e]);
    a.mov(RAX, scratch);
}
