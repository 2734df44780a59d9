//! Which streams of retired events an instruction counts in.

use core::sync::atomic::{AtomicU8, Ordering};

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind};
use x86_defs::retired::{
    BRANCHES, CONDITIONAL, FAR, INSTRUCTIONS, LOADS, MEMORY, NEAR_CALLS, NEAR_INDIRECT,
    NEAR_RETURNS, STORES, UPDATES, bit,
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
    bit(INSTRUCTIONS) | kind | memory_of(i)
}

/// What is known of each code, with and without a memory operand: the streams from [`LOADS`] on and a bit above them,
/// or 0.
static MEMORY_OF: [[AtomicU8; 2]; CODES] = [const { [const { AtomicU8::new(0) }; 2] }; CODES];
/// More than there are codes.
const CODES: usize = 0x2000;
const IS_KNOWN: u8 = 1 << 7;

/// Returns the streams of an instruction's accesses to memory. They follow from its code and from whether it has a
/// memory operand, but for ENTER's, which is as with a nesting level of 0, and those of masked vectors, which count
/// whatever the mask.
fn memory_of(i: &Instruction) -> u16 {
    let has_operand = (0..i.op_count()).any(|op| i.op_kind(op) == OpKind::Memory);
    let Some([without, with]) = MEMORY_OF.get(i.code() as usize) else {
        return 0;
    };
    let known = if has_operand { with } else { without };
    let mut streams = known.load(Ordering::Relaxed);
    if streams == 0 {
        streams = IS_KNOWN | (accesses_of(i) >> LOADS) as u8;
        known.store(streams, Ordering::Relaxed);
    }
    u16::from(streams & !IS_KNOWN) << LOADS
}

#[cold]
fn accesses_of(i: &Instruction) -> u16 {
    let mut factory = InstructionInfoFactory::new();
    let all = factory.info(i).used_memory().iter();
    let streams = all.fold(0, |streams, place| {
        streams
            | match place.access() {
                OpAccess::Read | OpAccess::CondRead => bit(LOADS),
                OpAccess::Write | OpAccess::CondWrite => bit(STORES),
                OpAccess::ReadWrite | OpAccess::ReadCondWrite => bit(UPDATES),
                OpAccess::None | OpAccess::NoMemAccess => 0,
            }
    });
    match streams {
        0 => 0,
        _ if streams & bit(UPDATES) != 0 => bit(UPDATES) | bit(MEMORY),
        _ => streams | bit(MEMORY),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use iced_x86::{Code, Decoder, DecoderOptions};

    use super::*;

    #[test]
    fn accesses_to_memory_are_streams() {
        assert!(Code::values().count() <= CODES);
        let [load, store] = [LOADS, STORES].map(|stream| bit(stream) | bit(MEMORY));
        let update = bit(UPDATES) | bit(MEMORY);
        let cases: [(&[u8], u16); 17] = [
            (&[0x8b, 0x03], load),
            (&[0x8b, 0xc3], 0),
            (&[0x89, 0x03], store),
            (&[0x01, 0x03], update),
            (&[0xff, 0x03], update),
            // XCHG and CMPXCHG.
            (&[0x87, 0x03], update),
            (&[0xf0, 0x0f, 0xb1, 0x0b], update),
            // LEA and a NOP with an operand touch no memory.
            (&[0x8d, 0x03], 0),
            (&[0x0f, 0x1f, 0x03], 0),
            // PUSH, POP, CALL, RET, and PUSH of memory.
            (&[0x50], store),
            (&[0x58], load),
            (&[0xe8, 0, 0, 0, 0], store),
            (&[0xc3], load),
            (&[0xff, 0x33], load | store),
            // Strings, with and without a prefix.
            (&[0xa4], load | store),
            (&[0xf3, 0xab], store),
            (&[0x84, 0x03], load),
        ];
        for (bytes, expected) in cases {
            for _ in 0..2 {
                let i = Decoder::new(64, bytes, DecoderOptions::NONE).decode();
                assert_eq!(memory_of(&i), expected, "{i}");
            }
        }
    }
}
