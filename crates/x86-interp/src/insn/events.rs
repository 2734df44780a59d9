//! Which streams of retired events an instruction counts in.

use iced_x86::{FlowControl, Instruction, Mnemonic};
use x86_defs::retired::{
    BRANCHES, CONDITIONAL, FAR, INSTRUCTIONS, NEAR_CALLS, NEAR_INDIRECT, NEAR_RETURNS, bit,
};

/// Returns the streams of an instruction, except those that depend on its execution ([`x86_cpu::retired::outcome`]).
pub fn events_of(i: &Instruction) -> u16 {
    let far = bit(BRANCHES) | bit(FAR);
    let kind = match i.flow_control() {
        FlowControl::ConditionalBranch => bit(BRANCHES) | bit(CONDITIONAL),
        FlowControl::UnconditionalBranch if i.is_jmp_far() => far,
        FlowControl::UnconditionalBranch => bit(BRANCHES),
        FlowControl::IndirectBranch if i.is_jmp_far_indirect() => far,
        FlowControl::IndirectBranch => bit(BRANCHES) | bit(NEAR_INDIRECT),
        FlowControl::IndirectCall if i.is_call_far_indirect() => far,
        FlowControl::IndirectCall => bit(BRANCHES) | bit(NEAR_CALLS) | bit(NEAR_INDIRECT),
        FlowControl::Call if i.is_call_near() => bit(BRANCHES) | bit(NEAR_CALLS),
        // SYSCALL, SYSENTER and far CALL. Hypercalls are no branches.
        FlowControl::Call => match i.mnemonic() {
            Mnemonic::Call | Mnemonic::Syscall | Mnemonic::Sysenter => far,
            _ => 0,
        },
        FlowControl::Return if i.mnemonic() == Mnemonic::Ret => bit(BRANCHES) | bit(NEAR_RETURNS),
        FlowControl::Return | FlowControl::Interrupt => far,
        FlowControl::Next | FlowControl::XbeginXabortXend | FlowControl::Exception => 0,
    };
    bit(INSTRUCTIONS) | kind
}
