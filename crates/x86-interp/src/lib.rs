//! Reference semantics of x86: one small function per instruction.
//!
//! Guest code is decoded once into blocks of [`Insn`]s, each with a handler
//! function; [`Interp::run`] executes blocks until the bus asks for the run
//! loop or an instruction stops. The interpreter never sees a gpa and cannot
//! tell whether it runs under KVM semantics, a fuzzer or a unit test.

#![forbid(unsafe_code)]

mod access;
mod blocks;
mod decode;
mod deliver;
mod descriptor;
mod exec;
mod flags;
pub mod gating;
mod insn;
mod int;
mod registers;
mod remainder;
mod run;
mod segment;
pub mod selectors;
pub mod smm;
mod stack;
#[cfg(test)]
mod test_bus;

pub use access::Transfer;
pub use exec::{Exec, Flow, Step, Stop};
pub use flags::LazyFlags;
pub use insn::events::events_of;
pub use insn::system::cr4_valid_bits;
pub use insn::{Handler, Insn, Selector};
pub use int::Int;
pub use run::{Interp, RunStop};
