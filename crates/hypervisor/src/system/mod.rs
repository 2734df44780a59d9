//! Answers of the system fd: capabilities, supported CPUID, MSR lists.

mod caps;
mod cpuid;
mod host_leaves;
pub(crate) mod hv_cpuid;
pub(crate) mod hv_msrs;
mod msr_list;
pub(crate) mod own_cpuid;
mod speculation;

pub use caps::{check_extension, mce_cap_supported};
pub use cpuid::{emulated_cpuid, pkru_offset, signature, supported_cpuid};
pub use host_leaves::is_amd;
pub use hv_cpuid::supported_hv_cpuid;
pub use msr_list::{feature_msr, msr_feature_index_list, msr_index_list};
pub(crate) use msr_list::{is_fixed_feature, microcode};
pub(crate) use speculation::Speculation;
pub use speculation::note_host;
