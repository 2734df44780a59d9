//! Statistics of a vCPU, as KVM_GET_STATS_FD shows them (KVM API document, 4.133).
//!
//! Counters are plain integers of the running thread. Whoever wants to see them
//! brings a [`StatsSink`], into which they are copied at each end of KVM_RUN, before
//! each sleep, and every few milliseconds while the guest computes.

use super::Bus;
use crate::{
    sink::{Sink, StatKind, StatsSink},
    vcpu::{Inner, Vcpu},
};

/// Name and kind of each statistic.
pub const VCPU_STATS: &[(&str, StatKind)] = &[
    ("exits", StatKind::Count),
    ("io_exits", StatKind::Count),
    ("mmio_exits", StatKind::Count),
    ("signal_exits", StatKind::Count),
    ("irq_window_exits", StatKind::Count),
    ("halt_exits", StatKind::Count),
    ("hypercalls", StatKind::Count),
    ("irq_injections", StatKind::Count),
    ("nmi_injections", StatKind::Count),
    ("halt_attempted_poll", StatKind::Count),
    ("halt_successful_poll", StatKind::Count),
    ("halt_wakeup", StatKind::Count),
    ("halt_wait_ns", StatKind::Nanoseconds),
    ("steal_ns", StatKind::Nanoseconds),
    ("blocking", StatKind::Flag),
    ("tlb_flush", StatKind::Count),
    ("tlb_l1_misses", StatKind::Count),
    ("tlb_reach_hits", StatKind::Count),
    ("tlb_reach_called_hits", StatKind::Count),
    ("tlb_reach_pages", StatKind::Now),
    ("tlb_l2_hits", StatKind::Count),
    ("page_walks", StatKind::Count),
    ("page_walks_short", StatKind::Count),
    ("tlb_neighbours", StatKind::Count),
    ("tlb_device_misses", StatKind::Count),
    ("tlb_permission_misses", StatKind::Count),
    ("tlb_write_rounds", StatKind::Count),
    ("dirty_posts", StatKind::Count),
    ("dirty_pages_given_up", StatKind::Count),
    ("dirty_faults", StatKind::Count),
    ("dirty_stall_ns", StatKind::Nanoseconds),
    ("mmu_contexts_made", StatKind::Count),
    ("mmu_contexts_dropped", StatKind::Count),
    ("mmu_views_made", StatKind::Count),
    ("mmu_tables_grown", StatKind::Count),
    ("mmu_contexts", StatKind::Now),
    ("mmu_tables", StatKind::Now),
    ("mmu_pages", StatKind::Now),
    ("fetch_tlb_misses", StatKind::Count),
    ("code_rechecks", StatKind::Count),
    ("code_changed_by_vmm", StatKind::Count),
    ("tlb_catch_ups", StatKind::Count),
    ("tlb_catch_ups_failed", StatKind::Count),
    ("tlb_entries_compared", StatKind::Count),
    ("tlb_entries_changed", StatKind::Count),
    ("jit_blocks", StatKind::Count),
    ("jit_insns", StatKind::Count),
    ("jit_bytes", StatKind::Count),
    ("jit_translate_ns", StatKind::Nanoseconds),
    ("jit_flushes", StatKind::Count),
    ("jit_entries", StatKind::Count),
    ("jit_branches", StatKind::Count),
    ("jit_links", StatKind::Count),
    ("jit_cross_page_links", StatKind::Count),
    ("jit_hot", StatKind::Count),
    ("jit_site_entries", StatKind::Count),
    ("jit_site_entries_dropped", StatKind::Count),
    ("jit_site_entry_misses", StatKind::Count),
    ("jit_loops_known", StatKind::Count),
    ("jit_inlined", StatKind::Count),
    ("jit_stale", StatKind::Count),
    ("jit_interpreted", StatKind::Count),
    ("jit_interpreted_slow", StatKind::Count),
    ("jit_interpreted_string", StatKind::Count),
    ("jit_interpreted_port", StatKind::Count),
    ("jit_interpreted_system", StatKind::Count),
    ("jit_interpreted_transfer", StatKind::Count),
    ("jit_interpreted_fp", StatKind::Count),
    ("jit_interpreted_other", StatKind::Count),
];

/// Time between two copies while the guest computes.
const INTERVAL_NS: u64 = 5_000_000;

/// Counters that no other part keeps.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct Counters {
    pub(in crate::vcpu) exits: u64,
    pub(in crate::vcpu) io_exits: u64,
    pub(in crate::vcpu) mmio_exits: u64,
    pub(in crate::vcpu) signal_exits: u64,
    pub(in crate::vcpu) irq_window_exits: u64,
    pub(in crate::vcpu) halt_exits: u64,
    pub(in crate::vcpu) hypercalls: u64,
    pub(in crate::vcpu) irq_injections: u64,
    pub(in crate::vcpu) nmi_injections: u64,
    pub(in crate::vcpu) halt_attempted_poll: u64,
    pub(in crate::vcpu) halt_successful_poll: u64,
    pub(in crate::vcpu) halt_wakeup: u64,
    pub(in crate::vcpu) halt_wait_ns: u64,
    pub(in crate::vcpu) is_blocking: bool,
    shown_ns: u64,
}

