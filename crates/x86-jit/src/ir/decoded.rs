//! [`Decoded`]: an instruction of a block, and what is asked of it again and again.

use iced_x86::{Instruction, OpKind, Register};

use crate::{
    frame::words::IN_FRAME,
    ir::flags::ALL,
    ir::lowering::{Effect, Form, Lowering},
    ir::member::Member,
    ir::memory::is_on_stack,
    ir::string,
};

/// Bytes that are kept of an instruction, which has fewer.
pub(crate) const RAW: usize = 16;

/// An instruction of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoded {
    pub(crate) i: Instruction,
    /// The guest's bytes, and others after as many as `i` is long.
    pub(crate) raw: [u8; RAW],
    pub(crate) kind: Lowering,
    /// Offset in the page; so are branch targets and RIP-relative addresses.
    pub(crate) offset: u32,
    /// Flags that something may read before they are written, this instruction included.
    pub(crate) live_in: u32,
    /// Its access shares a probe with others.
    pub(crate) member: Option<Member>,
    /// Arithmetic flags that it may read, and that it always sets.
    pub(crate) reads: u16,
    pub(crate) sets: u16,
    /// Bit per general register that is an operand.
    pub(crate) registers: u16,
    /// Bit per general register that it may write.
    pub(crate) writes: u16,
    /// It has a memory operand, and needs permission to write there.
    pub(crate) memory: Option<bool>,
    /// Bytes of the one access that can be a group's member, or 0.
    pub(crate) access: u8,
    /// It names AH, CH, DH or BH.
    pub(crate) high: bool,
    pub(crate) effect: Effect,
    /// Translating it uses the register that a group's pointer is in.
    pub(crate) takes_pointer: bool,
    /// Where it leaves a loop within its block that is not known to make always as many turns: the turn, from 1 on.
    pub(crate) turn: u8,
    /// Its condition is the guest's negated: it branches where the guest's does not.
    pub(crate) is_negated: bool,
    /// The number of its page among those of a trace, and how far that is from the one that the trace begins in.
    pub(crate) page: u8,
    pub(crate) distance: i32,
    /// The branch leads to what comes next in the block, if it leads where it is expected to.
    pub(crate) onto: Option<TracePlace>,
}

/// A place in one of the pages of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TracePlace {
    pub(crate) page: u8,
    pub(crate) offset: u16,
}

impl Decoded {
    /// Offset of the next instruction.
    pub(crate) fn end(&self) -> u32 {
        self.offset + self.i.len() as u32
    }

    /// Where that is, if it is in the same page.
    pub(crate) fn behind(&self) -> TracePlace {
        TracePlace {
            page: self.page,
            offset: self.end() as u16,
        }
    }

    /// Makes it the instruction, at the same offset.
    #[inline]
    pub(crate) fn set(
        &mut self,
        i: &Instruction,
        raw: [u8; RAW],
        kind: Lowering,
        form: &Form,
        long: bool,
    ) {
        let memory = form.memory(i);
        let (mut registers, mut writes, mut high) = (0, form.implied, false);
        let mut operands = form.general;
        while operands != 0 {
            let n = operands.trailing_zeros();
            operands &= operands - 1;
            let r = i.op_register(n);
            if i.op_kind(n) == OpKind::Register {
                let bit = 1 << (r.full_register().number() & 15);
                registers |= bit;
                if form.writes & 1 << n != 0 {
                    writes |= bit;
                }
                high |= matches!(r, Register::AH | Register::CH | Register::DH | Register::BH);
            }
        }
        let word = if long { 8 } else { 4 };
        let access = match kind {
            Lowering::Push if memory.is_some() => 0,
            Lowering::Push | Lowering::Pop | Lowering::Leave | Lowering::Call | Lowering::Ret => {
                word
            }
            // Locked ones have checks of their own.
            Lowering::Copy | Lowering::CopyFp | Lowering::CopyFpAligned
                if memory.is_some() && form.size <= 32 && !form.is_locked(i) =>
            {
                form.size
            }
            _ => 0,
        };
        let takes_pointer = match kind {
            Lowering::Nop | Lowering::Jcc | Lowering::Followed => false,
            Lowering::Copy | Lowering::CopyFp | Lowering::CopyAligned | Lowering::CopyFpAligned => {
                memory.is_some() || (registers & IN_FRAME).count_ones() > 1
            }
            Lowering::Lea => {
                let in_frame = |r: Register| r.is_gpr() && IN_FRAME >> (r.number() & 15) & 1 != 0;
                let base = i.memory_base();
                base == Register::RIP || in_frame(base) && in_frame(i.memory_index())
            }
            _ => true,
        };
        let (reads, sets) = match kind {
            Lowering::Interpret
            | Lowering::Jcc
            | Lowering::Counted
            | Lowering::Syscall
            | Lowering::Sysret
            | Lowering::ToCr0
            | Lowering::ToCr3
            | Lowering::Clts
            | Lowering::InterruptReturn
            | Lowering::Pushf => (ALL as u16, 0),
            Lowering::Popf => (0, ALL as u16),
            Lowering::Nop | Lowering::Followed => (0, 0),
            Lowering::String if string::may_keep_flags(i) => (0, 0),
            _ => form.flags(i),
        };
        self.i = *i;
        self.raw = raw;
        self.kind = kind;
        (self.reads, self.sets) = (reads, sets);
        (self.registers, self.writes, self.high) = (registers, writes, high);
        (self.memory, self.access) = (memory, access);
        self.effect = form.effect;
        self.takes_pointer = takes_pointer;
    }

    /// It probes the software TLB, and not for the stack.
    pub(crate) fn may_have_site_entry(&self) -> bool {
        match self.member {
            Some(m) => m.first && !m.stack,
            None => self.memory.is_some() && !is_on_stack(&self.i),
        }
    }

    /// What cannot be decoded, or fetched.
    pub(crate) fn invalid(offset: u32) -> Self {
        Self {
            i: Instruction::default(),
            raw: [0; RAW],
            kind: Lowering::Interpret,
            offset,
            live_in: 0,
            member: None,
            reads: ALL as u16,
            sets: 0,
            registers: 0,
            writes: 0,
            memory: None,
            access: 0,
            high: false,
            effect: Effect::Other,
            takes_pointer: true,
            turn: 0,
            is_negated: false,
            page: 0,
            distance: 0,
            onto: None,
        }
    }

    /// A conditional branch leads where it did not, and goes on where it did.
    pub(crate) fn turns_round(&mut self) {
        self.i.negate_condition_code();
        self.is_negated = !self.is_negated;
    }

    /// The jump's target is what comes next in the block.
    pub(crate) fn follow(&mut self) {
        self.kind = Lowering::Followed;
        (self.reads, self.sets, self.takes_pointer) = (0, 0, false);
    }

    /// Behind it, interrupts wait for the next instruction.
    pub(crate) fn holds_events(&self) -> bool {
        match self.kind {
            Lowering::Sti => true,
            Lowering::ToSegment | Lowering::PopSegment => self.i.op0_register() == Register::SS,
            _ => false,
        }
    }

    /// The interpreter executes it after all.
    pub(crate) fn leave(&mut self) {
        self.kind = Lowering::Interpret;
        (self.reads, self.sets, self.takes_pointer) = (ALL as u16, 0, true);
        self.access = 0;
    }
}

/// Fills in [`Decoded::live_in`].
pub(crate) fn find_live(insns: &mut [Decoded]) {
    let mut live = ALL;
    for d in insns.iter_mut().rev() {
        live = live & !u32::from(d.sets) | u32::from(d.reads);
        d.live_in = live;
    }
}
