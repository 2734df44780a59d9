//! Which CPUID instructions can be replaced by a jump without any other effect on the program.
//!
//! Two bytes are certainly an instruction if the function around them, by .eh_frame, consists of instructions from its
//! begin to its end, and all its branches lead to one of these. A jump takes five bytes, so instructions before or
//! behind the CPUID are moved with it. None of them may be the target of a branch. So functions with computed branches
//! are left alone, and no bytes anywhere in the program may look like a branch to one of them.

use std::ops::Range;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};

use super::displacements::for_each_displacement;
use super::program::Program;

/// Length of a jump by rel32.
pub(super) const JUMP: usize = 5;
const CPUID: [u8; 2] = [0x0f, 0xa2];
/// How many instructions before a CPUID may be moved with it.
const BEFORE: usize = 3;
/// Functions of more bytes are left alone.
const LONGEST: usize = 1 << 16;

/// Instructions that are moved together, at the addresses they were linked for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MovedRun {
    pub(super) range: Range<usize>,
    pub(super) instructions: Vec<Instruction>,
}

/// CPUID instructions of a program, and the places where they can be replaced.
#[derive(Debug, Default)]
pub(super) struct CpuidInstructions {
    /// Number of byte sequences that are, or look like, a CPUID.
    pub(super) found: usize,
    /// Number of those that are in `places`.
    pub(super) covered: usize,
    /// The places, in ascending order, without overlaps.
    pub(super) places: Vec<MovedRun>,
}

impl CpuidInstructions {
    pub(super) fn of(program: &Program<'_>) -> Self {
        let mut sites: Vec<usize> = Vec::new();
        for part in program.parts.iter().filter(|part| part.is_code) {
            sites.extend(sites_in(part.bytes).map(|at| part.address + at));
        }
        sites.sort_unstable();
        let mut candidates = Vec::new();
        if !sites.is_empty() {
            for function in program.functions(&sites) {
                of_function(program, function, &mut candidates);
            }
        }
        let reached = reached(program, &candidates);
        let mut result = Self {
            found: sites.len(),
            ..Self::default()
        };
        candidates.sort_by_key(|(site, _)| *site);
        for (site, place) in candidates {
            let inside = |at: &usize| *at > place.range.start && *at < place.range.end;
            let is_done = result.places.last().is_some_and(|last: &MovedRun| {
                last.range.contains(&site) || last.range.end > place.range.start
            });
            if !is_done && !reached.iter().any(inside) {
                result.places.push(place);
            }
        }
        let count = |place: &MovedRun| place.instructions.iter().filter(|i| is_cpuid(i)).count();
        result.covered = result.places.iter().map(count).sum();
        result
    }
}

/// Returns where these bytes are a CPUID, or look like one.
fn sites_in(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let mut from = 0;
    std::iter::from_fn(move || {
        loop {
            let rest = bytes.get(from..)?;
            // SAFETY: an array with its length.
            let found = unsafe { libc::memchr(rest.as_ptr().cast(), CPUID[1].into(), rest.len()) };
            if found.is_null() {
                return None;
            }
            let at = found as usize - bytes.as_ptr() as usize;
            from = at + 1;
            if at > 0 && bytes[at - 1] == CPUID[0] {
                return Some(at - 1);
            }
        }
    })
}

pub(super) fn is_cpuid(instruction: &Instruction) -> bool {
    instruction.code() == Code::Cpuid
}

/// Returns the target of a branch whose displacement is in its code.
fn target(instruction: &Instruction) -> Option<usize> {
    let is_branch = instruction.op_count() > 0 && instruction.op0_kind() == OpKind::NearBranch64;
    is_branch.then(|| instruction.near_branch_target() as usize)
}

/// Returns the instructions of a function. `None` if the function has other bytes, too.
fn decode(program: &Program<'_>, function: &Range<usize>) -> Option<Vec<Instruction>> {
    if function.len() > LONGEST {
        return None;
    }
    let bytes = program.bytes(function.start, function.end)?;
    let mut decoder = Decoder::with_ip(64, bytes, function.start as u64, DecoderOptions::NONE);
    let mut instructions: Vec<Instruction> = Vec::new();
    while decoder.can_decode() {
        let instruction = decoder.decode();
        // The branch may go by a table of places in the function.
        let is_computed = instruction.flow_control() == FlowControl::IndirectBranch
            && instruction.memory_base() != Register::RIP;
        if instruction.is_invalid() || is_computed {
            return None;
        }
        instructions.push(instruction);
    }
    let begins = |at: usize| {
        let found = instructions.binary_search_by_key(&(at as u64), Instruction::ip);
        !function.contains(&at) || found.is_ok()
    };
    instructions
        .iter()
        .filter_map(target)
        .all(begins)
        .then_some(instructions)
}

