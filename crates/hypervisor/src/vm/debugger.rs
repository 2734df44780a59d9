//! [`Debugger`]: the registers of Hyper-V's synthetic debugger.

/// HV_X64_MSR_SYNDBG_*.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Debugger {
    pub(crate) control: u64,
    pub(crate) status: u64,
    /// SEND_BUFFER, RECV_BUFFER, PENDING_BUFFER.
    pub(crate) pages: [u64; 3],
    pub(crate) options: u64,
}
