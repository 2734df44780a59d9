//! The vCPU's state as generated code addresses it: offsets from GS.
//!
//! | host register | holds |
//! |---|---|
//! | rax … rdi but rsp, r8, r9 | the guest's register of that name |
//! | r10 | the guest's R12 |
//! | r15 | the guest's RSP |
//! | r11 | the live view's software TLB |
//! | r12 | instructions until the next poll |
//! | r13, r14 | scratch; r14 is the host address of a memory operand |
//! | rsp | the host's stack: return addresses |
//!
//! The guest's R10, R11 and R13 to R15 live in memory, as compilers use R12 more than R10. Its arithmetic flags are in
//! the host's RFLAGS, or in [`FLAGS`] (LAHF's byte in bits 8 to 15, OF in bit 0).

use core::mem::offset_of;

use engine_frame::EngineFrame;
use x86_cpu::{CpuState, Features, Msrs, Retired};
use x86_defs::{reg, retired::STREAMS, segment::Segment};

use crate::asm::{Mem, Reg, at, gs};

/// A scratch register, which also has the host address of memory operands.
pub(crate) const S0: Reg = 14;
/// A scratch register.
pub const S1: Reg = 13;
/// The countdown to the next poll.
pub(crate) const COUNTER: Reg = 12;
/// The live view's `mmu::l1::L1`.
pub(crate) const TLB: Reg = 11;
/// The guest's RSP.
pub(crate) const GUEST_RSP: Reg = 15;

// [`EngineFrame`] documents each word of the frame at its field.

/// Returns the offset from GS of the frame's word at `offset`.
const fn frame(offset: usize) -> usize {
    offset_of!(CpuState, engine) + offset
}

