//! What passes between the VMM and KVM_RUN (KVM API document, "The kvm_run structure").

use std::sync::atomic::AtomicU8;

/// The bytes of an OUT. A string instruction exits once per element, so four bytes are enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoData {
    bytes: [u8; 4],
    len: u8,
}

impl IoData {
    /// The low `size` bytes of `value`.
    pub fn new(value: u32, size: u8) -> Self {
        Self {
            bytes: value.to_le_bytes(),
            len: size.min(4),
        }
    }
}

impl core::ops::Deref for IoData {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or_default()
    }
}

/// The VMM's answer to the previous exit, as it left it in the run page.
#[derive(Clone, Copy, Debug, Default)]
pub enum Answer<'a> {
    /// The previous exit asked for nothing.
    #[default]
    None,
    /// Data of INS.
    Io(&'a [u8]),
    /// Data of an MMIO read, or of an IN.
    Word(u64),
    /// Result of KVM_EXIT_X86_RDMSR/WRMSR.
    Msr {
        /// RDMSR's value.
        data: u64,
        /// Inject #GP.
        error: bool,
    },
    /// Result of KVM_EXIT_HYPERCALL, KVM_EXIT_HYPERV_HCALL or KVM_EXIT_XEN_HCALL.
    Hypercall(u64),
    /// KVM_EXIT_HYPERV_SYNDBG: the new status.
    Debugger(u64),
}

/// Input of KVM_RUN.
#[derive(Debug)]
pub struct RunInput<'a> {
    /// Answer to the previous exit.
    pub answer: Answer<'a>,
    /// kvm_run.request_interrupt_window.
    pub request_interrupt_window: bool,
    /// kvm_run.cr8, used without an in-kernel LAPIC.
    pub cr8: u8,
    /// kvm_run.immediate_exit, read while the vCPU runs.
    pub immediate_exit: &'a AtomicU8,
    /// KVM_SET_SIGNAL_MASK: the signals that do not end KVM_RUN, bit `n - 1` for signal n.
    pub blocked_signals: Option<u64>,
}

/// Which answer an exit asks of the VMM. The type is small enough to be stored by one instruction and soon read back by
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Question {
    /// Nothing was asked, or the question was answered.
    #[default]
    None,
    /// The data of an IN.
    Port {
        /// Bytes.
        len: u8,
    },
    /// Bytes of INS.
    Io {
        /// `size * count`, at most a page.
        len: u16,
    },
    /// `mmio.data`.
    Mmio {
        /// Bytes.
        len: u8,
    },
    /// `msr.error` and, for RDMSR, `msr.data`.
    Msr,
    /// `hypercall.ret`.
    Hypercall,
    /// `hyperv.u.hcall.result`.
    HyperVCall,
    /// `xen.u.hcall.result`.
    XenCall,
    /// `hyperv.u.syndbg.status`.
    Debugger,
}

/// The memory that KVM_RUN shares with the VMM. Only the thread that is in KVM_RUN uses it.
pub trait RunPage {
    /// Reads the VMM's input. Bytes of an IN are copied to `io`, because the VMM may change the page while the
    /// hypervisor uses them.
    fn input<'a>(&'a self, question: Question, io: &'a mut [u8; 4096]) -> RunInput<'a>;
    /// Describes an exit, and returns what the next KVM_RUN has to read from the page.
    fn store(&self, exit: &Exit, status: &RunStatus) -> Question;
    /// Stores the status alone, after a KVM_RUN that failed.
    fn store_status(&self, status: &RunStatus);
}

/// The part of kvm_run that is shown after every KVM_RUN, including one that was interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStatus {
    /// An interrupt can be injected now (KVM_INTERRUPT).
    pub ready_for_interrupt_injection: bool,
    /// RFLAGS.IF.
    pub if_flag: bool,
    /// CR8.
    pub cr8: u8,
    /// IA32_APIC_BASE.
    pub apic_base: u64,
    /// KVM_RUN_X86_SMM.
    pub in_smm: bool,
}

