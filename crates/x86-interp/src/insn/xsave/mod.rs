//! FXSAVE, FXRSTOR and the XSAVE family (SDM vol. 1, 10.5 and chapter 13).
//!
//! The vCPU's area is an image in the standard format that always holds
//! current values; a component is in use if it differs from its initial state.

use iced_x86::{Instruction, Mnemonic};
use x86_cpu::{Access, CpuState, Exception, Feature, GuestBus, Privilege};
use x86_defs::{
    control::{cr0, cr4, efer},
    reg,
    xsave::{
        FCW, FCW_INIT, HEADER_END, HI16_ZMM, LEGACY_SIZE, MXCSR, MXCSR_DEFAULT, MXCSR_MASK, OPMASK,
        PKRU, SSE, ST0, X87, XMM0, YMM_HI, ZMM_HI256,
    },
};

use super::{Handler, Insn};
use crate::{Exec, Flow, Step, Stop};

/// Components that exist, less the legacy two.
const EXTENDED: u64 = x86_defs::xsave::AVX | OPMASK | ZMM_HI256 | HI16_ZMM | PKRU;
/// Bit 63 of XCOMP_BV: compacted format.
const COMPACT: u64 = 1 << 63;
/// End of the registers in the legacy region; the rest is software's.
const LEGACY_USED: usize = XMM0 + 256;

const KIND_XSAVE: u8 = 0;
const KIND_XSAVEOPT: u8 = 1;
const KIND_XSAVEC: u8 = 2;
const KIND_XSAVES: u8 = 3;

/// The handler of a state-image instruction.
pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    use Mnemonic as M;
    let h: Handler<B> = match i.mnemonic() {
        M::Fxsave => fxsave::<B, false>,
        M::Fxsave64 => fxsave::<B, true>,
        M::Fxrstor => fxrstor::<B, false>,
        M::Fxrstor64 => fxrstor::<B, true>,
        M::Xsave => xsave::<B, KIND_XSAVE, false>,
        M::Xsave64 => xsave::<B, KIND_XSAVE, true>,
        M::Xsaveopt => xsave::<B, KIND_XSAVEOPT, false>,
        M::Xsaveopt64 => xsave::<B, KIND_XSAVEOPT, true>,
        M::Xsavec => xsave::<B, KIND_XSAVEC, false>,
        M::Xsavec64 => xsave::<B, KIND_XSAVEC, true>,
        M::Xsaves => xsave::<B, KIND_XSAVES, false>,
        M::Xsaves64 => xsave::<B, KIND_XSAVES, true>,
        M::Xrstor => xrstor::<B, false, false>,
        M::Xrstor64 => xrstor::<B, false, true>,
        M::Xrstors => xrstor::<B, true, false>,
        M::Xrstors64 => xrstor::<B, true, true>,
        _ => return None,
    };
    Some(h)
}

fn nr_xmm(cpu: &CpuState) -> usize {
    if cpu.is_64bit() { 16 } else { 8 }
}

/// Returns the x87 part of the legacy region. Without REX.W a 64-bit pointer is cut to its offset and selector;
/// selectors are deprecated and zero in 64-bit code.
fn x87_header(cpu: &CpuState, wide: bool) -> [u8; MXCSR] {
    let mut h = [0; MXCSR];
    h.copy_from_slice(&cpu.fp.area[..MXCSR]);
    h[5] = 0;
    if cpu.is_64bit() && !wide {
        h[12..16].fill(0);
        h[20..24].fill(0);
    } else if !wide {
        // Bytes 14 and 22 are reserved.
        h[14..16].fill(0);
        h[22..24].fill(0);
    }
    h
}

/// Returns the legacy region as it is saved: the x87 part, MXCSR with its mask, ST0 to ST7 and the XMM registers.
fn legacy_image(cpu: &CpuState, wide: bool) -> [u8; LEGACY_USED] {
    let mut image = [0; LEGACY_USED];
    image.copy_from_slice(&cpu.fp.area[..LEGACY_USED]);
    image[..MXCSR].copy_from_slice(&x87_header(cpu, wide));
    image[MXCSR_MASK..ST0].copy_from_slice(&x86_native::host_mask().to_le_bytes());
    image
}

