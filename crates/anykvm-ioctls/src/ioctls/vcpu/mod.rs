//! A vCPU's descriptor, and what KVM_RUN returns.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use kvm_abi::{Errno, Vcpu};
pub use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::*;
use vmm_sys_util::errno;

use crate::ioctls::{Descriptor, KvmCoalescedIoRing, KvmRunWrapper, Result};
use crate::kvm_ioctls::refused;

/// Bytes of a register for KVM_GET_ONE_REG, as its id says.
pub fn reg_size(reg_id: u64) -> usize {
    1 << ((reg_id & KVM_REG_SIZE_MASK) >> KVM_REG_SIZE_SHIFT)
}

/// KVM_EXIT_HYPERCALL.
#[derive(Debug)]
pub struct HypercallExit<'a> {
    /// Number of the call.
    pub nr: u64,
    /// Its arguments.
    pub args: [u64; 6],
    /// The guest's RAX after the call.
    pub ret: &'a mut u64,
    /// Whether the guest was in 64-bit mode.
    pub longmode: u32,
}

/// KVM_EXIT_X86_RDMSR.
#[derive(Debug)]
pub struct ReadMsrExit<'a> {
    /// Not 0 gives the guest #GP.
    pub error: &'a mut u8,
    /// Why the hypervisor did not answer itself.
    pub reason: MsrExitReason,
    /// The MSR.
    pub index: u32,
    /// Its value, from the VMM.
    pub data: &'a mut u64,
}

/// KVM_EXIT_X86_WRMSR.
#[derive(Debug)]
pub struct WriteMsrExit<'a> {
    /// Not 0 gives the guest #GP.
    pub error: &'a mut u8,
    /// Why the hypervisor did not take the write itself.
    pub reason: MsrExitReason,
    /// The MSR.
    pub index: u32,
    /// The value that the guest wrote.
    pub data: u64,
}

bitflags::bitflags! {
    /// Why an MSR access is up to the VMM; also the mask of KVM_CAP_X86_USER_SPACE_MSR.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MsrExitReason: u32 {
        /// No such MSR.
        const Unknown = KVM_MSR_EXIT_REASON_UNKNOWN;
        /// Not this value, or not now.
        const Inval = KVM_MSR_EXIT_REASON_INVAL;
        /// [`crate::VmFd::set_msr_filter`] denies it.
        const Filter = KVM_MSR_EXIT_REASON_FILTER;
    }
}

