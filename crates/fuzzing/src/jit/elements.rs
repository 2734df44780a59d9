//! Elements that are no random forms: control flow, the stack, system
//! instructions, code that changes code.

use iced_x86::{Code, Instruction, MemoryOperand, Mnemonic as M, OpKind, Register as R};
use x86_defs::{
    control::{cr0, cr4},
    rflags,
};

use super::{
    generate::{Builder, FUNCTIONS, general, made, mov, plain, rights},
    machine::{PRIVATE, STACK_TOP, selectors},
    program::{Element, Fix, Target, branch},
};

/// Where in [`PRIVATE`] loops within a program count their turns.
const TURNS_LEFT: u64 = 0x400;
/// Flags that POPF may set: all but TF, which belongs to another engine.
const POPF: u64 =
    rflags::ARITH | rflags::DF | rflags::NT | rflags::ID | rflags::IF | rflags::IOPL | rflags::AC;

impl Builder<'_> {
    pub(super) fn popf(&mut self, i: Instruction) -> Element {
        let mut e = Element::default();
        let flags = (self.r.next() & POPF) as u32;
        let steady = if self.r.one_in(3) {
            flags
        } else {
            flags & (rflags::ARITH | rflags::IF) as u32
        };
        if i.mnemonic() == M::Popf {
            return e;
        }
        e.push(made(Instruction::with1(Code::Pushq_imm32, steady as i32)));
        e.push(i);
        e
    }

    /// RSP to the stack.
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

    /// Accesses close to each other, by registers that move by constants.
    pub(super) fn neighbours(&mut self) -> Element {
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
        const ALIGNED: [Code; 4] = [
            Code::Movaps_xmm_xmmm128,
            Code::Movaps_xmmm128_xmm,
            Code::Paddd_xmm_xmmm128,
            Code::VEX_Vmovdqa_ymm_ymmm256,
        ];
        let registers = self.registers;
        let mut e = Element::default();
        // Some accesses have to be aligned, and nearly all of them are.
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
                    // Something of which nothing is known.
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

    /// A string instruction; operands overlap, counts may be those of a page.
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
            // Something to find: what is there, or a run of the same.
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

    /// Loads MXCSR or the x87 control word, mostly with all exceptions masked.
    pub(super) fn fp_control(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
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

    /// IRETQ to what follows, at the same level.
    pub(super) fn interrupt_return(&mut self, n: usize) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let [cs, ss] = selectors(self.cpl, self.narrow).map(i32::from);
        let r = &mut self.r;
        let flags = r.next() & (rflags::ARITH | rflags::IF | rflags::RF | rflags::ID)
            | if r.one_in(8) {
                rflags::AC | rflags::DF
            } else {
                0
            };
        let register = general(r, registers);
        let mut lea = plain(Code::Lea_r64_m);
        lea.set_op0_register(register);
        lea.set_op1_kind(OpKind::Memory);
        lea.set_memory_base(R::RIP);
        lea.set_memory_displ_size(8);
        e.push(made(Instruction::with1(Code::Pushq_imm32, ss)));
        e.push(made(Instruction::with1(Code::Push_r64, R::RSP)));
        e.push(made(Instruction::with1(Code::Pushq_imm32, flags as i32)));
        e.push(made(Instruction::with1(Code::Pushq_imm32, cs)));
        e.push_fixed(lea, Fix::Address(Target::Element(n + 1)));
        e.push(made(Instruction::with1(Code::Push_r64, register)));
        e.push(plain(Code::Iretq));
        e
    }

    pub(super) fn system(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
        if r.one_in(6) {
            let code = r.pick(&[
                Code::Rdfsbase_r64,
                Code::Rdgsbase_r64,
                Code::Wrfsbase_r64,
                Code::Wrgsbase_r64,
                Code::Rdfsbase_r32,
                Code::Wrgsbase_r32,
            ]);
            let n = general(r, registers).number() as u32;
            let is_32 = matches!(code, Code::Rdfsbase_r32 | Code::Wrgsbase_r32);
            let register = if is_32 { R::EAX + n } else { R::RAX + n };
            if !is_32 && !r.one_in(4) {
                e.push(mov(register, r.below(1 << 47)));
            }
            e.push(made(Instruction::with1(code, register)));
            return e;
        }
        if self.start.cr4 & cr4::PKE != 0 && r.one_in(3) {
            let pkru = rights(r).into();
            e.push(mov(R::RCX, u64::from(r.one_in(32))));
            if r.one_in(3) {
                e.push(plain(Code::Rdpkru));
                return e;
            }
            e.push(mov(R::RDX, 0));
            e.push(mov(R::RAX, pkru));
            e.push(plain(Code::Wrpkru));
            return e;
        }
        if r.one_in(6) {
            // With REX.W an address to memory is 16 bits all the same.
            let mut i = plain(r.pick(&[Code::Mov_rm16_Sreg, Code::Mov_r32m16_Sreg]));
            i.set_op0_kind(OpKind::Memory);
            i.set_op1_register(R::ES + r.below(6) as u32);
            let to = self.target(2);
            self.aim(&mut e, &mut i, to);
            e.push(i);
            return e;
        }
        if r.one_in(12) {
            e.push(plain(Code::Pause));
            return e;
        }
        if self.cpl == 3 && r.one_in(2) {
            e.push(plain(Code::Syscall));
            return e;
        }
        // At CPL 3 most of it is #GP.
        if self.cpl == 3 && !(self.wild && r.one_in(8)) {
            let mut i = plain(Code::Mov_r64m16_Sreg);
            i.set_op0_register(general(r, registers));
            i.set_op1_register(R::ES + r.below(6) as u32);
            e.push(i);
            return e;
        }
        if r.one_in(8) {
            return self.change_cr0();
        }
        match r.below(16) {
            0..3 => e.push(plain(Code::Cli)),
            3..6 => e.push(plain(Code::Sti)),
            6 | 7 if self.start.cr4 & cr4::SMAP != 0 || r.one_in(2) => {
                e.push(plain(r.pick(&[Code::Stac, Code::Clac])));
            }
            8 => e.push(plain(Code::Swapgs)),
            9 | 10 => return self.popf(plain(Code::Popfq)),
            11 => e.push(plain(r.pick(&[Code::Cld, Code::Std]))),
            12 => {
                e.push(plain(r.pick(&[Code::Rdtsc, Code::Rdtscp])));
                e.push(mov(R::RAX, 1));
                e.push(mov(R::RDX, 2));
            }
            13 if r.one_in(2) => {
                let register = general(r, registers);
                let control = r.pick(&[R::CR0, R::CR2, R::CR3, R::CR4]);
                e.push(made(Instruction::with2(
                    Code::Mov_r64_cr,
                    register,
                    control,
                )));
            }
            13 => {
                let register = general(r, registers);
                e.push(made(Instruction::with2(Code::Mov_r64_cr, register, R::CR3)));
                e.push(made(Instruction::with2(Code::Mov_cr_r64, R::CR3, register)));
            }
            14 => {
                let code = r.pick(&[
                    Code::Mov_r32m16_Sreg,
                    Code::Mov_r64m16_Sreg,
                    Code::Mov_rm16_Sreg,
                ]);
                let mut i = plain(code);
                let n = general(r, registers).number() as u32;
                i.set_op0_register(match code {
                    Code::Mov_r32m16_Sreg => R::EAX + n,
                    Code::Mov_rm16_Sreg => R::AX + n,
                    _ => R::RAX + n,
                });
                i.set_op1_register(R::ES + r.below(6) as u32);
                e.push(i);
            }
            _ => {
                let mut i = plain(Code::Invlpg_m);
                i.set_op0_kind(OpKind::Memory);
                let to = self.target(1);
                self.aim(&mut e, &mut i, to);
                e.push(i);
            }
        }
        e
    }

    /// Changes bits of CR0 and, mostly, makes FP instructions possible again if they are not. In between may be one.
    fn change_cr0(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
        let register = general(r, registers);
        let ts = cr0::TS as i32;
        let bits = [ts, ts, cr0::WP as i32, cr0::EM as i32, cr0::MP as i32];
        let more = if r.one_in(3) { r.pick(&bits) } else { 0 };
        let bits = r.pick(&bits) | more;
        let code = r.pick(&[
            Code::Or_rm64_imm32,
            Code::Or_rm64_imm32,
            Code::Xor_rm64_imm32,
        ]);
        let from = made(Instruction::with2(Code::Mov_r64_cr, register, R::CR0));
        let to = made(Instruction::with2(Code::Mov_cr_r64, R::CR0, register));
        e.push(from);
        e.push(made(Instruction::with2(code, register, bits)));
        e.push(to);
        if r.one_in(4) {
            let (a, b) = (R::XMM0 + r.below(8) as u32, R::XMM0 + r.below(8) as u32);
            e.push(match r.one_in(2) {
                true => made(Instruction::with2(Code::Paddd_xmm_xmmm128, a, b)),
                false => plain(Code::Fninit),
            });
        }
        match r.below(6) {
            0 => {}
            1..4 => e.push(plain(Code::Clts)),
            _ => {
                let keep = !(cr0::TS | cr0::EM) as i32;
                let and = Instruction::with2(Code::And_rm64_imm32, register, keep);
                e.code.extend([from, made(and), to]);
            }
        }
        e
    }

    /// Branches forward, calls, and jumps through registers and memory.
    pub(super) fn control(&mut self, n: usize) -> Element {
        const JCC: [Code; 16] = [
            Code::Jo_rel32_64,
            Code::Jno_rel32_64,
            Code::Jb_rel32_64,
            Code::Jae_rel32_64,
            Code::Je_rel32_64,
            Code::Jne_rel32_64,
            Code::Jbe_rel32_64,
            Code::Ja_rel32_64,
            Code::Js_rel32_64,
            Code::Jns_rel32_64,
            Code::Jp_rel32_64,
            Code::Jnp_rel32_64,
            Code::Jl_rel32_64,
            Code::Jge_rel32_64,
            Code::Jle_rel32_64,
            Code::Jg_rel32_64,
        ];
        let registers = self.registers;
        let mut e = Element::default();
        let here = self.base();
        let r = &mut self.r;
        let ahead = Target::Element(n + 1 + r.below(3) as usize);
        let function = Target::Function(r.below(FUNCTIONS as u64) as usize);
        let kind = match self.calls {
            true => r.pick(&[0, 7, 9, 9, 9, 14]),
            false => r.below(20),
        };
        match kind {
            0..7 => return single(branch(r.pick(&JCC)), ahead),
            7 => return single(branch(Code::Jmp_rel32_64), ahead),
            8 => {
                let code = r.pick(&[
                    Code::Jrcxz_rel8_64,
                    Code::Loop_rel8_64_RCX,
                    Code::Loope_rel8_64_RCX,
                ]);
                return single(branch(code), ahead);
            }
            9..13 => return single(branch(Code::Call_rel32_64), function),
            _ => {}
        }
        // By a register, or through memory.
        let is_call = self.calls || r.one_in(2);
        let register = general(r, registers);
        let mut lea = plain(Code::Lea_r64_m);
        lea.set_op0_register(register);
        lea.set_op1_kind(OpKind::Memory);
        lea.set_memory_base(R::RIP);
        lea.set_memory_displ_size(8);
        let to = if is_call { function } else { ahead };
        e.push_fixed(lea, Fix::Address(to));
        match r.below(4) {
            0 => {
                let code = if is_call {
                    Code::Call_rm64
                } else {
                    Code::Jmp_rm64
                };
                e.push(made(Instruction::with1(code, register)));
            }
            1 if !is_call => {
                e.push(made(Instruction::with1(Code::Push_r64, register)));
                e.push(plain(Code::Retnq));
            }
            k => {
                // Just below the stack's top, or in a place of its own.
                let slot = if k == 2 {
                    MemoryOperand::with_base_displ(R::RSP, -8)
                } else {
                    let at = here + PRIVATE + 0x800 + 8 * r.below(8);
                    MemoryOperand::with_base_displ(R::RIP, at as i64)
                };
                e.push(made(Instruction::with2(Code::Mov_rm64_r64, slot, register)));
                let code = if is_call {
                    Code::Call_rm64
                } else {
                    Code::Jmp_rm64
                };
                e.push(made(Instruction::with1(code, slot)));
            }
        }
        e
    }

    pub(super) fn some_function(&mut self, n: usize) -> Element {
        if self.calls && !self.r.one_in(8) {
            self.callee(n)
        } else {
            self.function()
        }
    }

    fn function(&mut self) -> Element {
        let mut e = Element::default();
        for _ in 0..self.r.below(4) {
            let body = self.any();
            e.code.extend(body.code);
        }
        // RSP may be anything: a way back that does not need it.
        if self.r.one_in(6) {
            e.push(made(Instruction::with1(
                Code::Retnq_imm16,
                8 * self.r.below(4) as u32,
            )));
        } else {
            e.push(plain(Code::Retnq));
        }
        e
    }

    /// One that mostly returns, and calls others in between: the function `n`.
    pub(super) fn callee(&mut self, n: usize) -> Element {
        let mut e = Element::default();
        let saved = self.r.one_in(2).then(|| general(&mut self.r, 16));
        if let Some(register) = saved {
            e.push(made(Instruction::with1(Code::Push_r64, register)));
        }
        self.plain_steps(&mut e);
        if n + 1 < FUNCTIONS && self.r.one_in(2) {
            let others = (FUNCTIONS - n - 1) as u64;
            let to = Target::Function(n + 1 + self.r.below(others) as usize);
            e.push_fixed(branch(Code::Call_rel32_64), Fix::Branch(to));
            self.plain_steps(&mut e);
        }
        if let Some(register) = saved {
            e.push(made(Instruction::with1(Code::Pop_r64, register)));
        }
        e.push(plain(Code::Retnq));
        e
    }

    /// Between registers, some by flags of what comes before a call.
    fn plain_steps(&mut self, e: &mut Element) {
        const STEPS: [Code; 7] = [
            Code::Mov_r64_rm64,
            Code::Add_r64_rm64,
            Code::Adc_r64_rm64,
            Code::Cmp_r64_rm64,
            Code::Xor_r32_rm32,
            Code::Cmove_r64_rm64,
            Code::Lea_r64_m,
        ];
        for _ in 0..self.r.below(4) {
            let code = self.r.pick(&STEPS);
            let [mut a, mut b] = [0; 2].map(|_| general(&mut self.r, 16));
            if code == Code::Lea_r64_m {
                let place = MemoryOperand::with_base_displ(b, 0x51);
                e.push(made(Instruction::with2(code, a, place)));
                continue;
            }
            if code == Code::Xor_r32_rm32 {
                [a, b] = [a, b].map(|r| R::EAX + r.number() as u32);
            }
            e.push(made(Instruction::with2(code, a, b)));
        }
    }

    /// Back to the start, a few times.
    pub(super) fn again(&self) -> Element {
        self.count_down(0, Code::Jne_rel32_64, 0)
    }

    /// How many turns a loop makes within the program.
    pub(super) fn turns(&mut self) -> Element {
        let turns = 2 + self.r.below(4) as u32;
        let mut e = Element::default();
        let counter = self.private(TURNS_LEFT);
        let mov = Instruction::with2(Code::Mov_rm32_imm32, counter, turns);
        e.push(made(mov));
        e
    }

    /// Its end; the first element of its body is given.
    pub(super) fn next_turn(&mut self, body: usize) -> Element {
        let back = self.r.pick(&[Code::Jne_rel32_64, Code::Jg_rel32_64]);
        self.count_down(TURNS_LEFT, back, body)
    }

    /// Back to an element by the branch, after the counter at an offset.
    fn count_down(&self, counter: u64, back: Code, to: usize) -> Element {
        let mut e = Element::default();
        let dec = Instruction::with1(Code::Dec_rm32, self.private(counter));
        e.push(made(dec));
        e.push_fixed(branch(back), Fix::Branch(Target::Element(to)));
        e
    }

    fn private(&self, offset: u64) -> MemoryOperand {
        let at = self.base() + PRIVATE + offset;
        MemoryOperand::with_base_displ(R::RIP, at as i64)
    }

    /// An instruction whose immediate is written over.
    pub(super) fn patchable(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
        let register = R::EAX + general(r, registers).number() as u32;
        let code = r.pick(&[
            Code::Mov_r32_imm32,
            Code::Add_rm32_imm32,
            Code::Xor_rm32_imm32,
        ]);
        e.push(made(Instruction::with2(code, register, r.next() as u32)));
        e
    }

    pub(super) fn patch(&mut self, patchable: &[usize]) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
        let element = r.pick(patchable);
        let user = self.cpl == 3 || self.start.cr4 & cr4::SMAP == 0 && r.one_in(2);
        let register = general(r, registers);
        e.push_fixed(
            mov(register, 0x1122_3344_5566_7788),
            Fix::Immediate { element, user },
        );
        let at = MemoryOperand::with_base(register);
        e.push(match r.below(3) {
            0 => made(Instruction::with2(
                Code::Mov_rm32_imm32,
                at,
                r.next() as u32,
            )),
            1 => made(Instruction::with2(Code::Add_rm32_imm8, at, 5)),
            _ => {
                let mut i = made(Instruction::with2(Code::Xadd_rm32_r32, at, R::EAX));
                i.set_has_lock_prefix(true);
                i
            }
        });
        e
    }
}

fn single(i: Instruction, to: Target) -> Element {
    let mut e = Element::default();
    e.push_fixed(i, Fix::Branch(to));
    e
}

/// `code` with a memory operand, and register `n` or `v` for the other.
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
