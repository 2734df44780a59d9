//! Instructions that access memory element by element: gathers and masked
//! loads and stores (SDM vol. 2, VGATHER*, VMASKMOV, VPMASKMOV, MASKMOVDQU).
//!
//! An element that the mask leaves out is not accessed and cannot fault.

use iced_x86::{Code, Instruction, Mnemonic};
use x86_cpu::{Access, Feature, GuestBus, Privilege};
use x86_defs::xsave::{FSW, FTW, ST0};

use super::{available, class, x87::set_top};
use crate::insn::{Handler, Insn};
use crate::{Exec, Flow, Step, Stop};

/// The handler of an element-wise memory instruction.
pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    use Code as C;
    let h: Handler<B> = match i.code() {
        C::VEX_Vmaskmovps_xmm_xmm_m128 | C::VEX_Vpmaskmovd_xmm_xmm_m128 => masked_load::<B, 4, 4>,
        C::VEX_Vmaskmovps_ymm_ymm_m256 | C::VEX_Vpmaskmovd_ymm_ymm_m256 => masked_load::<B, 4, 8>,
        C::VEX_Vmaskmovpd_xmm_xmm_m128 | C::VEX_Vpmaskmovq_xmm_xmm_m128 => masked_load::<B, 8, 2>,
        C::VEX_Vmaskmovpd_ymm_ymm_m256 | C::VEX_Vpmaskmovq_ymm_ymm_m256 => masked_load::<B, 8, 4>,
        C::VEX_Vmaskmovps_m128_xmm_xmm | C::VEX_Vpmaskmovd_m128_xmm_xmm => masked_store::<B, 4, 4>,
        C::VEX_Vmaskmovps_m256_ymm_ymm | C::VEX_Vpmaskmovd_m256_ymm_ymm => masked_store::<B, 4, 8>,
        C::VEX_Vmaskmovpd_m128_xmm_xmm | C::VEX_Vpmaskmovq_m128_xmm_xmm => masked_store::<B, 8, 2>,
        C::VEX_Vmaskmovpd_m256_ymm_ymm | C::VEX_Vpmaskmovq_m256_ymm_ymm => masked_store::<B, 8, 4>,
        C::VEX_Vpgatherdd_xmm_vm32x_xmm | C::VEX_Vgatherdps_xmm_vm32x_xmm => gather::<B, 4, 4, 4>,
        C::VEX_Vpgatherdd_ymm_vm32y_ymm | C::VEX_Vgatherdps_ymm_vm32y_ymm => gather::<B, 4, 4, 8>,
        C::VEX_Vpgatherdq_xmm_vm32x_xmm | C::VEX_Vgatherdpd_xmm_vm32x_xmm => gather::<B, 4, 8, 2>,
        C::VEX_Vpgatherdq_ymm_vm32x_ymm | C::VEX_Vgatherdpd_ymm_vm32x_ymm => gather::<B, 4, 8, 4>,
        C::VEX_Vpgatherqd_xmm_vm64x_xmm | C::VEX_Vgatherqps_xmm_vm64x_xmm => gather::<B, 8, 4, 2>,
        C::VEX_Vpgatherqd_xmm_vm64y_xmm | C::VEX_Vgatherqps_xmm_vm64y_xmm => gather::<B, 8, 4, 4>,
        C::VEX_Vpgatherqq_xmm_vm64x_xmm | C::VEX_Vgatherqpd_xmm_vm64x_xmm => gather::<B, 8, 8, 2>,
        C::VEX_Vpgatherqq_ymm_vm64y_ymm | C::VEX_Vgatherqpd_ymm_vm64y_ymm => gather::<B, 8, 8, 4>,
        _ => match i.mnemonic() {
            Mnemonic::Maskmovdqu => maskmov::<B, { class::SSE }>,
            Mnemonic::Vmaskmovdqu => maskmov::<B, { class::VEX }>,
            Mnemonic::Maskmovq => maskmov::<B, { class::MMX }>,
            _ => return None,
        },
    };
    Some(h)
}

