//! Ways to switch off or reset: ACPI's PM1a block and timer, the 0xcf9 reset port, the keyboard controller's line.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::ending::Ending;
use crate::fields::{Malformed, Reader, Writer};
use crate::layout::PM_BASE;

/// Registers (ACPI 6.5, 4.8.3; ICH reset control; 8042).
mod spec {
    use super::PM_BASE;

    pub(super) const PM1_STATUS: u16 = PM_BASE;
    pub(super) const PM1_ENABLE: u16 = PM_BASE + 2;
    pub(super) const PM1_CONTROL: u16 = PM_BASE + 4;
    pub(super) const PM_TIMER: u16 = PM_BASE + 8;
    /// ACPI mode is always on.
    pub(super) const SCI_EN: u16 = 1;
    pub(super) const SLP_TYP_SHIFT: u16 = 10;
    pub(super) const SLP_EN: u16 = 1 << 13;
    pub(super) const PM_TIMER_HZ: u128 = 3_579_545;
    /// The timer is 24 bits wide unless the FADT says otherwise.
    pub(super) const PM_TIMER_MASK: u128 = 0xff_ffff;
    pub(super) const RESET_CONTROL: u16 = 0xcf9;
    pub(super) const RESET_CPU: u8 = 4;
    pub(super) const KBD_DATA: u16 = 0x60;
    pub(super) const KBD_COMMAND: u16 = 0x64;
    pub(super) const KBD_PULSE_RESET: u8 = 0xfe;
}

/// Returns the host's time of day in nanoseconds.
fn realtime() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}

/// The value of `SLP_TYPx` for S5; the DSDT's `_S5` package names it.
pub(crate) const SLEEP_TYPE_S5: u8 = 5;

/// DEVIATION: no PM1 event ever happens, so the SCI is never raised.
#[derive(Debug)]
pub(super) struct Power {
    started: Instant,
    enable: u16,
}

impl Power {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            enable: 0,
        }
    }

    /// Saves the registers and the timer. The timer goes on while the machine is on its way, as the guest's other
    /// clocks do.
    pub(super) fn save(&self, w: &mut Writer) {
        w.put(&self.enable);
        w.put(&(self.started.elapsed().as_nanos() as u64));
        w.put(&realtime());
    }

    pub(super) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        self.enable = r.get()?;
        let ran = r.get::<u64>()?;
        let on_its_way = realtime().saturating_sub(r.get()?);
        let ago = Duration::from_nanos(ran.saturating_add(on_its_way));
        // If this host has been running for a shorter time, no instant is that early, and the timer jumps.
        self.started = Instant::now().checked_sub(ago).unwrap_or(self.started);
        Ok(())
    }

    /// Reads a port. Leaves `data` as it is if the port is none of these.
    pub(super) fn read(&self, port: u16, data: &mut [u8]) {
        let value = match port {
            spec::PM1_STATUS => 0,
            spec::PM1_ENABLE => u32::from(self.enable),
            spec::PM1_CONTROL => u32::from(spec::SCI_EN),
            spec::PM_TIMER => self.timer(),
            // The keyboard controller is idle and has no data. Ones would make the kernel wait for it.
            spec::KBD_DATA | spec::KBD_COMMAND | spec::RESET_CONTROL => 0,
            _ => return,
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    pub(super) fn write(&mut self, port: u16, data: &[u8]) -> Option<Ending> {
        let low = data.first().copied().unwrap_or(0);
        let word = u16::from_le_bytes([low, data.get(1).copied().unwrap_or(0)]);
        match port {
            spec::PM1_ENABLE => self.enable = word,
            spec::PM1_CONTROL if word & spec::SLP_EN != 0 => {
                let sleep_type = (word >> spec::SLP_TYP_SHIFT) & 7;
                if sleep_type == u16::from(SLEEP_TYPE_S5) {
                    return Some(Ending::PowerOff);
                }
            }
            // The reset port is a byte; a wider access at 0xcf8 is PCI's.
            spec::RESET_CONTROL if low & spec::RESET_CPU != 0 => return Some(Ending::Reset),
            spec::KBD_COMMAND if low == spec::KBD_PULSE_RESET => return Some(Ending::Reset),
            _ => {}
        }
        None
    }

    fn timer(&self) -> u32 {
        let ticks = self.started.elapsed().as_nanos() * spec::PM_TIMER_HZ / 1_000_000_000;
        u32::try_from(ticks & spec::PM_TIMER_MASK).unwrap_or(0)
    }
}
