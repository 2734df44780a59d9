//! Instructions that kernels execute often: flags, interrupts, time, per-CPU segments, control registers.

use iced_x86::Mnemonic;
use x86_defs::{
    control::{cr0, cr4},
    rflags,
};

use super::{
    Emit, Flags, Stub, Translator,
    copy::{drop_hints, register, set_operand},
    countdown::exact,
};
use crate::{
    asm::*, frame::requests, frame::words::*, ir::decoded::Decoded, ir::lowering::Lowering,
    ir::mode::Mode,
};

/// RFLAGS bits that an inline POPF may not change.
const STEADY: i32 = 0x3f_7500;

impl Translator {
    pub(super) fn bail_if(&mut self, cc: u8, offset: u32) {
        let from = self.asm.jcc(cc);
        self.stubs.push(Stub::Bail { from, offset });
    }

    /// BT, BTS, BTR, BTC: moves the operand to the word that has the bit.
    pub(super) fn bit_string(&mut self, d: &Decoded) -> Emit {
        let source = d.i.op1_register();
        let wide = source.size() == 8;
        let (shift, scale, bits) = if wide { (6, 3, 63) } else { (5, 2, 31) };
        self.spill_flags(d);
        self.address(d, 0, if wide { 8 } else { 4 })?;
        let r = self.read_register(source, S1);
        if wide {
            self.asm.mov(S1, r);
        } else {
            self.asm.rr(true, &[0x63], S1, r); // movsxd
        }
        self.asm.shift(true, 7, S1, shift);
        self.lea_word(S0, at(S0, 0).plus(S1, scale));
        if d.i.has_lock_prefix() {
            self.bail_if_misaligned(d.offset, if wide { 8 } else { 4 });
        }
        self.probe(
            d.offset,
            if wide { 8 } else { 4 },
            d.i.mnemonic() != Mnemonic::Bt,
        );
        let r = self.read_register(source, S1);
        self.asm.mov(S1, r);
        self.asm.alu_imm(false, Alu::And, S1, bits);
        if d.live_in != 0 {
            self.asm.store(gs(SPILL), S1);
            self.flags_in_register();
            self.asm.load(S1, gs(SPILL));
        }
        self.state.flags = Flags::Register;
        let mut out = d.i;
        set_operand(&mut out, at(S0, 0));
        drop_hints(&mut out);
        out.set_op1_register(register(S1, source.size()));
        self.encode(&out)
    }

    /// MOV from a control register, SGDT, SIDT.
    pub(super) fn read_system_register(&mut self, d: &Decoded) -> Emit {
        match d.kind {
            Lowering::FromControl => self.control_to_general(d),
            _ => self.store_table(d),
        }
    }

    /// Translates SGDT and SIDT, which store the limit and then the base. Both are stored if they are on one page.
    fn store_table(&mut self, d: &Decoded) -> Emit {
        let limit_and_base = if d.i.mnemonic() == Mnemonic::Sgdt {
            GDTR
        } else {
            IDTR
        };
        self.spill_flags(d);
        let size = 2 + self.word() as u32;
        self.address(d, 0, size)?;
        self.probe(d.offset, size, true);
        let [limit, base] = limit_and_base;
        self.asm.load32(S1, gs(limit));
        self.asm.store16(at(S0, 0), S1);
        self.asm.load(S1, gs(base));
        self.store_word(at(S0, 2), S1);
        Ok(())
    }

    pub(super) fn rdtsc(&mut self, d: &Decoded) {
        self.spill_flags(d);
        let a = &mut self.asm;
        let waits = d.i.mnemonic() == Mnemonic::Rdtscp;
        if waits && a.isa().rdtscp {
            a.bytes(&[0x0f, 0x01, 0xf9]); // rdtscp
        } else {
            if waits {
                a.bytes(&[0x0f, 0xae, 0xe8]); // lfence
            }
            a.bytes(&[0x0f, 0x31]); // rdtsc
        }
        if waits {
            a.load32(RCX, gs(TSC_AUX));
        }
        a.shift(true, 4, RDX, 32);
        a.lea(RAX, at(RAX, 0).plus(RDX, 0));
        a.alu(true, Alu::Add, RAX, gs(TSC_OFFSET));
        a.mov(RDX, RAX);
        a.shift(true, 5, RDX, 32);
        a.mov32(RAX, RAX);
    }

