//! Executes one harmless instruction on the host CPU with a given register file and memory operand.
//!
//! The guest has the host's instruction set, so its FP and SIMD instructions
//! need no emulation: [`Native`] wraps each distinct form in a stub that loads
//! the registers it uses, runs it, and stores its results (bit-exact, including
//! flags and rounding). Nothing is executed that is not on the allow-list in
//! `allow`, and no exception of the guest's reaches the host as a signal.

mod alignment;
mod allow;
mod buffer;
mod features;
mod flags;
mod mxcsr;
mod native;
pub mod oracle;
mod stub;

pub(crate) use native::Context;

pub use alignment::{is_aligned_move, must_be_aligned};
pub use allow::{Class, Form, form, form_on};
pub use features::{HostFeatures, host_has, is_fp};
pub use flags::{DECODED_ARITH, decoded_flags};
pub use mxcsr::host_mask;
pub use native::{Native, Operand, Outcome, StubId};
