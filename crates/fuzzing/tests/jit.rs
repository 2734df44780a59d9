//! A small part of the comparison of translation with interpretation, with fixed seeds. `cargo run --release -p fuzzing
//! -- jit --cases 1000000` is the whole.

use fuzzing::jit::{Jits, Summary};

/// Runs the programs of these seeds.
fn run(cache: usize, seeds: core::ops::Range<u64>) -> Summary {
    let mut jits = Jits::new(cache).expect("memory cannot be mapped");
    for seed in seeds {
        if let Err(difference) = jits.run(seed) {
            panic!("{difference}");
        }
    }
    let s = jits.summary();
    assert!(s.endless * 20 < s.compared, "{s:?}");
    // About one program in six completes: the host's features decide which forms there are.
    assert!(s.completed * 7 > s.compared, "{s:?}");
    assert!(s.stats.links > 0 && s.stats.blocks > s.compared, "{s:?}");
    s
}

#[test]
fn translation_does_what_the_interpreter_does() {
    run(64 << 20, 0..4_000);
}

#[test]
fn so_it_does_with_a_cache_that_overflows() {
    let s = run(2 << 20, 1_000_000..1_002_000);
    assert!(s.stats.flushes > 10, "{s:?}");
}

/// The interpreter executes a path for a sample. The last program of these returns by IRET with RF set to the path's first
/// instruction, which stops in its middle for the VMM.
#[test]
fn an_instruction_that_stops_within_a_recorded_path_keeps_rf() {
    let mut jits = Jits::new(64 << 20).expect("memory cannot be mapped");
    for seed in 944_900..=944_977 {
        if let Err(difference) = jits.run(seed) {
            panic!("{difference}");
        }
    }
}

/// Programs run in real mode, virtual-8086 mode, and protected mode of 16 and 32 bits with bases and limits.
#[test]
fn translation_with_segments_does_what_the_interpreter_does() {
    let mut all = fuzzing::jit::segments::Segments::new().expect("memory cannot be mapped");
    // Program 58,184 runs bytes that read the time. In the other, a PUSH overwrites the instruction behind it with SALC,
    // which reads the carry flag.
    for seed in (0..4_000).chain([58_184, 932_014_720]) {
        if let Err(difference) = all.run(seed) {
            panic!("{difference}");
        }
    }
    let s = all.summary();
    assert!(s.endless * 10 < s.compared, "{s:?}");
    assert!(s.completed * 7 > s.compared, "{s:?}");
    assert!(s.stats.blocks > s.compared, "{s:?}");
}
