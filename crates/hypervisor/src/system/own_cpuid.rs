//! anykvm's own CPUID leaves: docs/paravirt.md, "How a guest finds them".

use mmu::RootArea;

/// The first leaf, which has the signature.
pub(crate) const LEAVES: u32 = 0x4000_0200;
pub(crate) const SIGNATURE: [u8; 12] = *b"anykvmanykvm";
/// EAX of the second leaf: the doorbell hypercall exists.
const DOORBELL: u32 = 1 << 0;
/// EAX of the second leaf: the cache of roots exists.
pub(crate) const ROOT_CACHE: u32 = 1 << 1;
pub(crate) const FEATURES: u32 = DOORBELL | ROOT_CACHE;
/// Version of the cache of roots.
pub(crate) const VERSION: u32 = 1;
/// Bytes before the entries in the area of the cache of roots, and bytes of an entry.
pub(crate) const FIRST_ENTRY: u32 = 64;
pub(crate) const ENTRY: u32 = 16;

/// Returns EBX to EDX of the second leaf: version, number of roots, and size in bytes of the largest area.
pub(crate) const fn limits() -> [u32; 3] {
    let roots = RootArea::MAX_ENTRIES as u32;
    [VERSION, roots, FIRST_ENTRY + ENTRY * roots]
}
