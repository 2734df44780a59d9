//! Instructions that the interpreter executes, and which of them use FP state.

use iced_x86::{CpuidFeature, EncodingKind, Instruction, Mnemonic};

use super::Translator;
use crate::{asm::*, frame::words::*, ir::decoded::Decoded};

impl Translator {
    /// Ends the block with an instruction that the interpreter has decoded.
    pub(super) fn leave_to_interpreter(&mut self, d: &Decoded) {
        self.flags_in_memory();
        self.asm
            .store_imm(gs(ARGUMENT), self.input.interpreted as i32);
        self.asm.mov_imm(S1, d.offset.into());
        let trampoline = if self.input.interpreted != 0 && is_integer(&d.i) {
            self.trampolines.bail_integer
        } else {
            self.trampolines.bail
        };
        self.asm.jmp_to(trampoline);
    }
}

/// Returns true if the instruction neither reads nor writes FP state, nor what is saved with it.
fn is_integer(i: &Instruction) -> bool {
    use CpuidFeature as F;
    i.code().encoding() == EncodingKind::Legacy
        && i.mnemonic() != Mnemonic::Wait
        && i.code().cpuid_features().iter().all(|f| {
            matches!(
                f,
                F::INTEL8086
                    | F::INTEL186
                    | F::INTEL286
                    | F::INTEL386
                    | F::INTEL486
                    | F::X64
                    | F::CMOV
                    | F::CPUID
                    | F::MSR
                    | F::TSC
                    | F::RDTSCP
                    | F::FSGSBASE
                    | F::INVPCID
                    | F::SMAP
                    | F::SYSCALL
                    | F::PAUSE
                    | F::MULTIBYTENOP
            )
        })
}
