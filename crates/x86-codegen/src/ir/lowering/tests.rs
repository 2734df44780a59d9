//! Compares the table with the decoder's own: copied instructions touch nothing of the host's.

use iced_x86::{
    Code, FlowControl, Instruction, InstructionInfoFactory, OpAccess, OpCodeOperandKind as K,
    OpKind, Register, RflagsBits,
};

use x86_native::HostFeatures;

use super::{Lowering, form, of};
use crate::ir::flags;

/// Returns an instruction of the form with registers that no instruction uses implicitly. `memory`: the operand that
/// may be in memory is in memory. `None` if the form has an operand that no copied one has.
fn sample(code: Code, memory: bool) -> Option<Instruction> {
    let op = code.op_code();
    let mut i = Instruction::default();
    i.set_code(code);
    for n in 0..op.op_count() {
        let register = match op.op_kind(n) {
            K::mem | K::mem_offs => Register::None,
            K::r8_or_mem | K::r16_or_mem | K::r32_or_mem | K::r64_or_mem if memory => {
                Register::None
            }
            K::mm_or_mem | K::xmm_or_mem | K::ymm_or_mem if memory => Register::None,
            K::r8_or_mem | K::r8_reg | K::r8_opcode => Register::R9L,
            K::r16_or_mem | K::r16_reg | K::r16_reg_mem | K::r16_rm | K::r16_opcode => {
                Register::R9W
            }
            K::r32_or_mem
            | K::r32_reg
            | K::r32_reg_mem
            | K::r32_rm
            | K::r32_opcode
            | K::r32_vvvv => Register::R9D,
            K::r64_or_mem
            | K::r64_reg
            | K::r64_reg_mem
            | K::r64_rm
            | K::r64_opcode
            | K::r64_vvvv => Register::R9,
            K::mm_or_mem | K::mm_reg | K::mm_rm => Register::MM1,
            K::xmm_or_mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 => Register::XMM9,
            K::ymm_or_mem | K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 => Register::YMM9,
            K::al => Register::AL,
            K::cl => Register::CL,
            K::ax => Register::AX,
            K::eax => Register::EAX,
            K::rax => Register::RAX,
            K::st0 => Register::ST0,
            K::sti_opcode => Register::ST3,
            K::imm8 | K::imm4_m2z => {
                let second = n > 0 && i.op_kind(n - 1) == OpKind::Immediate8;
                i.set_op_kind(
                    n,
                    if second {
                        OpKind::Immediate8_2nd
                    } else {
                        OpKind::Immediate8
                    },
                );
                continue;
            }
            K::imm8_const_1 => {
                i.set_op_kind(n, OpKind::Immediate8);
                i.set_immediate8(1);
                continue;
            }
            K::imm8sex16 => set(&mut i, n, OpKind::Immediate8to16)?,
            K::imm8sex32 => set(&mut i, n, OpKind::Immediate8to32)?,
            K::imm8sex64 => set(&mut i, n, OpKind::Immediate8to64)?,
            K::imm16 => set(&mut i, n, OpKind::Immediate16)?,
            K::imm32 => set(&mut i, n, OpKind::Immediate32)?,
            K::imm32sex64 => set(&mut i, n, OpKind::Immediate32to64)?,
            K::imm64 => set(&mut i, n, OpKind::Immediate64)?,
            _ => return None,
        };
        match op.op_kind(n) {
            _ if register != Register::None => {
                i.set_op_kind(n, OpKind::Register);
                i.set_op_register(n, register);
            }
            K::mem
            | K::mem_offs
            | K::r8_or_mem
            | K::r16_or_mem
            | K::r32_or_mem
            | K::r64_or_mem
            | K::mm_or_mem
            | K::xmm_or_mem
            | K::ymm_or_mem => {
                i.set_op_kind(n, OpKind::Memory);
                i.set_memory_base(Register::R10);
            }
            _ => {}
        }
    }
    Some(i)
}

#[allow(
    clippy::unnecessary_wraps,
    reason = "ends the match arm it is called in"
)]
fn set(i: &mut Instruction, n: u32, kind: OpKind) -> Option<Register> {
    i.set_op_kind(n, kind);
    Some(Register::None)
}

/// Returns true for registers that hold the guest's while copied code runs. R12 to R15 are not among them, and RSP is
/// the host's.
fn is_guests(r: Register) -> bool {
    let full = r.full_register();
    let general = r.is_gpr() && full.number() < 12 && full != Register::RSP;
    general || r.is_xmm() || r.is_ymm() || r.is_mm() || r.is_st()
        // The decoder's names for whole vector registers.
        || r.is_zmm()
}

