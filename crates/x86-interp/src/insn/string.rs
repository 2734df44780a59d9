//! MOVS, STOS, LODS, CMPS, SCAS with their repeat prefixes (SDM vol. 2, REP).
//!
//! Each iteration commits its registers, so that a fault in the middle leaves
//! exact progress and the instruction resumes. After [`POLL_ITERATIONS`] the
//! instruction yields with [`Flow::Again`].

use iced_x86::{Instruction, Mnemonic};
use x86_cpu::{Access, Exception, Feature, GuestBus, Privilege};
use x86_defs::{reg, rflags};

use super::{Handler, Insn, sized};
use crate::{Exec, Flow, Int, Step, Stop};

/// Iterations between two polls.
const POLL_ITERATIONS: u32 = 1000;
/// Bytes of a bulk operation between two polls.
const POLL_BYTES: u64 = 0x1_0000;
/// Bytes that are read at once.
const READ: usize = 256;

const ES: u8 = reg::ES as u8;
const RAX: u8 = reg::RAX as u8;

#[inline(always)]
fn mask<B>(insn: &Insn<B>) -> u64 {
    u64::MAX >> (insn.addr_shift & 63)
}

#[inline(always)]
fn index<B: GuestBus>(ex: &Exec<'_, B>, insn: &Insn<B>, r: usize) -> u64 {
    ex.cpu.gpr[r & 31] & mask(insn)
}

/// Adds to rSI, rDI or rCX, cut to the address size; a 32-bit result clears the upper half.
#[inline(always)]
fn advance<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, r: usize, by: u64) {
    let v = ex.cpu.gpr[r & 31].wrapping_add(by);
    ex.cpu.gpr[r & 31] = match insn.addr_size {
        2 => ex.cpu.gpr[r & 31] & !0xffff | v & 0xffff,
        4 => v & 0xffff_ffff,
        _ => v,
    };
}

#[inline(always)]
fn delta<B: GuestBus, T: Int>(ex: &Exec<'_, B>) -> u64 {
    let size = T::SIZE as u64;
    if ex.cpu.rflags & rflags::DF != 0 {
        size.wrapping_neg()
    } else {
        size
    }
}

/// One iteration of a string instruction; false ends the repetition (CMPS, SCAS).
trait Body {
    fn once<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop>;
    /// Prepares the first iteration: with a 32-bit address size, Intel's processors clear the upper half of RCX before
    /// it, and for MOVS and STOS the upper halves of the address registers.
    fn begin<B: GuestBus>(ex: &mut Exec<'_, B>) {
        cut(ex, reg::RCX);
    }
    /// Does many iterations at once; returns how many.
    #[inline(always)]
    fn bulk<B: GuestBus, T: Int>(_: &mut Exec<'_, B>, _: &Insn<B>, _count: u64) -> u64 {
        0
    }
}

fn cut<B: GuestBus>(ex: &mut Exec<'_, B>, r: usize) {
    ex.cpu.gpr[r & 31] &= 0xffff_ffff;
}

fn string<B: GuestBus, T: Int, O: Body>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if insn.prefix & (Insn::<B>::REP | Insn::<B>::REPNE) == 0 {
        O::once::<B, T>(ex, insn)?;
        return Ok(Flow::Next);
    }
    if insn.addr_size == 4 && ex.cpu.is_64bit() && !ex.cpu.features.has(Feature::Amd) {
        O::begin(ex);
    }
    let mut budget = POLL_ITERATIONS;
    loop {
        let count = index(ex, insn, reg::RCX);
        if count == 0 {
            return Ok(Flow::Next);
        }
        let bulk = if ex.may_bulk() {
            O::bulk::<B, T>(ex, insn, count)
        } else {
            0
        };
        let mut more = true;
        if bulk == 0 {
            more = O::once::<B, T>(ex, insn)?;
            advance(ex, insn, reg::RCX, u64::MAX);
            budget -= 1;
        } else {
            advance(ex, insn, reg::RCX, bulk.wrapping_neg());
            let bytes = bulk.saturating_mul(T::SIZE as u64);
            budget = budget.saturating_sub((bytes >> 6) as u32 + 1);
        }
        ex.bus.commit();
        if !more || index(ex, insn, reg::RCX) == 0 {
            return Ok(Flow::Next);
        }
        if budget == 0 || ex.single_step || ex.watch_hits != 0 {
            return Ok(Flow::Again);
        }
    }
}

