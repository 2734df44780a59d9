//! PIC, IOAPIC, LAPIC, PIT and interrupt routing as pure state machines.
//!
//! There are no threads, locks, clocks or fds here (SDM vol. 3, chapter 11; KVM API document, "KVM_CREATE_IRQCHIP" and
//! what follows). The caller passes the time as [`Now`]; requests of a chip are returned or passed to a callback. The
//! caller owns locking and wake-ups.
//!
//! Calls between the parts, and therefore the lock order if each part has its own lock: the PIC calls nothing, the
//! IOAPIC calls the LAPICs of the destination. A LAPIC never calls out: it returns an EOI or an IPI as an [`Action`],
//! which is carried out after the LAPIC's lock has been dropped.

#![forbid(unsafe_code)]

pub mod dest;
pub mod ioapic;
pub mod irqchip;
pub mod lapic;
pub mod line;
pub mod message;
pub mod msi;
pub mod pic;
pub mod pit;
pub mod routing;
pub mod time;

pub use dest::{LapicSet, deliver};
pub use ioapic::{Ioapic, IoapicState};
pub use irqchip::Irqchip;
pub use lapic::{Accepted, Action, Eoi, InvalidAccess, Lapic, LapicConfig, LapicState};
pub use line::{LineStatus, source};
pub use message::{DeliveryMode, LapicIrq, Shorthand};
pub use msi::Msi;
pub use pic::{Pic, PicState};
pub use pit::{Pit, PitChannelState, PitState};
pub use routing::{Entry, Route, RouteError, Routing};
pub use time::Now;
