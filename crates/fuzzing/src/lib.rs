//! Generators and oracles shared by tests and fuzz targets.
//!
//! A [`Case`] is a block of code with a start state, made from a seed. It runs on the [`Host`] and on the [`Guest`]
//! (the interpreter); [`compare`] returns what differs. [`jit`] compares the translator with the interpreter. [`ioctl`]
//! makes random KVM calls.

#![forbid(unsafe_code)]

mod case;
mod difference;
mod forms;
pub mod golden;
pub mod ioctl;
pub mod jit;
mod machine;
mod model;
mod operands;
mod random;
mod setup;
mod state;
mod undefined;

pub use case::{Case, Generator};
pub use difference::{Differential, compare};
pub use forms::{Family, forms};
pub use machine::{Guest, Host, Outcome};
pub use random::Random;
pub use x86_native::oracle::Mode;

pub use undefined::{FLAGS, OTHERS, Row, Strictness, When, undefined_page};
