//! LOOP, LOOPE, LOOPNE, JCXZ, JECXZ and JRCXZ. The counter is compared by the host's own JECXZ or JRCXZ, which leave flags as they are.

use iced_x86::{Code, Mnemonic};

use super::{Emit, Translator, Unsupported};
use crate::{asm::*, frame::words::*, ir::branch::target, ir::decoded::Decoded};

/// Lengths of `jmp rel32`, of `jmp rel8`, and of a move between two registers of 64 bits, in bytes.
const JMP: u8 = 5;
const SHORT: u8 = 2;
const MOV: u8 = 3;

impl Translator {
    pub(super) fn counted(&mut self, d: &Decoded) -> Emit {
        let t = target(&d.i);
        if !(0..0x1000).contains(&t) {
            // A target outside the page may be beyond CS's limit, and the counter may not change before that is known.
            return Err(Unsupported);
        }
        let zero = match d.i.mnemonic() {
            Mnemonic::Loope => Some(cc::E),
            Mnemonic::Loopne => Some(cc::NE),
            _ => None,
        };
        let counts = zero.is_some() || d.i.mnemonic() == Mnemonic::Loop;
        let is_short = matches!(
            d.i.code(),
            Code::Loop_rel8_16_CX
                | Code::Loop_rel8_32_CX
                | Code::Loope_rel8_16_CX
                | Code::Loope_rel8_32_CX
                | Code::Loopne_rel8_16_CX
                | Code::Loopne_rel8_32_CX
                | Code::Jcxz_rel8_16
                | Code::Jcxz_rel8_32
        );
        let is_wide = matches!(
            d.i.code(),
            Code::Loop_rel8_64_RCX
                | Code::Loope_rel8_64_RCX
                | Code::Loopne_rel8_64_RCX
                | Code::Jrcxz_rel8_64
        );
        let zero = zero.map(|condition| self.condition(condition));
        let a = &mut self.asm;
        if counts {
            if is_short {
                a.bytes(&[0x66]);
            }
            a.rm(is_wide, &[0x8d], RCX, at(RCX, -1)); // lea
        }
        let ends = zero.map(|condition| a.jcc(condition ^ 1));
        // How far JECXZ jumps if what is left of the counter is zero.
        let onward = match (counts, is_short) {
            (true, false) => JMP,
            (true, true) => MOV + JMP,
            (false, false) => SHORT,
            (false, true) => MOV + SHORT,
        };
        if is_short {
            self.state.cached = None;
            a.mov(S1, RCX);
            a.rr(false, &[0x0f, 0xb7], RCX, RCX); // movzx
        } else if !is_wide {
            a.bytes(&[0x67]);
        }
        a.bytes(&[0xe3, onward]);
        if is_short {
            a.mov(RCX, S1);
        }
        let from = if counts {
            let from = a.jmp();
            if is_short {
                a.mov(RCX, S1);
            }
            from
        } else {
            let over = if is_short { MOV + JMP } else { JMP };
            a.bytes(&[0xeb, over]);
            if is_short {
                a.mov(RCX, S1);
            }
            a.jmp()
        };
        if let Some(ends) = ends {
            let here = a.here();
            a.patch(ends, here);
        }
        let live = self.state.flags.is_register();
        self.state
            .tally
            .mark_taken(self.stubs.len(), d, self.state.position);
        self.link(from, t as u32, live, false).comes_from(d.offset);
        Ok(())
    }
}
