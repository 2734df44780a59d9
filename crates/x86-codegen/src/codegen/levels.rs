//! SYSCALL and SYSRETQ in generated code: see [`crate::frame::levels`].

use mmu::SwitchEpochs;
use x86_defs::{reg, rflags, segment::Attr};

use crate::{
    asm::*,
    codegen::countdown::exact::{self, Layout},
    codegen::switches::{become_key, find_entry, sum_epochs},
    codegen::system::load_flags,
    codegen::view_changes::move_to_tables,
    frame::levels,
    frame::state::SYSRET_FLAGS,
    frame::words::*,
    ir::mode::Mode,
};

/// Emits SYSCALL and SYSRETQ, which go on with the view that the same change of the level led to before. Other cases go to
/// `otherwise`, and nothing has changed then. A trampoline is called with the instruction's offset in r13d, the guest's RCX
/// in its place in memory and in rcx, and returns with the target in r14. `counts`: for code that counts.
pub(super) fn change_level(a: &mut Asm, otherwise: usize, counts: Option<Layout>) -> [usize; 2] {
    if counts.is_some_and(Layout::is_bounded) {
        return [otherwise; 2];
    }
    let call = system_call(a, otherwise, counts);
    [call, system_return(a, otherwise, counts)]
}

/// Makes rax the entry of the live view. Changes rdx and r14.
fn find_change(a: &mut Asm) -> Vec<usize> {
    let mut unknown = Vec::new();
    let mut differs = |a: &mut Asm, wide: bool, entry: i32| {
        a.alu(wide, Alu::Cmp, RDX, at(RAX, entry));
        unknown.push(a.jcc(cc::NE));
    };
    a.mov(RDX, TLB);
    a.alu(true, Alu::Add, RDX, gs(ADDRESS_SPACE));
    find_entry(a, RDX, LEVELS);
    differs(a, true, levels::FROM);
    a.load(RDX, gs(KEY));
    differs(a, true, levels::FROM_KEY);
    a.load(S0, gs(SWITCH_EPOCHS));
    a.load32(RDX, gs(ADDRESS_SPACE));
    sum_epochs(a, RDX, S0, SwitchEpochs::FLUSHING);
    differs(a, true, levels::EPOCH);
    a.load32(RDX, gs(CR0));
    differs(a, false, levels::CR0);
    a.load32(RDX, gs(PKRU));
    differs(a, false, levels::PKRU);
    a.load32(RDX, gs(LEVEL_FACTS));
    differs(a, false, levels::FACTS);
    unknown
}

/// Stores RFLAGS, which are in rdx. Changes rdx and `by`.
fn store_flags(a: &mut Asm, by: Reg) {
    a.alu_imm(false, Alu::Or, RDX, rflags::FIXED1 as i32);
    a.store(gs(RFLAGS), RDX);
    a.mov32(by, RDX);
    a.alu_imm(false, Alu::And, by, 0xd5);
    a.alu_imm(false, Alu::Or, by, 2);
    a.shift(false, 4, by, 8);
    a.shift(false, 5, RDX, 11);
    a.alu_imm(false, Alu::And, RDX, 1);
    a.alu_rr(false, Alu::Or, RDX, by);
    a.store32(SHORT_FLAGS, RDX);
}

/// Loads the flat segment with the selector in rdx. Changes `by`.
fn load_segment(a: &mut Asm, n: usize, attr: u32, by: Reg) {
    a.store16(selector(n), RDX);
    a.store_imm(segment_base(n), 0);
    a.mov_imm(by, u64::from(attr) << 32 | u64::from(u32::MAX));
    a.store(segment_limit(n), by);
}

/// The way of code that does not count to code that counts: the branch to it, the privilege level, and where it leads.
struct ToCounting {
    from: usize,
    cpl: u8,
    back: usize,
}

/// Goes on with the view and the key of the entry in rax, at this CPL. Changes rdx, r13, r14 and flags. Returns the way to
/// code that counts, if this code does not.
fn go_on(a: &mut Asm, cpl: u8, counts: Option<Layout>) -> Option<ToCounting> {
    a.rm(false, &[0xc6], 0, gs(CPL)); // mov
    a.bytes(&[cpl]);
    a.load(S0, at(RAX, levels::TABLES));
    move_to_tables(a, IS_OTHER_VIEW);
    a.load(S0, at(RAX, levels::KEY));
    a.store(gs(KEY), S0);
    become_key(a, S0, [levels::SALT, levels::NUMBER].map(|n| at(RAX, n)));
    if counts == Some(Layout::One) {
        exact::settle(a, usize::from(cpl == 0));
    }
    a.rm(false, &[0xf7], 0, at(RAX, levels::KEY)); // test
    a.imm32(Mode::COUNTS.number() as i32);
    let from = a.jcc(cc::NE);
    let Some(layout) = counts else {
        let back = a.here();
        return Some(ToCounting { from, cpl, back });
    };
    hide_targets(a);
    change_kind(a, GOES_ON_PLAINLY);
    exact::keep_plainly(a, layout);
    let here = a.here();
    a.patch(from, here);
    None
}

/// Makes the next branch find no target in the target table. It goes by the trampoline for those that have none, which
/// changes to code of the other kind: see `Jit::follow_level` of x86-jit. Changes r14.
fn hide_targets(a: &mut Asm) {
    a.load(S0, gs(SALT));
    a.store(gs(COUNTED_SALT), S0);
    a.load(S0, gs(NO_SALT));
    a.store(gs(SALT), S0);
    a.store(SHORT_SALT, S0);
}

