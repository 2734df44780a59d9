//! The stack: single pushes and pops, and runs of them with one TLB probe.

use iced_x86::{OpKind, Register};

use super::{Emit, Translator, memory::Finds};
use crate::{asm::*, frame::words::*, ir::decoded::Decoded, ir::lowering::Lowering};

/// Maximum number of pushes or pops in a run: a longer one straddles a page more often.
const MAX_RUN: usize = 8;

/// Returns how many instructions at the start of `insns` push, or all pop, general registers other than RSP, in one
/// group.
pub(super) fn run_length(insns: &[Decoded]) -> usize {
    let Some(kind @ (Lowering::Push | Lowering::Pop)) = insns.first().map(|d| d.kind) else {
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
                && d.i.op0_register().full_register() != Register::RSP
        })
        .count()
}

/// Returns true if the instruction depends on RSP only through the pointer of its group, and nothing else happens at
/// it: RSP may be changed later for the pushes and pops before it.
pub(super) fn needs_no_rsp(d: &Decoded) -> bool {
    const RSP_BIT: u16 = 1 << 4;
    let is_plain = |d: &Decoded| {
        d.memory.is_none() && d.access == 0 && (d.registers | d.writes) & RSP_BIT == 0
    };
    match d.kind {
        Lowering::Push | Lowering::Pop => {
            d.member.is_some_and(|m| !m.first)
                && d.i.op0_kind() != OpKind::Memory
                && d.i.op0_register().full_register() != Register::RSP
        }
        Lowering::Copy | Lowering::CopyFp => is_plain(d),
        Lowering::Nop => true,
        _ => false,
    }
}

impl Translator {
    /// Makes RSP what the guest has from here on.
    pub(super) fn settle_stack(&mut self) {
        let by = core::mem::take(&mut self.state.rsp_moves);
        if by != 0 {
            self.move_stack(by);
        }
    }

    /// Translates a run of pushes or pops.
    pub(super) fn stack_run(&mut self, run: &[Decoded]) {
        let Some(first) = run.first() else { return };
        let push = first.kind == Lowering::Push;
        let word = self.word();
        self.stack_slot(first, GUEST_RSP, if push { -word } else { 0 }, push);
        for d in run {
            let disp = d.member.map_or(0, |m| m.offset);
            if push {
                let r = self.read_register(d.i.op0_register(), S1);
                self.store_word(at(S0, disp), r);
            } else {
                self.pop_to(d.i.op0_register().number() as u8, disp);
            }
        }
        let size = word * run.len() as i32;
        self.state.rsp_moves += if push { -size } else { size };
    }

    /// Loads the word at r14 + `disp` to a register other than RSP.
    fn pop_to(&mut self, n: u8, disp: i32) {
        match host_reg(n) {
            Some(h) => self.load_to_register(h, at(S0, disp)),
            None => {
                self.load_word(S1, at(S0, disp));
                self.asm.store(gpr_slot(n), S1);
                self.state.cached = Some(n);
            }
        }
    }

    pub(super) fn push(&mut self, d: &Decoded) -> Emit {
        if d.i.op0_kind() == OpKind::Memory {
            let operand = self.operand(d, self.word() as u32, false, false, Finds::Address)?;
            self.load_word(S0, operand);
            self.asm.store(gs(SPILL), S0);
        }
        let to = self.stack_slot(d, GUEST_RSP, -self.word(), true);
        match d.i.op0_kind() {
            OpKind::Register => {
                let r = self.read_register(d.i.op0_register(), S1);
                self.store_word(at(S0, to), r);
            }
            OpKind::Memory => {
                self.asm.load(S1, gs(SPILL));
                self.state.cached = None;
                self.store_word(at(S0, to), S1);
            }
            _ => {
                // The immediate is sign-extended from 32 bits, or not extended.
                self.store_word_imm(at(S0, to), d.i.immediate(0) as i32);
            }
        }
        self.state.rsp_moves -= self.word();
        Ok(())
    }

    pub(super) fn pop(&mut self, d: &Decoded) {
        let from = self.stack_slot(d, GUEST_RSP, 0, false);
        let n = d.i.op0_register().number() as u8;
        if host_reg(n) == Some(GUEST_RSP) {
            if self.word() == 2 {
                // The bits above SP become those of the stack pointer behind the word.
                self.load_word(S0, at(S0, from));
                self.move_stack(2);
                self.asm.bytes(&[0x66]);
                self.asm.rr(false, &[0x8b], GUEST_RSP, S0);
                return;
            }
            self.load_to_register(GUEST_RSP, at(S0, from));
            return;
        }
        self.pop_to(n, from);
        self.state.rsp_moves += self.word();
    }

    pub(super) fn pop_to_memory(&mut self, d: &Decoded) -> Emit {
        let word = self.word();
        self.spill_flags(d);
        self.stack_address(d.offset, GUEST_RSP, 0);
        self.probe_stack(d.offset, false);
        self.load_word(S0, at(S0, 0));
        self.asm.store(gs(SPILL), S0);
        // A base of RSP is the stack pointer behind the word.
        let is_behind = matches!(d.i.memory_base(), Register::RSP | Register::ESP);
        self.address(d, if is_behind { -word } else { 0 }, word as u32)?;
        self.probe(d.offset, word as u32, true);
        self.asm.load(S1, gs(SPILL));
        self.state.cached = None;
        self.store_word(at(S0, 0), S1);
        self.move_stack(word);
        Ok(())
    }

    pub(super) fn leave(&mut self, d: &Decoded) {
        let from = self.stack_slot(d, RBP, 0, false);
        self.set_stack(at(RBP, self.word()));
        self.load_to_register(RBP, at(S0, from));
    }
}
