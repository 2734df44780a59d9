//! Reading and setting the FP state: KVM_GET_FPU, KVM_GET_XSAVE, KVM_GET_XCRS and their counterparts.

use kvm_bindings::*;
use x86_cpu::CpuState;
use x86_defs::xsave;

use crate::{Error, Result, system::pkru_offset};

/// Size of `struct kvm_xsave` in bytes.
pub(super) const XSAVE_SIZE: usize = 4096;

/// Returns the FP state. The tag word stays abridged (one bit per register): kvm_fpu has it so, as FXSAVE does.
pub(super) fn fpu(cpu: &CpuState) -> kvm_fpu {
    let fp = &cpu.fp;
    let mut out = kvm_fpu {
        fcw: fp.u16_at(xsave::FCW),
        fsw: fp.u16_at(xsave::FSW),
        ftwx: fp.area[xsave::FTW],
        last_opcode: fp.u16_at(6),
        mxcsr: fp.mxcsr(),
        ..Default::default()
    };
    let qword = |at: usize| {
        u64::from(fp.u16_at(at))
            | u64::from(fp.u16_at(at + 2)) << 16
            | u64::from(fp.u16_at(at + 4)) << 32
            | u64::from(fp.u16_at(at + 6)) << 48
    };
    out.last_ip = qword(8);
    out.last_dp = qword(16);
    for (i, r) in out.fpr.iter_mut().enumerate() {
        r.copy_from_slice(&fp.area[xsave::ST0 + 16 * i..][..16]);
    }
    for (i, r) in out.xmm.iter_mut().enumerate() {
        r.copy_from_slice(&fp.area[xsave::XMM0 + 16 * i..][..16]);
    }
    out
}

pub(super) fn set_fpu(cpu: &mut CpuState, f: &kvm_fpu) {
    let a = &mut cpu.fp.area;
    a[xsave::FCW..][..2].copy_from_slice(&f.fcw.to_le_bytes());
    a[xsave::FSW..][..2].copy_from_slice(&f.fsw.to_le_bytes());
    a[xsave::FTW] = f.ftwx;
    a[6..8].copy_from_slice(&f.last_opcode.to_le_bytes());
    a[8..16].copy_from_slice(&f.last_ip.to_le_bytes());
    a[16..24].copy_from_slice(&f.last_dp.to_le_bytes());
    a[xsave::MXCSR..][..4].copy_from_slice(&(f.mxcsr & 0xffff).to_le_bytes());
    for (i, r) in f.fpr.iter().enumerate() {
        a[xsave::ST0 + 16 * i..][..16].copy_from_slice(r);
    }
    for (i, r) in f.xmm.iter().enumerate() {
        a[xsave::XMM0 + 16 * i..][..16].copy_from_slice(r);
    }
}

/// Returns the guest's XSAVE image in the standard format, `len` bytes. XSTATE_BV has the components that are in use,
/// as XSAVES on a host with KVM stores it.
pub(super) fn xsave_image(cpu: &CpuState, len: usize) -> Vec<u8> {
    let mut image = vec![0; len];
    let n = len.min(cpu.fp.area.len());
    image[..n].copy_from_slice(&cpu.fp.area[..n]);
    let mut used = cpu.in_use(16);
    if cpu.fp.mxcsr() != xsave::MXCSR_DEFAULT {
        used |= xsave::SSE;
    }
    used &= cpu.features.xcr0 | xsave::X87 | xsave::SSE;
    image[xsave::XSTATE_BV..][..8].copy_from_slice(&used.to_le_bytes());
    image[xsave::XCOMP_BV..xsave::HEADER_END].fill(0);
    image[xsave::MXCSR_MASK..][..4].copy_from_slice(&0x2_ffffu32.to_le_bytes());
    let at = pkru_offset();
    if let Some(place) = image.get_mut(at..at + 4)
        && used & xsave::PKRU != 0
    {
        place.copy_from_slice(&cpu.pkru.to_le_bytes());
    }
    image
}

