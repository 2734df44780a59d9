//! Interpreted instructions after which translated code can go on at once: mode, mapping and view are what they were.

use iced_x86::{Code, Mnemonic};
use x86_cpu::CpuState;
use x86_defs::{msr, reg, xsave};
use x86_interp::Insn;

/// What an interpreted instruction may change of that which translated code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Anything.
    Any,
    /// Nothing: general registers, arithmetic flags, memory, descriptor tables' addresses. CPUID has code compared; the
    /// bus's epoch changes if that makes engines look for code again.
    Nothing,
    /// ES, DS, FS or GS, or FP state, on which the mode depends. Or nothing, but descriptors are read, as the supervisor
    /// reads them.
    Mode,
    /// What WRMSR changes: nothing with some indexes.
    Msr,
    /// What XRSTOR changes: FP state, on which the mode depends, unless PKRU is loaded.
    XState,
}

impl Change {
    /// Returns what the instruction may change.
    pub(crate) fn of<B>(insn: &Insn<B>) -> Self {
        use Mnemonic as M;
        match insn.code.mnemonic() {
            M::Mov => moved(insn),
            M::Pop => popped(insn.code),
            M::Lds | M::Les | M::Lfs | M::Lgs => Self::Mode,
            M::Lar | M::Lsl | M::Verr | M::Verw => Self::Mode,
            M::Wrmsr => Self::Msr,
            M::Fxrstor | M::Fxrstor64 => Self::Mode,
            M::Xrstor | M::Xrstor64 | M::Xrstors | M::Xrstors64 => Self::XState,
            m if is_general(m) || is_string(m) || is_masked(m) || is_system(m) || is_save(m) => {
                Self::Nothing
            }
            _ => Self::Any,
        }
    }

    /// Returns true if nothing but the mode changes when the instruction is executed in this state.
    #[inline]
    pub(crate) fn is_quiet(self, cpu: &CpuState) -> bool {
        match self {
            Self::Any => false,
            Self::Nothing | Self::Mode => true,
            Self::XState => cpu.gpr[reg::RAX] & xsave::PKRU == 0,
            Self::Msr => {
                // In other modes the bases of FS and GS are part of the mode.
                cpu.is_64bit()
                    && matches!(
                        cpu.gpr[reg::RCX] as u32,
                        msr::IA32_FS_BASE
                            | msr::IA32_GS_BASE
                            | msr::IA32_KERNEL_GS_BASE
                            | msr::IA32_TSC_DEADLINE
                    )
            }
        }
    }
}

/// Returns what MOV changes by its destination.
fn moved<B>(insn: &Insn<B>) -> Change {
    use Code as C;
    match insn.code {
        C::Mov_Sreg_rm16 | C::Mov_Sreg_r32m16 | C::Mov_Sreg_r64m16 => Change::Mode,
        // The task priority.
        C::Mov_cr_r32 | C::Mov_cr_r64 if insn.dst == 8 => Change::Nothing,
        C::Mov_cr_r32 | C::Mov_cr_r64 | C::Mov_dr_r32 | C::Mov_dr_r64 => Change::Any,
        _ => Change::Nothing,
    }
}

/// Returns what POP changes by its destination.
const fn popped(code: Code) -> Change {
    use Code as C;
    match code {
        C::Popw_ES
        | C::Popd_ES
        | C::Popw_SS
        | C::Popd_SS
        | C::Popw_DS
        | C::Popd_DS
        | C::Popw_FS
        | C::Popd_FS
        | C::Popq_FS
        | C::Popw_GS
        | C::Popd_GS
        | C::Popq_GS => Change::Mode,
        _ => Change::Nothing,
    }
}

/// Returns true for instructions that change general registers, arithmetic flags or memory.
const fn is_general(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Aaa
            | M::Aad
            | M::Aam
            | M::Aas
            | M::Adc
            | M::Add
            | M::And
            | M::Arpl
            | M::Bound
            | M::Bsf
            | M::Bsr
            | M::Bswap
            | M::Bt
            | M::Btc
            | M::Btr
            | M::Bts
            | M::Cmp
            | M::Cmpxchg
            | M::Daa
            | M::Das
            | M::Dec
            | M::Div
            | M::Enter
            | M::Idiv
            | M::Imul
            | M::Inc
            | M::Lahf
            | M::Lea
            | M::Leave
            | M::Mul
            | M::Neg
            | M::Not
            | M::Or
            | M::Popa
            | M::Popad
            | M::Push
            | M::Pusha
            | M::Pushad
            | M::Pushf
            | M::Pushfd
            | M::Rcl
            | M::Rcr
            | M::Rol
            | M::Ror
            | M::Salc
            | M::Sar
            | M::Sbb
            | M::Shl
            | M::Shld
            | M::Shr
            | M::Shrd
            | M::Sub
            | M::Test
            | M::Xadd
            | M::Xchg
            | M::Xlatb
            | M::Xor
    )
}

/// Returns true for instructions that write FP state to memory.
const fn is_save(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Fxsave
            | M::Fxsave64
            | M::Xsave
            | M::Xsave64
            | M::Xsavec
            | M::Xsavec64
            | M::Xsaveopt
            | M::Xsaveopt64
            | M::Xsaves
            | M::Xsaves64
    )
}

/// Returns true for string instructions, and the vector instructions that share their names.
const fn is_string(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Cmpsb
            | M::Cmpsd
            | M::Cmpsq
            | M::Cmpsw
            | M::Lodsb
            | M::Lodsd
            | M::Lodsq
            | M::Lodsw
            | M::Movsb
            | M::Movsd
            | M::Movsq
            | M::Movsw
            | M::Scasb
            | M::Scasd
            | M::Scasq
            | M::Scasw
            | M::Stosb
            | M::Stosd
            | M::Stosq
            | M::Stosw
    )
}

/// Returns true for vector instructions whose accesses depend on a mask.
const fn is_masked(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Maskmovdqu
            | M::Vgatherdpd
            | M::Vgatherdps
            | M::Vgatherqpd
            | M::Vgatherqps
            | M::Vmaskmovdqu
            | M::Vmaskmovpd
            | M::Vmaskmovps
            | M::Vpgatherdd
            | M::Vpgatherdq
            | M::Vpgatherqd
            | M::Vpgatherqq
            | M::Vpmaskmovd
            | M::Vpmaskmovq
    )
}

/// Returns true for instructions that read the system's state, or change descriptor tables' addresses or the caches.
const fn is_system(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Clflush
            | M::Clflushopt
            | M::Clwb
            | M::Cpuid
            | M::Invd
            | M::Lgdt
            | M::Lidt
            | M::Lldt
            | M::Rdmsr
            | M::Rdpid
            | M::Rdtsc
            | M::Rdtscp
            | M::Sgdt
            | M::Sidt
            | M::Sldt
            | M::Smsw
            | M::Str
            | M::Wbinvd
            | M::Wbnoinvd
            | M::Xgetbv
    )
}
