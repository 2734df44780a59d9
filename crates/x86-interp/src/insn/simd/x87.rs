//! x87 control: state in memory images, control and status words, FWAIT, MXCSR
//! (SDM vol. 1, 8.1 and 10.2.3).

use iced_x86::{Code, Instruction, Mnemonic};
use x86_cpu::{Access, Exception, GuestBus, Privilege};
use x86_defs::{
    control::cr0,
    reg,
    xsave::{self, FCW, FCW_INIT, FSW, FTW, ST0},
};

use super::{available, class, no_pending_x87};
use crate::insn::{Handler, Insn};
use crate::{Exec, Flow, Step, Stop};

const X87: u8 = class::X87;
/// FCW bits that exist, and the one that always reads as one.
const FCW_DEFINED: u16 = 0x1f3f;
const FCW_FIXED1: u16 = 0x40;
/// Size of the two environment formats.
const ENV16: usize = 14;
const ENV32: usize = 28;

/// The handler of a control instruction.
pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    let h: Handler<B> = match i.mnemonic() {
        Mnemonic::Fninit => fninit,
        Mnemonic::Fnclex => fnclex,
        Mnemonic::Fnstcw => fnstcw,
        Mnemonic::Fldcw => fldcw,
        Mnemonic::Fnstsw if i.code() == Code::Fnstsw_AX => fnstsw_ax,
        Mnemonic::Fnstsw => fnstsw,
        Mnemonic::Wait => fwait,
        Mnemonic::Fneni | Mnemonic::Fndisi | Mnemonic::Fnsetpm => nop,
        Mnemonic::Fnstenv if i.code() == Code::Fnstenv_m14byte => fnstenv::<B, ENV16>,
        Mnemonic::Fnstenv => fnstenv::<B, ENV32>,
        Mnemonic::Fldenv if i.code() == Code::Fldenv_m14byte => fldenv::<B, ENV16>,
        Mnemonic::Fldenv => fldenv::<B, ENV32>,
        Mnemonic::Fnsave if i.code() == Code::Fnsave_m94byte => fnsave::<B, ENV16>,
        Mnemonic::Fnsave => fnsave::<B, ENV32>,
        Mnemonic::Frstor if i.code() == Code::Frstor_m94byte => frstor::<B, ENV16>,
        Mnemonic::Frstor => frstor::<B, ENV32>,
        Mnemonic::Ldmxcsr => ldmxcsr::<B, { class::SSE }>,
        Mnemonic::Vldmxcsr => ldmxcsr::<B, { class::VEX }>,
        Mnemonic::Stmxcsr => stmxcsr::<B, { class::SSE }>,
        Mnemonic::Vstmxcsr => stmxcsr::<B, { class::VEX }>,
        Mnemonic::Vzeroupper => vzeroupper,
        Mnemonic::Vzeroall => vzeroall,
        _ => return None,
    };
    Some(h)
}

/// Raises #NM for x87 instructions that do not check for pending exceptions.
fn present<B: GuestBus>(e: &Exec<'_, B>) -> Result<(), Stop> {
    if e.cpu.cr0 & (cr0::EM | cr0::TS) != 0 {
        return Err(Exception::NM.into());
    }
    Ok(())
}

fn set_u16<B: GuestBus>(e: &mut Exec<'_, B>, at: usize, v: u16) {
    e.cpu.fp.area[at..at + 2].copy_from_slice(&v.to_le_bytes());
}

/// Sets FCW, and the bits ES and B of FSW, which summarise the unmasked exceptions.
fn set_control<B: GuestBus>(e: &mut Exec<'_, B>, fcw: u16, fsw: u16) {
    let fcw = fcw & FCW_DEFINED | FCW_FIXED1;
    let pending = fsw & !fcw & 0x3f != 0;
    let fsw = fsw & 0x7f7f | if pending { 0x8080 } else { 0 };
    set_u16(e, FCW, fcw);
    set_u16(e, FSW, fsw);
}

