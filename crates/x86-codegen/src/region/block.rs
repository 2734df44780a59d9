//! Decodes a block, and finds which arithmetic flags are live where.

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

/// Maximum number of instructions of a block, and of a hot one.
const MAX_INSNS: usize = 48;
const MAX_HOT_INSNS: usize = 96;
/// Maximum number of conditional branches of a block. The code behind each is less and less likely to be executed, and
/// is translated again for branches that enter it from elsewhere.
const MAX_BRANCHES: usize = 3;
/// The same for a block that begins a loop: its later code is executed again and again.
const MAX_LOOP_BRANCHES: usize = 5;
/// Jumps within the page that a block follows.
const MAX_FOLLOWED: usize = 2;
/// Maximum number of instructions of an unrolled loop, and of its iterations.
const MAX_UNROLLED: usize = 40;
const MAX_TURNS: usize = 4;
/// The same for the first iterations of a loop within a block. Such loops are often so short that these are all
/// iterations.
const MAX_INNER: usize = 72;
const MAX_INNER_TURNS: usize = 16;
/// Maximum length of an instruction, in bytes.
pub const MAX_LEN: usize = 15;
/// Bytes that are fetched at once.
pub(crate) const FETCHED: usize = 64;

/// Decodes the block at `gva`; IP 0 is the page's start. The block is empty if it cannot be fetched now: a page that a
/// process has not touched yet may be mapped after a fault. Returns true for an instruction that straddles two pages,
/// which is a block of its own.
///
/// `is_loop`: a branch back leads here. `is_ahead`: the block has not been executed yet, so nothing is fetched from
/// another page. `stops`: offsets at which no instruction is taken into a block. `turns`: how many iterations the loops
/// within a hot block make, as far as that is known; `None` if the block is not hot.
pub fn decode<B: GuestBus>(
    out: &mut Vec<Decoded>,
    forms: &mut Forms,
    (cpu, bus): (&mut CpuState, &mut B),
    gva: u64,
    (mode, is_loop, is_ahead): (Mode, bool, bool),
    stops: &[u16],
    turns: Option<&[Turns]>,
) -> bool {
    out.clear();
    forms.select(&cpu.features);
    let offset = (gva & 0xfff) as u32;
    if is_stop(stops, offset) {
        return false;
    }
    let mut decoder = BlockDecoder {
        options: gating::decoder_options(&cpu.features),
        page: gva & !0xfff,
        first: offset,
        offset,
        branches_left: match is_loop {
            true => MAX_LOOP_BRANCHES,
            false => MAX_BRANCHES,
        },
        jumps_left: MAX_FOLLOWED,
        most: match turns {
            Some(_) => MAX_HOT_INSNS,
            None => MAX_INSNS,
        },
        straddles: false,
        out,
        forms,
        cpu,
        bus,
        mode,
        is_ahead,
        stops,
        turns,
    };
    // The bytes of an instruction are copied together with those behind it, so the array has room for `RAW` more.
    let mut bytes = [0; FETCHED + RAW];
    while decoder.fetch(&mut bytes) == Next::Fetch {}
    let mut straddles = decoder.straddles;
    if !decoder.track() {
        out.clear();
        return false;
    }
    // Only a last instruction straddles two pages.
    straddles &= !end_whole(out);
    find_live(out, mode);
    straddles
}

/// A block that is being decoded.
struct BlockDecoder<'a, B> {
    out: &'a mut Vec<Decoded>,
    forms: &'a mut Forms,
    cpu: &'a mut CpuState,
    bus: &'a mut B,
    mode: Mode,
    /// The block has not been executed yet.
    is_ahead: bool,
    /// Offsets of instructions that no block may have.
    stops: &'a [u16],
    turns: Option<&'a [Turns]>,
    /// The decoder's options: which instructions there are.
    options: u32,
    /// The gva of the page.
    page: u64,
    /// Offsets of the block, and of the next instruction.
    first: u32,
    offset: u32,
    /// How many more conditional branches the block may have, and how many more jumps it may follow.
    branches_left: usize,
    jumps_left: usize,
    /// Maximum number of instructions.
    most: usize,
    /// The block is one instruction, which ends in the next page.
    straddles: bool,
}

/// Instructions that lie behind one another.
struct Run {
    /// Offset in the page.
    start: usize,
    len: usize,
    bytes: [u8; FETCHED],
}

impl Run {
    fn new(start: usize) -> Self {
        Self {
            start,
            len: 0,
            bytes: [0; FETCHED],
        }
    }

