//! Decoding a block, and which arithmetic flags are live where.

use iced_x86::{Decoder, DecoderError, Instruction};
use x86_cpu::{CpuState, GuestBus};
use x86_interp::gating;

use crate::{
    ir::branch::{set_target, target},
    ir::decoded::{Decoded, RAW, find_live},
    ir::hot::Turns,
    ir::lowering::{Forms, Lowering, kind_of},
    ir::mode::Mode,
    ir::narrow,
    ir::segment::has_pages,
};

/// Instructions of a block at most, and of one that is executed much.
const MAX_INSNS: usize = 48;
const MAX_HOT_INSNS: usize = 96;
/// Conditional branches of a block at most: what follows them is executed less and less likely,
/// and translated again for whoever goes there from elsewhere.
const MAX_BRANCHES: usize = 3;
/// The same where a loop begins: it is executed again and again.
const MAX_LOOP_BRANCHES: usize = 5;
/// Jumps within the page that a block follows.
const MAX_FOLLOWED: usize = 2;
/// Instructions of an unrolled loop at most, and turns of one.
const MAX_UNROLLED: usize = 40;
const MAX_TURNS: usize = 4;
/// The same of the first turns of a loop within a block, which may be all: such loops are often short.
const MAX_INNER: usize = 72;
const MAX_INNER_TURNS: usize = 16;
/// Bytes of an instruction at most.
pub(crate) const MAX_LEN: usize = 15;
/// Bytes that are fetched at once.
pub(crate) const FETCHED: usize = 64;

/// Decodes the block at `gva`; IP 0 is the page's start.
/// Empty if it cannot be fetched, which is for now: a page that a process has not touched yet is mapped after a fault.
/// An instruction that straddles two pages is a block of its own: true is returned for one. `is_loop`: a branch back leads here; `is_hot`: it is executed much; `is_ahead`: nobody has
/// gone here yet, so nothing is fetched from another page. `turns`: of what is executed much, what is known of its loops.
pub(crate) fn decode<B: GuestBus>(
    out: &mut Vec<Decoded>,
    forms: &mut Forms,
    (cpu, bus): (&mut CpuState, &mut B),
    gva: u64,
    (mode, is_loop, is_ahead): (Mode, bool, bool),
    turns: Option<&[Turns]>,
) -> bool {
    out.clear();
    forms.select(&cpu.features);
    let options = gating::decoder_options(&cpu.features);
    let long = mode.is_long();
    let bits = mode.bits();
    let mut offset = (gva & 0xfff) as u32;
    let (first, mut followed) = (offset, 0);
    let mut branches_left = if is_loop {
        MAX_LOOP_BRANCHES
    } else {
        MAX_BRANCHES
    };
    let most = if turns.is_some() {
        MAX_HOT_INSNS
    } else {
        MAX_INSNS
    };
    let page = gva & !0xfff;
    // What is decoded is copied with what follows it.
    let mut bytes = [0; FETCHED + RAW];
    let mut i = Instruction::default();
    let mut straddles = false;
    'fetch: loop {
        // The bytes are tracked as code, so no more than may be needed.
        let start = offset;
        let room = (0x1000 - offset as usize).min(FETCHED);
        let have = match bus.code_bytes(cpu, page + u64::from(offset), &mut bytes[..room]) {
            Ok(n) => n.min(room),
            Err(_) => return false,
        };
        let mut decoder = Decoder::with_ip(bits, &bytes[..have], offset.into(), options);
        loop {
            decoder.decode_out(&mut i);
            let mut error = decoder.last_error();
            let from = offset.wrapping_sub(start) as usize;
            let mut raw = raw_at(&bytes, from);
            if error == DecoderError::NoMoreBytes {
                if from != 0 && start as usize + have < 0x1000 {
                    continue 'fetch;
                }
                if !out.is_empty() {
                    break 'fetch;
                }
                if is_ahead {
                    return false;
                }
                let end = At { page, offset, mode };
                match across(bus, cpu, &end, (&mut raw, have - from), options, &mut i) {
                    Err(_) => return false,
                    Ok(None) => {}
                    Ok(Some(e)) => (straddles, error) = (true, e),
                }
            }
            // Where it is kept: a copy would wait for all that was just written of it.
            out.push(Decoded::invalid(offset));
            if error != DecoderError::None {
                break 'fetch;
            }
            if !long {
                narrow::lift(&mut i);
            }
            let form = forms.learn(&i);
            let kind = kind_of(form, &i, mode);
            let next = offset + i.len() as u32;
            if let Some(d) = out.last_mut() {
                d.set(&i, raw, kind, form, long);
            }
            let target = match kind {
                Lowering::Jcc | Lowering::Jmp => target(&i) as u64,
                _ => u64::MAX,
            };
            if target == u64::from(first) && !mode.has(Mode::SPLIT) && !straddles {
                unroll(out, next);
                break 'fetch;
            }
            if kind == Lowering::Jmp && target < 0x1000 && followed < MAX_FOLLOWED && !straddles {
                followed += 1;
                if let Some(d) = out.last_mut() {
                    d.follow();
                }
                offset = target as u32;
                if out.len() >= most {
                    break 'fetch;
                }
                // The bytes there are to be read.
                continue 'fetch;
            }
            if let Some(turns) = turns
                && kind == Lowering::Jcc
            {
                repeat_inner(out, turns, (target, next), most);
            }
            offset = next;
            if matches!(kind, Lowering::Jcc | Lowering::Counted) {
                branches_left -= 1;
                if branches_left == 0 {
                    break 'fetch;
                }
            }
            if kind.ends_block() || out.len() >= most || offset >= 0x1000 || straddles {
                break 'fetch;
            }
        }
    }
    end_whole(out);
    find_live(out);
    straddles
}

