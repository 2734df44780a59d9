//! Which instructions the guest has: those that its CPUID promises, and those that cannot be withheld
//! ([`Features::executes`]).
//!
//! An instruction that needs a feature the guest does not have is #UD, except
//! the hints that older processors execute as NOPs (SDM vol. 2, table 2-1 of
//! reserved NOP space: 0F 0D, 0F 18 to 0F 1F).

use iced_x86::{Code, CpuidFeature, DecoderOptions, Instruction, Mnemonic};
use x86_cpu::{Feature, Features};

/// Returns decoder options that depend on CPUID: encodings that have another meaning on processors without the feature.
pub fn decoder_options(f: &Features) -> u32 {
    let mut options = DecoderOptions::NONE;
    if f.has(Feature::Amd) {
        options |= DecoderOptions::AMD;
    }
    if !f.executes(Feature::Wbnoinvd) {
        options |= DecoderOptions::NO_WBNOINVD;
    }
    if !f.executes(Feature::Bmi1) {
        options |= DecoderOptions::NO_MPFX_0FBC;
    }
    if !f.executes(Feature::Lzcnt) && !f.executes(Feature::Abm) {
        options |= DecoderOptions::NO_MPFX_0FBD;
    }
    if !f.executes(Feature::LahfLm) {
        options |= DecoderOptions::NO_LAHF_SAHF_64;
    }
    options
}

/// True if the guest has the instruction.
pub fn is_available(i: &Instruction, f: &Features) -> bool {
    use Code::{Reservednop_rm16_r16_0F0D, Reservednop_rm32_r32_0F0D, Reservednop_rm64_r64_0F0D};
    if matches!(
        i.code(),
        Reservednop_rm16_r16_0F0D | Reservednop_rm32_r32_0F0D | Reservednop_rm64_r64_0F0D
    ) {
        // PREFETCHW without a memory operand.
        return !f.has(Feature::Amd);
    }
    if matches!(
        i.mnemonic(),
        Mnemonic::Prefetch
            | Mnemonic::Prefetchw
            | Mnemonic::Prefetchwt1
            | Mnemonic::Prefetchnta
            | Mnemonic::Prefetcht0
            | Mnemonic::Prefetcht1
            | Mnemonic::Prefetcht2
            | Mnemonic::Prefetchit0
            | Mnemonic::Prefetchit1
            | Mnemonic::Cldemote
            | Mnemonic::Endbr32
            | Mnemonic::Endbr64
            | Mnemonic::Rdsspd
            | Mnemonic::Rdsspq
            | Mnemonic::Vmcall
            | Mnemonic::Vmmcall
            | Mnemonic::Vmgexit
            | Mnemonic::Monitor
            | Mnemonic::Mwait
    ) {
        return true;
    }
    i.cpuid_features().iter().all(|&c| has(c, f))
}

fn has(c: CpuidFeature, f: &Features) -> bool {
    use CpuidFeature as C;
    let feature = match c {
        C::INTEL8086
        | C::INTEL186
        | C::INTEL286
        | C::INTEL386
        | C::INTEL486
        | C::X64
        | C::CPUID
        | C::MULTIBYTENOP
        | C::PAUSE
        | C::RDPMC
        | C::SMM
        // Without TSX the HLE prefixes are ignored.
        | C::HLE => return true,
        C::ADX => Feature::Adx,
        C::AES | C::AESKLE => Feature::Aes,
        C::AVX => Feature::Avx,
        C::AVX2 => Feature::Avx2,
        C::AVX512F => Feature::Avx512f,
        C::AVX_VNNI => Feature::AvxVnni,
        C::BMI1 => Feature::Bmi1,
        C::BMI2 => Feature::Bmi2,
        C::CLFLUSHOPT => Feature::Clflushopt,
        C::CLFSH => Feature::Clfsh,
        C::CLWB => Feature::Clwb,
        C::CLZERO => Feature::Clzero,
        C::CMOV => Feature::Cmov,
        C::CMPXCHG16B => Feature::Cx16,
        C::CX8 => Feature::Cx8,
        C::F16C => Feature::F16c,
        C::FMA => Feature::Fma,
        C::FMA4 => Feature::Fma4,
        C::FPU | C::FPU287 | C::FPU387 => Feature::Fpu,
        C::FSGSBASE => Feature::Fsgsbase,
        C::FXSR => Feature::Fxsr,
        C::GFNI => Feature::Gfni,
        C::INVPCID => Feature::Invpcid,
        C::LZCNT => return f.executes(Feature::Lzcnt) || f.executes(Feature::Abm),
        C::MMX => Feature::Mmx,
        C::MONITOR => Feature::Monitor,
        C::MOVBE => Feature::Movbe,
        C::MOVDIR64B => Feature::Movdir64b,
        C::MOVDIRI => Feature::Movdiri,
        C::MSR => Feature::Msr,
        C::PCLMULQDQ => Feature::Pclmulqdq,
        C::PKU => Feature::Pku,
        C::POPCNT => Feature::Popcnt,
        C::RDPID => Feature::Rdpid,
        C::RDRAND => Feature::Rdrand,
        C::RDSEED => Feature::Rdseed,
        C::RDTSCP => Feature::Rdtscp,
        C::SEP => Feature::Sep,
        C::SERIALIZE => Feature::Serialize,
        C::SHA => Feature::Sha,
        C::SMAP => Feature::Smap,
        C::SSE => Feature::Sse,
        C::SSE2 => Feature::Sse2,
        C::SSE3 => Feature::Sse3,
        C::SSE4_1 => Feature::Sse41,
        C::SSE4_2 => Feature::Sse42,
        C::SSE4A => Feature::Sse4a,
        C::SSSE3 => Feature::Ssse3,
        C::SYSCALL => Feature::Syscall,
        C::TBM => Feature::Tbm,
        C::TSC => Feature::Tsc,
        C::VAES => Feature::Vaes,
        C::VPCLMULQDQ => Feature::Vpclmulqdq,
        C::WBNOINVD => Feature::Wbnoinvd,
        C::XOP => Feature::Xop,
        C::XSAVE => Feature::Xsave,
        C::XSAVEC => Feature::Xsavec,
        C::XSAVEOPT => Feature::Xsaveopt,
        C::XSAVES => Feature::Xsaves,
        _ => return false,
    };
    f.executes(feature)
}
