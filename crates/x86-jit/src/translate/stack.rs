//! The stack: single pushes and pops, and runs of them with one TLB probe.

use iced_x86::{OpKind, Register};

use super::{Emit, Translator, Unsupported};
use crate::{area::*, asm::*, block::Decoded, kind::Kind};

/// Pushes or pops of a run at most: a longer one straddles a page more often.
const MAX_RUN: usize = 8;

/// How many instructions at the start of `insns` push, or all pop, general
/// registers other than RSP, in one group.
pub(super) fn run_length(insns: &[Decoded]) -> usize {
    let Some(kind @ (Kind::Push | Kind::Pop)) = insns.first().map(|d| d.kind) else {
        return 0;
    };
    let group = |d: &Decoded| d.member.map(|m| m.group);
    let Some(wanted) = insns.first().and_then(group) else {
        return 0;
    };
    insns
        .iter()
        .take(MAX_RUN)
        .take_while(|d| {
            d.kind == kind
                && group(d) == Some(wanted)
                && d.i.op0_kind() == OpKind::Register
                && d.i.op0_register() != Register::RSP
        })
        .count()
}

impl Translator {
    /// A run of pushes or pops.
    pub(super) fn stack_run(&mut self, run: &[Decoded]) {
        let Some(first) = run.first() else { return };
        let push = first.kind == Kind::Push;
        self.stack_slot(first, GUEST_RSP, if push { -8 } else { 0 }, push);
        for d in run {
            let disp = d.member.map_or(0, |m| m.offset);
            if push {
                let r = self.read_register(d.i.op0_register(), S1);
                self.asm.store(at(S0, disp), r);
            } else {
                self.pop_to(d.i.op0_register().number() as u8, disp);
            }
        }
        let size = 8 * run.len() as i32;
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
        if d.i.op0_kind() == OpKind::Memory {
            let disp = self.operand(d, 8, false, false)?;
            self.asm.load(S0, at(S0, disp));
            self.asm.store(gs(SPILL), S0);
        }
        let to = self.stack_slot(d, GUEST_RSP, -8, true);
        match d.i.op0_kind() {
            OpKind::Register => {
                let r = self.read_register(d.i.op0_register(), S1);
                self.asm.store(at(S0, to), r);
            }
            OpKind::Memory => {
                self.asm.load(S1, gs(SPILL));
                self.asm.store(at(S0, to), S1);
            }
            _ => {
                let v = i32::try_from(d.i.immediate(0) as i64).map_err(|_| Unsupported)?;
                self.asm.store_imm(at(S0, to), v);
            }
        }
        self.asm.lea(GUEST_RSP, at(GUEST_RSP, -8));
        Ok(())
    }

    pub(super) fn pop(&mut self, d: &Decoded) {
        let from = self.stack_slot(d, GUEST_RSP, 0, false);
        let n = d.i.op0_register().number() as u8;
        if host_reg(n) == Some(GUEST_RSP) {
            self.asm.load(GUEST_RSP, at(S0, from));
            return;
        }
        self.pop_to(n, from);
        self.asm.lea(GUEST_RSP, at(GUEST_RSP, 8));
    }

    pub(super) fn leave(&mut self, d: &Decoded) {
        let from = self.stack_slot(d, RBP, 0, false);
        self.asm.lea(GUEST_RSP, at(RBP, 8));
        self.asm.load(RBP, at(S0, from));
    }
}
