//! A bounded, seeded slice of the differential runner (`cargo run --release -p
//! fuzzing -- random --cases 10000000` is the whole).

use fuzzing::{Differential, Family, Generator, Strictness, forms};
use iced_x86::Code;

/// Reports how many differ, and the first few.
fn assert_same(what: &str, differences: &[String]) {
    let first = differences.iter().take(3).cloned().collect::<String>();
    assert!(
        differences.is_empty(),
        "{what}: {} differences, the first:\n{first}",
        differences.len()
    );
}

fn singles(codes: &[Code], rounds: u64) {
    let mut both = Differential::new().expect("the oracle cannot be set up");
    let mut generator = Generator::new(Strictness::Manual);
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

#[test]
fn integer_instructions_match_the_host() {
    let codes = forms(Family::Integer);
    assert!(codes.len() > 600, "{} forms", codes.len());
    singles(&codes, 1000);
}

#[test]
fn fp_and_simd_match_the_host() {
    let codes = forms(Family::Fp);
    assert!(codes.len() > 800, "{} forms", codes.len());
    singles(&codes, 200);
}

#[test]
fn blocks_match_the_host() {
    let integer = forms(Family::Integer);
    let mut all = integer.clone();
    all.extend(forms(Family::Fp));
    let mut both = Differential::new().unwrap();
    let mut generator = Generator::new(Strictness::Manual);
    let mut differences = Vec::new();
    let mut done = 0;
    for n in 0..1_000_000u64 {
        let codes = if n % 4 == 0 { &all } else { &integer };
        if let Some(case) = generator.block(codes, n) {
            done += 1;
            if let Err(d) = both.run(&case) {
                differences.push(d);
            }
        }
    }
    assert!(done > 900_000, "{done} cases");
    assert_same("blocks", &differences);
}
