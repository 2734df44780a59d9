//! Selectors as generated code loads and verifies them, without an interpreter around it. What does not end well, or
//! changes a descriptor, is left to the instruction's handler.

use x86_cpu::CpuState;
use x86_defs::{reg, segment::Segment};

use crate::{
    descriptor::{Descriptor, is_null, locate},
    segment::{check_data, is_visible, null_segment, real_segment, v86_segment},
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

/// What an instruction asks about a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// VERR.
    Readable,
    /// VERW.
    Writable,
    /// LAR.
    AccessRights,
    /// LSL.
    Limit,
}

impl About {
    /// Returns the instruction's result for a descriptor that is visible, 0 where it has none. `None`: it clears ZF.
    pub(crate) fn answer(self, d: &Descriptor) -> Option<u32> {
        let attr = d.attr();
        let allows = attr.is_readable_or_writable();
        match self {
            Self::Readable => (attr.is_s() && (!attr.is_code() || allows)).then_some(0),
            Self::Writable => (attr.is_s() && !attr.is_code() && allows).then_some(0),
            // The limit's bits, which Intel's manual leaves undefined, are those of the descriptor (APM vol. 3, LAR).
            Self::AccessRights => Some((d.lo >> 32) as u32 & 0x00ff_ff00),
            Self::Limit => Some(d.limit()),
        }
    }
}

/// Returns the instruction's result, 0 where it has none, or an inner `None` if it clears ZF. The outer `None`: that is
/// not known without its handler.
pub fn ask(
    cpu: &CpuState,
    selector: u16,
    about: About,
    read: impl FnOnce(u64) -> Option<u64>,
) -> Option<Option<u32>> {
    if is_null(selector) {
        return Some(None);
    }
    let d = fetch(cpu, selector, read)?;
    // What descriptors of the system's say depends on the mode.
    if !d.attr().is_s() && matches!(about, About::AccessRights | About::Limit) {
        return None;
    }
    let is_visible = is_visible(d.attr(), selector, cpu.cpl);
    Some(about.answer(&d).filter(|_| is_visible))
}

/// Returns what CS gets from the selector in real mode or virtual-8086 mode.
pub fn code_in_real_mode(cpu: &CpuState, selector: u16) -> Segment {
    if cpu.is_v86() {
        v86_segment(selector)
    } else {
        real_segment(&cpu.seg[reg::CS], reg::CS, selector)
    }
}