/// Sets TOP in FSW. Data registers stay where they physically are, so their images, which are relative to TOP, rotate.
pub(super) fn set_top<B: GuestBus>(e: &mut Exec<'_, B>, top: u8) {
    let area = &mut e.cpu.fp.area;
    let old = area[FSW + 1] >> 3 & 7;
    let by = usize::from(top.wrapping_sub(old) & 7);
    area[ST0..ST0 + 128].rotate_left(16 * by);
    area[FSW + 1] = area[FSW + 1] & !0x38 | (top & 7) << 3;
}

fn reset_x87<B: GuestBus>(e: &mut Exec<'_, B>) {
    set_top(e, 0);
    // Data registers keep their contents.
    e.cpu.fp.area[..xsave::MXCSR].fill(0);
    set_u16(e, FCW, FCW_INIT);
}

fn nop<B: GuestBus>(e: &mut Exec<'_, B>, _insn: &Insn<B>) -> Step {
    present(e)?;
    Ok(Flow::Next)
}

fn fninit<B: GuestBus>(e: &mut Exec<'_, B>, _insn: &Insn<B>) -> Step {
    present(e)?;
    reset_x87(e);
    Ok(Flow::Next)
}

fn fnclex<B: GuestBus>(e: &mut Exec<'_, B>, _insn: &Insn<B>) -> Step {
    present(e)?;
    let fsw = e.cpu.fp.u16_at(FSW) & 0x7f00;
    set_u16(e, FSW, fsw);
    Ok(Flow::Next)
}

fn fnstcw<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    present(e)?;
    let v = e.cpu.fp.u16_at(FCW);
    e.mem_write(insn, v)?;
    Ok(Flow::Next)
}

fn fldcw<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, X87>(e)?;
    let v: u16 = e.mem_read(insn)?;
    let fsw = e.cpu.fp.u16_at(FSW);
    set_control(e, v, fsw);
    Ok(Flow::Next)
}

fn fnstsw<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    present(e)?;
    let v = e.cpu.fp.u16_at(FSW);
    e.mem_write(insn, v)?;
    Ok(Flow::Next)
}

fn fnstsw_ax<B: GuestBus>(e: &mut Exec<'_, B>, _insn: &Insn<B>) -> Step {
    present(e)?;
    let v = e.cpu.fp.u16_at(FSW);
    e.reg_write(reg::RAX as u8, v);
    Ok(Flow::Next)
}

/// FWAIT, the only instruction that depends on CR0.MP (SDM vol. 3, 2.5).
fn fwait<B: GuestBus>(e: &mut Exec<'_, B>, _insn: &Insn<B>) -> Step {
    const BOTH: u64 = cr0::MP | cr0::TS;
    if e.cpu.cr0 & BOTH == BOTH {
        return Err(Exception::NM.into());
    }
    no_pending_x87(e)?;
    Ok(Flow::Next)
}

/// The full tag word: two bits per register, from the abridged one and the
/// registers' contents (SDM vol. 2, FXSAVE).
fn full_tags<B: GuestBus>(e: &Exec<'_, B>) -> u16 {
    let area = &e.cpu.fp.area;
    let top = usize::from(e.cpu.fp.u16_at(FSW) >> 11 & 7);
    let mut tags = 0;
    for physical in 0..8usize {
        let tag = if area[FTW] >> physical & 1 == 0 {
            3
        } else {
            let st = ST0 + 16 * (physical.wrapping_sub(top) & 7);
            let exponent = u16::from_le_bytes([area[st + 8], area[st + 9]]) & 0x7fff;
            let integer_bit = area[st + 7] & 0x80 != 0;
            let zero = area[st..st + 8].iter().all(|&b| b == 0);
            match (exponent, integer_bit) {
                (0, _) if zero => 1,
                (0 | 0x7fff, _) | (_, false) => 2,
                _ => 0,
            }
        };
        tags |= tag << (2 * physical);
    }
    tags
}