fn is_down<B: GuestBus>(ex: &Exec<'_, B>) -> bool {
    ex.cpu.rflags & rflags::DF != 0
}

/// Returns the number of bytes, in whole elements, that a bulk operation may access from the element at `offset` on,
/// before the end of the segment and of the address size, or down to offset 0.
fn extent<B: GuestBus, T: Int>(
    ex: &Exec<'_, B>,
    insn: &Insn<B>,
    seg: u8,
    offset: u64,
    count: u64,
) -> u64 {
    let size = T::SIZE as u64;
    let room = if !ex.is_expand_up(seg) {
        0
    } else if is_down(ex) {
        offset.saturating_add(size)
    } else {
        let end = mask(insn).min(ex.limit(seg));
        end.saturating_sub(offset).saturating_add(1)
    };
    count.min(POLL_BYTES / size).min(room / size) * size
}

struct Movs;
impl Body for Movs {
    #[inline(always)]
    fn once<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop> {
        let v = ex.read_at::<T>(insn.seg, index(ex, insn, reg::RSI))?;
        ex.write_at(ES, index(ex, insn, reg::RDI), v)?;
        let d = delta::<B, T>(ex);
        advance(ex, insn, reg::RSI, d);
        advance(ex, insn, reg::RDI, d);
        Ok(true)
    }
    fn begin<B: GuestBus>(ex: &mut Exec<'_, B>) {
        cut(ex, reg::RCX);
        cut(ex, reg::RSI);
        cut(ex, reg::RDI);
    }
    fn bulk<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, count: u64) -> u64 {
        let (src, dst) = (index(ex, insn, reg::RSI), index(ex, insn, reg::RDI));
        let len = extent::<B, T>(ex, insn, insn.seg, src, count)
            .min(extent::<B, T>(ex, insn, ES, dst, count));
        let size = T::SIZE as u64;
        let (Ok(src), Ok(dst)) = (
            ex.linear(insn.seg, src, size, Access::Read),
            ex.linear(ES, dst, size, Access::Write),
        ) else {
            return 0;
        };
        if len == 0 || ex.watches_page_of(src) || ex.watches_page_of(dst) {
            return 0;
        }
        let done = if is_down(ex) {
            ex.bus.bulk_copy_down(ex.cpu, dst, src, len, size)
        } else {
            ex.bus.bulk_copy(ex.cpu, dst, src, len, size)
        };
        // An advance by zero would still clear the upper halves of ESI and EDI.
        if done != 0 {
            let by = delta::<B, T>(ex).wrapping_mul(done / size);
            advance(ex, insn, reg::RSI, by);
            advance(ex, insn, reg::RDI, by);
        }
        done / size
    }
}

struct Stos;
impl Body for Stos {
    #[inline(always)]
    fn once<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop> {
        let v = ex.reg_read::<T>(RAX);
        ex.write_at(ES, index(ex, insn, reg::RDI), v)?;
        let d = delta::<B, T>(ex);
        advance(ex, insn, reg::RDI, d);
        Ok(true)
    }
    fn begin<B: GuestBus>(ex: &mut Exec<'_, B>) {
        cut(ex, reg::RCX);
        cut(ex, reg::RDI);
    }
    fn bulk<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, count: u64) -> u64 {
        let dst = index(ex, insn, reg::RDI);
        let len = extent::<B, T>(ex, insn, ES, dst, count);
        let size = T::SIZE as u64;
        let Ok(dst) = ex.linear(ES, dst, size, Access::Write) else {
            return 0;
        };
        if len == 0 || ex.watches_page_of(dst) {
            return 0;
        }
        let value = ex.reg_read::<T>(RAX).to_u64();
        let done = if is_down(ex) {
            fill_down(ex, dst, value, len, size)
        } else {
            ex.bus.bulk_fill(ex.cpu, dst, value, len, size)
        };
        if done != 0 {
            let by = delta::<B, T>(ex).wrapping_mul(done / size);
            advance(ex, insn, reg::RDI, by);
        }
        done / size
    }
}