/// Loads the x87 part from a legacy region.
fn load_x87(cpu: &mut CpuState, image: &[u8; LEGACY_SIZE], wide: bool) {
    cpu.fp.area[..MXCSR].copy_from_slice(&image[..MXCSR]);
    cpu.fp.area[5] = 0;
    // FCW bit 6 always reads as one; 13 to 15 and 7 as zero.
    let fcw = cpu.fp.u16_at(FCW) & 0x1f3f | 0x40;
    let fsw = cpu.fp.u16_at(2) & 0x7f7f;
    let pending = fsw & !fcw & 0x3f != 0;
    let fsw = fsw | if pending { 0x8080 } else { 0 };
    cpu.fp.area[..2].copy_from_slice(&fcw.to_le_bytes());
    cpu.fp.area[2..4].copy_from_slice(&fsw.to_le_bytes());
    cpu.fp.area[7] &= 7;
    if cpu.is_64bit() && !wide {
        cpu.fp.area[12..16].fill(0);
        cpu.fp.area[20..24].fill(0);
    }
    for n in 0..8 {
        let at = ST0 + 16 * n;
        cpu.fp.area[at..at + 10].copy_from_slice(&image[at..at + 10]);
    }
}

fn init_x87(cpu: &mut CpuState) {
    cpu.fp.area[..MXCSR].fill(0);
    cpu.fp.area[ST0..XMM0].fill(0);
    cpu.fp.area[FCW..FCW + 2].copy_from_slice(&FCW_INIT.to_le_bytes());
}

fn mxcsr_of(image: &[u8; LEGACY_SIZE]) -> u32 {
    u32::from_le_bytes([
        image[MXCSR],
        image[MXCSR + 1],
        image[MXCSR + 2],
        image[MXCSR + 3],
    ])
}

/// Makes the checks of FXSAVE and FXRSTOR; returns the operand's linear address.
fn fx_operand<B: GuestBus>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    access: Access,
) -> Result<u64, Stop> {
    if e.cpu.cr0 & (cr0::EM | cr0::TS) != 0 {
        return Err(Exception::NM.into());
    }
    let gva = e.mem_linear(insn, LEGACY_SIZE as u64, access)?;
    if gva & 15 != 0 {
        return Err(Exception::GP0.into());
    }
    Ok(gva)
}

/// True with EFER.FFXSR at CPL 0 in 64-bit mode: the XMM registers are left out.
fn is_fast(cpu: &CpuState) -> bool {
    cpu.efer & efer::FFXSR != 0 && cpu.cpl == 0 && cpu.is_64bit()
}

fn fxsave<B: GuestBus, const WIDE: bool>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let gva = fx_operand(e, insn, Access::Write)?;
    let image = legacy_image(e.cpu, WIDE);
    let end = if is_fast(e.cpu) {
        XMM0
    } else {
        XMM0 + 16 * nr_xmm(e.cpu)
    };
    e.bus
        .write_bytes(e.cpu, gva, &image[..end], Privilege::Current)?;
    Ok(Flow::Next)
}

fn fxrstor<B: GuestBus, const WIDE: bool>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let gva = fx_operand(e, insn, Access::Read)?;
    let mut image = [0; LEGACY_SIZE];
    e.bus
        .read_bytes(e.cpu, gva, &mut image, Privilege::Current)?;
    let mxcsr = mxcsr_of(&image);
    if mxcsr & !x86_native::host_mask() != 0 {
        return Err(Exception::GP0.into());
    }
    load_x87(e.cpu, &image, WIDE);
    e.cpu.fp.set_mxcsr(mxcsr);
    if !is_fast(e.cpu) {
        let end = XMM0 + 16 * nr_xmm(e.cpu);
        e.cpu.fp.area[XMM0..end].copy_from_slice(&image[XMM0..end]);
    }
    Ok(Flow::Next)
}

/// Where an extended component is: offset and size in the standard format, and whether the compacted format aligns it.
/// For AVX-512 these come from CPUID.
struct ComponentPlace {
    bit: u64,
    standard: usize,
    size: usize,
    aligned: bool,
    /// Offset in the vCPU's area, unless it is PKRU.
    own: Option<usize>,
}

