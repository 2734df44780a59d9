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
//! The guest's r10, r11 and r13 to r15 live in memory. (Compilers use R12 more
//! than R10.) Its arithmetic flags are in the
//! host's RFLAGS, or in [`FLAGS`] (LAHF's byte in bits 8 to 15, OF in bit 0).

use core::mem::offset_of;

use x86_cpu::{CpuState, EngineFrame, Msrs, Retired};
use x86_defs::{reg, segment::Segment};

use crate::asm::{Mem, Reg, at, gs};

/// Scratch, and the host address of memory operands.
pub(crate) const S0: Reg = 14;
/// Scratch.
pub(crate) const S1: Reg = 13;
/// Counts down to the next poll.
pub(crate) const COUNTER: Reg = 12;
/// The live view's `mmu::l1::L1`.
pub(crate) const TLB: Reg = 11;
/// Guest RSP.
pub(crate) const GUEST_RSP: Reg = 15;

const fn word(n: usize) -> usize {
    offset_of!(CpuState, engine) + 8 * n
}

/// For [`TLB`].
pub(crate) const TABLES: usize = word(0);
/// The MMU's last device pages: `mmu::DevicePage` twice.
pub(crate) const DEVICES: usize = word(3);
/// The table of indirect targets.
pub(crate) const TARGETS: usize = word(4);
/// What identifies mapping and mode in [`TARGETS`].
pub(crate) const KEY: usize = word(5);
/// What tags in [`TARGETS`] are XORed with: `crate::code::cache::salt_of` the key.
pub(crate) const SALT: usize = word(6);
/// The key's number in 32 bits: [`crate::code::cache::Cache::number`].
pub(crate) const NUMBER: usize = word(25);
/// gva of the page that executes.
pub(crate) const PAGE: usize = word(7);
/// Arithmetic flags, when not in RFLAGS.
pub(crate) const FLAGS: usize = word(8);
/// Two words.
pub(crate) const SPILL: usize = word(9);
/// Where to jump after the registers are loaded.
pub(crate) const ENTRY: usize = word(11);
/// Address of the request word.
pub(crate) const REQUESTS: usize = word(12);
/// Looks that are left.
pub(crate) const POLLS_LEFT: usize = word(13);
/// [`crate::frame::exit::Reason`].
pub(crate) const REASON: usize = word(14);
/// Number of the link site.
pub(crate) const ARGUMENT: usize = word(15);
/// FP state is in the host's registers.
pub(crate) const FP_LIVE: usize = word(16);
/// `*mut RefillContext`.
pub(crate) const CONTEXT: usize = word(17);
/// The host's default MXCSR, for LDMXCSR.
pub(crate) const HOST_MXCSR: usize = word(18);
/// An interrupt waits for RFLAGS.IF.
pub(crate) const IRQ_WAITING: usize = word(19);
/// Guest TSC less host TSC.
pub(crate) const TSC_OFFSET: usize = word(20);
/// What an instruction of the interpreter's cost, in instructions.
pub(crate) const COST: usize = word(21);
/// Instructions until the first poll after entry.
pub(crate) const COUNT: usize = word(22);
/// `*mut` [`crate::runtime::lockstep::Log`], or 0.
pub(crate) const LOG: usize = word(23);
/// PAUSEs executed.
pub(crate) const PAUSES: usize = word(30);
/// Host TSC at which the run loop has to be returned to at the latest; 0: whenever [`POLLS_LEFT`] is used up.
pub(crate) const UNTIL: usize = word(29);
/// Address of the byte that is not zero when it has to be at once.
pub(crate) const STOP: usize = word(96);
/// What a string instruction found for its first operand, while it looks at the second.
pub(crate) const SLOT: usize = word(24);
/// The tables of the supervisor's views by CR0.WP and RFLAGS.AC ([`view_of`]), if nothing but the tables differs
/// between them and generated code may change from the one to the other; or 0.
pub(crate) const VIEWS: [usize; 4] = [word(26), word(27), word(126), word(127)];
/// Index in [`VIEWS`].
pub(crate) const fn view_of(wp: bool, ac: bool) -> usize {
    (wp as usize) << 1 | ac as usize
}
/// The tables of views that differ in PKRU alone, as [`VIEWS`]: [`KEY_VIEWS_LEN`] of [`KEY_VIEW_WORDS`], by [`KEY_VIEW_HASH`].
pub(crate) const KEY_VIEWS: usize = word(128);
pub(crate) const KEY_VIEWS_LEN: usize = 8;
/// Words of one: the tables that are changed from, the PKRU that is changed to, its tables, and their [`KEY`], [`SALT`] and [`NUMBER`].
pub(crate) const KEY_VIEW_WORDS: usize = 6;
/// The upper three bits of PKRU times this.
pub(crate) const KEY_VIEW_HASH: u32 = 0x9e37_79b1;
/// One of them is in use.
pub(crate) const KEY_VIEWS_USED: usize = word(128 + KEY_VIEWS_LEN * KEY_VIEW_WORDS);
const _: () = assert!(KEY_VIEWS_USED < word(EngineFrame::WORDS));
/// Address of the table of [`crate::frame::switches`].
pub(crate) const SWITCHES: usize = word(128 + KEY_VIEWS_LEN * KEY_VIEW_WORDS + 1);
/// Address of what `mmu::Mmu::switches_epoch` is.
pub(crate) const SWITCHES_EPOCH: usize = word(128 + KEY_VIEWS_LEN * KEY_VIEW_WORDS + 2);
/// The CR3 that an instruction is left to the interpreter with, which flushes nothing; or 0.
pub(crate) const WANTED_ROOT: usize = word(128 + KEY_VIEWS_LEN * KEY_VIEW_WORDS + 3);
/// Generated code has loaded CR3: the MMU has to be told before anything else.
pub(crate) const IS_OTHER_ROOT: usize = word(128 + KEY_VIEWS_LEN * KEY_VIEW_WORDS + 4);
/// Of code that counts ([`crate::codegen::countdown::exact`]): the countdown when it was last set, or 0: such code does not run;
pub(crate) const COUNTED_FROM: usize = word(181);
/// what it is now, while Rust runs;
pub(crate) const COUNTED_TO: usize = word(182);
/// instructions that polls have taken off it;
pub(crate) const COUNTED: usize = word(183);
/// what is to be given back if the instruction that calls a trampoline is left to the interpreter;
pub(crate) const REFUND: usize = word(185);
/// where to go on once the countdown is loaded;
pub(crate) const COUNTED_ENTRY: usize = word(186);
/// the other streams (`ir::streams::Streams::number`), and in bit 8 the level;
pub(crate) const COUNTED_AS: usize = word(187);
const _: () = assert!(IS_OTHER_ROOT < COUNTED_FROM && COUNTED_AS < word(EngineFrame::WORDS));
/// [`Retired::left`].
pub(crate) const EVENTS_LEFT: usize = offset_of!(CpuState, retired) + offset_of!(Retired, left);
/// Of each segment, the highest offset at which there are so many bytes: 32 bits for each of 1, 2, 4 … 32 bytes.
pub(crate) const BOUNDS: usize = word(188);
pub(crate) const BOUND_SIZES: usize = 6;
/// The six limits that they are of, 32 bits each.
pub(crate) const BOUNDS_OF: usize = word(206);
const _: () = assert!(COUNTED_AS < BOUNDS && BOUNDS + 6 * 4 * BOUND_SIZES <= BOUNDS_OF);
const _: () = assert!(
    BOUNDS_OF + 6 * 4 <= COUNTED_GO_ON && COUNTED_SALT < KEYS && KEYS < word(EngineFrame::WORDS)
);
/// Translated code has gone from a level that is counted to one that is not, or the other way round: the trampoline that goes on there, or 0;
pub(crate) const COUNTED_GO_ON: usize = word(209);
/// and the salt that its target is found by.
pub(crate) const COUNTED_SALT: usize = word(210);
/// Address of the table of [`crate::frame::keys`].
pub(crate) const KEYS: usize = word(211);
/// Of code that counts several streams: what the countdown has no room for, 16 bits each, and what [`REFUND`] is of these;
pub(crate) const COUNTED_BESIDE: usize = word(212);
pub(crate) const REFUND_BESIDE: usize = word(213);
/// a word for a moment;
pub(crate) const COUNTED_SPILL: usize = word(214);
/// events that polls have taken off.
pub(crate) const COUNTED_EVENTS: usize = word(215);
/// How many sums these are at most.
pub(crate) const COUNTED_SUMS: usize = 7;
const _: () = assert!(COUNTED_EVENTS + 8 * COUNTED_SUMS <= word(EngineFrame::WORDS));
/// The one of `size` bytes in segment `n`.
pub(crate) const fn bound(n: usize, size: u32) -> Mem {
    let size = size.next_power_of_two().trailing_zeros() as usize;
    gs(BOUNDS + 4 * (BOUND_SIZES * n + size))
}
/// Misses of a per-site entry have become many.
pub(crate) const SITE_ENTRIES_MISSED: usize = word(97);
/// It has done so: the MMU has to be told before anything else.
pub(crate) const IS_OTHER_VIEW: usize = word(28);
/// The host's RSP with no call to return from: see [`crate::codegen::trampolines`].
pub(crate) const STACK: usize = word(31);
/// Direct branches to other pages by the table until one of them is remembered.
pub(crate) const CROSS_PAGE_LEFT: usize = word(1);
/// Where the host's RSP was before a call of `leave::handle`, and is after it.
pub(crate) const HOST_RSP: usize = word(2);
/// Room for YMM0 to YMM15 while Rust code runs.
pub(crate) const VECTORS: usize = word(32);
/// Of [`crate::codegen::hoist`]: what the countdown is less than it was, and the anchors.
pub(crate) const OWED: usize = word(99);
pub(crate) const ANCHORS: usize = word(100);
pub(crate) const ANCHORS_LEN: usize = 6;
/// Turns of the first pass, in 32 bits.
pub(crate) const REST: usize = word(106);
/// What the countdown has been less than zero when the walk began, and what may still be added to it until the next poll.
pub(crate) const BEGAN: usize = word(107);
pub(crate) const CREDIT_LEFT: usize = word(108);
/// How often each loop goes back before it walks, in 32 bits: there are fewer of them than loops.
pub(crate) const RELUCTANCES: usize = word(109);
pub(crate) const RELUCTANCES_LEN: usize = 32;
/// What budgets vary by.
pub(crate) const RANDOM: usize = word(125);
const _: () =
    assert!(ANCHORS + 8 * ANCHORS_LEN <= REST && RELUCTANCES + 4 * RELUCTANCES_LEN <= RANDOM);
