//! What handles a port or MMIO access: a chip, an ioeventfd, a coalesced ring, or the VMM.
//!
//! For vCPUs [`IoBus`] is an immutable table: a change clones it, and [`Published`] hands the new one to readers, who
//! see it at their next access at the cost of one atomic load. Nothing here signals an eventfd or touches guest memory:
//! the bus decides, and the caller acts.

#![forbid(unsafe_code)]

pub mod bus;
pub mod coalesced;
mod index;
pub mod ioeventfd;
pub mod publish;
pub mod ranges;

pub use bus::{IoBus, ReadAnswer, WriteAnswer};
pub use coalesced::{RingEntry, RingMemory, Zones};
pub use ioeventfd::{DoorbellError, DoorbellSpec, Doorbells};
pub use publish::{Published, Reader};
pub use ranges::{Overlap, Ranges};

/// The two I/O address spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// Ports.
    Pio,
    /// Guest-physical addresses without a memslot.
    Mmio,
}
