//! Lock-step on random programs: correct code passes, and a wrong rule is found and shown.

use fuzzing::jit::Jits;

#[test]
fn right_code_agrees_stretch_by_stretch() {
    let mut jits = Jits::in_lockstep(false).expect("memory cannot be mapped");
    for seed in 0..1_000 {
        if let Err(difference) = jits.run(seed) {
            panic!("{difference}");
        }
    }
    assert!(jits.stretches() > 2_000, "{}", jits.stretches());
}

#[test]
fn a_wrong_rule_is_found_and_shown() {
    let mut jits = Jits::in_lockstep(true).expect("memory cannot be mapped");
    let found = (0..40_000).find_map(|seed| jits.run(seed).err());
    let report = found.expect("SAR is translated as SHR, and nothing was found");
    // The report shows the guest's instruction, and the code made of it.
    let (guest, host) = report
        .split_once("translated code at")
        .unwrap_or_else(|| panic!("no translated code: {report}"));
    let guest = guest.rsplit("guest code from").next().unwrap_or_default();
    assert!(guest.contains("sar "), "{report}");
    assert!(host.contains("shr "), "{report}");
    assert!(report.contains("the interpreter:"), "{report}");
}

#[test]
fn segments_and_16_bit_code() {
    let mut all = fuzzing::jit::segments::Segments::in_lockstep().expect("memory");
    for seed in 0..600 {
        if let Err(difference) = all.run(seed) {
            panic!("{difference}");
        }
    }
    assert!(all.stretches() > 600, "{}", all.stretches());
}
