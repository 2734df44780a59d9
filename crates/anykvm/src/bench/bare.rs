//! Guests of a few instructions, without a kernel, which measure single events.

use anykvm_ioctls::{Kvm, VcpuFd, VmFd};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress};

use crate::error::BootError;
use crate::memory::{self, GuestMemory};

/// Address of the code.
const CODE: u64 = 0x1000;
/// Page tables of 64-bit guests: the first 2 MiB, by one large page.
const TABLES: u64 = 0x2000;
/// Their page directory.
pub(super) const PAGE_DIRECTORY: u64 = TABLES + 0x2000;
/// Where there is no RAM: 1 MiB.
pub(super) const DEVICE: u32 = 0x10_0000;
pub(super) const RAM: u64 = 0x80000;

/// The mode of the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Flat protected mode.
    Flat32,
    /// Long mode.
    Long,
}

/// A guest with one vCPU at the start of its code, with interrupts off.
pub(super) struct Bare {
    pub(super) vcpu: VcpuFd,
    pub(super) vm: VmFd,
    pub(super) ram: &'static GuestMemory,
}

impl Bare {
    pub(super) fn new(mode: Mode, irqchip: bool, code: &[u8]) -> Result<Self, BootError> {
        Self::sized(mode, irqchip, code, RAM)
    }

    /// Makes a guest with so much RAM.
    pub(super) fn sized(
        mode: Mode,
        irqchip: bool,
        code: &[u8],
        size: u64,
    ) -> Result<Self, BootError> {
        let kvm = Kvm::new().map_err(BootError::kvm("opening KVM"))?;
        let vm = kvm.create_vm().map_err(BootError::kvm("KVM_CREATE_VM"))?;
        if irqchip {
            vm.create_irq_chip()
                .map_err(BootError::kvm("KVM_CREATE_IRQCHIP"))?;
        }
        let ram: &'static GuestMemory = Box::leak(Box::new(memory::allocate(size)?));
        let write = |at: u64, bytes: &[u8]| {
            ram.write_slice(bytes, GuestAddress(at))
                .map_err(BootError::guest("code"))
        };
        write(CODE, code)?;
        let (present, large_global) = (3u64, 0x180);
        write(TABLES, &((TABLES + 0x1000) | present).to_le_bytes())?;
        write(TABLES + 0x1000, &(PAGE_DIRECTORY | present).to_le_bytes())?;
        write(PAGE_DIRECTORY, &(present | large_global).to_le_bytes())?;
        vm.set_static_memory(ram)
            .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
        let vcpu = vm
            .create_vcpu(0)
            .map_err(BootError::kvm("KVM_CREATE_VCPU"))?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
        vcpu.set_cpuid2(&cpuid)
            .map_err(BootError::kvm("KVM_SET_CPUID2"))?;
        let mut s = vcpu.get_sregs().map_err(BootError::kvm("KVM_GET_SREGS"))?;
        let flat = |segment: &mut kvm_segment| {
            segment.base = 0;
            segment.limit = u32::MAX;
            (segment.g, segment.db) = (1, 1);
        };
        for segment in [&mut s.cs, &mut s.ds, &mut s.es, &mut s.ss] {
            flat(segment);
        }
        s.cr0 |= 1;
        if mode == Mode::Long {
            (s.cs.db, s.cs.l) = (0, 1);
            s.cr0 |= 1 << 31;
            s.cr3 = TABLES;
            s.cr4 |= 1 << 5 | 1 << 9;
            s.efer |= 1 << 8 | 1 << 10;
        }
        vcpu.set_sregs(&s)
            .map_err(BootError::kvm("KVM_SET_SREGS"))?;
        let start = kvm_regs {
            rip: CODE,
            rflags: 2,
            rsp: RAM,
            ..Default::default()
        };
        vcpu.set_regs(&start)
            .map_err(BootError::kvm("KVM_SET_REGS"))?;
        Ok(Self { vcpu, vm, ram })
    }
}
