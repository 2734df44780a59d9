//! In-kernel interrupt chips of a VM: their locks, and how vCPUs are told of changes.
//!
//! Lock order: irqchip → LAPIC. While a LAPIC's lock is held, no other lock is taken; what a LAPIC wants done is
//! returned as an `Action`.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use irqchip::{Accepted, Irqchip, Lapic, LapicConfig, LapicSet, LineStatus, Pit};

use super::{VmState, options::Options, xen::events::Event};
use crate::shared::{VcpuShared, request};

/// A time that never comes: no PIT event is due.
const NEVER: u64 = u64::MAX;

/// PIC, IOAPIC, PIT and routing behind their lock.
#[derive(Debug)]
pub(crate) struct Chips {
    irqchip: Mutex<Irqchip>,
    /// Number of pins of the VMM's IOAPIC, if PIC and IOAPIC are in the VMM (KVM_CAP_SPLIT_IRQCHIP).
    split: Option<u32>,
    /// Copies of chip state that vCPUs read without the lock.
    pic_intr: AtomicBool,
    pit_next_ns: AtomicU64,
    ioapic_base: AtomicU64,
    /// One bit per vector that an IOAPIC pin sends: the chips, or the VMM's IOAPIC, must be told of its EOI.
    vectors: [AtomicU64; 4],
}

/// The LAPICs of a VM, for [`irqchip::deliver`].
#[derive(Debug)]
pub(crate) struct Lapics<'a> {
    pub(crate) vm: &'a VmState,
    pub(crate) vcpus: &'a [Arc<VcpuShared>],
}

impl LapicSet for Lapics<'_> {
    fn nr_lapics(&self) -> usize {
        self.vcpus.len()
    }
    fn index_of_vp(&self, vp: u32) -> Option<usize> {
        // Indices mostly follow the order of creation.
        let is_it = |v: &Arc<VcpuShared>| v.vp_index.load(Ordering::Relaxed) == vp;
        let guess = Some(vp as usize).filter(|i| self.vcpus.get(*i).is_some_and(is_it));
        guess.or_else(|| self.vcpus.iter().position(is_it))
    }
    fn has_own_ids(&self) -> bool {
        !self.vm.has_renumbered.load(Ordering::Acquire)
    }
    fn send_event(&mut self, vcpu: u32, port: u32) -> LineStatus {
        let sent = self.vm.send_event(self.vcpus, Event { vcpu, port });
        sent.unwrap_or(LineStatus::IGNORED)
    }
    fn with<R>(&mut self, index: usize, f: impl FnOnce(&mut Lapic) -> R) -> R {
        f(&mut self.vcpus[index].lapic())
    }
    fn notify(&mut self, index: usize, what: Accepted) {
        self.vcpus[index].accepted(what);
    }
}

impl Chips {
    /// KVM_CREATE_IRQCHIP: makes all chips.
    pub(crate) fn new(options: &Options) -> Self {
        Self::with(Irqchip::new(), None, options)
    }
    /// KVM_CAP_SPLIT_IRQCHIP: makes the routing alone. A GSI leads nowhere until the VMM routes it.
    pub(crate) fn split(pins: u32, options: &Options) -> Self {
        Self::with(Irqchip::default(), Some(pins), options)
    }
    fn with(mut irqchip: Irqchip, split: Option<u32>, options: &Options) -> Self {
        irqchip.x2apic_format = options.has_x2apic_format();
        Self {
            split,
            pic_intr: AtomicBool::new(false),
            pit_next_ns: AtomicU64::new(NEVER),
            ioapic_base: AtomicU64::new(irqchip.ioapic.mmio_range().start),
            vectors: Default::default(),
            irqchip: Mutex::new(irqchip),
        }
    }
    /// Number of pins of the VMM's IOAPIC; `None` if PIC and IOAPIC are in the kernel.
    #[inline]
    pub(crate) const fn split_pins(&self) -> Option<u32> {
        self.split
    }
    /// True if an IOAPIC pin sends this vector.
    #[inline]
    pub(crate) fn has_vector(&self, vector: u8) -> bool {
        self.vectors[usize::from(vector >> 6)].load(Ordering::Acquire) >> (vector & 63) & 1 != 0
    }
    /// KVM_CREATE_PIT2: false if there is a PIT already.
    pub(crate) fn create_pit(&self, speaker: bool) -> bool {
        let mut chip = self.lock();
        let is_new = chip.pit.is_none();
        if is_new {
            chip.pit = Some(Pit::new(speaker, host::clock::monotonic_ns()));
            self.publish(&chip);
        }
        is_new
    }
    fn lock(&self) -> MutexGuard<'_, Irqchip> {
        self.irqchip.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Updates the copies that vCPUs poll. Returns true if the PIC's output rose.
    fn publish(&self, chip: &Irqchip) -> bool {
        let next = chip
            .pit
            .as_ref()
            .and_then(Pit::next_event_ns)
            .unwrap_or(NEVER);
        self.pit_next_ns.store(next, Ordering::Release);
        let ioapic = chip.ioapic.mmio_range();
        self.ioapic_base.store(ioapic.start, Ordering::Release);
        // The chips are locked, so nobody else stores between the two.
        let intr = chip.pic.intr();
        let was = self.pic_intr.load(Ordering::Relaxed);
        if intr != was {
            self.pic_intr.store(intr, Ordering::Release);
        }
        intr && !was
    }
    /// True if the PIC requests service.
    #[inline]
    pub(crate) fn is_pic_intr(&self) -> bool {
        self.pic_intr.load(Ordering::Acquire)
    }
    /// When the PIT needs service next, on the monotonic clock.
    #[inline]
    pub(crate) fn pit_next_ns(&self) -> u64 {
        self.pit_next_ns.load(Ordering::Acquire)
    }
}

