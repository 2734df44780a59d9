//! Where code is: linear addresses from the instruction pointer, and what the code segment's limit allows.
//!
//! A page of code begins at the instruction pointer `page_of`, which is no multiple of the page's size if CS's base is
//! none, and below zero for the page in which CS begins. Code is translated where CS has a page to its end, so that no
//! branch within the page can reach the limit. `Mode::is_near` knows the branches to before CS's begin.

use x86_cpu::{CodeSize, CpuState};
use x86_defs::reg;

const PAGE: u64 = 0x1000;

/// Returns the linear address of RIP.
#[inline]
pub fn code_at(cpu: &CpuState) -> u64 {
    linear(cpu, cpu.rip())
}

/// Returns the linear address of code at an instruction pointer.
#[inline]
pub fn linear(cpu: &CpuState, ip: u64) -> u64 {
    if cpu.is_64bit() {
        return ip;
    }
    cpu.seg[reg::CS].base.wrapping_add(ip) & 0xffff_ffff
}

/// Returns the size of code in bits, for a decoder.
pub fn code_bits(cpu: &CpuState) -> u32 {
    match cpu.code_size {
        CodeSize::Bits16 => 16,
        CodeSize::Bits32 => 32,
        CodeSize::Bits64 => 64,
    }
}

/// Returns the instruction pointer of the first byte of RIP's page.
#[inline]
pub fn page_of(cpu: &CpuState) -> u64 {
    cpu.rip().wrapping_sub(code_at(cpu) % PAGE)
}

/// Returns true if CS has RIP's page to its end, and `behind` pages more. CS may begin in the page, at a multiple of 16
/// (see [`crate::ir::mode::Mode::beginning`]).
pub fn has_pages(cpu: &CpuState, behind: u64) -> bool {
    let first = page_of(cpu);
    let last = first.wrapping_add((1 + behind) * PAGE - 1);
    let is_first = first > cpu.rip();
    let has_mode = !is_first || cpu.seg[reg::CS].base.is_multiple_of(16);
    cpu.is_64bit() || has_mode && last <= last_of(cpu)
}

/// Returns true if a near branch of any size whose computed target is `to` leads there. The interpreter executes other
/// branches.
#[inline]
pub fn may_branch_to(cpu: &CpuState, to: u64) -> bool {
    if cpu.is_64bit() {
        return cpu.is_canonical(to);
    }
    to <= last_of(cpu)
}

/// Returns the highest instruction pointer that CS's limit allows; in 16-bit code at most 0xffff, behind which branches
/// go on at 0.
fn last_of(cpu: &CpuState) -> u64 {
    let limit = u64::from(cpu.seg[reg::CS].limit);
    match cpu.code_size {
        CodeSize::Bits16 => limit.min(0xffff),
        _ => limit,
    }
}
