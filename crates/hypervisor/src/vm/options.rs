//! What a VMM changes of a VM as a whole: KVM_ENABLE_CAP and KVM_X86_SET_MSR_FILTER
//! (KVM API document, chapter 7).

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use irqchip::LapicConfig;
use kvm_bindings::*;
use pmu::Filter;

use super::Vm;
use crate::{
    Error, Result,
    limits::{
        APIC_TICK_NS, DISABLED_EXITS, HYPERCALL_EXITS, MANUAL_DIRTY_LOG, MAX_VCPU_IDS, QUIRKS,
        X2APIC_API,
    },
    shared::request,
};

/// KVM_MSR_EXIT_REASON_VALID_MASK.
const MSR_EXIT_REASONS: u64 =
    (KVM_MSR_EXIT_REASON_INVAL | KVM_MSR_EXIT_REASON_UNKNOWN | KVM_MSR_EXIT_REASON_FILTER) as u64;
/// Bytes of the bitmap of one range of an MSR filter (KVM_MSR_FILTER_MAX_BITMAP_SIZE).
const MAX_BITMAP: usize = KVM_MSR_FILTER_MAX_BITMAP_SIZE as usize;

/// The options of a VM. All may change while vCPUs run.
#[derive(Debug)]
pub(crate) struct Options {
    exception_payload: AtomicBool,
    triple_fault_event: AtomicBool,
    /// KVM_CAP_MSR_PLATFORM_INFO.
    platform_info: AtomicBool,
    /// KVM_MSR_EXIT_REASON_* that exit.
    msr_exits: AtomicU32,
    /// KVM_X86_SET_MSR_FILTER.
    msr_filter: RwLock<Option<Arc<MsrFilter>>>,
    /// How often the filter was set.
    msr_filters: AtomicU64,
    hypercall_exits: AtomicU64,
    /// KVM_X86_DISABLE_EXITS_*.
    disabled_exits: AtomicU32,
    /// KVM_DIRTY_LOG_MANUAL_*.
    manual_dirty_log: AtomicU32,
    /// KVM_X2APIC_API_*.
    x2apic_api: AtomicU32,
    /// KVM_X86_QUIRK_* that the VMM does not want.
    disabled_quirks: AtomicU64,
    /// KVM_CAP_MAX_VCPU_ID; 0 before it is set.
    max_vcpu_id: AtomicU32,
    /// KVM_SET_NR_MMU_PAGES; 0 before it is set.
    pub(super) mmu_pages: AtomicU32,
    /// KVM_CAP_X86_APIC_BUS_CYCLES_NS.
    apic_tick_ns: AtomicU64,
    /// KVM_PMU_CAP_DISABLE.
    has_no_counters: AtomicBool,
    /// KVM_SET_PMU_EVENT_FILTER, and how often it was called.
    event_filter: RwLock<(Option<Arc<Filter>>, u64)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            exception_payload: AtomicBool::new(false),
            triple_fault_event: AtomicBool::new(false),
            platform_info: AtomicBool::new(true),
            msr_exits: AtomicU32::new(0),
            msr_filter: RwLock::default(),
            msr_filters: AtomicU64::new(0),
            hypercall_exits: AtomicU64::new(0),
            disabled_exits: AtomicU32::new(0),
            manual_dirty_log: AtomicU32::new(0),
            x2apic_api: AtomicU32::new(0),
            disabled_quirks: AtomicU64::new(0),
            max_vcpu_id: AtomicU32::new(0),
            mmu_pages: AtomicU32::new(0),
            apic_tick_ns: AtomicU64::new(APIC_TICK_NS),
            has_no_counters: AtomicBool::new(false),
            event_filter: RwLock::default(),
        }
    }
}

