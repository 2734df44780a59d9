//! [`Lowering`]: what the translator does with an instruction.

use iced_x86::Register;

/// What the translator does with an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Lowering {
    /// The form has not been classified yet.
    Unknown,
    /// The interpreter executes it.
    Interpret,
    /// A harmless instruction, which is re-encoded.
    Copy,
    /// A harmless instruction that works on FP or SIMD state.
    CopyFp,
    /// The same with a memory operand that must be aligned to its size.
    CopyFpAligned,
    /// An instruction without any effect.
    Nop,
    /// LEA.
    Lea,
    /// PUSH of a register, a constant or memory.
    Push,
    /// POP to a register.
    Pop,
    /// POP to memory in 64-bit code. Clang makes it of PUSHF where the flags go to a register or memory.
    PopMemory,
    /// LEAVE.
    Leave,
    /// ENTER.
    Enter,
    /// PUSHA.
    PushAll,
    /// POPA.
    PopAll,
    /// XLAT.
    TranslateByte,
    /// CLFLUSH, CLFLUSHOPT and CLWB, which access the line's memory and do nothing else.
    FlushLine,
    /// RDPID.
    ProcessorId,
    /// XGETBV.
    ExtendedControl,
    /// FNINIT, and FNSTENV and FLDENV of 28 bytes.
    X87Environment,
    /// FXSAVE and the XSAVE family, with REX.W.
    SaveState,
    /// FXRSTOR, XRSTOR and XRSTORS, with REX.W.
    RestoreState,
    /// As [`Lowering::RestoreState`], of guests that have no compacted format.
    RestoreStandard,
    /// DIV, guarded against #DE.
    Div,
    /// IDIV, guarded against #DE.
    Idiv,
    /// As [`Lowering::Copy`], with a memory operand that must be aligned to its size.
    CopyAligned,
    /// BT, BTS, BTR and BTC with a register that selects a bit anywhere in memory.
    BitString,
    /// A gather of AVX2 in 64-bit code.
    Gather,
    /// A masked move of AVX in 64-bit code.
    MaskedMove,
    /// MOV from a segment register.
    FromSegment,
    /// MOVS, STOS, LODS, SCAS, CMPS.
    String,
    /// One element of [`Lowering::String`] in code with segments.
    Element,
    /// MOV to a segment register in real mode or virtual-8086 mode.
    ToSegment,
    /// LDS, LES, LFS, LGS and LSS in the same modes.
    LoadPointer,
    /// POP of a segment register in the same modes.
    PopSegment,
    /// PUSH of a segment register.
    PushSegment,
    /// As [`Lowering::PushSegment`], in 32-bit code of Intel's processors, which write the selector only.
    PushSelector,
    /// MOV to ES, DS, FS or GS, and POP of them, in code without segments.
    LoadSegment,
    /// VERR, VERW, LAR and LSL in code without segments.
    AskAboutSelector,
    /// LDMXCSR and FLDCW, if they unmask no exception.
    LoadFpControl,
    /// RDFSBASE, RDGSBASE, WRFSBASE and WRGSBASE.
    SegmentBase,
    /// CLD.
    Cld,
    /// STD.
    Std,
    /// PAUSE.
    Pause,
    /// RDPKRU and WRPKRU.
    KeyRights,
    /// RDTSC and RDTSCP, if they are allowed and the TSC is not scaled.
    Rdtsc,
    /// RDPMC.
    Rdpmc,
    /// PUSHF in code without segments, and at CPL 0 with NT clear.
    Pushf,
    /// POPF in the same code that changes at most arithmetic flags, and IF at CPL 0.
    Popf,
    /// MOV from a control register.
    FromControl,
    /// MOV to CR0.
    ToCr0,
    /// CLTS.
    Clts,
    /// MOV to CR3.
    ToCr3,
    /// SGDT and SIDT: UEFI's firmware finds its services by the IDT.
    StoreTable,
    /// CLI.
    Cli,
    /// STI.
    Sti,
    /// SWAPGS.
    Swapgs,
    /// STAC and CLAC.
    Ac,
    /// JMP, CALL and RET to another code segment in real mode or virtual-8086 mode.
    FarBranch,
    /// SYSCALL.
    Syscall,
    /// SYSRETQ.
    Sysret,
    /// IRETQ.
    InterruptReturn,
    /// A conditional jump.
    Jcc,
    /// LOOP, JCXZ and JECXZ of 32-bit and 16-bit code.
    Counted,
    /// A direct jump.
    Jmp,
    /// A jump whose target comes next in the block.
    Followed,
    /// A jump to what a register or memory has.
    JmpIndirect,
    /// A direct call.
    Call,
    /// A call of what a register or memory has.
    CallIndirect,
    /// A near return.
    Ret,
}

impl Lowering {
    /// Returns true if FP state has to be in the host's registers.
    pub(crate) const fn is_fp(self) -> bool {
        matches!(
            self,
            Self::CopyFp
                | Self::CopyFpAligned
                | Self::Gather
                | Self::MaskedMove
                | Self::LoadFpControl
                | Self::X87Environment
        )
    }

    /// Returns the register by which the instruction accesses the stack, whatever its operands are.
    pub(crate) const fn stack_base(self) -> Option<Register> {
        match self {
            Self::Push | Self::Pop | Self::Call | Self::CallIndirect | Self::Ret => {
                Some(Register::RSP)
            }
            Self::Leave => Some(Register::RBP),
            _ => None,
        }
    }

    /// Returns true if the instruction is the last of its block.
    pub(crate) const fn ends_block(self) -> bool {
        matches!(
            self,
            Self::Unknown
                | Self::Interpret
                | Self::Jmp
                | Self::JmpIndirect
                | Self::Call
                | Self::CallIndirect
                | Self::Ret
                | Self::FarBranch
                | Self::Syscall
                | Self::Sysret
                | Self::InterruptReturn
                | Self::ToCr3
                | Self::Clts
                | Self::RestoreState
                | Self::RestoreStandard
        )
    }
}
