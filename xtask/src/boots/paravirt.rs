//! KVM's paravirtual features in Debian's kernel. Each has to be used, and not only be present.
//!
//! The kernel's own tracers show that: the functions of its `kvm` code that were called, and the MSRs that it wrote.

use std::{path::Path, time::Duration};

use testkit::boot::Boot;

use super::LIMIT;

/// Options of the kernel. `cpuidle_haltpoll` uses poll control; the tracers are on from the start. Each
/// change of the kernel's text sends an IPI to all other vCPUs: without broadcasts, Linux sends that by the hypercall.
const APPEND: &str = "cpuidle_haltpoll.force=1 no_ipi_broadcast=1 ftrace=function ftrace_filter=kvm_*,__pv_* \
                      trace_event=msr:write_msr trace_buf_size=8M";
/// Number of vCPUs: more than processors, so that time is stolen and locks are waited for.
const CPUS: u32 = 4;

/// Prints the functions that were called and the MSRs that were written.
const COMMAND: &str = r#"
    hackbench -g 2 -l 200 -T >/dev/null || exit 1
    cat /sys/devices/system/clocksource/clocksource0/available_clocksource
    echo "driver $(cat /sys/devices/system/cpu/cpuidle/current_driver)"
    mount -t tracefs tracefs /sys/kernel/tracing && cd /sys/kernel/tracing || exit 2
    echo 0 >tracing_on
    sed -n 's/.*: \([a-z_]*\) <-.*/called \1/p' trace | sort -u
    sed -n 's/.*write_msr: \(4b564d0[0-9]\), value .*\(.\)$/wrote \1 \2/p' trace | sort -u
    set -- $(head -n 1 /proc/stat)
    [ "$9" -gt 0 ] && echo stolen
    dmesg | grep -o 'kvm-guest: .*'
    exit 7"#;

/// Each feature, and a line that only its use prints. The last digit of a value written to an MSR has the bit that
/// enables the feature. `a_kick_wakes_from_halt_now_or_later` tests PV unhalt's sleep itself (KVM_HC_KICK_CPU): here a
/// vCPU that waits in a loop of PAUSE yields to the one that it waits for, before the kernel would sleep.
const USES: &[(&str, &str)] = &[
    ("KVM_FEATURE_CLOCKSOURCE2", "kvm-clock"),
    ("KVM_FEATURE_NOP_IO_DELAY", "called kvm_io_delay"),
    ("KVM_FEATURE_STEAL_TIME", "called kvm_steal_clock"),
    ("KVM_FEATURE_STEAL_TIME, time", "stolen"),
    ("KVM_FEATURE_PV_EOI", "wrote 4b564d04 1"),
    (
        "KVM_FEATURE_PV_UNHALT",
        "called __pv_queued_spin_lock_slowpath",
    ),
    ("KVM_FEATURE_PV_TLB_FLUSH", "called kvm_flush_tlb_multi"),
    ("KVM_FEATURE_PV_SEND_IPI", "called kvm_send_ipi_mask"),
    ("KVM_FEATURE_POLL_CONTROL", "driver haltpoll"),
    ("KVM_FEATURE_POLL_CONTROL, MSR", "wrote 4b564d05 0"),
    (
        "KVM_FEATURE_PV_SCHED_YIELD",
        "called kvm_smp_send_call_func_ipi",
    ),
];

/// Boots the guest, and looks for each use.
pub(super) fn run(anykvm: &Path) -> Result<Duration, String> {
    crate::debian::install(&["rt-tests"])?;
    let outcome = Boot::new(anykvm)
        .cpus(CPUS)
        .limit(LIMIT)
        .overlay("/usr/bin/hackbench:/usr/bin/hackbench")
        .option("--append", APPEND)
        .run(&["sh", "-c", COMMAND])
        .map_err(|e| format!("{}: {e}", anykvm.display()))?;
    let text = outcome.text();
    if outcome.timed_out || outcome.status != Some(7) {
        return Err(format!(
            "status {:?}, output {text:?}\n{}",
            outcome.status,
            outcome.last_words(15)
        ));
    }
    let unused = unused(&text);
    if unused.is_empty() {
        Ok(outcome.time)
    } else {
        Err(format!("not used: {}\n{text}", unused.join(", ")))
    }
}

/// Returns the features whose use `text` does not show.
fn unused(text: &str) -> Vec<&'static str> {
    let is_there = |use_: &str| {
        text.lines()
            .any(|line| line == use_ || line.split_whitespace().any(|word| word == use_))
    };
    USES.iter()
        .filter(|(_, use_)| !is_there(use_))
        .map(|(feature, _)| *feature)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_without_a_trace_is_named() {
        let all: Vec<&str> = USES.iter().map(|u| u.1).collect();
        assert!(unused(&all.join("\n")).is_empty());
        for (feature, missing) in USES {
            let rest: Vec<&str> = all.iter().copied().filter(|u| u != missing).collect();
            assert_eq!(unused(&rest.join("\n")), [*feature]);
        }
        assert_eq!(unused("").len(), USES.len());
    }
}