fn place<B: GuestBus>(e: &mut Exec<'_, B>, bit: u64) -> ComponentPlace {
    // These two are constants, because every task switch asks for them.
    let known = match bit {
        x86_defs::xsave::AVX => Some((YMM_HI, 256, Some(YMM_HI))),
        PKRU => Some((usize::from(e.cpu.features.pkru_offset), 8, None)),
        _ => None,
    };
    if let Some((standard, size, own)) = known {
        return ComponentPlace {
            bit,
            standard,
            size,
            aligned: false,
            own,
        };
    }
    let [size, offset, flags, _] = e.bus.cpuid(e.cpu, 0xd, bit.trailing_zeros());
    let (own, real_size) = match bit {
        OPMASK => (1088, 64),
        ZMM_HI256 => (1152, 512),
        _ => (1664, 1024),
    };
    let standard = if offset >= HEADER_END as u32 && size != 0 {
        offset as usize
    } else {
        own
    };
    ComponentPlace {
        bit,
        standard,
        size: real_size,
        aligned: flags & 2 != 0,
        own: Some(own),
    }
}

fn bits(mut mask: u64) -> impl Iterator<Item = u64> {
    core::iter::from_fn(move || {
        let lowest = mask & mask.wrapping_neg();
        mask ^= lowest;
        (lowest != 0).then_some(lowest)
    })
}

/// Returns the contents of an extended component, which has `size` bytes.
fn component(cpu: &CpuState, p: &ComponentPlace) -> [u8; 1024] {
    let mut b = [0; 1024];
    match p.own {
        Some(at) => b[..p.size].copy_from_slice(&cpu.fp.area[at..at + p.size]),
        None => b[..4].copy_from_slice(&cpu.pkru.to_le_bytes()),
    }
    b
}

fn set_component(cpu: &mut CpuState, p: &ComponentPlace, b: &[u8]) {
    match p.own {
        Some(at) => {
            // Outside 64-bit mode the upper eight registers keep their values.
            let n = if p.bit == x86_defs::xsave::AVX {
                16 * nr_xmm(cpu)
            } else {
                p.size
            };
            cpu.fp.area[at..at + n].copy_from_slice(&b[..n]);
        }
        None => cpu.pkru = u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
    }
}

/// Makes the checks of the whole family; returns the linear address of the image and the requested components.
fn x_operand<B: GuestBus>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    supervisor: bool,
    access: Access,
) -> Result<(u64, u64), Stop> {
    if e.cpu.cr4 & cr4::OSXSAVE == 0 {
        return Err(Exception::UD.into());
    }
    if e.cpu.cr0 & cr0::TS != 0 {
        return Err(Exception::NM.into());
    }
    if supervisor && e.cpu.cpl != 0 {
        return Err(Exception::GP0.into());
    }
    let gva = e.mem_linear(insn, HEADER_END as u64, access)?;
    if gva & 63 != 0 {
        return Err(Exception::GP0.into());
    }
    let mut enabled = e.cpu.xcr0;
    if supervisor {
        enabled |= e.cpu.xss;
    }
    let requested = e.cpu.gpr[reg::RAX] & 0xffff_ffff | (e.cpu.gpr[reg::RDX] & 0xffff_ffff) << 32;
    Ok((gva, requested & enabled))
}

/// Components with their offsets.
type ComponentPlaces = [Option<(ComponentPlace, u64)>; 8];

/// Components of `mask` with their offsets in the compacted format.
fn compacted<B: GuestBus>(e: &mut Exec<'_, B>, mask: u64) -> ComponentPlaces {
    let mut places = [const { None }; 8];
    let mut at = HEADER_END;
    for (slot, bit) in places.iter_mut().zip(bits(mask & EXTENDED)) {
        let p = place(e, bit);
        if p.aligned {
            at = at.next_multiple_of(64);
        }
        let here = at;
        at += p.size;
        *slot = Some((p, here as u64));
    }
    places
}

/// Components of `mask` with their offsets in the standard format.
fn standard<B: GuestBus>(e: &mut Exec<'_, B>, mask: u64) -> ComponentPlaces {
    let mut places = [const { None }; 8];
    for (slot, bit) in places.iter_mut().zip(bits(mask & EXTENDED)) {
        let p = place(e, bit);
        let at = p.standard as u64;
        *slot = Some((p, at));
    }
    places
}

