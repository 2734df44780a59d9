//! One counter of the 8254.

/// The counters' input clock.
const FREQ_HZ: u64 = 1_193_182;
const NS_PER_S: u64 = 1_000_000_000;

/// How a count is read or written; in word mode also which half comes next. 1 is the low byte only.
mod access {
    pub(super) const LATCH: u8 = 0;
    pub(super) const MSB: u8 = 2;
    pub(super) const WORD0: u8 = 3;
    pub(super) const WORD1: u8 = 4;
}

/// After power-up no mode is programmed.
const NO_MODE: u8 = 0xff;

/// One channel in KVM_GET_PIT2 and KVM_SET_PIT2; the load time is on the ns clock.
pub use kvm_bindings::kvm_pit_channel_state as PitChannelState;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Channel {
    state: PitChannelState,
}

impl Channel {
    pub(super) fn new(gate: bool, now_ns: u64) -> Self {
        let mut channel = Self {
            state: PitChannelState {
                mode: NO_MODE,
                gate: u8::from(gate),
                ..PitChannelState::default()
            },
        };
        channel.load(0, now_ns);
        channel
    }

    pub(super) const fn gate(&self) -> bool {
        self.state.gate != 0
    }

    /// Sets the gate. A rising gate restarts modes 1, 2, 3 and 5.
    pub(super) fn set_gate(&mut self, gate: bool, now_ns: u64) {
        if gate && self.state.gate == 0 && matches!(self.state.mode, 1 | 2 | 3 | 5) {
            self.state.count_load_time = now_ns as i64;
        }
        self.state.gate = u8::from(gate);
    }

    /// Returns the time from loading to the end of the count; `None` if the channel has no mode that interrupts.
    pub(super) fn period_ns(&self) -> Option<u64> {
        matches!(self.state.mode, 0..=4).then(|| (self.count() * NS_PER_S).div_ceil(FREQ_HZ))
    }
    pub(super) const fn is_periodic(&self) -> bool {
        matches!(self.state.mode, 2 | 3)
    }

    /// Returns the level of the output pin.
    pub(super) fn out(&self, now_ns: u64) -> bool {
        let (ticks, count) = (self.ticks(now_ns), self.count());
        match self.state.mode {
            0 => ticks >= count,
            1 => ticks < count,
            2 => ticks != 0 && ticks.is_multiple_of(count),
            3 => ticks % count < count.div_ceil(2),
            4 | 5 => ticks == count,
            _ => false,
        }
    }

    /// Returns the counter's value.
    fn current(&self, now_ns: u64) -> u16 {
        let (ticks, count) = (self.ticks(now_ns), self.count());
        match self.state.mode {
            // In these modes the counter wraps around at zero and continues.
            0 | 1 | 4 | 5 => {
                let modulus = if self.state.bcd != 0 {
                    10_000
                } else {
                    0x1_0000
                };
                let left = (i128::from(count) - i128::from(ticks)).rem_euclid(modulus);
                self.encode(left as u64)
            }
            // In square-wave mode the counter counts down by two, twice per period.
            3 => self.encode(count - (2 * (ticks % count)) % count),
            _ => self.encode(count - ticks % count),
        }
    }

    /// Latches count and status; a latched value stays until it is read.
    pub(super) fn latch(&mut self, count: bool, status: bool, now_ns: u64) {
        if count && self.state.count_latched == 0 {
            self.state.latched_count = self.current(now_ns);
            self.state.count_latched = self.state.rw_mode;
        }
        if status && self.state.status_latched == 0 {
            let s = &self.state;
            self.state.status = u8::from(self.out(now_ns)) << 7
                | (s.rw_mode & 3) << 4
                | (s.mode & 7) << 1
                | s.bcd & 1;
            self.state.status_latched = 1;
        }
    }

    /// Handles a control word for this channel.
    pub(super) fn control(&mut self, value: u8, now_ns: u64) {
        let rw = value >> 4 & 3;
        if rw == access::LATCH {
            self.latch(true, false, now_ns);
            return;
        }
        let s = &mut self.state;
        s.rw_mode = rw;
        s.read_state = rw;
        s.write_state = rw;
        s.mode = value >> 1 & 7;
        // Modes 6 and 7 are other names of 2 and 3.
        if s.mode > 5 {
            s.mode -= 4;
        }
        s.bcd = value & 1;
    }

    /// Writes a byte of the count; true if that loaded the counter.
    pub(super) fn write(&mut self, value: u8, now_ns: u64) -> bool {
        let word = u16::from(value);
        let count = match self.state.write_state {
            access::MSB => word << 8,
            access::WORD0 => {
                self.state.write_latch = value;
                self.state.write_state = access::WORD1;
                return false;
            }
            access::WORD1 => {
                self.state.write_state = access::WORD0;
                word << 8 | u16::from(self.state.write_latch)
            }
            _ => word,
        };
        self.load(count, now_ns);
        true
    }

    /// Reads a byte of the status, the latched count or the count.
    pub(super) fn read(&mut self, now_ns: u64) -> u8 {
        if self.state.status_latched != 0 {
            self.state.status_latched = 0;
            return self.state.status;
        }
        let [low, high] = self.state.latched_count.to_le_bytes();
        match self.state.count_latched {
            0 => {}
            access::MSB => {
                self.state.count_latched = 0;
                return high;
            }
            access::WORD0 => {
                self.state.count_latched = access::MSB;
                return low;
            }
            _ => {
                self.state.count_latched = 0;
                return low;
            }
        }
        let [low, high] = self.current(now_ns).to_le_bytes();
        match self.state.read_state {
            access::MSB => high,
            access::WORD0 => {
                self.state.read_state = access::WORD1;
                low
            }
            access::WORD1 => {
                self.state.read_state = access::WORD0;
                high
            }
            _ => low,
        }
    }

    pub(super) const fn save(&self) -> PitChannelState {
        self.state
    }

    pub(super) fn restore(&mut self, state: &PitChannelState, now_ns: u64) {
        self.state = *state;
        if state.count == 0 || state.count > 0x1_0000 {
            self.state.count = 0x1_0000;
        }
        self.state.count_load_time = now_ns as i64;
    }

    fn load(&mut self, value: u16, now_ns: u64) {
        let count = if self.state.bcd == 0 {
            u32::from(value)
        } else {
            (0..4)
                .rev()
                .fold(0, |n, i| n * 10 + u32::from(value >> (4 * i) & 0xf).min(9))
        };
        // Zero is the largest count.
        self.state.count = match (count, self.state.bcd) {
            (0, 0) => 0x1_0000,
            (0, _) => 10_000,
            (n, _) => n,
        };
        self.state.count_load_time = now_ns as i64;
    }

    fn count(&self) -> u64 {
        u64::from(self.state.count).max(1)
    }

    /// Input clocks since the counter was loaded.
    fn ticks(&self, now_ns: u64) -> u64 {
        let elapsed = now_ns.saturating_sub(self.state.count_load_time as u64);
        (u128::from(elapsed) * u128::from(FREQ_HZ) / u128::from(NS_PER_S)) as u64
    }

    /// Returns the counter's register for a value: BCD digits if the channel is programmed so.
    fn encode(&self, value: u64) -> u16 {
        if self.state.bcd == 0 {
            return value as u16;
        }
        let mut left = value % 10_000;
        (0..4).fold(0, |digits, i| {
            let digit = (left % 10) as u16;
            left /= 10;
            digits | digit << (4 * i)
        })
    }
}
