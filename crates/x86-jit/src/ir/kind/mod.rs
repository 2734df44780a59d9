//! The table of instructions: what the translator does with each form, and why that is safe.
//!
//! A form that is not listed is left to the interpreter. [`Kind::Copy`] is for
//! instructions whose only effects are on general registers, arithmetic flags,
//! FP and SIMD registers and their one memory operand, and that cannot fault
//! but through that operand: they are executed as they are, with registers
//! renamed and the operand replaced.

use iced_x86::{Code, CpuidFeature, Instruction, Mnemonic, OpKind, Register};
use x86_native::HostFeatures;

mod form;
mod in_mode;
mod in_segments;

pub(crate) use form::{Effect, Form, Forms, Shape};
pub(crate) use in_mode::kind_of;
pub(crate) use in_segments::{has_short_address, has_short_words, is_short};

use super::{narrow, string};

/// What is done with an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Not looked at yet.
    Unknown,
    /// The interpreter executes it.
    Interpret,
    /// Harmless: re-encoded.
    Copy,
    /// Harmless, and works on FP or SIMD state.
    CopyFp,
    /// The same, whose memory operand must be aligned to its size.
    CopyFpAligned,
    /// No effect at all.
    Nop,
    Lea,
    Push,
    Pop,
    Leave,
    /// DIV: guarded against #DE.
    Div,
    /// IDIV: guarded against #DE.
    Idiv,
    /// As [`Kind::Copy`], with a memory operand that must be aligned to its size.
    CopyAligned,
    /// BT and its kin with a register that selects a bit anywhere in memory.
    BitString,
    /// MOV from a segment register.
    FromSegment,
    /// MOVS, STOS, LODS, SCAS, CMPS.
    String,
    /// One element of [`Kind::String`] in code with segments, where DF is clear.
    Element,
    /// MOV to a segment register in real mode, and POP of one.
    ToSegment,
    PopSegment,
    /// PUSH of a segment register.
    PushSegment,
    /// LDMXCSR and FLDCW, where they unmask no exception.
    LoadFpControl,
    /// RDFSBASE and its kin.
    SegmentBase,
    Cld,
    Pause,
    /// RDPKRU and WRPKRU.
    KeyRights,
    /// RDTSC and RDTSCP, where allowed and not scaled.
    Rdtsc,
    /// At CPL 0, with IOPL, NT and DF clear:
    Pushf,
    Popf,
    /// MOV from a control register.
    FromControl,
    /// MOV to CR0.
    ToCr0,
    /// MOV to CR3.
    ToCr3,
    /// SGDT and SIDT: UEFI's firmware finds its services by the IDT.
    StoreTable,
    Cli,
    Sti,
    Swapgs,
    /// STAC and CLAC.
    Ac,
    Syscall,
    Sysret,
    InterruptReturn,
    Jcc,
    /// LOOP, JCXZ and JECXZ of 32-bit and 16-bit code.
    Counted,
    Jmp,
    /// A jump whose target comes next in the block.
    Followed,
    JmpIndirect,
    Call,
    CallIndirect,
    Ret,
}

impl Kind {
    /// FP state has to be in the host's registers.
    pub(crate) const fn is_fp(self) -> bool {
        matches!(
            self,
            Self::CopyFp | Self::CopyFpAligned | Self::LoadFpControl
        )
    }

    /// The register that the instruction accesses the stack by, whatever its operands are.
    pub(crate) const fn stack_base(self) -> Option<Register> {
        match self {
            Self::Push | Self::Pop | Self::Call | Self::CallIndirect | Self::Ret => {
                Some(Register::RSP)
            }
            Self::Leave => Some(Register::RBP),
            _ => None,
        }
    }

    /// Nothing of the block comes after it.
    pub(crate) const fn ends_block(self) -> bool {
        matches!(
            self,
            Self::Interpret
                | Self::Jmp
                | Self::JmpIndirect
                | Self::Call
                | Self::CallIndirect
                | Self::Ret
                | Self::Syscall
                | Self::Sysret
                | Self::InterruptReturn
                | Self::ToCr3
        )
    }
}

