//! Instruction forms, generated systematically from the decoder's list.

use iced_x86::{
    Code, CpuidFeature, Encoder, FlowControl, Instruction, Mnemonic, OpCodeOperandKind as K,
    OpKind, Register,
};

use crate::Random;

/// A group of forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// x87, MMX, SSE and AVX.
    Fp,
    /// Everything else that user code may execute and that only computes.
    Integer,
}

/// All forms of a family that this host executes in 64-bit mode.
pub fn forms(family: Family) -> Vec<Code> {
    Code::values()
        .filter(|&c| is_tested(c, family))
        .filter(|&c| {
            let mut r = Random::new(1);
            (0..8).any(|_| generate(c, &mut r).is_some())
        })
        .collect()
}

fn is_tested(c: Code, family: Family) -> bool {
    use Mnemonic as M;
    let op = c.op_code();
    if !op.is_instruction() || !op.mode64() || c.flow_control() != FlowControl::Next {
        return false;
    }
    if c.is_privileged() {
        return false;
    }
    // SSE brought instructions that use general registers only.
    let general = matches!(
        c.mnemonic(),
        M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
            | M::Lfence
            | M::Mfence
            | M::Sfence
            | M::Movnti
            | M::Crc32
    );
    let fp = c.cpuid_features().iter().any(|&f| is_fp(f)) && !general;
    let known = c.cpuid_features().iter().all(|&f| host_has(f));
    if !known || fp != (family == Family::Fp) {
        return false;
    }
    // State images, the environment with its pointers, and what differs from
    // run to run have tests of their own.
    !matches!(
        c.mnemonic(),
        M::Fxsave
            | M::Fxsave64
            | M::Fxrstor
            | M::Fxrstor64
            | M::Fnstenv
            | M::Fldenv
            | M::Fnsave
            | M::Frstor
            | M::Fstdw
            | M::Fstsg
            | M::Rdtsc
            | M::Rdtscp
            | M::Rdpid
            | M::Rdrand
            | M::Rdseed
            | M::Cpuid
            | M::Xgetbv
            | M::Rdpmc
            | M::Pushf
            | M::Pushfq
            | M::Popf
            | M::Popfq
            | M::Sgdt
            | M::Sidt
            | M::Sldt
            | M::Smsw
            | M::Str
            | M::Lar
            | M::Lsl
            | M::Verr
            | M::Verw
            | M::Lss
            | M::Lfs
            | M::Lgs
            | M::In
            | M::Out
            | M::Cli
            | M::Sti
            | M::Pause
            | M::Monitor
            | M::Mwait
            | M::Enter
            | M::Leave
            | M::Prefetchit0
            | M::Prefetchit1
    )
}

fn is_fp(f: CpuidFeature) -> bool {
    use CpuidFeature as F;
    matches!(
        f,
        F::FPU
            | F::FPU287
            | F::FPU387
            | F::MMX
            | F::SSE
            | F::SSE2
            | F::SSE3
            | F::SSSE3
            | F::SSE4_1
            | F::SSE4_2
            | F::SSE4A
            | F::AES
            | F::PCLMULQDQ
            | F::SHA
            | F::GFNI
            | F::AVX
            | F::AVX2
            | F::FMA
            | F::F16C
            | F::VAES
            | F::VPCLMULQDQ
            | F::AVX_VNNI
    )
}

fn host_has(f: CpuidFeature) -> bool {
    use CpuidFeature as F;
    match f {
        F::INTEL8086 | F::INTEL186 | F::INTEL286 | F::INTEL386 | F::INTEL486 | F::X64 => true,
        F::CMOV | F::CX8 | F::MULTIBYTENOP => true,
        F::FPU | F::FPU287 | F::FPU387 | F::MMX | F::SSE | F::SSE2 => true,
        F::SSE3 => std::is_x86_feature_detected!("sse3"),
        F::SSSE3 => std::is_x86_feature_detected!("ssse3"),
        F::SSE4_1 => std::is_x86_feature_detected!("sse4.1"),
        F::SSE4_2 => std::is_x86_feature_detected!("sse4.2"),
        F::SSE4A => std::is_x86_feature_detected!("sse4a"),
        F::AES => std::is_x86_feature_detected!("aes"),
        F::PCLMULQDQ => std::is_x86_feature_detected!("pclmulqdq"),
        F::SHA => std::is_x86_feature_detected!("sha"),
        F::GFNI => std::is_x86_feature_detected!("gfni"),
        F::AVX => std::is_x86_feature_detected!("avx"),
        F::AVX2 => std::is_x86_feature_detected!("avx2"),
        F::FMA => std::is_x86_feature_detected!("fma"),
        F::F16C => std::is_x86_feature_detected!("f16c"),
        F::VAES => std::is_x86_feature_detected!("vaes"),
        F::VPCLMULQDQ => std::is_x86_feature_detected!("vpclmulqdq"),
        F::AVX_VNNI => std::is_x86_feature_detected!("avxvnni"),
        F::BMI1 => std::is_x86_feature_detected!("bmi1"),
        F::BMI2 => std::is_x86_feature_detected!("bmi2"),
        F::ADX => std::is_x86_feature_detected!("adx"),
        F::LZCNT => std::is_x86_feature_detected!("lzcnt"),
        F::POPCNT => std::is_x86_feature_detected!("popcnt"),
        F::MOVBE => std::is_x86_feature_detected!("movbe"),
        F::CMPXCHG16B => std::is_x86_feature_detected!("cmpxchg16b"),
        _ => false,
    }
}

