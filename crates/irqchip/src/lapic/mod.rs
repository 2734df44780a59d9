//! The local APIC (SDM vol. 3, chapter 11), xAPIC and x2APIC, as KVM has it.
//!
//! There is one per vCPU. The vCPU calls [`Lapic::pending`] and [`Lapic::ack`]; messages from elsewhere come through
//! [`Lapic::accept`]. Registers are kept as the 64 words of the register page, so that save and restore are copies.
//!
//! Invariants: a vector is delivered only if its class is above PPR's. Hence the vectors in service have distinct
//! classes, unless the guest ends them out of order; `PPR = max(TPR, highest ISR class)`.
//!
//! DEVIATION: as in KVM the error status register never records an error
//! (illegal vectors and registers are silently dropped).

mod access;
mod icr;
mod sints;
pub mod spec;
mod state;
mod timer;

pub use access::{Action, Eoi, InvalidAccess};
pub use sints::NR_SINTS;
pub use state::{InvalidState, LapicState};

use crate::message::{BROADCAST, DeliveryMode, LapicIrq, X2APIC_BROADCAST};
use sints::Sints;
use spec::{apic_base, lvt, reg, spiv};
use timer::Timer;

/// The LAPIC's identity and what CPUID says: nothing here changes while the vCPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapicConfig {
    /// vCPU id: the initial xAPIC id and the fixed x2APIC id.
    pub vcpu_id: u32,
    /// The bootstrap processor.
    pub bsp: bool,
    /// CPUID has x2APIC.
    pub x2apic: bool,
    /// CPUID has the TSC-deadline timer.
    pub tsc_deadline: bool,
    /// EOI broadcasts can be suppressed (KVM: x2APIC with a split irqchip).
    pub directed_eoi: bool,
    /// There is a CMCI LVT (KVM: MCG_CAP has CMCI_P).
    pub cmci: bool,
    /// MAXPHYADDR, for reserved bits of IA32_APIC_BASE.
    pub maxphyaddr: u8,
    /// KVM_X86_QUIRK_LINT0_REENABLED: the BSP starts with LINT0 = ExtINT.
    pub lint0_reenabled: bool,
    /// Device messages to 0xff reach x2APICs (not with KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK).
    pub broadcast_quirk: bool,
    /// The interrupt of a performance counter masks its own LVT entry: Intel's does, AMD's does not.
    pub masks_pmi: bool,
    /// Nanoseconds of the timer's tick before division (KVM_CAP_X86_APIC_BUS_CYCLES_NS).
    pub ns_per_tick: u64,
}

impl Default for LapicConfig {
    /// A BSP as KVM makes it before any CPUID is set.
    fn default() -> Self {
        Self {
            vcpu_id: 0,
            bsp: true,
            x2apic: true,
            tsc_deadline: true,
            directed_eoi: false,
            cmci: false,
            maxphyaddr: 46,
            lint0_reenabled: true,
            broadcast_quirk: true,
            masks_pmi: true,
            ns_per_tick: spec::NS_PER_TICK,
        }
    }
}

/// The outcome of a message at a LAPIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// No effect: the LAPIC is disabled, or the message is a de-assert.
    Ignored,
    /// The vector was already requested.
    Coalesced,
    /// A vector is newly requested.
    Interrupt,
    /// An NMI for the vCPU.
    Nmi,
    /// An SMI for the vCPU.
    Smi,
    /// INIT for the vCPU.
    Init,
    /// SIPI with this page number.
    Sipi(u8),
    /// Wakes a halted vCPU (KVM_HC_KICK_CPU).
    Unhalt,
}

/// One local APIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lapic {
    config: LapicConfig,
    apic_base: u64,
    /// The register page, one word for each 16 bytes. IRR, ISR and TMR live here.
    regs: [u32; spec::NR_REGS],
    timer: Timer,
    /// Hyper-V's synthetic sources, which neither a reset nor INIT changes.
    sints: Sints,
}

impl Lapic {
    /// A LAPIC after power-up.
    pub fn new(config: LapicConfig) -> Self {
        let mut lapic = Self {
            config,
            apic_base: 0,
            regs: [0; spec::NR_REGS],
            timer: Timer::default(),
            sints: Sints::default(),
        };
        lapic.reset();
        lapic
    }

    /// Power-up reset.
    pub fn reset(&mut self) {
        self.apic_base = spec::DEFAULT_BASE
            | apic_base::ENABLE
            | if self.config.bsp { apic_base::BSP } else { 0 };
        self.set(reg::ID, self.config.vcpu_id << 24);
        self.init();
    }

