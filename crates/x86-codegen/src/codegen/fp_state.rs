//! Moves FP state between the host's registers and the vCPU's state, and keeps it over calls into Rust.

use x86_defs::xsave;

use crate::{asm::*, frame::words::*};

/// Opcode, instruction pointer and data pointer of the last x87 instruction
/// (SDM vol. 1, 10.5.1).
///
/// DEVIATION: translated x87 instructions do not set them. They serve handlers
/// of unmasked exceptions, and code with unmasked exceptions is interpreted.
const FOP: usize = 6;
const FIP: usize = 8;
const FDP: usize = 16;

/// Saves FP state that is in the host's registers, and gives Rust its own. Changes caller-saved registers.
pub(crate) fn save_fp(a: &mut Asm) {
    a.alu_mem_imm8(false, Alu::Cmp, gs(FP_LIVE), 0);
    let idle = a.jcc(cc::E);
    store_fp(a);
    release_fp(a);
    let here = a.here();
    a.patch(idle, here);
}

/// Stores FP state to the vCPU's area. It stays in the host's registers. Changes rax, rcx, rdx, rsi and rdi.
pub(super) fn store_fp(a: &mut Asm) {
    // XSAVE and FXSAVE would store the host's addresses of the last x87 instruction.
    a.rm(false, &[0x0f, 0xb7], RSI, gs(FP_AREA + FOP)); // movzx
    a.load(RDI, gs(FP_AREA + FIP));
    a.load(RCX, gs(FP_AREA + FDP));
    image(a, true);
    a.bytes(&[0x66]);
    a.store32(gs(FP_AREA + FOP), RSI);
    a.store(gs(FP_AREA + FIP), RDI);
    a.store(gs(FP_AREA + FDP), RCX);
}

/// Gives Rust its own FP state: the vCPU's is in memory.
pub(super) fn release_fp(a: &mut Asm) {
    a.store_imm(gs(FP_LIVE), 0);
    if a.isa().avx {
        zero_uppers(a);
    }
    a.bytes(&[0xdb, 0xe3]); // fninit
    a.rm(false, &[0x0f, 0xae], 2, gs(HOST_MXCSR)); // ldmxcsr
}

/// Stores the vCPU's area from the host's registers, or loads them from it. Changes rax and rdx.
fn image(a: &mut Asm, store: bool) {
    let Isa { xsave, avx, .. } = a.isa();
    if xsave {
        a.mov_imm(RAX, state(avx));
        a.alu_rr(false, Alu::Xor, RDX, RDX);
    }
    let operation = match (xsave, store) {
        (false, true) => 0,  // fxsave64
        (false, false) => 1, // fxrstor64
        (true, true) => 4,   // xsave64
        (true, false) => 5,  // xrstor64
    };
    a.rm(true, &[0x0f, 0xae], operation, gs(FP_AREA));
}

/// Returns the state components of XSAVE that the guest uses.
const fn state(avx: bool) -> u64 {
    if avx { 3 | UPPERS } else { 3 }
}

/// The state component with the upper halves of YMM registers.
const UPPERS: u64 = 1 << 2;

/// Stores the vector registers before a call into Rust, or loads them after it, if they have guest state. Changes rax,
/// rcx and rdx.
///
/// Upper halves that are not in use are left alone: once they are written, even with zeroes, processors treat each SSE
/// instruction as one that depends on what its destination was.
pub(crate) fn keep_vectors(a: &mut Asm, store: bool) {
    let Isa { avx, xinuse, .. } = a.isa();
    a.alu_mem_imm8(false, Alu::Cmp, gs(FP_LIVE), 0);
    let idle = a.jcc(cc::E);
    let mut done = None;
    if avx && xinuse {
        if store {
            a.mov_imm(RCX, 1);
            a.bytes(&[0x0f, 0x01, 0xd0]); // xgetbv
            a.alu_imm(false, Alu::And, RAX, UPPERS as i32);
            a.store(gs(UPPERS_IN_USE), RAX);
        } else {
            a.alu_mem_imm8(false, Alu::Cmp, gs(UPPERS_IN_USE), 0);
        }
        let in_use = a.jcc(cc::NE);
        if !store {
            // Rust code may have left something there.
            zero_uppers(a);
        }
        (0..16).for_each(|n| vector(a, n, store, false));
        done = Some(a.jmp());
        let here = a.here();
        a.patch(in_use, here);
    }
    (0..16).for_each(|n| vector(a, n, store, avx));
    if store && avx {
        zero_uppers(a);
    }
    let here = a.here();
    for from in done.into_iter().chain([idle]) {
        a.patch(from, here);
    }
}

/// `vzeroupper`
fn zero_uppers(a: &mut Asm) {
    a.bytes(&[0xc5, 0xf8, 0x77]);
}

/// Loads the FP state that is in memory. Changes rax, rdx and, before that, ymm0.
pub(crate) fn load_fp(a: &mut Asm) {
    let avx = a.isa().avx;
    if avx {
        a.alu_rr(false, Alu::Xor, RAX, RAX);
        // Are there upper halves other than zero?
        a.bytes(&[0xc5, 0xfc, 0x57, 0xc0]); // vxorps ymm0, ymm0, ymm0
        for n in 0..8 {
            // vorps ymm0, ymm0, gs:[…]
            a.bytes(&[0x65, 0xc5, 0xfc, 0x56, 0x04, 0x25]);
            a.bytes(&((FP_AREA + xsave::YMM_HI + 32 * n) as u32).to_le_bytes());
        }
        a.bytes(&[0xc4, 0xe2, 0x7d, 0x17, 0xc0]); // vptest ymm0, ymm0
        zero_uppers(a);
        a.rr(false, &[0x0f, 0x95], 0, RAX); // setne
        a.shift(false, 4, RAX, UPPERS.trailing_zeros() as u8);
        a.alu_imm(false, Alu::Or, RAX, state(false) as i32);
        a.store(gs(FP_AREA + 512), RAX);
    } else {
        a.store_imm(gs(FP_AREA + 512), state(false) as i32);
    }
    a.store_imm(gs(FP_AREA + 520), 0);
    image(a, false);
    a.store_imm(gs(FP_LIVE), 1);
    a.store32_imm(SHORT_FP_LIVE, 1);
}

/// Emits `vmovdqu` between YMM `n` and its place, or `movups` of its lower half.
fn vector(a: &mut Asm, n: u8, store: bool, avx: bool) {
    let op = if store { 0x11 } else { 0x10 };
    let disp = (VECTORS + 32 * usize::from(n)) as i32;
    a.bytes(&[0x65]);
    if avx {
        let r = if n >= 8 { 0 } else { 0x80 };
        a.bytes(&[0xc5, r | 0x7c, op, (n & 7) << 3 | 4, 0x25]);
    } else {
        if n >= 8 {
            a.bytes(&[0x44]);
        }
        a.bytes(&[0x0f, op, (n & 7) << 3 | 4, 0x25]);
    }
    a.bytes(&disp.to_le_bytes());
}
