//! LOOP, LOOPE, LOOPNE, JCXZ, JECXZ and JRCXZ. The counter is compared by the host's own JECXZ or JRCXZ, which leave flags
//! as they are.

use super::{Emit, Translator, Unsupported, branch::condition_bits};
use crate::{asm::*, frame::words::*, ir::branch::target, ir::decoded::Decoded};

/// Lengths of `jmp rel32`, of `jmp rel8`, and of a move between two registers of 64 bits, in bytes.
const JMP: u8 = 5;
const SHORT: u8 = 2;
const MOV: u8 = 3;

impl Translator {
    pub(super) fn counted(&mut self, d: &Decoded) -> Emit {
        let t = target(&d.i);
        if !self.input.mode.is_near(d.offset, t) {
            // A target outside the page may be beyond CS's limit, and the counter may not change before that is known.
            return Err(Unsupported);
        }
        let code = d.i.code();
        let counts = !code.is_jcx_short();
        let size = code.op_code().address_size();
        let (is_short, is_wide) = (size == 16, size == 64);
        // LOOPE and LOOPNE have a condition besides the counter.
        let condition = condition_bits(code.condition_code()).map(|c| self.condition(c));
        let a = &mut self.asm;
        if counts {
            if is_short {
                a.bytes(&[0x66]);
            }
            a.rm(is_wide, &[0x8d], RCX, at(RCX, -1)); // lea
        }
        let ends = condition.map(|c| a.jcc(c ^ 1));
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
