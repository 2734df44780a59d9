//! Which 32-bit and 16-bit code can be translated: code with flat segments, and code with segments of which nothing but
//! base and limit matters.

use std::collections::HashMap;

use x86_cpu::{CodeSize, CpuState};
use x86_defs::{reg, segment::Segment};

use x86_codegen::ir::mode::Mode;

/// Returns true in 32-bit protected or compatibility mode if addresses in CS, SS, DS and ES are linear addresses
/// without a limit.
pub(crate) fn is_flat(cpu: &CpuState) -> bool {
    let cs = &cpu.seg[reg::CS];
    cpu.code_size == CodeSize::Bits32
        && cpu.is_protected()
        && cs.base == 0
        && cs.limit == u32::MAX
        && cpu.seg[reg::SS].attr.is_big()
        && [reg::ES, reg::SS, reg::DS].into_iter().all(|n| {
            let s = &cpu.seg[n];
            s.base == 0 && is_whole(s)
        })
}

/// Returns true if the code may be translated as [`Mode::SEGMENTED`]: only a segment's limit can refuse an access.
pub(crate) fn has_plain_segments(cpu: &CpuState) -> bool {
    let cs = &cpu.seg[reg::CS];
    // Real mode and virtual-8086 mode ignore the types of segments.
    let is_readable = !has_types(cpu) || cs.attr.is_readable_or_writable();
    let is_up = cs.attr.is_code() || !cs.attr.is_conforming_or_expand_down();
    cpu.code_size != CodeSize::Bits64
        && is_readable
        && is_up
        && cs.limit >= LEAST
        && [reg::ES, reg::SS, reg::DS]
            .into_iter()
            .all(|n| is_plain(&cpu.seg[n]))
}

/// Returns true in protected mode, where accesses are checked against the segment's type.
fn has_types(cpu: &CpuState) -> bool {
    cpu.is_protected() && !cpu.is_v86()
}

/// Returns the mode bits that say what kind of 32-bit or 16-bit code it is; none for 64-bit code.
pub(crate) fn mode_of(cpu: &CpuState) -> Mode {
    if cpu.is_64bit() {
        return Mode::NONE;
    }
    let is_segmented = !is_flat(cpu);
    let usable = |n: usize, bit| {
        let s = &cpu.seg[n];
        if if is_segmented {
            is_plain(s)
        } else {
            is_whole(s)
        } {
            bit
        } else {
            Mode::NONE
        }
    };
    let mut mode = Mode::BITS32 | usable(reg::FS, Mode::FS) | usable(reg::GS, Mode::GS);
    if is_segmented {
        mode |= Mode::SEGMENTED;
        if cpu.code_size == CodeSize::Bits16 {
            mode |= Mode::BITS16;
        }
        if !cpu.seg[reg::SS].attr.is_big() {
            mode |= Mode::STACK16;
        }
        if !has_types(cpu) {
            mode |= Mode::REAL;
        }
        mode |= Mode::beginning((cpu.seg[reg::CS].base & 0xff0) as u32);
    }
    mode
}

/// Smallest limit of a segment that translated code uses: the size of the largest element that bounds are computed for,
/// less one.
const LEAST: u32 = 31;

/// Returns true for present, writable, expand-up data that is not smaller than any element.
fn is_plain(s: &Segment) -> bool {
    s.attr.0 & 0x1_009e == 0x92 && s.limit >= LEAST
}

/// Returns true for such a segment of 4 GiB.
pub(crate) fn is_whole(s: &Segment) -> bool {
    is_plain(s) && s.limit == u32::MAX
}

/// Writes the frame's bounds, which accesses through segments are compared with.
pub(crate) fn set_bounds(cpu: &mut CpuState) {
    let limits = cpu.seg.each_ref().map(|s| s.limit);
    if cpu.engine.bounds_of == limits {
        return;
    }
    cpu.engine.bounds_of = limits;
    cpu.engine.bounds =
        limits.map(|limit| core::array::from_fn(|size| limit.saturating_sub((1 << size) - 1)));
}

/// Names for pairs of a mapping and a code segment, as targets of branches belong to one pair.
#[derive(Debug)]
pub(crate) struct CodeSegments {
    known: HashMap<(u64, u64, u32), u64>,
    /// Pairs that were asked for, and their names, by the segment's base. No name is 0.
    recent: [((u64, u64, u32), u64); RECENT],
    /// The last name that was given.
    last: u64,
}

/// Number of pairs that are found quickly.
const RECENT: usize = 64;

impl Default for CodeSegments {
    fn default() -> Self {
        Self {
            known: HashMap::new(),
            recent: [((0, 0, 0), 0); RECENT],
            last: 0,
        }
    }
}

/// Maximum number of pairs. Beyond it all are forgotten; their names are never given again.
const KNOWN: usize = 1024;

impl CodeSegments {
    /// Returns the name of CS under the epoch.
    pub(crate) fn name(&mut self, cpu: &CpuState, epoch: u64) -> u64 {
        let cs = &cpu.seg[reg::CS];
        let of = (epoch, cs.base, cs.limit);
        let recent = &mut self.recent[(cs.base >> 4 ^ cs.base >> 10) as usize % RECENT];
        if recent.0 == of && recent.1 != 0 {
            return recent.1;
        }
        if self.known.len() >= KNOWN {
            self.known.clear();
        }
        let name = *self.known.entry(of).or_insert_with(|| {
            self.last += 1;
            self.last
        });
        *recent = (of, name);
        name
    }
}
