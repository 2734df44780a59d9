//! Compares each function of the assembler with what the decoder's library reads of its code.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, OpKind, Register};

use super::*;

const ISA: Isa = Isa {
    bmi1: true,
    bmi2: true,
    xsave: true,
    avx: true,
    rdtscp: true,
    xinuse: true,
};

/// Returns the one instruction that `f` emits.
fn one(f: impl FnOnce(&mut Asm)) -> Instruction {
    let mut a = Asm::new(ISA);
    f(&mut a);
    let (code, rest) = a.parts().unwrap();
    let i = Decoder::with_ip(64, code, 0, DecoderOptions::NONE).decode();
    assert!(rest.is_empty() && !i.is_invalid(), "{code:x?}");
    assert_eq!(i.len(), code.len(), "{code:x?}");
    i
}

fn reg64(r: Reg) -> Register {
    Register::RAX + u32::from(r)
}

fn reg32(r: Reg) -> Register {
    Register::EAX + u32::from(r)
}

/// Returns all kinds of operands: each base, indexes, and displacements around the limits of a byte.
fn operands() -> Vec<Mem> {
    let mut all = vec![gs(0), gs(0x1234)];
    for base in 0..16 {
        for disp in [0, 1, 127, 128, -128, -129, 0x12_3456] {
            all.push(at(base, disp));
            for (index, scale) in [(0, 0), (5, 1), (8, 2), (13, 3), (15, 0)] {
                all.push(at(base, disp).plus(index, scale));
            }
        }
    }
    all
}

fn check_memory(i: &Instruction, m: Mem) {
    let base = m.base.map_or(Register::None, reg64);
    let (index, scale) = m
        .index
        .map_or((Register::None, 1), |(r, s)| (reg64(r), 1 << s));
    assert_eq!(i.memory_base(), base, "{m:?}");
    assert_eq!(i.memory_index(), index, "{m:?}");
    assert_eq!(i.memory_index_scale(), scale, "{m:?}");
    assert_eq!(i.memory_displacement64() as i64, m.disp.into(), "{m:?}");
    assert_eq!(i.memory_segment() == Register::GS, m.gs, "{m:?}");
}

#[test]
fn moves_to_and_from_memory() {
    for m in operands() {
        for r in 0..16 {
            for (code, name, wide, i) in [
                (Code::Mov_r64_rm64, "load", true, one(|a| a.load(r, m))),
                (Code::Mov_r32_rm32, "load32", false, one(|a| a.load32(r, m))),
                (Code::Mov_rm64_r64, "store", true, one(|a| a.store(m, r))),
                (
                    Code::Mov_rm32_r32,
                    "store32",
                    false,
                    one(|a| a.store32(m, r)),
                ),
                (Code::Lea_r64_m, "lea", true, one(|a| a.lea(r, m))),
                (
                    Code::Add_r64_rm64,
                    "alu",
                    true,
                    one(|a| a.alu(true, Alu::Add, r, m)),
                ),
                (
                    Code::Cmp_r32_rm32,
                    "alu",
                    false,
                    one(|a| a.alu(false, Alu::Cmp, r, m)),
                ),
            ] {
                assert_eq!(i.code(), code, "{name}");
                let n = u32::from(i.op0_kind() != OpKind::Register);
                let wanted = if wide { reg64(r) } else { reg32(r) };
                assert_eq!(i.op_register(n), wanted, "{name}");
                check_memory(&i, m);
            }
        }
    }
}

#[test]
fn constants_to_memory() {
    for m in operands() {
        for v in [0, 1, -1, 0x1234_5678] {
            for (code, i) in [
                (Code::Mov_rm64_imm32, one(|a| a.store_imm(m, v))),
                (Code::Mov_rm32_imm32, one(|a| a.store32_imm(m, v))),
            ] {
                assert_eq!(i.code(), code);
                assert_eq!(i.immediate(1) as i32, v);
                check_memory(&i, m);
            }
        }
        let i = one(|a| a.alu_mem_imm8(true, Alu::Sub, m, -3));
        assert_eq!((i.code(), i.immediate(1) as i64), (Code::Sub_rm64_imm8, -3));
        check_memory(&i, m);
        for (code, i) in [
            (Code::Jmp_rm64, one(|a| a.jmp_mem(m))),
            (Code::Call_rm64, one(|a| a.call_mem(m))),
        ] {
            assert_eq!(i.code(), code);
            check_memory(&i, m);
        }
        let mut a = Asm::new(ISA);
        let place = a.cmp_mem_imm32(true, m);
        a.patch32(place, 0x1234_5678);
        let i = Decoder::new(64, a.parts().unwrap().0, DecoderOptions::NONE).decode();
        assert_eq!(i.code(), Code::Cmp_rm64_imm32);
        assert_eq!(i.immediate(1) as i32, 0x1234_5678);
        check_memory(&i, m);
    }
}