/// Tells that trampoline how code of the other kind goes on. Changes r14.
fn change_kind(a: &mut Asm, go_on: usize) {
    a.load(S0, gs(go_on));
    a.store(gs(COUNTED_GO_ON), S0);
}

impl ToCounting {
    /// Emits the way. If a counter may overflow soon, the next branch leads to Rust.
    fn emit(self, a: &mut Asm) {
        let here = a.here();
        a.patch(self.from, here);
        hide_targets(a);
        let is_near = exact::branch_if_near(a);
        a.patch(is_near, self.back);
        exact::note_streams(a, self.cpl);
        let [several, wide] = exact::branch_by_layout(a);
        let ways = [
            (None, Layout::One),
            (Some(several), Layout::Several),
            (Some(wide), Layout::Wide),
        ];
        for ((from, layout), go_on) in ways.into_iter().zip(GOES_ON_COUNTING) {
            if let Some(from) = from {
                let here = a.here();
                a.patch(from, here);
            }
            change_kind(a, go_on);
            exact::begin_at(a, layout);
            a.jmp_to(self.back);
        }
    }
}

/// Ends a trampoline whose branches `unknown` are taken if Rust has to execute the instruction.
fn end(a: &mut Asm, unknown: Vec<usize>, otherwise: usize, to_counting: Option<ToCounting>) {
    pop(a, RDX);
    pop(a, RAX);
    a.ret();
    if let Some(way) = to_counting {
        way.emit(a);
    }
    let here = a.here();
    unknown.into_iter().for_each(|from| a.patch(from, here));
    pop(a, RDX);
    pop(a, RAX);
    a.jmp_to(otherwise);
}

fn system_call(a: &mut Asm, otherwise: usize, counts: Option<Layout>) -> usize {
    const REFUSED: u64 = rflags::NT | rflags::TF | rflags::AC;
    let place = a.here();
    push(a, RAX);
    push(a, RDX);
    let mut unknown = find_change(a);
    // All of RFLAGS in r14, and in rdx what is left of them.
    load_flags(a, RDX);
    a.load32(RDX, gs(FMASK));
    a.rr(false, &[0xf7], 2, RDX); // not
    a.alu_rr(false, Alu::And, RDX, S0);
    a.rr(false, &[0xf7], 0, RDX); // test
    a.imm32(REFUSED as i32);
    unknown.push(a.jcc(cc::NE));
    a.store(gpr_slot(reg::R11 as u8), S0);
    store_flags(a, RCX);
    a.alu_imm(false, Alu::And, S1, 0xfff);
    a.load(RCX, SHORT_PAGE);
    a.lea(RCX, at(RCX, 2).plus(S1, 0));
    a.store(state_register(reg::RCX as u8), RCX);
    a.rm(false, &[0x0f, 0xb7], RDX, gs(STAR + 4)); // movzx
    a.alu_imm(false, Alu::And, RDX, !3);
    load_segment(a, reg::CS, Attr::FLAT_CODE64, S0);
    a.alu_imm(false, Alu::Add, RDX, 8);
    load_segment(a, reg::SS, Attr::FLAT_DATA, S0);
    let to_counting = go_on(a, 0, counts);
    a.load(S0, gs(LSTAR));
    end(a, unknown, otherwise, to_counting);
    place
}

fn system_return(a: &mut Asm, otherwise: usize, counts: Option<Layout>) -> usize {
    const USER: u32 = 3 << 5;
    let place = a.here();
    push(a, RAX);
    push(a, RDX);
    let mut unknown = find_change(a);
    a.load(S0, gpr_slot(reg::R11 as u8));
    a.rr(true, &[0xf7], 0, S0); // test
    a.imm32(!(SYSRET_FLAGS as i32));
    unknown.push(a.jcc(cc::NE));
    a.mov(RDX, RCX);
    a.shift(true, 5, RDX, 47);
    unknown.push(a.jcc(cc::NE));
    // An interrupt that waits is taken before the user's next instruction.
    a.rr(false, &[0xf7], 0, S0); // test
    a.imm32(rflags::IF as i32);
    let masked = a.jcc(cc::E);
    a.load(RDX, gs(REQUESTS));
    a.alu_mem_imm8(false, Alu::Cmp, at(RDX, 0), 0);
    unknown.push(a.jcc(cc::NE));
    a.alu_mem_imm8(true, Alu::Cmp, gs(IRQ_WAITING), 0);
    unknown.push(a.jcc(cc::NE));
    let here = a.here();
    a.patch(masked, here);
    a.mov32(RDX, S0);
    store_flags(a, S0);
    a.rm(false, &[0x0f, 0xb7], RDX, gs(STAR + 6)); // movzx
    a.alu_imm(false, Alu::Add, RDX, 8);
    a.alu_imm(false, Alu::Or, RDX, 3);
    load_segment(a, reg::SS, Attr::FLAT_DATA | USER, S0);
    a.alu_imm(false, Alu::Add, RDX, 8);
    load_segment(a, reg::CS, Attr::FLAT_CODE64 | USER, S0);
    let to_counting = go_on(a, 3, counts);
    a.mov(S0, RCX);
    end(a, unknown, otherwise, to_counting);
    place
}
