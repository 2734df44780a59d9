//! Loops that walk through memory, whose turns are executed without looking at each address: they do what they say at
//! page boundaries, wherever the pages are, and where the memory ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;

use anykvm_ioctls::VcpuExit;
use iced_x86::code_asm::*;
use long_mode::{Machine, PML4};

const CODE: u64 = 0x1000;
/// A page table for 2 MiB from [`WINDOW`] on.
const TABLE: u64 = 0xa000;
const WINDOW: u64 = 0x20_0000;
/// Pages there.
const PAGES: u64 = 32;
const FIRST: u64 = 0x4_0000;
const LEN: u64 = PAGES << 12;
/// Where the writes are.
const WRITTEN: u64 = LEN / 2;
/// Enough for some milliseconds: what is executed much shows in them.
const TURNS: u64 = 1_000_000;

/// What a turn adds to RDI, which is read, and RSI, where it adds; where both are at first; whether it goes on until there is no more memory.
#[derive(Clone, Copy, Debug)]
struct Walk {
    strides: [i32; 2],
    from: [u64; 2],
    ends: bool,
}

/// How pages that follow each other are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Forwards,
    Backwards,
    /// Three are neighbours.
    Threes,
}

/// How the loop names its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// RDI and RSI.
    Bases,
    /// R14 and R15 in their place.
    OtherBases,
    /// They are indexes to R9.
    Indexes,
    /// No register is left.
    Full,
    /// What is read last goes to DH.
    HighByte,
}

fn gpa(offset: u64, order: Order) -> u64 {
    let page = offset >> 12;
    let page = match order {
        Order::Forwards => page,
        Order::Backwards => PAGES - 1 - page,
        // 32 pages: two of them are no three.
        Order::Threes if page < 30 => 27 - page / 3 * 3 + page % 3,
        Order::Threes => page,
    };
    FIRST + (page << 12) + offset % 0x1000
}

fn byte(offset: u64) -> u8 {
    (offset * 7 + (offset >> 8) * 3) as u8
}

fn turns(w: Walk) -> u64 {
    if w.ends {
        return u64::from(u32::MAX);
    }
    let room = |(stride, from): (i32, u64)| match stride {
        0 => u64::MAX,
        1.. => (LEN - 64 - from) / stride as u64,
        _ => from / u64::from(stride.unsigned_abs()),
    };
    room((w.strides[0], w.from[0])).min(room((w.strides[1], w.from[1])))
}

fn code(w: Walk, form: Form) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (from, to) = match form {
        Form::OtherBases => (r14, r15),
        _ => (rdi, rsi),
    };
    let at = |r: AsmRegister64, disp: i32| match form {
        Form::Indexes => r9 + r + disp,
        _ => r + disp,
    };
    let (mut round, mut turn) = (a.create_label(), a.create_label());
    let turns = turns(w);
    a.mov(r8d, (TURNS / turns + 1) as u32)?;
    a.set_label(&mut round)?;
    a.xor(r9d, r9d)?;
    a.mov(from, WINDOW + w.from[0])?;
    a.mov(to, WINDOW + w.from[1])?;
    a.mov(ecx, turns as u32)?;
    a.set_label(&mut turn)?;
    a.mov(rax, qword_ptr(at(from, 0)))?;
    a.add(rbx, rax)?;
    a.add(ebx, dword_ptr(at(from, 4)))?;
    a.add(dword_ptr(at(to, 3)), eax)?;
    a.add(from, w.strides[0])?;
    let last = if form == Form::HighByte { dh } else { dl };
    a.mov(last, byte_ptr(at(to, 9)))?;
    a.lea(to, ptr(to + w.strides[1]))?;
    if form == Form::Full {
        a.test(rbp, r8)?;
        a.test(r9, r9)?;
    }
    a.dec(ecx)?;
    a.jne(turn)?;
    a.dec(r8d)?;
    a.jne(round)?;
    a.hlt()?;
    a.assemble(CODE)
}