    /// Translates RDPMC by a call of Rust. Code that counts stores what it has counted before this instruction first.
    pub(super) fn rdpmc(&mut self, d: &Decoded) {
        self.spill_flags(d);
        let ahead = self.state.tally.from(self.state.position);
        let counts = self.state.tally.counts();
        let a = &mut self.asm;
        if counts {
            exact::refund(a, ahead, S1);
            exact::keep(a);
        }
        a.mov32(S0, RCX);
        a.mov_imm(S1, (requests::RDPMC | d.offset).into());
        a.call_to(self.trampolines.call);
        if counts {
            exact::refund(a, -ahead, S1);
        }
        a.rr(true, &[0x85], S0, S0); // test
        let from = a.jcc(cc::S);
        a.mov32(RAX, S0);
        a.mov(RDX, S0);
        a.shift(true, 5, RDX, 32);
        let offset = d.offset;
        self.stubs.push(Stub::Call { from, offset });
    }

    /// Translates PUSHFD and PUSHFQ. VM and RF are pushed as 0.
    pub(super) fn pushf(&mut self, d: &Decoded) {
        self.flags_in_memory();
        let a = &mut self.asm;
        load_flags(a, S1);
        a.store(gs(SPILL), S0);
        let word = self.word();
        self.stack_address(d.offset, GUEST_RSP, -word);
        self.probe_stack(d.offset, true);
        self.asm.load(S1, gs(SPILL));
        self.store_word(at(S0, 0), S1);
        self.move_stack(-word);
    }

    /// Leaves for the interpreter if an interrupt could be taken once IF is set.
    fn bail_if_waiting(&mut self, offset: u32) {
        self.asm.load(S1, gs(REQUESTS));
        self.asm.alu_mem_imm8(false, Alu::Cmp, at(S1, 0), 0);
        self.bail_if(cc::NE, offset);
        self.asm.alu_mem_imm8(false, Alu::Cmp, gs(IRQ_WAITING), 0);
        self.bail_if(cc::NE, offset);
    }

    /// Translates POPFD and POPFQ. Those that change more than IF and arithmetic flags are the interpreter's.
    pub(super) fn popf(&mut self, d: &Decoded) {
        if self.input.mode.has(Mode::SEGMENTED) {
            self.stack_address(d.offset, GUEST_RSP, 0);
        } else {
            self.asm.rr(self.input.long, &[0x8b], S0, GUEST_RSP);
        }
        self.probe_stack(d.offset, false);
        self.load_word(S0, at(S0, 0));
        let word = self.word();
        let a = &mut self.asm;
        a.mov32(S1, S0);
        a.alu(false, Alu::Xor, S1, gs(RFLAGS));
        a.rr(false, &[0xf7], 0, S1); // test
        // POPF of 16 bits leaves the upper bits as they are.
        let mut steady = if word == 2 { STEADY & 0xffff } else { STEADY };
        let may_change_if = self.input.mode.has(Mode::KERNEL);
        if !may_change_if {
            steady |= rflags::IF as i32;
        }
        a.bytes(&steady.to_le_bytes());
        self.bail_if(cc::NE, d.offset);
        if may_change_if {
            self.change_if(d.offset);
        }
        self.move_stack(word);
        let a = &mut self.asm;
        // The arithmetic flags of bits 0 to 7 go to AH's place in the word, OF from bit 11 to AL's.
        a.mov32(S1, S0);
        a.shift(false, 4, S1, 8);
        a.alu_imm(false, Alu::And, S1, 0xff00);
        a.shift(false, 5, S0, 11);
        a.alu_imm(false, Alu::And, S0, 1);
        a.alu_rr(false, Alu::Or, S1, S0);
        a.store32(SHORT_FLAGS, S1);
        self.state.flags = Flags::Memory;
    }

    /// Sets IF to that of the flags in r14.
    fn change_if(&mut self, offset: u32) {
        let a = &mut self.asm;
        a.rr(false, &[0xf7], 0, S0);
        a.bytes(&(rflags::IF as u32).to_le_bytes());
        let disabled = a.jcc(cc::E);
        self.bail_if_waiting(offset);
        let a = &mut self.asm;
        set_if(a);
        let enabled = a.jmp();
        let here = a.here();
        a.patch(disabled, here);
        clear_if(a);
        let here = a.here();
        a.patch(enabled, here);
    }

    pub(super) fn sti(&mut self, d: &Decoded) {
        self.spill_flags(d);
        self.bail_if_waiting(d.offset);
        set_if(&mut self.asm);
    }

