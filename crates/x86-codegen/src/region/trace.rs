//! Traces: blocks along the path that was executed from a hot block on, through calls and returns.
//!
//! Where calls and returns end blocks, a call and its return cost forty instructions: pages are compared, the host's
//! stack gets the address by which its processor predicts the return, flags are kept. When a block becomes hot, the
//! interpreter executes what comes next and records the path. If the path goes through calls, the block is translated
//! along it. A call writes its return address, and the callee's code follows; a return compares what it reads with that
//! address. All pages are compared where the trace begins, by their [`crate::frame::page_guard::PageGuard`]s and the
//! generations of their code, as branches to them would be. An indirect branch that does not lead to the expected
//! target is made as in any other block.

use iced_x86::{Decoder, DecoderError, Instruction};
use x86_cpu::{CpuState, GuestBus};
use x86_interp::gating;

use crate::{
    ir::branch::{pushes_only, set_target, target},
    ir::decoded::{Decoded, RAW, TracePlace, find_live},
    ir::flags::ALL,
    ir::lowering::{Forms, Lowering, kind_of},
    ir::mode::Mode,
    ir::passed::is_passed,
    ir::source::TracePage,
    region::block::{self, FETCHED, raw_at},
};

/// Maximum number of instructions of a trace.
pub const MAX_TRACE: usize = 288;
/// Maximum number of pages of a trace.
const MAX_PAGES: usize = 12;
/// Maximum distance of a trace's code from its first page, in bytes: sums and differences of distances fit a signed
/// 32-bit number.
pub const MAX_DISTANCE: i64 = 1 << 30;
/// Maximum number of iterations of a loop within a trace; a trace ends before a loop that makes more, which is then
/// entered.
const MAX_TURNS: usize = 16;
/// Minimum number of instructions that the trace executes of a function from which it does not return.
const MIN_CALLED: usize = 24;

/// A call whose return has not been reached yet.
struct Frame {
    /// Number of the call's instruction.
    number: usize,
    callee: TracePlace,
    back: TracePlace,
}

/// A step of the path, from one instruction to the next, as distances from the first page.
struct Step {
    at: i32,
    next: i32,
}

/// Finds the page at a gva, if a trace may have code of it.
pub trait FindPage<B>: FnMut(&mut CpuState, &mut B, u64) -> Option<TracePage> {}

impl<B, F: FnMut(&mut CpuState, &mut B, u64) -> Option<TracePage>> FindPage<B> for F {}

/// What a trace is decoded from, and to.
#[derive(Debug)]
pub struct Tracer<'a, B, F> {
    /// The vCPU's state.
    pub cpu: &'a mut CpuState,
    /// Its bus, for the code.
    pub bus: &'a mut B,
    /// How forms are translated.
    pub forms: &'a mut Forms,
    /// The trace's instructions.
    pub decoded: &'a mut Vec<Decoded>,
    /// The trace's pages. The caller has entered the first one.
    pub pages: &'a mut Vec<TracePage>,
    /// Finds the page at a gva.
    pub find_page: F,
    /// The gva of the page where the trace begins.
    pub first_page: u64,
    /// The mode that the trace is translated for.
    pub mode: Mode,
    /// Offsets at which the trace takes no instruction, whatever the page.
    pub stops: &'a [u16],
}