/// The kind of an instruction of a form of the kind `kind`; `long`: of 64-bit code,
/// else of 32-bit code with flat segments.
pub(crate) fn of(kind: Kind, i: &Instruction, long: bool) -> Kind {
    match kind {
        _ if !long && !narrow::is_plain(i) => Kind::Interpret,
        Kind::Copy if is_bit_string(i) => bit_string(i),
        Kind::String if !string::is_plain(i, long) => Kind::Interpret,
        Kind::FromControl
            if !matches!(
                i.op1_register(),
                Register::CR0 | Register::CR2 | Register::CR3 | Register::CR4
            ) =>
        {
            Kind::Interpret
        }
        Kind::ToCr0 if i.op0_register() == Register::CR3 => Kind::ToCr3,
        Kind::ToCr0 if i.op0_register() != Register::CR0 => Kind::Interpret,
        Kind::Copy | Kind::CopyFp | Kind::CopyFpAligned | Kind::Pop if !operands_are_plain(i) => {
            Kind::Interpret
        }
        kind => kind,
    }
}

/// [`of`] may make something else of 64-bit code of the kind. `names`: of its kinds of operands.
fn is_checked<I: Iterator<Item = String>>(
    kind: Kind,
    i: &Instruction,
    mut names: impl FnMut() -> I,
) -> bool {
    match kind {
        Kind::String | Kind::FromControl | Kind::ToCr0 => true,
        Kind::Pop => i.code() != Code::Pop_r64,
        Kind::Copy | Kind::CopyFp | Kind::CopyFpAligned => {
            let plain = |name: String| {
                // High bytes, segment registers, the operands of string instructions.
                !(name.starts_with("r8_") || name.starts_with("seg") || name.starts_with("es_"))
            };
            matches!(
                i.mnemonic(),
                Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc
            ) || !names().all(plain)
        }
        _ => false,
    }
}

/// The kind of a form, whatever its operands.
fn form(i: &Instruction, host: &HostFeatures) -> Kind {
    use Mnemonic as M;
    let code = i.code();
    if !code.cpuid_features().iter().all(|f| host_has(host, *f)) {
        return Kind::Interpret;
    }
    match i.mnemonic() {
        M::Nop
        | M::Endbr64
        | M::Endbr32
        | M::Prefetchnta
        | M::Prefetcht0
        | M::Prefetcht1
        | M::Prefetcht2
        | M::Prefetchw
        | M::Prefetch => Kind::Nop,
        M::Lea => Kind::Lea,
        M::Push if pushes_word(code) => Kind::Push,
        M::Pop
            if matches!(
                code,
                Code::Pop_r64 | Code::Pop_rm64 | Code::Pop_r32 | Code::Pop_rm32
            ) =>
        {
            Kind::Pop
        }
        M::Leave if matches!(code, Code::Leaveq | Code::Leaved) => Kind::Leave,
        M::Div if matches!(code, Code::Div_rm32 | Code::Div_rm64) => Kind::Div,
        M::Idiv if matches!(code, Code::Idiv_rm32 | Code::Idiv_rm64) => Kind::Idiv,
        M::Jmp
            if matches!(
                code,
                Code::Jmp_rel8_64 | Code::Jmp_rel32_64 | Code::Jmp_rel8_32 | Code::Jmp_rel32_32
            ) =>
        {
            Kind::Jmp
        }
        M::Jmp if matches!(code, Code::Jmp_rm64 | Code::Jmp_rm32) => Kind::JmpIndirect,
        M::Call if matches!(code, Code::Call_rel32_64 | Code::Call_rel32_32) => Kind::Call,
        M::Call if matches!(code, Code::Call_rm64 | Code::Call_rm32) => Kind::CallIndirect,
        M::Ret if is_near_return(code) => Kind::Ret,
        M::Loop | M::Jcxz | M::Jecxz if is_counted(code) => Kind::Counted,
        _ if is_jcc(code) => Kind::Jcc,
        M::Cmpxchg16b => Kind::CopyAligned,
        M::Mov
            if matches!(
                code,
                Code::Mov_rm16_Sreg | Code::Mov_r32m16_Sreg | Code::Mov_r64m16_Sreg
            ) =>
        {
            Kind::FromSegment
        }
        M::Mov if matches!(code, Code::Mov_r64_cr | Code::Mov_r32_cr) => Kind::FromControl,
        M::Mov if code == Code::Mov_cr_r64 => Kind::ToCr0,
        M::Rdfsbase | M::Rdgsbase | M::Wrfsbase | M::Wrgsbase
            if matches!(
                code,
                Code::Rdfsbase_r64 | Code::Rdgsbase_r64 | Code::Wrfsbase_r64 | Code::Wrgsbase_r64
            ) =>
        {
            Kind::SegmentBase
        }
        M::Sgdt | M::Sidt if stores_table(code) => Kind::StoreTable,
        M::Cld => Kind::Cld,
        M::Pause => Kind::Pause,
        _ if i.is_string_instruction() => Kind::String,
        M::Rdtsc | M::Rdtscp => Kind::Rdtsc,
        M::Pushfq | M::Pushfd => Kind::Pushf,
        M::Popfq | M::Popfd => Kind::Popf,
        M::Cli => Kind::Cli,
        M::Sti => Kind::Sti,
        M::Swapgs => Kind::Swapgs,
        M::Syscall => Kind::Syscall,
        M::Sysretq => Kind::Sysret,
        M::Iretq => Kind::InterruptReturn,
        M::Stac | M::Clac => Kind::Ac,
        M::Rdpkru | M::Wrpkru => Kind::KeyRights,
        _ if is_harmless_integer(i) => Kind::Copy,
        M::Vzeroupper | M::Vzeroall | M::Fnstsw | M::Fnstcw => Kind::CopyFp,
        M::Ldmxcsr | M::Vldmxcsr | M::Fldcw => Kind::LoadFpControl,
        M::Stmxcsr | M::Vstmxcsr => Kind::CopyFp,
        _ if x86_native::form_on(i, host).is_some() => {
            if x86_native::must_be_aligned(i) {
                Kind::CopyFpAligned
            } else {
                Kind::CopyFp
            }
        }
        _ => Kind::Interpret,
    }
}

