//! FP state that is saved to memory and loaded from there.

use iced_x86::{Code, Instruction, MemoryOperand, OpKind, Register as R};
use x86_defs::{control::cr4, xsave};

use super::{
    generate::{Builder, general, made, mov, plain, rights},
    program::Element,
};

/// Instructions that save an image, and others that load it.
const PAIRS: [(Code, Code); 10] = [
    (Code::Xsavec64_mem, Code::Xrstor64_mem),
    (Code::Xsavec64_mem, Code::Xrstors64_mem),
    (Code::Xsaves64_mem, Code::Xrstors64_mem),
    (Code::Xsaves64_mem, Code::Xrstor64_mem),
    (Code::Xsave64_mem, Code::Xrstor64_mem),
    (Code::Xsaveopt64_mem, Code::Xrstor64_mem),
    (Code::Xsavec_mem, Code::Xrstor_mem),
    (Code::Xsave_mem, Code::Xrstor64_mem),
    (Code::Fxsave64_m512byte, Code::Fxrstor64_m512byte),
    (Code::Fxsave_m512byte, Code::Fxrstor_m512byte),
];

impl Builder<'_> {
    /// Returns what saves FP state, changes some of it or of the image, and loads it.
    pub(super) fn state_image(&mut self) -> Element {
        let mut e = Element::default();
        let to = self.target(832) & if self.r.one_in(24) { !7 } else { !63 };
        let (save, load) = self.r.pick(&PAIRS);
        let register = loop {
            let r = general(&mut self.r, self.registers);
            if !matches!(r, R::RAX | R::RDX) {
                break r;
            }
        };
        let at = |n: usize| MemoryOperand::with_base_displ(register, n as i64);
        let store = |code, n, v: i32| made(Instruction::with2(code, at(n), v));
        e.push(mov(register, to));
        if !self.r.one_in(8) {
            for n in (xsave::XSTATE_BV..xsave::HEADER_END).step_by(4) {
                e.push(store(Code::Mov_rm32_imm32, n, 0));
            }
        }
        if self.r.one_in(2) {
            e.push(plain(Code::Fninit));
        }
        if self.r.one_in(3) {
            // It is in use then, whatever the engines say of the last instruction.
            e.push(plain(Code::Fld1));
        }
        if self.r.one_in(3) {
            e.push(plain(self.r.pick(&[
                Code::VEX_Vzeroupper,
                Code::VEX_Vzeroupper,
                Code::VEX_Vzeroall,
            ])));
        }
        self.request(&mut e);
        let image = |code| {
            let mut i = plain(code);
            i.set_op0_kind(OpKind::Memory);
            i.set_memory_base(register);
            i
        };
        e.push(image(save));
        // Engines differ in the last instruction's opcode and addresses.
        e.push(store(Code::Mov_rm16_imm16, 6, 0));
        for n in (8..xsave::MXCSR).step_by(4) {
            e.push(store(Code::Mov_rm32_imm32, n, 0));
        }
        if self.r.one_in(4) {
            let n = match self.r.below(4) {
                0 => xsave::MXCSR,
                1 => self.r.below(6) as usize,
                2 => xsave::XSTATE_BV + self.r.below(64) as usize,
                _ => xsave::MXCSR + self.r.below(808) as usize,
            };
            let bits = 1 << self.r.below(8);
            e.push(store(Code::Xor_rm8_imm8, n, bits));
        }
        match self.r.below(4) {
            0 => {
                let n = self.r.below(16) as u32;
                let zero = Code::VEX_Vxorps_ymm_ymm_ymmm256;
                let [to, by] = [R::YMM0 + n, R::YMM0 + (n + 1) % 16];
                e.push(made(Instruction::with3(zero, to, by, by)));
            }
            1 => return e,
            _ => {}
        }
        if self.start.cr4 & cr4::PKE != 0 && self.r.one_in(2) {
            let allowed = rights(&mut self.r);
            e.push(mov(R::RAX, allowed.into()));
            e.push(mov(R::RCX, 0));
            e.push(mov(R::RDX, 0));
            e.push(plain(Code::Wrpkru));
            e.push(mov(register, to));
            self.request(&mut e);
        } else if self.r.one_in(2) {
            self.request(&mut e);
        }
        e.push(image(load));
        e
    }

    /// Requests state components.
    fn request(&mut self, e: &mut Element) {
        let r = &mut self.r;
        let low = match r.below(8) {
            0 => r.below(8),
            1 => r.pick(&[0x207, 0x200, 0x206]),
            2 => r.next(),
            _ => r.pick(&[7, 7, 7, 6, 3, u64::MAX]),
        };
        e.push(mov(R::RAX, low));
        let high = r.pick(&[0, 0, u64::MAX]);
        e.push(mov(R::RDX, high));
    }
}