fn xsave<B: GuestBus, const KIND: u8, const WIDE: bool>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    let (gva, rfbm) = x_operand(e, insn, KIND == KIND_XSAVES, Access::Write)?;
    let compact = matches!(KIND, KIND_XSAVEC | KIND_XSAVES);
    let mut used = e.cpu.in_use(nr_xmm(e.cpu));
    if KIND != KIND_XSAVE && e.cpu.fp.mxcsr() != MXCSR_DEFAULT {
        used |= SSE;
    }
    // XSAVE writes every requested component; the others only those in use.
    let write = if KIND == KIND_XSAVE {
        rfbm
    } else {
        rfbm & used
    };
    let mut parts = [const { None }; 8];
    let mut end = HEADER_END as u64;
    let mut count = 0;
    let mut note = |(p, at): (ComponentPlace, u64)| {
        end = end.max(at + p.size as u64);
        if write & p.bit != 0
            && let Some(slot) = parts.get_mut(count)
        {
            *slot = Some((p, at));
            count += 1;
        }
    };
    let places = if compact {
        compacted(e, rfbm)
    } else {
        standard(e, rfbm)
    };
    places.into_iter().flatten().for_each(&mut note);
    let p = Privilege::Current;
    e.bus.probe(e.cpu, gva, end, Access::Write, p)?;
    let with_mxcsr = if compact {
        write & SSE != 0
    } else {
        rfbm & (SSE | x86_defs::xsave::AVX) != 0
    };
    let written = [write & X87 != 0, with_mxcsr, write & SSE != 0];
    write_legacy::<B, WIDE>(e, gva, written)?;
    for (place, at) in parts.into_iter().flatten() {
        let gva = gva.wrapping_add(at);
        if place.bit == x86_defs::xsave::AVX {
            let mut ymm = [0; 256];
            ymm.copy_from_slice(&e.cpu.fp.area[YMM_HI..YMM_HI + 256]);
            let n = 16 * nr_xmm(e.cpu);
            e.bus.write_bytes(e.cpu, gva, &ymm[..n], p)?;
        } else if place.bit == PKRU {
            e.bus.write(e.cpu, gva, u64::from(e.cpu.pkru), p)?;
        } else {
            let b = component(e.cpu, &place);
            e.bus.write_bytes(e.cpu, gva, &b[..place.size], p)?;
        }
    }
    let header = gva.wrapping_add(LEGACY_SIZE as u64);
    if compact {
        let words = u128::from(rfbm & used) | u128::from(rfbm | COMPACT) << 64;
        e.bus.write_bytes(e.cpu, header, &words.to_le_bytes(), p)?;
    } else {
        let old: u64 = e.bus.read(e.cpu, header, p)?;
        e.bus.write(e.cpu, header, old & !rfbm | rfbm & used, p)?;
    }
    Ok(Flow::Next)
}

/// Writes the legacy region of an image: the x87 part, MXCSR with its mask, and the XMM registers, if they are
/// `written`. What lies side by side is written at once, because every task switch does that.
fn write_legacy<B: GuestBus, const WIDE: bool>(
    e: &mut Exec<'_, B>,
    gva: u64,
    written: [bool; 3],
) -> Result<(), Stop> {
    let [x87, mxcsr, sse] = written;
    let image = legacy_image(e.cpu, WIDE);
    let parts = [
        (0, MXCSR, x87),
        (MXCSR, ST0, mxcsr),
        (ST0, XMM0, x87),
        (XMM0, XMM0 + 16 * nr_xmm(e.cpu), sse),
    ];
    let mut from = None;
    for (n, (begin, end, is_written)) in parts.into_iter().enumerate() {
        if !is_written {
            continue;
        }
        let begin = *from.get_or_insert(begin);
        if parts.get(n + 1).is_none_or(|next| !next.2) {
            from = None;
            let at = gva.wrapping_add(begin as u64);
            e.bus
                .write_bytes(e.cpu, at, &image[begin..end], Privilege::Current)?;
        }
    }
    Ok(())
}

