//! The table of instructions: what the translator does with each form, and why that is safe.
//!
//! A form that is not listed is left to the interpreter. [`Lowering::Copy`] is for instructions whose only effects are
//! on general registers, arithmetic flags, FP and SIMD registers and their one memory operand, and that can fault only
//! through that operand: they are executed as they are, with registers renamed and the operand replaced.

use iced_x86::{Code, CpuidFeature, EncodingKind, Instruction, Mnemonic, OpKind, Register};
use x86_native::HostFeatures;

mod form;
mod in_mode;
mod in_segments;
mod kind;

pub use form::{Effect, Form, Forms, Shape};
pub(crate) use in_mode::kind_of;
pub(crate) use in_segments::{has_short_address, has_short_words, is_short, pointer_segment};
pub use kind::Lowering;

use super::{narrow, string};

/// Returns the lowering of an instruction whose form has the lowering `kind`. `long`: the instruction is of 64-bit
/// code, else of 32-bit code with flat segments.
pub(crate) fn of(kind: Lowering, i: &Instruction, long: bool) -> Lowering {
    match kind {
        _ if !long && !narrow::is_plain(i) => Lowering::Interpret,
        Lowering::Gather | Lowering::MaskedMove if !long => Lowering::Interpret,
        Lowering::Copy if is_bit_string(i) => bit_string(i),
        Lowering::String if !string::is_plain(i, long) => Lowering::Interpret,
        Lowering::FromControl
            if !matches!(
                i.op1_register(),
                Register::CR0 | Register::CR2 | Register::CR3 | Register::CR4
            ) =>
        {
            Lowering::Interpret
        }
        Lowering::LoadSegment if matches!(i.op0_register(), Register::CS | Register::SS) => {
            Lowering::Interpret
        }
        Lowering::ToCr0 if i.op0_register() == Register::CR3 && long => Lowering::ToCr3,
        Lowering::ToCr0 if i.op0_register() != Register::CR0 => Lowering::Interpret,
        Lowering::Pop if long && i.op0_kind() == OpKind::Memory => Lowering::PopMemory,
        Lowering::Copy | Lowering::CopyFp | Lowering::CopyFpAligned | Lowering::Pop
            if !operands_are_plain(i) =>
        {
            Lowering::Interpret
        }
        kind => kind,
    }
}

