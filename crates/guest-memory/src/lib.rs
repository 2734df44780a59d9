//! Guest-physical memory: memslots, their dirty state and code tracking. The only crate that touches guest RAM.
//!
//! Invariants:
//! * No reference to guest RAM is ever formed: vCPUs and the VMM write to it at
//!   any time. All accesses are single machine instructions ([`HostPage`]).
//! * The slot table is immutable; a change publishes a new one. A vCPU works on
//!   its own snapshot and takes the new one at its next synchronisation point;
//!   other threads hold the table's read lock for the duration of an access.
//! * A request to vCPUs publishes its data first and raises [`GuestMemory::epoch`] afterwards; a vCPU that has
//!   acknowledged an epoch has seen all data published before it.
//!
//! **What hvas are trusted for.** As with KVM, the hva range of a slot is the VMM's promise: the VMM may share that
//! memory with the guest for as long as the slot exists. The promise is made where the raw number enters the process's
//! API (an ioctl, or an `unsafe fn` of a Rust API), not here. The VMM announces a change of that memory before it makes
//! it ([`GuestMemory::begin_host_change`]); an access to a page that vanished unannounced faults on the host.

pub mod byte_map;
mod dirty;
pub mod dirty_ring;
mod exact_code;
mod host_pages;
pub mod memory;
pub mod page;
mod page_copy;
mod page_set;
pub mod slot;
pub mod table;
pub mod tagged;
mod words;
pub mod writers;

pub use dirty_ring::{DirtyRing, DirtyRingMemory, DirtyRings};
pub use host_pages::HostChange;
pub use memory::{GuestMemory, Harvest};
pub use page::{HostPage, HostWord};
pub use page_copy::PageCopy;
pub use slot::{Slot, SlotConfig};
pub use table::{MemslotError, SlotTable};
pub use tagged::{TaggedPage, TaggedPages};
pub use writers::{Mailbox, Writer, Writers};

#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod models;
#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