impl Options {
    /// `mmu_pages`: as if KVM_SET_NR_MMU_PAGES had been called.
    pub(super) fn new(mmu_pages: Option<u32>) -> Self {
        Self {
            mmu_pages: AtomicU32::new(mmu_pages.unwrap_or(0)),
            ..Self::default()
        }
    }
    /// KVM_CAP_EXCEPTION_PAYLOAD.
    pub(crate) fn has_exception_payload(&self) -> bool {
        self.exception_payload.load(Ordering::Relaxed)
    }
    /// KVM_CAP_X86_TRIPLE_FAULT_EVENT.
    pub(crate) fn has_triple_fault_event(&self) -> bool {
        self.triple_fault_event.load(Ordering::Relaxed)
    }
    /// The guest may read MSR_PLATFORM_INFO.
    pub(crate) fn shows_platform_info(&self) -> bool {
        self.platform_info.load(Ordering::Relaxed)
    }
    /// A refusal for this KVM_MSR_EXIT_REASON_* is an exit and not #GP.
    pub(crate) fn exits_for_msr(&self, reason: u32) -> bool {
        self.msr_exits.load(Ordering::Relaxed) & reason != 0
    }
    /// The hypercall of this number goes to the VMM.
    pub(crate) fn exits_for_hypercall(&self, nr: u64) -> bool {
        nr < 64 && self.hypercall_exits.load(Ordering::Relaxed) >> nr & 1 != 0
    }
    /// True if the KVM_X86_DISABLE_EXITS_* bit is set.
    #[inline]
    pub(crate) fn keeps(&self, what: u32) -> bool {
        self.disabled_exits.load(Ordering::Relaxed) & what != 0
    }
    /// KVM_GET_DIRTY_LOG clears nothing (KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE).
    pub(crate) fn is_dirty_log_manual(&self) -> bool {
        self.manual_dirty_log.load(Ordering::Relaxed) & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0
    }
    /// Pages are dirty when logging begins (KVM_DIRTY_LOG_INITIALLY_SET).
    pub(crate) fn starts_dirty(&self) -> bool {
        self.manual_dirty_log.load(Ordering::Relaxed) & KVM_DIRTY_LOG_INITIALLY_SET != 0
    }
    /// What a new vCPU's LAPIC follows.
    pub(super) fn lapic(&self) -> LapicConfig {
        LapicConfig {
            broadcast_quirk: self.has_broadcast_quirk(),
            lint0_reenabled: self.has_quirk(KVM_X86_QUIRK_LINT0_REENABLED),
            ns_per_tick: self.apic_tick_ns(),
            ..LapicConfig::default()
        }
    }
    /// KVM_X2APIC_API_USE_32BIT_IDS.
    pub(crate) fn has_x2apic_format(&self) -> bool {
        self.x2apic_api.load(Ordering::Relaxed) & KVM_X2APIC_API_USE_32BIT_IDS != 0
    }
    /// Without KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK.
    pub(crate) fn has_broadcast_quirk(&self) -> bool {
        self.x2apic_api.load(Ordering::Relaxed) & KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK == 0
    }
    /// The KVM_X86_QUIRK_* is not disabled.
    #[inline]
    pub(crate) fn has_quirk(&self, quirk: u32) -> bool {
        self.disabled_quirks.load(Ordering::Relaxed) & u64::from(quirk) == 0
    }
    /// Nanoseconds of an undivided tick of the LAPICs' timers.
    pub(crate) fn apic_tick_ns(&self) -> u64 {
        self.apic_tick_ns.load(Ordering::Relaxed)
    }
    /// vCPUs have performance counters if CPUID shows them.
    pub(crate) fn has_counters(&self) -> bool {
        !self.has_no_counters.load(Ordering::Relaxed)
    }
    /// The event filter, and a number that changes with it.
    pub(crate) fn event_filter(&self) -> (Option<Arc<Filter>>, u64) {
        self.event_filter
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
    /// vCPU ids are below it.
    pub(crate) fn vcpu_id_limit(&self) -> u32 {
        match self.max_vcpu_id.load(Ordering::Relaxed) {
            0 => MAX_VCPU_IDS as u32,
            limit => limit,
        }
    }
    /// The first value stays: EINVAL for another one.
    fn set_max_vcpu_id(&self, limit: u64) -> Result<()> {
        let limit = u32::try_from(limit)
            .ok()
            .filter(|limit| *limit <= MAX_VCPU_IDS as u32)
            .ok_or(Error::InvalidArgument)?;
        let was = self
            .max_vcpu_id
            .compare_exchange(0, limit, Ordering::Relaxed, Ordering::Relaxed);
        match was {
            Err(old) if old != limit => Err(Error::InvalidArgument),
            _ => Ok(()),
        }
    }
}

/// One range of KVM_X86_SET_MSR_FILTER.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrRange {
    /// KVM_MSR_FILTER_READ, KVM_MSR_FILTER_WRITE.
    pub flags: u32,
    /// The first MSR.
    pub base: u32,
    /// MSRs in the range; a range of none does not count.
    pub count: u32,
    /// A bit for each: set, the access is allowed.
    pub bitmap: Vec<u8>,
}

