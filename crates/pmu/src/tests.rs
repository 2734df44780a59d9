//! Registers, events and filters of both vendors.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;
use x86_defs::{msr::*, retired::*};

const SIGNATURE: u32 = 0x000a_0655;

fn intel() -> Pmu {
    let mut pmu = Pmu::default();
    let leaf = [7 << 24 | 48 << 16 | 8 << 8 | 2, 0b101_1000, 48 << 5 | 3];
    pmu.set_config(Config {
        full_width: true,
        ..Config::intel(leaf, SIGNATURE)
    });
    pmu
}

fn amd() -> Pmu {
    let mut pmu = Pmu::default();
    pmu.set_config(Config::amd(true, [1, 6], 0x00a2_0f12));
    pmu
}

/// Returns the tally after so many instructions at CPL 0 and 3.
fn at(os: u64, usr: u64) -> Tally {
    let mut tally = Tally::default();
    tally.0[0][INSTRUCTIONS] = os;
    tally.0[1][INSTRUCTIONS] = usr;
    tally
}

fn set(pmu: &mut Pmu, index: u32, value: u64, now: &Tally) {
    assert_eq!(
        pmu.write(index, value, false, now),
        Some(Ok(())),
        "{index:#x}"
    );
}

fn get(pmu: &mut Pmu, index: u32, now: &Tally) -> u64 {
    pmu.read(index, false, now).unwrap().unwrap()
}

const INSTRUCTIONS_USR_OS: u64 = 0x43_00c0;

#[test]
fn a_counter_is_a_difference_of_two_tallies() {
    let mut pmu = intel();
    set(&mut pmu, IA32_PERFEVTSEL0, INSTRUCTIONS_USR_OS, &at(10, 5));
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(12, 9)), 6);
    // Only instructions at CPL 3 count.
    set(&mut pmu, IA32_PERFEVTSEL0, 0x41_00c0, &at(20, 9));
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(100, 10)), 15);
    set(&mut pmu, IA32_PERF_GLOBAL_CTRL, 0, &at(100, 11));
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(200, 100)), 16);
    assert_eq!(pmu.wants(&at(0, 0)), Wants::default());
}

#[test]
fn an_overflow_sets_its_bit_and_interrupts_if_that_is_asked_for() {
    let mut pmu = intel();
    set(&mut pmu, IA32_PMC0, -5_i64 as u64, &at(0, 0));
    set(
        &mut pmu,
        IA32_PERFEVTSEL0,
        INSTRUCTIONS_USR_OS | 1 << 20,
        &at(0, 0),
    );
    set(&mut pmu, IA32_FIXED_CTR0, MASK, &at(0, 0));
    set(&mut pmu, IA32_FIXED_CTR_CTRL, 3, &at(0, 0));
    set(&mut pmu, IA32_PERF_GLOBAL_CTRL, 1 << 32 | 1, &at(0, 0));
    let wants = pmu.wants(&at(0, 0));
    assert_eq!(
        (wants.levels, wants.events_left),
        (3, only(INSTRUCTIONS, 5))
    );
    pmu.settle(&at(4, 0));
    assert!(!pmu.take_interrupt());
    assert_eq!(get(&mut pmu, IA32_PERF_GLOBAL_STATUS, &at(4, 0)), 1 << 32);
    pmu.settle(&at(4, 1));
    assert!(pmu.take_interrupt() && !pmu.take_interrupt());
    assert_eq!(
        get(&mut pmu, IA32_PERF_GLOBAL_STATUS, &at(4, 1)),
        1 << 32 | 1
    );
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(5, 1)), 1);
    set(&mut pmu, IA32_PERF_GLOBAL_OVF_CTRL, 1, &at(5, 1));
    assert_eq!(get(&mut pmu, IA32_PERF_GLOBAL_STATUS, &at(5, 1)), 1 << 32);
}

