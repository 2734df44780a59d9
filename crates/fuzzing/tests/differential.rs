//! A bounded, seeded slice of the differential runner (`cargo run --release -p
//! fuzzing -- insn --cases 10000000` is the whole).

use fuzzing::{
    differential::{Runner, case},
    forms::{Family, forms},
};

#[test]
fn fp_and_simd_match_the_host() {
    let codes = forms(Family::Fp);
    assert!(codes.len() > 800, "{} forms", codes.len());
    let mut runner = Runner::new().unwrap();
    let mut differences = Vec::new();
    for round in 0..20u64 {
        for &code in &codes {
            let Some(c) = case(code, (code as u64) << 40 ^ round) else {
                continue;
            };
            if let Err(d) = runner.run(&c) {
                differences.push(d);
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differences, the first:\n{}",
        differences.len(),
        differences[0]
    );
}
