//! Code that is executed without end, in each of the ways that lead back: whoever asks for the vCPU gets it.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;

use std::{thread, time::Duration};

use iced_x86::code_asm::*;
use long_mode::{Assemble, Machine};

const CODE: u64 = 0x1000;
/// Long enough for what is executed much to be translated again.
const A_WHILE: Duration = Duration::from_millis(40);

/// Branches that are not taken: more than a block has, so that others begin behind them.
fn branches(a: &mut CodeAssembler, to: CodeLabel) -> Result<(), IcedError> {
    for _ in 0..12 {
        a.cmp(eax, 1)?;
        a.je(to)?;
    }
    Ok(())
}

fn is_interrupted(code: Assemble) {
    let m = Machine::new();
    m.load(CODE, code);
    let mut vcpu = m.vcpu(0, CODE);
    let stopper = vcpu.stopper().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                thread::sleep(A_WHILE);
                stopper.stop();
            }
        });
        let result = vcpu.run().map(|exit| format!("{exit:?}"));
        assert_eq!(result.unwrap_err().errno(), libc::EINTR);
    });
}

macro_rules! loops {
    ($($name:ident: $code:expr;)*) => {
        $(#[test] fn $name() { is_interrupted($code) })*
    };
}

loops! {
    to_itself: |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.jmp(here)
    };
    by_a_condition_behind_branches: |a| {
        let (mut turn, mut out) = (a.create_label(), a.create_label());
        a.jmp(turn)?;
        a.set_label(&mut turn)?;
        branches(a, out)?;
        a.test(eax, eax)?;
        a.je(turn)?;
        a.set_label(&mut out)?;
        a.hlt()
    };
    into_the_middle_of_a_block: |a| {
        let (mut turn, mut out) = (a.create_label(), a.create_label());
        a.nop()?;
        branches(a, out)?;
        a.inc(rbx)?;
        a.set_label(&mut turn)?;
        a.inc(rcx)?;
        branches(a, out)?;
        a.jmp(turn)?;
        a.set_label(&mut out)?;
        a.hlt()
    };
    by_a_jump_that_is_followed: |a| {
        let (mut first, mut second) = (a.create_label(), a.create_label());
        let mut out = a.create_label();
        a.jmp(second)?;
        a.set_label(&mut first)?;
        a.inc(rbx)?;
        branches(a, out)?;
        a.set_label(&mut second)?;
        a.inc(rcx)?;
        a.jmp(first)?;
        a.set_label(&mut out)?;
        a.hlt()
    };
    with_flags_over_the_branch: |a| {
        let (mut turn, mut out) = (a.create_label(), a.create_label());
        a.set_label(&mut turn)?;
        a.adc(rbx, rcx)?;
        branches(a, out)?;
        a.add(rcx, 3)?;
        a.jmp(turn)?;
        a.set_label(&mut out)?;
        a.hlt()
    };
    by_another_page_out_of_a_walk: |a| {
        let (mut start, mut turn, mut out) = (a.create_label(), a.create_label(), a.create_label());
        a.set_label(&mut start)?;
        a.mov(edi, CODE as u32)?;
        a.mov(ecx, 200)?;
        a.set_label(&mut turn)?;
        a.add(rbx, qword_ptr(rdi))?;
        a.add(rbx, qword_ptr(rdi + 8))?;
        a.add(rdi, 8)?;
        a.dec(ecx)?;
        a.je(out)?;
        a.jmp(turn)?;
        a.nops_with_size(0x1000)?;
        a.set_label(&mut out)?;
        a.jmp(start)
    };
    by_calls_that_return: |a| {
        let (mut turn, mut f) = (a.create_label(), a.create_label());
        a.set_label(&mut turn)?;
        a.call(f)?;
        a.call(f)?;
        a.jmp(turn)?;
        a.set_label(&mut f)?;
        a.inc(rbx)?;
        a.ret()
    };
    by_calls_that_do_not_return: |a| {
        let (mut turn, mut f) = (a.create_label(), a.create_label());
        let mut out = a.create_label();
        a.set_label(&mut turn)?;
        branches(a, out)?;
        a.call(f)?;
        a.set_label(&mut out)?;
        a.hlt()?;
        a.set_label(&mut f)?;
        a.add(rsp, 8)?;
        a.jmp(turn)
    };
    by_calls_of_calls: |a| {
        let mut f = a.create_label();
        a.set_label(&mut f)?;
        a.mov(rsp, 0x4000_u64)?;
        a.call(f)
    };
    by_a_return: |a| {
        let mut turn = a.create_label();
        a.set_label(&mut turn)?;
        a.lea(rax, ptr(turn))?;
        a.push(rax)?;
        a.ret()
    };
    by_an_address: |a| {
        let mut turn = a.create_label();
        a.lea(rax, ptr(turn))?;
        a.set_label(&mut turn)?;
        a.inc(rbx)?;
        a.jmp(rax)
    };
    through_pages: |a| {
        let (mut turn, mut out) = (a.create_label(), a.create_label());
        a.set_label(&mut turn)?;
        for _ in 0..400 {
            branches(a, out)?;
        }
        a.jmp(turn)?;
        a.set_label(&mut out)?;
        a.hlt()
    };
    by_loop: |a| {
        let mut turn = a.create_label();
        a.set_label(&mut turn)?;
        a.mov(ecx, 2)?;
        a.loop_(turn)?;
        a.jmp(turn)
    };
}