pub(crate) const TABLES: usize = frame(EngineFrame::TABLES);
pub(crate) const DEVICES: usize = frame(EngineFrame::DEVICES);
pub(crate) const MIXED: usize = frame(EngineFrame::MIXED);
pub(crate) const TARGETS: usize = frame(EngineFrame::TARGETS);
pub(crate) const KEY: usize = offset_of!(CpuState, engine.key);
pub(crate) const SALT: usize = offset_of!(CpuState, engine.salt);
pub(crate) const NUMBER: usize = offset_of!(CpuState, engine.number);
pub(crate) const PAGE: usize = offset_of!(CpuState, engine.page);
pub(crate) const FLAGS: usize = offset_of!(CpuState, engine.flags);
pub(crate) const SPILL: usize = offset_of!(CpuState, engine.spill);
pub(crate) const ENTRY: usize = frame(EngineFrame::ENTRY);
pub(crate) const REQUESTS: usize = frame(EngineFrame::REQUESTS);
pub(crate) const POLLS_LEFT: usize = offset_of!(CpuState, engine.polls_left);
pub(crate) const REASON: usize = offset_of!(CpuState, engine.reason);
pub(crate) const ARGUMENT: usize = offset_of!(CpuState, engine.argument);
pub(crate) const FP_LIVE: usize = offset_of!(CpuState, engine.fp_live);
pub(crate) const CONTEXT: usize = frame(EngineFrame::CONTEXT);
pub(crate) const HOST_MXCSR: usize = offset_of!(CpuState, engine.host_mxcsr);
pub(crate) const IRQ_WAITING: usize = offset_of!(CpuState, engine.irq_waiting);
pub(crate) const TSC_OFFSET: usize = offset_of!(CpuState, engine.tsc_offset);
pub(crate) const COST: usize = offset_of!(CpuState, engine.cost);
pub(crate) const COUNT: usize = offset_of!(CpuState, engine.count);
pub(crate) const PAUSES: usize = offset_of!(CpuState, engine.pauses);
pub(crate) const UNTIL: usize = offset_of!(CpuState, engine.until);
pub(crate) const STOP: usize = frame(EngineFrame::STOP);
pub(crate) const SLOT: usize = frame(EngineFrame::SLOT);
pub(crate) const LOG: usize = frame(EngineFrame::LOG);
/// The tables of the supervisor's views by CR0.WP and RFLAGS.AC ([`view_of`]). A word is 0 if generated code may not
/// change to that view by itself, because more than the tables differs, or because the view is not known.
pub(crate) const VIEWS: [usize; 4] = {
    let [[a, b], [c, d]] = EngineFrame::VIEWS_AT;
    [frame(a), frame(b), frame(c), frame(d)]
};
/// Returns the index in [`VIEWS`].
pub(crate) const fn view_of(wp: bool, ac: bool) -> usize {
    (wp as usize) << 1 | ac as usize
}
pub(crate) const KEY_VIEWS: usize = frame(EngineFrame::KEY_VIEWS_AT);
/// The factor of PKRU's hash: the upper three bits of the product are the entry's index.
pub(crate) const KEY_VIEW_HASH: u32 = EngineFrame::KEY_VIEW_HASH;
pub(crate) const SWITCHES: usize = frame(EngineFrame::SWITCHES);
pub(crate) const SWITCH_EPOCHS: usize = frame(EngineFrame::SWITCH_EPOCHS);
pub(crate) const WANTED_ROOT: usize = offset_of!(CpuState, engine.wanted_root);
pub(crate) const ADDRESS_SPACE: usize = offset_of!(CpuState, engine.address_space);
pub(crate) const IS_OTHER_ROOT: usize = offset_of!(CpuState, engine.is_other_root);
pub(crate) const FLUSHING_LOADS: usize = offset_of!(CpuState, engine.flushing_loads);
pub(crate) const COUNTED_FROM: usize = offset_of!(CpuState, engine.counted_from);
pub(crate) const LEFT_TO_POLL: usize = offset_of!(CpuState, engine.left_to_poll);
pub(crate) const COUNTED_TO: usize = offset_of!(CpuState, engine.counted_to);
pub(crate) const COUNTED: usize = offset_of!(CpuState, engine.counted);
pub(crate) const REFUND: usize = frame(EngineFrame::REFUND);
pub(crate) const COUNTED_ENTRY: usize = frame(EngineFrame::COUNTED_ENTRY);
/// [`Retired::left`].
pub(crate) const EVENTS_LEFT: usize = offset_of!(CpuState, retired) + offset_of!(Retired, left);
/// Returns the count of a stream at a level in [`Retired::counts`].
pub(crate) const fn retired(level: usize, stream: usize) -> usize {
    offset_of!(CpuState, retired) + offset_of!(Retired, counts) + 8 * (level * STREAMS + stream)
}
pub(crate) const NO_SALT: usize = offset_of!(CpuState, engine.no_salt);
pub(crate) const GOES_ON_PLAINLY: usize = frame(EngineFrame::GOES_ON);
/// With one stream besides instructions, several, and several with accesses to memory.
pub(crate) const GOES_ON_COUNTING: [usize; 3] = [
    GOES_ON_PLAINLY + 8,
    GOES_ON_PLAINLY + 16,
    GOES_ON_PLAINLY + 24,
];
pub(crate) const COUNTED_PENDING: usize = offset_of!(CpuState, engine.counted_pending);
pub(crate) const COUNTED_AS: usize = offset_of!(CpuState, engine.counted_as);
pub(crate) const BOUNDS: usize = offset_of!(CpuState, engine.bounds);
pub(crate) const BOUND_SIZES: usize = EngineFrame::BOUND_SIZES;
pub(crate) const COUNTED_GO_ON: usize = frame(EngineFrame::COUNTED_GO_ON);
pub(crate) const COUNTED_SALT: usize = offset_of!(CpuState, engine.counted_salt);
pub(crate) const KEYS: usize = frame(EngineFrame::KEYS);
pub(crate) const LEVELS: usize = frame(EngineFrame::LEVELS);
pub(crate) const LEVEL_FACTS: usize = offset_of!(CpuState, engine.level_facts);
pub(crate) const COUNTED_BESIDE: usize = offset_of!(CpuState, engine.counted_beside);
pub(crate) const REFUND_BESIDE: usize = frame(EngineFrame::REFUND_BESIDE);
pub(crate) const COUNTED_SPILL: usize = frame(EngineFrame::COUNTED_SPILL);
pub(crate) const COUNTED_BESIDE_FROM: usize = offset_of!(CpuState, engine.counted_beside_from);
pub(crate) const COUNTED_LEFT: usize = offset_of!(CpuState, engine.counted_left);
pub(crate) const COUNTED_EVENTS: usize = offset_of!(CpuState, engine.counted_events);
pub(crate) const OVERFLOW_AT: usize = offset_of!(CpuState, engine.overflow_at);
pub(crate) const LOOKED: usize = offset_of!(CpuState, engine.looked);
pub(crate) const ELAPSED: usize = frame(EngineFrame::ELAPSED);
pub(crate) const PACE: usize = offset_of!(CpuState, engine.pace);
pub(crate) const POLL_WINDOW: usize = offset_of!(CpuState, engine.window);
pub(crate) const COUNTED_SUMS: usize = EngineFrame::COUNTED_SUMS;
/// Returns the bound of accesses of `size` bytes in segment `n`.
pub(crate) const fn bound(n: usize, size: u32) -> Mem {
    let size = size.next_power_of_two().trailing_zeros() as usize;
    gs(BOUNDS + 4 * (BOUND_SIZES * n + size))
}
pub(crate) const SITE_ENTRIES_MISSED: usize = offset_of!(CpuState, engine.site_entries_missed);
pub(crate) const IS_OTHER_VIEW: usize = offset_of!(CpuState, engine.is_other_view);
pub(crate) const STACK: usize = frame(EngineFrame::STACK);
pub(crate) const CROSS_PAGE_LEFT: usize = offset_of!(CpuState, engine.cross_page_left);
pub(crate) const HOST_RSP: usize = frame(EngineFrame::HOST_RSP);
pub(crate) const VECTORS: usize = frame(EngineFrame::VECTORS);
pub(crate) const OWED: usize = frame(EngineFrame::OWED);
pub(crate) const ANCHORS: usize = frame(EngineFrame::ANCHORS_AT);
pub(crate) const ANCHORS_LEN: usize = EngineFrame::ANCHORS;
pub(crate) const REST: usize = frame(EngineFrame::REST);
pub(crate) const BEGAN: usize = frame(EngineFrame::BEGAN);
pub(crate) const CREDIT_LEFT: usize = offset_of!(CpuState, engine.credit_left);
pub(crate) const RELUCTANCES: usize = frame(EngineFrame::RELUCTANCES_AT);
pub(crate) const RELUCTANCES_LEN: usize = EngineFrame::RELUCTANCES;
pub(crate) const RANDOM: usize = frame(EngineFrame::RANDOM);
pub(crate) const UPPERS_IN_USE: usize = frame(EngineFrame::UPPERS_IN_USE);
pub(crate) const GATHERED: usize = frame(EngineFrame::GATHERED);
pub(crate) const BOUNCED: usize = frame(EngineFrame::BOUNCED);