/// LOOP and its kin with a target of 32 bits.
fn is_counted(code: Code) -> bool {
    matches!(
        code,
        Code::Loop_rel8_32_CX | Code::Loop_rel8_32_ECX | Code::Jcxz_rel8_32 | Code::Jecxz_rel8_32
    )
}

/// RET with an address of the mode's full size.
fn is_near_return(code: Code) -> bool {
    matches!(
        code,
        Code::Retnq | Code::Retnq_imm16 | Code::Retnd | Code::Retnd_imm16
    )
}

/// SGDT and SIDT with a base of the mode's full size.
fn stores_table(code: Code) -> bool {
    matches!(
        code,
        Code::Sgdt_m1664 | Code::Sidt_m1664 | Code::Sgdt_m1632 | Code::Sidt_m1632
    )
}

/// Pushes a value of the mode's full size.
fn pushes_word(code: Code) -> bool {
    matches!(
        code,
        Code::Push_r64
            | Code::Push_rm64
            | Code::Pushq_imm8
            | Code::Pushq_imm32
            | Code::Push_r32
            | Code::Push_rm32
            | Code::Pushd_imm8
            | Code::Pushd_imm32
    )
}

/// Jcc with a target of the mode's full size.
fn is_jcc(code: Code) -> bool {
    code.is_jcc_short_or_near() && !format!("{code:?}").ends_with("_16")
}

