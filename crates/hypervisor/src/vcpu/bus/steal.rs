//! Steal time and the "preempted" mark (KVM document "msr", MSR_KVM_STEAL_TIME).
//!
//! Steal time is the run-queue delay of the vCPU's thread as the host's scheduler counts it, including the time outside
//! of KVM_RUN. Reading it takes system calls, which a [`host::ServiceThread`] makes on request. A request is made when
//! time is missing, and every tenth of a second. Time is missing if there is a gap between two readings of the clock
//! while the guest runs, or a delay before an entry, which then waits for the answer: after a short pause for some
//! milliseconds at most. If the host does not tell the delay, the gaps are counted instead. Each KVM_RUN is a new
//! version of the structure.
//!
//! DEVIATION: the "preempted" mark is set only while the vCPU sleeps in HLT, as the host announces no preemption.
//! Without /proc, and where a filter for all threads forbids opening files, delays below a millisecond and outside of
//! KVM_RUN are not counted.

use std::{
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use x86_cpu::{CpuState, Flush, GuestBus};

use super::Bus;

/// Bit of the MSR: the guest uses the structure.
const ENABLE: u64 = 1;
/// Reserved bits of the MSR, 1 to 5: the structure is 64 bytes long and aligned.
const RESERVED: u64 = 0x3e;
/// Offsets in `struct kvm_steal_time`.
const STEAL: u64 = 0;
const VERSION: u64 = 8;
const PREEMPTED: u64 = 16;
/// KVM_VCPU_PREEMPTED.
const MARK: u128 = 1;
/// KVM_VCPU_FLUSH_TLB: another vCPU asks for a flush before this vCPU runs again.
const FLUSH_TLB: u128 = 2;
/// Shortest gap that counts while the guest runs. A time slice of the host's scheduler is about 3 ms; 128 blocks of
/// guest code with a few host page faults take less than this limit.
const GAP_NS: u64 = 1_000_000;
/// Shortest pause before an entry that may contain a delay worth waiting for.
const LATE_US: u64 = 150;
/// Longest wait for the answer after a short pause. Most answers take 50 µs. If other threads want the processor, the
/// service thread waits for it, too, for several slices of the scheduler.
const WAIT: Duration = Duration::from_millis(20);
/// After a pause of this length an entry waits until the answer is there, so that the guest is told of what was stolen
/// in the pause,
const LONG_US: u64 = 10_000;
/// but no longer than this, in case no answer comes.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// Shorter pauses' waits take at most one part in this many of the time,
const SHARE: u64 = 64;
/// plus this much at once.
const AT_ONCE_US: u64 = 100_000;
/// The service thread is asked at least this often.
const ASK_EVERY_US: u64 = 100_000;

/// Steal time of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct Steal {
    /// MSR_KVM_STEAL_TIME.
    msr: u64,
    /// The guest is Xen's, which has a structure of its own.
    is_xens: bool,
    stolen_ns: u64,
    /// Stolen time that the guest's structure does not yet contain.
    untold_ns: u64,
    /// The last reading of the monotonic clock while running; 0 after the vCPU paused by itself.
    looked_ns: u64,
    /// TSC at the last reading of the clock, or at the last entry.
    seen_tsc: u64,
    /// The thread, and its run-queue delay as far as it has been counted.
    counted: Option<(i32, u64)>,
    is_asked: bool,
    /// The last answer had no figure, so gaps are counted.
    is_estimated: bool,
    /// Sum of the gaps since the last answer.
    gaps_ns: u64,
    /// TSC at which the next request is due.
    due_tsc: u64,
    /// Ticks spent on waiting, less those regained since (one in [`SHARE`]); and the TSC at which this was computed.
    spent: u64,
    spent_tsc: u64,
}

fn ticks(us: u64) -> u64 {
    us * u64::from(host::cpu::tsc_khz()) / 1000
}

impl Steal {
    /// True if the guest is told of stolen time.
    const fn is_on(&self) -> bool {
        self.has_structure() || self.is_xens
    }

    const fn has_structure(&self) -> bool {
        self.msr & ENABLE != 0
    }

    fn count(&mut self, ns: u64) {
        self.stolen_ns = self.stolen_ns.saturating_add(ns);
        self.untold_ns = self.untold_ns.saturating_add(ns);
    }

    /// Takes over an answer of the service thread.
    fn answered(&mut self, waited: host::run_delay::Waited) {
        let gaps = std::mem::take(&mut self.gaps_ns);
        self.is_asked = false;
        self.is_estimated = waited.ns.is_none();
        let new = match (waited.ns, self.counted) {
            (Some(ns), Some((thread, before))) if thread == waited.thread => {
                ns.saturating_sub(before)
            }
            // The delay of a new thread counts only from now on.
            (Some(_), _) => 0,
            (None, _) => gaps,
        };
        self.counted = waited.ns.map(|ns| (waited.thread, ns));
        self.count(new);
    }

