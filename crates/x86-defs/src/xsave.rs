//! XSAVE layout and XCR0 (SDM vol. 1, chapter 13).

/// x87 state.
pub const X87: u64 = 1 << 0;
/// XMM registers and MXCSR.
pub const SSE: u64 = 1 << 1;
/// Upper halves of YMM.
pub const AVX: u64 = 1 << 2;
/// AVX-512 opmask.
pub const OPMASK: u64 = 1 << 5;
/// Upper halves of ZMM0–15.
pub const ZMM_HI256: u64 = 1 << 6;
/// ZMM16–31.
pub const HI16_ZMM: u64 = 1 << 7;
/// PKRU.
pub const PKRU: u64 = 1 << 9;

/// FCW offset in the legacy region.
pub const FCW: usize = 0;
/// FSW offset.
pub const FSW: usize = 2;
/// Abridged FTW offset.
pub const FTW: usize = 4;
/// MXCSR offset.
pub const MXCSR: usize = 24;
/// MXCSR_MASK offset.
pub const MXCSR_MASK: usize = 28;
/// ST0/MM0 offset; each takes 16 bytes.
pub const ST0: usize = 32;
/// XMM0 offset; each takes 16 bytes.
pub const XMM0: usize = 160;
/// Size of the legacy (FXSAVE) region.
pub const LEGACY_SIZE: usize = 512;
/// XSTATE_BV offset.
pub const XSTATE_BV: usize = 512;
/// XCOMP_BV offset.
pub const XCOMP_BV: usize = 520;
/// End of the XSAVE header.
pub const HEADER_END: usize = 576;
/// Upper halves of YMM in the standard format.
pub const YMM_HI: usize = 576;

/// MXCSR after reset.
pub const MXCSR_DEFAULT: u32 = 0x1f80;
/// FCW after FNINIT.
pub const FCW_INIT: u16 = 0x37f;