/// A random instance of a form: memory operands use base [`BASE`] (which the
/// caller points into the window) or, for gathers, a vector index too.
pub fn generate(code: Code, r: &mut Random) -> Option<(Instruction, Vec<u8>)> {
    let op = code.op_code();
    let mut i = Instruction::default();
    i.set_code(code);
    let use_memory = r.one_in(2);
    for n in 0..op.op_count() {
        set_operand(&mut i, n, op.op_kind(n), use_memory, r)?;
    }
    let mut encoder = Encoder::new(64);
    encoder.encode(&i, x86_native::oracle::BLOCK).ok()?;
    let bytes = encoder.take_buffer();
    // Operands as the decoder sees them (forms may differ by prefix only).
    let mut d = iced_x86::Decoder::with_ip(
        64,
        &bytes,
        x86_native::oracle::BLOCK,
        iced_x86::DecoderOptions::NONE,
    );
    let decoded = d.decode();
    (!decoded.is_invalid() && decoded.len() == bytes.len()).then_some((decoded, bytes))
}

/// The base register of memory operands.
pub const BASE: Register = Register::RBX;

fn set_operand(
    i: &mut Instruction,
    n: u32,
    kind: K,
    use_memory: bool,
    r: &mut Random,
) -> Option<()> {
    let any = r.below(16) as u32;
    let gpr8 = |n: u32| {
        if n < 4 {
            Register::AL + n
        } else {
            Register::SPL + (n - 4)
        }
    };
    let register = match kind {
        K::mem => return memory(i, n, Register::None, r),
        K::mem_vsib32x | K::mem_vsib64x => return memory(i, n, Register::XMM0 + any, r),
        K::mem_vsib32y | K::mem_vsib64y => return memory(i, n, Register::YMM0 + any, r),
        K::r8_or_mem
        | K::r16_or_mem
        | K::r32_or_mem
        | K::r64_or_mem
        | K::mm_or_mem
        | K::xmm_or_mem
        | K::ymm_or_mem
            if use_memory =>
        {
            return memory(i, n, Register::None, r);
        }
        K::r8_or_mem | K::r8_reg | K::r8_opcode => gpr8(any),
        K::r16_or_mem | K::r16_reg | K::r16_reg_mem | K::r16_rm | K::r16_opcode => {
            Register::AX + any
        }
        K::r32_or_mem | K::r32_reg | K::r32_reg_mem | K::r32_rm | K::r32_opcode | K::r32_vvvv => {
            Register::EAX + any
        }
        K::r64_or_mem | K::r64_reg | K::r64_reg_mem | K::r64_rm | K::r64_opcode | K::r64_vvvv => {
            Register::RAX + any
        }
        K::mm_or_mem | K::mm_reg | K::mm_rm => Register::MM0 + any % 8,
        K::xmm_or_mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 => Register::XMM0 + any,
        K::ymm_or_mem | K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 => Register::YMM0 + any,
        K::al => Register::AL,
        K::cl => Register::CL,
        K::ax => Register::AX,
        K::eax => Register::EAX,
        K::rax => Register::RAX,
        K::st0 => Register::ST0,
        K::sti_opcode => Register::ST0 + any % 8,
        K::imm8 | K::imm8_const_1 | K::imm4_m2z => {
            let v = if kind == K::imm8_const_1 {
                1
            } else {
                r.next() as u8
            };
            if n > 0 && i.op_kind(n - 1) == OpKind::Immediate8 {
                i.set_op_kind(n, OpKind::Immediate8_2nd);
                i.set_immediate8_2nd(v);
            } else {
                i.set_op_kind(n, OpKind::Immediate8);
                i.set_immediate8(v);
            }
            return Some(());
        }
        K::imm8sex16 => {
            i.set_op_kind(n, OpKind::Immediate8to16);
            i.set_immediate8to16(i16::from(r.next() as i8));
            return Some(());
        }
        K::imm8sex32 => {
            i.set_op_kind(n, OpKind::Immediate8to32);
            i.set_immediate8to32(i32::from(r.next() as i8));
            return Some(());
        }
        K::imm8sex64 => {
            i.set_op_kind(n, OpKind::Immediate8to64);
            i.set_immediate8to64(i64::from(r.next() as i8));
            return Some(());
        }
        K::imm16 => {
            i.set_op_kind(n, OpKind::Immediate16);
            i.set_immediate16(r.integer() as u16);
            return Some(());
        }
        K::imm32 => {
            i.set_op_kind(n, OpKind::Immediate32);
            i.set_immediate32(r.integer() as u32);
            return Some(());
        }
        K::imm32sex64 => {
            i.set_op_kind(n, OpKind::Immediate32to64);
            i.set_immediate32to64(i64::from(r.integer() as i32));
            return Some(());
        }
        K::imm64 => {
            i.set_op_kind(n, OpKind::Immediate64);
            i.set_immediate64(r.integer());
            return Some(());
        }
        K::seg_rDI => {
            i.set_op_kind(n, OpKind::MemorySegRDI);
            return Some(());
        }
        K::es_rDI => {
            i.set_op_kind(n, OpKind::MemoryESRDI);
            return Some(());
        }
        K::seg_rSI => {
            i.set_op_kind(n, OpKind::MemorySegRSI);
            return Some(());
        }
        _ => return None,
    };
    i.set_op_kind(n, OpKind::Register);
    i.set_op_register(n, register);
    Some(())
}

fn memory(i: &mut Instruction, n: u32, index: Register, r: &mut Random) -> Option<()> {
    i.set_op_kind(n, OpKind::Memory);
    i.set_memory_base(BASE);
    i.set_memory_index(index);
    i.set_memory_index_scale(if index == Register::None {
        1
    } else {
        1 << r.below(4)
    });
    i.set_memory_displ_size(1);
    i.set_memory_displacement64(r.below(4) * 16);
    Some(())
}
