//! From event numbers to the streams that are counted (SDM vol. 3, 20.2.1.2, and Intel's and AMD's lists of events for
//! their models). Other events count nothing.

use x86_defs::retired::*;

use crate::{CYCLES, Config, Vendor, select};

/// Streams of the fixed counters: instructions, cycles, reference cycles.
pub(crate) const FIXED: [usize; 3] = [INSTRUCTIONS, CYCLES, CYCLES];

/// Bits of EBX of CPUID leaf 0xA.
mod architectural {
    pub(super) const CYCLES: u32 = 1 << 0;
    pub(super) const INSTRUCTIONS: u32 = 1 << 1;
    pub(super) const REFERENCE_CYCLES: u32 = 1 << 2;
    pub(super) const BRANCHES: u32 = 1 << 5;
}

/// Returns what an event select counts: the slots of the tally whose sum it is, a bit each. None if that cannot be
/// counted.
pub(crate) fn slots(config: &Config, value: u64) -> u16 {
    // Such a select counts cycles in which so many events happen, or the first of them.
    if value & (select::CMASK | select::INV | select::EDGE) != 0 {
        return 0;
    }
    let (event, mask) = (value & 0xff, (value >> 8 & 0xff) as u8);
    match config.vendor {
        Vendor::Intel => match (event, mask) {
            (0xd0, _) => mem_inst_retired(mask),
            _ => intel(config, event as u8, mask).map_or(0, bit),
        },
        Vendor::Amd => match (event | value >> 24 & 0xf00) as u16 {
            0x029 => ls_dispatch(mask),
            event => amd(event, mask).map_or(0, bit),
        },
        Vendor::None => 0,
    }
}

/// Returns the streams of MEM_INST_RETIRED's unit mask.
const fn mem_inst_retired(mask: u8) -> u16 {
    match mask {
        0x81 => bit(LOADS) | bit(UPDATES),
        0x82 => bit(STORES) | bit(UPDATES),
        0x83 => bit(MEMORY),
        _ => 0,
    }
}

/// Returns the streams of LS_DISPATCH's unit mask, whose bits are added up: loads, stores, and both at one place.
///
/// DEVIATION: what is counted is instructions that have retired, not operations that have been dispatched.
fn ls_dispatch(mask: u8) -> u16 {
    [LOADS, STORES, UPDATES]
        .iter()
        .enumerate()
        .filter(|(n, _)| mask >> n & 1 != 0)
        .fold(0, |all, (_, stream)| all | bit(*stream))
}

fn intel(config: &Config, event: u8, mask: u8) -> Option<usize> {
    let there = |bit: u32, slot: usize| (config.unavailable & bit == 0).then_some(slot);
    match (event, mask) {
        (0x3c, 0) => there(architectural::CYCLES, CYCLES),
        (0x3c, 1) => there(architectural::REFERENCE_CYCLES, CYCLES),
        (0xc0, 0) => there(architectural::INSTRUCTIONS, INSTRUCTIONS),
        (0xc4, 0) => there(architectural::BRANCHES, BRANCHES),
        (0xc4, _) if has_new_branches(config) => new_branches(mask),
        (0xc4, _) => old_branches(mask),
        _ => None,
    }
}

/// Returns the stream of BR_INST_RETIRED's unit mask, up to Comet Lake.
const fn old_branches(mask: u8) -> Option<usize> {
    Some(match mask {
        0x01 => CONDITIONAL,
        0x02 => NEAR_CALLS,
        0x04 => BRANCHES,
        0x08 => NEAR_RETURNS,
        0x10 => CONDITIONAL_NOT_TAKEN,
        0x20 => NEAR_TAKEN,
        0x40 => FAR,
        _ => return None,
    })
}

/// Returns the stream of BR_INST_RETIRED's unit mask, from Ice Lake on.
const fn new_branches(mask: u8) -> Option<usize> {
    Some(match mask {
        0x01 => CONDITIONAL_TAKEN,
        0x02 => NEAR_CALLS,
        0x08 => NEAR_RETURNS,
        0x10 => CONDITIONAL_NOT_TAKEN,
        0x11 => CONDITIONAL,
        0x20 => NEAR_TAKEN,
        0x40 => FAR,
        0x80 => NEAR_INDIRECT,
        _ => return None,
    })
}

/// Returns true if the model has the new unit masks: all models with this PMU do, except those of Skylake's line.
fn has_new_branches(config: &Config) -> bool {
    const OLD: &[u32] = &[
        0x3c, 0x3d, 0x3f, 0x45, 0x46, 0x47, 0x4e, 0x4f, 0x55, 0x56, 0x5e, 0x66, 0x8e, 0x9e, 0xa5,
        0xa6,
    ];
    let (family, model) = config.family_model();
    family == 6 && model >= 0x6a && !OLD.contains(&model)
}

fn amd(event: u16, mask: u8) -> Option<usize> {
    Some(match event {
        0x076 => CYCLES,
        // Cycles at the frequency of P-state 0.
        0x120 if mask & 1 != 0 => CYCLES,
        0x0c0 => INSTRUCTIONS,
        0x0c2 => BRANCHES,
        0x0c4 => TAKEN,
        0x0c6 => FAR,
        0x0c8 => NEAR_RETURNS,
        0x0cc => NEAR_INDIRECT,
        0x0d1 => CONDITIONAL,
        _ => return None,
    })
}
