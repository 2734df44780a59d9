//! Executes one harmless instruction on the host CPU with a given register file and memory operand.

/// Stubs that execute one instruction each; one set per vCPU.
#[derive(Debug, Default)]
pub struct Native {}

impl Native {
    /// Maps the code buffer. If the host does not allow it, nothing can be prepared.
    pub fn new() -> Self {
        Self {}
    }
    /// True, once, if all stubs were dropped for want of room since the last
    /// call: decoded instructions that refer to one must be dropped too.
    pub fn take_reset(&mut self) -> bool {
        false
    }
}
