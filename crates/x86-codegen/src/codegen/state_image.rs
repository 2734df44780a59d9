//! The XSAVE family, FXSAVE and FXRSTOR, which a trampoline executes (`trampolines::state_images`).

use iced_x86::Mnemonic;

use super::{Emit, Translator};
use crate::{
    asm::*, frame::requests::image, frame::words::*, ir::decoded::Decoded, ir::lowering::Lowering,
};

/// Returns what image the instruction saves or loads.
fn image_of(d: &Decoded) -> u32 {
    match d.i.mnemonic() {
        Mnemonic::Fxsave64 | Mnemonic::Fxrstor64 => image::LEGACY | image::ALL,
        Mnemonic::Xsave64 => image::STANDARD | image::ALL,
        Mnemonic::Xsaveopt64 => image::STANDARD,
        Mnemonic::Xsavec64 => image::COMPACT,
        Mnemonic::Xrstor64 if d.kind == Lowering::RestoreStandard => image::STANDARD,
        Mnemonic::Xrstor64 => image::STANDARD | image::COMPACT,
        _ => image::COMPACT | image::SUPERVISOR,
    }
}

impl Translator {
    pub(super) fn save_state(&mut self, d: &Decoded) -> Emit {
        self.spill_flags(d);
        self.call_for_image(d, self.trampolines.save_image)
    }

    /// Translates a load of FP state. A block that uses FP then loads it to the host's registers, so this one ends.
    pub(super) fn restore_state(&mut self, d: &Decoded) -> Emit {
        self.flags_in_memory();
        self.call_for_image(d, self.trampolines.restore_image)?;
        self.go_on_behind(d);
        Ok(())
    }

    /// Calls a trampoline, and leaves to the interpreter what it does not do.
    fn call_for_image(&mut self, d: &Decoded, trampoline: usize) -> Emit {
        self.address(d, 0, 1)?;
        self.asm.mov_imm(S1, (image_of(d) | d.offset).into());
        self.asm.call_to(trampoline);
        self.asm.rr(true, &[0x85], S0, S0); // test
        self.bail_if(cc::E, d.offset);
        Ok(())
    }
}
