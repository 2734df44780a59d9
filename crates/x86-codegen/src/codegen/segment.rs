//! Addresses in segments: the offset is compared with the limit, then the base is added. The interpreter executes what
//! may be beyond the limit.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use x86_defs::{reg, rflags, segment::Attr};

use super::{Emit, Flags, Stub, Translator, Unsupported, has_short_address, memory::Finds};
use crate::{
    asm::*,
    frame::requests,
    frame::words::*,
    ir::decoded::Decoded,
    ir::lowering::{Lowering, pointer_segment},
    ir::mode::Mode,
};

impl Translator {
    /// Loads r14 with the linear address of the memory operand's `size` bytes. Changes flags.
    pub(super) fn address_in_segment(&mut self, d: &Decoded, size: u32) -> Emit {
        let segment = d.i.memory_segment();
        if !segment.is_segment_register() {
            return Err(Unsupported);
        }
        self.offset_in_segment(&d.i)?;
        let has_selector = matches!(d.kind, Lowering::LoadPointer | Lowering::FarBranch);
        if has_selector && has_short_address(&d.i) {
            // The selector behind the offset is at its own address of 16 bits, also where the segment is larger.
            self.asm.alu_imm(false, Alu::Cmp, S0, 0x10000 - size as i32);
            self.bail_if(cc::A, d.offset);
        }
        self.add_base(d.offset, segment.number(), size);
        Ok(())
    }

    /// Loads r14 with the memory operand's offset in its segment.
    fn offset_in_segment(&mut self, i: &Instruction) -> Emit {
        let (m, _) = self.effective(i, 0, true)?;
        self.asm.rm(false, &[0x8d], S0, m); // lea
        if has_short_address(i) {
            self.asm.rr(false, &[0x0f, 0xb7], S0, S0); // movzx
        }
        Ok(())
    }

    /// Turns the offset of `size` bytes in segment `n`, in r14, into their linear address.
    pub(super) fn add_base(&mut self, offset: u32, n: usize, size: u32) {
        self.asm.alu(false, Alu::Cmp, S0, bound(n, size));
        self.bail_if(cc::A, offset);
        self.asm.alu(false, Alu::Add, S0, segment_base(n));
    }

    /// Loads r14 with the address of the word of the stack at `r + disp`. In code with segments this changes flags.
    pub(super) fn stack_address(&mut self, offset: u32, r: Reg, disp: i32) {
        self.stack_bytes(offset, (r, disp), self.word() as u32);
    }

    /// Does the same for `size` bytes.
    pub(super) fn stack_bytes(&mut self, offset: u32, (r, disp): (Reg, i32), size: u32) {
        self.lea_word(S0, at(r, disp));
        if !self.input.mode.has(Mode::SEGMENTED) {
            return;
        }
        if self.input.mode.has(Mode::STACK16) {
            self.asm.rr(false, &[0x0f, 0xb7], S0, S0); // movzx
        }
        self.add_base(offset, reg::SS, size);
    }

    /// Translates MOV to a segment register, LDS and others of its kind, in real mode and virtual-8086 mode.
    pub(super) fn load_real_segment(&mut self, d: &Decoded) -> Emit {
        if d.kind == Lowering::LoadPointer {
            return self.load_pointer(d);
        }
        if d.i.op1_kind() == OpKind::Memory {
            let operand = self.operand(d, 2, false, false, Finds::Address)?;
            self.asm.rm(false, &[0x0f, 0xb7], S1, operand); // movzx
        } else {
            let n = d.i.op1_register().full_register().number() as u8;
            let r = host_reg(n).ok_or(Unsupported)?;
            self.spill_flags(d);
            self.asm.rr(false, &[0x0f, 0xb7], S1, r);
        }
        self.state.cached = None;
        self.load_segment(d.i.op0_register().number());
        Ok(())
    }

