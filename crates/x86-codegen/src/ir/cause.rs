//! [`Cause`]: why instructions are left to the interpreter.

use iced_x86::{Code, Mnemonic};

/// Why an instruction is left to the interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The instruction is translated, and its code has given up: a device, a fault, a write to code, a guard.
    Slow,
    /// String instructions.
    String,
    /// IN and OUT.
    Port,
    /// Control registers, MSRs, descriptor tables, TLB.
    System,
    /// IRET, INT, far transfers, HLT.
    Transfer,
    /// FP and SIMD, their state included.
    Fp,
    /// Anything else.
    Other,
}

impl Cause {
    /// Names of the causes, in the order of `x86_jit::Stats::causes`.
    pub const NAMES: [&str; 7] = [
        "slow", "string", "port", "system", "transfer", "fp", "other",
    ];

    pub(crate) fn of(code: Code) -> Self {
        use Mnemonic as M;
        match code.mnemonic() {
            M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => {
                Self::Port
            }
            M::Rdmsr
            | M::Wrmsr
            | M::Cpuid
            | M::Invlpg
            | M::Invpcid
            | M::Lgdt
            | M::Lidt
            | M::Lldt
            | M::Ltr
            | M::Wbinvd
            | M::Clts
            | M::Lmsw
            | M::Xsetbv
            | M::Xgetbv
            | M::Rdtsc
            | M::Rdtscp
            | M::Wrfsbase
            | M::Wrgsbase
            | M::Rdfsbase
            | M::Rdgsbase
            | M::Swapgs
            | M::Rdpmc
            | M::Vmcall
            | M::Vmmcall
            | M::Vmgexit
            | M::Sgdt
            | M::Sidt
            | M::Cli
            | M::Sti
            | M::Stac
            | M::Clac
            | M::Pause => Self::System,
            M::Mov
                if format!("{code:?}").contains("_cr") || format!("{code:?}").contains("_dr") =>
            {
                Self::System
            }
            M::Iret
            | M::Iretd
            | M::Iretq
            | M::Int
            | M::Int3
            | M::Retf
            | M::Hlt
            | M::Syscall
            | M::Sysret
            | M::Sysretq
            | M::Sysenter
            | M::Sysexit
            | M::Ud2 => Self::Transfer,
            M::Movsb
            | M::Movsw
            | M::Movsq
            | M::Stosb
            | M::Stosw
            | M::Stosd
            | M::Stosq
            | M::Lodsb
            | M::Lodsw
            | M::Lodsd
            | M::Lodsq
            | M::Scasb
            | M::Scasw
            | M::Scasd
            | M::Scasq
            | M::Cmpsb
            | M::Cmpsw
            | M::Cmpsq => Self::String,
            _ if code.cpuid_features().iter().any(|f| {
                let name = format!("{f:?}");
                ["FPU", "SSE", "AVX", "XSAVE", "FXSR", "MMX"]
                    .iter()
                    .any(|p| name.contains(p))
            }) =>
            {
                Self::Fp
            }
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes() {
        let rows = [
            (Code::Out_imm8_AL, Cause::Port),
            (Code::Mov_cr_r64, Cause::System),
            (Code::Mov_rm64_r64, Cause::Other),
            (Code::Iretq, Cause::Transfer),
            (Code::Stosq_m64_RAX, Cause::String),
            (Code::Fxrstor64_m512byte, Cause::Fp),
            (Code::Fld_m32fp, Cause::Fp),
        ];
        for (code, cause) in rows {
            assert_eq!(Cause::of(code), cause, "{code:?}");
        }
    }
}