    /// Returns how long an entry may wait for the answer after a pause of `pause` ticks.
    fn may_wait(&mut self, tsc: u64, pause: u64) -> Option<Duration> {
        let since = tsc.wrapping_sub(std::mem::replace(&mut self.spent_tsc, tsc));
        self.spent = self.spent.saturating_sub(since / SHARE);
        if self.is_estimated || pause < ticks(LATE_US) {
            None
        } else if pause >= ticks(LONG_US) {
            Some(LONG_WAIT)
        } else {
            (self.spent < ticks(AT_ONCE_US)).then_some(WAIT)
        }
    }
}

impl Bus {
    pub(in crate::vcpu) const fn steal_msr(&self) -> u64 {
        self.pv.steal.msr
    }
    pub(in crate::vcpu) const fn stolen_ns(&self) -> u64 {
        self.pv.steal.stolen_ns
    }
    /// WRMSR of MSR_KVM_STEAL_TIME; false is #GP.
    pub(in crate::vcpu) fn set_steal_msr(&mut self, value: u64) -> bool {
        if value & RESERVED != 0 {
            return false;
        }
        let steal = &mut self.pv.steal;
        if !steal.has_structure() {
            // Time stolen before the guest enabled the structure is not reported.
            *steal = Steal {
                is_xens: steal.is_xens,
                stolen_ns: steal.stolen_ns,
                looked_ns: steal.looked_ns,
                is_asked: steal.is_asked,
                ..Steal::default()
            };
        }
        steal.msr = value;
        self.write_steal();
        true
    }
    /// Has stolen time counted for Xen's structure, or for KVM's alone.
    pub(in crate::vcpu) fn count_steal_for_xen(&mut self, on: bool) {
        self.pv.steal.is_xens = on;
    }
    /// Waits for the answer at the beginning of KVM_RUN, if the pause before it may contain stolen time.
    #[inline]
    pub(in crate::vcpu) fn note_entry(&mut self, cpu: &mut CpuState) {
        let steal = &mut self.pv.steal;
        if steal.is_on() {
            let tsc = host::cpu::rdtsc();
            let seen = std::mem::replace(&mut steal.seen_tsc, tsc);
            if let Some(limit) = steal.may_wait(tsc, tsc.wrapping_sub(seen)) {
                self.wait_for_delay(cpu, tsc, limit);
            }
        }
    }
    /// Advances the structure's version. Each KVM_RUN is a new version, whether or not time was stolen.
    #[inline]
    pub(in crate::vcpu) fn advance_steal_version(&mut self) {
        if let Some(gpa) = self.gpa() {
            // The next even version.
            let next = |version: u128| u128::from((version as u32 | 1).wrapping_add(1));
            let _ = self.vm.memory.rmw_gpa(gpa + VERSION, 4, next);
        }
    }
    #[cold]
    fn wait_for_delay(&mut self, cpu: &mut CpuState, tsc: u64, limit: Duration) {
        // An answer that is there or on its way may be older than the pause, so a new one is requested.
        self.take_delay(tsc);
        self.ask_for_delay();
        // While asleep, this vCPU is not waited for.
        self.shared.set_asleep(true);
        self.run_delay.wait(limit);
        self.shared.set_asleep(false);
        self.serve_flushes(cpu);
        self.take_delay(tsc);
        let steal = &mut self.pv.steal;
        steal.spent += host::cpu::rdtsc().saturating_sub(tsc);
    }
    fn ask_for_delay(&mut self) {
        self.pv.steal.is_asked = true;
        self.pv.steal.due_tsc = 0;
        self.run_delay.ask();
    }
    /// Takes over the service thread's answer, if it is there.
    fn take_delay(&mut self, tsc: u64) {
        let steal = &mut self.pv.steal;
        if !steal.is_asked {
            return;
        }
        let Some(waited) = self.run_delay.answer() else {
            return;
        };
        steal.answered(waited);
        steal.due_tsc = tsc.wrapping_add(ticks(ASK_EVERY_US));
        if steal.untold_ns != 0 {
            self.write_steal();
            self.note_running();
        }
    }
    /// Notes a reading of the clock while the vCPU runs.
    #[inline]
    pub(in crate::vcpu) fn note_time(&mut self, now_ns: u64) {
        let tsc = self.looked.1;
        let steal = &mut self.pv.steal;
        let before = std::mem::replace(&mut steal.looked_ns, now_ns);
        steal.seen_tsc = tsc;
        if before != 0 && now_ns.saturating_sub(before) >= GAP_NS {
            self.vm.load.note_contention(now_ns);
            self.note_gap(now_ns - before);
        }
        if self.pv.steal.is_on() && tsc >= self.pv.steal.due_tsc {
            self.look_after_delay(tsc);
        }
    }
    #[cold]
    fn note_gap(&mut self, ns: u64) {
        let steal = &mut self.pv.steal;
        if !steal.is_on() {
            steal.stolen_ns = steal.stolen_ns.saturating_add(ns);
        } else if steal.is_estimated {
            steal.count(ns);
            self.write_steal();
        } else {
            steal.gaps_ns = steal.gaps_ns.saturating_add(ns);
            steal.due_tsc = 0;
        }
    }
    #[cold]
    fn look_after_delay(&mut self, tsc: u64) {
        if self.pv.steal.is_asked {
            self.take_delay(tsc);
        } else {
            self.ask_for_delay();
        }
    }
    /// Notes that the vCPU stops running by itself, so that the time until it runs again is no gap.
    pub(in crate::vcpu) fn note_pause(&mut self) {
        self.pv.steal.looked_ns = 0;
    }
    fn gpa(&self) -> Option<u64> {
        let steal = &self.pv.steal;
        steal.has_structure().then_some(steal.msr & !ENABLE)
    }
    /// Adds the unreported time to the guest's structure, whose contents a VMM may have restored.
    fn write_steal(&mut self) {
        let Some(gpa) = self.gpa() else { return };
        let new = std::mem::take(&mut self.pv.steal.untold_ns);
        let memory = &self.vm.memory;
        // If the address has no memory, nothing is written, as in KVM.
        let (Some(version), Some(stolen)) = (
            memory.read_gpa(gpa + VERSION, 4),
            memory.read_gpa(gpa + STEAL, 8),
        ) else {
            return;
        };
        // Odd version, contents, even version, because the guest reads without a lock.
        let odd = version as u32 | 1;
        let _ = memory.write_gpa(gpa + VERSION, 4, odd.into());
        fence(Ordering::SeqCst);
        let stolen = (stolen as u64).wrapping_add(new);
        let _ = memory.write_gpa(gpa + STEAL, 8, stolen.into());
        fence(Ordering::SeqCst);
        let _ = memory.write_gpa(gpa + VERSION, 4, odd.wrapping_add(1).into());
    }
    /// Sets the mark before the vCPU sleeps: other vCPUs then need not interrupt it for a TLB flush, nor wait for it.
    pub(in crate::vcpu) fn mark_preempted(&mut self) {
        if let Some(gpa) = self.gpa() {
            let _ = self.vm.memory.rmw_gpa(gpa + PREEMPTED, 1, |_| MARK);
        }
    }
    /// Clears the mark after the sleep, and carries out a flush that was left for this vCPU.
    pub(in crate::vcpu) fn unmark_preempted(&mut self, cpu: &mut CpuState) {
        if let Some(gpa) = self.gpa()
            && let Some(old) = self.vm.memory.rmw_gpa(gpa + PREEMPTED, 1, |_| 0)
            && old & FLUSH_TLB != 0
        {
            self.flush(cpu, Flush::Global);
        }
    }
}