    fn load_pointer(&mut self, d: &Decoded) -> Emit {
        let segment = pointer_segment(d.i.code()).ok_or(Unsupported)?;
        let size = d.i.op0_register().size();
        let r = host_reg(d.i.op0_register().full_register().number() as u8).ok_or(Unsupported)?;
        let operand = self.operand(d, size as u32 + 2, false, false, Finds::Address)?;
        self.state.cached = None;
        let a = &mut self.asm;
        let behind = Mem {
            disp: operand.disp + size as i32,
            ..operand
        };
        a.rm(false, &[0x0f, 0xb7], S1, behind); // movzx
        if size == 2 {
            a.bytes(&[0x66]);
        }
        a.rm(false, &[0x8b], r, operand); // mov
        self.load_segment(segment.number());
        Ok(())
    }

    /// Translates PUSH of a segment register, and POP of one in real mode.
    pub(super) fn segment_on_stack(&mut self, d: &Decoded) {
        let n = d.i.op0_register().number();
        let is_push = d.kind != Lowering::PopSegment;
        let disp = if is_push { -self.word() } else { 0 };
        let place = self.stack_slot(d, GUEST_RSP, disp, is_push);
        self.state.cached = None;
        let from = if is_push { selector(n) } else { at(S0, place) };
        self.asm.rm(false, &[0x0f, 0xb7], S1, from); // movzx
        if is_push {
            if d.kind == Lowering::PushSelector {
                self.asm.store16(at(S0, place), S1);
            } else {
                self.store_word(at(S0, place), S1);
            }
            self.state.rsp_moves -= self.word();
        } else {
            self.load_segment(n);
            self.state.rsp_moves += self.word();
        }
    }

    /// Loads r14 with the selector that is the instruction's first or second operand, or on the stack.
    fn load_selector(&mut self, d: &Decoded, operand: u32) -> Emit {
        self.flags_in_memory();
        if d.i.op_kind(operand) == OpKind::Memory {
            let operand = self.operand(d, 2, false, false, Finds::Address)?;
            self.asm.rm(false, &[0x0f, 0xb7], S0, operand); // movzx
        } else {
            let n = d.i.op_register(operand).full_register().number() as u8;
            match host_reg(n) {
                Some(r) => self.asm.rr(false, &[0x0f, 0xb7], S0, r),
                None => self.asm.rm(false, &[0x0f, 0xb7], S0, gpr_slot(n)),
            }
        }
        self.state.cached = None;
        Ok(())
    }

    /// Translates MOV to ES, DS, FS or GS, and POP of them, in protected mode.
    pub(super) fn load_data_segment(&mut self, d: &Decoded) -> Emit {
        let pops = d.i.op_count() == 1;
        if pops {
            self.flags_in_memory();
            let place = self.stack_slot(d, GUEST_RSP, 0, false);
            self.asm.rm(false, &[0x0f, 0xb7], S0, at(S0, place)); // movzx
            self.state.cached = None;
        } else {
            self.load_selector(d, 1)?;
        }
        let n = d.i.op0_register().number();
        let a = &mut self.asm;
        a.mov_imm(S1, requests::segment(d.offset, n).into());
        a.call_to(self.trampolines.switch);
        if pops {
            self.move_stack(self.word());
        }
        let a = &mut self.asm;
        // cmovne rsp, gs:[STACK]
        a.alu_imm(false, Alu::Cmp, S0, requests::SAME_KEY as i32);
        a.rm(true, &[0x0f, 0x45], RSP, gs(STACK));
        let is_same = a.jcc(cc::E);
        self.go_on_behind(d);
        let here = self.asm.here();
        self.asm.patch(is_same, here);
        Ok(())
    }

