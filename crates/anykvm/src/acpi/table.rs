//! A system description table that is being made: header, fields in order, length and checksum.

/// The maker of the tables.
pub(super) const OEM_ID: &[u8; 6] = b"ANYKVM";

/// A table: the 36-byte header that all tables share, and the fields that follow (ACPI 6.5, 5.2.6).
pub(super) struct Table(Vec<u8>);

impl Table {
    pub(super) fn new(signature: &[u8; 4], revision: u8) -> Self {
        let mut bytes = signature.to_vec();
        bytes.extend([0; 4]); // length
        bytes.extend([revision, 0]); // checksum
        bytes.extend(OEM_ID);
        bytes.extend(b"ANYKVMVM");
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(b"AKVM");
        bytes.extend(1u32.to_le_bytes());
        Self(bytes)
    }

    pub(super) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    /// Returns the table with its length and checksum filled in.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        for (to, from) in self.0.iter_mut().skip(4).zip(len.to_le_bytes()) {
            *to = from;
        }
        let sum = checksum(&self.0);
        if let Some(byte) = self.0.get_mut(9) {
            *byte = sum;
        }
        self.0
    }
}

/// Returns the byte that makes the sum of `bytes` zero. In `bytes` its own place is 0.
pub(super) fn checksum(bytes: &[u8]) -> u8 {
    bytes
        .iter()
        .fold(0u8, |sum, byte| sum.wrapping_add(*byte))
        .wrapping_neg()
}