/// Loads an XSAVE image. Components absent from XSTATE_BV get their initial values. With `lacks_pkru` the image has no
/// PKRU, whatever XSTATE_BV says.
fn set_xsave_image(cpu: &mut CpuState, image: &[u8], lacks_pkru: bool) -> Result<()> {
    let bv = u64_at(image, xsave::XSTATE_BV).ok_or(Error::InvalidArgument)?;
    let mxcsr = u64_at(image, xsave::MXCSR).ok_or(Error::InvalidArgument)? as u32;
    // The components do not depend on the guest's CPUID: a VMM may load the state before it sets that.
    let known = super::cpuid::supported().xcr0 | xsave::X87 | xsave::SSE;
    if bv & !known != 0
        || u64_at(image, xsave::XCOMP_BV) != Some(0)
        || bv & (xsave::SSE | xsave::AVX) != 0 && mxcsr & !0x2_ffff != 0
    {
        return Err(Error::InvalidArgument);
    }
    let area = &mut cpu.fp.area;
    let mut copy = |on: bool, from: usize, to: usize| {
        if on && image.len() >= to {
            area[from..to].copy_from_slice(&image[from..to]);
        } else {
            area[from..to].fill(0);
        }
    };
    copy(bv & xsave::X87 != 0, 0, xsave::MXCSR);
    copy(bv & xsave::X87 != 0, xsave::ST0, xsave::XMM0);
    copy(bv & xsave::SSE != 0, xsave::XMM0, xsave::XMM0 + 256);
    copy(bv & xsave::AVX != 0, xsave::YMM_HI, xsave::YMM_HI + 256);
    if bv & xsave::X87 == 0 {
        area[xsave::FCW..][..2].copy_from_slice(&xsave::FCW_INIT.to_le_bytes());
    }
    let mxcsr = if bv & (xsave::SSE | xsave::AVX) != 0 {
        mxcsr
    } else {
        xsave::MXCSR_DEFAULT
    };
    cpu.fp.set_mxcsr(mxcsr);
    cpu.pkru = match bv & xsave::PKRU {
        0 => 0,
        _ if lacks_pkru => cpu.pkru,
        _ => u64_at(image, pkru_offset()).unwrap_or(0) as u32,
    };
    Ok(())
}

fn u64_at(image: &[u8], at: usize) -> Option<u64> {
    let b = image.get(at..at + 8)?;
    Some(u64::from_le_bytes(b.try_into().ok()?))
}

pub(super) fn xsave(cpu: &CpuState) -> kvm_xsave {
    let image = xsave_image(cpu, XSAVE_SIZE);
    let mut out = kvm_xsave::default();
    for (word, bytes) in out.region.iter_mut().zip(image.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    out
}

pub(super) fn set_xsave(cpu: &mut CpuState, x: &kvm_xsave, lacks_pkru: bool) -> Result<()> {
    let image: Vec<u8> = x.region.iter().flat_map(|w| w.to_le_bytes()).collect();
    set_xsave_image(cpu, &image, lacks_pkru)
}

pub(super) fn xcrs(cpu: &CpuState) -> kvm_xcrs {
    let mut out = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    out.xcrs[0].xcr = 0;
    out.xcrs[0].value = cpu.xcr0;
    out
}

pub(super) fn set_xcrs(cpu: &mut CpuState, x: &kvm_xcrs) -> Result<()> {
    if x.nr_xcrs as usize > x.xcrs.len() || x.flags != 0 {
        return Err(Error::InvalidArgument);
    }
    for xcr in x
        .xcrs
        .iter()
        .take(x.nr_xcrs as usize)
        .filter(|r| r.xcr == 0)
    {
        let v = xcr.value;
        let bad = v & xsave::X87 == 0
            || v & !cpu.features.xcr0 != 0
            || v & xsave::AVX != 0 && v & xsave::SSE == 0;
        if bad {
            return Err(Error::InvalidArgument);
        }
        cpu.xcr0 = v;
    }
    Ok(())
}
