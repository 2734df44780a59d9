//! Generates the stub of one instruction.
//!
//! Calling convention: r8 = FP area, r9 = general registers, r10 = [`Context`];
//! r8 to r10, r11 and everything volatile in the System V ABI is clobbered.
//! Only the registers that the instruction names are loaded and stored.

use core::mem::offset_of;

use iced_x86::{
    Encoder, IcedError, Instruction, InstructionInfoFactory, MemoryOperand, OpAccess, OpKind,
    Register, code_asm::*,
};
use x86_defs::xsave;

use crate::{
    Context,
    allow::{Class, Form, vector_number},
};

/// Registers of general operands, in the order of use: volatile and not used by the convention.
const GPR_POOL: [Register; 2] = [Register::RSI, Register::RDI];

/// A rewritten instruction: what the host will execute.
#[derive(Debug)]
pub(crate) struct Rewritten {
    instruction: Instruction,
    /// Guest register numbers, and the host registers in their place.
    gprs: Vec<(usize, Register)>,
}

impl Rewritten {
    /// Appends the guest's registers, which tell stubs with the same encoding apart.
    pub(crate) fn push_key(&self, key: &mut Vec<u8>) {
        key.extend(self.gprs.iter().map(|g| g.0 as u8));
    }
}

/// Replaces the memory operand by the operand buffer and general registers by volatile ones.
pub(crate) fn rewrite(guest: &Instruction) -> Option<Rewritten> {
    let mut i = *guest;
    let mut gprs: Vec<(usize, Register)> = Vec::new();
    for n in 0..i.op_count() {
        match i.op_kind(n) {
            OpKind::Memory => {
                i.set_memory_base(Register::R10);
                i.set_memory_index(Register::None);
                i.set_memory_index_scale(1);
                i.set_memory_displacement64(offset_of!(Context, mem) as u64);
                i.set_memory_displ_size(1);
                i.set_segment_prefix(Register::None);
            }
            OpKind::Register if i.op_register(n).is_gpr() => {
                let r = i.op_register(n);
                let number = r.number();
                let full = match number {
                    0 => Register::RAX,
                    1 => Register::RCX,
                    2 => Register::RDX,
                    _ => match gprs.iter().find(|g| g.0 == number) {
                        Some(g) => g.1,
                        None => *GPR_POOL.iter().find(|p| gprs.iter().all(|g| g.1 != **p))?,
                    },
                };
                let named = match r.size() {
                    8 => full,
                    4 => Register::EAX + full.number() as u32,
                    _ => return None,
                };
                i.set_op_register(n, named);
                if !gprs.iter().any(|g| g.0 == number) {
                    gprs.push((number, full));
                }
            }
            OpKind::Register | OpKind::Immediate8 | OpKind::Immediate8_2nd => {}
            _ => return None,
        }
    }
    i.set_has_rep_prefix(false);
    i.set_has_repne_prefix(false);
    Some(Rewritten {
        instruction: i,
        gprs,
    })
}

/// Encodes the rewritten instruction: the key of the stub cache.
pub(crate) fn encode(encoder: &mut Encoder, r: &Rewritten) -> Option<Vec<u8>> {
    encoder.encode(&r.instruction, 0).ok()?;
    Some(encoder.take_buffer())
}

