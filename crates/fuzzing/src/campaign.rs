//! `fuzzing ioctl`: runs sequences in child processes, so that a crash or a hang is a finding with a seed.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use fuzzing::ioctl::{Arena, Counts, Residue, run_sequence};

use crate::cli::Calls;

/// Number of sequences that one process runs.
const BATCH: u64 = 100;
/// A sequence that takes longer hangs: it usually takes milliseconds.
const HANGS: Duration = Duration::from_secs(60);
/// How much memory a process may gain after its first ten sequences: allocators keep as much.
const RSS_GROWTH_KIB: u64 = 48 << 10;

type Report = Result<(String, bool), String>;

/// Runs children until the time is over or one finds something.
pub(crate) fn run(options: &Calls) -> Report {
    let start = Instant::now();
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let (mut seed, mut calls, mut good) = (options.seed, 0, 0);
    while start.elapsed() < Duration::from_secs(options.seconds) {
        let mut child = Command::new(&program)
            // Arenas of threads that have ended would grow, and look like a leak.
            .env("MALLOC_ARENA_MAX", "1")
            .args(["ioctl", "--worker", "--seed", &seed.to_string()])
            .args(["--length", &options.length.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| e.to_string())?;
        let output = child.stdout.take().ok_or("no pipe")?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut last = seed;
        let mut findings = Vec::new();
        loop {
            match lines.recv_timeout(HANGS) {
                Ok(line) => {
                    let mut words = line.split(' ');
                    let word = words.next();
                    let mut number = || words.next().and_then(|w| w.parse().ok()).unwrap_or(0);
                    match word {
                        Some("seed") => last = number(),
                        Some("calls") => {
                            calls += number();
                            good += number();
                        }
                        _ => findings.push(line),
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    findings.push(format!(
                        "seed {last} hangs (process {} is left for a debugger)",
                        child.id()
                    ));
                    return Ok((findings.join("\n"), false));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        let status = child.wait().map_err(|e| e.to_string())?;
        if !status.success() {
            findings.push(format!("seed {last}: {}", ending(status)));
        }
        if !findings.is_empty() {
            return Ok((findings.join("\n"), false));
        }
        seed += BATCH;
    }
    let seconds = start.elapsed().as_secs_f64();
    let sequences = seed - options.seed;
    Ok((
        format!(
            "{sequences} sequences, {calls} calls, {good} successful, in {seconds:.1} s; nothing found"
        ),
        true,
    ))
}

fn ending(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    status
        .signal()
        .map_or_else(|| status.to_string(), |n| format!("ended by signal {n}"))
}

/// Runs a batch of sequences as a child. Each is announced before it runs.
#[allow(clippy::print_stdout, reason = "the parent reads it")]
pub(crate) fn work(options: &Calls) -> Report {
    let arena = Arena::new().map_err(|e| e.to_string())?;
    let mut all = Counts::default();
    let mut settled = None;
    for n in 0..BATCH {
        let seed = options.seed + n;
        println!("seed {seed}");
        let counts = run_sequence(&arena, seed, options.length, true);
        for finding in &counts.findings {
            println!("seed {seed}: {finding}");
        }
        all.add(counts);
        match n {
            9 => settled = Some(Residue::settled()),
            _ if n + 1 == BATCH => {
                let (before, now) = (settled.unwrap_or_else(Residue::settled), Residue::settled());
                let leaks = (now.descriptors, now.threads, now.mappings)
                    != (before.descriptors, before.threads, before.mappings)
                    || now.rss_kib > before.rss_kib + RSS_GROWTH_KIB;
                if leaks {
                    println!("seeds up to {seed} leave something behind: {before:?}, then {now:?}");
                }
            }
            _ => {}
        }
    }
    let _ = std::io::stdout().flush();
    Ok((format!("calls {} {}", all.calls, all.successes), true))
}

/// Runs one sequence in this process, and reports what it did.
pub(crate) fn one(options: &Calls) -> Report {
    let arena = Arena::new().map_err(|e| e.to_string())?;
    let counts = run_sequence(&arena, options.seed, options.length, true);
    let mut report = String::new();
    for (name, (made, good)) in &counts.by_name {
        report.push_str(&format!("{name:34} {made:6} made {good:6} successful\n"));
    }
    for finding in &counts.findings {
        report.push_str(finding);
        report.push('\n');
    }
    report.push_str(&format!("{} calls", counts.calls));
    Ok((report, counts.findings.is_empty()))
}
