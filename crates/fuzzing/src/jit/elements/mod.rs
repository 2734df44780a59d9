//! Elements that are not random forms: control flow, the stack, system instructions, code that changes code.

mod control;
mod system;

use iced_x86::{Code, Instruction, MemoryOperand, OpKind, Register as R};

use super::{
    generate::{Builder, general, made, mov, plain},
    machine::{CODE, STACK_TOP, USER},
    program::{Element, Fix, Target},
};

/// Forms of accesses in [`Builder::neighbours`].
const FORMS: [Code; 14] = [
    Code::Mov_r64_rm64,
    Code::Mov_rm64_r64,
    Code::Mov_r32_rm32,
    Code::Mov_rm8_r8,
    Code::Movzx_r32_rm16,
    Code::Add_rm32_r32,
    Code::Adc_r64_rm64,
    Code::Cmp_rm8_imm8,
    Code::Mov_rm32_imm32,
    Code::Inc_rm64,
    Code::Movups_xmm_xmmm128,
    Code::Movups_xmmm128_xmm,
    Code::Cmove_r64_rm64,
    Code::Xchg_rm64_r64,
];
/// Forms of accesses to aligned memory.
const ALIGNED: [Code; 4] = [
    Code::Movaps_xmm_xmmm128,
    Code::Movaps_xmmm128_xmm,
    Code::Paddd_xmm_xmmm128,
    Code::VEX_Vmovdqa_ymm_ymmm256,
];