const _: () = assert!(RANDOM < word(EngineFrame::WORDS));
/// Their upper halves are among what is there.
pub(crate) const UPPERS_IN_USE: usize = word(98);

pub(crate) const FP_AREA: usize = offset_of!(CpuState, fp);
pub(crate) const RIP: usize = 8 * reg::RIP;

/// RFLAGS but for the arithmetic flags.
pub(crate) const RFLAGS: usize = offset_of!(CpuState, rflags);
/// Limit and base of the descriptor tables.
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
pub(crate) const CR4: usize = offset_of!(CpuState, cr4);
pub(crate) const PKRU: usize = offset_of!(CpuState, pkru);
pub(crate) const TSC_AUX: usize = offset_of!(CpuState, msr) + offset_of!(Msrs, tsc_aux);
pub(crate) const KERNEL_GS_BASE: usize =
    offset_of!(CpuState, msr) + offset_of!(Msrs, kernel_gs_base);

/// Selector of a segment register.
pub(crate) const fn selector(n: usize) -> Mem {
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, selector))
}

/// Attributes of one.
pub(crate) const fn segment_attr(n: usize) -> Mem {
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, attr))
}

/// A word close to the TLB's base: addressing it takes a byte in place of five.
const fn short(n: usize) -> Mem {
    at(TLB, mmu::l1::word(n))
}