#[test]
fn registers() {
    for to in 0..16 {
        for from in 0..16 {
            for (code, i) in [
                (Code::Mov_r64_rm64, one(|a| a.mov(to, from))),
                (
                    Code::Xor_r64_rm64,
                    one(|a| a.alu_rr(true, Alu::Xor, to, from)),
                ),
                (
                    Code::Or_r64_rm64,
                    one(|a| a.alu_rr(true, Alu::Or, to, from)),
                ),
                (Code::VEX_Rorx_r64_rm64_imm8, one(|a| a.rorx(to, from, 59))),
                (Code::VEX_Bextr_r64_rm64_r64, one(|a| a.bextr(to, from, 11))),
                (
                    Code::Imul_r64_rm64_imm32,
                    one(|a| a.imul(true, to, from, 1000)),
                ),
            ] {
                assert_eq!(i.code(), code);
                assert_eq!(
                    [i.op0_register(), i.op1_register()],
                    [reg64(to), reg64(from)]
                );
            }
            let i = one(|a| a.mov32(to, from));
            assert_eq!(i.code(), Code::Mov_r32_rm32);
            assert_eq!(
                [i.op0_register(), i.op1_register()],
                [reg32(to), reg32(from)]
            );
        }
        assert_eq!(one(|a| a.bextr(to, 1, 11)).op2_register(), Register::R11);
        assert_eq!(one(|a| a.rorx(to, 1, 59)).immediate8(), 59);
        for (code, i) in [
            (Code::Push_r64, one(|a| push(a, to))),
            (Code::Pop_r64, one(|a| pop(a, to))),
        ] {
            assert_eq!((i.code(), i.op0_register()), (code, reg64(to)));
        }
        for (group, code) in [
            (4, Code::Shl_rm64_imm8),
            (5, Code::Shr_rm64_imm8),
            (7, Code::Sar_rm64_imm8),
        ] {
            let i = one(|a| a.shift(true, group, to, 12));
            assert_eq!((i.code(), i.op0_register()), (code, reg64(to)));
            assert_eq!(i.immediate8(), 12);
        }
    }
}

/// Constants are the same in the register whichever instruction loads them.
#[test]
fn constants_to_registers() {
    for r in 0..16 {
        for v in [
            0,
            1,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
            1 << 32,
            u64::MAX,
        ] {
            let i = one(|a| a.mov_imm(r, v));
            assert_eq!(i.op0_register().full_register(), reg64(r));
            let found = match i.op0_register().size() {
                4 => i.immediate(1) & 0xffff_ffff,
                _ => i.immediate(1),
            };
            assert_eq!(found, v, "{i:?}");
        }
        for v in [0, 1, -1, i32::MIN, i32::MAX] {
            let i = one(|a| a.mov_signed(true, r, v));
            assert_eq!(i.op0_register().full_register(), reg64(r));
            let wide = i.op0_register().size() == 8;
            let found = i.immediate(1);
            let found = if wide { found } else { found & 0xffff_ffff };
            assert_eq!(found as i64, v.into(), "{i:?}");
            for (op, short, long) in [
                (Alu::Add, Code::Add_rm64_imm8, Code::Add_rm64_imm32),
                (Alu::And, Code::And_rm64_imm8, Code::And_rm64_imm32),
                (Alu::Cmp, Code::Cmp_rm64_imm8, Code::Cmp_rm64_imm32),
            ] {
                let i = one(|a| a.alu_imm(true, op, r, v));
                let is_short = i8::try_from(v).is_ok();
                let is_rax = i.code().op_code().op_kind(0) == iced_x86::OpCodeOperandKind::rax;
                assert!(
                    is_rax || i.code() == if is_short { short } else { long },
                    "{i:?}"
                );
                assert_eq!(
                    (i.op0_register(), i.immediate(1) as i64),
                    (reg64(r), v.into())
                );
            }
        }
        let mut a = Asm::new(ISA);
        let place = a.mov_imm64(r, 7);
        let code = a.parts().unwrap().0;
        assert_eq!(code[place..], 7_u64.to_le_bytes());
        let i = Decoder::new(64, code, DecoderOptions::NONE).decode();
        assert_eq!(
            (i.code(), i.op0_register()),
            (Code::Mov_r64_imm64, reg64(r))
        );
    }
    let i = one(|a| a.push_imm(-5));
    assert_eq!(i.immediate(0) as i64, -5);
}

#[test]
fn branches_lead_where_they_are_patched_to() {
    for (code, f) in [
        (Code::Jmp_rel32_64, Asm::jmp as fn(&mut Asm) -> usize),
        (Code::Call_rel32_64, Asm::call),
        (Code::Jl_rel32_64, |a| a.jcc(cc::L)),
        (Code::Jne_rel32_64, |a| a.jcc(cc::NE)),
    ] {
        // The target is before or behind the place where a block's second part begins.
        for is_apart in [false, true] {
            let mut a = Asm::new(ISA);
            a.start(0x1000);
            a.ret();
            if is_apart {
                a.go_on_at(0x8000);
            }
            let ip = a.here() as u64;
            let site = f(&mut a);
            a.patch(site, 0x5000);
            let (first, second) = a.parts().unwrap();
            let code_bytes = if is_apart { second } else { &first[1..] };
            let i = Decoder::with_ip(64, code_bytes, ip, DecoderOptions::NONE).decode();
            assert_eq!((i.code(), i.near_branch64()), (code, 0x5000));
        }
    }
    assert_eq!(one(Asm::ret).code(), Code::Retnq);
}

#[test]
fn alignment_is_of_nops() {
    for before in 0..CACHE_LINE {
        let mut a = Asm::new(ISA);
        (0..before).for_each(|_| a.ret());
        a.align();
        assert_eq!(a.here() % CACHE_LINE, 0);
        let code = &a.parts().unwrap().0[before..];
        for i in &mut Decoder::new(64, code, DecoderOptions::NONE) {
            assert_eq!(i.mnemonic(), iced_x86::Mnemonic::Nop, "{before}");
        }
    }
}
