//! Breakpoints for programs: on some of their instructions and on data that they may access.

use iced_x86::{Decoder, DecoderOptions};
use x86_cpu::VmmDebug;
use x86_defs::dr;

use super::{
    machine::{DATA, DATA_PAGES, PRIVATE, STACK_TOP},
    program::Program,
};
use crate::random::Random;

/// Returns a debugger's breakpoints for the start `n` of a program: none for most programs, mostly the same for all starts
/// of a program.
pub(super) fn breakpoints(program: &Program, n: usize) -> VmmDebug {
    let mut of_program = Random::new(program.seed ^ 0xdb);
    let mut of_start = Random::new(program.seed ^ 0xdb ^ (n as u64) << 32);
    if !of_program.one_in(4) || of_start.one_in(4) {
        return VmmDebug::default();
    }
    let mut random = match of_program.one_in(3) {
        true => of_start,
        false => of_program,
    };
    let mut debug = VmmDebug {
        active: true,
        dr7: dr::DR7_FIXED1,
        dr: [0; 4],
    };
    let places = instructions(program);
    for n in 0..1 + random.below(4) as usize {
        let kind = random.pick(&[0, 0, 0, 1, 3, 3]);
        debug.dr[n] = match kind {
            0 if places.is_empty() => continue,
            0 => random.pick(&places),
            _ => program.base() + data(&mut random),
        };
        let len = if kind == 0 { 0 } else { random.below(4) };
        debug.dr7 |= 1 << (2 * n) | kind << (16 + 4 * n) | len << (18 + 4 * n);
    }
    debug
}

/// Returns the gpa of data, often at the border of a page, or of the stack.
fn data(random: &mut Random) -> u64 {
    match random.below(8) {
        0..3 => DATA + (random.below(DATA_PAGES) << 12) + random.below(0x1000),
        3 => DATA + (random.below(DATA_PAGES) << 12) + random.pick(&[0, 0xff8, 0xfff]),
        4 => PRIVATE + random.below(0x100),
        _ => STACK_TOP - 8 - random.below(0x100),
    }
}

/// Returns the linear addresses of the program's instructions.
fn instructions(program: &Program) -> Vec<u64> {
    let mut places = Vec::new();
    for (gpa, bytes) in program.assemble().iter().flatten() {
        let start = program.base() + gpa;
        let mut decoder = Decoder::with_ip(program.bits(), bytes, start, DecoderOptions::NONE);
        places.extend(decoder.iter().map(|i| i.ip()));
    }
    places
}
