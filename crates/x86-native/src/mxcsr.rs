//! MXCSR's fields (SDM vol. 1, 10.2.3).

use std::sync::OnceLock;

use iced_x86::{Instruction, OpKind};
use x86_cpu::FpState;

use crate::allow::vector_number;

/// The six exception flags.
pub(crate) const FLAGS: u32 = 0x3f;
/// Position of the masks.
pub(crate) const MASK_SHIFT: u32 = 7;
/// The six exception masks.
pub(crate) const MASKS: u32 = FLAGS << MASK_SHIFT;
/// Invalid, denormal, divide by zero: detected before computing.
pub(crate) const BEFORE: u32 = 0b000_0111;
/// Underflow.
pub(crate) const UE: u32 = 1 << 4;
/// Flush to zero.
pub(crate) const FZ: u32 = 1 << 15;

/// Returns the bits that this host's MXCSR has (MXCSR_MASK, SDM vol. 1, 11.6.6).
pub fn host_mask() -> u32 {
    static MASK: OnceLock<u32> = OnceLock::new();
    *MASK.get_or_init(|| {
        let mut image = FpState::default();
        // SAFETY: FXSAVE stores 512 bytes to the 64-byte aligned area.
        unsafe {
            core::arch::asm!("fxsave64 [{}]", in(reg) image.area.as_mut_ptr(), options(nostack));
        }
        let mut b = [0; 4];
        b.copy_from_slice(&image.area[28..32]);
        match u32::from_le_bytes(b) {
            0 => 0xffbf,
            mask => mask,
        }
    })
}

/// Where an instruction leaves floating-point results. With underflow unmasked, a tiny result raises #U even if it is
/// exact (SDM vol. 1, 4.9.1.5). A run with underflow masked does not show that, so the result is examined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results {
    register: usize,
    /// Bytes from the register's start.
    len: usize,
    single: bool,
}

impl Results {
    /// Returns where the instruction leaves its results, if it can underflow.
    pub(crate) fn of(i: &Instruction) -> Option<Self> {
        let name = format!("{:?}", i.mnemonic()).to_lowercase();
        let narrows = name.contains("cvtsd2ss") || name.contains("cvtpd2ps");
        let exact = ["cvt", "cmp", "comi", "round", "min", "max"]
            .iter()
            .any(|p| name.contains(p));
        if exact && !narrows || i.op0_kind() != OpKind::Register {
            return None;
        }
        let register = i.op0_register();
        let single = narrows || name.ends_with("ps") || name.ends_with("ss");
        // A scalar instruction computes only element 0, and copies the other elements.
        let scalar = name.ends_with("ss") || name.ends_with("sd");
        let len = match (scalar, single) {
            (true, true) => 4,
            (true, false) => 8,
            _ if narrows => 16,
            _ => register.size(),
        };
        Some(Self {
            register: vector_number(register)?,
            len,
            single,
        })
    }

    /// Returns [`UE`] if a result is tiny, else 0.
    pub(crate) fn tiny(&self, fp: &FpState) -> u32 {
        let low = fp.xmm(self.register);
        let (low, high) = match self.len {
            4 => (low & u128::from(u32::MAX), 0),
            8 => (low & u128::from(u64::MAX), 0),
            16 => (low, 0),
            _ => (low, fp.ymm_hi(self.register)),
        };
        if has_denormal(low, self.single) || has_denormal(high, self.single) {
            UE
        } else {
            0
        }
    }
}

fn has_denormal(v: u128, single: bool) -> bool {
    let b = v.to_le_bytes();
    if single {
        b.chunks_exact(4).any(|c| {
            let v = u32::from_le_bytes([c[0], c[1], c[2], c[3]]);
            v & 0x7f80_0000 == 0 && v & 0x007f_ffff != 0
        })
    } else {
        b.chunks_exact(8).any(|c| {
            let mut a = [0; 8];
            a.copy_from_slice(c);
            f64::from_le_bytes(a).is_subnormal()
        })
    }
}
