//! Which instructions may be executed natively: an allow-list of forms.
//!
//! A form is allowed if its CPUID feature is one of the computational FP/SIMD
//! features, every operand is a vector, MMX, x87 or general register, an
//! immediate, or *the* memory operand, and its mnemonic is not one of those
//! that use memory or state beyond their operands. What remains cannot transfer
//! control, trap to the kernel, or reach host memory other than the operand
//! buffer: the property that everything else in this crate rests on.

use crate::{
    features::{HostFeatures, is_amd, is_fp, is_x87},
    flags::DECODED_ARITH,
};

use iced_x86::{
    Code, CpuidFeature, EncodingKind, FlowControl, Instruction, Mnemonic, OpCodeOperandKind as K,
    OpKind, Register,
};

/// How a form is encoded and which state it works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// x87 registers.
    X87,
    /// MMX registers (aliased to x87), possibly XMM too.
    Mmx,
    /// Legacy SSE encoding: XMM only, upper halves unchanged.
    Sse,
    /// VEX encoding: upper halves zeroed.
    Vex,
}

/// An allowed form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// State it works on.
    pub class: Class,
    /// True if the instruction reads MXCSR's control bits or sets its flags.
    pub uses_mxcsr: bool,
    /// True if the instruction sets arithmetic flags.
    pub writes_flags: bool,
    /// True if the instruction reads arithmetic flags.
    pub reads_flags: bool,
}

/// Returns the form of an instruction. `None` if it must not be executed natively, or this host cannot execute it.
pub fn form(i: &Instruction) -> Option<Form> {
    form_on(i, &HostFeatures::detected())
}

/// Returns the same for a host with these features.
pub fn form_on(i: &Instruction, host: &HostFeatures) -> Option<Form> {
    let code = i.code();
    let op = code.op_code();
    let features = code.cpuid_features();
    let computes = |f| is_fp(f) || f == CpuidFeature::CMOV;
    if !features.iter().all(|&f| computes(f) && host.has(f)) || is_excluded(code.mnemonic()) {
        return None;
    }
    if code.flow_control() != FlowControl::Next || code.is_privileged() || i.has_lock_prefix() {
        return None;
    }
    let mut mmx = false;
    let mut x87 = features.iter().any(|&f| is_x87(f));
    for n in 0..op.op_count() {
        match op.op_kind(n) {
            K::mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 | K::xmm_or_mem => {}
            K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 | K::ymm_or_mem => {}
            K::mm_or_mem if i.op_kind(n) == OpKind::Memory && keeps_x87(code) => {}
            K::mm_reg | K::mm_rm | K::mm_or_mem => mmx = true,
            K::r32_or_mem | K::r64_or_mem | K::r32_reg | K::r64_reg | K::r32_rm | K::r64_rm => {}
            K::r32_reg_mem | K::r64_reg_mem => {}
            K::st0 | K::sti_opcode => x87 = true,
            K::imm8 | K::imm4_m2z => {}
            _ => return None,
        }
    }
    let class = match code.encoding() {
        EncodingKind::Legacy if x87 => Class::X87,
        EncodingKind::Legacy if mmx || code.mnemonic() == Mnemonic::Emms => Class::Mmx,
        EncodingKind::Legacy => Class::Sse,
        EncodingKind::VEX => Class::Vex,
        _ => return None,
    };
    Some(Form {
        class,
        uses_mxcsr: class != Class::X87 && uses_mxcsr(code),
        writes_flags: i.rflags_modified() & DECODED_ARITH != 0,
        reads_flags: i.rflags_read() & DECODED_ARITH != 0,
    })
}

/// Returns true for conversions of packed integers that are MMX instructions with a register operand but not with a
/// memory operand: CVTPI2PD (SDM vol. 2) and, on AMD processors, CVTPI2PS.
fn keeps_x87(code: Code) -> bool {
    match code {
        Code::Cvtpi2pd_xmm_mmm64 => true,
        Code::Cvtpi2ps_xmm_mmm64 => is_amd(),
        _ => false,
    }
}

/// Returns true for mnemonics of the allowed features that use memory beyond one operand (implicit rDI, element-wise
/// masks, vector indices), x87 or MXCSR state in memory images, caches, or integer state only.
fn is_excluded(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Fldcw
            | M::Fnstcw
            | M::Fstcw
            | M::Fnstsw
            | M::Fstsw
            | M::Fldenv
            | M::Fnstenv
            | M::Fstenv
            | M::Fnsave
            | M::Fsave
            | M::Frstor
            | M::Fninit
            | M::Finit
            | M::Fnclex
            | M::Fclex
            | M::Wait
            | M::Fneni
            | M::Feni
            | M::Fndisi
            | M::Fdisi
            | M::Fnsetpm
            | M::Fsetpm
            | M::Ldmxcsr
            | M::Stmxcsr
            | M::Vldmxcsr
            | M::Vstmxcsr
            | M::Maskmovq
            | M::Maskmovdqu
            | M::Vmaskmovdqu
            | M::Vmaskmovps
            | M::Vmaskmovpd
            | M::Vpmaskmovd
            | M::Vpmaskmovq
            | M::Vzeroall
            | M::Vzeroupper
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
            | M::Prefetchnta
            | M::Sfence
            | M::Lfence
            | M::Mfence
            | M::Pause
            | M::Clflush
            | M::Movnti
            | M::Crc32
            | M::Popcnt
            | M::Monitor
            | M::Mwait
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

/// Returns true for SIMD floating-point arithmetic, comparison and conversion. May return true for other instructions,
/// which costs only time.
fn uses_mxcsr(code: Code) -> bool {
    let name = format!("{:?}", code.mnemonic());
    let name = name
        .strip_prefix('V')
        .map_or_else(|| name.to_lowercase(), str::to_lowercase);
    if name.starts_with("cvt") || name.starts_with("fm") || name.starts_with("fnm") {
        return true;
    }
    let suffix = ["ps", "pd", "ss", "sd"].iter().any(|s| name.ends_with(s));
    // Packed-integer names (PABSD …) end like scalar doubles.
    let plain = [
        "p",
        "mov",
        "and",
        "or",
        "xor",
        "shuf",
        "unpck",
        "blend",
        "broadcast",
        "perm",
        "extract",
        "insert",
        "test",
        "rcp",
        "rsqrt",
        "lddqu",
    ];
    suffix && !plain.iter().any(|p| name.starts_with(p))
}

/// Returns the number of a vector register that a stub can load: XMM0–15 and YMM0–15.
pub(crate) fn vector_number(r: Register) -> Option<usize> {
    (r.is_vector_register() && r.number() < 16).then(|| r.number())
}