/// A YMM register as bytes.
type Vector = [u8; 32];

fn vector<B: GuestBus>(e: &Exec<'_, B>, n: u8) -> Vector {
    let mut v = [0; 32];
    v[..16].copy_from_slice(&e.cpu.fp.xmm(usize::from(n)).to_le_bytes());
    v[16..].copy_from_slice(&e.cpu.fp.ymm_hi(usize::from(n)).to_le_bytes());
    v
}

fn set_vector<B: GuestBus>(e: &mut Exec<'_, B>, n: u8, v: &Vector) {
    let (low, high) = v.split_at(16);
    let half = |b: &[u8]| <u128 as x86_cpu::Word>::from_le(b);
    e.cpu.fp.set_xmm(usize::from(n), half(low));
    e.cpu.fp.set_ymm_hi(usize::from(n), half(high));
}

/// The sign bit of an element.
fn selected(mask: &Vector, element: usize, size: usize) -> bool {
    mask[(element * size + size - 1) & 31] & 0x80 != 0
}

/// Reads or checks one element at an offset from the operand's segment.
fn element<B: GuestBus>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    offset: u64,
    len: usize,
    access: Access,
) -> Result<u64, Stop> {
    let offset = offset & u64::MAX >> (insn.addr_shift & 63);
    e.linear_unaligned(insn.seg, offset, len as u64, access)
}

fn masked_load<B: GuestBus, const SIZE: usize, const COUNT: usize>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, { class::VEX }>(e)?;
    let mask = vector(e, insn.src);
    let start = e.effective_address(insn);
    let mut out = [0; 32];
    for n in (0..COUNT).filter(|&n| selected(&mask, n, SIZE)) {
        let at = n * SIZE;
        let gva = element(e, insn, start.wrapping_add(at as u64), SIZE, Access::Read)?;
        e.bus
            .read_bytes(e.cpu, gva, &mut out[at..at + SIZE], Privilege::Current)?;
    }
    set_vector(e, insn.dst, &out);
    Ok(Flow::Next)
}

fn masked_store<B: GuestBus, const SIZE: usize, const COUNT: usize>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, { class::VEX }>(e)?;
    let mask = vector(e, insn.dst);
    let data = vector(e, insn.src);
    let start = e.effective_address(insn);
    let mut chosen = [false; 32];
    for (n, c) in chosen.iter_mut().take(COUNT).enumerate() {
        *c = selected(&mask, n, SIZE);
    }
    store_chosen(e, insn, start, &data, &chosen[..COUNT], SIZE)
}

/// Stores the chosen elements; all are checked before the first is written.
fn store_chosen<B: GuestBus>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    start: u64,
    data: &Vector,
    chosen: &[bool],
    size: usize,
) -> Step {
    for write in [false, true] {
        for n in (0..chosen.len()).filter(|&n| chosen[n]) {
            let at = n * size;
            let offset = start.wrapping_add(at as u64);
            let gva = element(e, insn, offset, size, Access::Write)?;
            if write {
                e.bus
                    .write_bytes(e.cpu, gva, &data[at..at + size], Privilege::Current)?;
            } else {
                e.bus
                    .probe(e.cpu, gva, size as u64, Access::Write, Privilege::Current)?;
            }
        }
    }
    Ok(Flow::Next)
}