    pub(super) fn cli(&mut self, d: &Decoded) {
        self.spill_flags(d);
        clear_if(&mut self.asm);
    }

    pub(super) fn swapgs(&mut self) {
        let a = &mut self.asm;
        a.load(S0, gs(KERNEL_GS_BASE));
        a.load(S1, segment_base(5));
        a.store(segment_base(5), S0);
        a.store(gs(KERNEL_GS_BASE), S1);
    }

    /// Translates an instruction that changes the level, the address space or the mode, and goes on by the target
    /// table.
    pub(super) fn system_branch(&mut self, d: &Decoded) {
        match d.kind {
            Lowering::ToCr3 => self.load_root(d),
            Lowering::Clts => self.clear_task_switched(d),
            Lowering::InterruptReturn => self.interrupt_return(d),
            _ => self.system_call(d),
        }
    }

    /// Translates SYSCALL and SYSRETQ: a trampoline changes to the view of the other privilege level, then the code
    /// branches.
    fn system_call(&mut self, d: &Decoded) {
        self.flags_in_memory();
        let a = &mut self.asm;
        a.store(state_register(1), RCX);
        let [call, ret] = self.trampolines.levels;
        let (what, trampoline) = if d.kind == Lowering::Syscall {
            (requests::SYSCALL, call)
        } else {
            (requests::SYSRET, ret)
        };
        a.mov_imm(S1, (what | d.offset).into());
        a.call_to(trampoline);
        a.load(RCX, state_register(1));
        a.load(RSP, gs(STACK));
        self.jump(d.offset);
    }

    /// Translates IRETQ, to any level: Rust changes to that level's view, then the code branches.
    fn interrupt_return(&mut self, d: &Decoded) {
        self.flags_in_memory();
        let a = &mut self.asm;
        a.mov(S0, GUEST_RSP);
        a.mov_imm(S1, (requests::IRETQ | d.offset).into());
        a.call_to(self.trampolines.switch);
        a.load(GUEST_RSP, state_register(4));
        // cmovne rsp, gs:[STACK]
        a.alu_mem_imm8(true, Alu::Cmp, gs(SPILL), 0);
        a.rm(true, &[0x0f, 0x45], RSP, gs(STACK));
        self.jump(d.offset);
    }

    /// Translates MOV to CR3: goes on with the tables of another address space, by a branch to the next instruction.
    fn load_root(&mut self, d: &Decoded) {
        self.flags_in_memory();
        let n = d.i.op1_register().number() as u8;
        match host_reg(n) {
            Some(r) => self.asm.mov(S0, r),
            None => self.asm.load(S0, gpr_slot(n)),
        }
        self.asm.mov_imm(S1, d.offset.into());
        self.asm.call_to(self.trampolines.root);
        self.asm.load(RSP, gs(STACK));
        self.go_on_behind(d);
    }

    /// Translates an instruction that may do no more than select another view.
    pub(super) fn change_view(&mut self, d: &Decoded) {
        match d.kind {
            Lowering::ToCr0 => self.change_cr0(d),
            Lowering::KeyRights if d.i.mnemonic() == Mnemonic::Wrpkru => self.write_key_rights(d),
            Lowering::KeyRights => self.read_key_rights(d),
            _ => self.access_control(d),
        }
    }

    /// Translates MOV to CR0: selects another view if only WP changes; otherwise the mode changes, and a branch leads
    /// to the next instruction.
    fn change_cr0(&mut self, d: &Decoded) {
        let n = d.i.op1_register().number() as u8;
        self.flags_in_memory();
        match host_reg(n) {
            Some(r) => self.asm.rr(self.input.long, &[0x8b], S0, r),
            None => self.asm.rm(self.input.long, &[0x8b], S0, gpr_slot(n)),
        }
        self.call_to_cr0(d);
        let a = &mut self.asm;
        const { assert!(requests::OTHER_MODE < requests::SAME_KEY) };
        let is_same_mode = a.jcc(cc::AE);
        self.go_on_behind(d);
        let here = self.asm.here();
        self.asm.patch(is_same_mode, here);
    }

    /// Translates CLTS. If TS was set, the next instruction belongs to another mode.
    fn clear_task_switched(&mut self, d: &Decoded) {
        self.flags_in_memory();
        let a = &mut self.asm;
        a.load(S0, gs(CR0));
        a.alu_imm(true, Alu::And, S0, !(cr0::TS as i32));
        self.call_to_cr0(d);
        self.go_on_behind(d);
    }

