//! The 8254 interval timer of a PC, and the speaker port (Intel 8254
//! datasheet; KVM API document, KVM_CREATE_PIT2).
//!
//! Counters are computed from the time since they were loaded. Channel 0's rising output is IRQ 0: the caller arms a
//! timer for [`Pit::next_event_ns`], calls [`Pit::advance`], and pulses the line if that says so.
//!
//! With KVM's "reinject" policy (the default) an expiry that the guest has not acknowledged is queued and delivered at
//! the acknowledgement, so that guests which count ticks keep time. Without that policy it is dropped.
//!
//! Invariant: at most one IRQ 0 is on its way; `pending` counts the expiries behind it.

mod channel;

pub use channel::PitChannelState;

use channel::Channel;

/// The datasheet, and the PC's ports.
mod spec {
    pub(super) const CHANNEL0: u16 = 0x40;
    pub(super) const CHANNEL2: u16 = 0x42;
    pub(super) const CONTROL: u16 = 0x43;
    pub(super) const SPEAKER: u16 = 0x61;

    /// Speaker port.
    pub(super) const GATE2: u8 = 1 << 0;
    pub(super) const SPEAKER_DATA: u8 = 1 << 1;
    pub(super) const REFRESH: u8 = 1 << 4;
    pub(super) const OUT2: u8 = 1 << 5;
    /// The refresh bit toggles every 2^14 ns, near enough to a PC's 15 µs.
    pub(super) const REFRESH_SHIFT: u32 = 14;

    /// Shortest period of channel 0 (KVM's `min_timer_period_us`).
    pub(super) const MIN_PERIOD_NS: u64 = 200_000;

    /// `kvm_pit_state2.flags`.
    pub(super) const FLAG_HPET_LEGACY: u32 = 1;
    pub(super) const FLAG_SPEAKER_DATA_ON: u32 = 2;
}

/// KVM_GET_PIT2 and KVM_SET_PIT2.
pub use kvm_bindings::kvm_pit_state2 as PitState;

/// The interval timer.
#[derive(Clone, Debug, PartialEq)]
pub struct Pit {
    channels: [Channel; 3],
    speaker_data: bool,
    /// The HPET has taken over IRQ 0: channel 0 counts but does not interrupt.
    hpet_legacy: bool,
    /// KVM_CREATE_PIT2 with KVM_PIT_SPEAKER_DUMMY: the PIT has port 0x61.
    speaker_port: bool,
    next_ns: Option<u64>,
    period_ns: Option<u64>,
    reinject: bool,
    /// The last IRQ 0 was acknowledged.
    irq_ack: bool,
    pending: u64,
}

impl Pit {
    /// A PIT after power-up; `speaker_port` is KVM_PIT_SPEAKER_DUMMY.
    pub fn new(speaker_port: bool, now_ns: u64) -> Self {
        let mut pit = Self {
            channels: [
                Channel::new(true, now_ns),
                Channel::new(true, now_ns),
                Channel::new(false, now_ns),
            ],
            speaker_data: false,
            hpet_legacy: false,
            speaker_port,
            next_ns: None,
            period_ns: None,
            reinject: true,
            irq_ack: true,
            pending: 0,
        };
        pit.arm(now_ns);
        pit
    }

    /// True if `port` belongs to the PIT.
    pub const fn handles(&self, port: u16) -> bool {
        matches!(port, spec::CHANNEL0..=spec::CONTROL) || port == spec::SPEAKER && self.speaker_port
    }

    /// Reads a port.
    pub fn port_read(&mut self, port: u16, now_ns: u64) -> u8 {
        match port {
            spec::CHANNEL0..=spec::CHANNEL2 => self.channels[usize::from(port & 3)].read(now_ns),
            spec::SPEAKER => self.read_speaker(now_ns),
            // The control word cannot be read.
            _ => 0,
        }
    }

    /// Writes a port. [`Self::next_event_ns`] may change.
    pub fn port_write(&mut self, port: u16, value: u8, now_ns: u64) {
        match port {
            spec::CHANNEL0..=spec::CHANNEL2 => {
                let index = usize::from(port & 3);
                if self.channels[index].write(value, now_ns) && index == 0 {
                    self.arm(now_ns);
                }
            }
            spec::CONTROL => self.write_control(value, now_ns),
            spec::SPEAKER => {
                self.speaker_data = value & spec::SPEAKER_DATA != 0;
                self.channels[2].set_gate(value & spec::GATE2 != 0, now_ns);
            }
            _ => {}
        }
    }

