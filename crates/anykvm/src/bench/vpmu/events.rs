//! Events of kernels: the host's, as virtual PMUs use them, beside our counters, and the guest's, by which programs are profiled.

use super::{COUNTING, Registers, measure, read, wrmsr};
use crate::bench::machines::{Files, Guest, Machine, Sample};
use crate::bench::report::{self, Verdict};
use crate::error::BootError;

/// Samples a second, and what a function's part of them may differ from its part of the time, in points.
const RATE: u32 = 1000;
const SHAPE_BAR: f64 = 2.0;

/// Source 4's experiment: an access of the guest's that has an event of the host's made anew, one that keeps and switches it, and ours.
pub(super) fn host(r: &Registers, files: &Files) -> Result<String, BootError> {
    let run = files.run_script(&Guest::new(Machine::Native, 1, "1G"), None, "./events host")?;
    let find = |what: &str| {
        let sample = run.samples.iter().find(|s| s.name.ends_with(what))?;
        Some((sample.name.split(':').next()?.to_owned(), sample.ns as f64))
    };
    let (Some((event, anew)), Some((_, kept)), Some((_, read_ns))) =
        (find(":anew"), find(":kept"), find(":read"))
    else {
        return Ok(
            "\nThis host has no event that a process may open: nothing to compare with.\n"
                .to_owned(),
        );
    };
    let on = wrmsr(r.select, COUNTING);
    let own =
        |body: Vec<u8>| Ok::<_, BootError>((measure(&on, &body)? - measure(&on, &[])?).max(0.0));
    let rows = [
        (
            "enable and disable",
            Some(anew),
            Some(kept),
            own([wrmsr(r.select, 0), on.clone()].concat())?,
        ),
        ("read", None, Some(read_ns), own(read(0, 0x33))?),
    ];
    let head = [
        "one access, ns".to_owned(),
        format!("{event} of the host, made anew"),
        "kept".to_owned(),
        "anykvm".to_owned(),
    ];
    let mut lines = vec![head.to_vec()];
    for (name, anew, kept, own) in rows {
        let cells = [anew, kept, Some(own)].map(report::cell);
        lines.push([name.to_owned()].into_iter().chain(cells).collect());
    }
    Ok(format!("\n{}", report::aligned(&lines)))
}

/// A profile of a program of five functions, which times them itself.
pub(super) fn profile(files: &Files, verdict: &mut Verdict) -> Result<String, BootError> {
    let script =
        format!("echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent; ./events profile {RATE}");
    let run = files.run_script(&Guest::new(Machine::Anykvm, 1, "256M"), None, &script)?;
    let shares = shares(&run.samples)
        .ok_or_else(|| BootError::NoImage("the guest has no samples".to_owned()))?;
    let head = ["a profile by cycles", "of the time, %", "of the samples, %"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (name, time, samples) in shares {
        let off = (time - samples).abs();
        verdict.at_most(&format!("profile: {name}, points"), off, SHAPE_BAR);
        lines.push(vec![name, format!("{time:.1}"), format!("{samples:.1}")]);
    }
    Ok(format!("\n{}", report::aligned(&lines)))
}

/// By function: parts of the time and of the samples, in per cent. None without samples.
fn shares(samples: &[Sample]) -> Option<Vec<(String, f64, f64)>> {
    let found = samples.iter().map(|s| u64::from_str_radix(&s.sum, 16).ok());
    let found: Vec<u64> = found.collect::<Option<_>>()?;
    let (time, count): (u64, u64) = (samples.iter().map(|s| s.ns).sum(), found.iter().sum());
    let part = |of: u64, all: u64| of as f64 * 100.0 / all as f64;
    let share = |(s, n): (&Sample, u64)| (s.name.clone(), part(s.ns, time), part(n, count));
    (count != 0).then(|| samples.iter().zip(found).map(share).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_parts_of_a_hundred() {
        let sample = |name: &str, ns, sum: &str| Sample {
            name: name.to_owned(),
            ns,
            sum: sum.to_owned(),
            cpu: std::time::Duration::ZERO,
        };
        let samples = [sample("a", 300, "a"), sample("b", 100, "1e")];
        let want = vec![("a".to_owned(), 75.0, 25.0), ("b".to_owned(), 25.0, 75.0)];
        assert_eq!(shares(&samples), Some(want));
        assert_eq!(shares(&[sample("a", 300, "0")]), None);
        assert_eq!(shares(&[]), None);
    }
}
