//! Where code is: linear addresses from the instruction pointer, and what the code segment's limit allows.
//!
//! A page of code begins at the instruction pointer `page_of`, which is no multiple of the page's size
//! where CS's base is none. Code is translated where CS has all of a page, so that within one no branch comes to the limit.

use x86_cpu::{CodeSize, CpuState};
use x86_defs::reg;

const PAGE: u64 = 0x1000;

/// The linear address of RIP.
#[inline]
pub(crate) fn code_at(cpu: &CpuState) -> u64 {
    linear(cpu, cpu.rip())
}

/// The linear address of code at an instruction pointer.
#[inline]
pub(crate) fn linear(cpu: &CpuState, ip: u64) -> u64 {
    if cpu.is_64bit() {
        return ip;
    }
    cpu.seg[reg::CS].base.wrapping_add(ip) & 0xffff_ffff
}

/// What a decoder of the code is to be told.
pub(crate) fn code_bits(cpu: &CpuState) -> u32 {
    match cpu.code_size {
        CodeSize::Bits16 => 16,
        CodeSize::Bits32 => 32,
        CodeSize::Bits64 => 64,
    }
}

/// The instruction pointer of the first byte of RIP's page.
#[inline]
pub(crate) fn page_of(cpu: &CpuState) -> u64 {
    cpu.rip().wrapping_sub(code_at(cpu) % PAGE)
}

/// CS has all of RIP's page, and so many behind it. The page in which CS begins is interpreted: firmware has variables beside its code
/// there, so that code would be translated again and again.
pub(crate) fn has_pages(cpu: &CpuState, behind: u64) -> bool {
    let last = page_of(cpu).checked_add((1 + behind) * PAGE - 1);
    cpu.is_64bit() || last.is_some_and(|last| last <= last_of(cpu))
}

/// A near branch of any size that is computed to lead there does so. Others are the interpreter's.
#[inline]
pub(crate) fn may_branch_to(cpu: &CpuState, to: u64) -> bool {
    if cpu.is_64bit() {
        return cpu.is_canonical(to);
    }
    to <= last_of(cpu)
}

/// The last instruction pointer up to which nothing comes to CS's limit, and nothing of 16-bit code to where branches
/// of 16 bits go on at its start.
fn last_of(cpu: &CpuState) -> u64 {
    let limit = u64::from(cpu.seg[reg::CS].limit);
    match cpu.code_size {
        CodeSize::Bits16 => limit.min(0xffff),
        _ => limit,
    }
}