pub(crate) const FP_AREA: usize = offset_of!(CpuState, fp);
pub(crate) const RIP: usize = 8 * reg::RIP;

/// RFLAGS without the arithmetic flags.
pub(crate) const RFLAGS: usize = offset_of!(CpuState, rflags);
/// Limit and base of GDT and IDT.
pub(crate) const GDTR: [usize; 2] = [
    offset_of!(CpuState, gdtr.limit),
    offset_of!(CpuState, gdtr.base),
];
pub(crate) const IDTR: [usize; 2] = [
    offset_of!(CpuState, idtr.limit),
    offset_of!(CpuState, idtr.base),
];
pub(crate) const CR0: usize = offset_of!(CpuState, cr0);
pub(crate) const CR2: usize = offset_of!(CpuState, cr2);
pub(crate) const CR3: usize = offset_of!(CpuState, cr3);
pub(crate) const XCR0: usize = offset_of!(CpuState, xcr0);
pub(crate) const CR4: usize = offset_of!(CpuState, cr4);
pub(crate) const XSS: usize = offset_of!(CpuState, xss);
pub(crate) const EFER: usize = offset_of!(CpuState, efer);
pub(crate) const PKRU: usize = offset_of!(CpuState, pkru);
/// Where PKRU is in the standard format of XSAVE, in 16 bits.
pub(crate) const PKRU_OFFSET: usize =
    offset_of!(CpuState, features) + offset_of!(Features, pkru_offset);
pub(crate) const TSC_AUX: usize = offset_of!(CpuState, msr) + offset_of!(Msrs, tsc_aux);
pub(crate) const STAR: usize = offset_of!(CpuState, msr) + offset_of!(Msrs, star);
pub(crate) const LSTAR: usize = offset_of!(CpuState, msr) + offset_of!(Msrs, lstar);
pub(crate) const FMASK: usize = offset_of!(CpuState, msr) + offset_of!(Msrs, fmask);
pub(crate) const CPL: usize = offset_of!(CpuState, cpl);
pub(crate) const KERNEL_GS_BASE: usize =
    offset_of!(CpuState, msr) + offset_of!(Msrs, kernel_gs_base);

