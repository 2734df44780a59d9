//! Guest code whose segments have bases and limits: of 32 bits, and of 16 bits in real mode.

use iced_x86::code_asm::*;

use super::cases::{Case, USER32, case};
use crate::ir::mode::Mode;

const SEGMENTED: Mode = USER32.with(Mode::SEGMENTED);
const REAL: Mode = Mode::BITS32
    .with(Mode::SEGMENTED)
    .with(Mode::BITS16)
    .with(Mode::STACK16)
    .with(Mode::REAL)
    .with(Mode::KERNEL);

pub(super) const SEGMENTS: &[Case] = &[
    case("a load of 32-bit code", SEGMENTED, |a| {
        a.mov(eax, dword_ptr(ebx + ecx * 4 + 8))?;
        a.jmp(0x40_0200)
    }),
    case("a store of 32-bit code", SEGMENTED, |a| {
        a.mov(word_ptr(esp + 4), ax)?;
        a.jmp(0x40_0200)
    }),
    case("push and pop of 32-bit code", SEGMENTED, |a| {
        a.push(ebx)?;
        a.pop(ebp)?;
        a.jmp(0x40_0200)
    }),
    case("a call of 32-bit code", SEGMENTED, |a| a.call(0x40_0200)),
    case("a call of 32-bit code to another page", SEGMENTED, |a| {
        a.call(0x40_5200)
    }),
    case("a return of 32-bit code", SEGMENTED, |a| a.ret()),
    case("a load in real mode", REAL, |a| {
        a.mov(ax, word_ptr(bx + si + 8))?;
        a.hlt()
    }),
    case(
        "an addition in real mode by an address of 32 bits",
        REAL,
        |a| {
            a.add(dword_ptr(ebx + ecx * 2).es(), eax)?;
            a.hlt()
        },
    ),
    case("push and pop in real mode", REAL, |a| {
        a.push(ax)?;
        a.push(ebx)?;
        a.pop(ecx)?;
        a.pop(dx)?;
        a.hlt()
    }),
    case("segment registers in real mode", REAL, |a| {
        a.mov(ds, ax)?;
        a.push(ds)?;
        a.pop(es)?;
        a.hlt()
    }),
    case("lea in real mode", REAL, |a| {
        a.lea(ax, word_ptr(bp - 2))?;
        a.hlt()
    }),
    case("strings in real mode", REAL, |a| {
        a.lodsb()?;
        a.movsw()?;
        a.scasb()?;
        a.hlt()
    }),
    case("an indirect jump in real mode", REAL, |a| a.jmp(bx)),
    case("a return in real mode", REAL, |a| a.ret_1(4)),
    case("a loop in real mode", REAL, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.add(ax, bx)?;
        a.loop_(again)?;
        a.hlt()
    }),
    case("a loop in real mode until the result is zero", REAL, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.test(ax, bx)?;
        a.loopne(again)?;
        a.hlt()
    }),
];
