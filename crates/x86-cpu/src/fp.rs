//! x87, SSE and AVX state as one XSAVE image in the standard format.

use x86_defs::xsave;

use crate::CpuState;

/// Size of the image in bytes: up to and including PKRU's component with AVX-512.
pub const AREA_SIZE: usize = 2816;

/// The FP/SIMD registers (SDM vol. 1, 13.4). The image always holds current values. XSTATE_BV in it has no meaning:
/// KVM_GET_XSAVE and KVM_SET_XSAVE compute it.
#[repr(C, align(64))]
#[derive(Clone, PartialEq, Eq)]
pub struct FpState {
    /// The image.
    pub area: [u8; AREA_SIZE],
}

impl core::fmt::Debug for FpState {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("FpState")
            .field("fcw", &self.u16_at(xsave::FCW))
            .field("mxcsr", &self.mxcsr())
            .finish_non_exhaustive()
    }
}

impl Default for FpState {
    fn default() -> Self {
        let mut s = Self {
            area: [0; AREA_SIZE],
        };
        // As KVM has it; the manual's value after reset is 0x40 (SDM vol. 3, table 10-1).
        s.area[xsave::FCW..xsave::FCW + 2].copy_from_slice(&xsave::FCW_INIT.to_le_bytes());
        s.set_mxcsr(xsave::MXCSR_DEFAULT);
        s
    }
}

impl FpState {
    /// Returns a 16-bit field at a fixed offset of the legacy region.
    pub fn u16_at(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.area[offset], self.area[offset + 1]])
    }
    /// True if a register of the x87's stack has a value, or MMX registers are in use.
    pub const fn has_x87(&self) -> bool {
        self.area[xsave::FTW] != 0
    }
    /// Returns MXCSR.
    pub fn mxcsr(&self) -> u32 {
        let a = &self.area;
        u32::from_le_bytes([
            a[xsave::MXCSR],
            a[xsave::MXCSR + 1],
            a[xsave::MXCSR + 2],
            a[xsave::MXCSR + 3],
        ])
    }
    /// Sets MXCSR.
    pub fn set_mxcsr(&mut self, v: u32) {
        self.area[xsave::MXCSR..xsave::MXCSR + 4].copy_from_slice(&v.to_le_bytes());
    }
    /// Returns XMM register `n`, 0 to 15.
    pub fn xmm(&self, n: usize) -> u128 {
        let at = xsave::XMM0 + 16 * (n & 15);
        let mut b = [0; 16];
        b.copy_from_slice(&self.area[at..at + 16]);
        u128::from_le_bytes(b)
    }
    /// Sets XMM register `n`.
    pub fn set_xmm(&mut self, n: usize, v: u128) {
        let at = xsave::XMM0 + 16 * (n & 15);
        self.area[at..at + 16].copy_from_slice(&v.to_le_bytes());
    }
    /// Returns the upper half of YMM register `n`.
    pub fn ymm_hi(&self, n: usize) -> u128 {
        let at = xsave::YMM_HI + 16 * (n & 15);
        let mut b = [0; 16];
        b.copy_from_slice(&self.area[at..at + 16]);
        u128::from_le_bytes(b)
    }
    /// Sets the upper half of YMM register `n`.
    pub fn set_ymm_hi(&mut self, n: usize, v: u128) {
        let at = xsave::YMM_HI + 16 * (n & 15);
        self.area[at..at + 16].copy_from_slice(&v.to_le_bytes());
    }
}

impl CpuState {
    /// Returns XINUSE: the components that are not in their initial state (SDM vol. 1, 13.6), by the first `nr_xmm` vector
    /// registers. MXCSR does not count.
    pub fn in_use(&self, nr_xmm: usize) -> u64 {
        use xsave::*;
        let fp = &self.fp;
        let zero = |from: usize, to: usize| is_zero(&fp.area[from..to]);
        let mut used = 0;
        if fp.u16_at(FCW) != FCW_INIT || !zero(2, 5) || !zero(6, MXCSR) || !zero(ST0, XMM0) {
            used |= X87;
        }
        if !zero(XMM0, XMM0 + 16 * nr_xmm) {
            used |= SSE;
        }
        if !zero(YMM_HI, YMM_HI + 16 * nr_xmm) {
            used |= AVX;
        }
        for (bit, from, to) in [
            (OPMASK, 1088, 1152),
            (ZMM_HI256, 1152, 1664),
            (HI16_ZMM, 1664, 2688),
        ] {
            if self.xcr0 & bit != 0 && !zero(from, to) {
                used |= bit;
            }
        }
        if self.pkru != 0 {
            used |= PKRU;
        }
        used
    }
}

/// True if no bit is set. All bytes are checked, which is faster than stopping at the first.
fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let any = words
        .iter()
        .fold(0, |any, word| any | u64::from_ne_bytes(*word));
    any == 0 && rest.iter().all(|&b| b == 0)
}
