//! Compares the interpreter with recorded results of a real processor, on any host.
//!
//! `UPDATE_EXPECT=1 cargo test -p fuzzing --test golden` records again, which takes a Zen 3 processor.

use std::{fs, path::PathBuf};

use fuzzing::{
    Family, Generator, Guest, Host, Mode, Strictness, forms,
    golden::{self, Model, Recording},
};
use iced_x86::Code;
use x86_native::{host_has, is_fp};

const BLOCKS: u64 = 400;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("golden/{name}.txt"))
}

/// Records, for each form, some cases that complete and one that faults.
fn record(name: &str, mode: Mode, family: Family, completing: u32) {
    let codes = forms(family, mode);
    let mut host = Host::new().expect("the oracle cannot be set up");
    let mut generator = Generator::new(mode, Strictness::Exact);
    let mut text = golden::head();
    for code in codes {
        let (mut completed, mut faulted) = (0, 0);
        for seed in 0..200 {
            let Some(case) = generator.single(code, seed) else {
                continue;
            };
            let outcome = host.run(&case);
            let (seen, wanted) = match outcome.trap {
                None => (&mut completed, completing),
                Some(_) => (&mut faulted, 1),
            };
            if *seen < wanted {
                *seen += 1;
                let line = golden::line(&case, Some(code), &outcome, host.window());
                text += &line;
                text.push('\n');
            }
        }
        assert!(completed + faulted > 0, "no case of {code:?}");
    }
    fs::write(path(name), text).expect("write");
}

fn record_blocks(codes: &[Code]) {
    let mut host = Host::new().expect("the oracle cannot be set up");
    let mut generator = Generator::new(Mode::Bits64, Strictness::Exact);
    let mut text = golden::head();
    for seed in 0..BLOCKS {
        if let Some(case) = generator.block(codes, seed) {
            let outcome = host.run(&case);
            let line = golden::line(&case, None, &outcome, host.window());
            text += &line;
            text.push('\n');
        }
    }
    fs::write(path("blocks"), text).expect("write");
}

fn is_recording() -> bool {
    let asked = std::env::var_os("UPDATE_EXPECT").is_some();
    assert!(
        !asked || golden::model() == Some(Model::Zen3),
        "this host is no Zen 3"
    );
    asked
}

/// Runs a recording's cases. Returns the number of forms that were left out because this host cannot execute them (the
/// interpreter has the host compute).
fn check(text: &str, mode: Mode, codes: &[Code]) -> usize {
    let recording = Recording::parse(text).expect("a recording");
    let mut guest = Guest::with(recording.features);
    let mut wrong = Vec::new();
    let mut skipped = 0;
    for (code, case, line) in recording.cases(mode, codes) {
        let here = code.is_none_or(|c| {
            let fp = c.cpuid_features().iter().any(|&f| is_fp(f));
            !fp || c.cpuid_features().iter().all(|&f| host_has(f))
                && (golden::is_modelled() || !golden::is_vendors(c))
        });
        if !here {
            skipped += 1;
            continue;
        }
        let outcome = guest.run(&case);
        let ours = golden::line(&case, code, &outcome, guest.window());
        if ours != line {
            wrong.push(format!(
                "{}host:        {line}\ninterpreter: {ours}\n",
                case.listing()
            ));
        }
    }
    let first: String = wrong.iter().take(5).cloned().collect();
    assert!(
        wrong.is_empty(),
        "{} cases differ, the first:\n{first}",
        wrong.len()
    );
    skipped
}

#[test]
fn integer_forms_are_as_recorded() {
    if is_recording() {
        record("integer", Mode::Bits64, Family::Integer, 3);
    }
    let text = fs::read_to_string(path("integer")).unwrap();
    assert!(text.lines().count() > 2000);
    assert_eq!(check(&text, Mode::Bits64, &[]), 0);
}

#[test]
fn integer_forms_of_32_bit_code_are_as_recorded() {
    if is_recording() {
        record("integer32", Mode::Bits32, Family::Integer, 1);
    }
    let text = fs::read_to_string(path("integer32")).unwrap();
    assert!(text.lines().count() > 700);
    assert_eq!(check(&text, Mode::Bits32, &[]), 0);
}

#[test]
fn fp_forms_are_as_recorded() {
    if is_recording() {
        record("fp", Mode::Bits64, Family::Fp, 1);
    }
    let text = fs::read_to_string(path("fp")).unwrap();
    let skipped = check(&text, Mode::Bits64, &[]);
    assert!(text.lines().count() > 1200 + skipped / 2);
}

#[test]
fn fp_forms_of_32_bit_code_are_as_recorded() {
    if is_recording() {
        record("fp32", Mode::Bits32, Family::Fp, 1);
    }
    let text = fs::read_to_string(path("fp32")).unwrap();
    let skipped = check(&text, Mode::Bits32, &[]);
    assert!(text.lines().count() > 1200 + skipped / 2);
}

/// The blocks have only integer instructions, which every host has.
#[test]
fn blocks_are_as_recorded() {
    if is_recording() {
        record_blocks(&forms(Family::Integer, Mode::Bits64));
    }
    let integer = fs::read_to_string(path("integer")).unwrap();
    let codes = Recording::parse(&integer).unwrap().forms();
    let text = fs::read_to_string(path("blocks")).unwrap();
    assert!(text.lines().count() > BLOCKS as usize / 2);
    assert_eq!(check(&text, Mode::Bits64, &codes), 0);
}
