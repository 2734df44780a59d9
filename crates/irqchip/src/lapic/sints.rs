//! Hyper-V's synthetic interrupt sources, as far as a LAPIC knows them (Hypervisor Top-Level Functional Specification,
//! "Synthetic Interrupt Controller"): each has a vector, which may end automatically.
//!
//! Invariant: the two sets of vectors are those of the unmasked sources.

use super::{Accepted, Lapic};
use crate::{DeliveryMode, LapicIrq};

/// Number of sources of a processor.
pub const NR_SINTS: usize = 16;

/// Bits of HV_X64_MSR_SINTx; the lowest eight are the vector.
const MASKED: u64 = 1 << 16;
const AUTO_EOI: u64 = 1 << 17;
/// Lowest vector of a source; those below belong to the processor.
const LOWEST: u8 = 16;

/// HV_X64_MSR_SINT0 to SINT15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sints {
    values: [u64; NR_SINTS],
    /// Vectors of unmasked sources, a bit each.
    connected: [u64; 4],
    /// Vectors that end automatically when they are taken.
    auto_eoi: [u64; 4],
}

impl Default for Sints {
    fn default() -> Self {
        Self {
            values: [MASKED; NR_SINTS],
            connected: [0; 4],
            auto_eoi: [0; 4],
        }
    }
}

const fn vector_of(value: u64) -> Option<u8> {
    if value & MASKED == 0 {
        Some(value as u8)
    } else {
        None
    }
}

const fn has(set: &[u64; 4], vector: u8) -> bool {
    set[(vector >> 6) as usize] >> (vector & 63) & 1 != 0
}

impl Sints {
    /// True if an unmasked source has the vector.
    pub(super) const fn is_connected(&self, vector: u8) -> bool {
        has(&self.connected, vector)
    }
    /// True if the vector ends automatically, and so is never in service.
    pub(super) const fn is_auto_eoi(&self, vector: u8) -> bool {
        has(&self.auto_eoi, vector)
    }
    /// Returns the sources that have the vector, a bit each.
    pub(super) fn of(&self, vector: u8) -> u16 {
        if !self.is_connected(vector) {
            return 0;
        }
        let values = self.values.iter().enumerate();
        let mine = values.filter(|(_, value)| vector_of(**value) == Some(vector));
        mine.fold(0, |bits, (i, _)| bits | 1 << i)
    }
    fn set(&mut self, sint: usize, value: u64) {
        if let Some(at) = self.values.get_mut(sint) {
            *at = value;
        }
        (self.connected, self.auto_eoi) = ([0; 4], [0; 4]);
        for value in self.values {
            let Some(vector) = vector_of(value) else {
                continue;
            };
            let (word, bit) = (usize::from(vector >> 6), 1 << (vector & 63));
            self.connected[word] |= bit;
            if value & AUTO_EOI != 0 {
                self.auto_eoi[word] |= bit;
            }
        }
    }
}

impl Lapic {
    /// Returns HV_X64_MSR_SINTx.
    pub fn sint(&self, sint: usize) -> Option<u64> {
        self.sints.values.get(sint).copied()
    }
    /// Sets HV_X64_MSR_SINTx. False for a vector that belongs to the processor, which only the VMM (`host`) may set.
    pub fn set_sint(&mut self, sint: usize, value: u64, host: bool) -> bool {
        let is_good = host || vector_of(value).is_none_or(|vector| vector >= LOWEST);
        if is_good {
            self.sints.set(sint, value);
        }
        is_good
    }
    /// Raises the source's interrupt, unless the source is masked.
    pub fn raise_sint(&mut self, sint: usize) -> Accepted {
        let vector = self.sint(sint).and_then(vector_of);
        let Some(vector) = vector.filter(|v| *v >= LOWEST && self.is_enabled()) else {
            return Accepted::Ignored;
        };
        self.accept(&LapicIrq::edge(0, DeliveryMode::Fixed, vector))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LapicConfig;
    use crate::lapic::spec::{reg, spiv};

    fn lapic() -> Lapic {
        let mut lapic = Lapic::new(LapicConfig::default());
        lapic.set(reg::SPIV, 0xff | spiv::ENABLED);
        lapic
    }

    #[test]
    fn a_source_has_its_vector_unless_it_is_masked() {
        let mut lapic = lapic();
        assert_eq!(lapic.sint(2), Some(MASKED));
        assert_eq!(lapic.sint(NR_SINTS), None);
        for (value, host, is_good, raised) in [
            (0x41, false, true, Accepted::Interrupt),
            (0x41, false, true, Accepted::Coalesced),
            (MASKED | 0x42, false, true, Accepted::Ignored),
            (MASKED | 3, false, true, Accepted::Ignored),
            (3, false, false, Accepted::Ignored),
            (3, true, true, Accepted::Ignored),
            (0x42, false, true, Accepted::Interrupt),
        ] {
            let row = (value, host);
            assert_eq!(lapic.set_sint(2, value, host), is_good, "{row:x?}");
            assert_eq!(lapic.raise_sint(2), raised, "{row:x?}");
        }
        assert_eq!(lapic.raise_sint(NR_SINTS), Accepted::Ignored);
    }

    #[test]
    fn an_end_names_the_sources_and_some_vectors_end_by_themselves() {
        let mut lapic = lapic();
        for (sint, value) in [(1, 0x51), (4, 0x51), (5, AUTO_EOI | 0x61)] {
            assert!(lapic.set_sint(sint, value, false));
            lapic.raise_sint(sint);
        }
        assert_eq!(lapic.pending(), Some(0x61));
        lapic.ack(0x61);
        assert_eq!(lapic.highest_isr(), None);
        lapic.ack(0x51);
        assert_eq!(lapic.pv_eoi_candidate(|_| false), None);
        assert_eq!(lapic.eoi().map(|e| (e.vector, e.sints)), Some((0x51, 0x12)));
        assert!(lapic.set_sint(5, MASKED | AUTO_EOI | 0x61, false));
        lapic.ack(0x61);
        assert_eq!(lapic.eoi().map(|e| (e.vector, e.sints)), Some((0x61, 0)));
    }
}