impl Builder<'_> {
    /// Returns accesses to the stack; RSP may be set first.
    pub(super) fn stack(&mut self) -> Element {
        let mut e = Element::default();
        let r = &mut self.r;
        let at = STACK_TOP - 0x800 - r.below(64) * 8 + if r.one_in(16) { r.below(8) } else { 0 };
        let at = if r.one_in(16) {
            STACK_TOP - 0x1000 + 8 * r.below(8) - 24
        } else {
            at
        };
        let at = self.base() + at;
        e.push(mov(R::RSP, at));
        e
    }

    pub(super) fn stack_use(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
        let any = R::RAX + r.below(registers) as u32;
        match r.below(11) {
            9 => {
                for _ in 0..2 + r.below(8) {
                    e.push(made(Instruction::with1(
                        Code::Push_r64,
                        general(r, registers),
                    )));
                }
            }
            10 => {
                for _ in 0..2 + r.below(8) {
                    e.push(made(Instruction::with1(
                        Code::Pop_r64,
                        general(r, registers),
                    )));
                }
            }
            0 | 1 => e.push(made(Instruction::with1(Code::Push_r64, any))),
            2 | 3 => {
                e.push(made(Instruction::with1(Code::Pop_r64, any)));
                if any == R::RSP {
                    let e2 = self.stack();
                    e.code.extend(e2.code);
                }
            }
            4 => e.push(made(Instruction::with1(
                Code::Pushq_imm8,
                r.next() as i8 as i32,
            ))),
            5 => e.push(made(Instruction::with1(Code::Pushq_imm32, r.next() as i32))),
            6 => e.push(plain(Code::Pushfq)),
            7 => {
                let code = r.pick(&[Code::Push_rm64, Code::Pop_rm64]);
                let mut i = plain(code);
                i.set_op0_kind(OpKind::Memory);
                let to = self.target(8);
                self.aim(&mut e, &mut i, to);
                e.push(i);
                if i.memory_base() == R::RSP {
                    let e2 = self.stack();
                    e.code.extend(e2.code);
                }
            }
            _ => {
                e.push(mov(R::RBP, self.base() + STACK_TOP - 0x900));
                e.push(plain(Code::Leaveq));
                let e2 = self.stack();
                e.code.extend(e2.code);
            }
        }
        e
    }

    /// Returns accesses close to each other, by registers that move by constants.
    pub(super) fn neighbours(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        // Some accesses have to be aligned, and nearly all of those are.
        let step = if self.r.one_in(3) { 16 } else { 1 };
        let mut bases = [R::RSP; 2];
        for b in &mut bases {
            if !self.r.one_in(6) {
                *b = general(&mut self.r, self.registers);
            }
        }
        let index = general(&mut self.r, self.registers);
        for b in bases {
            let at = self.target(64);
            let at = if step == 16 { at & !31 } else { at };
            e.push(mov(b, if b == R::RSP { at & !7 } else { at }));
        }
        e.push(mov(index, self.r.below(16)));
        let mut values = false;
        for _ in 0..3 + self.r.below(10) {
            let r = &mut self.r;
            let base = r.pick(&bases);
            match r.below(12) {
                0 => e.push(made(Instruction::with2(
                    r.pick(&[Code::Add_rm64_imm8, Code::Sub_rm64_imm8]),
                    base,
                    if step == 16 { 16 } else { 8 } * r.below(4) as i32,
                ))),
                1 if step == 1 => e.push(made(Instruction::with1(
                    r.pick(&[Code::Inc_rm64, Code::Dec_rm64]),
                    r.pick(&[base, index]),
                ))),
                2 => {
                    let by = (r.below(32) / step * step) as i64;
                    let m = MemoryOperand::with_base_displ(base, by);
                    let to = r.pick(&bases);
                    e.push(made(Instruction::with2(Code::Lea_r64_m, to, m)));
                }
                3 => {
                    let to = r.pick(&bases);
                    e.push(made(Instruction::with2(Code::Mov_r64_rm64, to, base)));
                }
                4 if bases.contains(&R::RSP) && step == 1 => {
                    let code = r.pick(&[Code::Push_r64, Code::Pop_r64]);
                    e.push(made(Instruction::with1(code, general(r, registers))));
                }
                5 if !values => {
                    // The register gets a value of which nothing is known.
                    values = true;
                    e.push(made(Instruction::with2(
                        Code::And_rm64_imm8,
                        r.pick(&[base, index]),
                        -8,
                    )));
                }
                _ => {
                    let is_aligned = step == 16 && r.one_in(2);
                    let code = if is_aligned {
                        r.pick(&ALIGNED)
                    } else {
                        r.pick(&FORMS)
                    };
                    let mut disp = r.below(80) as i64 - 16;
                    if is_aligned && !r.one_in(32) {
                        let by = if code == ALIGNED[3] { 32 } else { 16 };
                        disp = disp.div_euclid(by) * by;
                    }
                    let m = if r.one_in(4) && !is_aligned {
                        let scale = r.pick(&[1, 2, 4, 8]);
                        MemoryOperand::new(base, index, scale, disp, 1, false, R::None)
                    } else {
                        MemoryOperand::with_base_displ(base, disp)
                    };
                    let register = general(r, registers);
                    let n = register.number() as u32;
                    let v = r.next() as i8;
                    e.push(neighbour(code, m, n, v));
                }
            }
        }
        let e2 = self.stack();
        e.code.extend(e2.code);
        e
    }

    /// Returns a string instruction. Operands overlap, and counts may be those of a page.
    pub(super) fn string(&mut self) -> Element {
        const CODES: [Code; 20] = [
            Code::Movsb_m8_m8,
            Code::Movsw_m16_m16,
            Code::Movsd_m32_m32,
            Code::Movsq_m64_m64,
            Code::Stosb_m8_AL,
            Code::Stosw_m16_AX,
            Code::Stosd_m32_EAX,
            Code::Stosq_m64_RAX,
            Code::Lodsb_AL_m8,
            Code::Lodsw_AX_m16,
            Code::Lodsd_EAX_m32,
            Code::Lodsq_RAX_m64,
            Code::Scasb_AL_m8,
            Code::Scasw_AX_m16,
            Code::Scasd_EAX_m32,
            Code::Scasq_RAX_m64,
            Code::Cmpsb_m8_m8,
            Code::Cmpsw_m16_m16,
            Code::Cmpsd_m32_m32,
            Code::Cmpsq_m64_m64,
        ];
        let registers = self.registers;
        let mut e = Element::default();
        let to = self.target(8);
        let from = if self.r.one_in(3) {
            to.wrapping_add(self.r.below(40)).wrapping_sub(20)
        } else {
            self.target(8)
        };
        let r = &mut self.r;
        if self.cpl == 0 && r.one_in(12) {
            e.push(plain(r.pick(&[Code::Std, Code::Cld])));
        }
        let code = r.pick(&CODES);
        let mut i = plain(code);
        for n in 0..i.op_count() {
            use iced_x86::OpCodeOperandKind as K;
            let kind = match code.op_code().op_kind(n) {
                K::seg_rSI => OpKind::MemorySegRSI,
                K::es_rDI => OpKind::MemoryESRDI,
                k => {
                    i.set_op_register(
                        n,
                        match k {
                            K::al => R::AL,
                            K::ax => R::AX,
                            K::eax => R::EAX,
                            _ => R::RAX,
                        },
                    );
                    OpKind::Register
                }
            };
            i.set_op_kind(n, kind);
        }
        if r.one_in(16) {
            i.set_segment_prefix(r.pick(&[R::ES, R::FS, R::GS]));
        }
        match r.below(4) {
            0 => {}
            1 => i.set_has_repne_prefix(true),
            _ => i.set_has_rep_prefix(true),
        }
        let count = match r.below(8) {
            0 => 0,
            1 => r.below(0x1800),
            2 => r.pick(&[0x1000, 0x800, 0x400, 0x200]),
            _ => r.below(32),
        };
        e.push(mov(R::RDI, to));
        e.push(mov(R::RSI, from));
        e.push(mov(R::RCX, count));
        if r.one_in(3) {
            // There is something to find: the element in memory, or one that is repeated there.
            e.push(mov(R::RAX, r.below(2).wrapping_neg()));
        }
        e.push(i);
        if r.one_in(3) {
            let to = general(r, registers);
            let code = r.pick(&[Code::Setb_rm8, Code::Seta_rm8, Code::Setp_rm8]);
            e.push(made(Instruction::with1(
                code,
                R::AL + to.number() as u32 % 4,
            )));
        }
        e
    }

    /// Returns a load of MXCSR or the x87 control word, mostly with all exceptions masked; or what works on more of FP
    /// state.
    pub(super) fn fp_control(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        match self.r.below(3) {
            0 => return self.x87_environment(),
            1 => return self.state_image(),
            _ => {}
        }
        let to = self.target(4);
        let r = &mut self.r;
        let x87 = r.one_in(2);
        let mut value = r.next() as u32 & if x87 { 0x1f7f } else { 0xffbf };
        if !r.one_in(4) {
            value |= if x87 { 0x3f } else { 0x1f80 };
        }
        if r.one_in(16) {
            value = r.next() as u32;
        }
        let register = general(r, registers);
        e.push(mov(register, to));
        let at = MemoryOperand::with_base(register);
        e.push(made(Instruction::with2(
            Code::Mov_rm32_imm32,
            at,
            value as i32,
        )));
        let code = match (x87, r.below(4)) {
            (true, 0) => Code::Fnstcw_m2byte,
            (true, _) => Code::Fldcw_m2byte,
            (_, 0) => Code::Stmxcsr_m32,
            (_, 1) => Code::VEX_Vldmxcsr_m32,
            _ => Code::Ldmxcsr_m32,
        };
        let mut i = plain(code);
        i.set_op0_kind(OpKind::Memory);
        let to = if r.one_in(8) { self.target(4) } else { to };
        self.aim(&mut e, &mut i, to);
        e.push(i);
        e
    }
}

