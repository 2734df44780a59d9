//! Hardware task switch (SDM vol. 3, 8.3), outside long mode.
//!
//! DEVIATION: faults that the new task's segment loads raise are raised in the
//! old task's context with the new state discarded, not in the new task's.

use x86_cpu::{CpuState, Exception, GuestBus, Privilege};
use x86_defs::{
    control::cr0,
    dr, reg, rflags,
    segment::{Attr, Segment, system},
    vector,
};

use crate::{
    Exec, Stop,
    descriptor::{is_null, rpl, selector_code},
    segment::{gp, np, null_segment, v86_segment},
    stack::Stack,
};

/// What caused the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// JMP: the old task is no longer busy.
    Jmp,
    /// CALL: the new task is nested.
    Call,
    /// IRET with NT set: back to the previous task.
    Iret,
    /// A task gate in the IDT: nested, with the error code on the new stack.
    Interrupt {
        /// Pushed after the switch.
        error_code: Option<u16>,
    },
}

/// Segment order in a TSS.
const SREGS: [usize; 6] = [reg::ES, reg::CS, reg::SS, reg::DS, reg::FS, reg::GS];

/// Offsets in the two TSS formats (SDM vol. 3, figures 8-2 and 8-10).
struct Layout {
    size: u8,
    min_limit: u32,
    eip: u64,
    gpr: u64,
    seg: u64,
    nr_seg: usize,
    ldt: u64,
}

const TSS32: Layout = Layout {
    size: 4,
    min_limit: 0x67,
    eip: 0x20,
    gpr: 0x28,
    seg: 0x48,
    nr_seg: 6,
    ldt: 0x60,
};

const TSS16: Layout = Layout {
    size: 2,
    min_limit: 0x2b,
    eip: 0x0e,
    gpr: 0x12,
    seg: 0x22,
    nr_seg: 4,
    ldt: 0x2a,
};

impl Layout {
    fn of(kind: u32) -> &'static Self {
        if kind & 8 != 0 { &TSS32 } else { &TSS16 }
    }
}

/// Switches to the task of TSS `selector`; the old task resumes at `rip` with `flags`.
pub(crate) fn switch<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    selector: u16,
    reason: Reason,
    rip: u64,
    flags: u64,
) -> Result<(), Stop> {
    let bad = if reason == Reason::Iret {
        vector::TS
    } else {
        vector::GP
    };
    if is_null(selector) || selector & 4 != 0 {
        return Err(Exception::with_code(bad, selector_code(selector)).into());
    }
    let d = ex.descriptor(selector, bad)?;
    let attr = d.attr();
    let expected = if reason == Reason::Iret {
        [system::TSS16_BUSY, system::TSS32_BUSY]
    } else {
        [system::TSS16_AVAILABLE, system::TSS32_AVAILABLE]
    };
    if attr.is_s() || !expected.contains(&attr.kind()) {
        return Err(Exception::with_code(bad, selector_code(selector)).into());
    }
    if !attr.is_present() {
        return Err(np(selector).into());
    }
    let new = Layout::of(attr.kind());
    if d.limit() < new.min_limit {
        return Err(Exception::with_code(vector::TS, selector_code(selector)).into());
    }
    let saved = ex.cpu.clone();
    let saved_flags = ex.flags;
    let result = switch_to(ex, selector, d.segment(selector), d.gva, reason, rip, flags);
    if result.is_err() {
        let (gva, dr6) = (ex.cpu.fault_gva, ex.cpu.fault_dr6);
        let root = ex.cpu.cr3 != saved.cr3;
        ex.cpu.put_back(saved);
        ex.cpu.fault_gva = gva;
        ex.cpu.fault_dr6 = dr6;
        ex.flags = saved_flags;
        if root {
            ex.bus.load_root(ex.cpu)?;
        }
        ex.bus.select_view(ex.cpu);
    }
    ex.refresh();
    if result? {
        // The T bit traps after the switch, in the new task.
        ex.cpu.fault_dr6 = dr::DR6_BT;
        return super::exception(ex, Exception::DB);
    }
    Ok(())
}

