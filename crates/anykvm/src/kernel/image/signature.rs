//! Checks that a signed bzImage is still what was signed.
//!
//! Distributions sign their kernels for UEFI (PE/COFF and Windows Authenticode Portable Executable Signature Format,
//! "Calculating the PE image hash"). The signature itself is not verified, as there is nobody to trust here. But the
//! digest in it reveals damage anywhere in the file.

use sha2::{Digest, Sha256};

use super::{u16_at, u32_at};

/// Offsets of fields.
mod spec {
    /// Offset in the file of the offset of the PE header.
    pub(super) const PE_OFFSET: usize = 0x3c;
    /// Offset of the optional header in the PE header, behind its signature and the COFF header.
    pub(super) const OPTIONAL_HEADER: usize = 24;
    /// Offset of the checksum in the optional header.
    pub(super) const CHECKSUM: usize = 64;
    /// The entry of the certificate table in the optional header of PE32 and PE32+ files.
    pub(super) const CERTIFICATES_32: usize = 96 + 4 * 8;
    pub(super) const CERTIFICATES_64: usize = 112 + 4 * 8;
    pub(super) const MAGIC_64: u16 = 0x20b;
}

/// Returns an error if the file has a signature with another SHA-256 than its own.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    match digests(bytes) {
        Some((digest, certificates)) if !contains(certificates, &digest) => {
            Err("corrupted: its content is not what was signed".into())
        }
        _ => Ok(()),
    }
}

/// Returns the digest of what a signature covers, and the certificates. `None` for an unsigned file.
fn digests(bytes: &[u8]) -> Option<([u8; 32], &[u8])> {
    let pe = u32_at(bytes, spec::PE_OFFSET)? as usize;
    if bytes.get(pe..pe.checked_add(4)?)? != b"PE\0\0" {
        return None;
    }
    let optional = pe.checked_add(spec::OPTIONAL_HEADER)?;
    let entry = match u16_at(bytes, optional)? {
        spec::MAGIC_64 => spec::CERTIFICATES_64,
        _ => spec::CERTIFICATES_32,
    };
    let entry = optional.checked_add(entry)?;
    let start = u32_at(bytes, entry)? as usize;
    let len = u32_at(bytes, entry.checked_add(4)?)? as usize;
    if start == 0 || len == 0 {
        return None;
    }
    let certificates = bytes.get(start..start.checked_add(len)?)?;
    // The digest covers all bytes except the checksum, the table's entry and the certificates.
    let checksum = optional.checked_add(spec::CHECKSUM)?;
    let mut hash = Sha256::new();
    hash.update(bytes.get(..checksum)?);
    hash.update(bytes.get(checksum.checked_add(4)?..entry)?);
    hash.update(bytes.get(entry.checked_add(8)?..start)?);
    Some((hash.finalize().into(), certificates))
}

fn contains(certificates: &[u8], digest: &[u8; 32]) -> bool {
    // A signature with another kind of digest is ignored.
    const SHA_256: &[u8] = &[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x01];
    let has = |what: &[u8]| {
        certificates
            .windows(what.len())
            .any(|window| window == what)
    };
    has(digest) || !has(SHA_256)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a PE32+ file with a "certificate" that has its digest.
    fn signed() -> Vec<u8> {
        let mut file: Vec<u8> = (0..4096u32).map(|n| (n * 7) as u8).collect();
        let put = |file: &mut Vec<u8>, at: usize, bytes: &[u8]| {
            file[at..at + bytes.len()].copy_from_slice(bytes);
        };
        put(&mut file, 0x3c, &64u32.to_le_bytes());
        put(&mut file, 64, b"PE\0\0");
        put(&mut file, 88, &0x20bu16.to_le_bytes());
        put(&mut file, 88 + 144, &4096u32.to_le_bytes());
        put(&mut file, 88 + 148, &64u32.to_le_bytes());
        file.extend([0; 64]);
        let (digest, _) = digests(&file).unwrap();
        put(&mut file, 4096, &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1]);
        put(&mut file, 4096 + 16, &digest);
        file
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let file = signed();
        check(&file).unwrap();
        for at in [
            0,
            0x1f1,
            86,
            88 + 63,
            88 + 68,
            88 + 143,
            88 + 152,
            1000,
            4095,
        ] {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(check(&damaged).is_err(), "{at}");
        }
        // The digest does not cover the checksum.
        let mut patched = file;
        patched[88 + 64] ^= 1;
        check(&patched).unwrap();
    }

    #[test]
    fn unsigned_and_odd_files_pass() {
        let mut file = signed();
        file[88 + 144..88 + 152].fill(0);
        check(&file).unwrap();
        let mut other_digest = signed();
        other_digest[4096..4105].fill(0);
        other_digest[1000] ^= 1;
        check(&other_digest).unwrap();
        for at in [0x3c, 88 + 144, 88 + 148] {
            let mut odd = signed();
            odd[at..at + 4].fill(0xff);
            check(&odd).unwrap();
        }
        for len in (0..4200).step_by(13) {
            let whole = signed();
            let _ = check(&whole[..len.min(whole.len())]);
        }
    }
}
