//! Measures how much longer code takes while counters count what it retires: loops of a few instructions, and programs
//! in a guest of Debian's kernel whose process has events of its own, or whose processor is sampled.

use std::time::Instant;

use anykvm_ioctls::VcpuExit;

use super::{Registers, looping, wrmsr};
use crate::bench::bare::Bare;
use crate::bench::machines::Files;
use crate::bench::report::{self, Verdict};
use crate::bench::workloads::{Suite, WORKLOADS, Workload};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Number of a loop's iterations between two exits, and of runs, of which the fastest counts.
const TURNS: u32 = 100_000;
const RUNS: u32 = 60;

/// Event selects at both levels, enabled: instructions, and of Intel's and AMD's branches all, conditional, returns,
/// taken. Of Intel's conditional branches it is those that are not taken, whose event is the same on all models.
const EVENTS: [[u32; 5]; 2] = [
    [0x43_00c0, 0x43_00c4, 0x43_10c4, 0x43_08c4, 0x43_20c4],
    [0x43_00c0, 0x43_00c2, 0x43_00d1, 0x43_00c8, 0x43_00c4],
];
/// How many of these are counted at once, the name of what is added by that, and the bar in per cent. The streams of
/// the last two ways are kept in another way.
const LOOP_WAYS: [(usize, &str, f64); 4] = [
    (1, "instructions", 2.0),
    (2, "branches as well", 3.0),
    (4, "conditional, returns", 4.0),
    (5, "taken", 5.0),
];

/// Names and bodies of loops. They may use RBX and RDI, and RAM from 0x10000 on.
const LOOPS: &[(&str, &[u8])] = &[
    ("nothing", &[]),
    (
        // add rax, [rbx]; add ebx, 8; and ebx, 0x1fff8; or ebx, 0x10000
        "sum of an array",
        &[
            0x48, 0x03, 0x03, 0x83, 0xc3, 0x08, 0x81, 0xe3, 0xf8, 0xff, 0x01, 0x00, 0x81, 0xcb, 0,
            0, 1, 0,
        ],
    ),
    (
        // inc eax; test al, 3; jne +2; inc edx
        "a branch",
        &[0xff, 0xc0, 0xa8, 0x03, 0x75, 0x02, 0xff, 0xc2],
    ),
    (
        // call +2; jmp +3; inc eax; ret
        "a call",
        &[0xe8, 2, 0, 0, 0, 0xeb, 3, 0xff, 0xc0, 0xc3],
    ),
    (
        // imul rax, rax, 5; add rax, 7; rol rax, 3; xor rdx, rax; mov [rbx], rdx; add rsi, rdx;
        // lea rbp, [rsi+rax]; sub rbp, rdx
        "arithmetic",
        &[
            0x48, 0x6b, 0xc0, 5, 0x48, 0x83, 0xc0, 7, 0x48, 0xc1, 0xc0, 3, 0x48, 0x31, 0xc2, 0x48,
            0x89, 0x13, 0x48, 0x01, 0xd6, 0x48, 0x8d, 0x2c, 0x06, 0x48, 0x29, 0xd5,
        ],
    ),
    (
        // mov ecx, 32; mov edi, 0x20000; rep stosq
        "fill 256 bytes",
        &[0xb9, 32, 0, 0, 0, 0xbf, 0, 0, 2, 0, 0xf3, 0x48, 0xab],
    ),
];

/// Makes a guest that runs a loop for ever, with an address in EBX.
fn guest(before: &[u8], body: &[u8]) -> Result<Bare, BootError> {
    // mov ebx, 0x10000
    looping(&[before, &[0xbb, 0, 0, 1, 0]].concat(), body, TURNS)
}

/// Returns the nanoseconds of an iteration, without counters and in each way. The guests run in turn.
fn times(r: &Registers, body: &[u8]) -> Result<Vec<f64>, BootError> {
    let events = EVENTS[usize::from(r.is_amd())];
    let counts = core::iter::once(0).chain(LOOP_WAYS.map(|(n, ..)| n));
    let guests: Result<Vec<Bare>, _> = counts
        .map(|n| {
            let selects = (0..).step_by(r.step() as usize).zip(&events[..n]);
            let on: Vec<_> = selects.map(|(at, e)| wrmsr(r.select + at, *e)).collect();
            guest(&on.concat(), body)
        })
        .collect();
    let mut guests = guests?;
    let mut best = vec![f64::INFINITY; guests.len()];
    for _ in 0..RUNS {
        for (guest, best) in guests.iter_mut().zip(&mut best) {
            let begin = Instant::now();
            match guest.vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::IoOut(..) => {}
                exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
            }
            *best = best.min(begin.elapsed().as_secs_f64() / f64::from(TURNS) * 1e9);
        }
    }
    Ok(best)
}

/// Returns how many per cent longer a time is.
fn more(time: f64, than: f64) -> f64 {
    (time / than - 1.0) * 100.0
}

fn percent(value: f64) -> String {
    format!("{value:+.1} %")
}