impl<B: GuestBus, F: FindPage<B>> Tracer<'_, B, F> {
    /// Decodes along the path. Returns true if the path goes through calls; otherwise what was decoded is no trace.
    pub fn decode(&mut self, path: &[i32]) -> bool {
        self.forms.select(&self.cpu.features);
        self.decoded.clear();
        let mut frames: Vec<Frame> = Vec::new();
        // Targets of the conditional branches that the trace follows.
        let mut taken: Vec<Option<u32>> = Vec::new();
        let mut page = 0;
        // The last place of the path is the branch after which recorded paths differed: the trace ends with it.
        let ends = path.iter().skip(1).map(|at| Some(*at)).chain([None]);
        for (at, next) in path.iter().copied().zip(ends) {
            let is_closed = Some(&at) == path.first() && !self.decoded.is_empty();
            let is_here = self.page(page).is_some_and(|p| p.distance == at & !0xfff);
            if self.decoded.len() >= MAX_TRACE || is_closed && frames.is_empty() || !is_here {
                break;
            }
            let Some(d) = self.decode_one((at, page)) else {
                break;
            };
            self.decoded.push(d);
            taken.push(None);
            let Some(next) = next else { break };
            let step = Step { at, next };
            match d.kind {
                Lowering::Jcc => {
                    let Some(t) = self.follow_branch(&d, &step) else {
                        break;
                    };
                    if t.is_some_and(|t| t <= d.offset) && self.cut_loop(page, next, &mut taken) {
                        break;
                    }
                    if let (Some(to), Some(d)) = (t, self.decoded.last_mut()) {
                        d.turns_round();
                        let next = d.end();
                        set_target(&mut d.i, next);
                        if let Some(last) = taken.last_mut() {
                            *last = Some(to);
                        }
                    }
                }
                Lowering::Jmp if (0..0x1000).contains(&target(&d.i)) => {
                    if i64::from(next) != i64::from(d.distance) + target(&d.i) {
                        break;
                    }
                    if let Some(d) = self.decoded.last_mut() {
                        d.follow();
                    }
                }
                Lowering::Jmp
                | Lowering::JmpIndirect
                | Lowering::Call
                | Lowering::CallIndirect
                | Lowering::Ret => {
                    let onto = self.expect(&d, &step, &mut frames);
                    let Some(onto) = onto else { break };
                    page = onto.page;
                    if let Some(d) = self.decoded.last_mut() {
                        d.onto = Some(onto);
                        if pushes_only(d) {
                            d.access = 8;
                        }
                        // Code at another target may read any flag, unless the target is certain.
                        let is_certain = matches!(d.kind, Lowering::Call | Lowering::Jmp);
                        (d.reads, d.sets) = (if is_certain { 0 } else { ALL as u16 }, 0);
                    }
                }
                _ if !is_passed(&d) => break,
                _ if next != at + d.i.len() as i32 => break,
                _ => {}
            }
        }
        while let Some(f) = frames.pop()
            && self.decoded.len() <= f.number + MIN_CALLED
        {
            self.decoded.truncate(f.number + 1);
        }
        taken.truncate(self.decoded.len());
        self.end_trace(&taken)
    }

    /// Decodes the instruction at distance `at`, if it is valid and ends within the page.
    fn decode_one(&mut self, (at, page): (i32, u8)) -> Option<Decoded> {
        let offset = at as u32 & 0xfff;
        if block::is_stop(self.stops, offset) {
            return None;
        }
        let mut bytes = [0; FETCHED + RAW];
        let room = (0x1000 - offset as usize).min(block::MAX_LEN);
        let gva = self.first_page.wrapping_add_signed(at.into());
        let have = self.bus.peek_code(self.cpu, gva, &mut bytes[..room]).ok()?;
        let options = gating::decoder_options(&self.cpu.features);
        let have = &bytes[..have.min(room)];
        let mut decoder = Decoder::with_ip(64, have, offset.into(), options);
        let mut i = Instruction::default();
        decoder.decode_out(&mut i);
        if decoder.last_error() != DecoderError::None {
            return None;
        }
        // The instruction's own bytes are tracked as code, and no others.
        let mut tracked = [0; block::MAX_LEN];
        let tracked = &mut tracked[..i.len()];
        let len = self.bus.code_bytes(self.cpu, gva, tracked).ok()?;
        if len != i.len() || *tracked != bytes[..len] {
            return None;
        }
        let form = self.forms.learn(&i);
        let kind = kind_of(form, &i, self.mode);
        let mut d = Decoded::invalid(offset);
        d.set(&i, raw_at(&bytes, 0), kind, form, true);
        (d.page, d.distance) = (page, at & !0xfff);
        Some(d)
    }

    fn page(&self, n: u8) -> Option<&TracePage> {
        self.pages.get(usize::from(n))
    }

    /// Returns the target of the conditional branch in its page if the path follows it there. `None`: the branch leaves
    /// the page, or the code has changed since.
    fn follow_branch(&self, d: &Decoded, step: &Step) -> Option<Option<u32>> {
        if step.next == step.at + d.i.len() as i32 {
            return Some(None);
        }
        let t = target(&d.i);
        let is_there = i64::from(step.next) == i64::from(d.distance) + t;
        let t = u32::try_from(t).ok().filter(|t| *t < 0x1000 && is_there)?;
        (d.end() < 0x1000).then_some(Some(t))
    }

    /// Cuts the trace off where a loop begins that the path has come back to [`MAX_TURNS`] times. Returns true if there
    /// is one.
    fn cut_loop(&mut self, page: u8, to: i32, taken: &mut Vec<Option<u32>>) -> bool {
        let offset = to as u32 & 0xfff;
        let is_there = |d: &Decoded| (d.page, d.offset) == (page, offset);
        let turns = self.decoded.iter().filter(|d| is_there(d)).count();
        if turns < MAX_TURNS {
            return false;
        }
        let first = self.decoded.iter().position(is_there).unwrap_or(0);
        self.decoded.truncate(first);
        taken.truncate(first);
        true
    }

    /// Returns where the branch leads, if the trace can go on there.
    fn expect(&mut self, d: &Decoded, step: &Step, frames: &mut Vec<Frame>) -> Option<TracePlace> {
        let offset = step.next as u16 & 0xfff;
        if d.kind == Lowering::Ret {
            let frame = frames.last()?.back;
            let distance = self.page(frame.page)?.distance;
            if step.next != distance + i32::from(frame.offset) {
                return None;
            }
            frames.pop();
            return Some(frame);
        }
        let is_direct = matches!(d.kind, Lowering::Call | Lowering::Jmp);
        if is_direct && i64::from(step.next) != i64::from(d.distance) + target(&d.i) {
            return None;
        }
        let is_call = matches!(d.kind, Lowering::Call | Lowering::CallIndirect);
        if is_call && d.end() >= 0x1000 {
            return None;
        }
        let page = self.page_at(step.next & !0xfff)?;
        // Recursion is not followed: its depth, and its path at each depth, change all the time.
        let to = TracePlace { page, offset };
        let first = self.decoded.first();
        let is_first = first.is_some_and(|d| (d.page, d.offset) == (page, offset.into()));
        if is_call {
            if is_first || frames.iter().any(|f| f.callee == to) {
                return None;
            }
            frames.push(Frame {
                number: self.decoded.len() - 1,
                callee: to,
                back: d.behind(),
            });
        }
        Some(to)
    }

    /// Returns the number of a page among the trace's. `None`: the trace cannot have code of it.
    fn page_at(&mut self, distance: i32) -> Option<u8> {
        if let Some(n) = self.pages.iter().position(|p| p.distance == distance) {
            return Some(n as u8);
        }
        if self.pages.len() >= MAX_PAGES {
            return None;
        }
        let gva = self.first_page.wrapping_add_signed(distance.into());
        let page = (self.find_page)(self.cpu, self.bus, gva)?;
        self.pages.push(TracePage { distance, ..page });
        Some(self.pages.len() as u8 - 1)
    }

    /// Makes the last instruction one that a block can end with. Returns true if the trace goes through calls.
    fn end_trace(&mut self, taken: &[Option<u32>]) -> bool {
        if let (Some(d), Some(taken)) = (self.decoded.last_mut(), taken.last()) {
            if d.onto.take().is_some() && d.kind == Lowering::CallIndirect {
                d.access = 0;
            }
            if let Some(to) = taken {
                d.turns_round();
                set_target(&mut d.i, *to);
            }
        }
        find_live(self.decoded, self.mode);
        self.decoded.iter().any(|d| d.onto.is_some())
    }
}
