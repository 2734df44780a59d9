//! The LAPIC's datasheet (SDM vol. 3, tables 11-1 and 11-6, figures 11-8 to 11-14).
//!
//! Registers are numbered by their MMIO offset divided by 16, which is also
//! their x2APIC MSR number less 0x800.

/// Number of words that exist in the register page.
pub const NR_REGS: usize = 64;
/// Reset address of the register page.
pub const DEFAULT_BASE: u64 = 0xfee0_0000;
/// Bytes that the registers occupy in gpa space.
pub const MMIO_LEN: u64 = 0x1000;
/// Version 0x14: an integrated APIC. Bits 16 to 23 hold the number of LVTs less one.
pub(super) const VERSION: u32 = 0x14;
/// Version register: EOI broadcasts can be suppressed.
pub(super) const VERSION_DIRECTED_EOI: u32 = 1 << 24;
/// Nanoseconds of a bus tick, as KVM defines it: 1 GHz.
pub(super) const NS_PER_TICK: u64 = 1;
/// Shortest period of a periodic timer (KVM's `min_timer_period_us`).
pub(super) const MIN_PERIOD_NS: u64 = 200_000;

/// Register numbers.
pub mod reg {
    pub(crate) const ID: usize = 0x02;
    pub(crate) const VERSION: usize = 0x03;
    /// TPR.
    pub const TASKPRI: usize = 0x08;
    pub(crate) const ARBPRI: usize = 0x09;
    pub(crate) const PROCPRI: usize = 0x0a;
    /// End of interrupt.
    pub const EOI: usize = 0x0b;
    pub(crate) const LDR: usize = 0x0d;
    pub(crate) const DFR: usize = 0x0e;
    pub(crate) const SPIV: usize = 0x0f;
    pub(crate) const ISR: usize = 0x10;
    pub(crate) const TMR: usize = 0x18;
    pub(crate) const IRR: usize = 0x20;
    pub(crate) const IRR_END: usize = 0x27;
    pub(crate) const ESR: usize = 0x28;
    pub(crate) const LVTCMCI: usize = 0x2f;
    /// Interrupt command, low half: writing it sends.
    pub const ICR: usize = 0x30;
    /// Its high half: the destination.
    pub const ICR2: usize = 0x31;
    pub(crate) const LVTT: usize = 0x32;
    pub(crate) const LVTTHMR: usize = 0x33;
    pub(crate) const LVTPC: usize = 0x34;
    pub(crate) const LVT0: usize = 0x35;
    pub(crate) const LVT1: usize = 0x36;
    pub(crate) const LVTERR: usize = 0x37;
    pub(crate) const TMICT: usize = 0x38;
    pub(crate) const TMCCT: usize = 0x39;
    pub(crate) const TDCR: usize = 0x3e;
    pub(crate) const SELF_IPI: usize = 0x3f;
}

/// IA32_APIC_BASE.
pub mod apic_base {
    /// Bootstrap processor.
    pub const BSP: u64 = 1 << 8;
    /// x2APIC mode.
    pub const EXTD: u64 = 1 << 10;
    /// Global enable.
    pub const ENABLE: u64 = 1 << 11;
    /// The two mode bits.
    pub const MODE: u64 = ENABLE | EXTD;
    /// Page address.
    pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
    /// Bits that are always reserved.
    pub const RESERVED: u64 = 0x2ff;
}

/// Spurious-vector register.
pub(super) mod spiv {
    pub(crate) const ENABLED: u32 = 1 << 8;
    /// Vector, enable, focus.
    pub(crate) const WRITABLE: u32 = 0x3ff;
    pub(crate) const DIRECTED_EOI: u32 = 1 << 12;
}

/// LVT entries.
pub(super) mod lvt {
    pub(crate) const MODE_SHIFT: u32 = 8;
    pub(crate) const MODE: u32 = 7 << MODE_SHIFT;
    pub(crate) const SEND_PENDING: u32 = 1 << 12;
    pub(crate) const POLARITY: u32 = 1 << 13;
    pub(crate) const REMOTE_IRR: u32 = 1 << 14;
    pub(crate) const LEVEL: u32 = 1 << 15;
    pub(crate) const MASKED: u32 = 1 << 16;
    /// Bits that are writable in each entry.
    pub(crate) const ANY: u32 = 0xff | SEND_PENDING | MASKED;
    /// Bits that are writable in LINT0 and LINT1.
    pub(crate) const LINT: u32 = ANY | MODE | POLARITY | REMOTE_IRR | LEVEL;

    pub(crate) const TIMER_PERIODIC: u32 = 1 << 17;
    pub(crate) const TIMER_TSC_DEADLINE: u32 = 2 << 17;
    pub(crate) const TIMER_MODE: u32 = 3 << 17;
}

/// Interrupt command register.
pub(super) mod icr {
    pub(crate) const LOGICAL: u32 = 1 << 11;
    pub(crate) const BUSY: u32 = 1 << 12;
    pub(crate) const ASSERT: u32 = 1 << 14;
    pub(crate) const LEVEL: u32 = 1 << 15;
    pub(crate) const SHORTHAND_SHIFT: u32 = 18;
    /// Reserved in x2APIC mode: writing them is a #GP.
    pub(crate) const X2APIC_RESERVED: u32 = 0xfff0_0000 | 3 << 16 | 1 << 13;
}

/// Timer divide configuration: bits 0, 1 and 3.
pub(super) const TDCR_WRITABLE: u32 = 0xb;
/// x2APIC ICR as an MSR.
pub(super) const MSR_BASE: u32 = 0x800;
