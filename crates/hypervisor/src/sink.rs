//! [`StatsSink`]: where statistics of VMs and vCPUs are shown.

/// Memory that shows statistics to others.
pub trait StatsSink: Send + Sync {
    /// Stores all values, in the order of [`VCPU_STATS`](crate::VCPU_STATS) or [`VM_STATS`](crate::VM_STATS).
    fn store(&self, values: &[u64]);
}

/// What a statistic is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatKind {
    /// Counts up.
    Count,
    /// Nanoseconds, adding up.
    Nanoseconds,
    /// Now true (1) or false.
    Flag,
    /// How many there are now.
    Now,
}

/// A sink, once there is one.
pub(crate) struct Sink(Box<dyn StatsSink>);

impl Sink {
    pub(crate) fn new(sink: Box<dyn StatsSink>) -> Self {
        Self(sink)
    }
    pub(crate) fn store(&self, values: &[u64]) {
        self.0.store(values);
    }
}

impl core::fmt::Debug for Sink {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Sink")
    }
}