/// What it does: RBX, RDI, RSI, RCX and DL afterwards.
fn expected(w: Walk, memory: &mut [u8]) -> (u64, u64, u64, u64, u8) {
    let word = |m: &[u8], at: u64| {
        let bytes = m.get(at as usize..at as usize + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().unwrap()))
    };
    let (mut sum, mut last_byte) = (0_u64, 0);
    let mut last = [0; 3];
    for _ in 0..TURNS / turns(w) + 1 {
        let [mut read, mut written] = w.from;
        let mut left = turns(w);
        while left != 0 {
            last = [WINDOW + read, WINDOW + written, left];
            let Some(value) = word(memory, read) else {
                return (sum, last[0], last[1], last[2], last_byte);
            };
            sum = sum.wrapping_add(value);
            sum = u64::from((sum as u32).wrapping_add((value >> 32) as u32));
            let at = written as usize + 3;
            let added = (word(memory, written + 3).unwrap() as u32).wrapping_add(value as u32);
            memory[at..at + 4].copy_from_slice(&added.to_le_bytes());
            last_byte = memory[at + 6];
            read = read.wrapping_add_signed(w.strides[0].into());
            written = written.wrapping_add_signed(w.strides[1].into());
            left -= 1;
            last = [
                WINDOW.wrapping_add(read),
                WINDOW.wrapping_add(written),
                left,
            ];
        }
    }
    (sum, last[0], last[1], last[2], last_byte)
}

#[test]
fn every_turn_is_at_its_address() {
    for order in [Order::Forwards, Order::Backwards, Order::Threes] {
        for form in [
            Form::Bases,
            Form::OtherBases,
            Form::Indexes,
            Form::Full,
            Form::HighByte,
        ] {
            all_walks(order, form);
        }
    }
}

fn all_walks(order: Order, form: Form) {
    let gpa = |offset| gpa(offset, order);
    let walk = |strides, from, ends| Walk {
        strides,
        from,
        ends,
    };
    for w in [
        walk([8, 8], [0, WRITTEN], false),
        walk([16, 4], [5, WRITTEN + 0xffd], false),
        walk([-8, 24], [WRITTEN - 8, WRITTEN], false),
        walk([40, -56], [3, LEN - 64], false),
        walk([1, 0], [0, WRITTEN + 0x7f0], false),
        walk([0, 3], [0xffc, WRITTEN + 1], false),
        walk([512, 512], [0, WRITTEN + 8], false),
        walk([520, 16], [0, WRITTEN], false),
        walk([-512, -1], [WRITTEN - 16, LEN - 64], false),
        // Both in the same pages.
        walk([8, 8], [16, 0], false),
        walk([8, 8], [0, 16], false),
        // Of what has been executed before.
        walk([24, 0], [0, 0x800], true),
    ] {
        if w.ends && form != Form::Bases {
            continue;
        }
        let m = Machine::new();
        m.write(PML4 + 0x2008, &(TABLE + 3).to_le_bytes());
        for page in 0..PAGES {
            let entry = gpa(page << 12) + 3;
            m.write(TABLE + 8 * page, &entry.to_le_bytes());
            let bytes: Vec<u8> = (page << 12..(page + 1) << 12).map(byte).collect();
            m.write(gpa(page << 12), &bytes);
        }
        // What does not end is the same code with another count.
        let warm = Walk { ends: false, ..w };
        let bytes = code(warm, form).unwrap();
        m.write(CODE, &bytes);
        let mut memory: Vec<u8> = (0..LEN).map(byte).collect();
        let mut vcpu = m.vcpu(0, CODE);
        if w.ends {
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
            expected(warm, &mut memory);
            long_mode::start(&vcpu, CODE);
            let mut regs = vcpu.get_regs().unwrap();
            // Behind what sets them.
            let first = bytes.windows(3).position(|b| b == [0x48, 0x8b, 0x07]);
            (regs.rip, regs.r8) = (CODE + first.unwrap() as u64, 1);
            (regs.rdi, regs.rsi, regs.rcx) =
                (WINDOW + w.from[0], WINDOW + w.from[1], u32::MAX.into());
            vcpu.set_regs(&regs).unwrap();
        }
        let end = vcpu.run().unwrap();
        assert!(
            matches!(
                (&end, w.ends),
                (VcpuExit::Hlt, false) | (VcpuExit::Shutdown, true)
            ),
            "{w:?}: {end:?}"
        );
        let wanted = expected(w, &mut memory);
        let regs = vcpu.get_regs().unwrap();
        let [from, to] = match form {
            Form::OtherBases => [regs.r14, regs.r15],
            _ => [regs.rdi, regs.rsi],
        };
        let last = regs.rdx >> if form == Form::HighByte { 8 } else { 0 };
        let found = (regs.rbx, from, to, regs.rcx, last as u8);
        assert_eq!(found, wanted, "{w:?}, {order:?}, {form:?}");
        for page in 0..PAGES {
            let at = (page << 12) as usize;
            assert_eq!(
                m.read::<0x1000>(gpa(page << 12))[..],
                memory[at..at + 0x1000],
                "{w:?}, {order:?}, {form:?}, page {page}"
            );
        }
    }
}
