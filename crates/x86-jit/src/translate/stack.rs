//! The stack: single pushes and pops, and runs of them with one TLB probe.

use iced_x86::{OpKind, Register};

use super::{Emit, Translator, Unsupported};
use crate::{
    area::*,
    asm::*,
    block::Decoded,
    kind::Kind,
    thunks::{restore_flags, save_flags},
};

/// Pushes or pops of a run at most: a longer one straddles a page more often.
const MAX_RUN: usize = 8;

/// How many instructions at the start of `insns` push, or all pop, general
/// registers other than RSP.
pub(super) fn run_length(insns: &[Decoded]) -> usize {
    let Some(kind @ (Kind::Push | Kind::Pop)) = insns.first().map(|d| d.kind) else {
        return 0;
    };
    insns
        .iter()
        .take(MAX_RUN)
        .take_while(|d| {
            d.kind == kind
                && d.i.op0_kind() == OpKind::Register
                && d.i.op0_register() != Register::RSP
        })
        .count()
}

impl Translator {
    /// A run of pushes or pops. A miss that is no mere refill leaves at the
    /// first: nothing has been done by then.
    pub(super) fn stack_run(&mut self, run: &[Decoded]) {
        let Some(first) = run.first() else { return };
        let size = 8 * run.len() as i32;
        let push = first.kind == Kind::Push;
        if first.live_in != 0 {
            save_flags(&mut self.asm);
        }
        self.asm
            .lea(S0, at(GUEST_RSP, if push { -size } else { 0 }));
        self.probe(first.offset, size as u32, push);
        if first.live_in != 0 {
            restore_flags(&mut self.asm, S1);
        }
        for (n, d) in run.iter().enumerate() {
            let n = 8 * n as i32;
            if push {
                let r = self.read_register(d.i.op0_register(), S1);
                self.asm.store(at(S0, size - 8 - n), r);
            } else {
                self.pop_to(d.i.op0_register().number() as u8, n);
            }
        }
        self.asm
            .lea(GUEST_RSP, at(GUEST_RSP, if push { -size } else { size }));
    }

    /// The word at r14 + `disp` to a register other than RSP.
    fn pop_to(&mut self, n: u8, disp: i32) {
        match host_reg(n) {
            Some(h) => self.asm.load(h, at(S0, disp)),
            None => {
                self.asm.load(S1, at(S0, disp));
                self.asm.store(home(n), S1);
            }
        }
    }

    pub(super) fn push(&mut self, d: &Decoded) -> Emit {
        let memory = d.i.op0_kind() == OpKind::Memory;
        if memory {
            self.operand(d, 8, false, false)?;
            self.asm.load(S0, at(S0, 0));
            self.asm.store(gs(SPILL), S0);
        }
        self.stack_slot(d, GUEST_RSP, -8, true);
        match d.i.op0_kind() {
            OpKind::Register => {
                let r = self.read_register(d.i.op0_register(), S1);
                self.asm.store(at(S0, 0), r);
            }
            OpKind::Memory => {
                self.asm.load(S1, gs(SPILL));
                self.asm.store(at(S0, 0), S1);
            }
            _ => {
                let v = i32::try_from(d.i.immediate(0) as i64).map_err(|_| Unsupported)?;
                self.asm.store_imm(at(S0, 0), v);
            }
        }
        self.asm.lea(GUEST_RSP, at(GUEST_RSP, -8));
        Ok(())
    }

    pub(super) fn pop(&mut self, d: &Decoded) {
        self.stack_slot(d, GUEST_RSP, 0, false);
        let n = d.i.op0_register().number() as u8;
        if host_reg(n) == Some(GUEST_RSP) {
            self.asm.load(GUEST_RSP, at(S0, 0));
            return;
        }
        self.pop_to(n, 0);
        self.asm.lea(GUEST_RSP, at(GUEST_RSP, 8));
    }

    pub(super) fn leave(&mut self, d: &Decoded) {
        self.stack_slot(d, RBP, 0, false);
        self.asm.lea(GUEST_RSP, at(RBP, 8));
        self.asm.load(RBP, at(S0, 0));
    }
}
