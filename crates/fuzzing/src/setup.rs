//! Start states with which an instruction does something: quotients fit, comparisons succeed, branch targets exist.

use iced_x86::{Code, FlowControl, Instruction, Mnemonic as M, OpKind, Register};
use x86_defs::{reg, rflags, xsave};
use x86_native::oracle::{Mode, WINDOW};

use crate::{
    Case, Random,
    operands::{POINTERS, address, interior},
};

/// The first address that is not canonical.
const CANONICAL_END: u64 = 1 << 47;

/// Flags that POPF may load: all except TF and AC, which trap.
const POPF_FLAGS: u64 =
    rflags::ARITH | rflags::DF | rflags::NT | rflags::ID | rflags::IF | rflags::IOPL;

/// Adjusts registers, window and operands of a single instruction. `None` if its operands contradict each other.
pub(crate) fn adjust(
    case: &mut Case,
    i: &mut Instruction,
    target: Option<u64>,
    vector_index: Option<Register>,
    r: &mut Random,
) -> Option<()> {
    let straddles = |at: u64| at < CANONICAL_END && at + 10 > CANONICAL_END;
    if i.memory_size().size() == 10 && target.is_some_and(straddles) {
        // The operand is read in two pieces, and the first may fault before the other is looked at.
        return None;
    }
    mask_underflow(case, i);
    let gpr = &mut case.start.gpr;
    match i.mnemonic() {
        M::Maskmovdqu | M::Vmaskmovdqu | M::Maskmovq if gpr[reg::RDI] >> 32 != 0 => {
            gpr[reg::RDI] = interior(r);
        }
        M::Div | M::Idiv => dividend(gpr, i, r),
        M::Cmpxchg if r.one_in(2) => {
            let rax = gpr[reg::RAX].to_le_bytes();
            if let Some(at) = target {
                case.patch(at, &rax[..i.memory_size().size()]);
            } else if !i.op0_register().is_gpr8() {
                gpr[i.op0_register().number()] = gpr[reg::RAX];
            }
        }
        M::Cmpxchg8b | M::Cmpxchg16b if r.one_in(2) => {
            let half = i.memory_size().size() / 2;
            let (low, high) = (gpr[reg::RAX].to_le_bytes(), gpr[reg::RDX].to_le_bytes());
            let at = target?;
            case.patch(at, &low[..half]);
            case.patch(at + half as u64, &high[..half]);
        }
        M::Bt | M::Bts | M::Btr | M::Btc => bit_index(gpr, i, r)?,
        M::Popf | M::Popfd | M::Popfq => {
            let flags = r.next() & POPF_FLAGS;
            let at = gpr[reg::RSP];
            case.patch(at, &flags.to_le_bytes());
        }
        M::Clzero => gpr[reg::RAX] = address(r),
        M::Bound => bound(case, i, target?, r),
        M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz if r.one_in(2) => {
            gpr[reg::RCX] = r.below(3) | if r.one_in(4) { 1 << 32 } else { 0 };
        }
        M::Pcmpestri | M::Pcmpestrm | M::Vpcmpestri | M::Vpcmpestrm if r.one_in(2) => {
            gpr[reg::RAX] = r.below(20).wrapping_sub(2);
            gpr[reg::RDX] = r.below(20).wrapping_sub(2);
        }
        _ => {}
    }
    if i.is_string_instruction() {
        string(case, i, r);
    }
    let gpr = &mut case.start.gpr;
    let last = i.op_count().saturating_sub(1);
    if i.op_count() > 0
        && i.op_kind(last) == OpKind::Register
        && i.op_register(last) == Register::CL
    {
        match r.below(4) {
            0 => gpr[reg::RCX] = gpr[reg::RCX] & !0xff | r.below(70),
            1 => gpr[reg::RCX] = gpr[reg::RCX] & !0xff | r.pick(&[0, 1, 8, 9, 15, 16, 17, 31, 32]),
            _ => {}
        }
    }
    if let Some(index) = vector_index
        && !r.one_in(16)
    {
        let n = index.number();
        let area = &mut case.start.area;
        for half in [xsave::XMM0, xsave::YMM_HI] {
            for at in (half + 16 * n..half + 16 * n + 16).step_by(8) {
                let v = if r.one_in(2) {
                    r.below(0x200).wrapping_sub(0x40)
                } else {
                    r.below(0x80) | r.below(0x80) << 32
                };
                area[at..at + 8].copy_from_slice(&v.to_le_bytes());
            }
        }
        case.start.gpr[reg::RBX] = WINDOW + 0x800 + r.below(0x800);
    }
    Some(())
}

/// Masks underflow for dot products. A known inaccuracy: with underflow unmasked, a product inside that underflows goes
/// unnoticed if the sum does not.
pub(crate) fn mask_underflow(case: &mut Case, i: &Instruction) {
    if matches!(i.mnemonic(), M::Dpps | M::Dppd | M::Vdpps | M::Vdppd) {
        case.start.area[xsave::MXCSR + 1] |= 0x08;
    }
}

