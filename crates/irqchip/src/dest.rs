//! Who receives a [`LapicIrq`] message (SDM vol. 3, 11.6).
//!
//! A lowest-priority message goes to one of the matching LAPICs, chosen by the vector as KVM's default ("vector
//! hashing") and chipsets do. The choice is stable, so that one interrupt stays on one vCPU.

use crate::lapic::{Accepted, Lapic};
use crate::line::LineStatus;
use crate::message::{BROADCAST, DeliveryMode, LapicIrq, Shorthand, X2APIC_BROADCAST};

/// The LAPICs of a VM, each behind a lock of the caller's.
pub trait LapicSet {
    /// Number of LAPICs; indices are below it.
    fn nr_lapics(&self) -> usize;
    /// True if no LAPIC has, or had, another id than its index. A physical destination then names one LAPIC at most.
    fn has_own_ids(&self) -> bool {
        false
    }
    /// Returns the index of the LAPIC whose processor has this number in Hyper-V's interface.
    fn index_of_vp(&self, vp: u32) -> Option<usize> {
        Some(vp as usize).filter(|vp| *vp < self.nr_lapics())
    }
    /// Raises an event of Xen's on the vCPU with this id. A set that has nothing to do with Xen ignores it.
    fn send_event(&mut self, _vcpu: u32, _port: u32) -> LineStatus {
        LineStatus::IGNORED
    }
    /// Runs `f` on one LAPIC with its lock held. `f` takes no other lock.
    fn with<R>(&mut self, index: usize, f: impl FnOnce(&mut Lapic) -> R) -> R;
    /// Notes that a LAPIC, whose lock has been dropped, accepted something: the implementation notes the event and
    /// kicks the vCPU.
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

/// True if the message is for `lapic`. `from_self` is `None` if the sender is not a LAPIC; otherwise it says whether
/// the sender is this LAPIC.
pub fn matches(lapic: &Lapic, irq: &LapicIrq, from_self: Option<bool>) -> bool {
    match irq.shorthand {
        Shorthand::ToSelf => from_self == Some(true),
        Shorthand::All => true,
        Shorthand::Others => from_self != Some(true),
        Shorthand::None => {
            // Without KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, a device's 8-bit broadcast reaches x2APICs, too.
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
        // A lowest-priority message with a physical broadcast is undefined; KVM delivers it as fixed.
        irq.mode = DeliveryMode::Fixed;
    } else if irq.is_lowest_priority() {
        return deliver_lowest(set, &irq, sender);
    }
    // APIC ids are vCPU ids, which are mostly dense, so the LAPIC with that index is tried first. In xAPIC mode a guest
    // may give several LAPICs the same id; all of them get the message.
    let is_one = irq.shorthand == Shorthand::None
        && !irq.logical
        && !matches!(irq.dest, BROADCAST | X2APIC_BROADCAST);
    if set.has_own_ids() && is_one {
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

/// Raises a synthetic interrupt source of Hyper-V's interface.
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

/// Delivers to the LAPIC number `vector % n` of the n LAPICs that match and are software-enabled.
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
    // A LAPIC may have changed meanwhile. The message is then lost, as on a bus whose last candidate has gone.
    match (0..nr).filter(|&i| candidate(set, i)).nth(skip) {
        Some(i) => {
            let accepted = set.with(i, |l| l.accept(irq));
            finish(set, i, Some(accepted))
        }
        None => LineStatus::IGNORED,
    }
}
