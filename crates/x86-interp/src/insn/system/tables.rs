//! LGDT, LIDT, LLDT, LTR and their stores; LAR, LSL, VERR, VERW, ARPL.

use iced_x86::{Code, Instruction, Mnemonic};
use x86_cpu::{CodeSize, Exception, GuestBus};
use x86_defs::{
    control::cr4,
    rflags,
    segment::{Attr, DescriptorTable, system},
    vector,
};

use crate::{
    Exec, Flow, Handler, Insn, Selector, Step, Stop,
    descriptor::{Descriptor, is_null, rpl},
    segment::{gp, is_visible, np, null_segment},
    selectors::About,
};

pub(super) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &Selector<'_>,
) -> Option<Handler<B>> {
    let handler: Handler<B> = match i.mnemonic() {
        Mnemonic::Lgdt => lgdt,
        Mnemonic::Lidt => lidt,
        Mnemonic::Sgdt => sgdt,
        Mnemonic::Sidt => sidt,
        Mnemonic::Lldt => lldt,
        Mnemonic::Ltr => ltr,
        Mnemonic::Sldt => sldt,
        Mnemonic::Str => str,
        Mnemonic::Lar => lar,
        Mnemonic::Lsl => lsl,
        Mnemonic::Verr => verr,
        Mnemonic::Verw => verw,
        Mnemonic::Arpl => arpl,
        _ => return None,
    };
    if matches!(
        i.mnemonic(),
        Mnemonic::Lgdt | Mnemonic::Lidt | Mnemonic::Sgdt | Mnemonic::Sidt
    ) {
        // The base has eight bytes in 64-bit code, three with a 16-bit operand
        // when loading, else four.
        insn.op_size = match (s.code_size, i.code()) {
            (CodeSize::Bits64, _) => 8,
            (_, Code::Lgdt_m1632_16 | Code::Lidt_m1632_16) => 3,
            _ => 4,
        };
    }
    Some(handler)
}

/// #GP(0) for the stores of system registers at CPL > 0 under CR4.UMIP.
pub(super) fn check_umip<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    if ex.cpu.cr4 & cr4::UMIP != 0 && ex.cpu.cpl > 0 {
        return Err(Exception::GP0.into());
    }
    Ok(())
}

/// LLDT, LTR, LAR and friends do not exist in real and virtual-8086 mode.
fn require_protected<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    if ex.cpu.is_real_or_v86() {
        return Err(Exception::UD.into());
    }
    Ok(())
}

fn load_table<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<DescriptorTable, Stop> {
    ex.require_cpl0()?;
    let at = ex.effective_address(insn);
    let base_at = at.wrapping_add(2) & u64::MAX >> (insn.addr_shift & 63);
    let limit = ex.read_at::<u16>(insn.seg, at)?;
    let base = match insn.op_size {
        8 => ex.read_at::<u64>(insn.seg, base_at)?,
        4 => u64::from(ex.read_at::<u32>(insn.seg, base_at)?),
        _ => u64::from(ex.read_at::<u32>(insn.seg, base_at)? & 0xff_ffff),
    };
    if !ex.cpu.is_canonical(base) {
        return Err(Exception::GP0.into());
    }
    Ok(DescriptorTable { base, limit })
}

fn lgdt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.cpu.gdtr = load_table(ex, insn)?;
    ex.serialize();
    Ok(Flow::Next)
}

fn lidt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.cpu.idtr = load_table(ex, insn)?;
    ex.serialize();
    Ok(Flow::Next)
}

fn store_table<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, t: DescriptorTable) -> Step {
    check_umip(ex)?;
    let at = ex.effective_address(insn);
    let base_at = at.wrapping_add(2) & u64::MAX >> (insn.addr_shift & 63);
    ex.write_at(insn.seg, at, t.limit)?;
    if insn.op_size == 8 {
        ex.write_at(insn.seg, base_at, t.base)?;
    } else {
        ex.write_at(insn.seg, base_at, t.base as u32)?;
    }
    Ok(Flow::Next)
}

fn sgdt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let t = ex.cpu.gdtr;
    store_table(ex, insn, t)
}

fn sidt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let t = ex.cpu.idtr;
    store_table(ex, insn, t)
}

/// Reads a 16-bit operand from memory, or from `register`.
fn operand<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, register: u8) -> Result<u16, Stop> {
    if insn.has_mem() {
        ex.mem_read::<u16>(insn)
    } else {
        Ok(ex.reg_read::<u16>(register))
    }
}

fn lldt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    ex.require_cpl0()?;
    let selector = operand(ex, insn, insn.dst)?;
    if is_null(selector) {
        ex.cpu.ldtr = null_segment(selector, 0);
        ex.serialize();
        return Ok(Flow::Next);
    }
    let d = system_descriptor(ex, selector)?;
    if d.attr().is_s() || d.attr().kind() != system::LDT {
        return Err(gp(selector).into());
    }
    if !d.attr().is_present() {
        return Err(np(selector).into());
    }
    let d = ex.widen(d, selector, vector::GP)?;
    check_base(ex, &d)?;
    ex.cpu.ldtr = d.segment(selector);
    ex.serialize();
    Ok(Flow::Next)
}

fn system_descriptor<B: GuestBus>(ex: &mut Exec<'_, B>, selector: u16) -> Result<Descriptor, Stop> {
    if selector & 4 != 0 {
        return Err(gp(selector).into());
    }
    ex.descriptor(selector, vector::GP)
}

