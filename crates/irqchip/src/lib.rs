//! PIC, IOAPIC, LAPIC, PIT and interrupt routing as pure state machines.
//!
//! There are no threads, locks, clocks or fds here (SDM vol. 3, chapter 11;
//! KVM API document, "KVM_CREATE_IRQCHIP" and what follows). Time comes in as
//! [`Now`]; what a chip wants done goes out as a return value or through a
//! callback. The caller owns locking and wake-ups.
//!
//! Who calls whom, and therefore the lock order if each part has its own lock:
//! PIC → (nothing), IOAPIC → LAPICs of the destination. A LAPIC never calls
//! out: an EOI or an IPI is returned as an [`Action`], to be acted on after the
//! LAPIC's lock has been dropped.

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
