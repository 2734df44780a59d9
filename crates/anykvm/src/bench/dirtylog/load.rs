//! Measures what logging and harvesting cost a kernel that makes many processes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::bench::machines::{self, Files, Run, WORDS};
use crate::bench::note;
use crate::bench::report;
use crate::bench::workloads::{WORKLOADS, Workload};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// A compile by two processes at a time first, as in Linux' own benchmark of that name, then what such loads are made of.
const LOADS: [&str; 5] = ["make-j2", "hackbench-5", "forks", "execs", "pagefaults"];
/// The columns, with the milliseconds between two harvests: 0 if nothing is harvested, `None` if nothing is logged.
const WAYS: [(&str, Option<u32>); 3] = [
    ("not logged, ms", None),
    ("logged", Some(0)),
    ("harvested every 100 ms", Some(100)),
];
const CPUS: u32 = 2;
/// Maximum time until a guest's socket is there.
const PATIENCE: Duration = Duration::from_secs(30);

/// Measures the loads, and returns the table.
pub(super) fn measure(args: &BenchArgs) -> Result<String, BootError> {
    let files = Files::new(args.kernel.as_deref(), &args.qemu)?;
    let find = |name| WORKLOADS.iter().find(|w| w.name == name);
    let loads: Vec<&Workload> = LOADS.into_iter().filter_map(find).collect();
    let mut best = vec![[f64::INFINITY; WAYS.len()]; loads.len()];
    let mut rate = 0.0;
    for round in 1..=args.rounds {
        for (n, (name, log)) in WAYS.into_iter().enumerate() {
            let (run, pages) = run(&files, &loads, args.repeats, log)?;
            note(&format!("round {round} of {}: {name}", args.rounds));
            for (load, best) in loads.iter().zip(&mut best) {
                let times = run.samples.iter().filter(|s| s.name == load.name);
                let times = times.map(|s| s.cpu.as_secs_f64() * 1e3);
                best[n] = times.fold(best[n], f64::min);
            }
            rate = pages as f64 / run.total.as_secs_f64();
        }
    }
    let head = ["2 vCPUs, 1 GiB; of the processors' time"]
        .into_iter()
        .chain(WAYS.map(|(n, _)| n));
    let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for (load, best) in loads.iter().zip(best) {
        let mut line = vec![load.name.to_owned(), format!("{:.0}", best[0])];
        let over = best[1..].iter().map(|time| time / best[0]);
        line.extend(over.map(|over| format!("{over:.2}×")));
        lines.push(line);
    }
    Ok(format!(
        "{}{rate:.0} pages a second were found in the last.\n",
        report::aligned(&lines)
    ))
}

/// Runs the loads in one guest. Returns the run, and the number of pages that harvests found.
fn run(
    files: &Files,
    loads: &[&Workload],
    repeats: u32,
    log: Option<u32>,
) -> Result<(Run, u64), BootError> {
    let script = machines::script(loads, repeats)?;
    let initrd = files.initrd(loads.first().map(|w| w.suite), &script)?;
    let socket = files.file("control");
    let mut command = files.boot(&machines::own()?, CPUS, "1G", WORDS, &initrd);
    command.arg("--control").arg(&socket);
    let (run, found) = thread::scope(|threads| {
        let found = threads.spawn(|| log.map_or(Ok(0), |period| harvest(&socket, period)));
        (machines::follow(&mut command), found.join())
    });
    let found = found.map_err(|_| BootError::NoImage("a run ended early".to_owned()))?;
    let pages = found.map_err(BootError::host("the guest was not logged"))?;
    Ok((run?, pages))
}

/// Has the guest's writes logged until it ends. Returns the number of pages that harvests found.
fn harvest(socket: &Path, period: u32) -> std::io::Result<u64> {
    let mut stream = super::connect(socket, PATIENCE)?;
    stream.write_all(format!("log {period}\n").as_bytes())?;
    let mut lines = BufReader::new(stream).lines();
    match lines.next() {
        Some(Ok(line)) if line == "logging" => {}
        other => return Err(std::io::Error::other(format!("it says {other:?}"))),
    }
    let pages = |line: String| line.strip_prefix("dirty ")?.parse::<u64>().ok();
    Ok(lines.map_while(Result::ok).filter_map(pages).sum())
}