/// Byte-wise store to DS:rDI.
fn maskmov<B: GuestBus, const CLASS: u8>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, CLASS>(e)?;
    let operand = |e: &Exec<'_, B>, n: u8| {
        if CLASS == class::MMX {
            // MMX numbers are physical, the area is relative to TOP.
            let top = usize::from(e.cpu.fp.area[FSW + 1] >> 3 & 7);
            let at = ST0 + 16 * (usize::from(n).wrapping_sub(top) & 7);
            let mut v = [0; 32];
            v[..8].copy_from_slice(&e.cpu.fp.area[at..at + 8]);
            v
        } else {
            vector(e, n)
        }
    };
    let data = operand(e, insn.dst);
    let mask = operand(e, insn.src);
    let count = if CLASS == class::MMX { 8 } else { 16 };
    let mut chosen = [false; 16];
    for (c, m) in chosen.iter_mut().zip(mask) {
        *c = m & 0x80 != 0;
    }
    let start = e.effective_address(insn);
    // Bytes that the mask leaves out may fault, too (SDM vol. 2, MASKMOVDQU); on AMD processors they do. Alignment is
    // checked as for an operand of eight bytes.
    e.linear(insn.seg, start, 8, Access::Write)?;
    let gva = element(e, insn, start, count, Access::Write)?;
    e.bus
        .probe(e.cpu, gva, count as u64, Access::Write, Privilege::Current)?;
    store_chosen(e, insn, start, &data, &chosen[..count], 1)?;
    if CLASS == class::MMX {
        // An MMX instruction makes all registers valid and TOP 0 (SDM vol. 1, 9.5).
        e.cpu.fp.area[FTW] = 0xff;
        set_top(e, 0);
    }
    Ok(Flow::Next)
}

/// Prepares the mask before the first element (SDM vol. 2, VGATHERDPS, "Operation"): each element becomes all ones or
/// zero, up to the vector's length. AMD's processors leave the mask as it is.
fn widen_mask(mask: &mut Vector, size: usize, len: usize) {
    let (vector, above) = mask.split_at_mut(len);
    for element in vector.chunks_exact_mut(size) {
        let sign = element.last().is_some_and(|b| b & 0x80 != 0);
        element.fill(if sign { 0xff } else { 0 });
    }
    above.fill(0);
}

/// A gather: `dst` keeps the elements that the mask (`src`) leaves out. At a fault the elements before it are loaded,
/// and their mask bits are clear.
fn gather<B: GuestBus, const INDEX: usize, const SIZE: usize, const COUNT: usize>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, { class::VEX }>(e)?;
    let mut out = vector(e, insn.dst);
    let mut mask = vector(e, insn.src);
    let index = vector(e, insn.index);
    let base = e.cpu.gpr[usize::from(insn.base) & 31].wrapping_add(insn.disp);
    let mut loaded = false;
    for n in 0..COUNT {
        let at = n * SIZE;
        if !selected(&mask, n, SIZE) {
            mask[at..at + SIZE].fill(0);
            continue;
        }
        let i = &index[n * INDEX..(n + 1) * INDEX];
        let i = if INDEX == 4 {
            i64::from(i32::from_le_bytes([i[0], i[1], i[2], i[3]])) as u64
        } else {
            <u64 as x86_cpu::Word>::from_le(i)
        };
        let offset = base.wrapping_add(i << (insn.scale & 3));
        let read = element(e, insn, offset, SIZE, Access::Read).and_then(|gva| {
            Ok(e.bus
                .read_bytes(e.cpu, gva, &mut out[at..at + SIZE], Privilege::Current)?)
        });
        if let Err(stop) = read {
            // An exit to the VMM restarts the whole instruction.
            if stop != Stop::Exit {
                if !e.cpu.features.has(Feature::Amd) {
                    let len = COUNT * SIZE.max(INDEX);
                    widen_mask(&mut mask, SIZE, len);
                    if loaded {
                        out[len..].fill(0);
                    }
                }
                set_vector(e, insn.dst, &out);
                set_vector(e, insn.src, &mask);
            }
            return Err(stop);
        }
        loaded = true;
        mask[at..at + SIZE].fill(0);
    }
    out[COUNT * SIZE..].fill(0);
    set_vector(e, insn.dst, &out);
    set_vector(e, insn.src, &[0; 32]);
    Ok(Flow::Next)
}
