//! [`LapicIrq`] messages and who receives them (SDM vol. 3, 11.6).
//!
//! Lowest-priority messages go to one of the matching LAPICs, chosen by the
//! vector as KVM's default ("vector hashing") and the chipsets do: the choice
//! is stable, so that one interrupt stays on one vCPU.

use crate::lapic::{Accepted, Lapic};
use crate::line::LineStatus;

/// Destination that means "all" to a LAPIC in xAPIC mode.
pub const BROADCAST: u32 = 0xff;
/// Destination that means "all" to a LAPIC in x2APIC mode.
pub const X2APIC_BROADCAST: u32 = 0xffff_ffff;

/// Delivery mode of a message or an LVT entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DeliveryMode {
    /// To all destinations, with the vector.
    Fixed = 0,
    /// To one of the destinations.
    LowestPriority = 1,
    /// System-management interrupt.
    Smi = 2,
    /// Reserved by the SDM; KVM uses it to wake a halted vCPU (KVM_HC_KICK_CPU).
    RemoteRead = 3,
    /// Non-maskable interrupt; the vector is ignored.
    Nmi = 4,
    /// INIT.
    Init = 5,
    /// Start-up IPI; the vector is the page number.
    Sipi = 6,
    /// The vector comes from the PIC.
    ExtInt = 7,
}

impl DeliveryMode {
    /// From the low three bits.
    pub const fn from_bits(bits: u32) -> Self {
        match bits & 7 {
            0 => Self::Fixed,
            1 => Self::LowestPriority,
            2 => Self::Smi,
            3 => Self::RemoteRead,
            4 => Self::Nmi,
            5 => Self::Init,
            6 => Self::Sipi,
            _ => Self::ExtInt,
        }
    }
}

/// Destination shorthand of an IPI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shorthand {
    /// The destination field counts.
    #[default]
    None,
    /// The sender.
    ToSelf,
    /// All, the sender included.
    All,
    /// All but the sender.
    Others,
}

/// A message on the APIC bus: from an IOAPIC pin, an MSI or an ICR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapicIrq {
    /// Destination: an APIC id or a logical destination.
    pub dest: u32,
    /// The destination is logical.
    pub logical: bool,
    /// Shorthand; only IPIs have one.
    pub shorthand: Shorthand,
    /// Delivery mode.
    pub mode: DeliveryMode,
    /// Vector.
    pub vector: u8,
    /// Level of a level-triggered message; false is a de-assert.
    pub assert: bool,
    /// Level-triggered: the LAPIC sets the TMR bit and broadcasts the EOI.
    pub level_triggered: bool,
    /// MSI redirection hint: treated as lowest priority.
    pub redirection_hint: bool,
}

impl LapicIrq {
    /// An edge-triggered message to one APIC id.
    pub const fn edge(dest: u32, mode: DeliveryMode, vector: u8) -> Self {
        Self {
            dest,
            logical: false,
            shorthand: Shorthand::None,
            mode,
            vector,
            assert: true,
            level_triggered: false,
            redirection_hint: false,
        }
    }
    /// True if only one of the matching LAPICs gets it.
    pub const fn is_lowest_priority(&self) -> bool {
        matches!(self.mode, DeliveryMode::LowestPriority) || self.redirection_hint
    }
}

/// The LAPICs of a VM, each behind whatever lock the caller has.
pub trait LapicSet {
    /// How many there are; indices are below it.
    fn nr_lapics(&self) -> usize;
    /// No LAPIC has, or had, another id than its index: a physical destination is one of them only.
    fn has_own_ids(&self) -> bool {
        false
    }
    /// The LAPIC of the processor that Hyper-V's interface has under this number.
    fn index_of_vp(&self, vp: u32) -> Option<usize> {
        Some(vp as usize).filter(|vp| *vp < self.nr_lapics())
    }
    /// Runs `f` on one LAPIC with its lock held. `f` takes no other lock.
    fn with<R>(&mut self, index: usize, f: impl FnOnce(&mut Lapic) -> R) -> R;
    /// A LAPIC accepted something and its lock is dropped: note the event, kick the vCPU.
    fn notify(&mut self, index: usize, what: Accepted);
}

impl LapicSet for [Lapic] {
    fn nr_lapics(&self) -> usize {
        self.len()
    }
    fn with<R>(&mut self, index: usize, f: impl FnOnce(&mut Lapic) -> R) -> R {
        f(&mut self[index])
    }
    fn notify(&mut self, _index: usize, _what: Accepted) {}
}

