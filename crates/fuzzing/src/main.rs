//! `fuzzing insn [--cases N] [--seed S] [--family fp|integer] [--all]`: the
//! interpreter against the host CPU. Stops at the first mismatch; `--all`
//! reports the first of each form.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use fuzzing::{
    differential::{Runner, case},
    forms::{Family, forms},
};

#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = args.iter().position(|a| a == name)?;
        args.get(at + 1).cloned()
    };
    let number = |name: &str, or: u64| value(name).and_then(|v| v.parse().ok()).unwrap_or(or);
    if args.first().map(String::as_str) != Some("insn") {
        println!("usage: fuzzing insn [--cases N] [--seed S] [--family fp|integer] [--all]");
        return ExitCode::from(2);
    }
    let families = match value("--family").as_deref() {
        Some("fp") => vec![Family::Fp],
        Some("integer") => vec![Family::Integer],
        _ => vec![Family::Fp, Family::Integer],
    };
    let codes: Vec<_> = families.into_iter().flat_map(forms).collect();
    let (cases, seed) = (number("--cases", 1_000_000), number("--seed", 1));
    let all = args.iter().any(|a| a == "--all");
    let mut runner = match Runner::new() {
        Ok(r) => r,
        Err(e) => {
            println!("the oracle cannot be set up: {e}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = std::collections::BTreeSet::new();
    let mut done = 0u64;
    for n in 0..cases {
        let code = codes[(n % codes.len() as u64) as usize];
        let form = (code as u64) << 40;
        let Some(c) = case(code, form ^ seed << 32 ^ (n / codes.len() as u64)) else {
            continue;
        };
        done += 1;
        if let Err(difference) = runner.run(&c)
            && failed.insert(code as u32)
        {
            println!("{difference}");
            if !all {
                return ExitCode::FAILURE;
            }
        }
    }
    println!(
        "{} forms, {done} cases, {} forms differ",
        codes.len(),
        failed.len()
    );
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