/// Why [`VcpuFd::run`] returned; borrows the run page where the VMM has to answer.
#[derive(Debug)]
#[allow(
    missing_docs,
    reason = "variants without text are other architectures'"
)]
pub enum VcpuExit<'a> {
    /// OUT or OUTS: port, and `size * count` bytes.
    IoOut(u16, &'a [u8]),
    /// IN or INS: port, and the bytes to fill in.
    IoIn(u16, &'a mut [u8]),
    /// A read outside guest memory: guest-physical address, and the bytes to fill in.
    MmioRead(u64, &'a mut [u8]),
    /// A write outside guest memory: guest-physical address and bytes.
    MmioWrite(u64, &'a [u8]),
    /// KVM_EXIT_UNKNOWN.
    Unknown,
    /// KVM_EXIT_EXCEPTION.
    Exception,
    /// A hypercall that the VMM asked for with KVM_CAP_EXIT_HYPERCALL.
    Hypercall(HypercallExit<'a>),
    /// A breakpoint or step of [`VcpuFd::set_guest_debug`].
    Debug(kvm_debug_exit_arch),
    /// HLT without an in-kernel LAPIC.
    Hlt,
    /// An interrupt can be injected, as `request_interrupt_window` asked.
    IrqWindowOpen,
    /// A triple fault.
    Shutdown,
    /// KVM_EXIT_FAIL_ENTRY: hardware reason and CPU.
    FailEntry(u64, u32),
    /// KVM_EXIT_INTR.
    Intr,
    /// CR8 was lowered without an in-kernel LAPIC.
    SetTpr,
    /// KVM_EXIT_TPR_ACCESS.
    TprAccess,
    S390Sieic,
    S390Reset,
    Dcr,
    /// KVM_EXIT_NMI.
    Nmi,
    /// The guest did what the hypervisor cannot; details are in `kvm_run`.
    InternalError,
    Osi,
    PaprHcall,
    S390Ucontrol,
    Watchdog,
    S390Tsch,
    Epr,
    /// Reset, shutdown or crash: type and data.
    SystemEvent(u32, &'a [u64]),
    S390Stsi,
    /// EOI of a level interrupt for the VMM's IOAPIC (split irqchip): vector.
    IoapicEoi(u8),
    /// KVM_EXIT_HYPERV.
    Hyperv,
    /// RDMSR that the VMM asked for with KVM_CAP_X86_USER_SPACE_MSR.
    X86Rdmsr(ReadMsrExit<'a>),
    /// WRMSR that the VMM asked for with KVM_CAP_X86_USER_SPACE_MSR.
    X86Wrmsr(WriteMsrExit<'a>),
    /// An access to guest memory that the host cannot serve.
    MemoryFault {
        /// KVM_MEMORY_EXIT_FLAG_*.
        flags: u64,
        /// Guest-physical address.
        gpa: u64,
        /// Bytes.
        size: u64,
    },
    /// A reason that this crate does not know.
    Unsupported(u32),
}

/// A virtual CPU.
#[derive(Debug)]
pub struct VcpuFd {
    vcpu: Descriptor,
    /// Absent when the descriptor is some other file.
    object: std::result::Result<Arc<Vcpu>, Errno>,
    kvm_run_ptr: KvmRunWrapper,
    coalesced_mmio_ring: Option<KvmCoalescedIoRing>,
}

/// Registers that KVM_RUN can copy from and to the run page.
#[repr(u32)]
#[derive(Debug, Copy, Clone)]
pub enum SyncReg {
    /// `kvm_regs`.
    Register = KVM_SYNC_X86_REGS,
    /// `kvm_sregs`.
    SystemRegister = KVM_SYNC_X86_SREGS,
    /// `kvm_vcpu_events`.
    VcpuEvents = KVM_SYNC_X86_EVENTS,
}

mod exit;
mod saved;
mod state;
mod stopper;

pub use stopper::VcpuStopper;

impl VcpuFd {
    fn object(&self) -> Result<&Arc<Vcpu>> {
        self.object.as_ref().map_err(|error| refused(*error))
    }

    /// Entries of the VM's dirty rings.
    pub(super) fn dirty_ring_entries(&self) -> Result<u32> {
        Ok(self.object()?.vm().hypervisor().dirty_ring_entries())
    }

    /// The run page.
    pub fn get_kvm_run(&mut self) -> &mut kvm_run {
        self.kvm_run_ptr.as_mut_ref()
    }

    /// Sets kvm_run.immediate_exit: while it is not 0, KVM_RUN completes the previous exit and
    /// fails with EINTR without running the guest.
    pub fn set_kvm_immediate_exit(&mut self, val: u8) {
        self.kvm_run_ptr.as_mut_ref().immediate_exit = val;
    }

    /// Asks KVM_RUN to store `reg` in the run page when it returns.
    pub fn set_sync_valid_reg(&mut self, reg: SyncReg) {
        self.kvm_run_ptr.as_mut_ref().kvm_valid_regs |= reg as u64;
    }

    /// Asks the next KVM_RUN to load `reg` from the run page first.
    pub fn set_sync_dirty_reg(&mut self, reg: SyncReg) {
        self.kvm_run_ptr.as_mut_ref().kvm_dirty_regs |= reg as u64;
    }

    /// Takes [`Self::set_sync_valid_reg`] back.
    pub fn clear_sync_valid_reg(&mut self, reg: SyncReg) {
        self.kvm_run_ptr.as_mut_ref().kvm_valid_regs &= !(reg as u64);
    }

    /// Takes [`Self::set_sync_dirty_reg`] back.
    pub fn clear_sync_dirty_reg(&mut self, reg: SyncReg) {
        self.kvm_run_ptr.as_mut_ref().kvm_dirty_regs &= !(reg as u64);
    }

    /// A copy of the registers in the run page.
    pub fn sync_regs(&self) -> kvm_sync_regs {
        // SAFETY: the only member of the union that x86 uses; any bytes are a value.
        unsafe { self.kvm_run_ptr.as_ref().s.regs }
    }

    /// The registers in the run page.
    pub fn sync_regs_mut(&mut self) -> &mut kvm_sync_regs {
        // SAFETY: the only member of the union that x86 uses; any bytes are a value.
        unsafe { &mut self.kvm_run_ptr.as_mut_ref().s.regs }
    }

    /// Maps the ring that [`Self::coalesced_mmio_read`] reads: the VM's, whichever vCPU this is.
    ///
    /// # Errors
    ///
    /// Those of `mmap(2)`.
    pub fn map_coalesced_mmio_ring(&mut self) -> Result<()> {
        if self.coalesced_mmio_ring.is_none() {
            let ring = match self.object()?.vm().ring_file() {
                Some(file) => KvmCoalescedIoRing::mmap_from_fd(&file)?,
                None => KvmCoalescedIoRing::mmap_from_fd(&self.vcpu)?,
            };
            self.coalesced_mmio_ring = Some(ring);
        }
        Ok(())
    }

    /// Takes the oldest coalesced write.
    ///
    /// # Errors
    ///
    /// EIO without [`Self::map_coalesced_mmio_ring`].
    pub fn coalesced_mmio_read(&mut self) -> Result<Option<kvm_coalesced_mmio>> {
        match &mut self.coalesced_mmio_ring {
            Some(ring) => Ok(ring.read_entry()),
            None => Err(errno::Error::new(libc::EIO)),
        }
    }
}

/// Wraps a descriptor whose object is known.
pub(crate) fn new_vcpu(
    vcpu: Descriptor,
    object: std::result::Result<Arc<Vcpu>, Errno>,
    kvm_run_ptr: KvmRunWrapper,
) -> VcpuFd {
    VcpuFd {
        vcpu,
        object,
        kvm_run_ptr,
        coalesced_mmio_ring: None,
    }
}

impl AsRawFd for VcpuFd {
    fn as_raw_fd(&self) -> RawFd {
        self.vcpu.as_raw_fd()
    }
}