/// The environment image (SDM vol. 1, figures 8-9 to 8-12).
fn environment<B: GuestBus>(e: &Exec<'_, B>, size: usize) -> [u8; ENV32] {
    let fp = &e.cpu.fp;
    let u32_at = |at: usize| u32::from(fp.u16_at(at)) | u32::from(fp.u16_at(at + 2)) << 16;
    let (fop, fip, fdp) = (u32::from(fp.u16_at(6)) & 0x7ff, u32_at(8), u32_at(16));
    let (mut fcs, mut fds) = (u32::from(fp.u16_at(12)), u32::from(fp.u16_at(20)));
    if e.cpu.is_64bit() {
        // Bytes 12 and 20 are the pointers' upper halves; selectors are deprecated.
        (fcs, fds) = (0, 0);
    }
    let tags = u32::from(full_tags(e));
    let (fcw, fsw) = (u32::from(fp.u16_at(FCW)), u32::from(fp.u16_at(FSW)));
    let real = e.cpu.is_real_or_v86();
    let mut image = [0; ENV32];
    if size == ENV32 {
        let high = 0xffff_0000;
        let words = if real {
            [
                fcw | high,
                fsw | high,
                tags | high,
                fip & 0xffff | high,
                (fip >> 16) << 12 | fop,
                fdp & 0xffff | high,
                (fdp >> 16) << 12,
            ]
        } else {
            [
                fcw | high,
                fsw | high,
                tags | high,
                fip,
                fcs | fop << 16,
                fdp,
                fds | high,
            ]
        };
        for (chunk, w) in image.chunks_exact_mut(4).zip(words) {
            chunk.copy_from_slice(&w.to_le_bytes());
        }
    } else {
        let words = if real {
            let upper = |p: u32| p >> 16 << 12;
            [fcw, fsw, tags, fip, upper(fip) | fop, fdp, upper(fdp)]
        } else {
            [fcw, fsw, tags, fip, fcs, fdp, fds]
        };
        for (chunk, w) in image.chunks_exact_mut(2).zip(words) {
            chunk.copy_from_slice(&(w as u16).to_le_bytes());
        }
    }
    image
}

/// Loads an environment image.
fn set_environment<B: GuestBus>(e: &mut Exec<'_, B>, image: &[u8; ENV32], size: usize) {
    let mut w = [0u32; 7];
    for (n, slot) in w.iter_mut().enumerate() {
        *slot = if size == ENV32 {
            let at = 4 * n;
            u32::from_le_bytes([image[at], image[at + 1], image[at + 2], image[at + 3]])
        } else {
            let at = 2 * n;
            u32::from(u16::from_le_bytes([image[at], image[at + 1]]))
        };
    }
    let real = e.cpu.is_real_or_v86();
    let (fop, fip, fcs, fdp, fds) = match (size == ENV32, real) {
        (true, false) => (w[4] >> 16, w[3], w[4] & 0xffff, w[5], w[6] & 0xffff),
        (true, true) => (
            w[4],
            w[3] & 0xffff | w[4] >> 12 << 16,
            0,
            w[5] & 0xffff | w[6] >> 12 << 16,
            0,
        ),
        (false, false) => (0, w[3], w[4], w[5], w[6]),
        (false, true) => (w[4], w[3] | w[4] >> 12 << 16, 0, w[5] | w[6] >> 12 << 16, 0),
    };
    let (fcs, fds) = if e.cpu.is_64bit() { (0, 0) } else { (fcs, fds) };
    let mut abridged = 0;
    for physical in 0..8 {
        if w[2] >> (2 * physical) & 3 != 3 {
            abridged |= 1u8 << physical;
        }
    }
    set_top(e, (w[1] >> 11 & 7) as u8);
    set_control(e, w[0] as u16, w[1] as u16);
    let area = &mut e.cpu.fp.area;
    area[FTW] = abridged;
    area[6..8].copy_from_slice(&((fop & 0x7ff) as u16).to_le_bytes());
    area[8..16].copy_from_slice(&(u64::from(fip) | u64::from(fcs) << 32).to_le_bytes());
    area[16..24].copy_from_slice(&(u64::from(fdp) | u64::from(fds) << 32).to_le_bytes());
}