/// Nothing may be injected between STI, or a load of SS, and the next instruction, so both are in one block.
fn end_whole(out: &mut [Decoded]) {
    if let Some(d) = out.last_mut()
        && d.holds_events()
    {
        d.leave();
    }
}

/// Where an instruction is that may straddle two pages.
struct At {
    page: u64,
    offset: u32,
    mode: Mode,
}

/// Decodes the instruction at the end of a page with the bytes of the next one: `raw` has `have` of its bytes. `None` if it may not
/// straddle them.
fn across<B: GuestBus>(
    bus: &mut B,
    cpu: &mut CpuState,
    at: &At,
    (raw, have): (&mut [u8; RAW], usize),
    options: u32,
    i: &mut Instruction,
) -> Result<Option<DecoderError>, x86_cpu::Fault> {
    if !may_straddle(cpu, at.mode, at.page) {
        return Ok(None);
    }
    let next = at.page.wrapping_add(0x1000);
    let n = bus.code_bytes(cpu, next, &mut raw[have..MAX_LEN])?;
    let bytes = &raw[..(have + n).min(MAX_LEN)];
    let mut decoder = Decoder::with_ip(at.mode.bits(), bytes, at.offset.into(), options);
    decoder.decode_out(i);
    Ok(Some(decoder.last_error()))
}

/// An instruction may begin in the page and end in the next one.
fn may_straddle(cpu: &CpuState, mode: Mode, page: u64) -> bool {
    let is_last = !mode.is_long() && page == 0xffff_f000;
    !is_last && (!mode.has(Mode::SEGMENTED) || has_pages(cpu, 1))
}

/// The guest's bytes from `at` on, and what follows the instruction there.
pub(crate) fn raw_at(bytes: &[u8; FETCHED + RAW], at: usize) -> [u8; RAW] {
    let raw = bytes.get(at..).and_then(<[u8]>::first_chunk);
    raw.copied().unwrap_or_default()
}

/// A loop within the block, whose branch at the end of `out` leads back to `target`, and on to `next`: its body is repeated, as what
/// its first turns access is often where the instructions before it did. `most`: instructions of the block.
fn repeat_inner(out: &mut Vec<Decoded>, turns: &[Turns], (target, next): (u64, u32), most: usize) {
    let Some(body) = out.iter().rposition(|d| u64::from(d.offset) == target) else {
        return;
    };
    let len = out.len() - body;
    let known = turns.iter().find(|t| t.end == next);
    let known = known.filter(|t| usize::from(t.turns) * len <= most - body);
    match known {
        Some(t) => repeat(out, body, next, t.turns.into(), false),
        None => {
            let room = (most - body).min(MAX_INNER);
            let turns = (room / len).clamp(1, MAX_INNER_TURNS);
            repeat(out, body, next, turns, true);
        }
    }
}

/// A loop, the end of which is the branch back: repeats the body; the branches in between leave the loop.
fn unroll(out: &mut Vec<Decoded>, next: u32) {
    let turns = (MAX_UNROLLED / out.len()).clamp(1, MAX_TURNS);
    repeat(out, 0, next, turns, false);
}

/// The same for a body that begins at `from`, for so many turns. `notes`: by which it is left is of interest.
fn repeat(out: &mut Vec<Decoded>, from: usize, next: u32, turns: usize, notes: bool) {
    let Some(d) = out.pop() else {
        return;
    };
    let body = from..out.len();
    for turn in 1..turns {
        let mut leave = d;
        leave.turn = if notes { turn as u8 } else { 0 };
        if d.kind == Lowering::Jcc {
            leave.turns_round();
            set_target(&mut leave.i, next);
        } else {
            leave.follow();
        }
        out.push(leave);
        out.extend_from_within(body.clone());
    }
    out.push(d);
}
