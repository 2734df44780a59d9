//! `fuzzing insn` and `fuzzing random`: instructions on the interpreter and on the host CPU.

use std::{collections::BTreeSet, time::Instant};

use fuzzing::{Case, Differential, Family, Generator, Mode, Strictness, forms};
use iced_x86::Code;

use crate::cli::Instructions;

/// Returns the forms that the command line chooses.
fn chosen(options: &Instructions, mode: Mode) -> Result<Vec<Code>, String> {
    let families = match options.family {
        Some(family) => vec![family.into()],
        None => Family::ALL.iter().map(|f| f.1).collect(),
    };
    let mut codes: Vec<_> = families.into_iter().flat_map(|f| forms(f, mode)).collect();
    if let Some(name) = &options.form {
        codes.retain(|c| format!("{c:?}") == *name);
        if codes.is_empty() {
            return Err(format!(
                "{name}: no form of that family and mode that this host has"
            ));
        }
    }
    Ok(codes)
}

/// Returns case number `n`. `None` if the form cannot be made one.
fn case(
    generator: &mut Generator,
    (codes, integer): (&[Code], &[Code]),
    (seed, n): (u64, u64),
    blocks: bool,
) -> Option<Case> {
    let nr_codes = codes.len() as u64;
    if blocks {
        // Three of four blocks have only integer instructions.
        let forms = if n % 4 == 0 { codes } else { integer };
        return generator.block(forms, seed << 40 ^ n);
    }
    let code = codes[(n % nr_codes) as usize];
    generator.single(code, (code as u64) << 48 ^ seed << 32 ^ (n / nr_codes))
}

/// Runs single instructions, or blocks of them.
#[allow(clippy::print_stdout, reason = "a command-line tool's report")]
pub(crate) fn run(options: &Instructions, blocks: bool) -> Result<(String, bool), String> {
    let strictness = if options.exact {
        Strictness::Exact
    } else {
        Strictness::Manual
    };
    let mode = options.bits.into();
    let codes = chosen(options, mode)?;
    let integer = forms(Family::Integer, mode);
    let mut both = Differential::new().map_err(|e| format!("the oracle cannot be set up: {e}"))?;
    let mut generator = Generator::new(mode, strictness);
    let mut failed = BTreeSet::new();
    let (mut done, mut differ) = (0u64, 0u64);
    let start = Instant::now();
    for n in 0u64.. {
        if done == options.cases || n == options.cases.saturating_mul(2) {
            break;
        }
        let Some(case) = case(
            &mut generator,
            (&codes, &integer),
            (options.seed, n),
            blocks,
        ) else {
            continue;
        };
        done += 1;
        if let Err(difference) = both.run(&case) {
            let code = codes[(n % codes.len() as u64) as usize];
            differ += 1;
            if blocks && failed.len() < 20 || failed.insert(code as u32) {
                failed.insert(code as u32);
                println!("{difference}");
            }
            if !options.all {
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