#[cfg(test)]
mod tests {
    use host::run_delay::Waited;

    use super::*;

    #[test]
    fn each_delay_counts_once() {
        let mut steal = Steal::default();
        // Rows: thread, its figure, gaps seen before the answer, time counted afterwards.
        for (thread, ns, gaps, want) in [
            (1, Some(500), 0, 0),
            (1, Some(700), 0, 200),
            // The gaps are contained in the figure.
            (1, Some(1700), 900, 1200),
            (1, Some(1700), 0, 1200),
            // The figure of another thread includes time before it came to the vCPU.
            (2, Some(90), 50, 1200),
            (2, Some(95), 0, 1205),
            // Without a figure the gaps are counted.
            (2, None, 30, 1235),
            (2, None, 0, 1235),
            (2, Some(1000), 0, 1235),
            (2, Some(1001), 0, 1236),
        ] {
            steal.gaps_ns = gaps;
            steal.answered(Waited { thread, ns });
            assert_eq!(steal.stolen_ns, want, "{thread} {ns:?}");
            assert_eq!(steal.is_estimated, ns.is_none());
        }
        assert_eq!(steal.untold_ns, steal.stolen_ns);
    }

    #[test]
    fn entries_wait_for_a_small_part_of_the_time() {
        let mut steal = Steal::default();
        let second = ticks(1_000_000);
        let (mut tsc, mut waited) = (second, 0);
        while tsc < 2 * second {
            if steal.may_wait(tsc, ticks(200)).is_some() {
                steal.spent += ticks(50);
                waited += ticks(50);
            }
            tsc += ticks(200);
        }
        let limit = ticks(AT_ONCE_US) + second / SHARE;
        assert!((limit - ticks(200)..limit + ticks(100)).contains(&waited));
        // Except after a long pause, when the entry waits until there is an answer.
        assert_eq!(steal.may_wait(tsc, ticks(LONG_US)), Some(LONG_WAIT));
        assert_eq!(steal.may_wait(tsc, ticks(LATE_US) - 1), None);
        steal.is_estimated = true;
        assert_eq!(steal.may_wait(tsc + 100 * second, second), None);
    }
}