    /// INIT: resets everything except the id, the base and the mode (SDM vol. 3, 11.4.7.3).
    pub fn init(&mut self) {
        let id = self.get(reg::ID);
        self.regs = [0; spec::NR_REGS];
        self.timer = Timer::default();
        self.set(reg::ID, id);
        self.set_version();
        for r in self.lvts() {
            self.set(r, lvt::MASKED);
        }
        if self.config.bsp && self.config.lint0_reenabled {
            self.set(reg::LVT0, (DeliveryMode::ExtInt as u32) << lvt::MODE_SHIFT);
        }
        self.set(reg::DFR, u32::MAX);
        self.set(reg::SPIV, 0xff);
        if self.is_x2apic() {
            self.load_x2apic_id();
        }
    }

    /// Identity and features.
    pub const fn config(&self) -> &LapicConfig {
        &self.config
    }
    /// Changes the features (KVM_SET_CPUID2, KVM_ENABLE_CAP).
    pub fn set_config(&mut self, config: LapicConfig) {
        if config.cmci && !self.config.cmci {
            self.set(reg::LVTCMCI, lvt::MASKED);
        }
        self.config = config;
        self.set_version();
    }

    /// IA32_APIC_BASE.
    pub const fn apic_base(&self) -> u64 {
        self.apic_base
    }
    /// gpa of the register page.
    pub const fn base_gpa(&self) -> u64 {
        self.apic_base & apic_base::ADDRESS
    }
    /// Globally enabled (IA32_APIC_BASE.EN).
    pub const fn is_enabled(&self) -> bool {
        self.apic_base & apic_base::ENABLE != 0
    }
    /// In x2APIC mode.
    pub const fn is_x2apic(&self) -> bool {
        self.apic_base & apic_base::MODE == apic_base::MODE
    }
    /// Enabled by the spurious-vector register.
    pub fn is_software_enabled(&self) -> bool {
        self.get(reg::SPIV) & spiv::ENABLED != 0
    }
    /// Marked as the bootstrap processor.
    pub const fn is_bsp(&self) -> bool {
        self.apic_base & apic_base::BSP != 0
    }
    /// APIC id: 8 bits in xAPIC mode, 32 in x2APIC mode.
    pub fn id(&self) -> u32 {
        if self.is_x2apic() {
            self.get(reg::ID)
        } else {
            self.get(reg::ID) >> 24
        }
    }

    /// Writes IA32_APIC_BASE. A guest's write follows the mode graph of SDM vol. 3, figure 11-27; the VMM (`host`) may
    /// enter any valid mode.
    pub fn set_apic_base(&mut self, value: u64, host: bool) -> Result<Action, InvalidAccess> {
        let mut reserved = apic_base::RESERVED | u64::MAX << self.config.maxphyaddr.min(52);
        if !self.config.x2apic {
            reserved |= apic_base::EXTD;
        }
        let (old, new) = (self.apic_base & apic_base::MODE, value & apic_base::MODE);
        if value & reserved != 0 || new == apic_base::EXTD {
            return Err(InvalidAccess);
        }
        if !host
            && (old == apic_base::MODE && new == apic_base::ENABLE
                || old == 0 && new == apic_base::MODE)
        {
            return Err(InvalidAccess);
        }
        self.apic_base = value;
        if old != new {
            if new == apic_base::MODE {
                self.load_x2apic_id();
            } else if new == apic_base::ENABLE {
                // Only the VMM comes here directly from x2APIC mode.
                self.set(reg::ID, self.config.vcpu_id << 24);
            }
        }
        Ok(if old == new {
            Action::None
        } else {
            Action::Recheck
        })
    }

    /// Takes a message for which [`crate::dest::matches`] has returned true.
    pub fn accept(&mut self, irq: &LapicIrq) -> Accepted {
        match irq.mode {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => {
                if irq.level_triggered && !irq.assert
                    || !self.is_enabled()
                    || !self.is_software_enabled()
                {
                    Accepted::Ignored
                } else if self.set_irq(irq.vector, irq.level_triggered) {
                    Accepted::Interrupt
                } else {
                    Accepted::Coalesced
                }
            }
            DeliveryMode::Smi => Accepted::Smi,
            DeliveryMode::Nmi => Accepted::Nmi,
            DeliveryMode::RemoteRead => Accepted::Unhalt,
            // The INIT level de-assert of old IPI sequences has no effect.
            DeliveryMode::Init if irq.level_triggered && !irq.assert => Accepted::Ignored,
            DeliveryMode::Init => Accepted::Init,
            DeliveryMode::Sipi => Accepted::Sipi(irq.vector),
            // The vCPU asks for the PIC's output when it injects; the output is not sent as a message.
            DeliveryMode::ExtInt => Accepted::Ignored,
        }
    }