    /// Returns when channel 0 expires next, on the ns clock.
    pub const fn next_event_ns(&self) -> Option<u64> {
        self.next_ns
    }

    /// Notes all expiries up to `now_ns`; returns whether to pulse IRQ 0 (high, then low), from [`crate::source::PIT`].
    pub fn advance(&mut self, now_ns: u64) -> bool {
        let Some(due) = self.next_ns.filter(|&t| t <= now_ns) else {
            return false;
        };
        let expiries = match self.period_ns {
            Some(period) => {
                let more = (now_ns - due) / period;
                self.next_ns = due.checked_add(period.saturating_mul(more + 1));
                more + 1
            }
            None => {
                self.next_ns = None;
                1
            }
        };
        if !self.reinject {
            return true;
        }
        self.pending = self.pending.saturating_add(expiries);
        core::mem::take(&mut self.irq_ack)
    }

    /// Notes that the guest has acknowledged IRQ 0, at the PIC or the IOAPIC. Returns whether to pulse it again for a
    /// queued expiry.
    pub fn acked(&mut self) -> bool {
        self.irq_ack = true;
        if self.pending == 0 {
            return false;
        }
        self.pending -= 1;
        if self.pending == 0 || !self.reinject {
            return false;
        }
        core::mem::take(&mut self.irq_ack)
    }

    /// Notes that the guest has unmasked IRQ 0: earlier expiries do not count.
    pub const fn unmasked(&mut self) {
        self.pending = 0;
        self.irq_ack = true;
    }

    /// KVM_REINJECT_CONTROL.
    pub const fn set_reinject(&mut self, on: bool) {
        self.reinject = on;
        self.pending = 0;
        self.irq_ack = true;
    }
    /// The current policy.
    pub const fn reinject(&self) -> bool {
        self.reinject
    }

    /// KVM_GET_PIT2.
    pub fn save(&self) -> PitState {
        let mut flags = 0;
        if self.hpet_legacy {
            flags |= spec::FLAG_HPET_LEGACY;
        }
        if self.speaker_data {
            flags |= spec::FLAG_SPEAKER_DATA_ON;
        }
        PitState {
            channels: [
                self.channels[0].save(),
                self.channels[1].save(),
                self.channels[2].save(),
            ],
            flags,
            reserved: [0; 9],
        }
    }

    /// KVM_SET_PIT2. As in KVM, the counters restart from their full count.
    pub fn restore(&mut self, state: &PitState, now_ns: u64) {
        for (channel, saved) in self.channels.iter_mut().zip(&state.channels) {
            channel.restore(saved, now_ns);
        }
        self.hpet_legacy = state.flags & spec::FLAG_HPET_LEGACY != 0;
        self.speaker_data = state.flags & spec::FLAG_SPEAKER_DATA_ON != 0;
        self.arm(now_ns);
    }

    fn write_control(&mut self, value: u8, now_ns: u64) {
        let select = usize::from(value >> 6);
        let Some(channel) = self.channels.get_mut(select) else {
            // A read-back command has bits for channels, and inverted bits for count and status.
            for (i, channel) in self.channels.iter_mut().enumerate() {
                if value & 2 << i != 0 {
                    channel.latch(value & 0x20 == 0, value & 0x10 == 0, now_ns);
                }
            }
            return;
        };
        channel.control(value, now_ns);
    }

    fn read_speaker(&self, now_ns: u64) -> u8 {
        let channel = &self.channels[2];
        let mut value = 0;
        if self.speaker_data {
            value |= spec::SPEAKER_DATA;
        }
        if channel.gate() {
            value |= spec::GATE2;
        }
        if channel.out(now_ns) {
            value |= spec::OUT2;
        }
        if now_ns >> spec::REFRESH_SHIFT & 1 != 0 {
            value |= spec::REFRESH;
        }
        value
    }

    /// Notes that channel 0 was loaded.
    fn arm(&mut self, now_ns: u64) {
        self.next_ns = None;
        self.period_ns = None;
        let Some(mut period) = self.channels[0].period_ns().filter(|_| !self.hpet_legacy) else {
            return;
        };
        self.pending = 0;
        self.irq_ack = true;
        if self.channels[0].is_periodic() {
            period = period.max(spec::MIN_PERIOD_NS);
            self.period_ns = Some(period);
        }
        self.next_ns = now_ns.checked_add(period);
    }
}

#[cfg(test)]
mod tests;
