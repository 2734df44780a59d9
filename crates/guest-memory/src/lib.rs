//! Guest-physical memory: memslots, their dirty state and code tracking. The only crate that touches guest RAM.
//!
//! Invariants:
//! * No reference to guest RAM is ever formed: vCPUs and the VMM write to it at
//!   any time. All accesses are single machine instructions ([`HostPage`]).
//! * The slot table is immutable; a change publishes a new one. A vCPU works on
//!   its own snapshot and takes the new one at its next synchronisation point;
//!   other threads hold the table's read lock for the duration of an access.
//! * A request to vCPUs is data first, then [`GuestMemory::epoch`]; whoever has
//!   acknowledged an epoch has seen all data published before it.
//!
//! **What hvas are trusted for.** As with KVM, the hva range of a slot is the
//! VMM's promise: memory that is its to share, for as long as the slot exists.
//! The promise is made where the raw number enters the process's API (an ioctl,
//! or an `unsafe fn` of a Rust API), not here. What the VMM changes of it while
//! the slot exists, it says before ([`GuestMemory::begin_host_change`]); a page
//! that vanishes without a word makes the host fault.

mod dirty;
pub mod dirty_ring;
mod host_pages;
pub mod memory;
pub mod page;
mod page_set;
pub mod slot;
pub mod table;
pub mod tagged;
mod words;
pub mod writers;

pub use dirty_ring::{DirtyRing, DirtyRingMemory, DirtyRings};
pub use host_pages::HostChange;
pub use memory::{GuestMemory, Harvest};
pub use page::HostPage;
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
