//! [`StatsSink`]: where the statistics of VMs and vCPUs are shown.

/// Memory in which statistics are shown to others.
pub trait StatsSink: Send + Sync {
    /// Stores all values, in the order of [`VCPU_STATS`](crate::VCPU_STATS) or [`VM_STATS`](crate::VM_STATS).
    fn store(&self, values: &[u64]);
}

/// How a statistic's value is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatKind {
    /// A count of events.
    Count,
    /// A sum of nanoseconds.
    Nanoseconds,
    /// A state that is true (1) or false (0) now.
    Flag,
    /// The present number of something.
    Now,
}

/// A sink, once one is set.
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