fn check_base<B: GuestBus>(ex: &Exec<'_, B>, d: &Descriptor) -> Result<(), Stop> {
    if ex.cpu.is_long_mode() && !ex.cpu.is_canonical(d.base()) {
        return Err(Exception::GP0.into());
    }
    Ok(())
}

fn ltr<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    ex.require_cpl0()?;
    let selector = operand(ex, insn, insn.dst)?;
    if is_null(selector) {
        return Err(Exception::GP0.into());
    }
    let d = system_descriptor(ex, selector)?;
    let attr = d.attr();
    let available = attr.kind() == system::TSS32_AVAILABLE
        || attr.kind() == system::TSS16_AVAILABLE && !ex.cpu.is_long_mode();
    if attr.is_s() || !available {
        return Err(gp(selector).into());
    }
    if !attr.is_present() {
        return Err(np(selector).into());
    }
    let d = ex.widen(d, selector, vector::GP)?;
    check_base(ex, &d)?;
    ex.set_busy(d.gva, true)?;
    let mut tr = d.segment(selector);
    tr.attr = Attr(tr.attr.0 | 2);
    ex.cpu.tr = tr;
    ex.serialize();
    Ok(Flow::Next)
}

fn store_selector<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, v: u16) -> Step {
    if insn.has_mem() {
        ex.mem_write(insn, v)?;
    } else if insn.op_size == 2 {
        ex.reg_write(insn.dst, v);
    } else {
        ex.reg_write(insn.dst, u64::from(v));
    }
    Ok(Flow::Next)
}

fn sldt<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    check_umip(ex)?;
    let v = ex.cpu.ldtr.selector;
    store_selector(ex, insn, v)
}

fn str<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    check_umip(ex)?;
    let v = ex.cpu.tr.selector;
    store_selector(ex, insn, v)
}

fn set_zf<B: GuestBus>(ex: &mut Exec<'_, B>, on: bool) -> Step {
    let flags = ex.rflags() & !rflags::ZF | if on { rflags::ZF } else { 0 };
    ex.set_rflags(flags);
    Ok(Flow::Next)
}

/// Returns the descriptor, if the selector names one that the current privilege level may see.
fn visible<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    selector: u16,
    system: fn(u32, bool) -> bool,
) -> Result<Option<Descriptor>, Stop> {
    if is_null(selector) {
        return Ok(None);
    }
    let d = match ex.descriptor(selector, vector::GP) {
        Ok(d) => d,
        // The selector is outside of the table. A fault of the access itself is raised.
        Err(Stop::Exception(e)) if e == gp(selector) => return Ok(None),
        Err(stop) => return Err(stop),
    };
    let attr = d.attr();
    let long = ex.cpu.is_long_mode();
    if !attr.is_s() && !system(attr.kind(), long) {
        return Ok(None);
    }
    if !is_visible(attr, selector, ex.cpu.cpl) {
        return Ok(None);
    }
    if attr.is_s() || !long {
        return Ok(Some(d));
    }
    match ex.widen(d, selector, vector::GP) {
        Ok(d) => Ok(Some(d)),
        Err(Stop::Exception(e)) if e == gp(selector) => Ok(None),
        Err(stop) => Err(stop),
    }
}

fn lar<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    let selector = operand(ex, insn, insn.src)?;
    // Table 3-51 of vol. 2: interrupt and trap gates are invalid.
    let valid = |kind: u32, long: bool| match kind {
        2 | 9 | 11 | 12 => true,
        1 | 3 | 4 | 5 => !long,
        _ => false,
    };
    tell(ex, insn, selector, valid, About::AccessRights)
}

fn lsl<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    let selector = operand(ex, insn, insn.src)?;
    let valid = |kind: u32, long: bool| match kind {
        2 | 9 | 11 => true,
        1 | 3 => !long,
        _ => false,
    };
    tell(ex, insn, selector, valid, About::Limit)
}

/// Writes what the descriptor says to the destination.
fn tell<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    selector: u16,
    valid: fn(u32, bool) -> bool,
    about: About,
) -> Step {
    let answer = visible(ex, selector, valid)?.and_then(|d| about.answer(&d));
    if let Some(v) = answer {
        write_sized(ex, insn, v.into());
    }
    set_zf(ex, answer.is_some())
}

fn write_sized<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, v: u64) {
    match insn.op_size {
        2 => ex.reg_write(insn.dst, v as u16),
        4 => ex.reg_write(insn.dst, v as u32),
        _ => ex.reg_write(insn.dst, v),
    }
}

fn verr<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    verify(ex, insn, About::Readable)
}

fn verw<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    verify(ex, insn, About::Writable)
}

fn verify<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, about: About) -> Step {
    require_protected(ex)?;
    let selector = operand(ex, insn, insn.dst)?;
    let d = visible(ex, selector, |_, _| false)?;
    set_zf(ex, d.is_some_and(|d| about.answer(&d).is_some()))
}

fn arpl<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    require_protected(ex)?;
    // With a memory destination the only register operand is the source.
    let (old, wanted) = if insn.has_mem() {
        (ex.mem_read::<u16>(insn)?, ex.reg_read::<u16>(insn.dst))
    } else {
        (ex.reg_read::<u16>(insn.dst), ex.reg_read::<u16>(insn.src))
    };
    if rpl(old) >= rpl(wanted) {
        return set_zf(ex, false);
    }
    let new = old & !3 | wanted & 3;
    if insn.has_mem() {
        ex.mem_write(insn, new)?;
    } else {
        ex.reg_write(insn.dst, new);
    }
    set_zf(ex, true)
}