    /// Requests a vector; returns true if it was not requested before.
    ///
    /// The enable bits are not considered here, because [`Self::accept`] has checked them. As in KVM, vectors below 16
    /// are treated like any other.
    pub fn set_irq(&mut self, vector: u8, level_triggered: bool) -> bool {
        let newly = !self.test_bit(reg::IRR, vector);
        self.set_bit(reg::TMR, vector, level_triggered);
        self.set_bit(reg::IRR, vector, true);
        newly
    }

    /// Returns the vector that would be delivered now: the highest requested one, if its priority class is above the
    /// processor priority.
    #[inline]
    pub fn pending(&self) -> Option<u8> {
        let irr = self.highest(reg::IRR)?;
        (self.is_enabled() && irr & 0xf0 > self.ppr()).then_some(irr)
    }

    /// The highest requested vector, whatever the processor priority.
    pub fn highest_irr(&self) -> Option<u8> {
        self.highest(reg::IRR)
    }
    /// The highest vector in service.
    pub fn highest_isr(&self) -> Option<u8> {
        self.highest(reg::ISR)
    }

    /// Puts `vector`, which [`Self::pending`] has returned, into service.
    pub fn ack(&mut self, vector: u8) {
        self.set_bit(reg::IRR, vector, false);
        if !self.sints.is_auto_eoi(vector) {
            self.set_bit(reg::ISR, vector, true);
        }
    }

    /// Ends the interrupt in service; `None` if there is none.
    pub fn eoi(&mut self) -> Option<Eoi> {
        let vector = self.highest(reg::ISR)?;
        self.set_bit(reg::ISR, vector, false);
        let level = self.test_bit(reg::TMR, vector);
        Some(Eoi {
            vector,
            level,
            broadcast: level && self.get(reg::SPIV) & spiv::DIRECTED_EOI == 0,
            sints: self.sints.of(vector),
        })
    }

    /// Returns the vector in service whose EOI the guest may do by clearing a bit in memory (PV EOI). There is one if
    /// neither another interrupt, nor a chip, nor a synthetic source waits for the EOI. `chip_waits` says whether an
    /// IOAPIC pin (or a notifier) uses a vector.
    pub fn pv_eoi_candidate(&self, chip_waits: impl FnOnce(u8) -> bool) -> Option<u8> {
        if self.highest(reg::IRR).is_some() {
            return None;
        }
        let vector = self.highest(reg::ISR)?;
        let is_alone = !self.test_bit(reg::TMR, vector) && !self.sints.is_connected(vector);
        (is_alone && !chip_waits(vector)).then_some(vector)
    }

    /// Task priority, 8 bits.
    pub fn tpr(&self) -> u8 {
        self.get(reg::TASKPRI) as u8
    }
    /// Sets the task priority, all 8 bits.
    pub fn set_tpr(&mut self, value: u8) {
        self.set(reg::TASKPRI, u32::from(value));
    }
    /// CR8.
    pub fn cr8(&self) -> u8 {
        self.tpr() >> 4
    }
    /// Sets the task priority as MOV to CR8 does; only the low four bits are used.
    pub fn set_cr8(&mut self, value: u8) {
        self.set(reg::TASKPRI, u32::from(value & 0xf) << 4);
    }

    /// Processor priority (SDM vol. 3, 11.8.3.1).
    pub fn ppr(&self) -> u8 {
        let tpr = self.tpr();
        let isr = self.highest(reg::ISR).unwrap_or(0);
        if tpr & 0xf0 >= isr & 0xf0 {
            tpr
        } else {
            isr & 0xf0
        }
    }

    /// True if this LAPIC passes the PIC's INTR on to the vCPU: it is disabled, or LINT0 is an unmasked ExtINT (virtual
    /// wire).
    pub fn accepts_pic(&self) -> bool {
        let lvt0 = self.get(reg::LVT0);
        !self.is_enabled() || lvt0 & lvt::MASKED == 0 && lvt_mode(lvt0) == DeliveryMode::ExtInt
    }

    /// Handles a pulse on LINT0 or LINT1, or an event of the CPU itself.
    pub fn local(&mut self, source: LocalSource) -> Accepted {
        let r = match source {
            LocalSource::Lint0 => reg::LVT0,
            LocalSource::Lint1 => reg::LVT1,
            LocalSource::Pmc => reg::LVTPC,
            LocalSource::Thermal => reg::LVTTHMR,
            LocalSource::Timer => reg::LVTT,
            LocalSource::Cmci => reg::LVTCMCI,
        };
        let entry = self.get(r);
        if !self.is_enabled() || entry & lvt::MASKED != 0 {
            return Accepted::Ignored;
        }
        let accepted = self.accept(&LapicIrq {
            dest: 0,
            logical: false,
            shorthand: crate::Shorthand::ToSelf,
            mode: lvt_mode(entry),
            vector: entry as u8,
            assert: true,
            level_triggered: entry & lvt::LEVEL != 0,
            redirection_hint: false,
        });
        // SDM vol. 3, 11.5.1: a PMI masks its own LVT entry.
        let masks = source == LocalSource::Pmc && self.config.masks_pmi;
        if masks && accepted != Accepted::Ignored {
            self.set(reg::LVTPC, entry | lvt::MASKED);
        }
        accepted
    }

