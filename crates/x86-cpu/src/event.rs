//! Exceptions and the events that wait on a vCPU (SDM vol. 3, chapter 6).

use x86_defs::vector;

/// An exception that an instruction raised and that is to be delivered now.
///
/// The linear address of a #PF is in [`crate::CpuState::fault_gva`] and the
/// DR6 bits of a #DB in [`crate::CpuState::fault_dr6`]: CR2 and DR6 change only
/// at delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Vector, 0 to 31.
    pub vector: u8,
    /// Error code, for the vectors that push one.
    pub error_code: Option<u16>,
}

impl Exception {
    /// Makes an exception without an error code.
    pub const fn new(vector: u8) -> Self {
        Self {
            vector,
            error_code: None,
        }
    }
    /// Makes an exception with an error code.
    pub const fn with_code(vector: u8, error_code: u16) -> Self {
        Self {
            vector,
            error_code: Some(error_code),
        }
    }
    /// #UD.
    pub const UD: Self = Self::new(vector::UD);
    /// #NM.
    pub const NM: Self = Self::new(vector::NM);
    /// #DE.
    pub const DE: Self = Self::new(vector::DE);
    /// #DB.
    pub const DB: Self = Self::new(vector::DB);
    /// #GP(0).
    pub const GP0: Self = Self::with_code(vector::GP, 0);
    /// #SS(0).
    pub const SS0: Self = Self::with_code(vector::SS, 0);
}

/// What is delivered through the IDT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A fault or trap raised by the CPU; RIP is what the handler's frame gets.
    Exception(Exception),
    /// INT n, INT3, INTO or INT1: `next_rip` is pushed and gate DPL is checked.
    Software {
        /// Vector.
        vector: u8,
        /// Address of the following instruction.
        next_rip: u64,
        /// True for INT1, which does not check the gate's DPL.
        privileged: bool,
    },
    /// An external interrupt.
    Interrupt(u8),
    /// A non-maskable interrupt.
    Nmi,
}

/// An exception queued for injection at the next entry (KVM_SET_VCPU_EVENTS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingException {
    /// Vector.
    pub vector: u8,
    /// Error code, if one is pushed.
    pub error_code: Option<u32>,
    /// CR2 for #PF, DR6 bits for #DB, not yet in the registers.
    pub payload: Option<u64>,
    /// True if delivery has begun and was interrupted; else the exception is only pending.
    pub injected: bool,
}

/// An interrupt whose delivery was begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingInterrupt {
    /// Vector.
    pub vector: u8,
    /// True for INT n, false for an external interrupt.
    pub soft: bool,
}

/// Events that wait for the next entry, as KVM_GET_VCPU_EVENTS shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Exception to inject.
    pub exception: Option<PendingException>,
    /// Interrupt to inject.
    pub interrupt: Option<PendingInterrupt>,
    /// Number of NMIs that are not yet delivered, at most two.
    pub nmi_pending: u8,
    /// True if an NMI's delivery has begun.
    pub nmi_injected: bool,
    /// True if NMIs are blocked until IRET.
    pub nmi_masked: bool,
    /// True if an SMI is pending.
    pub smi_pending: bool,
    /// True if the vCPU is in system-management mode.
    pub in_smm: bool,
    /// True if NMIs were masked when SMM was entered.
    pub smm_inside_nmi: bool,
    /// True if an INIT was latched while in SMM.
    pub latched_init: bool,
    /// Vector of the last SIPI.
    pub sipi_vector: u32,
    /// True if a triple fault is pending.
    pub triple_fault: bool,
}
