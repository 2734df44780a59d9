//! The host CPU: CPUID, XCR0, time-stamp counter and its frequency.

use std::sync::OnceLock;

use crate::clock;

/// EAX, EBX, ECX, EDX of a CPUID leaf.
pub fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let r = core::arch::x86_64::__cpuid_count(leaf, subleaf);
    [r.eax, r.ebx, r.ecx, r.edx]
}

/// XCR0, or 1 (x87 only) if the host has not enabled XSAVE. Asked for once, as CPUID takes microseconds in a virtual
/// machine.
pub fn xcr0() -> u64 {
    static XCR0: OnceLock<u64> = OnceLock::new();
    *XCR0.get_or_init(read_xcr0)
}

fn read_xcr0() -> u64 {
    const OSXSAVE: u32 = 1 << 27;
    if cpuid(1, 0)[2] & OSXSAVE == 0 {
        return 1;
    }
    let (lo, hi): (u32, u32);
    // SAFETY: CPUID says that the OS has set CR4.OSXSAVE, so XGETBV with ECX = 0
    // does not fault; it only reads a register.
    unsafe {
        core::arch::asm!(
            "xgetbv",
            in("ecx") 0,
            out("eax") lo,
            out("edx") hi,
            options(nomem, nostack, preserves_flags)
        );
    }
    u64::from(hi) << 32 | u64::from(lo)
}

/// The time-stamp counter.
#[inline(always)]
pub fn rdtsc() -> u64 {
    // SAFETY: RDTSC is on every x86-64 CPU, and Linux leaves it enabled for
    // user programs (a process that asked PR_SET_TSC for a signal gets it).
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Prefetches the cache line at `address` for writing. Harmless for any address.
#[inline(always)]
pub fn prefetch_to_write(address: u64) {
    use core::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a hint, which never faults.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(address as *const i8) };
}

/// Empties the x87 registers of this thread, which are MMX registers as well, and makes them zero.
pub fn clear_x87() {
    // SAFETY: the registers are empty between functions, and no function expects values there (System V ABI, 3.2.1).
    // FLDZ does not fault on an empty register, and EMMS leaves all of them empty.
    unsafe {
        core::arch::asm!(
            "fldz", "fldz", "fldz", "fldz", "fldz", "fldz", "fldz", "fldz", "emms",
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            options(nomem, nostack, preserves_flags)
        );
    }
}

/// A full barrier: all processors see earlier stores before a later load is made.
///
/// `fence(SeqCst)` is compiled to MFENCE, which Zen processors execute only once all earlier instructions are complete:
/// slow if those missed the caches. A locked instruction orders the same accesses and lets later instructions begin.
#[inline(always)]
pub fn barrier() {
    // SAFETY: the word is on this thread's stack, or just below it, and keeps its value.
    unsafe {
        core::arch::asm!("lock or dword ptr [rsp - 4], 0", options(nostack));
    }
}

/// Returns the frequency of the time-stamp counter in kHz. It comes from CPUID if that has it; otherwise it is measured
/// once against the kernel's clock, which takes 5 ms unless the measurement was begun before.
pub fn tsc_khz() -> u32 {
    static KHZ: OnceLock<u32> = OnceLock::new();
    *KHZ.get_or_init(|| tsc_khz_from_cpuid().unwrap_or_else(measured_tsc_khz))
}

/// Reads leaf 0x15 (crystal ratio) or the hypervisors' leaf 0x4000_0010.
fn tsc_khz_from_cpuid() -> Option<u32> {
    const HYPERVISOR: u32 = 1 << 31;
    if cpuid(0, 0)[0] >= 0x15 {
        let [den, num, crystal_hz, _] = cpuid(0x15, 0);
        if den != 0 && num != 0 && crystal_hz != 0 {
            let khz = u64::from(crystal_hz) * u64::from(num) / u64::from(den) / 1000;
            return u32::try_from(khz).ok();
        }
    }
    if cpuid(1, 0)[2] & HYPERVISOR != 0 {
        let max = cpuid(0x4000_0000, 0)[0];
        if (0x4000_0010..0x4000_1000).contains(&max) {
            let khz = cpuid(0x4000_0010, 0)[0];
            if khz != 0 {
                return Some(khz);
            }
        }
    }
    None
}

/// Length of a measurement in ns: with samples as good as [`sample`]'s, the error is below one millionth.
const MEASURED_NS: u64 = 5_000_000;

/// Reads the counter and the kernel's clock at the same time. Of many pairs the tightest one is returned, so that a
/// disturbance of some microseconds does not spoil the result.
fn sample() -> (u64, u64) {
    (0..64)
        .map(|_| {
            let before = rdtsc();
            let ns = clock::monotonic_raw_ns();
            let after = rdtsc();
            (after.wrapping_sub(before), before, ns)
        })
        .min()
        .map_or((0, 0), |(_, tsc, ns)| (tsc, ns))
}

/// Returns the frequency in kHz from two samples.
fn khz_between((tsc0, ns0): (u64, u64), (tsc1, ns1): (u64, u64)) -> u64 {
    let ns = u128::from(ns1.wrapping_sub(ns0).max(1));
    (u128::from(tsc1.wrapping_sub(tsc0)) * 1_000_000 / ns) as u64
}

static BEGAN: OnceLock<(u64, u64)> = OnceLock::new();

/// Begins the measurement that [`tsc_khz`] may need. If this is called early, [`tsc_khz`] does not have to wait.
pub fn begin_to_measure_tsc() {
    BEGAN.get_or_init(sample);
}

/// Measures the frequency: from the beginning of [`begin_to_measure_tsc`], if that was called. Otherwise returns the
/// median of several short measurements, because the thread may be disturbed in some of them.
fn measured_tsc_khz() -> u32 {
    const WINDOW_NS: u64 = MEASURED_NS / 5;
    let wait = |since: u64, long: u64| {
        while clock::monotonic_raw_ns().wrapping_sub(since) < long {
            core::hint::spin_loop();
        }
    };
    if let Some(began) = BEGAN.get() {
        wait(began.1, MEASURED_NS);
        return u32::try_from(khz_between(*began, sample())).unwrap_or(u32::MAX);
    }
    let mut results: Vec<u64> = (0..5)
        .map(|_| {
            let start = sample();
            wait(start.1, WINDOW_NS);
            khz_between(start, sample())
        })
        .collect();
    results.sort_unstable();
    u32::try_from(results[results.len() / 2]).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuid_names_a_vendor() {
        let [max, ..] = cpuid(0, 0);
        assert!(max >= 1);
        assert_eq!(xcr0() & 1, 1);
    }

    #[test]
    fn both_ways_to_the_frequency_agree() {
        let khz = f64::from(tsc_khz());
        let measured = f64::from(measured_tsc_khz());
        assert!(khz > 100_000.0, "{khz}");
        assert!((measured / khz - 1.0).abs() < 0.02, "{measured} {khz}");
    }
}