/// Checks the three meaningful parts of the header (SDM vol. 1, 13.8.1, 13.12).
fn check_header(cpu: &CpuState, header: &[u8], supervisor: bool) -> Result<(u64, u64), Stop> {
    let word = |at: usize| <u64 as x86_cpu::Word>::from_le(&header[at..at + 8]);
    let (bv, comp) = (word(0), word(8));
    let enabled = cpu.xcr0 | if supervisor { cpu.xss } else { 0 };
    let compact = comp & COMPACT != 0;
    let valid = if compact {
        let can = supervisor || cpu.features.has(Feature::Xsavec);
        can && comp & !COMPACT & !enabled == 0
            && bv & !(comp & !COMPACT) == 0
            && header[16..64].iter().all(|&b| b == 0)
    } else {
        !supervisor && bv & !enabled == 0 && header[8..24].iter().all(|&b| b == 0)
    };
    if valid {
        Ok((bv, comp))
    } else {
        Err(Exception::GP0.into())
    }
}

fn xrstor<B: GuestBus, const SUPERVISOR: bool, const WIDE: bool>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    let (gva, rfbm) = x_operand(e, insn, SUPERVISOR, Access::Read)?;
    let p = Privilege::Current;
    let mut image = [0; HEADER_END];
    e.bus.read_bytes(e.cpu, gva, &mut image, p)?;
    let mut legacy = [0; LEGACY_SIZE];
    legacy.copy_from_slice(&image[..LEGACY_SIZE]);
    let (bv, comp) = check_header(e.cpu, &image[LEGACY_SIZE..], SUPERVISOR)?;
    let compact = comp & COMPACT != 0;
    let load = rfbm & bv;
    let mxcsr = if compact {
        match (rfbm & SSE != 0, load & SSE != 0) {
            (true, true) => Some(mxcsr_of(&legacy)),
            (true, false) => Some(MXCSR_DEFAULT),
            _ => None,
        }
    } else {
        (rfbm & (SSE | x86_defs::xsave::AVX) != 0).then(|| mxcsr_of(&legacy))
    };
    if mxcsr.is_some_and(|v| v & !x86_native::host_mask() != 0) {
        return Err(Exception::GP0.into());
    }
    // Everything is read before anything is loaded, so a fault changes nothing. (AVX has a buffer of its own. The
    // buffers of other components, which few guests have, are large.)
    let mut ymm = None;
    let mut parts = Vec::new();
    let places = if compact {
        compacted(e, comp & !COMPACT)
    } else {
        standard(e, rfbm)
    };
    for (place, at) in places.into_iter().flatten() {
        if load & place.bit == 0 {
            continue;
        }
        let gva = gva.wrapping_add(at);
        if place.bit == x86_defs::xsave::AVX {
            let mut b = [0; 256];
            e.bus.read_bytes(e.cpu, gva, &mut b, p)?;
            ymm = Some((place, b));
        } else {
            let mut b = vec![0; place.size];
            e.bus.read_bytes(e.cpu, gva, &mut b, p)?;
            parts.push((place, b));
        }
    }
    let pkru = e.cpu.pkru;
    if load & X87 != 0 {
        load_x87(e.cpu, &legacy, WIDE);
    } else if rfbm & X87 != 0 {
        init_x87(e.cpu);
    }
    if rfbm & SSE != 0 {
        let end = XMM0 + 16 * nr_xmm(e.cpu);
        if load & SSE != 0 {
            e.cpu.fp.area[XMM0..end].copy_from_slice(&legacy[XMM0..end]);
        } else {
            e.cpu.fp.area[XMM0..end].fill(0);
        }
    }
    if let Some(v) = mxcsr {
        e.cpu.fp.set_mxcsr(v);
    }
    for bit in bits(rfbm & EXTENDED & !load) {
        let place = place(e, bit);
        set_component(e.cpu, &place, &[0; 1024]);
    }
    if let Some((place, b)) = &ymm {
        set_component(e.cpu, place, b);
    }
    for (place, b) in &parts {
        set_component(e.cpu, place, b);
    }
    if e.cpu.pkru != pkru {
        e.bus.select_view(e.cpu);
    }
    Ok(Flow::Next)
}

#[cfg(test)]
mod tests;
