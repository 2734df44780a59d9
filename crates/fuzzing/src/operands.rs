//! Random operands of a form.

use iced_x86::{Code, Instruction, OpCodeOperandKind as K, OpKind, Register};
use x86_defs::reg;
use x86_native::oracle::{CODE, Mode, WINDOW, WINDOW_SIZE};

use crate::Random;

/// Registers that point into the window throughout a block: instructions name them only as a base.
pub(crate) const POINTERS: [Register; 4] =
    [Register::RBX, Register::RBP, Register::RSI, Register::RDI];
/// Registers that instructions of blocks may name.
const FREE: [u32; 11] = [0, 1, 2, 8, 9, 10, 11, 12, 13, 14, 15];
/// Registers that instructions of blocks of 32-bit code may name.
const FREE32: [u32; 3] = [0, 1, 2];

/// Base and index of each 16-bit form of addresses (SDM vol. 2, table 2-1).
pub(crate) const BASES16: [(Register, Register); 8] = [
    (Register::BX, Register::SI),
    (Register::BX, Register::DI),
    (Register::BP, Register::SI),
    (Register::BP, Register::DI),
    (Register::SI, Register::None),
    (Register::DI, Register::None),
    (Register::BP, Register::None),
    (Register::BX, Register::None),
];

/// Fills in the operands of one instruction.
#[derive(Debug)]
pub(crate) struct Operands<'a> {
    pub(crate) r: &'a mut Random,
    /// Start values of registers. Those that address memory are set here, except in blocks.
    pub(crate) gpr: &'a mut [u64; 16],
    pub(crate) mode: Mode,
    /// True for an instruction in a block of several.
    pub(crate) block: bool,
    /// Linear address of the memory operand.
    pub(crate) target: Option<u64>,
    /// True if implicit pointers have half the usual width.
    pub(crate) narrow: bool,
    /// The vector register that indexes memory.
    pub(crate) vector_index: Option<Register>,
}

/// Returns an address for an access: mostly inside of the window and aligned; sometimes unaligned, straddling pages,
/// near or over the window's ends, far from it, or not canonical.
pub(crate) fn address(r: &mut Random) -> u64 {
    match r.below(64) {
        0..3 => WINDOW + WINDOW_SIZE as u64 - r.below(40),
        3 => WINDOW - r.below(40),
        4..7 => WINDOW + 0x1000 - r.below(40),
        7 => match r.below(4) {
            0 => 1 << 47 | r.next() >> 20,
            1 => (1 << 47) - r.below(40),
            2 => 0xffff_8000_0000_0000 - 1 - r.below(40),
            _ => 0x1234_5000 + r.below(64),
        },
        8..20 => WINDOW + 0x100 + r.below(0x1e00),
        _ => WINDOW + 0x100 + r.below(0xf0) * 32,
    }
}

/// Returns an [`address`] for 32-bit code. It is not near the end of the address space, where segment limits end, too.
pub(crate) fn address32(r: &mut Random) -> u64 {
    match address(r) {
        at if at >> 31 == 0 => at,
        at => 0x1234_5000 | at & 0xfff,
    }
}

/// Returns an address well inside of the window.
pub(crate) fn interior(r: &mut Random) -> u64 {
    match r.below(4) {
        0 => WINDOW + 0x400 + r.below(0x1800),
        1 => WINDOW + 0xfc0 + r.below(64),
        _ => WINDOW + 0x400 + r.below(0xc0) * 32,
    }
}

