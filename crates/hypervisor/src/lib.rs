//! KVM's semantics: VM, vCPU and device objects, run loop, paravirtualisation, clock.

#![forbid(unsafe_code)]