/// Generates the stub around `bytes`, the encoding of `r`.
pub(crate) fn generate(
    r: &mut Rewritten,
    bytes: &[u8],
    form: Form,
    info: &mut InstructionInfoFactory,
) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let mut vectors: Vec<(usize, bool)> = Vec::new();
    let mut written_gprs = Vec::new();
    for u in info.info(&r.instruction).used_registers() {
        let written = !matches!(u.access(), OpAccess::Read | OpAccess::CondRead);
        if let Some(n) = vector_number(u.register()) {
            match vectors.iter_mut().find(|v| v.0 == n) {
                Some(v) => v.1 |= written,
                None => vectors.push((n, written)),
            }
        } else if u.register().is_gpr() {
            let full = u.register().full_register();
            if full == Register::R10 {
                continue;
            }
            if !r.gprs.iter().any(|g| g.1 == full) {
                // Implicit operands: RAX, RCX and RDX of the string comparisons.
                r.gprs.push((full.number(), full));
            }
            if written {
                written_gprs.push(full);
            }
        }
    }
    let ymm = form.class == Class::Vex;
    let uses_fxsave = matches!(form.class, Class::X87 | Class::Mmx);

    if uses_fxsave {
        a.fxrstor64(ptr(r8))?;
        if form.uses_mxcsr {
            a.ldmxcsr(dword_ptr(r10 + offset_of!(Context, mxcsr)))?;
        }
    } else {
        let wide = ymm && uses_ymm(&r.instruction);
        for &(n, _) in &vectors {
            load(&mut a, n, ymm, wide)?;
        }
    }
    if form.reads_flags {
        a.push(qword_ptr(r10 + offset_of!(Context, rflags)))?;
        a.popfq()?;
    }
    for &(n, host) in &r.gprs {
        a.add_instruction(Instruction::with2(
            iced_x86::Code::Mov_r64_rm64,
            host,
            MemoryOperand::with_base_displ(Register::R9, 8 * n as i64),
        )?)?;
    }
    a.db(bytes)?;
    for &(n, host) in r.gprs.iter().filter(|g| written_gprs.contains(&g.1)) {
        a.add_instruction(Instruction::with2(
            iced_x86::Code::Mov_rm64_r64,
            MemoryOperand::with_base_displ(Register::R9, 8 * n as i64),
            host,
        )?)?;
    }
    if form.writes_flags {
        a.pushfq()?;
        a.pop(qword_ptr(r10 + offset_of!(Context, rflags)))?;
    }
    if uses_fxsave {
        if form.uses_mxcsr {
            a.stmxcsr(dword_ptr(r10 + offset_of!(Context, mxcsr)))?;
        }
        a.fxsave64(ptr(r8))?;
        a.fninit()?;
        a.fldcw(word_ptr(r10 + offset_of!(Context, host_fcw)))?;
        a.ldmxcsr(dword_ptr(r10 + offset_of!(Context, host_mxcsr)))?;
    } else {
        for &(n, _) in vectors.iter().filter(|v| v.1) {
            store(&mut a, n, ymm)?;
        }
        if ymm {
            a.vzeroupper()?;
        }
    }
    a.ret()?;
    a.assemble(0)
}

fn uses_ymm(i: &Instruction) -> bool {
    (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Register && i.op_register(n).is_ymm())
}

fn load(a: &mut CodeAssembler, n: usize, vex: bool, wide: bool) -> Result<(), IcedError> {
    use iced_x86::Code;
    let low = MemoryOperand::with_base_displ(Register::R8, (xsave::XMM0 + 16 * n) as i64);
    let high = MemoryOperand::with_base_displ(Register::R8, (xsave::YMM_HI + 16 * n) as i64);
    let x = Register::XMM0 + n as u32;
    let y = Register::YMM0 + n as u32;
    let code = if vex {
        Code::VEX_Vmovups_xmm_xmmm128
    } else {
        Code::Movups_xmm_xmmm128
    };
    a.add_instruction(Instruction::with2(code, x, low)?)?;
    if wide {
        a.add_instruction(Instruction::with4(
            Code::VEX_Vinsertf128_ymm_ymm_xmmm128_imm8,
            y,
            y,
            high,
            1,
        )?)?;
    }
    Ok(())
}

fn store(a: &mut CodeAssembler, n: usize, vex: bool) -> Result<(), IcedError> {
    use iced_x86::Code;
    let low = MemoryOperand::with_base_displ(Register::R8, (xsave::XMM0 + 16 * n) as i64);
    let high = MemoryOperand::with_base_displ(Register::R8, (xsave::YMM_HI + 16 * n) as i64);
    let x = Register::XMM0 + n as u32;
    let code = if vex {
        Code::VEX_Vmovups_xmmm128_xmm
    } else {
        Code::Movups_xmmm128_xmm
    };
    a.add_instruction(Instruction::with2(code, low, x)?)?;
    if vex {
        a.add_instruction(Instruction::with3(
            Code::VEX_Vextractf128_xmmm128_ymm_imm8,
            high,
            Register::YMM0 + n as u32,
            1,
        )?)?;
    }
    Ok(())
}