impl Operands<'_> {
    /// Fills in all operands except branch targets. `None` if a kind of operand is not supported.
    pub(crate) fn fill(&mut self, code: Code) -> Option<Instruction> {
        let op = code.op_code();
        let mut i = Instruction::default();
        i.set_code(code);
        let use_memory = self.r.one_in(2);
        self.narrow = self.r.one_in(12);
        for n in 0..op.op_count() {
            self.operand(&mut i, n, op.op_kind(n), use_memory)?;
        }
        Some(i)
    }

    fn number(&mut self) -> u32 {
        match (self.block, self.mode) {
            (true, Mode::Bits64) => self.r.pick(&FREE),
            (true, Mode::Bits32) => self.r.pick(&FREE32),
            (false, _) => self.r.below(self.registers()) as u32,
        }
    }

    /// Returns how many registers of a kind there are.
    fn registers(&self) -> u64 {
        match self.mode {
            Mode::Bits64 => 16,
            Mode::Bits32 => 8,
        }
    }

    /// Returns the register that addresses memory.
    fn pointer(&self, register: Register) -> Register {
        match self.mode {
            Mode::Bits64 => register,
            Mode::Bits32 => Register::EAX + register.number() as u32,
        }
    }

    fn byte(&mut self) -> Register {
        let mut n = self.number();
        if self.mode == Mode::Bits32 {
            n &= 3;
            if self.block {
                n = n.min(2);
            }
        }
        match n {
            // AH, CH or DH. BH is a part of a pointer.
            0..3 if self.r.one_in(4) => Register::AH + n,
            3 if self.r.one_in(2) => Register::BH,
            0..4 => Register::AL + n,
            _ => Register::SPL + (n - 4),
        }
    }

    fn operand(&mut self, i: &mut Instruction, n: u32, kind: K, use_memory: bool) -> Option<()> {
        let any = self.number();
        let vector = self.r.below(self.registers()) as u32;
        let register = match kind {
            K::mem | K::mem_offs | K::mem_mib => {
                return self.memory(i, n, kind == K::mem_offs);
            }
            K::mem_vsib32x | K::mem_vsib64x => return self.vsib(i, n, Register::XMM0 + vector),
            K::mem_vsib32y | K::mem_vsib64y => return self.vsib(i, n, Register::YMM0 + vector),
            K::r8_or_mem
            | K::r16_or_mem
            | K::r32_or_mem
            | K::r64_or_mem
            | K::mm_or_mem
            | K::xmm_or_mem
            | K::ymm_or_mem
                if use_memory =>
            {
                return self.memory(i, n, false);
            }
            K::r8_or_mem | K::r8_reg | K::r8_opcode => self.byte(),
            K::r16_or_mem | K::r16_reg | K::r16_reg_mem | K::r16_rm | K::r16_opcode => {
                Register::AX + any
            }
            K::r32_or_mem
            | K::r32_reg
            | K::r32_reg_mem
            | K::r32_rm
            | K::r32_opcode
            | K::r32_vvvv => Register::EAX + any,
            K::r64_or_mem
            | K::r64_reg
            | K::r64_reg_mem
            | K::r64_rm
            | K::r64_opcode
            | K::r64_vvvv => Register::RAX + any,
            K::mm_or_mem | K::mm_reg | K::mm_rm => Register::MM0 + vector % 8,
            K::xmm_or_mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 => {
                Register::XMM0 + vector
            }
            K::ymm_or_mem | K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 => {
                Register::YMM0 + vector
            }
            K::seg_reg => Register::ES + self.r.below(6) as u32,
            K::es => Register::ES,
            K::cs => Register::CS,
            K::ss => Register::SS,
            K::ds => Register::DS,
            K::fs => Register::FS,
            K::gs => Register::GS,
            K::al => Register::AL,
            K::cl => Register::CL,
            K::ax => Register::AX,
            K::eax => Register::EAX,
            K::rax => Register::RAX,
            K::st0 => Register::ST0,
            K::sti_opcode => Register::ST0 + vector % 8,
            _ => return self.other(i, n, kind),
        };
        i.set_op_kind(n, OpKind::Register);
        i.set_op_register(n, register);
        Some(())
    }

    /// Fills in immediates, branch targets (whose values come later) and implicit memory.
    fn other(&mut self, i: &mut Instruction, n: u32, kind: K) -> Option<()> {
        let width = match self.mode {
            Mode::Bits64 => 64,
            Mode::Bits32 => 32,
        } >> u32::from(self.narrow);
        let r = &mut *self.r;
        match kind {
            K::imm8 | K::imm8_const_1 | K::imm4_m2z => {
                let v = if kind == K::imm8_const_1 {
                    1
                } else {
                    r.next() as u8
                };
                if n > 0 && matches!(i.op_kind(n - 1), OpKind::Immediate8 | OpKind::Immediate16) {
                    i.set_op_kind(n, OpKind::Immediate8_2nd);
                    i.set_immediate8_2nd(v);
                } else {
                    i.set_op_kind(n, OpKind::Immediate8);
                    i.set_immediate8(v);
                }
            }
            K::imm8sex16 => {
                i.set_op_kind(n, OpKind::Immediate8to16);
                i.set_immediate8to16(i16::from(r.next() as i8));
            }
            K::imm8sex32 => {
                i.set_op_kind(n, OpKind::Immediate8to32);
                i.set_immediate8to32(i32::from(r.next() as i8));
            }
            K::imm8sex64 => {
                i.set_op_kind(n, OpKind::Immediate8to64);
                i.set_immediate8to64(i64::from(r.next() as i8));
            }
            K::imm16 => {
                i.set_op_kind(n, OpKind::Immediate16);
                i.set_immediate16(r.integer() as u16);
            }
            K::imm32 => {
                i.set_op_kind(n, OpKind::Immediate32);
                i.set_immediate32(r.integer() as u32);
            }
            K::imm32sex64 => {
                i.set_op_kind(n, OpKind::Immediate32to64);
                i.set_immediate32to64(i64::from(r.integer() as i32));
            }
            K::imm64 => {
                i.set_op_kind(n, OpKind::Immediate64);
                i.set_immediate64(r.integer());
            }
            K::br16_1 | K::br16_2 => {
                i.set_op_kind(n, OpKind::NearBranch16);
                i.set_near_branch16(CODE as u16);
            }
            K::br64_1 | K::br64_4 => {
                i.set_op_kind(n, OpKind::NearBranch64);
                i.set_near_branch64(CODE);
            }
            K::br32_1 | K::br32_4 => {
                i.set_op_kind(n, OpKind::NearBranch32);
                i.set_near_branch32(CODE as u32);
            }
            K::seg_rDI => i.set_op_kind(
                n,
                match width {
                    64 => OpKind::MemorySegRDI,
                    32 => OpKind::MemorySegEDI,
                    _ => OpKind::MemorySegDI,
                },
            ),
            K::es_rDI => i.set_op_kind(
                n,
                match width {
                    64 => OpKind::MemoryESRDI,
                    32 => OpKind::MemoryESEDI,
                    _ => OpKind::MemoryESDI,
                },
            ),
            K::seg_rSI => i.set_op_kind(
                n,
                match width {
                    64 => OpKind::MemorySegRSI,
                    32 => OpKind::MemorySegESI,
                    _ => OpKind::MemorySegSI,
                },
            ),
            K::seg_rBX_al => {
                i.set_op_kind(n, OpKind::Memory);
                i.set_memory_base(self.pointer(Register::RBX));
                i.set_memory_index(Register::AL);
            }
            _ => return None,
        }
        Some(())
    }

    /// Fills in the memory operand of a gather. The address is the base's; the caller sets the indices.
    fn vsib(&mut self, i: &mut Instruction, n: u32, index: Register) -> Option<()> {
        i.set_op_kind(n, OpKind::Memory);
        i.set_memory_base(self.pointer(Register::RBX));
        i.set_memory_index(index);
        i.set_memory_index_scale(1 << self.r.below(4));
        i.set_memory_displ_size(1);
        i.set_memory_displacement64(self.r.below(4) * 16);
        self.vector_index = Some(index);
        (!self.block).then_some(())
    }

    fn memory(&mut self, i: &mut Instruction, n: u32, absolute: bool) -> Option<()> {
        i.set_op_kind(n, OpKind::Memory);
        if self.r.one_in(16) {
            let segment = self
                .r
                .pick(&[Register::ES, Register::CS, Register::SS, Register::DS]);
            i.set_segment_prefix(segment);
        }
        if self.block {
            let base = match self.r.below(6) {
                0 => Register::RSP,
                n => POINTERS[n as usize % 4],
            };
            i.set_memory_base(self.pointer(base));
            i.set_memory_displ_size(1);
            i.set_memory_displacement64(self.r.below(64) * 2);
            return (!absolute).then_some(());
        }
        let target = match self.mode {
            Mode::Bits64 => address(self.r),
            Mode::Bits32 => address32(self.r),
        };
        self.target = Some(target);
        if self.mode == Mode::Bits32 {
            if absolute || self.r.one_in(12) {
                i.set_memory_displ_size(4);
                i.set_memory_displacement64(target);
            } else if self.r.one_in(24) {
                self.address16(i);
            } else {
                self.address32(i, target);
            }
            return Some(());
        }
        if absolute {
            i.set_memory_displ_size(8);
            i.set_memory_displacement64(target);
            return Some(());
        }
        let low = target >> 31 == 0;
        match self.r.below(16) {
            0 if low => {
                i.set_memory_base(Register::RIP);
                i.set_memory_displ_size(8);
                i.set_memory_displacement64(target);
            }
            1 if low => {
                i.set_memory_displ_size(8);
                i.set_memory_displacement64(target);
            }
            2 if low => self.address32(i, target),
            _ => self.address64(i, target),
        }
        Some(())
    }

    fn displacement(&mut self, i: &mut Instruction) -> u64 {
        match self.r.below(3) {
            0 => {
                i.set_memory_displ_size(0);
                0
            }
            1 => {
                let d = self.r.next() as i8 as i64 as u64;
                i.set_memory_displ_size(1);
                i.set_memory_displacement64(d);
                d
            }
            _ => {
                let d = self.r.next() as i32 as i64 as u64;
                i.set_memory_displ_size(8);
                i.set_memory_displacement64(d);
                d
            }
        }
    }

    /// Fills in a base, or a base and an index, and sets these registers so that the address is `target`.
    fn address64(&mut self, i: &mut Instruction, target: u64) {
        let d = self.displacement(i);
        let base = self.r.below(16) as usize;
        i.set_memory_base(Register::RAX + base as u32);
        let index = self.r.below(16) as usize;
        let mut from_index = 0;
        if self.r.one_in(3) && base != reg::RSP && index != reg::RSP && index != base {
            let scale = self.r.below(4) as u32;
            i.set_memory_index(Register::RAX + index as u32);
            i.set_memory_index_scale(1 << scale);
            from_index = self.gpr[index] << scale;
        }
        self.gpr[base] = target.wrapping_sub(d).wrapping_sub(from_index);
    }

    /// Does the same for an address size of 32 bits, to which the upper halves of registers do not matter.
    fn address32(&mut self, i: &mut Instruction, target: u64) {
        let d = self.displacement(i);
        if i.memory_displ_size() == 8 {
            i.set_memory_displ_size(4);
            i.set_memory_displacement64(d & 0xffff_ffff);
        }
        let base = self.r.below(self.registers()) as usize;
        i.set_memory_base(Register::EAX + base as u32);
        let index = self.r.below(self.registers()) as usize;
        let mut from_index = 0;
        if self.r.one_in(3) && base != reg::RSP && index != reg::RSP && index != base {
            let scale = self.r.below(4) as u32;
            i.set_memory_index(Register::EAX + index as u32);
            i.set_memory_index_scale(1 << scale);
            from_index = self.gpr[index] << scale;
        }
        let low = target.wrapping_sub(d).wrapping_sub(from_index) & 0xffff_ffff;
        let upper = if base == reg::RSP {
            0
        } else {
            self.gpr[base] & !0xffff_ffff
        };
        self.gpr[base] = upper | low;
    }

    /// Fills in an address of 16 bits, which is in the first 64 KiB, where nothing is mapped.
    fn address16(&mut self, i: &mut Instruction) {
        self.target = None;
        let (base, index) = self.r.pick(&BASES16);
        i.set_memory_base(base);
        i.set_memory_index(index);
        let d = self.r.next() as u16;
        i.set_memory_displ_size(2);
        i.set_memory_displacement64(d.into());
    }
}
