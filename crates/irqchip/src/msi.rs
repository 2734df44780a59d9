//! Message-signalled interrupts: address and data to a LAPIC message
//! (SDM vol. 3, 11.11; KVM API document, KVM_CAP_X2APIC_API).

use crate::{DeliveryMode, LapicIrq, Shorthand};

/// Bit positions of SDM vol. 3, figures 11-14 and 11-15.
mod spec {
    pub(super) const ADDRESS_DEST_SHIFT: u32 = 12;
    pub(super) const ADDRESS_REDIRECTION_HINT: u32 = 1 << 3;
    pub(super) const ADDRESS_LOGICAL: u32 = 1 << 2;
    pub(super) const DATA_LEVEL: u32 = 1 << 15;
    pub(super) const DATA_MODE_SHIFT: u32 = 8;
}

/// An MSI, as KVM_SIGNAL_MSI and KVM_IRQ_ROUTING_MSI describe it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Msi {
    /// Low half of the address.
    pub address_lo: u32,
    /// High half; bits 8 to 31 are destination bits 8 to 31 with the x2APIC API.
    pub address_hi: u32,
    /// Data.
    pub data: u32,
}

impl Msi {
    /// False if the x2APIC API is on and reserved bits of the high half are set, which KVM refuses with EINVAL.
    pub const fn is_valid(&self, x2apic_format: bool) -> bool {
        !(x2apic_format && self.address_hi & 0xff != 0)
    }

    /// Returns the message that the MSI sends; `x2apic_format` is KVM_X2APIC_API_USE_32BIT_IDS.
    pub const fn decode(&self, x2apic_format: bool) -> LapicIrq {
        let mut dest = self.address_lo >> spec::ADDRESS_DEST_SHIFT & 0xff;
        if x2apic_format {
            dest |= self.address_hi & 0xffff_ff00;
        }
        LapicIrq {
            dest,
            logical: self.address_lo & spec::ADDRESS_LOGICAL != 0,
            shorthand: Shorthand::None,
            mode: DeliveryMode::from_bits(self.data >> spec::DATA_MODE_SHIFT),
            vector: self.data as u8,
            assert: true,
            level_triggered: self.data & spec::DATA_LEVEL != 0,
            redirection_hint: self.address_lo & spec::ADDRESS_REDIRECTION_HINT != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields() {
        let msi = Msi {
            address_lo: 0xfee0_0000 | 0x34 << 12 | 1 << 3 | 1 << 2,
            address_hi: 0x0001_0200,
            data: 0x8000 | 1 << 8 | 0x41,
        };
        let irq = msi.decode(false);
        assert_eq!((irq.dest, irq.vector), (0x34, 0x41));
        assert!(irq.logical && irq.redirection_hint && irq.level_triggered && irq.assert);
        assert_eq!(irq.mode, DeliveryMode::LowestPriority);
        assert_eq!(msi.decode(true).dest, 0x0001_0234);
        assert!(msi.is_valid(true));
        let reserved = Msi {
            address_hi: 1,
            ..msi
        };
        assert!(!reserved.is_valid(true) && reserved.is_valid(false));
    }
}