#[test]
fn intel_refuses_reserved_bits() {
    let mut pmu = intel();
    let now = at(0, 0);
    for (index, value) in [
        (IA32_PERFEVTSEL0, 1 << 21),
        (IA32_PERFEVTSEL0 + 7, 1 << 32),
        (IA32_FIXED_CTR_CTRL, 4),
        (IA32_FIXED_CTR_CTRL, 1 << 12),
        (IA32_PERF_GLOBAL_CTRL, 1 << 8),
        (IA32_PERF_GLOBAL_OVF_CTRL, 1 << 35),
        (IA32_PERF_GLOBAL_STATUS, 1),
        (IA32_A_PMC0, 1 << 48),
    ] {
        assert_eq!(
            pmu.write(index, value, false, &now),
            Some(Err(Refused)),
            "{index:#x}"
        );
    }
    // The legacy number takes 32 bits and their sign, unless the VMM writes.
    set(&mut pmu, IA32_PMC0, 0x8000_0000, &now);
    assert_eq!(get(&mut pmu, IA32_PMC0, &now), 0xffff_8000_0000);
    assert_eq!(
        pmu.write(IA32_PMC0, 0x1_8000_0000, true, &now),
        Some(Ok(()))
    );
    assert_eq!(get(&mut pmu, IA32_A_PMC0, &now), 0x1_8000_0000);
    assert_eq!(pmu.read(IA32_PMC0 + 8, false, &now), None);
    assert_eq!(pmu.rdpmc(8, &now), Err(Refused));
    assert_eq!(pmu.rdpmc(1 << 30 | 3, &now), Err(Refused));
}

#[test]
fn amd_has_two_numbers_for_the_first_counters_and_drops_reserved_bits() {
    let mut pmu = amd();
    let now = at(0, 0);
    set(
        &mut pmu,
        K7_EVNTSEL0 + 1,
        INSTRUCTIONS_USR_OS | 1 << 19 | 1 << 40,
        &now,
    );
    let select = get(&mut pmu, AMD64_PERFEVTSEL0_CORE + 2, &now);
    assert_eq!(select, INSTRUCTIONS_USR_OS);
    assert_eq!(get(&mut pmu, AMD64_PERFEVTSEL0_CORE + 3, &at(7, 0)), 7);
    assert_eq!(get(&mut pmu, K7_PERFCTR0 + 1, &at(8, 0)), 8);
    set(&mut pmu, AMD64_PERF_CNTR_GLOBAL_CTL, !2, &at(9, 0));
    assert_eq!(get(&mut pmu, AMD64_PERF_CNTR_GLOBAL_CTL, &now), 0b11_1101);
    assert_eq!(pmu.rdpmc(1, &at(90, 0)), Ok(9));
    assert_eq!(pmu.read(IA32_PERFEVTSEL0, false, &now), None);
}

#[test]
fn amd_keeps_its_status_to_itself() {
    let mut pmu = amd();
    set(&mut pmu, AMD64_PERFEVTSEL0_CORE + 11, MASK, &at(0, 0));
    set(
        &mut pmu,
        AMD64_PERFEVTSEL0_CORE + 10,
        INSTRUCTIONS_USR_OS,
        &at(0, 0),
    );
    let status = AMD64_PERF_CNTR_GLOBAL_STATUS;
    assert_eq!(get(&mut pmu, status, &at(1, 0)), 1 << 5);
    set(&mut pmu, status, 0, &at(1, 0));
    assert_eq!(get(&mut pmu, status, &at(1, 0)), 1 << 5);
    set(&mut pmu, AMD64_PERF_CNTR_GLOBAL_STATUS_SET, 1, &at(1, 0));
    set(
        &mut pmu,
        AMD64_PERF_CNTR_GLOBAL_STATUS_CLR,
        1 << 5,
        &at(1, 0),
    );
    assert_eq!(get(&mut pmu, status, &at(1, 0)), 1);
}

#[test]
fn events_go_by_the_model() {
    let slots = |config: &Config, select| events::slots(config, select);
    let comet_lake = Config::intel([7 << 24 | 8 << 8 | 2, 0, 0], SIGNATURE);
    let ice_lake = Config {
        signature: 0x0006_06a6,
        ..comet_lake
    };
    assert_eq!(slots(&comet_lake, 0x1c4), bit(CONDITIONAL));
    assert_eq!(slots(&ice_lake, 0x1c4), bit(CONDITIONAL_TAKEN));
    assert_eq!(slots(&ice_lake, 0x11c4), bit(CONDITIONAL));
    assert_eq!(slots(&comet_lake, 0x11c4), 0);
    assert_eq!(slots(&comet_lake, 0x3c), bit(CYCLES));
    assert_eq!(slots(&comet_lake, 0x100_00c0), 0);
    assert_eq!(slots(&comet_lake, 0xff_c0), 0);
    let none = Config {
        unavailable: 1 << 1,
        ..comet_lake
    };
    assert_eq!(slots(&none, 0xc0), 0);
    let zen = Config::amd(true, [0; 2], 0);
    assert_eq!(slots(&zen, 0xd1), bit(CONDITIONAL));
    assert_eq!(slots(&zen, 0x76), bit(CYCLES));
    // Event 0x120 has its upper four bits in another place of the select.
    assert_eq!(slots(&zen, 0x1_0000_0020), 0);
    assert_eq!(slots(&zen, 0x1_0000_0120), bit(CYCLES));
}

