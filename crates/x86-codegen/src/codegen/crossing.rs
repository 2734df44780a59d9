//! Branches from code that counts to code that does not, and back, where the privilege level changes: see
//! `Jit::follow_level`.

use crate::{asm::*, codegen::branch::select_target, codegen::countdown::exact, frame::words::*};

/// Emits a branch to r14 from code of one kind to code of the other, if the target table has it; else it goes on to
/// `branch`, with r13 as it was. `counts`: it comes from code that counts, whose counts have been settled.
pub(super) fn cross(a: &mut Asm, branch: usize, counts: bool) {
    a.store(gs(SPILL), S1);
    a.load(S1, gs(COUNTED_SALT));
    a.store(SHORT_SALT, S1);
    a.store(gs(SALT), S1);
    let absent = select_target(a);
    a.load(S0, at(S1, 24));
    a.store(SHORT_PAGE, S0);
    a.load(S0, at(S1, 16));
    a.store(gs(COUNTED_ENTRY), S0);
    if counts {
        exact::forget(a);
    }
    a.load(S0, gs(COUNTED_GO_ON));
    a.store_imm(gs(COUNTED_GO_ON), 0);
    a.bytes(&[0x41, 0xff, 0xe6]); // jmp r14
    let here = a.here();
    a.patch(absent, here);
    a.store_imm(gs(COUNTED_GO_ON), 0);
    a.alu(true, Alu::Xor, S0, SHORT_SALT);
    a.load(S1, gs(SPILL));
    a.jmp_to(branch);
}