fn dividend(gpr: &mut [u64; 16], i: &Instruction, r: &mut Random) {
    let size = if i.op0_kind() == OpKind::Register {
        i.op0_register().size()
    } else {
        i.memory_size().size()
    };
    let sign = |v: u64| (v as i64 >> 63) as u64;
    let rax = gpr[reg::RAX];
    match (r.below(4), size) {
        (0, _) => {}
        (1, 1) => gpr[reg::RAX] = rax & 0xff,
        (_, 1) => gpr[reg::RAX] = rax as i8 as i64 as u64,
        (1, _) => gpr[reg::RDX] = r.below(4),
        (_, 2) => gpr[reg::RDX] = sign(rax << 48) & 0xffff,
        (_, 4) => gpr[reg::RDX] = sign(rax << 32),
        _ => gpr[reg::RDX] = sign(rax),
    }
}

/// Keeps the index of a bit string near the window, as it could reach 2^61 bytes.
fn bit_index(gpr: &mut [u64; 16], i: &Instruction, r: &mut Random) -> Option<()> {
    if i.op0_kind() != OpKind::Memory || i.op1_kind() != OpKind::Register {
        return Some(());
    }
    let index = i.op1_register();
    let full = index.full_register();
    if full == i.memory_base().full_register() || full == i.memory_index().full_register() {
        return None;
    }
    let span = if r.one_in(8) { 0x10000 } else { 0x2000 };
    let bit = r.below(span).wrapping_sub(span / 2);
    let upper = if index.size() == 8 {
        bit
    } else {
        let shift = 8 * index.size();
        r.next() << shift | bit & !(u64::MAX << shift)
    };
    gpr[full.number()] = upper;
    Some(())
}

/// Makes BOUND's limits enclose the index, mostly.
fn bound(case: &mut Case, i: &Instruction, at: u64, r: &mut Random) {
    let size = i.op0_register().size();
    let index = case.start.gpr[i.op0_register().number()];
    let (low, high) = (
        index.wrapping_sub(r.below(4)),
        index.wrapping_add(r.below(4)),
    );
    if !r.one_in(4) {
        case.patch(at, &low.to_le_bytes()[..size]);
        case.patch(at + size as u64, &high.to_le_bytes()[..size]);
    }
}

fn string(case: &mut Case, i: &Instruction, r: &mut Random) {
    let gpr = &mut case.start.gpr;
    if i.has_rep_prefix() || i.has_repne_prefix() {
        gpr[reg::RCX] = match r.below(16) {
            0 => r.below(0x900),
            1 => 0,
            _ => r.below(24),
        };
    }
    let narrow = (0..i.op_count()).any(|n| {
        matches!(
            i.op_kind(n),
            OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI
        )
    });
    if narrow && case.mode == Mode::Bits64 {
        // The upper halves do not matter.
        gpr[reg::RSI] |= r.next() << 32;
        gpr[reg::RDI] |= r.next() << 32;
        gpr[reg::RCX] |= r.next() << 32;
    }
    let (from, to) = (gpr[reg::RSI], gpr[reg::RDI]);
    let rax = gpr[reg::RAX];
    if r.one_in(2) {
        // There are some equal elements and then one that differs, or the other way round.
        let len = 8 * (1 + r.below(6)) as usize;
        let mut equal: Vec<u8> = rax
            .to_le_bytes()
            .iter()
            .copied()
            .cycle()
            .take(len)
            .collect();
        let upwards = case.start.rflags & rflags::DF == 0;
        let place = |at: u64| {
            if upwards {
                at
            } else {
                at.wrapping_sub(len as u64 - 8)
            }
        };
        case.patch(place(to), &equal);
        if r.one_in(4) {
            let at = r.below(len as u64) as usize;
            equal[at] ^= 1;
        }
        case.patch(place(from), &equal);
    }
}

/// Makes an indirect branch or a return lead to the block's end or to the marker.
pub(crate) fn aim(case: &mut Case, i: &Instruction, r: &mut Random) {
    // LEA needs no REX prefix in 32-bit code.
    let marker = match case.mode {
        Mode::Bits64 => 4,
        Mode::Bits32 => 3,
    };
    let to = match r.below(16) {
        0 if case.mode == Mode::Bits64 => 1 << 47 | r.below(1 << 40),
        0 => 0x1234_5678,
        1..6 => case.end() - marker,
        _ => case.end(),
    };
    if i.mnemonic() == M::Ret {
        // With an operand size of 16 bits, the branch leads to the first 64 KiB, where nothing is mapped.
        let at = case.start.gpr[reg::RSP];
        case.patch(at, &to.to_le_bytes());
        return;
    }
    if !matches!(
        i.flow_control(),
        FlowControl::IndirectBranch | FlowControl::IndirectCall
    ) {
        return;
    }
    if i.op0_kind() == OpKind::Register {
        let n = i.op0_register().number();
        if n == reg::RSP {
            // The address would be the stack's, too.
            return;
        }
        case.start.gpr[n] = to;
    } else {
        let at = memory_address(case, i);
        case.patch(at, &to.to_le_bytes());
    }
}