/// KVM_EXIT_HYPERV_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HyperVExit {
    /// KVM_EXIT_HYPERV_SYNIC: the guest has set up the synthetic interrupt controller.
    Synic {
        /// The MSR that was written.
        msr: u32,
        /// HV_X64_MSR_SCONTROL.
        control: u64,
        /// HV_X64_MSR_SIEFP.
        events: u64,
        /// HV_X64_MSR_SIMP.
        messages: u64,
    },
    /// KVM_EXIT_HYPERV_HCALL.
    Call {
        /// Code and flags.
        input: u64,
        /// The two argument registers.
        params: [u64; 2],
    },
    /// KVM_EXIT_HYPERV_SYNDBG: a write to the synthetic debugger's registers.
    Debugger {
        /// The MSR that was written.
        msr: u32,
        /// HV_X64_MSR_SYNDBG_CONTROL.
        control: u64,
        /// HV_X64_MSR_SYNDBG_STATUS.
        status: u64,
        /// HV_X64_MSR_SYNDBG_SEND_BUFFER, RECV_BUFFER and PENDING_BUFFER.
        pages: [u64; 3],
    },
}

/// KVM_EXIT_*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// KVM_EXIT_IO.
    Io {
        /// KVM_EXIT_IO_IN.
        is_in: bool,
        /// Port.
        port: u16,
        /// 1, 2 or 4 bytes each.
        size: u8,
        /// Repetitions.
        count: u32,
        /// Bytes of an OUT; empty for an IN.
        data: IoData,
    },
    /// KVM_EXIT_MMIO.
    Mmio {
        /// Guest-physical address.
        gpa: u64,
        /// 1 to 8 bytes.
        len: u8,
        /// The access is a write.
        is_write: bool,
        /// Written bytes.
        data: [u8; 8],
    },
    /// KVM_EXIT_DIRTY_RING_FULL.
    DirtyRingFull,
    /// KVM_EXIT_HLT.
    Hlt,
    /// KVM_EXIT_SHUTDOWN: a triple fault.
    Shutdown,
    /// KVM_EXIT_IRQ_WINDOW_OPEN.
    IrqWindowOpen,
    /// KVM_EXIT_SET_TPR.
    SetTpr,
    /// KVM_EXIT_TPR_ACCESS.
    TprAccess {
        /// RIP of the instruction.
        rip: u64,
        /// The access is a write.
        is_write: bool,
    },
    /// KVM_EXIT_DEBUG.
    Debug {
        /// Vector, 1 or 3.
        exception: u32,
        /// RIP.
        pc: u64,
        /// DR6.
        dr6: u64,
        /// DR7.
        dr7: u64,
    },
    /// KVM_EXIT_X86_RDMSR.
    Rdmsr {
        /// MSR.
        index: u32,
        /// KVM_MSR_EXIT_REASON_*.
        reason: u32,
    },
    /// KVM_EXIT_X86_WRMSR.
    Wrmsr {
        /// MSR.
        index: u32,
        /// Value.
        data: u64,
        /// KVM_MSR_EXIT_REASON_*.
        reason: u32,
    },
    /// KVM_EXIT_IOAPIC_EOI.
    IoapicEoi {
        /// Vector.
        vector: u8,
    },
    /// KVM_EXIT_HYPERCALL.
    Hypercall {
        /// Number.
        nr: u64,
        /// Arguments.
        args: [u64; 6],
        /// The guest was in 64-bit mode.
        longmode: bool,
    },
    /// KVM_EXIT_XEN_HCALL.
    Xen {
        /// The guest was in 64-bit mode.
        longmode: bool,
        /// The guest's privilege level.
        cpl: u8,
        /// Number.
        input: u64,
        /// Arguments.
        params: [u64; 6],
    },
    /// KVM_EXIT_HYPERV.
    HyperV(HyperVExit),
    /// KVM_EXIT_SYSTEM_EVENT.
    SystemEvent {
        /// KVM_SYSTEM_EVENT_*.
        kind: u32,
    },
    /// KVM_EXIT_MEMORY_FAULT, with which KVM_RUN fails with EFAULT: the guest accessed RAM that the process cannot read, or cannot write.
    MemoryFault {
        /// Guest-physical address of the page.
        gpa: u64,
    },
    /// KVM_EXIT_INTERNAL_ERROR.
    InternalError {
        /// KVM_INTERNAL_ERROR_*.
        suberror: u32,
        /// Details, with RIP first.
        data: Vec<u64>,
    },
}
