//! Random KVM calls on the ABI: every ioctl, on descriptors of every kind, with structures that are nearly right,
//! pointers that are not, several threads at once, and descriptors that are closed while others use them.
//!
//! A *sequence* is made from a seed and runs in threads of its own. [`kvm_abi`] answers its calls. There may be no
//! crash and no hang (the parent process sees those); an errno has to be one that the API document lists for the call
//! ([`errno`]); no call may succeed with a pointer that cannot be used; and nothing may be left behind when all
//! descriptors are closed ([`Residue`]).

mod arena;
mod arguments;
mod errno;
mod residue;
mod sequence;

pub use arena::Arena;
pub use residue::Residue;
pub use sequence::{Counts, run_sequence};
