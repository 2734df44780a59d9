//! CMOS RAM and the MC146818 real-time clock at ports 0x70 and 0x71, which shows the host's UTC.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::fields::{Malformed, Reader, Writer};

/// Registers of the MC146818 datasheet. The FADT says which one has the century.
mod spec {
    pub(super) const SECONDS: u8 = 0x00;
    pub(super) const MINUTES: u8 = 0x02;
    pub(super) const HOURS: u8 = 0x04;
    pub(super) const WEEKDAY: u8 = 0x06;
    pub(super) const DAY: u8 = 0x07;
    pub(super) const MONTH: u8 = 0x08;
    pub(super) const YEAR: u8 = 0x09;
    pub(super) const STATUS_A: u8 = 0x0a;
    pub(super) const STATUS_B: u8 = 0x0b;
    pub(super) const STATUS_C: u8 = 0x0c;
    pub(super) const STATUS_D: u8 = 0x0d;
    pub(super) const CENTURY: u8 = 0x32;
    /// 32.768 kHz time base, 1024 Hz rate, no update in progress.
    pub(super) const A_DEFAULT: u8 = 0x26;
    /// BCD, 24 hours.
    pub(super) const B_DEFAULT: u8 = 0x02;
    /// RAM and time are valid.
    pub(super) const D_VALID: u8 = 0x80;
}

/// DEVIATION: no alarm, periodic or update interrupt; the time cannot be set.
#[derive(Debug)]
pub(super) struct Cmos {
    index: u8,
    ram: [u8; 128],
}

impl Default for Cmos {
    fn default() -> Self {
        Self {
            index: 0,
            ram: [0; 128],
        }
    }
}

impl Cmos {
    pub(super) fn read(&self, port: u16) -> u8 {
        if port == 0x70 {
            return 0xff;
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        self.register(now)
    }

    pub(super) fn write(&mut self, port: u16, value: u8) {
        if port == 0x70 {
            // Bit 7 of the port masks NMI.
            self.index = value & 0x7f;
        } else if let Some(byte) = self.ram.get_mut(usize::from(self.index)) {
            *byte = value;
        }
    }

    pub(super) fn save(&self, w: &mut Writer) {
        w.put(&self.index);
        w.put(&self.ram);
    }

    pub(super) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        self.index = r.get::<u8>()? & 0x7f;
        self.ram = r.get()?;
        Ok(())
    }

    fn register(&self, now: u64) -> u8 {
        let (year, month, day) = civil_from_days(now / 86_400);
        match self.index {
            spec::SECONDS => bcd(now % 60),
            spec::MINUTES => bcd(now / 60 % 60),
            spec::HOURS => bcd(now / 3600 % 24),
            // 1970-01-01 was a Thursday; Sunday is 1.
            spec::WEEKDAY => bcd((now / 86_400 + 4) % 7 + 1),
            spec::DAY => bcd(day),
            spec::MONTH => bcd(month),
            spec::YEAR => bcd(year % 100),
            spec::CENTURY => bcd(year / 100 % 100),
            spec::STATUS_A => spec::A_DEFAULT,
            spec::STATUS_B => spec::B_DEFAULT,
            spec::STATUS_C => 0,
            spec::STATUS_D => spec::D_VALID,
            index => self.ram.get(usize::from(index)).copied().unwrap_or(0),
        }
    }
}

fn bcd(value: u64) -> u8 {
    u8::try_from(((value / 10 % 10) << 4) | (value % 10)).unwrap_or(0)
}

/// Returns year, month and day of a number of days since 1970-01-01 (proleptic Gregorian calendar). An era has 400
/// years, or 146,097 days; years begin in March, so that the leap day is the last.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        let rows = [
            (0, (1970, 1, 1)),
            (59, (1970, 3, 1)),
            (11_016, (2000, 2, 29)),
            (19_723, (2024, 1, 1)),
            (20_088, (2024, 12, 31)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ];
        for (days, want) in rows {
            assert_eq!(civil_from_days(days), want, "{days}");
        }
    }

    #[test]
    fn the_clock_is_bcd() {
        // 2024-12-31 23:59:58, a Tuesday.
        let now = 20_088 * 86_400 + 86_398;
        let rows = [
            (spec::SECONDS, 0x58),
            (spec::MINUTES, 0x59),
            (spec::HOURS, 0x23),
            (spec::WEEKDAY, 3),
            (spec::DAY, 0x31),
            (spec::MONTH, 0x12),
            (spec::YEAR, 0x24),
            (spec::CENTURY, 0x20),
            (spec::STATUS_D, 0x80),
        ];
        for (index, want) in rows {
            let mut cmos = Cmos::default();
            cmos.write(0x70, index | 0x80);
            assert_eq!(cmos.register(now), want, "{index:#x}");
        }
    }

    #[test]
    fn ram_keeps_what_is_written() {
        let mut cmos = Cmos::default();
        cmos.write(0x70, 0x0f);
        cmos.write(0x71, 0xa);
        assert_eq!(cmos.read(0x71), 0xa);
    }
}
