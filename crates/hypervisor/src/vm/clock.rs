//! Guest time: TSC offset and scale, kvmclock (KVM documents "timekeeping" and "msr").
//!
//! All vCPUs share one pair (TSC, nanoseconds) as the master clock. So kvmclock is consistent across them, which its
//! flags tell the guest.

use std::sync::{Mutex, PoisonError};

use host::{clock, cpu};
use kvm_bindings::*;

use crate::{Error, Result};

/// Guest TSC of one vCPU as a function of the host's: `host × ratio >> 32 + offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TscParams {
    /// Frequency in kHz, as the VMM has set it.
    pub(crate) khz: u32,
    ratio: u64,
    /// Added after scaling.
    pub(crate) offset: u64,
}

/// How far a frequency may be from the host's that is still taken for it, in millionths. It is KVM's
/// `tsc_tolerance_ppm`: two hosts, or two measurements of one, differ by that much.
const TOLERANCE_PPM: u64 = 250;

impl TscParams {
    fn new(khz: u32, offset: u64) -> Self {
        let [host, wanted] = [cpu::tsc_khz().max(1), khz].map(u64::from);
        let is_close = wanted.abs_diff(host) * 1_000_000 <= host * TOLERANCE_PPM;
        let ratio = if is_close {
            1 << 32
        } else {
            (wanted << 32) / host
        };
        Self { khz, ratio, offset }
    }
    /// Returns the frequency in kHz that the guest's TSC has.
    pub(crate) fn real_khz(&self) -> u32 {
        if self.ratio == 1 << 32 {
            cpu::tsc_khz()
        } else {
            self.khz
        }
    }
    /// Returns the host's TSC scaled to the guest's frequency, without the offset.
    #[inline]
    pub(crate) fn scale(&self, host_tsc: u64) -> u64 {
        if self.ratio == 1 << 32 {
            host_tsc
        } else {
            ((u128::from(host_tsc) * u128::from(self.ratio)) >> 32) as u64
        }
    }
    /// Returns the offset, if the frequency is the host's.
    pub(crate) fn plain_offset(&self) -> Option<u64> {
        (self.ratio == 1 << 32).then_some(self.offset)
    }
    /// Returns the guest's TSC at a host TSC.
    #[inline]
    pub(crate) fn guest(&self, host_tsc: u64) -> u64 {
        self.scale(host_tsc).wrapping_add(self.offset)
    }
    /// Returns these parameters with another offset.
    pub(crate) const fn with_offset(self, offset: u64) -> Self {
        Self { offset, ..self }
    }
}

#[derive(Debug)]
struct Base {
    /// Host TSC of the master pair.
    host_tsc: u64,
    /// kvmclock at that moment.
    kvmclock_ns: u64,
    /// TSC parameters of new vCPUs.
    tsc: TscParams,
    /// The last synchronised TSC write: value, host TSC, and resulting offset.
    last_write: Option<(u64, u64, u64)>,
}

impl Base {
    /// Notes that the VMM has set a TSC. vCPUs of this frequency that are made later follow it.
    fn synchronise(&mut self, value: u64, now: u64, params: TscParams) {
        self.last_write = Some((value, now, params.offset));
        if self.tsc.khz == params.khz {
            self.tsc = params;
        }
    }
}

/// A VM's clock.
#[derive(Debug)]
pub(crate) struct VmClock {
    base: Mutex<Base>,
}

