//! The interrupt command register: IPIs (SDM vol. 3, 11.6.1 and 11.12.9).

use super::spec::icr;
use crate::{DeliveryMode, LapicIrq, Shorthand};

/// The message that an ICR value sends. `high` is the high word: the
/// destination is all of it in x2APIC mode and its top byte in xAPIC mode.
pub(super) const fn decode(low: u32, high: u32, x2apic: bool) -> LapicIrq {
    LapicIrq {
        dest: if x2apic { high } else { high >> 24 },
        logical: low & icr::LOGICAL != 0,
        shorthand: match low >> icr::SHORTHAND_SHIFT & 3 {
            0 => Shorthand::None,
            1 => Shorthand::ToSelf,
            2 => Shorthand::All,
            _ => Shorthand::Others,
        },
        mode: DeliveryMode::from_bits(low >> 8),
        vector: low as u8,
        assert: low & icr::ASSERT != 0,
        level_triggered: low & icr::LEVEL != 0,
        redirection_hint: false,
    }
}