/// Integer instructions without effects beyond registers, flags and their operand.
fn is_harmless_integer(i: &Instruction) -> bool {
    use Mnemonic as M;
    match i.mnemonic() {
        // Of general registers: segment, control and debug registers have forms of their own.
        M::Mov => !(0..i.op_count())
            .any(|n| i.op_kind(n) == OpKind::Register && !i.op_register(n).is_gpr()),
        M::Bt | M::Bts | M::Btr | M::Btc => true,
        // AMD processors read 32 bits: more than was checked.
        M::Movsxd => i.code() != Code::Movsxd_r16_rm16,
        M::Movzx
        | M::Movsx
        | M::Add
        | M::Or
        | M::Adc
        | M::Sbb
        | M::And
        | M::Sub
        | M::Xor
        | M::Cmp
        | M::Test
        | M::Inc
        | M::Dec
        | M::Neg
        | M::Not
        | M::Mul
        | M::Imul
        | M::Shl
        | M::Sal
        | M::Shr
        | M::Sar
        | M::Rol
        | M::Ror
        | M::Rcl
        | M::Rcr
        | M::Shld
        | M::Shrd
        | M::Bsf
        | M::Bsr
        | M::Tzcnt
        | M::Lzcnt
        | M::Popcnt
        | M::Andn
        | M::Bextr
        | M::Blsi
        | M::Blsmsk
        | M::Blsr
        | M::Bzhi
        | M::Pdep
        | M::Pext
        | M::Rorx
        | M::Sarx
        | M::Shlx
        | M::Shrx
        | M::Mulx
        | M::Adcx
        | M::Adox
        | M::Crc32
        | M::Movbe
        | M::Bswap
        | M::Seta
        | M::Setae
        | M::Setb
        | M::Setbe
        | M::Sete
        | M::Setg
        | M::Setge
        | M::Setl
        | M::Setle
        | M::Setne
        | M::Setno
        | M::Setnp
        | M::Setns
        | M::Seto
        | M::Setp
        | M::Sets
        | M::Cmova
        | M::Cmovae
        | M::Cmovb
        | M::Cmovbe
        | M::Cmove
        | M::Cmovg
        | M::Cmovge
        | M::Cmovl
        | M::Cmovle
        | M::Cmovne
        | M::Cmovno
        | M::Cmovnp
        | M::Cmovns
        | M::Cmovo
        | M::Cmovp
        | M::Cmpxchg8b
        | M::Cmovs
        | M::Cmpxchg
        | M::Xadd
        | M::Xchg
        | M::Cbw
        | M::Cwde
        | M::Cdqe
        | M::Cwd
        | M::Cdq
        | M::Cqo
        | M::Clc
        | M::Stc
        | M::Cmc
        | M::Lahf
        | M::Sahf
        | M::Movnti
        | M::Mfence
        | M::Lfence
        | M::Sfence => true,
        _ => false,
    }
}

fn is_bit_string(i: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
        && i.op0_kind() == OpKind::Memory
        && i.op1_kind() == OpKind::Register
}

fn bit_string(i: &Instruction) -> Kind {
    if i.op1_register().size() >= 4 {
        Kind::BitString
    } else {
        Kind::Interpret
    }
}

/// Memory operands are ordinary ones, and high bytes need no REX prefix.
fn operands_are_plain(i: &Instruction) -> bool {
    if i.op0_kind() == OpKind::Memory && i.mnemonic() == Mnemonic::Pop {
        return false;
    }
    let mut high = false;
    let mut rex = false;
    for n in 0..i.op_count() {
        match i.op_kind(n) {
            OpKind::Register => {
                let r = i.op_register(n);
                if r.is_segment_register() {
                    return false;
                }
                high |= matches!(r, Register::AH | Register::CH | Register::DH | Register::BH);
                rex |= r.is_gpr() && r.full_register().number() >= 8
                    || r.full_register() == Register::RSP && r.is_gpr()
                    || matches!(r, Register::SIL | Register::DIL | Register::BPL)
                    || r.is_gpr64();
            }
            OpKind::MemorySegSI
            | OpKind::MemorySegESI
            | OpKind::MemorySegRSI
            | OpKind::MemorySegDI
            | OpKind::MemorySegEDI
            | OpKind::MemorySegRDI
            | OpKind::MemoryESDI
            | OpKind::MemoryESEDI
            | OpKind::MemoryESRDI => return false,
            _ => {}
        }
    }
    !(high && rex)
}

/// Features of integer instructions that the host may lack; FP and SIMD forms
/// are checked by `x86_native::form_on`.
fn host_has(host: &HostFeatures, f: CpuidFeature) -> bool {
    use CpuidFeature as F;
    let may_lack = matches!(
        f,
        F::BMI1 | F::BMI2 | F::LZCNT | F::POPCNT | F::ADX | F::MOVBE | F::SSE4_2
    );
    !may_lack || host.has(f)
}

#[cfg(test)]
mod tests;