/// KVM_SET_PMU_EVENT_FILTER.
#[derive(Clone, Copy, Debug)]
pub struct EventFilter<'a> {
    /// KVM_PMU_EVENT_ALLOW or KVM_PMU_EVENT_DENY.
    pub action: u32,
    /// A bit for each fixed counter.
    pub fixed: u32,
    /// KVM_PMU_EVENT_FLAG_MASKED_EVENTS.
    pub flags: u32,
    /// The events.
    pub events: &'a [u64],
}

/// A checked KVM_X86_SET_MSR_FILTER.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MsrFilter {
    default_allow: bool,
    ranges: Vec<MsrRange>,
}

impl MsrFilter {
    /// `None` for what KVM refuses.
    fn new(flags: u32, ranges: Vec<MsrRange>) -> Option<Self> {
        let default_allow = flags & KVM_MSR_FILTER_DEFAULT_DENY == 0;
        let ranges: Vec<_> = ranges.into_iter().filter(|r| r.count != 0).collect();
        if flags & !KVM_MSR_FILTER_DEFAULT_DENY != 0 || ranges.is_empty() && !default_allow {
            return None;
        }
        let access = KVM_MSR_FILTER_READ | KVM_MSR_FILTER_WRITE;
        let is_good = |r: &MsrRange| {
            r.flags != 0 && r.flags & !access == 0 && r.bitmap.len() == bitmap_len(r.count)
        };
        let is_small = |r: &MsrRange| bitmap_len(r.count) <= MAX_BITMAP;
        if !ranges.iter().all(|r| is_small(r) && is_good(r)) {
            return None;
        }
        Some(Self {
            default_allow,
            ranges,
        })
    }
    /// The first range that has the MSR decides.
    fn allows(&self, index: u32, access: u32) -> bool {
        // A VMM has no say in x2APIC accesses.
        if (0x800..0x900).contains(&index) {
            return true;
        }
        let range = self.ranges.iter().find_map(|r| {
            let at = index.checked_sub(r.base).filter(|at| *at < r.count)?;
            (r.flags & access != 0).then_some((r, at))
        });
        range.map_or(self.default_allow, |(r, at)| {
            let byte = r.bitmap.get(at as usize / 8).copied().unwrap_or(0);
            byte >> (at % 8) & 1 != 0
        })
    }
}

/// The MSR filter as a vCPU knows it, which spares most accesses a lock.
#[derive(Debug, Default)]
pub(crate) struct KnownMsrFilter {
    /// The value of [`Options::msr_filters`] that the filter belongs to.
    number: u64,
    filter: Option<Arc<MsrFilter>>,
}

impl KnownMsrFilter {
    /// The VM's filter lets the guest make this access (KVM_MSR_FILTER_READ or _WRITE).
    #[inline]
    pub(crate) fn allows(&mut self, options: &Options, index: u32, access: u32) -> bool {
        if options.msr_filters.load(Ordering::Acquire) != self.number {
            self.update(options);
        }
        self.filter.as_ref().is_none_or(|f| f.allows(index, access))
    }
    #[cold]
    fn update(&mut self, options: &Options) {
        let slot = (options.msr_filter.read()).unwrap_or_else(PoisonError::into_inner);
        self.number = options.msr_filters.load(Ordering::Relaxed);
        self.filter.clone_from(&slot);
    }
}

/// Bytes of a range's bitmap.
const fn bitmap_len(count: u32) -> usize {
    count.div_ceil(8) as usize
}