/// Host pointers of groups: [`MAX_KEPT`] words, which live as long as a block is executed. The first are nearest.
pub(crate) const fn kept(slot: u8) -> Mem {
    let slot = slot as usize;
    short(if slot < FIRST_OTHER {
        slot
    } else {
        mmu::l1::SHORT_WORDS + slot - FIRST_OTHER
    })
}
/// Groups of a block whose pointers can be kept.
pub(crate) const MAX_KEPT: usize = 8;
/// The nearest words from this one on are for something else.
const FIRST_OTHER: usize = 4;

/// What generated code has close to the base while it runs, and Rust finds with the rest of the
/// vCPU's state: it is copied when the one calls the other.
pub(crate) const SHORT_PAGE: Mem = short(FIRST_OTHER);
pub(crate) const SHORT_FLAGS: Mem = short(5);
/// [`SALT`] and [`TARGETS`], which generated code does not change.
pub(crate) const SHORT_SALT: Mem = short(6);
const FIRST_GPR_SLOT: usize = 7;
pub(crate) const SHORT_TARGETS: Mem = short(12);
/// [`FP_LIVE`], which changes with that one: four bytes.
pub(crate) const SHORT_FP_LIVE: Mem = short(13);
/// [`NUMBER`], in the other four.
pub(crate) const SHORT_NUMBER: Mem = at(TLB, SHORT_FP_LIVE.disp + 4);

/// What is copied to close to the base, but not back; so is the number, after them.
pub(crate) const fn short_constants() -> [(Mem, Mem); 3] {
    [
        (gs(SALT), SHORT_SALT),
        (gs(TARGETS), SHORT_TARGETS),
        (gs(FP_LIVE), SHORT_FP_LIVE),
    ]
}

/// What it does change of that: the place with the rest of the state, and the one close to the base.
pub(crate) fn short_words() -> impl Iterator<Item = (Mem, Mem)> {
    let words = [(PAGE, SHORT_PAGE), (FLAGS, SHORT_FLAGS)];
    let gpr_slots = (0..16u8).filter(|n| IN_FRAME >> n & 1 != 0);
    let words = words.into_iter().map(|(far, near)| (gs(far), near));
    words.chain(gpr_slots.map(|n| (state_register(n), gpr_slot(n))))
}

/// Index in `EngineFrame::words` of a field above.
pub(crate) const fn index(offset: usize) -> usize {
    (offset - offset_of!(CpuState, engine)) / 8
}

/// A guest register with the rest of the vCPU's state.
pub(crate) const fn state_register(n: u8) -> Mem {
    gs(8 * n as usize)
}

/// Where generated code has a guest register that lives in memory.
pub(crate) const fn gpr_slot(n: u8) -> Mem {
    short(FIRST_GPR_SLOT + (IN_FRAME & ((1 << n) - 1)).count_ones() as usize)
}

/// Base of a segment.
pub(crate) const fn segment_base(n: usize) -> Mem {
    gs(offset_of!(CpuState, seg) + n * size_of::<Segment>() + offset_of!(Segment, base))
}

/// The host register of a guest register, if it has one.
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
