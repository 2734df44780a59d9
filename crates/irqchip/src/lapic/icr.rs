//! The interrupt command register: IPIs (SDM vol. 3, 11.6.1 and 11.12.9).

use super::spec::icr;
use crate::{DeliveryMode, LapicIrq, Shorthand};

/// Returns the message that an ICR value sends. In x2APIC mode all of `high`, the high word, is the destination; in
/// xAPIC mode only its top byte is.
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