impl Vm {
    /// KVM_X86_SET_MSR_FILTER. EINVAL for unknown flags, ranges that name no access or are too
    /// long, bitmaps of another length than their range's, and a filter that denies everything.
    pub fn set_msr_filter(&self, flags: u32, ranges: Vec<MsrRange>) -> Result<()> {
        let filter = MsrFilter::new(flags, ranges).ok_or(Error::InvalidArgument)?;
        let options = &self.state.options;
        let mut slot = options
            .msr_filter
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let filters = !filter.default_allow || !filter.ranges.is_empty();
        *slot = filters.then(|| Arc::new(filter));
        options.msr_filters.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// KVM_SET_PMU_EVENT_FILTER. EINVAL for unknown actions and flags, and masked entries with bits
    /// that are not theirs; E2BIG for too many.
    pub fn set_pmu_event_filter(&self, filter: &EventFilter<'_>) -> Result<()> {
        const MASKED: u32 = 1;
        let is_known = matches!(filter.action, KVM_PMU_EVENT_ALLOW | KVM_PMU_EVENT_DENY);
        if !is_known || filter.flags & !MASKED != 0 {
            return Err(Error::InvalidArgument);
        }
        if filter.events.len() > pmu::MAX_EVENTS {
            return Err(Error::TooBig(pmu::MAX_EVENTS));
        }
        let new = Filter::new(
            filter.action == KVM_PMU_EVENT_ALLOW,
            filter.fixed,
            filter.flags & MASKED != 0,
            filter.events,
        );
        let new = new.map_err(|_| Error::InvalidArgument)?;
        let mut slot =
            (self.state.options.event_filter.write()).unwrap_or_else(PoisonError::into_inner);
        *slot = (Some(Arc::new(new)), slot.1 + 1);
        drop(slot);
        self.state.request_all(request::FILTER);
        Ok(())
    }

    /// KVM_PMU_CAP_DISABLE: EINVAL once there are vCPUs.
    fn set_counters_off(&self, off: bool) -> Result<()> {
        // The lock keeps vCPUs from appearing meanwhile.
        let vcpus = self.state.vcpus();
        if !vcpus.is_empty() {
            return Err(Error::InvalidArgument);
        }
        let options = &self.state.options;
        options.has_no_counters.store(off, Ordering::Relaxed);
        Ok(())
    }

    /// EINVAL for none or so many that the longest count overflows, and once there are vCPUs; ENXIO
    /// without in-kernel LAPICs.
    fn set_apic_tick_ns(&self, ns: u64) -> Result<()> {
        const LONGEST: u64 = u32::MAX as u64 * 128;
        if ns == 0 || LONGEST.checked_mul(ns).is_none() {
            return Err(Error::InvalidArgument);
        }
        if self.state.chips().is_none() {
            return Err(Error::NoSuchDevice);
        }
        // The lock keeps vCPUs from appearing meanwhile.
        let vcpus = self.state.vcpus();
        if !vcpus.is_empty() {
            return Err(Error::InvalidArgument);
        }
        self.state.options.apic_tick_ns.store(ns, Ordering::Relaxed);
        Ok(())
    }

    /// EINVAL once there are vCPUs.
    fn disable_exits(&self, exits: u32) -> Result<()> {
        // The lock keeps vCPUs from appearing meanwhile.
        let vcpus = self.state.vcpus();
        if !vcpus.is_empty() {
            return Err(Error::InvalidArgument);
        }
        let disabled = &self.state.options.disabled_exits;
        disabled.fetch_or(exits, Ordering::Relaxed);
        Ok(())
    }

    /// KVM_ENABLE_CAP on the VM: EINVAL for flags, unknown arguments, and capabilities that need
    /// not be enabled or are not offered.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        if cap.flags != 0 {
            return Err(Error::InvalidArgument);
        }
        let options = &self.state.options;
        let arg = cap.args[0];
        let within = |valid: u64| {
            if arg & !valid == 0 {
                Ok(arg as u32)
            } else {
                Err(Error::InvalidArgument)
            }
        };
        match cap.cap {
            KVM_CAP_HALT_POLL => self
                .state
                .load
                .set_halt_poll_ns(within(u64::from(u32::MAX))?.into()),
            KVM_CAP_SPLIT_IRQCHIP => self.split_irqchip(arg)?,
            KVM_CAP_X2APIC_API => {
                options
                    .x2apic_api
                    .fetch_or(within(X2APIC_API)?, Ordering::Relaxed);
                self.state.update_lapic_options();
            }
            // Those that are not named are enabled again.
            KVM_CAP_DISABLE_QUIRKS | KVM_CAP_DISABLE_QUIRKS2 => {
                if cap.cap == KVM_CAP_DISABLE_QUIRKS2 {
                    within(QUIRKS)?;
                }
                options.disabled_quirks.store(arg, Ordering::Relaxed);
                self.state.update_lapic_options();
            }
            KVM_CAP_EXCEPTION_PAYLOAD => {
                options.exception_payload.store(arg != 0, Ordering::Relaxed);
            }
            KVM_CAP_X86_TRIPLE_FAULT_EVENT => {
                options
                    .triple_fault_event
                    .store(arg != 0, Ordering::Relaxed);
            }
            KVM_CAP_MSR_PLATFORM_INFO => options.platform_info.store(arg != 0, Ordering::Relaxed),
            KVM_CAP_X86_USER_SPACE_MSR => options
                .msr_exits
                .store(within(MSR_EXIT_REASONS)?, Ordering::Relaxed),
            KVM_CAP_EXIT_HYPERCALL => options
                .hypercall_exits
                .store(within(HYPERCALL_EXITS)?.into(), Ordering::Relaxed),
            KVM_CAP_X86_DISABLE_EXITS => self.disable_exits(within(DISABLED_EXITS.into())?)?,
            KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 => {
                let valid = if arg & u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE) != 0 {
                    MANUAL_DIRTY_LOG
                } else {
                    0
                };
                options
                    .manual_dirty_log
                    .store(within(valid)?, Ordering::Relaxed);
                self.state.memory.set_starts_dirty(options.starts_dirty());
            }
            KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL => self.set_dirty_ring(arg)?,
            KVM_CAP_MAX_VCPU_ID => {
                // The vCPU that starts at reset has to be possible.
                if u64::from(self.state.boot_id.load(Ordering::Relaxed)) > arg {
                    return Err(Error::InvalidArgument);
                }
                options.set_max_vcpu_id(arg)?;
            }
            KVM_CAP_X86_APIC_BUS_CYCLES_NS => self.set_apic_tick_ns(arg)?,
            KVM_CAP_PMU_CAPABILITY => {
                let off = within(KVM_PMU_CAP_DISABLE.into())? != 0;
                self.set_counters_off(off)?;
            }
            // Hardware without bus lock detection can be told to leave it off.
            KVM_CAP_X86_BUS_LOCK_EXIT => _ = within(KVM_BUS_LOCK_DETECTION_OFF.into())?,
            _ => return Err(Error::InvalidArgument),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(flags: u32, base: u32, count: u32, bits: u64) -> MsrRange {
        let mut bitmap = bits.to_le_bytes().to_vec();
        bitmap.resize(bitmap_len(count), 0xff);
        MsrRange {
            flags,
            base,
            count,
            bitmap,
        }
    }

