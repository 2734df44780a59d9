//! Programs of 32-bit code: those for 64-bit code with registers and addresses cut to 32 bits.

use std::{collections::HashMap, sync::OnceLock};

use iced_x86::{Code, Instruction, OpKind, Register as R};

use super::program::Element;

/// Makes an element one of 32-bit code. An instruction that does not exist there becomes a NOP.
pub(super) fn element(e: &mut Element) {
    for (n, i) in e.code.iter_mut().enumerate() {
        let address = e.fixes.iter().any(|f| f.0 == n && f.1.is_address());
        *i = instruction(i, address).unwrap_or_else(|| {
            let mut nop = Instruction::default();
            nop.set_code(Code::Nopd);
            nop
        });
    }
}

fn instruction(i: &Instruction, address: bool) -> Option<Instruction> {
    let mut out = *i;
    if address || matches!(i.code(), Code::Mov_r64_imm64) {
        let value = if address { 0 } else { i.immediate(1) as u32 };
        return Instruction::with2(Code::Mov_r32_imm32, register(i.op0_register()), value).ok();
    }
    if matches!(i.code(), Code::Syscall | Code::Swapgs) {
        return None;
    }
    let code = code_of(i.code())?;
    out.set_code(code);
    for n in 0..i.op_count() {
        match i.op_kind(n) {
            OpKind::Register => out.set_op_register(n, register(i.op_register(n))),
            OpKind::NearBranch64 => out.set_op_kind(n, OpKind::NearBranch32),
            OpKind::MemorySegRSI => out.set_op_kind(n, OpKind::MemorySegESI),
            OpKind::MemoryESRDI => out.set_op_kind(n, OpKind::MemoryESEDI),
            OpKind::Immediate8to64 => out.set_op_kind(n, OpKind::Immediate8to32),
            OpKind::Immediate32to64 => {
                let v = i.immediate(n) as u32;
                out.set_op_kind(n, OpKind::Immediate32);
                out.set_immediate32(v);
            }
            OpKind::Memory => {
                let base = match i.memory_base() {
                    R::RIP => R::None,
                    r => register(r),
                };
                let index = register(i.memory_index());
                if index == R::ESP {
                    return None;
                }
                let disp = i.memory_displacement64() & 0xffff_ffff;
                out.set_memory_base(base);
                out.set_memory_index(index);
                if i.memory_displ_size() == 8 || base == R::None && index == R::None {
                    out.set_memory_displ_size(4);
                }
                out.set_memory_displacement64(disp);
            }
            _ => {}
        }
    }
    Some(out)
}

/// Returns the register in 32-bit code.
fn register(r: R) -> R {
    let n = r.number() as u32 & 7;
    if r.is_gpr64() || r.is_gpr32() {
        R::EAX + n
    } else if r.is_gpr16() {
        R::AX + n
    } else if matches!(r, R::AH | R::CH | R::DH | R::BH) {
        r
    } else if r.is_gpr8() {
        R::AL + n
    } else if r.is_xmm() {
        R::XMM0 + n
    } else if r.is_ymm() {
        R::YMM0 + n
    } else {
        r
    }
}

/// Returns the form with words of 32 bits.
fn code_of(code: Code) -> Option<Code> {
    static NAMES: OnceLock<HashMap<String, Code>> = OnceLock::new();
    if code.op_code().mode32() {
        return Some(code);
    }
    let names = NAMES.get_or_init(|| Code::values().map(|c| (format!("{c:?}"), c)).collect());
    let name = format!("{code:?}")
        .replace("64", "32")
        .replace("RCX", "ECX")
        .replace("RAX", "EAX")
        .replace("Jrcxz", "Jecxz");
    let stem = [
        "Push", "Pushf", "Popf", "Retn", "Leave", "Iret", "Movs", "Stos", "Lods", "Scas", "Cmps",
    ];
    let rest = |stem| Some((stem, name.strip_prefix(stem)?.strip_prefix('q')?));
    let name = match stem.into_iter().find_map(rest) {
        Some((stem, rest)) => format!("{stem}d{rest}"),
        None => name,
    };
    names.get(&name).copied().filter(|c| c.op_code().mode32())
}