impl Builder<'_> {
    /// Returns what changes or stores the x87 environment, or reads what few instructions read.
    fn x87_environment(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let to = self.target(28);
        let r = &mut self.r;
        match r.below(6) {
            0 => e.push(plain(Code::Fninit)),
            1 => e.push(plain(Code::Fnclex)),
            2 => {
                let mut i = plain(if self.narrow {
                    Code::Rdpid_r32
                } else {
                    Code::Rdpid_r64
                });
                let n = general(r, registers).number() as u32;
                i.set_op0_register(if self.narrow { R::EAX } else { R::RAX } + n);
                e.push(i);
            }
            3 => {
                if !r.one_in(8) {
                    e.push(mov(R::RCX, 0));
                }
                e.push(plain(Code::Xgetbv));
            }
            _ => {
                let register = general(r, registers);
                e.push(mov(register, to));
                let at = |n| MemoryOperand::with_base_displ(register, n);
                let mut i = plain(Code::Fnstenv_m28byte);
                i.set_op0_kind(OpKind::Memory);
                i.set_memory_base(register);
                e.push(i);
                // Engines differ in the last instruction's addresses, but none has one of the host's.
                for n in [12, 16, 20, 24] {
                    let v = if n == 12 { USER + CODE } else { r.next() };
                    let store = Instruction::with2(Code::Mov_rm32_imm32, at(n), v as i32);
                    e.push(made(store));
                }
                for n in [0, 4, 8] {
                    let bits = if n == 0 && r.one_in(8) {
                        0x1f3f
                    } else {
                        0x7fc0
                    };
                    let bits = (r.next() as i32) & bits;
                    if r.one_in(2) {
                        e.push(made(Instruction::with2(Code::Xor_rm32_imm32, at(n), bits)));
                    }
                }
                i.set_code(Code::Fldenv_m28byte);
                e.push(i);
            }
        }
        e
    }
}

fn single(i: Instruction, to: Target) -> Element {
    let mut e = Element::default();
    e.push_fixed(i, Fix::Branch(to));
    e
}

/// Returns `code` with a memory operand, and register `n` or the immediate `v` as the other operand.
fn neighbour(code: Code, m: MemoryOperand, n: u32, v: i8) -> Instruction {
    let register = match code {
        Code::Mov_rm8_r8 => [R::AL, R::CL, R::DL, R::BL][n as usize % 4],
        Code::Mov_r32_rm32 | Code::Movzx_r32_rm16 | Code::Add_rm32_r32 => R::EAX + n,
        Code::Movups_xmm_xmmm128
        | Code::Movups_xmmm128_xmm
        | Code::Movaps_xmm_xmmm128
        | Code::Movaps_xmmm128_xmm
        | Code::Paddd_xmm_xmmm128 => R::XMM0 + n,
        Code::VEX_Vmovdqa_ymm_ymmm256 => R::YMM0 + n,
        _ => R::RAX + n,
    };
    made(match code {
        Code::Cmp_rm8_imm8 | Code::Mov_rm32_imm32 => Instruction::with2(code, m, i32::from(v)),
        Code::Inc_rm64 => Instruction::with1(code, m),
        Code::Mov_rm64_r64
        | Code::Mov_rm8_r8
        | Code::Add_rm32_r32
        | Code::Movups_xmmm128_xmm
        | Code::Movaps_xmmm128_xmm
        | Code::Xchg_rm64_r64 => Instruction::with2(code, m, register),
        _ => Instruction::with2(code, register, m),
    })
}