#[test]
fn a_filter_allows_or_denies_what_it_lists() {
    let now = at(0, 0);
    let counts = |allows, masked, events: &[u64], select: u64| {
        let filter = Filter::new(allows, 0, masked, events).unwrap();
        let mut pmu = intel();
        pmu.set_filter(Some(Arc::new(filter)), &now);
        set(&mut pmu, IA32_PERFEVTSEL0, select, &now);
        let mut later = at(1, 0);
        later.0[0][BRANCHES] = 1;
        later.0[0][NEAR_CALLS] = 1;
        get(&mut pmu, IA32_PMC0, &later) == 1
    };
    let (branches, calls) = (0x43_00c4, 0x43_02c4);
    assert!(counts(true, false, &[0xc4], branches));
    assert!(!counts(true, false, &[0xc4], calls));
    assert!(!counts(false, false, &[0xc4], branches));
    assert!(counts(false, false, &[0xc4], calls));
    // The entry allows every unit mask of the event, except that of calls.
    let masked = [0xc4, 0xc4 | 2 << 8 | 1 << 55 | 0xff << 56];
    assert!(counts(true, true, &masked, branches));
    assert!(!counts(true, true, &masked, calls));
    assert!(!counts(false, true, &masked, branches));
    assert_eq!(Filter::new(true, 0, true, &[1 << 20]), Err(InvalidFilter));
    // In a list without masks this entry matches no event.
    assert!(!counts(true, false, &[0xc4 | 1 << 20], branches));
}

#[test]
fn counters_stand_still_in_smm_if_they_are_told_to() {
    let mut pmu = intel();
    set(&mut pmu, IA32_PERFEVTSEL0, INSTRUCTIONS_USR_OS, &at(0, 0));
    pmu.set_in_smm(true, &at(10, 0));
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(20, 0)), 20);
    pmu.set_freezes_in_smm(true, &at(20, 0));
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(30, 0)), 20);
    pmu.set_in_smm(false, &at(30, 0));
    assert_eq!(get(&mut pmu, IA32_PMC0, &at(31, 0)), 21);
}

/// Returns bounds of which there is only one.
fn only(stream: usize, left: u64) -> [u64; STREAMS] {
    let mut bounds = [u64::MAX; STREAMS];
    bounds[stream] = left;
    bounds
}

#[test]
fn a_counter_bounds_its_own_stream() {
    let mut pmu = intel();
    let now = at(1_000, 0);
    // Returns, and conditional branches twice.
    for (n, event, left) in [(0, 0x8c4, 5), (1, 0x1c4, 900), (2, 0x1c4, 70)] {
        set(&mut pmu, IA32_PMC0 + n, 0_u64.wrapping_sub(left), &now);
        set(&mut pmu, IA32_PERFEVTSEL0 + n, event | 0x53_0000, &now);
    }
    set(&mut pmu, IA32_PERF_GLOBAL_CTRL, 7, &now);
    let mut bounds = only(NEAR_RETURNS, 5);
    bounds[CONDITIONAL] = 70;
    assert_eq!(pmu.wants(&now).events_left, bounds);
}

#[test]
fn what_loads_and_stores_may_come_twice_an_instruction() {
    let mut pmu = amd();
    let select = 0x53_0029;
    for (mask, left, stream, events_left) in [
        (1, 9, LOADS, 9),
        (4, 9, UPDATES, 9),
        (3, 9, INSTRUCTIONS, 5),
        (7, 9, INSTRUCTIONS, 5),
        (3, 1, INSTRUCTIONS, 1),
    ] {
        let now = at(0, 0);
        set(&mut pmu, AMD64_PERFEVTSEL0_CORE, 0, &now);
        set(&mut pmu, AMD64_PERFEVTSEL0_CORE + 1, MASK + 1 - left, &now);
        set(&mut pmu, AMD64_PERFEVTSEL0_CORE, select | mask << 8, &now);
        let wants = pmu.wants(&now);
        let events_left = only(stream, events_left);
        assert_eq!(wants.events_left, events_left);
    }
    // None of its unit masks.
    set(&mut pmu, AMD64_PERFEVTSEL0_CORE, select | 8 << 8, &at(0, 0));
    assert_eq!(pmu.wants(&at(0, 0)), Wants::default());
}