    /// True if a physical destination names this LAPIC.
    pub(crate) fn matches_physical(&self, dest: u32) -> bool {
        if dest == self.broadcast_id() {
            return true;
        }
        // In KVM an id that xAPIC mode cannot hold may be used before x2APIC is switched on, so that vCPUs above 254
        // can be started. The low 8 bits of that id belong to another vCPU. DEVIATION: KVM finds the LAPIC by the low 8
        // bits if no other one has them.
        if self.has_cut_id() {
            dest == self.config.vcpu_id
        } else {
            self.id() == dest
        }
    }

    /// True if the LAPIC is in xAPIC mode and its id register has only the low 8 bits of the vCPU's id.
    fn has_cut_id(&self) -> bool {
        let id = self.config.vcpu_id;
        id > 0xff && !self.is_x2apic() && self.id() == id & 0xff
    }

    /// True if the id is the vCPU's id, or has its low 8 bits in xAPIC mode.
    pub fn has_own_id(&self) -> bool {
        self.id() == self.config.vcpu_id || self.has_cut_id()
    }

    /// True if a logical destination names this LAPIC (SDM vol. 3, 11.6.2.2, 11.12.9).
    pub(crate) fn matches_logical(&self, dest: u32) -> bool {
        if dest == self.broadcast_id() {
            return true;
        }
        let ldr = self.get(reg::LDR);
        if self.is_x2apic() {
            return ldr >> 16 == dest >> 16 && ldr & dest & 0xffff != 0;
        }
        let ldr = ldr >> 24;
        match self.get(reg::DFR) >> 28 {
            0xf => ldr & dest != 0,
            0x0 => ldr >> 4 == dest >> 4 && ldr & dest & 0xf != 0,
            _ => false,
        }
    }

    const fn broadcast_id(&self) -> u32 {
        if self.is_x2apic() {
            X2APIC_BROADCAST
        } else {
            BROADCAST
        }
    }

    fn set_version(&mut self) {
        let nr_lvt = self.lvts().count() as u32;
        let directed = if self.config.directed_eoi {
            spec::VERSION_DIRECTED_EOI
        } else {
            0
        };
        self.set(reg::VERSION, spec::VERSION | (nr_lvt - 1) << 16 | directed);
    }

    fn load_x2apic_id(&mut self) {
        let id = self.config.vcpu_id;
        self.set(reg::ID, id);
        self.set(reg::LDR, x2apic_ldr(id));
    }

    fn lvts(&self) -> impl Iterator<Item = usize> + use<> {
        (reg::LVTT..=reg::LVTERR).chain(self.config.cmci.then_some(reg::LVTCMCI))
    }

    fn get(&self, r: usize) -> u32 {
        self.regs[r]
    }
    fn set(&mut self, r: usize, value: u32) {
        self.regs[r] = value;
    }

    fn test_bit(&self, base: usize, vector: u8) -> bool {
        self.regs[base + usize::from(vector >> 5)] >> (vector & 31) & 1 != 0
    }
    fn set_bit(&mut self, base: usize, vector: u8, on: bool) {
        let word = &mut self.regs[base + usize::from(vector >> 5)];
        let bit = 1u32 << (vector & 31);
        if on {
            *word |= bit;
        } else {
            *word &= !bit;
        }
    }
    /// Returns the highest vector that is set in one of the 256-bit registers.
    #[inline]
    fn highest(&self, base: usize) -> Option<u8> {
        (0..8u32).rev().find_map(|i| {
            let word = self.regs[base + i as usize];
            (word != 0).then(|| (i * 32 + word.ilog2()) as u8)
        })
    }
}

/// What raises an LVT entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalSource {
    /// Pin LINT0.
    Lint0,
    /// Pin LINT1: NMIs.
    Lint1,
    /// A performance counter overflowed.
    Pmc,
    /// Thermal sensor.
    Thermal,
    /// The LAPIC's own timer.
    Timer,
    /// A machine-check error that needs no action at once. Only with [`LapicConfig::cmci`].
    Cmci,
}

/// Returns the x2APIC logical id: a cluster, and one bit in it (SDM vol. 3, 11.12.10.2).
const fn x2apic_ldr(id: u32) -> u32 {
    id >> 4 << 16 | 1 << (id & 0xf)
}

const fn lvt_mode(entry: u32) -> DeliveryMode {
    DeliveryMode::from_bits(entry >> lvt::MODE_SHIFT)
}

#[cfg(test)]
mod tests;