    /// Adds an instruction's bytes, if it lies behind the others and there is room.
    fn add(&mut self, offset: usize, bytes: &[u8]) -> bool {
        let room = self.bytes.get_mut(self.len..self.len + bytes.len());
        let Some(room) = room.filter(|_| offset == self.start + self.len) else {
            return false;
        };
        room.copy_from_slice(bytes);
        self.len += bytes.len();
        true
    }

    /// Tracks the bytes as code, and returns true if they are still the same.
    fn track<B: GuestBus>(&self, page: u64, cpu: &mut CpuState, bus: &mut B) -> bool {
        let mut now = [0; FETCHED];
        let now = &mut now[..self.len];
        let at = page + self.start as u64;
        self.len == 0
            || bus
                .code_bytes(cpu, at, now)
                .is_ok_and(|have| have == self.len)
                && *now == self.bytes[..self.len]
    }
}

/// How decoding goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Decode the next of the fetched instructions.
    Decode,
    /// Fetch at the offset, then decode.
    Fetch,
    /// The block ends.
    End,
}

impl<B: GuestBus> BlockDecoder<'_, B> {
    /// Fetches the bytes at the offset and decodes their instructions.
    fn fetch(&mut self, bytes: &mut [u8; FETCHED + RAW]) -> Next {
        let start = self.offset;
        let room = (0x1000 - start as usize).min(FETCHED);
        let at = self.page + u64::from(start);
        let Ok(have) = self.bus.peek_code(self.cpu, at, &mut bytes[..room]) else {
            return Next::End;
        };
        let have = have.min(room);
        let bits = self.mode.bits();
        let mut decoder = Decoder::with_ip(bits, &bytes[..have], start.into(), self.options);
        let mut i = Instruction::default();
        loop {
            decoder.decode_out(&mut i);
            let mut error = decoder.last_error();
            let from = self.offset.wrapping_sub(start) as usize;
            let mut raw = raw_at(bytes, from);
            if error == DecoderError::NoMoreBytes {
                if from != 0 && start as usize + have < 0x1000 {
                    return Next::Fetch;
                }
                match self.straddle((&mut raw, have - from), &mut i) {
                    Some(e) => error = e,
                    None => return Next::End,
                }
            }
            // The instruction is built in its place in the vector: a copy would wait for the stores that have just
            // written it.
            self.out.push(Decoded::invalid(self.offset));
            if error != DecoderError::None {
                return Next::End;
            }
            match self.take(&mut i, raw) {
                Next::Decode => {}
                next => return next,
            }
        }
    }

    /// Tracks the instructions' bytes, and no others, as code. Returns false if they have changed since they were read.
    fn track(&mut self) -> bool {
        let mut run = Run::new(0);
        // Iterations of a loop have the same instructions.
        let mut seen = [0_u64; 64];
        for d in self.out.iter() {
            let offset = d.offset as usize;
            let (word, bit) = (offset / 64 % 64, 1 << (offset % 64));
            if seen[word] & bit != 0 {
                continue;
            }
            seen[word] |= bit;
            let room = 0x1000_usize.saturating_sub(offset);
            if d.i.is_invalid() {
                // The interpreter looks again at what is no instruction.
                let mut bytes = [0; MAX_LEN];
                let bytes = &mut bytes[..room.min(MAX_LEN)];
                let at = self.page + offset as u64;
                if self.bus.code_bytes(self.cpu, at, bytes).is_err() {
                    return false;
                }
                continue;
            }
            let bytes = &d.raw[..d.i.len().min(room)];
            if !run.add(offset, bytes) {
                if !run.track(self.page, self.cpu, self.bus) {
                    return false;
                }
                run = Run::new(offset);
                run.add(offset, bytes);
            }
        }
        run.track(self.page, self.cpu, self.bus)
    }

    /// Decodes the instruction that the end of the page cuts in two: `raw` has `have` of its bytes. `None`: the block
    /// ends before it, or its other bytes cannot be fetched now.
    fn straddle(
        &mut self,
        (raw, have): (&mut [u8; RAW], usize),
        i: &mut Instruction,
    ) -> Option<DecoderError> {
        if !self.out.is_empty() || self.is_ahead {
            return None;
        }
        let (page, offset, mode) = (self.page, self.offset, self.mode);
        let end = At { page, offset, mode };
        let error = across(self.bus, self.cpu, &end, (raw, have), self.options, i).ok()?;
        self.straddles = error.is_some();
        Some(error.unwrap_or(DecoderError::NoMoreBytes))
    }

    /// Takes `i` as the last instruction of the block.
    #[inline]
    fn take(&mut self, i: &mut Instruction, raw: [u8; RAW]) -> Next {
        let long = self.mode.is_long();
        if !long {
            narrow::lift(i);
        }
        let form = self.forms.learn(i);
        let kind = kind_of(form, i, self.mode);
        let next = self.offset + i.len() as u32;
        if let Some(d) = self.out.last_mut() {
            d.set(i, raw, kind, form, long);
        }
        let target = match kind {
            Lowering::Jcc | Lowering::Jmp => target(i) as u64,
            _ => u64::MAX,
        };
        let is_full = self.out.len() >= self.most;
        if target == u64::from(self.first) && !self.mode.has(Mode::SPLIT) && !self.straddles {
            unroll(self.out, next);
            return Next::End;
        }
        let stays = self.mode.is_near(self.offset, target as i64);
        if kind == Lowering::Jmp && stays && self.jumps_left > 0 && !self.straddles {
            self.jumps_left -= 1;
            if let Some(d) = self.out.last_mut() {
                d.follow();
            }
            self.offset = target as u32;
            // The bytes at the target have not been fetched yet.
            let ends = is_full || is_stop(self.stops, self.offset);
            return if ends { Next::End } else { Next::Fetch };
        }
        if let Some(turns) = self.turns
            && kind == Lowering::Jcc
        {
            repeat_inner(self.out, turns, (target, next), self.most);
        }
        self.offset = next;
        if matches!(kind, Lowering::Jcc | Lowering::Counted) {
            self.branches_left -= 1;
            if self.branches_left == 0 {
                return Next::End;
            }
        }
        let ends = kind.ends_block()
            || self.out.len() >= self.most
            || is_stop(self.stops, next)
            || next >= 0x1000
            || self.straddles;
        match ends {
            true => Next::End,
            false => Next::Decode,
        }
    }
}