fn fnstenv<B: GuestBus, const SIZE: usize>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    present(e)?;
    let image = environment(e, SIZE);
    let gva = e.mem_linear(insn, SIZE as u64, Access::Write)?;
    e.bus
        .write_bytes(e.cpu, gva, &image[..SIZE], Privilege::Current)?;
    // All exceptions are masked afterwards.
    let (fcw, fsw) = (e.cpu.fp.u16_at(FCW), e.cpu.fp.u16_at(FSW));
    set_control(e, fcw | 0x3f, fsw);
    Ok(Flow::Next)
}

fn fldenv<B: GuestBus, const SIZE: usize>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, X87>(e)?;
    let gva = e.mem_linear(insn, SIZE as u64, Access::Read)?;
    let mut image = [0; ENV32];
    e.bus
        .read_bytes(e.cpu, gva, &mut image[..SIZE], Privilege::Current)?;
    set_environment(e, &image, SIZE);
    Ok(Flow::Next)
}

fn fnsave<B: GuestBus, const SIZE: usize>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    present(e)?;
    let mut image = [0; ENV32 + 80];
    image[..ENV32].copy_from_slice(&environment(e, SIZE));
    for n in 0..8 {
        let st = ST0 + 16 * n;
        let at = SIZE + 10 * n;
        image[at..at + 10].copy_from_slice(&e.cpu.fp.area[st..st + 10]);
    }
    let gva = e.mem_linear(insn, SIZE as u64 + 80, Access::Write)?;
    e.bus
        .write_bytes(e.cpu, gva, &image[..SIZE + 80], Privilege::Current)?;
    reset_x87(e);
    Ok(Flow::Next)
}

fn frstor<B: GuestBus, const SIZE: usize>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, X87>(e)?;
    let gva = e.mem_linear(insn, SIZE as u64 + 80, Access::Read)?;
    let mut image = [0; ENV32 + 80];
    e.bus
        .read_bytes(e.cpu, gva, &mut image[..SIZE + 80], Privilege::Current)?;
    let mut env = [0; ENV32];
    env[..SIZE].copy_from_slice(&image[..SIZE]);
    set_environment(e, &env, SIZE);
    for n in 0..8 {
        let st = ST0 + 16 * n;
        let at = SIZE + 10 * n;
        e.cpu.fp.area[st..st + 10].copy_from_slice(&image[at..at + 10]);
    }
    Ok(Flow::Next)
}

fn ldmxcsr<B: GuestBus, const CLASS: u8>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, CLASS>(e)?;
    let v: u32 = e.mem_read(insn)?;
    if v & !x86_native::host_mask() != 0 {
        return Err(Exception::GP0.into());
    }
    e.cpu.fp.set_mxcsr(v);
    Ok(Flow::Next)
}

fn stmxcsr<B: GuestBus, const CLASS: u8>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, CLASS>(e)?;
    let v = e.cpu.fp.mxcsr();
    e.mem_write(insn, v)?;
    Ok(Flow::Next)
}

/// Outside 64-bit mode only registers 0 to 7 exist.
fn nr_vectors<B: GuestBus>(e: &Exec<'_, B>) -> usize {
    if e.cpu.is_64bit() { 16 } else { 8 }
}

fn vzeroupper<B: GuestBus>(e: &mut Exec<'_, B>, _insn: &Insn<B>) -> Step {
    available::<B, { class::VEX }>(e)?;
    for n in 0..nr_vectors(e) {
        e.cpu.fp.set_ymm_hi(n, 0);
    }
    Ok(Flow::Next)
}

fn vzeroall<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    vzeroupper(e, insn)?;
    for n in 0..nr_vectors(e) {
        e.cpu.fp.set_xmm(n, 0);
    }
    Ok(Flow::Next)
}
