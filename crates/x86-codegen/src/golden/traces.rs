//! Guest code with its path through a call, from which traces are made.

use iced_x86::code_asm::*;

use super::cases::{Case, Trace, USER, case};
use crate::ir::mode::Mode;

/// A callee that loads a field and returns.
const LOADS: Trace = Trace {
    callee: |a| {
        a.mov(rax, qword_ptr(rdi + 8))?;
        a.ret()
    },
    path: &[0x100, 0x5200, 0x5204, 0x105, 0x107],
};

/// The same callee, called by an instruction of two bytes.
const LOADS_INDIRECT: Trace = Trace {
    path: &[0x100, 0x5200, 0x5204, 0x102, 0x104],
    ..LOADS
};

/// A callee that overwrites the caller's flags, called by an instruction of five bytes behind one of two.
const OVERWRITES: Trace = Trace {
    callee: |a| {
        a.xor(eax, eax)?;
        a.ret()
    },
    path: &[0x100, 0x102, 0x5200, 0x5202, 0x107, 0x109],
};

pub(super) const TRACES: &[Case] = &[
    case("a call and back", USER, |a| {
        a.call(0x40_5200)?;
        a.inc(eax)?;
        a.ret()
    })
    .along(LOADS),
    case(
        "a call of what overwrites the flags: kept until the pages are compared",
        USER,
        |a| {
            a.mov(esi, edi)?;
            a.call(0x40_5200)?;
            a.inc(eax)?;
            a.ret()
        },
    )
    .along(OVERWRITES),
    case(
        "a call and back, at one address",
        USER.with(Mode::BOUND),
        |a| {
            a.call(0x40_5200)?;
            a.inc(eax)?;
            a.ret()
        },
    )
    .along(LOADS),
    case("a call through a register", USER, |a| {
        a.call(rdx)?;
        a.inc(eax)?;
        a.ret()
    })
    .along(LOADS_INDIRECT),
];