impl VmState {
    /// Like [`Self::with_routing`], for calls that need PIC, IOAPIC and PIT: `None` if these are in the VMM.
    pub(crate) fn with_chips<R>(
        &self,
        f: impl FnOnce(&mut Irqchip, &mut Lapics<'_>) -> R,
    ) -> Option<R> {
        if !self.has_pic() {
            return None;
        }
        self.with_routing(f)
    }
    /// Updates the LAPICs after a change of KVM_CAP_X2APIC_API or of the quirks.
    pub(crate) fn update_lapic_options(&self) {
        let format = self.options.has_x2apic_format();
        let quirk = self.options.has_broadcast_quirk();
        self.with_routing(|chip, _| chip.x2apic_format = format);
        for vcpu in self.vcpus().iter() {
            let mut lapic = vcpu.lapic();
            let config = LapicConfig {
                broadcast_quirk: quirk,
                lint0_reenabled: self
                    .options
                    .has_quirk(kvm_bindings::KVM_X86_QUIRK_LINT0_REENABLED),
                ..*lapic.config()
            };
            lapic.set_config(config);
        }
    }
    /// True if `gpa` may be in the IOAPIC's registers, and the IOAPIC is in the kernel.
    #[inline]
    pub(crate) fn may_be_ioapic(&self, gpa: u64) -> bool {
        let chips = self.chips().filter(|c| c.split.is_none());
        chips.is_some_and(|c| gpa.wrapping_sub(c.ioapic_base.load(Ordering::Acquire)) < 0x1000)
    }
    /// True if PIC and IOAPIC are in the kernel, not in the VMM.
    #[inline]
    pub(crate) fn has_pic(&self) -> bool {
        self.chips().is_some_and(|c| c.split.is_none())
    }
    /// Runs `f` on the routing, the chips and the LAPICs, and tells the vCPUs that are affected. `None` without
    /// in-kernel LAPICs.
    pub(crate) fn with_routing<R>(
        &self,
        f: impl FnOnce(&mut Irqchip, &mut Lapics<'_>) -> R,
    ) -> Option<R> {
        let chips = self.chips()?;
        let vcpus = self.vcpus();
        let mut chip = chips.lock();
        let result = f(&mut chip, &mut self.lapics(&vcpus));
        let rose = chips.publish(&chip);
        drop(chip);
        if rose {
            // Any vCPU whose LAPIC accepts ExtINT may take the PIC's interrupt.
            for vcpu in vcpus.iter() {
                vcpu.request(request::EVENT);
            }
        }
        Some(result)
    }
    /// Returns the LAPICs as destinations of messages.
    pub(crate) fn lapics<'a>(&'a self, vcpus: &'a [Arc<VcpuShared>]) -> Lapics<'a> {
        Lapics { vm: self, vcpus }
    }
    /// Notes that a LAPIC may have another id than its vCPU.
    pub(crate) fn note_renumbered(&self) {
        self.has_renumbered.store(true, Ordering::Release);
    }
    /// Notes that a device of the VMM's is about to interrupt: it may have written code before.
    pub(crate) fn note_device_event(&self) {
        self.device_events.fetch_add(1, Ordering::Release);
    }
    /// Updates the bits of vectors. Called when the IOAPIC's redirection table, or the routing that stands for it, has
    /// changed.
    pub(crate) fn publish_vectors(&self) {
        let Some(chips) = self.chips() else { return };
        let chip = chips.lock();
        let words = match chips.split {
            Some(pins) => chip.user_vectors(pins),
            None => {
                let mut words = [0u64; 4];
                for vector in chip.ioapic.save().redirtbl.map(|entry| entry as u8) {
                    words[usize::from(vector >> 6)] |= 1 << (vector & 63);
                }
                words
            }
        };
        for (to, from) in chips.vectors.iter().zip(words) {
            to.store(from, Ordering::Release);
        }
    }
    /// Advances the PIT if it is due.
    pub(crate) fn service_pit(&self, now_ns: u64) {
        if self.chips().is_some_and(|c| c.pit_next_ns() <= now_ns) {
            self.with_chips(|chip, lapics| chip.advance_pit(lapics, now_ns));
        }
    }
}