/// Returns the selector of a segment register.
pub(crate) const fn selector(n: usize) -> Mem {
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, selector))
}

/// Returns the limit of a segment register, in 32 bits, and behind it its attributes.
pub(crate) const fn segment_limit(n: usize) -> Mem {
    const { assert!(offset_of!(Segment, attr) == offset_of!(Segment, limit) + 4) };
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, limit))
}

/// Returns the attributes of a segment register.
pub(crate) const fn segment_attr(n: usize) -> Mem {
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, attr))
}

/// Returns a word close to the TLB's base, whose displacement takes one byte instead of four.
const fn short(n: usize) -> Mem {
    at(TLB, mmu::l1::word(n))
}

/// Returns the word for the host pointer of a group, which lives as long as a block is executed. The first
/// [`FIRST_OTHER`] are nearest to the base.
pub(crate) const fn kept(slot: u8) -> Mem {
    let slot = slot as usize;
    short(if slot < FIRST_OTHER {
        slot
    } else {
        mmu::l1::SHORT_WORDS + slot - FIRST_OTHER
    })
}
/// Maximum number of groups of a block whose pointers are kept.
pub(crate) const MAX_KEPT: usize = 8;
/// The nearest words from this one on have other purposes.
const FIRST_OTHER: usize = 4;

/// Words that generated code keeps close to the TLB's base, where Rust keeps them with the rest of the vCPU's state.
/// They are copied where one calls the other.
pub(crate) const SHORT_PAGE: Mem = short(FIRST_OTHER);
pub(crate) const SHORT_FLAGS: Mem = short(5);
/// [`SALT`]; generated code does not change it or [`SHORT_TARGETS`].
pub(crate) const SHORT_SALT: Mem = short(6);
const FIRST_GPR_SLOT: usize = 7;
pub(crate) const SHORT_TARGETS: Mem = short(12);
/// [`FP_LIVE`], which changes together with it: four bytes.
pub(crate) const SHORT_FP_LIVE: Mem = short(13);
/// [`NUMBER`], in the next four bytes.
pub(crate) const SHORT_NUMBER: Mem = at(TLB, SHORT_FP_LIVE.disp + 4);

/// Returns the words that are copied close to the base, but not back. The number is copied after them.
pub(crate) const fn short_constants() -> [(Mem, Mem); 3] {
    [
        (gs(SALT), SHORT_SALT),
        (gs(TARGETS), SHORT_TARGETS),
        (gs(FP_LIVE), SHORT_FP_LIVE),
    ]
}

/// Returns the words that generated code changes and that are copied in both directions: their places with the rest of
/// the state, and close to the base.
pub(crate) fn short_words() -> impl Iterator<Item = (Mem, Mem)> {
    let words = [(PAGE, SHORT_PAGE), (FLAGS, SHORT_FLAGS)];
    let gpr_slots = (0..16u8).filter(|n| IN_FRAME >> n & 1 != 0);
    let words = words.into_iter().map(|(far, near)| (gs(far), near));
    words.chain(gpr_slots.map(|n| (state_register(n), gpr_slot(n))))
}

/// Returns the place of a guest register with the rest of the vCPU's state.
pub(crate) const fn state_register(n: u8) -> Mem {
    gs(8 * n as usize)
}

/// Returns the place of a guest register that lives in memory, while generated code runs.
pub(crate) const fn gpr_slot(n: u8) -> Mem {
    short(FIRST_GPR_SLOT + (IN_FRAME & ((1 << n) - 1)).count_ones() as usize)
}

/// Returns the base of a segment.
pub(crate) const fn segment_base(n: usize) -> Mem {
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, base))
}

/// Returns the host register of a guest register, if it has one.
pub(crate) const fn host_reg(n: u8) -> Option<Reg> {
    match n {
        4 => Some(GUEST_RSP),
        12 => Some(10),
        10 | 11 | 13..=15 => None,
        n => Some(n),
    }
}

/// Bit per guest register that lives in memory.
pub(crate) const IN_FRAME: u16 = {
    let mut bits = 0;
    let mut n = 0;
    while n < 16 {
        if host_reg(n).is_none() {
            bits |= 1 << n;
        }
        n += 1;
    }
    bits
};

const _: () = assert!(offset_of!(CpuState, gpr) == 0);
