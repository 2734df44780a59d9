//! CPUID leaves of anykvm's own: docs/paravirt.md, "How a guest finds them".

use mmu::RootArea;

/// The first leaf, with the signature.
pub(crate) const LEAVES: u32 = 0x4000_0200;
pub(crate) const SIGNATURE: [u8; 12] = *b"anykvmanykvm";
/// EAX of the second: the doorbell hypercall.
const DOORBELL: u32 = 1 << 0;
/// The cache of roots.
pub(crate) const ROOT_CACHE: u32 = 1 << 1;
pub(crate) const FEATURES: u32 = DOORBELL | ROOT_CACHE;
/// The version of the cache of roots.
pub(crate) const VERSION: u32 = 1;
/// Bytes in its area before the entries, and of an entry.
pub(crate) const FIRST_ENTRY: u32 = 64;
pub(crate) const ENTRY: u32 = 16;

/// EBX to EDX of the second: the version, how many roots, and bytes of the largest area.
pub(crate) const fn limits() -> [u32; 3] {
    let roots = RootArea::MAX_ENTRIES as u32;
    [VERSION, roots, FIRST_ENTRY + ENTRY * roots]
}
