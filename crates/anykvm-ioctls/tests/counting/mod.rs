//! Guests of either vendor whose counters overflow into an NMI.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use anykvm_ioctls::VcpuFd;
use iced_x86::{IcedError, code_asm::*};
use kvm_bindings::*;

use crate::{guest::set_msr, long_mode::Machine};

pub(crate) const PERFEVTSEL0: u32 = 0x186;
pub(crate) const PMC0: u32 = 0xc1;
/// IA32_A_PMC0.
pub(crate) const FULL_WIDTH_PMC0: u32 = 0x4c1;
pub(crate) const GLOBAL_STATUS: u32 = 0x38e;
pub(crate) const GLOBAL_CTRL: u32 = 0x38f;
pub(crate) const GLOBAL_OVF_CTRL: u32 = 0x390;
pub(crate) const CORE_SELECT0: u32 = 0xc001_0200;
pub(crate) const CORE_STATUS: u32 = 0xc000_0300;
pub(crate) const PERF_CAPABILITIES: u32 = 0x345;
pub(crate) const DEBUGCTL: u32 = 0x1d9;
/// EN, OS, USR.
pub(crate) const ON: u64 = 0x43_0000;
pub(crate) const INT: u64 = 1 << 20;

/// Where [`handler`] is, what it leaves where, and the tables that lead to it.
const HANDLER: u64 = 0x2000;
const SEEN: u64 = 0x6000;
const TABLES: [u64; 2] = [0xc000, 0xd000];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    Intel,
    Amd,
}

impl Vendor {
    pub(crate) const ALL: [Self; 2] = [Self::Intel, Self::Amd];

    pub(crate) fn select(self, n: u32) -> u32 {
        match self {
            Self::Intel => PERFEVTSEL0 + n,
            Self::Amd => CORE_SELECT0 + 2 * n,
        }
    }
    pub(crate) fn counter(self, n: u32) -> u32 {
        match self {
            Self::Intel => PMC0 + n,
            Self::Amd => CORE_SELECT0 + 1 + 2 * n,
        }
    }
    /// Instructions, branches, conditional ones, returns.
    pub(crate) fn events(self) -> [u64; 4] {
        match self {
            Self::Intel => [0xc0, 0xc4, 0x1c4, 0x8c4],
            Self::Amd => [0xc0, 0xc2, 0xd1, 0xc8],
        }
    }
    pub(crate) fn status(self) -> u32 {
        match self {
            Self::Intel => GLOBAL_STATUS,
            Self::Amd => CORE_STATUS,
        }
    }
    /// A vCPU of this vendor's, whatever the host is.
    pub(crate) fn vcpu(self, m: &Machine, rip: u64) -> VcpuFd {
        let vcpu = m.vcpu(0, rip);
        let mut table = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let name = match self {
            Self::Intel => b"GenuineIntel",
            Self::Amd => b"AuthenticAMD",
        };
        let word = |i: usize| u32::from_le_bytes(name[i..i + 4].try_into().unwrap());
        // Hosts of the other vendor have no such leaf.
        let has_core_counters = table.as_slice().iter().any(|e| e.function == 0x8000_0022);
        if self == Self::Amd && !has_core_counters {
            let leaf = kvm_cpuid_entry2 {
                function: 0x8000_0022,
                ..Default::default()
            };
            table.push(leaf).unwrap();
        }
        for e in table.as_mut_slice() {
            match (e.function, self) {
                (0 | 0x8000_0000, _) => (e.ebx, e.edx, e.ecx) = (word(0), word(4), word(8)),
                (1, Self::Intel) => (e.eax, e.ecx) = (0xa_0655, e.ecx | 1 << 15),
                (1, Self::Amd) => e.eax = 0x00a2_0f12,
                (0xa, Self::Intel) => {
                    (e.eax, e.ebx, e.edx) = (0x0730_0802, 0x58, 1 << 15 | 48 << 5 | 3);
                }
                (0x8000_0001, Self::Amd) => e.ecx |= 1 << 23,
                (0x8000_0022, Self::Amd) => (e.eax, e.ebx) = (1, 6),
                _ => {}
            }
        }
        vcpu.set_cpuid2(&table).unwrap();
        vcpu
    }
}

/// KVM_GET_MSRS of one register.
pub(crate) fn msr(vcpu: &VcpuFd, index: u32) -> u64 {
    let entry = kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1, "{index:#x}");
    msrs.as_slice()[0].data
}

/// Makes the interpreter execute everything, or ends that: the oracle, in the same guest. It does while a breakpoint on
/// I/O is enabled.
pub(crate) fn interpret(vcpu: &VcpuFd, interprets: bool) {
    const DE: u64 = 1 << 3;
    const ENABLED: u64 = 2;
    const ON_IO: u64 = 2 << 16;
    const UNUSED_PORT: u64 = 0xfff0;
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 |= DE;
    vcpu.set_sregs(&sregs).unwrap();
    let mut debug = vcpu.get_debug_regs().unwrap();
    debug.db[0] = UNUSED_PORT;
    debug.dr7 = if interprets { ON_IO | ENABLED } else { 0 };
    vcpu.set_debug_regs(&debug).unwrap();
}

/// IA32_DEBUGCTL.FREEZE_WHILE_SMM, which Linux sets on each of Intel's processors.
pub(crate) fn freeze_in_smm(vcpu: &VcpuFd, freezes: bool) {
    assert!(set_msr(vcpu, DEBUGCTL, u64::from(freezes) << 14));
}

fn handler(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.push(rax)?;
    a.mov(rax, qword_ptr(rsp + 8))?;
    a.mov(qword_ptr(SEEN), rax)?;
    a.inc(qword_ptr(SEEN + 8))?;
    a.mov(qword_ptr(SEEN + 16), r12)?;
    a.mov(qword_ptr(SEEN + 24), rbx)?;
    a.pop(rax)?;
    a.iretq()
}

/// The guest has a handler for NMIs, which notes what [`seen`] returns.
pub(crate) fn handle_nmis(m: &Machine, vcpu: &VcpuFd) {
    handle_nmis_by(m, vcpu, handler);
}

/// The guest has this handler for NMIs.
pub(crate) fn handle_nmis_by(
    m: &Machine,
    vcpu: &VcpuFd,
    handler: fn(&mut CodeAssembler) -> Result<(), IcedError>,
) {
    m.load(HANDLER, handler);
    m.handle_page_faults(vcpu, TABLES, HANDLER);
    let gate = HANDLER | 8 << 16 | 0x8e << 40;
    m.write(TABLES[1] + 2 * 16, &gate.to_le_bytes());
}

/// Counters raise an NMI, once, and none has been seen.
pub(crate) fn route_to_nmi(m: &Machine, vcpu: &VcpuFd) {
    let mut lapic = vcpu.get_lapic().unwrap();
    for (at, value) in [(0xf0, 0x1ff_u32), (0x340, 4 << 8)] {
        for (to, from) in lapic.regs[at..].iter_mut().zip(value.to_le_bytes()) {
            *to = from as _;
        }
    }
    vcpu.set_lapic(&lapic).unwrap();
    m.write(SEEN, &[0; 32]);
}

/// RIP at the last NMI, how many there were, and R12 and RBX at the last one.
pub(crate) fn seen(m: &Machine) -> [u64; 4] {
    [0, 8, 16, 24].map(|at| u64::from_le_bytes(m.read(SEEN + at)))
}