/// Does `lapic` listen to this message? `from_self` is `None` if the sender is
/// not a LAPIC, else whether it is this one.
pub fn matches(lapic: &Lapic, irq: &LapicIrq, from_self: Option<bool>) -> bool {
    match irq.shorthand {
        Shorthand::ToSelf => from_self == Some(true),
        Shorthand::All => true,
        Shorthand::Others => from_self != Some(true),
        Shorthand::None => {
            // KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK: without it, a device's
            // 8-bit broadcast reaches x2APICs too.
            let quirk = from_self.is_none()
                && irq.dest == BROADCAST
                && lapic.is_x2apic()
                && lapic.config().broadcast_quirk;
            let dest = if quirk { X2APIC_BROADCAST } else { irq.dest };
            if irq.logical {
                lapic.matches_logical(dest)
            } else {
                lapic.matches_physical(dest)
            }
        }
    }
}

/// Delivers a message; `sender` is the index of the LAPIC whose ICR sent it.
///
/// Every LAPIC's lock is taken at most twice and never two at a time.
pub fn deliver<S: LapicSet + ?Sized>(
    set: &mut S,
    irq: &LapicIrq,
    sender: Option<usize>,
) -> LineStatus {
    let nr = set.nr_lapics();
    let mut irq = *irq;
    if irq.shorthand == Shorthand::ToSelf {
        return match sender {
            Some(i) if i < nr => accept_at(set, i, &irq, sender),
            _ => LineStatus::IGNORED,
        };
    }
    if irq.is_lowest_priority() && irq.shorthand == Shorthand::None {
        if irq.logical || irq.dest != BROADCAST {
            return deliver_lowest(set, &irq, sender);
        }
        // A physical broadcast of lowest priority is undefined; KVM makes it fixed.
        irq.mode = DeliveryMode::Fixed;
    } else if irq.is_lowest_priority() {
        return deliver_lowest(set, &irq, sender);
    }
    // APIC ids are vCPU ids and those are mostly dense: try the obvious one first. In xAPIC mode a
    // guest may give several LAPICs the same id, and all of them listen.
    if set.has_own_ids() && irq.shorthand == Shorthand::None && !irq.logical && irq.dest < BROADCAST
    {
        let guess = irq.dest as usize;
        if guess < nr {
            let status = accept_at(set, guess, &irq, sender);
            if status.is_accepted() {
                return status;
            }
        }
    }
    (0..nr).fold(LineStatus::IGNORED, |status, i| {
        status.merge(accept_at(set, i, &irq, sender))
    })
}

/// Raises a synthetic interrupt source of Hyper-V's.
pub(crate) fn raise_sint<S: LapicSet + ?Sized>(set: &mut S, vp: u32, sint: u32) -> LineStatus {
    let Some(index) = set.index_of_vp(vp) else {
        return LineStatus::IGNORED;
    };
    let accepted = set.with(index, |l| l.raise_sint(sint as usize));
    finish(set, index, Some(accepted))
}

fn accept_at<S: LapicSet + ?Sized>(
    set: &mut S,
    index: usize,
    irq: &LapicIrq,
    sender: Option<usize>,
) -> LineStatus {
    let from_self = sender.map(|s| s == index);
    let accepted = set.with(index, |l| {
        (l.is_enabled() && matches(l, irq, from_self)).then(|| l.accept(irq))
    });
    finish(set, index, accepted)
}

fn finish<S: LapicSet + ?Sized>(
    set: &mut S,
    index: usize,
    accepted: Option<Accepted>,
) -> LineStatus {
    match accepted {
        None | Some(Accepted::Ignored) => LineStatus::IGNORED,
        Some(Accepted::Coalesced) => LineStatus::COALESCED,
        Some(what) => {
            set.notify(index, what);
            LineStatus::DELIVERED
        }
    }
}

/// Picks the `vector % n`-th of the n LAPICs that match and are software-enabled.
fn deliver_lowest<S: LapicSet + ?Sized>(
    set: &mut S,
    irq: &LapicIrq,
    sender: Option<usize>,
) -> LineStatus {
    let nr = set.nr_lapics();
    let candidate = |set: &mut S, i: usize| {
        let from_self = sender.map(|s| s == i);
        set.with(i, |l| {
            l.is_enabled() && l.is_software_enabled() && matches(l, irq, from_self)
        })
    };
    let count = (0..nr).filter(|&i| candidate(set, i)).count();
    if count == 0 {
        return LineStatus::IGNORED;
    }
    let skip = usize::from(irq.vector) % count;
    // A LAPIC may have changed in between; then the message is lost as on a bus
    // whose last candidate went away.
    match (0..nr).filter(|&i| candidate(set, i)).nth(skip) {
        Some(i) => {
            let accepted = set.with(i, |l| l.accept(irq));
            finish(set, i, Some(accepted))
        }
        None => LineStatus::IGNORED,
    }
}