fn put<B: GuestBus>(ex: &mut Exec<'_, B>, gva: u64, size: u8, value: u64) -> Result<(), Stop> {
    let gva = gva & 0xffff_ffff;
    if size == 4 {
        ex.bus.write(ex.cpu, gva, value as u32, Privilege::System)?;
    } else {
        ex.bus.write(ex.cpu, gva, value as u16, Privilege::System)?;
    }
    Ok(())
}

fn get<B: GuestBus>(ex: &mut Exec<'_, B>, gva: u64, size: u8) -> Result<u64, Stop> {
    let gva = gva & 0xffff_ffff;
    Ok(if size == 4 {
        u64::from(ex.bus.read::<u32>(ex.cpu, gva, Privilege::System)?)
    } else {
        u64::from(ex.bus.read::<u16>(ex.cpu, gva, Privilege::System)?)
    })
}

/// Everything that the new TSS holds.
struct Image {
    cr3: Option<u64>,
    eip: u64,
    eflags: u64,
    gpr: [u64; 8],
    seg: [u16; 6],
    ldt: u16,
    debug_trap: bool,
}

fn read_image<B: GuestBus>(ex: &mut Exec<'_, B>, base: u64, l: &Layout) -> Result<Image, Stop> {
    let size = l.size;
    let step = u64::from(size);
    let mut image = Image {
        cr3: None,
        eip: get(ex, base.wrapping_add(l.eip), size)?,
        eflags: get(ex, base.wrapping_add(l.eip + step), size)?,
        gpr: [0; 8],
        seg: [0; 6],
        ldt: get(ex, base.wrapping_add(l.ldt), 2)? as u16,
        debug_trap: false,
    };
    for i in 0..8 {
        image.gpr[i] = get(ex, base.wrapping_add(l.gpr + step * i as u64), size)?;
    }
    for i in 0..l.nr_seg {
        image.seg[i] = get(ex, base.wrapping_add(l.seg + step * i as u64), 2)? as u16;
    }
    if size == 4 {
        if ex.cpu.is_paging() {
            image.cr3 = Some(get(ex, base.wrapping_add(0x1c), 4)?);
        }
        image.debug_trap = get(ex, base.wrapping_add(0x64), 2)? & 1 != 0;
    }
    Ok(image)
}

fn switch_to<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    selector: u16,
    mut tr: Segment,
    descriptor_gva: u64,
    reason: Reason,
    rip: u64,
    flags: u64,
) -> Result<bool, Stop> {
    let new_base = tr.base;
    let old_tr = ex.cpu.tr;
    let old = Layout::of(old_tr.attr.kind());
    let new = Layout::of(tr.attr.kind());
    let image = read_image(ex, tr.base, new)?;
    let nested = matches!(reason, Reason::Call | Reason::Interrupt { .. });
    save_old(ex, old, reason, rip, flags)?;
    // Read through the old address space, and changed once nothing else can fault.
    let old_descriptor = ex.descriptor(old_tr.selector, vector::TS);
    tr.attr = Attr(tr.attr.0 | 2);
    tr.selector = selector;
    let cpu = &mut *ex.cpu;
    cpu.tr = tr;
    cpu.cr0 |= cr0::TS;
    // Local breakpoints belong to a task.
    cpu.dr7 &= !0x155;
    for i in 0..8 {
        let keep = if new.size == 2 { 0xffff_0000 } else { 0 };
        cpu.gpr[i] = cpu.gpr[i] & keep | image.gpr[i];
    }
    if let Some(cr3) = image.cr3 {
        let changed = cr3 != cpu.cr3;
        cpu.cr3 = cr3;
        if changed {
            ex.bus.load_root(ex.cpu)?;
            ex.bus.flush(ex.cpu, x86_cpu::Flush::Pcid(0));
        }
    }
    ex.cpu.set_rip(image.eip);
    let mut eflags = image.eflags & rflags::DEFINED;
    if new.size == 2 {
        eflags &= 0xffff;
    }
    if nested {
        eflags |= rflags::NT;
    }
    ex.set_rflags(eflags);
    load_segments(ex, &image)?;
    ex.cpu.update_mode();
    ex.bus.select_view(ex.cpu);
    if let Reason::Interrupt {
        error_code: Some(code),
    } = reason
    {
        let mut stack = Stack::current(ex.cpu);
        stack.push(ex, new.size, u64::from(code))?;
        stack.commit(ex.cpu);
    }
    if !crate::segment::contains(&ex.cpu.seg[reg::CS], image.eip, 1) {
        return Err(Exception::GP0.into());
    }
    if nested {
        put(ex, new_base, 2, u64::from(old_tr.selector))?;
    } else if let Ok(d) = old_descriptor {
        ex.set_busy(d.gva, false)?;
    }
    if reason != Reason::Iret {
        ex.set_busy(descriptor_gva, true)?;
    }
    Ok(image.debug_trap)
}

