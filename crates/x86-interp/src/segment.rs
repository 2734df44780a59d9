//! Loading segment registers (SDM vol. 2, MOV; vol. 3, 3.4 and 5.5).
//!
//! Functions here check and compute; they change no register, so that an
//! instruction commits everything at its end.

use x86_cpu::{Exception, GuestBus};
use x86_defs::{
    reg,
    segment::{Attr, Segment},
    vector,
};

use crate::{
    Exec, Stop,
    descriptor::{Descriptor, is_null, rpl, selector_code},
};

/// #GP(selector).
pub(crate) const fn gp(selector: u16) -> Exception {
    Exception::with_code(vector::GP, selector_code(selector))
}

/// #NP(selector).
pub(crate) const fn np(selector: u16) -> Exception {
    Exception::with_code(vector::NP, selector_code(selector))
}

/// A register loaded with a null selector. `cpl` is kept as SS.DPL, as VMX does.
pub(crate) const fn null_segment(selector: u16, cpl: u8) -> Segment {
    Segment {
        base: 0,
        limit: 0,
        attr: Attr(Attr::UNUSABLE | (cpl as u32) << 5),
        selector,
    }
}

/// What any selector loads in virtual-8086 mode (SDM vol. 3, 21.2.1).
pub(crate) const fn v86_segment(selector: u16) -> Segment {
    Segment {
        base: (selector as u64) << 4,
        limit: 0xffff,
        attr: Attr(0xf3),
        selector,
    }
}

/// What a selector loads in real mode: limit and size stay as they were, which
/// is what makes "unreal" mode work.
pub(crate) const fn real_segment(old: &Segment, sreg: usize, selector: u16) -> Segment {
    let kind = if sreg == reg::CS { 0x9b } else { 0x93 };
    let (limit, size) = if old.attr.is_unusable() {
        (0xffff, 0)
    } else {
        (old.limit, old.attr.0 & (Attr::G | Attr::DB | Attr::AVL))
    };
    Segment {
        base: (selector as u64) << 4,
        limit,
        attr: Attr(size | kind),
        selector,
    }
}

/// True if `len` bytes at `offset` are inside the segment's limit (SDM vol. 3, 5.3).
pub(crate) fn contains(seg: &Segment, offset: u64, len: u64) -> bool {
    let Some(last) = offset.checked_add(len.wrapping_sub(1)) else {
        return false;
    };
    let expand_down = seg.attr.is_s() && seg.attr.0 & 0xc == 4;
    if expand_down {
        let top = if seg.attr.is_big() {
            0xffff_ffff
        } else {
            0xffff
        };
        offset > u64::from(seg.limit) && last <= top
    } else {
        last <= u64::from(seg.limit)
    }
}

/// Returns whether the privilege level, and the selector's RPL, may see what a descriptor of code or data describes.
pub(crate) fn is_visible(attr: Attr, selector: u16, cpl: u8) -> bool {
    let conforming = attr.is_code() && attr.is_conforming_or_expand_down();
    conforming || rpl(selector).max(cpl) <= attr.dpl()
}

/// Checks a descriptor for ES, DS, FS or GS.
pub(crate) fn check_data(attr: Attr, selector: u16, cpl: u8) -> Result<(), Exception> {
    if !attr.is_s() || attr.is_code() && !attr.is_readable_or_writable() {
        return Err(gp(selector));
    }
    if !is_visible(attr, selector, cpl) {
        return Err(gp(selector));
    }
    if !attr.is_present() {
        return Err(np(selector));
    }
    Ok(())
}

impl<B: GuestBus> Exec<'_, B> {
    /// Checks a selector for ES, SS, DS, FS or GS and returns what the register gets.
    pub(crate) fn data_segment(&mut self, sreg: usize, selector: u16) -> Result<Segment, Stop> {
        if !self.cpu.is_protected() {
            return Ok(real_segment(&self.cpu.seg[sreg], sreg, selector));
        }
        if self.cpu.is_v86() {
            return Ok(v86_segment(selector));
        }
        if sreg == reg::SS {
            return self.stack_segment(selector, self.cpu.cpl, vector::GP);
        }
        if is_null(selector) {
            return Ok(null_segment(selector, 0));
        }
        let d = self.descriptor(selector, vector::GP)?;
        check_data(d.attr(), selector, self.cpu.cpl)?;
        self.set_accessed(&d)?;
        Ok(d.segment(selector))
    }

    /// Checks a selector for SS at privilege level `cpl`; violations raise
    /// `vector`: #GP for instructions, #TS for stacks out of a TSS.
    pub(crate) fn stack_segment(
        &mut self,
        selector: u16,
        cpl: u8,
        vector: u8,
    ) -> Result<Segment, Stop> {
        if is_null(selector) {
            // Only 64-bit code below CPL 3 may run without a stack segment.
            if vector == vector::GP && self.cpu.is_64bit() && cpl < 3 && rpl(selector) == cpl {
                return Ok(null_segment(selector, cpl));
            }
            return Err(Exception::with_code(vector, 0).into());
        }
        let d = self.descriptor(selector, vector)?;
        self.stack_segment_from(&d, selector, cpl, vector)
    }

    /// [`Self::stack_segment`] with the descriptor at hand.
    pub(crate) fn stack_segment_from(
        &mut self,
        d: &Descriptor,
        selector: u16,
        cpl: u8,
        vector: u8,
    ) -> Result<Segment, Stop> {
        let attr = d.attr();
        let writable = attr.is_s() && !attr.is_code() && attr.is_readable_or_writable();
        if rpl(selector) != cpl || !writable || attr.dpl() != cpl {
            return Err(Exception::with_code(vector, selector_code(selector)).into());
        }
        if !attr.is_present() {
            return Err(Exception::with_code(vector::SS, selector_code(selector)).into());
        }
        self.set_accessed(d)?;
        Ok(d.segment(selector))
    }
}