/// Adds, for each CPUID of a function, the instructions that may be moved with it, best choice first.
fn of_function(
    program: &Program<'_>,
    function: Range<usize>,
    candidates: &mut Vec<(usize, MovedRun)>,
) {
    let Some(all) = decode(program, &function) else {
        return;
    };
    let mut targets: Vec<usize> = all.iter().filter_map(target).collect();
    let named = |i: &Instruction| {
        i.is_ip_rel_memory_operand()
            .then(|| i.memory_displacement64())
    };
    targets.extend(all.iter().filter_map(named).map(|at| at as usize));
    for (index, cpuid) in all.iter().enumerate().filter(|(_, i)| is_cpuid(i)) {
        for first in (index.saturating_sub(BEFORE)..=index).rev() {
            let begin = all[first].ip() as usize;
            let is_long = |i: &Instruction| i.next_ip() as usize - begin >= JUMP;
            let Some(count) = all[index..].iter().position(is_long) else {
                continue;
            };
            let moved = &all[first..=index + count];
            let range = begin..all[index + count].next_ip() as usize;
            let is_inside = |at: &usize| *at > range.start && *at < range.end;
            if can_move(moved) && !targets.iter().any(is_inside) {
                let instructions = moved.to_vec();
                let place = MovedRun {
                    range,
                    instructions,
                };
                candidates.push((cpuid.ip() as usize, place));
            }
        }
    }
}

/// Returns true for instructions that do the same at another address.
fn can_move(instructions: &[Instruction]) -> bool {
    let Some((last, others)) = instructions.split_last() else {
        return false;
    };
    let goes_on = |i: &Instruction| {
        is_cpuid(i)
            || i.flow_control() == FlowControl::Next
            || i.is_jcc_short_or_near() && target(i).is_some()
    };
    others.iter().all(goes_on)
        && (goes_on(last)
            || last.flow_control() == FlowControl::Return
            || last.is_jmp_short_or_near() && target(last).is_some())
}

