//! A small part of the differential runner with fixed seeds. `cargo run --release -p fuzzing -- random --cases
//! 10000000` is the whole.

use fuzzing::{Differential, Family, Generator, Mode, Strictness, forms};
use iced_x86::Code;

/// Fails with the number of differences, and the first few.
fn assert_same(what: &str, differences: &[String]) {
    let first = differences.iter().take(3).cloned().collect::<String>();
    assert!(
        differences.is_empty(),
        "{what}: {} differences, the first:\n{first}",
        differences.len()
    );
}

fn singles(mode: Mode, codes: &[Code], rounds: u64) {
    let mut both = Differential::new().expect("the oracle cannot be set up");
    let mut generator = Generator::new(mode, Strictness::Manual);
    let mut differences = Vec::new();
    for round in 0..rounds {
        for &code in codes {
            let seed = (code as u64) << 48 ^ round;
            if let Some(case) = generator.single(code, seed)
                && let Err(d) = both.run(&case)
            {
                differences.push(d);
            }
        }
    }
    assert_same("single instructions", &differences);
}

fn blocks(mode: Mode, cases: u64) {
    let integer = forms(Family::Integer, mode);
    let mut all = integer.clone();
    all.extend(forms(Family::Fp, mode));
    let mut both = Differential::new().expect("the oracle cannot be set up");
    let mut generator = Generator::new(mode, Strictness::Manual);
    let mut differences = Vec::new();
    let mut done = 0;
    for n in 0..cases {
        let codes = if n % 4 == 0 { &all } else { &integer };
        if let Some(case) = generator.block(codes, n) {
            done += 1;
            if let Err(d) = both.run(&case) {
                differences.push(d);
            }
        }
    }
    assert!(done > cases / 10 * 9, "{done} cases");
    assert_same("blocks", &differences);
}

#[test]
fn integer_instructions_match_the_host() {
    let codes = forms(Family::Integer, Mode::Bits64);
    assert!(codes.len() > 600, "{} forms", codes.len());
    singles(Mode::Bits64, &codes, 1000);
    let codes = forms(Family::Integer, Mode::Bits32);
    assert!(codes.len() > 500, "{} forms", codes.len());
    singles(Mode::Bits32, &codes, 500);
}

#[test]
fn fp_and_simd_match_the_host() {
    let codes = forms(Family::Fp, Mode::Bits64);
    assert!(codes.len() > 800, "{} forms", codes.len());
    singles(Mode::Bits64, &codes, 200);
    let codes = forms(Family::Fp, Mode::Bits32);
    assert!(codes.len() > 800, "{} forms", codes.len());
    singles(Mode::Bits32, &codes, 50);
}

#[test]
fn blocks_match_the_host() {
    blocks(Mode::Bits64, 1_000_000);
    blocks(Mode::Bits32, 200_000);
}