/// Returns true if [`of`] may return something else than `kind` for 64-bit code. `names`: the kinds of the form's
/// operands.
fn is_checked<I: Iterator<Item = String>>(
    kind: Lowering,
    i: &Instruction,
    mut names: impl FnMut() -> I,
) -> bool {
    match kind {
        Lowering::String | Lowering::FromControl | Lowering::ToCr0 | Lowering::LoadSegment => true,
        Lowering::Pop => i.code() != Code::Pop_r64,
        Lowering::Copy | Lowering::CopyFp | Lowering::CopyFpAligned => {
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

/// Returns the lowering of a form that moves words of the mode's full size between the stack and general registers or
/// memory.
fn stack_form(code: Code) -> Option<Lowering> {
    use Code as C;
    Some(match code {
        _ if pushes_word(code) => Lowering::Push,
        C::Pop_r64 | C::Pop_rm64 | C::Pop_r32 | C::Pop_rm32 => Lowering::Pop,
        C::Leaveq | C::Leaved => Lowering::Leave,
        C::Enterq_imm16_imm8 | C::Enterd_imm16_imm8 => Lowering::Enter,
        C::Pushad => Lowering::PushAll,
        C::Popad => Lowering::PopAll,
        _ => return None,
    })
}

/// Returns the lowering of a form that saves or loads an image of FP state.
fn image_form(code: Code) -> Option<Lowering> {
    use Mnemonic as M;
    Some(match code.mnemonic() {
        M::Fxsave64 | M::Xsave64 | M::Xsaveopt64 | M::Xsavec64 | M::Xsaves64 => Lowering::SaveState,
        M::Fxrstor64 | M::Xrstor64 | M::Xrstors64 => Lowering::RestoreState,
        _ => return None,
    })
}

/// Returns the lowering of a form, whatever its operands.
fn form(i: &Instruction, host: &HostFeatures) -> Lowering {
    use Mnemonic as M;
    let code = i.code();
    if !code.cpuid_features().iter().all(|f| host_has(host, *f)) {
        return Lowering::Interpret;
    }
    if let Some(kind) = stack_form(code).or_else(|| image_form(code)) {
        return kind;
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
        | M::Prefetch => Lowering::Nop,
        M::Lea => Lowering::Lea,
        M::Xlatb => Lowering::TranslateByte,
        M::Clflush | M::Clflushopt | M::Clwb => Lowering::FlushLine,
        M::Rdpid => Lowering::ProcessorId,
        M::Xgetbv => Lowering::ExtendedControl,
        M::Fninit => Lowering::X87Environment,
        M::Fnstenv | M::Fldenv if i.memory_size().size() == 28 => Lowering::X87Environment,
        M::Div => Lowering::Div,
        M::Idiv => Lowering::Idiv,
        M::Jmp
            if matches!(
                code,
                Code::Jmp_rel8_64 | Code::Jmp_rel32_64 | Code::Jmp_rel8_32 | Code::Jmp_rel32_32
            ) =>
        {
            Lowering::Jmp
        }
        M::Jmp if matches!(code, Code::Jmp_rm64 | Code::Jmp_rm32) => Lowering::JmpIndirect,
        M::Call if matches!(code, Code::Call_rel32_64 | Code::Call_rel32_32) => Lowering::Call,
        M::Call if matches!(code, Code::Call_rm64 | Code::Call_rm32) => Lowering::CallIndirect,
        M::Ret if is_near_return(code) => Lowering::Ret,
        _ if is_counted(code) && i.op0_kind() != OpKind::NearBranch16 => Lowering::Counted,
        _ if is_jcc(code) => Lowering::Jcc,
        M::Cmpxchg16b => Lowering::CopyAligned,
        M::Mov
            if matches!(
                code,
                Code::Mov_rm16_Sreg | Code::Mov_r32m16_Sreg | Code::Mov_r64m16_Sreg
            ) =>
        {
            Lowering::FromSegment
        }
        _ if in_segments::loads_segment(code) => Lowering::LoadSegment,
        M::Push if in_segments::pushes_segment(code) => Lowering::PushSegment,
        M::Verr | M::Verw | M::Lar | M::Lsl => Lowering::AskAboutSelector,
        M::Mov if matches!(code, Code::Mov_r64_cr | Code::Mov_r32_cr) => Lowering::FromControl,
        M::Mov if matches!(code, Code::Mov_cr_r64 | Code::Mov_cr_r32) => Lowering::ToCr0,
        M::Clts => Lowering::Clts,
        M::Rdfsbase | M::Rdgsbase | M::Wrfsbase | M::Wrgsbase
            if matches!(
                code,
                Code::Rdfsbase_r64 | Code::Rdgsbase_r64 | Code::Wrfsbase_r64 | Code::Wrgsbase_r64
            ) =>
        {
            Lowering::SegmentBase
        }
        M::Sgdt | M::Sidt if stores_table(code) => Lowering::StoreTable,
        M::Cld => Lowering::Cld,
        M::Std => Lowering::Std,
        M::Pause => Lowering::Pause,
        _ if i.is_string_instruction() => Lowering::String,
        M::Rdtsc | M::Rdtscp => Lowering::Rdtsc,
        M::Rdpmc => Lowering::Rdpmc,
        M::Pushfq | M::Pushfd => Lowering::Pushf,
        M::Popfq | M::Popfd => Lowering::Popf,
        M::Cli => Lowering::Cli,
        M::Sti => Lowering::Sti,
        M::Swapgs => Lowering::Swapgs,
        M::Syscall => Lowering::Syscall,
        M::Sysretq => Lowering::Sysret,
        M::Iretq => Lowering::InterruptReturn,
        M::Stac | M::Clac => Lowering::Ac,
        M::Rdpkru | M::Wrpkru => Lowering::KeyRights,
        _ if is_harmless_integer(i) => Lowering::Copy,
        M::Vzeroupper | M::Vzeroall | M::Fnstsw | M::Fnstcw | M::Fnclex => Lowering::CopyFp,
        M::Ldmxcsr | M::Vldmxcsr | M::Fldcw => Lowering::LoadFpControl,
        M::Stmxcsr | M::Vstmxcsr => Lowering::CopyFp,
        _ if is_gather(i) && host.has(CpuidFeature::AVX2) => Lowering::Gather,
        M::Vmaskmovps | M::Vmaskmovpd if host.has(CpuidFeature::AVX) => Lowering::MaskedMove,
        M::Vpmaskmovd | M::Vpmaskmovq if host.has(CpuidFeature::AVX2) => Lowering::MaskedMove,
        _ if x86_native::form_on(i, host).is_some() => {
            if x86_native::must_be_aligned(i) {
                Lowering::CopyFpAligned
            } else {
                Lowering::CopyFp
            }
        }
        _ => Lowering::Interpret,
    }
}

/// Returns true for the gathers of AVX2.
fn is_gather(i: &Instruction) -> bool {
    i.code().encoding() == EncodingKind::VEX && i.is_vsib()
}

/// Returns true for LOOP, JCXZ and their kin.
fn is_counted(code: Code) -> bool {
    code.is_loop() || code.is_loopcc() || code.is_jcx_short()
}

/// Returns true for RET with an address of the mode's full size.
fn is_near_return(code: Code) -> bool {
    matches!(
        code,
        Code::Retnq | Code::Retnq_imm16 | Code::Retnd | Code::Retnd_imm16
    )
}

/// Returns true for SGDT and SIDT with a base of the mode's full size.
fn stores_table(code: Code) -> bool {
    matches!(
        code,
        Code::Sgdt_m1664 | Code::Sidt_m1664 | Code::Sgdt_m1632 | Code::Sidt_m1632
    )
}

/// Returns true for PUSH of a value of the mode's full size.
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

/// Returns true for Jcc with a target of the mode's full size.
fn is_jcc(code: Code) -> bool {
    code.is_jcc_short_or_near() && !format!("{code:?}").ends_with("16")
}

/// Returns true for integer instructions without effects beyond registers, flags and their operand.
fn is_harmless_integer(i: &Instruction) -> bool {
    use Mnemonic as M;
    match i.mnemonic() {
        // Moves between general registers and memory: segment, control and debug registers have forms of their own.
        M::Mov => !(0..i.op_count())
            .any(|n| i.op_kind(n) == OpKind::Register && !i.op_register(n).is_gpr()),
        // AMD processors read 32 bits, which is more than was checked.
        M::Movsxd => i.code() != Code::Movsxd_r16_rm16,
        m => is_arithmetic(m) || is_conditional(m) || is_move(m),
    }
}

/// Returns true for arithmetic, logic, shifts and bits.
const fn is_arithmetic(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Bts
            | M::Btr
            | M::Btc
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
            | M::Bt
    )
}

/// Returns true for SETcc and CMOVcc.
const fn is_conditional(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Seta
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
            | M::Cmovs
    )
}

/// Returns true for moves, conversions, exchanges, flags and fences.
const fn is_move(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Movzx
            | M::Movsx
            | M::Movbe
            | M::Bswap
            | M::Cmpxchg8b
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
            | M::Sfence
    )
}

fn is_bit_string(i: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
        && i.op0_kind() == OpKind::Memory
        && i.op1_kind() == OpKind::Register
}

fn bit_string(i: &Instruction) -> Lowering {
    if i.op1_register().size() >= 4 {
        Lowering::BitString
    } else {
        Lowering::Interpret
    }
}

/// Returns true if memory operands are ordinary ones, and no instruction names a high byte beside a register that needs
/// a REX prefix.
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

/// Returns true if the host has the feature, or it is none that the host may lack of integer instructions. FP and SIMD
/// forms are checked by `x86_native::form_on`.
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
