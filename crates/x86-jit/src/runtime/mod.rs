//! [`run::Jit`] and what translated code calls: the dispatch loop, translation on demand, and the requests of generated code.

mod flat;
mod given_up;
mod interrupt_return;
pub(crate) mod leave;
pub(crate) mod lockstep;
mod refill;
pub(crate) mod run;
pub(crate) mod stats;
mod system_call;
pub(crate) mod translation;