impl Bus {
    fn stats(&self) -> [u64; VCPU_STATS.len()] {
        let c = &self.counters;
        let mmu = self.mmu.stats();
        let kept = self.mmu.kept();
        let jit = &self.jit;
        let [slow, string, port, system, transfer, fp, other] = jit.causes;
        [
            c.exits,
            c.io_exits,
            c.mmio_exits,
            c.signal_exits,
            c.irq_window_exits,
            c.halt_exits,
            c.hypercalls,
            c.irq_injections,
            c.nmi_injections,
            c.halt_attempted_poll,
            c.halt_successful_poll,
            c.halt_wakeup,
            c.halt_wait_ns,
            self.stolen_ns(),
            c.is_blocking.into(),
            mmu.flushes,
            mmu.l1_misses,
            mmu.reach_code_hits,
            mmu.reach_hits,
            mmu.reach_pages,
            mmu.l2_hits,
            mmu.walks,
            mmu.short_walks,
            mmu.neighbours,
            mmu.device_misses,
            mmu.permission_misses,
            mmu.rounds,
            mmu.posts,
            mmu.pages_given_up,
            mmu.dirty_faults,
            mmu.stall_tsc.saturating_mul(1_000_000) / u64::from(host::cpu::tsc_khz().max(1)),
            mmu.contexts_made,
            mmu.contexts_dropped,
            mmu.views_made,
            mmu.tables_grown,
            kept.contexts as u64,
            kept.tables as u64,
            kept.pages as u64,
            mmu.fetch_misses,
            mmu.code_rechecks,
            mmu.code_changed_by_vmm,
            mmu.catch_ups,
            mmu.catch_ups_failed,
            mmu.entries_compared,
            mmu.entries_changed,
            jit.blocks,
            jit.insns,
            jit.bytes,
            jit.translate_ns,
            jit.flushes,
            jit.entries,
            jit.branches,
            jit.links,
            jit.cross_page_links,
            jit.hot,
            jit.site_entries,
            jit.site_entries_dropped,
            jit.site_entry_misses,
            jit.loops_known,
            jit.inlined,
            jit.stale,
            jit.interpreted,
            slow,
            string,
            port,
            system,
            transfer,
            fp,
            other,
        ]
    }
    /// Copies the statistics to whoever wants to see them.
    pub(in crate::vcpu) fn show_stats(&mut self) {
        if let Some(sink) = self.shared.stats.get() {
            sink.store(&self.stats());
        }
    }
}

impl Vcpu {
    /// The statistics now, by name. Waits for a KVM_RUN that is under way.
    pub fn statistics(&self) -> Vec<(&'static str, u64)> {
        let mut inner = self.lock();
        inner.take_jit_stats();
        let values = inner.bus.stats();
        VCPU_STATS.iter().map(|s| s.0).zip(values).collect()
    }
    /// Where the statistics go from now on; the first sink stays. A vCPU that runs shows
    /// them within milliseconds, another one at once.
    pub fn set_stats_sink(&self, sink: Box<dyn StatsSink>) {
        // Only the first is asked for: kvm-abi makes one file per vCPU.
        let _ = self.shared.stats.set(Sink::new(sink));
        if let Some(mut inner) = self.inner.try_lock() {
            inner.take_jit_stats();
            inner.bus.show_stats();
        }
    }
}

impl Inner {
    /// Statistics now and then while the guest computes.
    #[inline]
    pub(in crate::vcpu) fn show_stats_at(&mut self, now_ns: u64) {
        let counters = &mut self.bus.counters;
        if now_ns >= counters.shown_ns.saturating_add(INTERVAL_NS) {
            counters.shown_ns = now_ns;
            self.take_jit_stats();
            self.bus.show_stats();
        }
    }
    /// KVM_RUN is about to return.
    pub(in crate::vcpu) fn count_exit(&mut self, result: &crate::Result<()>) {
        use crate::{Error, Exit};
        let c = &mut self.bus.counters;
        c.exits += 1;
        match result {
            Ok(()) => match self.bus.exit {
                Some(Exit::Io { .. }) => c.io_exits += 1,
                Some(Exit::Mmio { .. }) => c.mmio_exits += 1,
                Some(Exit::IrqWindowOpen) => c.irq_window_exits += 1,
                Some(Exit::Hlt) => c.halt_exits += 1,
                _ => {}
            },
            Err(Error::Interrupted) => c.signal_exits += 1,
            Err(_) => {}
        }
        if self.bus.shared.stats.get().is_some() {
            self.take_jit_stats();
            self.bus.show_stats();
        }
    }
    /// The bus shows the translator's counters.
    fn take_jit_stats(&mut self) {
        if let Some(jit) = &self.jit {
            self.bus.jit = jit.stats();
        }
    }
}
