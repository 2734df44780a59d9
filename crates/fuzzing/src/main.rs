//! The interpreter against the host CPU.
//!
//! `insn` runs single instructions, each form in turn; `random` runs blocks of
//! two to eight. Both stop at the first mismatch unless `--all` asks for the
//! first of each form. `jit` runs programs on the translator and on the
//! interpreter. `ioctl` makes random KVM calls.

#![forbid(unsafe_code)]

mod campaign;

use std::{collections::BTreeSet, process::ExitCode, time::Instant};

use fuzzing::{Case, Differential, Family, Generator, Mode, Strictness, forms, jit::Jits};

const USAGE: &str = "usage: fuzzing insn|random [--cases N] [--seed S] [--family fp|integer]
               [--bits 64|32] [--form NAME] [--all] [--exact]
       fuzzing jit [--cases N] [--seed S] [--cache BYTES] [--list] [--all]
       fuzzing ioctl [--seconds N] [--seed S] [--length N] [--one]
  insn     single instructions, each form in turn
  random   blocks of two to eight instructions
  jit      programs, from seed S on; --list prints that of S
  ioctl    sequences of random KVM calls, from seed S on; --one runs only that of S
  --exact  compare undefined flags too: for hosts of the interpreter's model";

#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok((report, clean)) => {
            println!("{report}");
            if clean {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(message) => {
            println!("{message}");
            ExitCode::from(2)
        }
    }
}

#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn run(args: &[String]) -> Result<(String, bool), String> {
    let value = |name: &str| {
        let at = args.iter().position(|a| a == name)?;
        args.get(at + 1).cloned()
    };
    let number = |name: &str, or: u64| match value(name) {
        None => Ok(or),
        Some(v) => v.parse().map_err(|_| format!("{name} {v}: not a number")),
    };
    let has = |name: &str| args.iter().any(|a| a == name);
    let blocks = match args.first().map(String::as_str) {
        Some("jit") => {
            let cache = number("--cache", 64 << 20)?;
            let (cases, seed) = (number("--cases", 100_000)?, number("--seed", 0)?);
            return jit(cases, seed, cache as usize, has("--list"), has("--all"));
        }
        Some("ioctl") => {
            let options = campaign::Options {
                seconds: number("--seconds", 60)?,
                seed: number("--seed", 1)?,
                length: number("--length", 400)?,
            };
            return match (has("--worker"), has("--one")) {
                (true, _) => campaign::work(&options),
                (_, true) => campaign::one(&options),
                _ => campaign::run(&options),
            };
        }
        Some("insn") => false,
        Some("random") => true,
        _ => return Err(USAGE.to_owned()),
    };
    let (cases, seed) = (number("--cases", 1_000_000)?, number("--seed", 1)?);
    let strictness = if has("--exact") {
        Strictness::Exact
    } else {
        Strictness::Manual
    };
    let mode = match number("--bits", 64)? {
        64 => Mode::Bits64,
        32 => Mode::Bits32,
        _ => return Err(USAGE.to_owned()),
    };
    let families: Vec<Family> = match value("--family") {
        None => Family::ALL.iter().map(|f| f.1).collect(),
        Some(name) => Family::ALL
            .iter()
            .filter(|f| f.0 == name)
            .map(|f| f.1)
            .collect(),
    };
    let mut codes: Vec<_> = families.into_iter().flat_map(|f| forms(f, mode)).collect();
    if let Some(name) = value("--form") {
        codes.retain(|c| format!("{c:?}") == name);
    }
    if codes.is_empty() {
        return Err(USAGE.to_owned());
    }
    let integer = forms(Family::Integer, mode);
    let all = has("--all");
    let mut both = Differential::new().map_err(|e| format!("the oracle cannot be set up: {e}"))?;
    let mut generator = Generator::new(mode, strictness);
    let mut failed = BTreeSet::new();
    let (mut done, mut differ) = (0u64, 0u64);
    let start = Instant::now();
    for n in 0u64.. {
        if done == cases || n == 2 * cases {
            break;
        }
        let code = codes[(n % codes.len() as u64) as usize];
        let case: Option<Case> = if blocks {
            // Three of four blocks have integer instructions only.
            let mixed = n % 4 == 0;
            generator.block(if mixed { &codes } else { &integer }, seed << 40 ^ n)
        } else {
            generator.single(
                code,
                (code as u64) << 48 ^ seed << 32 ^ (n / codes.len() as u64),
            )
        };
        let Some(case) = case else { continue };
        done += 1;
        if let Err(difference) = both.run(&case) {
            differ += 1;
            if blocks && failed.len() < 20 || failed.insert(code as u32) {
                failed.insert(code as u32);
                println!("{difference}");
            }
            if !all {
                break;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let report = format!(
        "{} forms, {done} cases in {seconds:.1} s, {differ} differ{}",
        codes.len(),
        if blocks {
            String::new()
        } else {
            format!(" ({} forms)", failed.len())
        }
    );
    Ok((report, differ == 0))
}

/// Programs on the translator and on the interpreter.
#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn jit(
    cases: u64,
    seed: u64,
    cache: usize,
    list: bool,
    all: bool,
) -> Result<(String, bool), String> {
    let mut jits = Jits::new(cache).map_err(|e| format!("memory cannot be mapped: {e}"))?;
    if list {
        return Ok((jits.listing(seed), true));
    }
    let start = Instant::now();
    let mut differ = 0;
    for n in seed..seed.saturating_add(cases) {
        if let Err(difference) = jits.run(n) {
            differ += 1;
            println!("{difference}");
            if !all || differ == 20 {
                break;
            }
        }
    }
    let (seconds, summary) = (start.elapsed().as_secs_f64(), jits.summary());
    let report = format!("{summary:?}, {differ} differ, {seconds:.1} s");
    Ok((report, differ == 0))
}