    /// Translates VERR, VERW, LAR and LSL.
    pub(super) fn ask_about_selector(&mut self, d: &Decoded) -> Emit {
        let n = match d.i.mnemonic() {
            Mnemonic::Verw => requests::VERW,
            Mnemonic::Lar => requests::LAR,
            Mnemonic::Lsl => requests::LSL,
            _ => requests::VERR,
        };
        let has_result = matches!(n, requests::LAR | requests::LSL);
        self.load_selector(d, has_result.into())?;
        let a = &mut self.asm;
        a.mov_imm(S1, requests::segment(d.offset, n).into());
        a.call_to(self.trampolines.call);
        a.alu_imm(false, Alu::Cmp, S0, requests::NOT_KNOWN as i32);
        let from = a.jcc(cc::E);
        a.load32(S1, SHORT_FLAGS);
        a.alu_imm(false, Alu::And, S1, !(requests::ZERO_FLAG as i32));
        a.alu_rr(false, Alu::Or, S1, S0);
        a.store32(SHORT_FLAGS, S1);
        self.state.flags = Flags::Memory;
        let offset = d.offset;
        self.stubs.push(Stub::Call { from, offset });
        if has_result {
            self.take_upper_half(d.i.op0_register());
        }
        Ok(())
    }

    /// Loads a general register with the upper half of r13, if the lower one is not 0.
    fn take_upper_half(&mut self, to: Register) {
        let n = to.full_register().number() as u8;
        let is_word = to.size() == 2;
        let a = &mut self.asm;
        a.rr(false, &[0x85], S0, S0); // test
        let is_unchanged = a.jcc(cc::E);
        a.shift(true, 5, S0, 32);
        match host_reg(n) {
            Some(r) => {
                if is_word {
                    a.bytes(&[0x66]);
                }
                a.rr(false, &[0x8b], r, S0);
            }
            None if is_word => a.store16(gpr_slot(n), S0),
            None => a.store(gpr_slot(n), S0),
        }
        let here = a.here();
        a.patch(is_unchanged, here);
    }

    /// Loads segment register `n` with the selector in r13 as real mode does: the limit stays, and the size. In
    /// virtual-8086 mode, the attributes are what they always are there. Changes flags.
    fn load_segment(&mut self, n: usize) {
        const SIZE: u32 = Attr::G | Attr::DB | Attr::AVL;
        const DATA: u32 = 0x93;
        let is_kernel = self.input.mode.has(Mode::KERNEL);
        let a = &mut self.asm;
        a.store16(selector(n), S1);
        let is_virtual = (!is_kernel).then(|| {
            a.rm(false, &[0xf7], 0, gs(RFLAGS)); // test
            a.bytes(&(rflags::VM as u32).to_le_bytes());
            a.jcc(cc::NE)
        });
        for (group, bits) in [(4, SIZE), (1, DATA)] {
            // and, or
            a.rm(false, &[0x81], group, segment_attr(n));
            a.bytes(&bits.to_le_bytes());
        }
        let here = a.here();
        is_virtual.into_iter().for_each(|from| a.patch(from, here));
        a.shift(false, 4, S1, 4);
        a.store(segment_base(n), S1);
    }

    /// Leaves a call of another page to the interpreter, before it writes anything, unless it leads to an instruction
    /// pointer within CS. Changes flags.
    pub(super) fn compare_target(&mut self, offset: u32, target: i32) {
        if !self.input.mode.has(Mode::SEGMENTED) {
            return;
        }
        self.state.cached = None;
        let a = &mut self.asm;
        a.load(S1, SHORT_PAGE);
        a.lea(S1, at(S1, target));
        a.load32(S0, bound(reg::CS, 1));
        a.alu_rr(true, Alu::Cmp, S1, S0);
        self.bail_if(cc::A, offset);
        if self.input.mode.has(Mode::BITS16) {
            self.asm.alu_imm(true, Alu::Cmp, S1, 0xffff);
            self.bail_if(cc::A, offset);
        }
    }

    /// Translates LEA, which ignores segments.
    pub(super) fn lea_in_segment(&mut self, d: &Decoded) -> Emit {
        let to = d.i.op0_register();
        self.offset_in_segment(&d.i)?;
        let r = host_reg(to.full_register().number() as u8).ok_or(Unsupported)?;
        if to.size() == 2 {
            self.asm.bytes(&[0x66]);
        }
        self.asm.rr(false, &[0x8b], r, S0);
        Ok(())
    }
}
