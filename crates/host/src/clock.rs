//! The kernel's clocks, read through the vDSO: no system call on the usual clock sources.

fn read_ns(id: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is writable for the call; an unknown clock would leave it zero.
    unsafe { libc::clock_gettime(id, &mut ts) };
    (ts.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(ts.tv_nsec as u64)
}

/// CLOCK_MONOTONIC in ns.
pub fn monotonic_ns() -> u64 {
    read_ns(libc::CLOCK_MONOTONIC)
}

/// CLOCK_MONOTONIC_RAW in ns: not slewed by NTP.
pub fn monotonic_raw_ns() -> u64 {
    read_ns(libc::CLOCK_MONOTONIC_RAW)
}

/// CLOCK_BOOTTIME in ns.
pub fn boottime_ns() -> u64 {
    read_ns(libc::CLOCK_BOOTTIME)
}

/// CLOCK_REALTIME in ns since 1970.
pub fn realtime_ns() -> u64 {
    read_ns(libc::CLOCK_REALTIME)
}

/// CPU time of the calling thread in ns.
pub fn thread_cpu_ns() -> u64 {
    read_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// CPU time in ns of the process's children that have been waited for, and of their children.
pub fn children_cpu_ns() -> u64 {
    let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is writable for the call; zeros are a value of it.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let ns = |t: libc::timeval| t.tv_sec as u64 * 1_000_000_000 + t.tv_usec as u64 * 1000;
    ns(usage.ru_utime) + ns(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_go_forward() {
        let a = monotonic_ns();
        let b = monotonic_ns();
        assert!(a > 0 && b >= a);
        assert!(realtime_ns() > 1_700_000_000_000_000_000);
        assert!(boottime_ns() > 0 && monotonic_raw_ns() > 0 && thread_cpu_ns() > 0);
    }
}