    /// Makes r14 the new CR0. The host's flags then compare the answer with [`requests::SAME_KEY`].
    fn call_to_cr0(&mut self, d: &Decoded) {
        let a = &mut self.asm;
        a.mov_imm(S1, (requests::SET_CR0 | d.offset).into());
        a.call_to(self.trampolines.to_cr0);
        // cmovne rsp, gs:[STACK]
        a.alu_imm(false, Alu::Cmp, S0, requests::SAME_KEY as i32);
        a.rm(true, &[0x0f, 0x45], RSP, gs(STACK));
    }

    /// Branches to the next instruction through the target table, because mapping or mode may have changed.
    pub(super) fn go_on_behind(&mut self, d: &Decoded) {
        let a = &mut self.asm;
        a.load(S0, SHORT_PAGE);
        let next = d.offset as i32 + d.i.len() as i32;
        self.lea_word(S0, at(S0, next));
        self.jump(d.offset);
    }

    /// Translates STAC and CLAC, which select another view of the same tables.
    fn access_control(&mut self, d: &Decoded) {
        let set = d.i.mnemonic() == Mnemonic::Stac;
        let what = [requests::CLEAR_AC, requests::SET_AC][usize::from(set)];
        self.spill_flags(d);
        self.asm.mov_imm(S1, (what | d.offset).into());
        self.asm.call_to(self.trampolines.access[usize::from(set)]);
        // cmovne rsp, gs:[STACK]
        self.asm
            .alu_imm(false, Alu::Cmp, S0, requests::SAME_KEY as i32);
        self.asm.rm(true, &[0x0f, 0x45], RSP, gs(STACK));
    }

    /// Translates RDPKRU. If CR4.PKE is clear or ECX is not 0, the interpreter raises the exception.
    fn read_key_rights(&mut self, d: &Decoded) {
        self.spill_flags(d);
        self.asm.rr(false, &[0x85], RCX, RCX); // test
        self.bail_if(cc::NE, d.offset);
        self.asm.rm(false, &[0xf7], 0, gs(CR4)); // test
        self.asm.bytes(&(cr4::PKE as u32).to_le_bytes());
        self.bail_if(cc::E, d.offset);
        self.asm.load32(RAX, gs(PKRU));
        self.asm.alu_rr(false, Alu::Xor, RDX, RDX);
    }

    /// Translates WRPKRU, which selects another view of the same tables. If ECX or EDX is not 0, the interpreter raises
    /// the exception.
    fn write_key_rights(&mut self, d: &Decoded) {
        self.spill_flags(d);
        let a = &mut self.asm;
        a.mov32(S0, RCX);
        a.alu_rr(false, Alu::Or, S0, RDX);
        self.bail_if(cc::NE, d.offset);
        let a = &mut self.asm;
        a.mov32(S0, RAX);
        a.mov_imm(S1, (requests::SET_PKRU | d.offset).into());
        a.call_to(self.trampolines.key_rights);
        // cmovne rsp, gs:[STACK]
        a.alu_imm(false, Alu::Cmp, S0, requests::SAME_KEY as i32);
        a.rm(true, &[0x0f, 0x45], RSP, gs(STACK));
    }
}

/// Makes r14 RFLAGS with RF and VM clear. Arithmetic flags are in memory. Changes `by`, and flags.
pub(super) fn load_flags(a: &mut Asm, by: Reg) {
    a.load32(by, SHORT_FLAGS);
    a.mov32(S0, by);
    a.shift(false, 5, S0, 8);
    a.alu_imm(false, Alu::And, S0, 0xd5);
    a.alu_imm(false, Alu::And, by, 1);
    a.shift(false, 4, by, 11);
    a.alu_rr(false, Alu::Or, S0, by);
    a.load32(by, gs(RFLAGS));
    let cleared = (rflags::ARITH | rflags::RF | rflags::VM) as i32;
    a.alu_imm(false, Alu::And, by, !cleared);
    a.alu_rr(false, Alu::Or, S0, by);
}

/// Sets RFLAGS.IF. Changes flags.
fn set_if(a: &mut Asm) {
    a.rm(false, &[0x80], 1, gs(RFLAGS + 1)); // or
    a.bytes(&[0x02]);
}

/// Clears RFLAGS.IF. Changes flags.
fn clear_if(a: &mut Asm) {
    a.rm(false, &[0x80], 4, gs(RFLAGS + 1)); // and
    a.bytes(&[0xfd]);
}
