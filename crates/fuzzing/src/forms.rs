//! Instruction forms, listed from the decoder's tables.

use iced_x86::{Code, FlowControl, Mnemonic, OpCodeOperandKind as K};
use x86_native::{host_has, is_fp, oracle::Mode};

use crate::{Generator, Strictness};

/// A group of forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// x87, MMX, SSE and AVX.
    Fp,
    /// All other forms that user code may execute and that only compute.
    Integer,
}

impl Family {
    /// Both families, by the names that the command line and the recordings use.
    pub const ALL: [(&'static str, Self); 2] = [("integer", Self::Integer), ("fp", Self::Fp)];
}

/// Returns all forms of a family that this host executes in a mode.
pub fn forms(family: Family, mode: Mode) -> Vec<Code> {
    let mut generator = Generator::new(mode, Strictness::Exact);
    Code::values()
        .filter(|&c| is_tested(c, family, mode))
        .filter(|&c| c.cpuid_features().iter().all(|&f| host_has(f)))
        .filter(|&c| (0..8).any(|seed| generator.is_encodable(c, seed)))
        .collect()
}

fn is_tested(c: Code, family: Family, mode: Mode) -> bool {
    use Mnemonic as M;
    let op = c.op_code();
    let exists = match mode {
        Mode::Bits64 => op.mode64(),
        Mode::Bits32 => op.mode32(),
    };
    if !op.is_instruction() || !exists || c.is_privileged() {
        return false;
    }
    let flow = match c.flow_control() {
        FlowControl::Next | FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
            true
        }
        FlowControl::IndirectBranch | FlowControl::IndirectCall => {
            matches!(c.mnemonic(), M::Jmp | M::Call) && !is_far(c)
        }
        FlowControl::Call => c.is_call_near(),
        FlowControl::Return => c.mnemonic() == M::Ret,
        FlowControl::Exception => true,
        _ => false,
    };
    if !flow || is_far(c) {
        return false;
    }
    // SSE also introduced instructions that use only general registers.
    let general = matches!(
        c.mnemonic(),
        M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
            | M::Lfence
            | M::Mfence
            | M::Sfence
            | M::Movnti
            | M::Crc32
    );
    let fp = c.cpuid_features().iter().any(|&f| is_fp(f)) && !general;
    fp == (family == Family::Fp) && !is_excluded(c)
}

fn is_far(c: Code) -> bool {
    c.is_jmp_far() || c.is_jmp_far_indirect() || c.is_call_far() || c.is_call_far_indirect()
}

/// Returns true for forms that are left out: state images and the environment with its pointers, which have tests of
/// their own; forms whose results differ from run to run; and forms of segments, descriptors and ports, which a
/// user-mode process does not control.
fn is_excluded(c: Code) -> bool {
    use Mnemonic as M;
    matches!(
        c.mnemonic(),
        M::Fxsave
            | M::Fxsave64
            | M::Fxrstor
            | M::Fxrstor64
            | M::Fnstenv
            | M::Fldenv
            | M::Fnsave
            | M::Frstor
            | M::Fstdw
            | M::Fstsg
            | M::Rdtsc
            | M::Rdtscp
            | M::Rdpid
            | M::Rdrand
            | M::Rdseed
            | M::Cpuid
            | M::Xgetbv
            | M::Rdpmc
            | M::Sgdt
            | M::Sidt
            | M::Sldt
            | M::Smsw
            | M::Str
            | M::Lar
            | M::Lsl
            | M::Verr
            | M::Verw
            | M::Lds
            | M::Les
            | M::Lss
            | M::Lfs
            | M::Lgs
            | M::In
            | M::Out
            | M::Insb
            | M::Insw
            | M::Insd
            | M::Outsb
            | M::Outsw
            | M::Outsd
            | M::Cli
            | M::Sti
            | M::Pause
            | M::Monitor
            | M::Mwait
            | M::Xbegin
            | M::Xabort
            | M::Prefetchit0
            | M::Prefetchit1
    ) || matches!(
        c,
        Code::Mov_Sreg_rm16 | Code::Mov_Sreg_r32m16 | Code::Mov_Sreg_r64m16
    ) || c.mnemonic() == M::Pop
        && matches!(
            c.op_code().op0_kind(),
            K::es | K::ss | K::ds | K::fs | K::gs
        )
}