/// Fills the elements from that at `dst` down, in its page; returns the number of bytes filled.
fn fill_down<B: GuestBus>(ex: &mut Exec<'_, B>, dst: u64, value: u64, len: u64, size: u64) -> u64 {
    let offset = dst & 0xfff;
    // Elements that cross into the next page are written one by one.
    if offset + size > 0x1000 {
        return 0;
    }
    let len = len.min((offset / size + 1) * size);
    let lowest = dst - (len - size);
    // All of them or none, as a fault would come at the highest.
    ex.bus.bulk_fill(ex.cpu, lowest, value, len, size)
}

struct Lods;
impl Body for Lods {
    #[inline(always)]
    fn once<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop> {
        let v = ex.read_at::<T>(insn.seg, index(ex, insn, reg::RSI))?;
        ex.reg_write(RAX, v);
        let d = delta::<B, T>(ex);
        advance(ex, insn, reg::RSI, d);
        Ok(true)
    }
    /// Passes by elements that others replace. The last of these is loaded, as a fault may come behind it.
    fn bulk<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, count: u64) -> u64 {
        let Ahead { gva, len } = ahead::<B, T>(ex, insn, (insn.seg, reg::RSI), count);
        let room = 0x1000 - (gva & 0xfff);
        let size = T::SIZE as u64;
        let passed = len.min(room) / size;
        let mut last = [0; 8];
        let at = gva.wrapping_add(passed.wrapping_sub(1).wrapping_mul(size));
        if passed == 0 || ex.bus.bulk_read(ex.cpu, at, &mut last[..T::SIZE]) != T::SIZE {
            return 0;
        }
        ex.reg_write(RAX, T::from_u64(u64::from_le_bytes(last)));
        advance(ex, insn, reg::RSI, passed * size);
        passed
    }
}

/// Where an operand's next elements are, and how many bytes of them may be read at once: none of the last one, which
/// sets the flags.
struct Ahead {
    gva: u64,
    len: u64,
}

/// Returns where the elements at `r` are. With DF set, and where a debugger looks, none are read at once.
fn ahead<B: GuestBus, T: Int>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    (seg, r): (u8, usize),
    count: u64,
) -> Ahead {
    let offset = index(ex, insn, r);
    let len = extent::<B, T>(ex, insn, seg, offset, count.saturating_sub(1));
    match ex.linear(seg, offset, T::SIZE as u64, Access::Read) {
        Ok(gva) if !is_down(ex) && !ex.watches_page_of(gva) => Ahead { gva, len },
        _ => Ahead { gva: 0, len: 0 },
    }
}

/// Reads elements ahead. Returns the number of bytes, of whole elements.
fn read_ahead<B: GuestBus, T: Int>(
    ex: &mut Exec<'_, B>,
    Ahead { gva, len }: Ahead,
    buf: &mut [u8; READ],
) -> usize {
    let len = (len as usize).min(READ);
    if len == 0 {
        return 0;
    }
    let read = ex.bus.bulk_read(ex.cpu, gva, &mut buf[..len]);
    read - read % T::SIZE
}

/// Returns element `n`.
fn element<T: Int>(bytes: &[u8; READ], n: usize) -> T {
    let mut word = [0; 8];
    word[..T::SIZE].copy_from_slice(&bytes[n * T::SIZE..][..T::SIZE]);
    T::from_u64(u64::from_le_bytes(word))
}

/// Returns how many of the first elements do not end the repetition. `is_equal` compares element `n`.
fn going_on<B>(insn: &Insn<B>, elements: usize, is_equal: impl Fn(usize) -> bool) -> u64 {
    let wanted = insn.prefix & Insn::<B>::REPNE == 0;
    let end = (0..elements).find(|&n| is_equal(n) != wanted);
    end.unwrap_or(elements) as u64
}