    #[test]
    fn the_first_range_with_the_access_decides() {
        let filter = MsrFilter::new(
            KVM_MSR_FILTER_DEFAULT_DENY,
            vec![
                range(KVM_MSR_FILTER_READ, 0x10, 4, 0b0010),
                range(KVM_MSR_FILTER_READ | KVM_MSR_FILTER_WRITE, 0x10, 8, 0xff),
            ],
        )
        .expect("good filter");
        for (index, access, allowed) in [
            (0x10, KVM_MSR_FILTER_READ, false),
            (0x11, KVM_MSR_FILTER_READ, true),
            (0x10, KVM_MSR_FILTER_WRITE, true),
            (0x14, KVM_MSR_FILTER_READ, true),
            (0x18, KVM_MSR_FILTER_READ, false),
            (0xf, KVM_MSR_FILTER_WRITE, false),
            (0x830, KVM_MSR_FILTER_WRITE, true),
        ] {
            assert_eq!(filter.allows(index, access), allowed, "{index:#x} {access}");
        }
    }

    #[test]
    fn filters_that_kvm_refuses() {
        let read = KVM_MSR_FILTER_READ;
        let bad = [
            (2, vec![]),
            (KVM_MSR_FILTER_DEFAULT_DENY, vec![]),
            (KVM_MSR_FILTER_DEFAULT_DENY, vec![range(read, 0, 0, 0)]),
            (0, vec![range(0, 0, 1, 0)]),
            (0, vec![range(4, 0, 1, 0)]),
            (0, vec![range(read, 0, 0x600 * 8 + 1, 0)]),
        ];
        for (flags, ranges) in bad {
            assert_eq!(MsrFilter::new(flags, ranges.clone()), None, "{ranges:?}");
        }
        assert!(MsrFilter::new(0, vec![range(read, 0, 0x600 * 8, 0)]).is_some());
    }
}
