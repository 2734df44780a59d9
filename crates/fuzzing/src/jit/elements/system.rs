//! Instructions of kernels: flags, interrupts, control registers.

use iced_x86::{Code, Instruction, Mnemonic as M, OpKind, Register as R};
use x86_defs::{
    control::{cr0, cr4},
    rflags,
};

use super::super::{
    generate::{Builder, general, made, mov, plain, rights},
    machine::selectors,
    program::{Element, Fix, Target},
};

/// Flags that POPF may set: all but TF, with which another engine executes.
const POPF: u64 =
    rflags::ARITH | rflags::DF | rflags::NT | rflags::ID | rflags::IF | rflags::IOPL | rflags::AC;

impl Builder<'_> {
    pub(in crate::jit) fn popf(&mut self, i: Instruction) -> Element {
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

    /// Returns an IRETQ to the next instruction, at the same level.
    pub(in crate::jit) fn interrupt_return(&mut self, n: usize) -> Element {
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

    pub(in crate::jit) fn system(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
        if r.one_in(6) {
            return self.segment_base();
        }
        if self.start.cr4 & cr4::PKE != 0 && r.one_in(3) {
            return self.key_rights();
        }
        if r.one_in(6) {
            // Even with REX.W, a store to memory has 16 bits.
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
        // At CPL 3 most of these raise #GP.
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

    /// Returns a change of CR0's bits, and mostly another that enables FP instructions again. An FP instruction may be
    /// between the two.
    pub(in crate::jit) fn change_cr0(&mut self) -> Element {
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

    /// Returns RDFSBASE, or another of its kind.
    fn segment_base(&mut self) -> Element {
        let registers = self.registers;
        let mut e = Element::default();
        let r = &mut self.r;
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
        e
    }

    /// Returns WRPKRU and RDPKRU.
    fn key_rights(&mut self) -> Element {
        let mut e = Element::default();
        let r = &mut self.r;
        let pkru = rights(r).into();
        e.push(mov(R::RCX, u64::from(r.one_in(32))));
        if r.one_in(3) {
            e.push(plain(Code::Rdpkru));
            return e;
        }
        e.push(mov(R::RDX, 0));
        e.push(mov(R::RAX, pkru));
        e.push(plain(Code::Wrpkru));
        e
    }
}