/// Sets the flags of `a - b`; returns whether REPE or REPNE goes on.
#[inline(always)]
fn compare<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, a: T, b: T) -> bool {
    let r = T::from_u64(a.to_u64().wrapping_sub(b.to_u64()));
    ex.flags.sub(a, b, r);
    (insn.prefix & Insn::<B>::REPNE != 0) != (a == b)
}

struct Cmps;
impl Body for Cmps {
    #[inline(always)]
    fn once<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop> {
        // AMD processors read in this order (except REPE CMPSB of Zen 4); the manual does not define one.
        let b = ex.read_at::<T>(ES, index(ex, insn, reg::RDI))?;
        let a = ex.read_at::<T>(insn.seg, index(ex, insn, reg::RSI))?;
        let d = delta::<B, T>(ex);
        advance(ex, insn, reg::RSI, d);
        advance(ex, insn, reg::RDI, d);
        Ok(compare(ex, insn, a, b))
    }
    fn bulk<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, count: u64) -> u64 {
        let (mut a, mut b) = ([0; READ], [0; READ]);
        let size = T::SIZE;
        let at = ahead::<B, T>(ex, insn, (ES, reg::RDI), count);
        let len = read_ahead::<B, T>(ex, at, &mut b);
        let at = ahead::<B, T>(
            ex,
            insn,
            (insn.seg, reg::RSI),
            count.min((len / size + 1) as u64),
        );
        let len = len.min(read_ahead::<B, T>(ex, at, &mut a));
        let done = going_on(insn, len / size, |n| {
            element::<T>(&a, n) == element::<T>(&b, n)
        });
        if done != 0 {
            // A fault may come behind it.
            let last = done as usize - 1;
            compare(ex, insn, element::<T>(&a, last), element::<T>(&b, last));
            advance(ex, insn, reg::RSI, done * size as u64);
            advance(ex, insn, reg::RDI, done * size as u64);
        }
        done
    }
}

struct Scas;
impl Body for Scas {
    #[inline(always)]
    fn once<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<bool, Stop> {
        let b = ex.read_at::<T>(ES, index(ex, insn, reg::RDI))?;
        let a = ex.reg_read::<T>(RAX);
        let d = delta::<B, T>(ex);
        advance(ex, insn, reg::RDI, d);
        Ok(compare(ex, insn, a, b))
    }
    fn bulk<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, count: u64) -> u64 {
        let mut b = [0; READ];
        let size = T::SIZE;
        let at = ahead::<B, T>(ex, insn, (ES, reg::RDI), count);
        let len = read_ahead::<B, T>(ex, at, &mut b);
        let a = ex.reg_read::<T>(RAX);
        let done = going_on(insn, len / size, |n| element::<T>(&b, n) == a);
        if done != 0 {
            // A fault may come behind it.
            compare(ex, insn, a, element::<T>(&b, done as usize - 1));
            advance(ex, insn, reg::RDI, done * size as u64);
        }
        done
    }
}

/// CLZERO: writes 64 zero bytes to the cache line that rAX points to.
fn clzero<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let at = ex.cpu.gpr[reg::RAX] & mask(insn) & !63;
    let gva = ex.linear(insn.seg, at, 64, Access::Write)?;
    ex.bus
        .write_bytes(ex.cpu, gva, &[0; 64], Privilege::Current)?;
    Ok(Flow::Next)
}

/// MOVDIR64B: copies 64 bytes to the line that a register points to in ES. Neither operand need be aligned by
/// alignment checks; the line has to be one.
fn movdir64b<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let to = ex.cpu.gpr[usize::from(insn.dst) & 31] & mask(insn);
    let from = ex.effective_address(insn);
    let to = ex.linear_unaligned(ES, to, 64, Access::Write)?;
    if to & 63 != 0 {
        return Err(Exception::GP0.into());
    }
    let from = ex.linear_unaligned(insn.seg, from, 64, Access::Read)?;
    let mut line = [0; 64];
    ex.bus
        .read_bytes(ex.cpu, from, &mut line, Privilege::Current)?;
    ex.bus.write_bytes(ex.cpu, to, &line, Privilege::Current)?;
    Ok(Flow::Next)
}