/// Returns addresses inside of places to which any bytes of the program's code would lead as a displacement.
fn reached(program: &Program<'_>, candidates: &[(usize, MovedRun)]) -> Vec<usize> {
    let ranges = candidates.iter().map(|(_, place)| &place.range);
    let (Some(first), Some(last)) = (
        ranges.clone().map(|range| range.start).min(),
        ranges.map(|range| range.end).max(),
    ) else {
        return Vec::new();
    };
    // Few pages have places. Most displacements lead to other pages, and are dismissed at once.
    const PAGE: usize = 4096;
    let mut pages = vec![false; (last - first) / PAGE + 1];
    for (_, place) in candidates {
        let of = |at: usize| (at - first) / PAGE;
        pages[of(place.range.start)..=of(place.range.end)].fill(true);
    }
    let is_inside = |at: usize| {
        let inside = |range: &Range<usize>| at > range.start && at < range.end;
        pages.get((at - first) / PAGE) == Some(&true)
            && candidates.iter().any(|(_, place)| inside(&place.range))
    };
    let mut reached = Vec::new();
    for part in program.parts.iter().filter(|part| part.is_code) {
        let base = part.address.wrapping_sub(first);
        // A branch may lead into a place from at most this far away.
        let end = part.address.saturating_add(part.bytes.len());
        let distance = last.max(end) - first.min(part.address);
        for_each_displacement(part.bytes, distance, |at, displacement| {
            let to = base
                .wrapping_add(at + 4)
                .wrapping_add_signed(displacement as isize);
            if to < last - first && is_inside(first + to) {
                reached.push(first + to);
            }
        });
    }
    reached
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::program::Part;
    use super::*;

    const AT: usize = 0x40_1000;
    const FRAMES: usize = 0x50_0000;

    /// Returns .eh_frame of one function.
    pub(in super::super) fn frames(function: Range<usize>) -> Vec<u8> {
        let mut frames = vec![12, 0, 0, 0, 0, 0, 0, 0, 1];
        // Addresses are relative to their own place; then come alignments, the register and the length of "R".
        frames.extend(b"zR\0\x01\x78\x10\x01");
        frames.extend([0x1b, 0]);
        frames[0] = (frames.len() - 4) as u8;
        let at = frames.len() as u32;
        frames.extend([12, 0, 0, 0]);
        frames.extend((at + 4).to_le_bytes());
        let here = FRAMES + frames.len();
        frames.extend((function.start.wrapping_sub(here) as u32).to_le_bytes());
        frames.extend((function.len() as u32).to_le_bytes());
        frames.extend([0; 4]);
        frames
    }

    /// Returns what is found in `code`, of which the first `len` bytes are a function.
    fn places(code: &[u8], len: usize) -> CpuidInstructions {
        let frames = frames(AT..AT + len);
        let part = |address, bytes, is_code| Part {
            address,
            bytes,
            is_code,
        };
        CpuidInstructions::of(&Program {
            parts: vec![part(AT, code, true), part(FRAMES, &frames, false)],
            frames: FRAMES..FRAMES + frames.len(),
        })
    }

    #[test]
    fn only_what_is_certain_is_replaced() {
        // Each function begins with push rbx and ends with pop rbx; ret.
        for (what, code, want) in [
            // cpuid; cmp eax, edi; jb over
            (
                "a branch behind",
                &b"\x0f\xa2\x39\xf8\x72\x01\x90"[..],
                Some(1..7),
            ),
            // xor eax, eax; xor ecx, ecx; cpuid; call
            (
                "what is before",
                b"\x31\xc0\x31\xc9\x0f\xa2\xe8\x00\x00\x00\x00",
                Some(1..7),
            ),
            // call; cpuid; call
            (
                "calls around",
                b"\xe8\x00\x00\x00\x00\x0f\xa2\xe8\x00\x00\x00\x00",
                None,
            ),
            // cpuid; mov ecx, eax; nop; jmp to the mov
            ("a branch into it", b"\x0f\xa2\x89\xc1\x90\xeb\xfb", None),
            // cpuid; mov ecx, eax; nop; lea rax, [rip - 10]: the mov's address
            (
                "an address in it",
                b"\x0f\xa2\x89\xc1\x90\x48\x8d\x05\xf6\xff\xff\xff",
                None,
            ),
            // cpuid; mov ecx, eax; nop; jmp rax
            ("a computed branch", b"\x0f\xa2\x89\xc1\x90\xff\xe0", None),
            // cpuid; mov ecx, eax; nop; push es
            ("no instruction", b"\x0f\xa2\x89\xc1\x90\x06", None),
            // mov eax, 0xa20f; nop
            ("a constant", b"\xb8\x0f\xa2\x00\x00\x90", None),
        ] {
            let code = [b"\x53".as_slice(), code, b"\x5b\xc3"].concat();
            let found = places(&code, code.len());
            let range = found.places.first().map(|place| &place.range);
            let want = want.map(|r: Range<usize>| AT + r.start..AT + r.end);
            assert_eq!(range, want.as_ref(), "{what}");
            assert_eq!(found.found, 1, "{what}");
            assert_eq!(found.covered, usize::from(want.is_some()), "{what}");
            assert_eq!(places(&code, 0).covered, 0, "{what}: of no function");
        }
        // These bytes behind the function would be a displacement into it.
        let code = b"\x0f\xa2\x89\xc1\x90\xc3\xe9\xf7\xff\xff\xff";
        assert_eq!(places(code, 6).covered, 0);
        assert_eq!(places(&code[..6], 6).covered, 1);
        // One place may have two CPUIDs.
        assert_eq!(places(b"\x0f\xa2\x0f\xa2\x90\xc3", 6).covered, 2);
    }

    #[test]
    fn damaged_frames_end_the_list() {
        let code = b"\x0f\xa2\x89\xc1\x90\xc3";
        let good = frames(AT..AT + code.len());
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut frames = good.clone();
                frames[at] = value;
                for len in [frames.len(), at] {
                    let part = |address, bytes, is_code| Part {
                        address,
                        bytes,
                        is_code,
                    };
                    let program = Program {
                        parts: vec![part(AT, code, true), part(FRAMES, &frames, false)],
                        frames: FRAMES..FRAMES + len,
                    };
                    assert_eq!(CpuidInstructions::of(&program).found, 1);
                }
            }
        }
    }
}
