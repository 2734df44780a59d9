//! Selectors as generated code loads and verifies them, without an interpreter around it. What does not end well, or
//! changes a descriptor, is left to the instruction's handler.

use x86_cpu::CpuState;
use x86_defs::{reg, segment::Segment};

use crate::{
    descriptor::{Descriptor, is_null, locate, rpl},
    segment::{check_data, null_segment, real_segment, v86_segment},
};

/// Reads the descriptor in protected mode, and not in virtual-8086 mode. `read` returns the eight bytes at a linear
/// address, as the supervisor reads them.
fn fetch(
    cpu: &CpuState,
    selector: u16,
    read: impl FnOnce(u64) -> Option<u64>,
) -> Option<Descriptor> {
    let gva = locate(cpu, selector, 8)?;
    let gva = if cpu.is_long_mode() {
        gva
    } else {
        gva & 0xffff_ffff
    };
    let lo = read(gva)?;
    Some(Descriptor { lo, hi: 0, gva })
}

/// Returns what ES, DS, FS or GS gets from the selector. `None` if there is an exception, or the descriptor has not
/// been accessed before.
pub fn data_segment(
    cpu: &CpuState,
    selector: u16,
    read: impl FnOnce(u64) -> Option<u64>,
) -> Option<Segment> {
    if is_null(selector) {
        return Some(null_segment(selector, 0));
    }
    let d = fetch(cpu, selector, read)?;
    check_data(d.attr(), selector, cpu.cpl).ok()?;
    d.is_accessed().then(|| d.segment(selector))
}

/// Returns whether VERR, or VERW if `writes`, sets ZF. `None` if that is not known without its handler.
pub fn is_verified(
    cpu: &CpuState,
    selector: u16,
    writes: bool,
    read: impl FnOnce(u64) -> Option<u64>,
) -> Option<bool> {
    if is_null(selector) {
        return Some(false);
    }
    let attr = fetch(cpu, selector, read)?.attr();
    let conforming = attr.is_code() && attr.is_conforming_or_expand_down();
    let is_visible = attr.is_s() && (conforming || rpl(selector).max(cpu.cpl) <= attr.dpl());
    let allows = if writes {
        !attr.is_code() && attr.is_readable_or_writable()
    } else {
        !attr.is_code() || attr.is_readable_or_writable()
    };
    Some(is_visible && allows)
}

/// Returns what CS gets from the selector in real mode or virtual-8086 mode.
pub fn code_in_real_mode(cpu: &CpuState, selector: u16) -> Segment {
    if cpu.is_v86() {
        v86_segment(selector)
    } else {
        real_segment(&cpu.seg[reg::CS], reg::CS, selector)
    }
}
