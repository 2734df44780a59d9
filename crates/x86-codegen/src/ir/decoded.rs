//! [`Decoded`]: an instruction of a block, with the facts that translation needs again and again.

use iced_x86::{Instruction, OpKind, Register};

use crate::{
    frame::words::IN_FRAME,
    ir::flags::ALL,
    ir::lowering::{Effect, Form, Lowering},
    ir::member::Member,
    ir::memory::is_on_stack,
    ir::mode::Mode,
    ir::string,
};

/// Bytes that are kept of an instruction. No instruction has as many.
pub(crate) const RAW: usize = 16;

/// An instruction of a block.
#[derive(Clone, Copy, Debug)]
pub struct Decoded {
    /// The instruction.
    pub i: Instruction,
    /// The guest's bytes: those of `i`, and others that follow.
    pub raw: [u8; RAW],
    /// How it is translated.
    pub kind: Lowering,
    /// Offset in the page. Branch targets and RIP-relative addresses in `i` are relative to the page, too.
    pub offset: u32,
    /// Flags that something may read before they are written, from this instruction on.
    pub(crate) live_in: u32,
    /// The access's place in its group, if it shares a probe with others.
    pub(crate) member: Option<Member>,
    /// Arithmetic flags that the instruction may read, and that it always sets.
    pub(crate) reads: u16,
    pub(crate) sets: u16,
    /// Bit per general register that is an operand.
    pub(crate) registers: u16,
    /// Bit per general register that the instruction may write.
    pub(crate) writes: u16,
    /// Whether the memory operand needs permission to write; `None` if there is no memory operand.
    pub(crate) memory: Option<bool>,
    /// Size in bytes of the one access that can be a group's member, or 0.
    pub(crate) access: u8,
    /// The instruction names AH, CH, DH or BH.
    pub(crate) high: bool,
    pub(crate) effect: Effect,
    /// The instruction's translation uses the register that holds a group's pointer.
    pub(crate) takes_pointer: bool,
    /// The iteration, from 1 on, in which this branch leaves a loop within its block; 0 if it does not, or if it is
    /// known how many iterations the loop makes.
    pub(crate) turn: u8,
    /// The condition is the guest's negated: the instruction branches where the guest's does not.
    pub(crate) is_negated: bool,
    /// The number of the instruction's page among those of a trace.
    pub(crate) page: u8,
    /// The page's distance from the first one, in bytes.
    pub distance: i32,
    /// The branch's target, if it is what comes next in the block. Indirect branches and returns may lead elsewhere.
    pub onto: Option<TracePlace>,
}

/// A place in one of the pages of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracePlace {
    pub(crate) page: u8,
    pub(crate) offset: u16,
}

impl Decoded {
    /// Returns the offset of the next instruction.
    pub(crate) fn end(&self) -> u32 {
        self.offset + self.i.len() as u32
    }

    /// Returns the place of the next instruction, if that is in the same page.
    pub(crate) fn behind(&self) -> TracePlace {
        TracePlace {
            page: self.page,
            offset: self.end() as u16,
        }
    }

    /// Replaces the instruction by `i`, at the same offset.
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
            // Locked accesses have checks of their own.
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
            | Lowering::RestoreState
            | Lowering::RestoreStandard
            | Lowering::InterruptReturn
            | Lowering::LoadSegment
            | Lowering::AskAboutSelector
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

    /// Returns true if the instruction probes the software TLB by another entry than the stack's.
    pub fn may_have_site_entry(&self) -> bool {
        match self.member {
            Some(m) => m.first && !m.stack,
            None => self.memory.is_some() && !is_on_stack(&self.i),
        }
    }

    /// Returns a place holder for what cannot be decoded, or fetched: the interpreter executes it.
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

    /// Negates a conditional branch: it branches where it did not, and falls through where it did.
    pub(crate) fn turns_round(&mut self) {
        self.i.negate_condition_code();
        self.is_negated = !self.is_negated;
    }

    /// Makes the jump one whose target comes next in the block.
    pub(crate) fn follow(&mut self) {
        self.kind = Lowering::Followed;
        (self.reads, self.sets, self.takes_pointer) = (0, 0, false);
    }

    /// Returns true if the instruction may write memory.
    fn stores(&self) -> bool {
        self.memory == Some(true)
            || self.kind == Lowering::String
            || self.i.stack_pointer_increment() < 0
    }

    /// Returns true if interrupts wait behind the instruction until the next one has been executed.
    pub(crate) fn holds_events(&self) -> bool {
        match self.kind {
            Lowering::Sti => true,
            Lowering::ToSegment | Lowering::PopSegment => self.i.op0_register() == Register::SS,
            _ => false,
        }
    }

    /// Leaves the instruction to the interpreter after all.
    pub(crate) fn leave(&mut self) {
        self.kind = Lowering::Interpret;
        (self.reads, self.sets, self.takes_pointer) = (ALL as u16, 0, true);
        self.access = 0;
    }
}

/// Fills in [`Decoded::live_in`].
///
/// 16-bit programs often have code and stack in one segment, and change their own code. So a store may put code behind
/// itself that reads any flag, and all flags are live there. Other code does not pay for that (docs/quirks.md).
pub(crate) fn find_live(insns: &mut [Decoded], mode: Mode) {
    let stores_may_change_code = mode.has(Mode::BITS16);
    let mut live = ALL;
    for d in insns.iter_mut().rev() {
        if stores_may_change_code && d.stores() {
            live = ALL;
        }
        live = live & !u32::from(d.sets) | u32::from(d.reads);
        d.live_in = live;
    }
}

/// Returns the flags that are live before a trace has compared its pages: another page than the first may turn out to
/// have other code, which may read any flag.
pub(crate) fn live_before_pages(insns: &[Decoded]) -> u32 {
    let (mut live, mut open) = (0, ALL);
    for d in insns.iter().take_while(|d| d.page == 0) {
        live |= open & u32::from(d.reads);
        open &= !u32::from(d.reads | d.sets);
    }
    live | open
}