/// The handler of a string instruction. INS and OUTS belong to the system family.
pub(crate) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    if i.mnemonic() == Mnemonic::Clzero {
        insn.prefix |= Insn::<B>::WRITES;
        return Some(clzero::<B>);
    }
    if i.mnemonic() == Mnemonic::Movdir64b {
        insn.prefix |= Insn::<B>::WRITES;
        return Some(movdir64b::<B>);
    }
    // MOVSD and CMPSD are SSE instructions too.
    if !i.is_string_instruction() {
        return None;
    }
    let size = insn.op_size;
    match i.mnemonic() {
        Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq => {
            sized!(size, string, Movs)
        }
        Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq => {
            sized!(size, string, Stos)
        }
        Mnemonic::Lodsb | Mnemonic::Lodsw | Mnemonic::Lodsd | Mnemonic::Lodsq => {
            sized!(size, string, Lods)
        }
        Mnemonic::Cmpsb | Mnemonic::Cmpsw | Mnemonic::Cmpsd | Mnemonic::Cmpsq => {
            sized!(size, string, Cmps)
        }
        Mnemonic::Scasb | Mnemonic::Scasw | Mnemonic::Scasd | Mnemonic::Scasq => {
            sized!(size, string, Scas)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use x86_cpu::Feature;
    use x86_defs::{reg, rflags};

    use crate::{
        Interp, RunStop,
        test_bus::{at, machine},
    };

    #[test]
    fn a_line_is_copied_at_once() {
        const AREA: u64 = at::HANDLER;
        // movdir64b rdi, [rsi+8]
        const CODE: &[u8] = &[0x66, 0x0f, 0x38, 0xf8, 0x7e, 0x08];
        for (offset, aligned) in [(0x40, true), (0x48, false)] {
            let (mut cpu, mut bus) = machine(true, 0);
            cpu.features.set(Feature::Movdir64b, true);
            bus.put(at::CODE, CODE);
            let line: Vec<u8> = (1..=64).collect();
            bus.put(AREA + 0x108, &line);
            cpu.gpr[reg::RSI] = AREA + 0x100;
            cpu.gpr[reg::RDI] = AREA + offset;
            let mut interp = Interp::new();
            let insn = interp.prepare(&cpu, CODE).unwrap();
            interp.execute(&mut cpu, &mut bus, &insn);
            let first = bus.get64(AREA + offset);
            let last = bus.get64(AREA + offset + 56);
            let want = [0x0807_0605_0403_0201, 0x403f_3e3d_3c3b_3a39];
            assert_eq!([first, last], if aligned { want } else { [0; 2] });
            let next = at::CODE + CODE.len() as u64;
            assert_eq!(cpu.rip() == next, aligned);
        }
    }

    /// The element's end is 2^64, which no address is.
    #[test]
    fn downwards_from_the_highest_element() {
        for (code, size) in [
            (&[0xf3, 0xaa][..], 1),
            (&[0xf3, 0x48, 0xab], 8),
            (&[0xf3, 0x48, 0xa5], 8),
        ] {
            let (mut cpu, mut bus) = machine(true, 0);
            bus.map(0u64.wrapping_sub(0x1000), 0x1000);
            bus.put(at::CODE, code);
            let top = 0u64.wrapping_sub(size);
            cpu.gpr[reg::RAX] = 0x1122_3344_5566_7788;
            cpu.gpr[reg::RCX] = 3;
            cpu.gpr[reg::RDI] = top;
            cpu.gpr[reg::RSI] = top - 0x100;
            cpu.rflags |= rflags::DF;
            bus.put64(0u64.wrapping_sub(0x108), 0x1122_3344_5566_7788);
            bus.polls = Some(0);
            let mut interp = Interp::new();
            let insn = interp.prepare(&cpu, code).unwrap();
            assert_eq!(interp.execute(&mut cpu, &mut bus, &insn), RunStop::Poll);
            assert_eq!(cpu.rip(), at::CODE + code.len() as u64);
            assert_eq!(cpu.gpr[reg::RDI], top.wrapping_sub(3 * size));
            let last = bus.get64(0u64.wrapping_sub(8)) >> (64 - 8 * size);
            assert_eq!(last, 0x1122_3344_5566_7788 & u64::MAX >> (64 - 8 * size));
        }
    }
}