#[test]
fn what_is_copied_touches_nothing_of_the_hosts() {
    let mut factory = InstructionInfoFactory::new();
    let mut copied = 0;
    for code in Code::values().filter(|c| c.op_code().mode64()) {
        let mut probe = Instruction::default();
        probe.set_code(code);
        for memory in [false, true] {
            let Some(i) = sample(code, memory) else {
                // A form with an operand that is not known here may not be copied.
                let kind = form(&probe, &HostFeatures::detected());
                assert!(!copies(kind), "{code:?} {kind:?}");
                continue;
            };
            if !copies(of(form(&i, &HostFeatures::detected()), &i, true)) {
                continue;
            }
            copied += 1;
            assert_eq!(i.flow_control(), FlowControl::Next, "{code:?}");
            assert!(
                !code.is_privileged() && !code.is_stack_instruction(),
                "{code:?}"
            );
            assert!(!i.is_string_instruction() && !i.is_vsib(), "{code:?}");
            let flags = i.rflags_modified() | i.rflags_read();
            let x87 = RflagsBits::C0 | RflagsBits::C1 | RflagsBits::C2 | RflagsBits::C3;
            assert_eq!(flags & !(flags::ALL | x87), 0, "{code:?}");
            let info = factory.info(&i);
            for m in info.used_memory() {
                assert_eq!(m.base(), Register::R10, "{code:?}: {m:?}");
            }
            let accesses = info.used_memory().iter();
            let real = accesses.filter(|m| m.access() != OpAccess::NoMemAccess);
            assert!(real.count() <= 1, "{code:?}");
            for r in info.used_registers() {
                let segment = r.register().is_segment_register();
                let base = segment && r.access() == OpAccess::Read;
                assert!(is_guests(r.register()) || base, "{code:?}: {r:?}");
            }
            if (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory) {
                assert!(i.memory_size().size() <= 32, "{code:?}");
            }
        }
    }
    assert!(copied > 1500, "{copied}");
}

fn copies(kind: Lowering) -> bool {
    matches!(
        kind,
        Lowering::Copy | Lowering::CopyFp | Lowering::CopyFpAligned | Lowering::CopyAligned
    )
}

#[test]
fn state_of_the_host_is_out_of_reach() {
    // State images change what runs on; segment and control registers trap or are the host's.
    for code in [
        Code::Fldenv_m14byte,
        Code::Frstor_m108byte,
        Code::Fxrstor_m512byte,
        Code::Xrstor_mem,
        Code::Xsetbv,
        Code::Maskmovdqu_rDI_xmm_xmm,
        Code::Mov_r64_dr,
        Code::Popw_FS,
        Code::Lgs_r64_m1664,
        Code::Int3,
        Code::Ud2,
        Code::Hlt,
        Code::In_AL_DX,
        Code::Cpuid,
        Code::Rdrand_r64,
        Code::Xbegin_rel32,
        Code::Movsxd_r16_rm16,
    ] {
        let mut i = Instruction::default();
        i.set_code(code);
        let kind = of(form(&i, &HostFeatures::detected()), &i, true);
        assert_eq!(kind, Lowering::Interpret, "{code:?}");
    }
    // These have code of their own.
    for code in [
        Code::Cld,
        Code::Std,
        Code::Fninit,
        Code::Fldenv_m28byte,
        Code::Xgetbv,
        Code::Enterq_imm16_imm8,
        Code::Xlat_m8,
        Code::Movsb_m8_m8,
        Code::Stosq_m64_RAX,
        Code::Cmpsd_m32_m32,
        Code::Mov_r64_cr,
        Code::Mov_rm16_Sreg,
        Code::Mov_Sreg_r64m16,
        Code::Popq_GS,
        Code::Pushq_FS,
        Code::Verw_rm16,
        Code::Lar_r32_r32m16,
        Code::Lsl_r64_r64m16,
        Code::Wrgsbase_r64,
        Code::Rdgsbase_r64,
        Code::Wrfsbase_r64,
        Code::Pause,
        Code::Wrpkru,
        Code::Rdpkru,
        Code::Sidt_m1664,
        Code::Sgdt_m1632,
        Code::Fldcw_m2byte,
        Code::Ldmxcsr_m32,
        Code::VEX_Vldmxcsr_m32,
    ] {
        let mut i = Instruction::default();
        i.set_code(code);
        assert!(!copies(form(&i, &HostFeatures::detected())), "{code:?}");
    }
}

/// A block may consist of bytes that are no instruction, and be the first that is translated.
#[test]
fn nothing_is_known_of_no_instruction() {
    let forms = form::Forms::new(HostFeatures::detected());
    assert!(forms.of(&Instruction::default()).kind == Lowering::Unknown);
}