/// Measures the loops. Returns the table.
pub(super) fn loops(r: &Registers, verdict: &mut Verdict) -> Result<String, BootError> {
    let head = ["a loop's turn", "not counted, ns"];
    let head = head.into_iter().chain(LOOP_WAYS.map(|(_, name, _)| name));
    let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for (name, body) in LOOPS {
        let times = times(r, body)?;
        let mut line = vec![(*name).to_owned(), format!("{:.2}", times[0])];
        for ((_, what, bar), time) in LOOP_WAYS.iter().zip(&times[1..]) {
            let value = more(*time, times[0]);
            verdict.at_most(&format!("{name}, {what}, %"), value, *bar);
            line.push(percent(value));
        }
        lines.push(line);
    }
    Ok(format!("\n{}", report::aligned(&lines)))
}

/// A way of running programs: the argument of program.c, its name, and the bars of the geometric mean and of each
/// program, in per cent.
struct Way {
    count: &'static str,
    name: &'static str,
    mean: f64,
    each: f64,
}

const fn way(count: &'static str, name: &'static str, mean: f64, each: f64) -> Way {
    Way {
        count,
        name,
        mean,
        each,
    }
}

const COMPUTE: &[Way] = &[
    way("COUNT=1", "instructions", 5.0, 10.0),
    way("COUNT=2", "branches as well", 6.0, 11.0),
    way("COUNT=4", "conditional, returns", 7.0, 12.0),
    way(
        "COUNT=l",
        "branches and loads",
        f64::INFINITY,
        f64::INFINITY,
    ),
    way("COUNT=s1000", "samples at 1 kHz", 2.0, f64::INFINITY),
    way("COUNT=s4000", "at 4 kHz", 5.0, f64::INFINITY),
    // These bars are what KVM's mediated PMU cost in 2025.
    way("COUNT=s1000x6", "6 events, 1 kHz", 4.24, f64::INFINITY),
    way("COUNT=s1000x10", "10 events", 7.34, f64::INFINITY),
];

const KERNEL: &[Way] = &[
    way("COUNT=1", "its own instructions", 20.0, f64::INFINITY),
    way("COUNT=k", "the kernel's, too", 20.0, f64::INFINITY),
];

/// Measures the programs, and what the kernel does for counted programs. Returns the tables.
pub(super) fn programs(
    args: &BenchArgs,
    files: &Files,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    let all = [
        ("programs", Suite::Compute, COMPUTE),
        ("kernel work", Suite::Kernel, KERNEL),
    ];
    let mut text = String::new();
    for (what, suite, ways) in all {
        let is_wanted = |w: &&Workload| {
            w.suite == suite && (args.only.is_empty() || args.only.iter().any(|n| n == w.name))
        };
        let workloads: Vec<&Workload> = WORKLOADS.iter().filter(is_wanted).collect();
        if !workloads.is_empty() {
            text += &in_ways((args, files), verdict, what, &workloads, ways)?;
        }
    }
    Ok(text)
}

/// Returns a table of workloads, without counters and in these ways.
fn in_ways(
    (args, files): (&BenchArgs, &Files),
    verdict: &mut Verdict,
    what: &str,
    workloads: &[&Workload],
    ways: &[Way],
) -> Result<String, BootError> {
    let settings: Vec<&str> = core::iter::once("")
        .chain(ways.iter().map(|w| w.count))
        .collect();
    let run = files.run_ways(workloads, &settings, args.repeats)?;
    let best = |name: String| {
        let of = run.samples.iter().filter(|s| s.name == name);
        of.map(|s| s.ns as f64 / 1e6).fold(f64::INFINITY, f64::min)
    };
    let head = [what, "not counted, ms"].map(str::to_owned);
    let head = head
        .into_iter()
        .chain(ways.iter().map(|w| w.name.to_owned()));
    let mut lines = vec![head.collect::<Vec<_>>()];
    let mut logs = vec![0.0; ways.len()];
    for w in workloads {
        let plain = best(w.name.to_owned());
        let mut line = vec![w.name.to_owned(), format!("{plain:.1}")];
        for (way, log) in ways.iter().zip(&mut logs) {
            let time = best(format!(
                "{}:{}",
                w.name,
                way.count.trim_start_matches("COUNT=")
            ));
            if !time.is_finite() {
                let failed = format!("{} failed with {}", w.name, way.count);
                return Err(BootError::NoImage(failed));
            }
            *log += (time / plain).ln();
            verdict.at_most(
                &format!("{}, {}, %", w.name, way.name),
                more(time, plain),
                way.each,
            );
            line.push(percent(more(time, plain)));
        }
        lines.push(line);
    }
    let mut line = vec!["geometric mean".to_owned(), String::new()];
    for (way, log) in ways.iter().zip(logs) {
        let value = more((log / workloads.len() as f64).exp(), 1.0);
        verdict.at_most(&format!("{what}, {}, %", way.name), value, way.mean);
        line.push(percent(value));
    }
    lines.push(line);
    Ok(format!("\n{}", report::aligned(&lines)))
}
