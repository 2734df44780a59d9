//! The x86 architecture as data: control registers, MSRs, descriptors, vectors, page-table entries, CPUID leaves, XSAVE layout.
//!
//! No behaviour lives here. Names are those of the Intel SDM; a constant's
//! section is named where the bit is not obvious.

#![forbid(unsafe_code)]

pub mod control;
pub mod dr;
pub mod msr;
pub mod paging;
pub mod reg;
pub mod retired;
pub mod rflags;
pub mod segment;
pub mod vector;
pub mod xsave;
