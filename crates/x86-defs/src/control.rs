//! CR0, CR3, CR4, EFER and XCR0 (SDM vol. 3, 2.5 and 2.2.1).

/// CR0 bits.
pub mod cr0 {
    /// Protection enable.
    pub const PE: u64 = 1 << 0;
    /// Monitor coprocessor.
    pub const MP: u64 = 1 << 1;
    /// x87 emulation: every x87/MMX/SSE instruction faults.
    pub const EM: u64 = 1 << 2;
    /// Task switched.
    pub const TS: u64 = 1 << 3;
    /// Extension type, always one.
    pub const ET: u64 = 1 << 4;
    /// Native x87 error reporting.
    pub const NE: u64 = 1 << 5;
    /// Supervisor writes honour read-only pages.
    pub const WP: u64 = 1 << 16;
    /// Alignment checks at CPL 3.
    pub const AM: u64 = 1 << 18;
    /// Not write-through.
    pub const NW: u64 = 1 << 29;
    /// Cache disable.
    pub const CD: u64 = 1 << 30;
    /// Paging.
    pub const PG: u64 = 1 << 31;
    /// Every bit that can be one.
    pub const DEFINED: u64 = PE | MP | EM | TS | ET | NE | WP | AM | NW | CD | PG;
    /// Value after reset (SDM vol. 3, table 10-1).
    pub const RESET: u64 = CD | NW | ET;
}

/// CR3 bits.
pub mod cr3 {
    /// PCID when CR4.PCIDE is set.
    pub const PCID: u64 = 0xfff;
    /// MOV to CR3 keeps the PCID's translations.
    pub const NO_FLUSH: u64 = 1 << 63;
}

/// CR4 bits.
pub mod cr4 {
    /// Virtual-8086 extensions.
    pub const VME: u64 = 1 << 0;
    /// Protected-mode virtual interrupts.
    pub const PVI: u64 = 1 << 1;
    /// RDTSC at CPL 0 only.
    pub const TSD: u64 = 1 << 2;
    /// Debug extensions: DR4/DR5 fault.
    pub const DE: u64 = 1 << 3;
    /// 4 MiB pages.
    pub const PSE: u64 = 1 << 4;
    /// Physical address extension.
    pub const PAE: u64 = 1 << 5;
    /// Machine check enable.
    pub const MCE: u64 = 1 << 6;
    /// Global pages.
    pub const PGE: u64 = 1 << 7;
    /// RDPMC at any CPL.
    pub const PCE: u64 = 1 << 8;
    /// FXSAVE, SSE.
    pub const OSFXSR: u64 = 1 << 9;
    /// #XM enabled.
    pub const OSXMMEXCPT: u64 = 1 << 10;
    /// User-mode instruction prevention.
    pub const UMIP: u64 = 1 << 11;
    /// 57-bit linear addresses.
    pub const LA57: u64 = 1 << 12;
    /// RDFSBASE and friends.
    pub const FSGSBASE: u64 = 1 << 16;
    /// Process-context identifiers.
    pub const PCIDE: u64 = 1 << 17;
    /// XSAVE, XCR0.
    pub const OSXSAVE: u64 = 1 << 18;
    /// No supervisor execution of user pages.
    pub const SMEP: u64 = 1 << 20;
    /// No supervisor access to user pages.
    pub const SMAP: u64 = 1 << 21;
    /// Protection keys for user pages.
    pub const PKE: u64 = 1 << 22;
    /// Protection keys for supervisor pages.
    pub const PKS: u64 = 1 << 24;
}

/// IA32_EFER bits.
pub mod efer {
    /// SYSCALL enable.
    pub const SCE: u64 = 1 << 0;
    /// Long mode enable.
    pub const LME: u64 = 1 << 8;
    /// Long mode active.
    pub const LMA: u64 = 1 << 10;
    /// No-execute enable.
    pub const NXE: u64 = 1 << 11;
    /// Fast FXSAVE (AMD).
    pub const FFXSR: u64 = 1 << 14;
}