/// Returns the linear address of the memory operand.
fn memory_address(case: &Case, i: &Instruction) -> u64 {
    i.virtual_address(0, 0, |register, _, _| {
        if register.is_gpr() {
            let v = case.start.gpr[register.full_register().number()];
            Some(if register.size() == 4 {
                v & 0xffff_ffff
            } else {
                v
            })
        } else {
            Some(0)
        }
    })
    .map_or(0, |at| match case.mode {
        Mode::Bits64 => at,
        Mode::Bits32 => at & 0xffff_ffff,
    })
}

/// Returns true for instructions that blocks may have: those that change pointers only if they are stack or string
/// instructions, do not access memory at computed addresses, and do not branch to one.
pub(crate) fn is_safe_in_block(i: &Instruction, r: &mut Random) -> bool {
    let wild = match i.mnemonic() {
        M::Bt | M::Bts | M::Btr | M::Btc => {
            i.op0_kind() == OpKind::Memory
                && i.op1_kind() == OpKind::Register
                && i.op1_register().size() != 2
        }
        M::Clzero | M::Ret | M::Popa | M::Popad | M::Bound | M::Ud0 | M::Ud1 | M::Ud2 => true,
        // Most dividends would be too large.
        M::Div | M::Idiv => !r.one_in(8),
        _ => {
            matches!(
                i.flow_control(),
                FlowControl::IndirectBranch | FlowControl::IndirectCall | FlowControl::Exception
            ) || i.op0_kind() == OpKind::NearBranch16
        }
    };
    let named = |register: Register| POINTERS.contains(&register.full_register());
    !wild
        && !(0..i.op_count()).any(|n| {
            i.op_kind(n) == OpKind::Register
                && (named(i.op_register(n)) || i.op_register(n).full_register() == Register::RSP)
        })
}

/// Returns an instruction that keeps the next one of a block harmless.
pub(crate) fn prelude(i: &Instruction, mode: Mode, r: &mut Random) -> Option<Instruction> {
    if i.has_rep_prefix() || i.has_repne_prefix() {
        return Instruction::with2(Code::Mov_r32_imm32, Register::ECX, r.below(20) as u32).ok();
    }
    if matches!(i.mnemonic(), M::Popf | M::Popfd | M::Popfq) {
        let flags = (r.next() & POPF_FLAGS) as i32;
        let code = match mode {
            Mode::Bits64 => Code::Pushq_imm32,
            Mode::Bits32 => Code::Pushd_imm32,
        };
        return Instruction::with1(code, flags).ok();
    }
    None
}

/// Returns true for forms of which the manual leaves the result, and not only flags, undefined for some operands.
pub(crate) fn result_depends_on_processor(i: &Instruction) -> bool {
    let sixteen = matches!(
        i.code(),
        Code::Shld_rm16_r16_imm8
            | Code::Shld_rm16_r16_CL
            | Code::Shrd_rm16_r16_imm8
            | Code::Shrd_rm16_r16_CL
    );
    sixteen
        || i.code() == Code::Bswap_r16
        || matches!(i.mnemonic(), M::Popa | M::Popad)
        || matches!(
            i.mnemonic(),
            M::Bsf | M::Bsr | M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu
        )
        // It is undefined whether a pending x87 exception comes first.
        || i.code() == Code::Cvtpi2ps_xmm_mmm64 && i.op1_kind() == OpKind::Memory
        || approximates(i.mnemonic())
}

/// Returns true for approximations. They differ between vendors within the error that the manual allows.
fn approximates(m: M) -> bool {
    matches!(
        m,
        M::Rcpps
            | M::Rcpss
            | M::Rsqrtps
            | M::Rsqrtss
            | M::Vrcpps
            | M::Vrcpss
            | M::Vrsqrtps
            | M::Vrsqrtss
    )
}

/// Does what [`result_depends_on_processor`] does, with the operands known.
pub(crate) fn result_is_undefined(i: &Instruction, gpr: &[u64; 16]) -> bool {
    match i.mnemonic() {
        M::Shld | M::Shrd => {
            let count = if i.op2_kind() == OpKind::Register {
                gpr[reg::RCX]
            } else {
                i.immediate(2)
            };
            result_depends_on_processor(i) && count & 31 > 16
        }
        // With nothing pending, it does the same on all processors.
        M::Cvtpi2ps => false,
        // Approximations are computed by this very host.
        m => result_depends_on_processor(i) && !approximates(m),
    }
}