impl VmClock {
    /// A clock that starts at zero now.
    pub(crate) fn new() -> Self {
        let host_tsc = cpu::rdtsc();
        let tsc = TscParams::new(cpu::tsc_khz(), 0);
        let tsc = tsc.with_offset(tsc.scale(host_tsc).wrapping_neg());
        Self {
            base: Mutex::new(Base {
                host_tsc,
                kvmclock_ns: 0,
                tsc,
                last_write: None,
            }),
        }
    }
    fn lock(&self) -> std::sync::MutexGuard<'_, Base> {
        self.base.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// TSC parameters of a new vCPU.
    pub(crate) fn default_tsc(&self) -> TscParams {
        self.lock().tsc
    }
    /// KVM_SET_TSC_KHZ on the VM.
    pub(crate) fn set_default_khz(&self, khz: u32) -> Result<()> {
        let mut base = self.lock();
        base.tsc = rescale(base.tsc, khz)?;
        Ok(())
    }
    /// Returns the parameters after a TSC write. A write that KVM would treat as synchronising gets the offset of the
    /// previous such write: VMMs set the same value on each vCPU in turn.
    pub(crate) fn write_tsc(&self, params: TscParams, value: u64, from_vmm: bool) -> TscParams {
        let now = cpu::rdtsc();
        let mut base = self.lock();
        let offset = value.wrapping_sub(params.scale(now));
        if from_vmm && let Some((last, at, last_offset)) = base.last_write {
            let second = u64::from(params.khz) * 1000;
            let expected = last.wrapping_add(params.scale(now).wrapping_sub(params.scale(at)));
            if params.khz == base.tsc.khz && (value == 0 || expected.abs_diff(value) < second) {
                return params.with_offset(last_offset);
            }
        }
        if from_vmm {
            base.synchronise(value, now, params.with_offset(offset));
        }
        params.with_offset(offset)
    }
    /// KVM_VCPU_TSC_OFFSET: vCPUs that are made later get the same offset.
    pub(crate) fn set_offset(&self, params: TscParams, offset: u64) -> TscParams {
        let now = cpu::rdtsc();
        let params = params.with_offset(offset);
        self.lock().synchronise(params.guest(now), now, params);
        params
    }
    /// Returns kvmclock now, and the host TSC of the same moment.
    pub(crate) fn now(&self) -> (u64, u64) {
        let base = self.lock();
        // Computed as a guest does, from the TSC: the host's clock is slewed and would drift apart.
        let tsc = cpu::rdtsc();
        let passed = ticks_to_ns(tsc.saturating_sub(base.host_tsc), cpu::tsc_khz());
        (base.kvmclock_ns.wrapping_add(passed), tsc)
    }
    /// Returns the master pair: host TSC and kvmclock.
    pub(crate) fn master(&self) -> (u64, u64) {
        let base = self.lock();
        (base.host_tsc, base.kvmclock_ns)
    }
    /// KVM_GET_CLOCK.
    pub(crate) fn get(&self) -> kvm_clock_data {
        let (now, tsc) = self.now();
        kvm_clock_data {
            clock: now,
            flags: KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC,
            realtime: clock::realtime_ns(),
            host_tsc: tsc,
            ..Default::default()
        }
    }
    /// KVM_SET_CLOCK. With KVM_CLOCK_REALTIME the time that has passed since the given one is added.
    pub(crate) fn set(&self, data: &kvm_clock_data) -> Result<()> {
        // The other flags have no effect here, but a VMM may write back what it has read.
        let known = KVM_CLOCK_REALTIME | KVM_CLOCK_TSC_STABLE | KVM_CLOCK_HOST_TSC;
        if data.flags & !known != 0 {
            return Err(Error::InvalidArgument);
        }
        let mut base = self.lock();
        base.host_tsc = cpu::rdtsc();
        let passed = if data.flags & KVM_CLOCK_REALTIME != 0 {
            clock::realtime_ns().saturating_sub(data.realtime)
        } else {
            0
        };
        base.kvmclock_ns = data.clock.wrapping_add(passed);
        Ok(())
    }
}

/// Returns parameters with the same guest TSC now and another frequency; 0 is the host's.
pub(crate) fn rescale(params: TscParams, khz: u32) -> Result<TscParams> {
    let khz = if khz == 0 { cpu::tsc_khz() } else { khz };
    // A frequency that the fixed-point ratio cannot express is refused.
    if u64::from(khz) > u64::from(cpu::tsc_khz()) * 16 {
        return Err(Error::InvalidArgument);
    }
    let now = cpu::rdtsc();
    let value = params.guest(now);
    let new = TscParams::new(khz, 0);
    Ok(new.with_offset(value.wrapping_sub(new.scale(now))))
}

/// Converts ticks to nanoseconds, with pvclock's rounding.
fn ticks_to_ns(ticks: u64, khz: u32) -> u64 {
    let (mul, shift) = pvclock_scale(khz);
    let shifted = if shift >= 0 {
        u128::from(ticks) << shift
    } else {
        u128::from(ticks) >> -shift
    };
    ((shifted * u128::from(mul)) >> 32) as u64
}

/// Returns pvclock's `(mul, shift)` for a TSC frequency: ns = (tsc << shift) × mul >> 32.
pub(crate) fn pvclock_scale(khz: u32) -> (u32, i8) {
    let mut hz = u64::from(khz.max(1)) * 1000;
    let mut shift = 0i8;
    while hz > 2_000_000_000 {
        hz >>= 1;
        shift -= 1;
    }
    while hz <= 1_000_000_000 {
        hz <<= 1;
        shift += 1;
    }
    (
        (1_000_000_000u64 << 32)
            .div_ceil(hz)
            .min(u64::from(u32::MAX)) as u32,
        shift,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frequency_close_to_the_hosts_is_the_hosts() {
        let host = cpu::tsc_khz();
        let ppm = |n: u32| (u64::from(host) * u64::from(n) / 1_000_000) as u32;
        for khz in [host + ppm(240), host - ppm(240), host + 1] {
            let close = TscParams::new(khz, 5);
            assert_eq!((close.khz, close.real_khz()), (khz, host));
            assert_eq!(close.plain_offset(), Some(5));
        }
        for khz in [host + ppm(260), host - ppm(260), host / 2] {
            let other = TscParams::new(khz, 5);
            assert_eq!((other.real_khz(), other.plain_offset()), (khz, None));
        }
    }

    #[test]
    fn pvclock_scale_gives_nanoseconds() {
        for khz in [800_000, 1_000_000, 2_445_428, 3_700_000, 5_000_001] {
            let ticks = u64::from(khz) * 1000;
            let ns = ticks_to_ns(ticks, khz);
            assert!(ns.abs_diff(1_000_000_000) < 100, "{khz}: {ns}");
        }
    }

    #[test]
    fn vmm_writes_of_one_value_synchronise() {
        let c = VmClock::new();
        let a = c.write_tsc(c.default_tsc(), 0, true);
        let b = c.write_tsc(c.default_tsc(), 0, true);
        assert_eq!(a.offset, b.offset);
        let guest = c.write_tsc(a, 1 << 60, false);
        assert_ne!(guest.offset, a.offset);
    }
}