/// Returns true if no block or trace may have an instruction at `offset`.
pub(crate) fn is_stop(stops: &[u16], offset: u32) -> bool {
    stops.iter().any(|stop| u32::from(*stop) == offset)
}

/// Leaves STI, or a load of SS, to the interpreter if the block would end with it, or if it is before the instruction
/// that the interpreter executes: nothing may be injected between the two, and a VMM sees that at an exit of the second
/// one. Returns true if that one is left to the next block.
fn end_whole(out: &mut Vec<Decoded>) -> bool {
    let is_split = matches!(&out[..], [.., before, last]
        if last.kind == Lowering::Interpret && before.holds_events());
    if is_split {
        out.pop();
    }
    if let Some(d) = out.last_mut()
        && d.holds_events()
    {
        d.leave();
    }
    is_split
}

/// Where an instruction is that may straddle two pages.
struct At {
    page: u64,
    offset: u32,
    mode: Mode,
}

/// Decodes the instruction at the end of a page with the bytes of the next page: `raw` has `have` of its bytes. `None`
/// if no instruction may straddle the two.
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

/// Returns true if an instruction may begin in the page and end in the next one.
fn may_straddle(cpu: &CpuState, mode: Mode, page: u64) -> bool {
    let is_last = !mode.is_long() && page == 0xffff_f000;
    !is_last && (!mode.has(Mode::SEGMENTED) || has_pages(cpu, 1))
}

/// Returns the guest's bytes from `at` on: those of the instruction there, and what follows it.
pub(crate) fn raw_at(bytes: &[u8; FETCHED + RAW], at: usize) -> [u8; RAW] {
    let raw = bytes.get(at..).and_then(<[u8]>::first_chunk);
    raw.copied().unwrap_or_default()
}

/// Unrolls a loop within the block. Its branch, at the end of `out`, leads back to `target` and falls through to
/// `next`. The body is repeated because the first iterations often access what the instructions before the loop did.
/// `most`: maximum number of instructions of the block.
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

/// Unrolls the loop that is all of `out` and ends with the branch back; the branches in between leave it.
fn unroll(out: &mut Vec<Decoded>, next: u32) {
    let turns = (MAX_UNROLLED / out.len()).clamp(1, MAX_TURNS);
    repeat(out, 0, next, turns, false);
}

/// Repeats the body that begins at `from`, for `turns` iterations. `notes`: each branch that leaves the loop has its
/// iteration noted ([`Decoded::turn`]), so that it can be learned by which one the loop is left.
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
