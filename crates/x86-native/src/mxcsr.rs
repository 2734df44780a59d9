//! MXCSR's fields (SDM vol. 1, 10.2.3).

use std::sync::OnceLock;

use iced_x86::Mnemonic;
use x86_cpu::FpState;

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

/// The bits that this host's MXCSR has (MXCSR_MASK, SDM vol. 1, 11.6.6).
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

/// With underflow unmasked a result that is tiny though exact raises #U (SDM
/// vol. 1, 4.9.1.5); the masked run does not tell. Any new denormal among the
/// result elements is one.
pub(crate) fn tiny_result(m: Mnemonic, unmasked: u32, before: &FpState, after: &FpState) -> u32 {
    if unmasked & UE == 0 {
        return 0;
    }
    let name = format!("{m:?}").to_lowercase();
    let single = if name.contains("cvtsd2ss") || name.contains("cvtpd2ps") {
        true
    } else if ["cvt", "cmp", "round", "min", "max"]
        .iter()
        .any(|p| name.contains(p))
    {
        return 0;
    } else {
        name.ends_with("ps") || name.ends_with("ss")
    };
    // A scalar instruction computes element 0 alone; the others pass through.
    let scalar = name.ends_with("ss") || name.ends_with("sd");
    let element = match (scalar, single) {
        (false, _) => u128::MAX,
        (true, true) => u128::from(u32::MAX),
        (true, false) => u128::from(u64::MAX),
    };
    let tiny = (0..16).any(|n| {
        [
            (before.xmm(n), after.xmm(n)),
            (before.ymm_hi(n), if scalar { 0 } else { after.ymm_hi(n) }),
        ]
        .iter()
        .any(|&(old, new)| old != new && has_denormal(new & element, single))
    });
    if tiny { UE } else { 0 }
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