fn save_old<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    l: &Layout,
    reason: Reason,
    rip: u64,
    flags: u64,
) -> Result<(), Stop> {
    let base = ex.cpu.tr.base;
    let size = l.size;
    let step = u64::from(size);
    let flags = if reason == Reason::Iret {
        flags & !rflags::NT
    } else {
        flags
    };
    put(ex, base.wrapping_add(l.eip), size, rip)?;
    put(ex, base.wrapping_add(l.eip + step), size, flags)?;
    for i in 0..8 {
        let value = ex.cpu.gpr[i];
        put(ex, base.wrapping_add(l.gpr + step * i as u64), size, value)?;
    }
    for (i, &sreg) in SREGS.iter().enumerate().take(l.nr_seg) {
        let value = u64::from(ex.cpu.seg[sreg].selector);
        put(ex, base.wrapping_add(l.seg + step * i as u64), 2, value)?;
    }
    Ok(())
}

fn load_segments<B: GuestBus>(ex: &mut Exec<'_, B>, image: &Image) -> Result<(), Stop> {
    let invalid = |s: u16| Stop::from(Exception::with_code(vector::TS, selector_code(s)));
    ex.cpu.ldtr = if is_null(image.ldt) {
        null_segment(image.ldt, 0)
    } else {
        if image.ldt & 4 != 0 {
            return Err(invalid(image.ldt));
        }
        let d = ex.descriptor(image.ldt, vector::TS)?;
        let attr = d.attr();
        if attr.is_s() || attr.kind() != system::LDT || !attr.is_present() {
            return Err(invalid(image.ldt));
        }
        d.segment(image.ldt)
    };
    if ex.cpu.is_v86() {
        ex.cpu.cpl = 3;
        for (i, &sreg) in SREGS.iter().enumerate() {
            ex.cpu.seg[sreg] = v86_segment(image.seg[i]);
        }
        return Ok(());
    }
    let cs = image.seg[1];
    if is_null(cs) {
        return Err(invalid(cs));
    }
    let d = ex.descriptor(cs, vector::TS)?;
    let attr = d.attr();
    let dpl_ok = if attr.is_conforming_or_expand_down() {
        attr.dpl() <= rpl(cs)
    } else {
        attr.dpl() == rpl(cs)
    };
    if !attr.is_code() || !dpl_ok {
        return Err(invalid(cs));
    }
    if !attr.is_present() {
        return Err(np(cs).into());
    }
    ex.set_accessed(&d)?;
    let cpl = rpl(cs);
    let ss = ex.stack_segment(image.seg[2], cpl, vector::TS)?;
    ex.cpu.cpl = cpl;
    ex.cpu.seg[reg::CS] = d.segment(cs);
    ex.cpu.seg[reg::SS] = ss;
    for i in [0, 3, 4, 5] {
        let segment = ex
            .data_segment(SREGS[i], image.seg[i])
            .map_err(|stop| match stop {
                Stop::Exception(e) if e == gp(image.seg[i]) => invalid(image.seg[i]),
                other => other,
            })?;
        ex.cpu.seg[SREGS[i]] = segment;
    }
    Ok(())
}

/// Returns the back link of the current TSS: the task to which IRET with NT returns.
pub(crate) fn back_link<B: GuestBus>(ex: &mut Exec<'_, B>) -> Result<u16, Stop> {
    let base = ex.cpu.tr.base;
    Ok(get(ex, base, 2)? as u16)
}

/// True where the CPU can switch tasks in hardware.
pub(crate) fn is_possible(cpu: &CpuState) -> bool {
    cpu.is_protected() && !cpu.is_long_mode()
}
