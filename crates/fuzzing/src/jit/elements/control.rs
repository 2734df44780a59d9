//! Branches, calls, loops, and code that is overwritten.

use iced_x86::{Code, Instruction, MemoryOperand, OpKind, Register as R};
use x86_defs::control::cr4;

use super::super::{
    generate::{Builder, FUNCTIONS, general, made, mov, plain},
    machine::PRIVATE,
    program::{Element, Fix, Target, branch},
};
use super::single;

/// Offset in [`PRIVATE`] of the counter of loops within a program.
const TURNS_LEFT: u64 = 0x400;

impl Builder<'_> {
    /// Returns a branch forward, a call, or a jump through a register or memory.
    pub(in crate::jit) fn control(&mut self, n: usize) -> Element {
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
                    Code::Loopne_rel8_64_RCX,
                    Code::Loopne_rel8_64_ECX,
                ]);
                return single(branch(code), ahead);
            }
            9..13 => return single(branch(Code::Call_rel32_64), function),
            _ => {}
        }
        // The branch goes by a register, or through memory.
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
                // The slot is just below the stack's top, or a place of its own.
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

    pub(in crate::jit) fn some_function(&mut self, n: usize) -> Element {
        if self.calls && !self.r.one_in(8) {
            self.callee(n)
        } else {
            self.function()
        }
    }

    pub(in crate::jit) fn function(&mut self) -> Element {
        let mut e = Element::default();
        for _ in 0..self.r.below(4) {
            let body = self.any();
            e.code.extend(body.code);
        }
        // RSP may have any value, so the way back does not use it.
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

    /// Returns the function `n`, which mostly returns, and calls others in between.
    pub(in crate::jit) fn callee(&mut self, n: usize) -> Element {
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

    /// Adds steps between registers; some use flags that are set before a call.
    pub(in crate::jit) fn plain_steps(&mut self, e: &mut Element) {
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

    /// Returns a branch back to the start, which is taken a few times.
    pub(in crate::jit) fn again(&self) -> Element {
        self.count_down(0, Code::Jne_rel32_64, 0)
    }

    /// Returns the element that says how many turns a loop within the program makes.
    pub(in crate::jit) fn turns(&mut self) -> Element {
        let turns = 2 + self.r.below(4) as u32;
        let mut e = Element::default();
        let counter = self.private(TURNS_LEFT);
        let mov = Instruction::with2(Code::Mov_rm32_imm32, counter, turns);
        e.push(made(mov));
        e
    }

    /// Returns the end of that loop. `body` is the first element of its body.
    pub(in crate::jit) fn next_turn(&mut self, body: usize) -> Element {
        let back = self.r.pick(&[Code::Jne_rel32_64, Code::Jg_rel32_64]);
        self.count_down(TURNS_LEFT, back, body)
    }

    /// Returns a branch back to the element `to`, with the counter at an offset.
    pub(in crate::jit) fn count_down(&self, counter: u64, back: Code, to: usize) -> Element {
        let mut e = Element::default();
        let dec = Instruction::with1(Code::Dec_rm32, self.private(counter));
        e.push(made(dec));
        e.push_fixed(branch(back), Fix::Branch(Target::Element(to)));
        e
    }

    pub(in crate::jit) fn private(&self, offset: u64) -> MemoryOperand {
        let at = self.base() + PRIVATE + offset;
        MemoryOperand::with_base_displ(R::RIP, at as i64)
    }

    /// Returns an instruction whose immediate is overwritten.
    pub(in crate::jit) fn patchable(&mut self) -> Element {
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

    pub(in crate::jit) fn patch(&mut self, patchable: &[usize]) -> Element {
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
