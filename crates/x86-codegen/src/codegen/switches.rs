//! MOV to CR3 in generated code: see [`crate::frame::switches`].

use mmu::{SwitchEpochs, compared};
use x86_defs::control::cr3;

use crate::{
    asm::*,
    frame::entries::{BITS, HASH, SHIFT},
    frame::switches,
    frame::words::*,
    ir::mode::Mode,
};

/// As [`SwitchEpochs::MAX_FLUSHING`].
const MAX_FLUSHING: i8 = SwitchEpochs::MAX_FLUSHING as i8;

/// Emits the barrier that a serialising instruction is (SDM vol. 3, 9.3): `lock or dword [rsp], 0`. Changes flags.
pub(super) fn serialize(a: &mut Asm) {
    a.bytes(&[0xf0, 0x83, 0x0c, 0x24, 0x00]);
}

/// Makes rax the address of the entry for `by` in the table whose address is in the word `table`, or of another if there is
/// none.
pub(super) fn find_entry(a: &mut Asm, by: Reg, table: usize) {
    a.imul(false, RAX, by, HASH.cast_signed());
    a.shift(false, 5, RAX, (u32::BITS - BITS) as u8);
    a.shift(false, 4, RAX, SHIFT);
    a.alu(true, Alu::Add, RAX, gs(table));
    a.alu(true, Alu::Cmp, by, at(RAX, 0));
    let found = a.jcc(cc::E);
    a.alu_imm(true, Alu::Add, RAX, 1 << SHIFT);
    let here = a.here();
    a.patch(found, here);
}

/// Emits a load of CR3 with r14 that goes on with the tables that the same load led to before, if nothing has changed
/// that the entry depends on. Otherwise jumps to `bail`, where the interpreter executes the instruction at the offset
/// r13d. `move_to_tables` emits what goes on with the tables at r14, and may change r13.
pub(super) fn change_root(a: &mut Asm, bail: usize, move_to_tables: fn(&mut Asm)) -> usize {
    let place = a.here();
    // Guests use a load of CR3 as a barrier.
    serialize(a);
    a.store(gs(WANTED_ROOT), S0);
    push(a, RAX);
    push(a, RCX);
    // As `Switch::by` has it.
    a.mov(RCX, S0);
    a.shift(true, 7, RCX, 63);
    a.alu_imm(true, Alu::Or, RCX, !(cr3::PCID as i32));
    a.alu_rr(true, Alu::And, RCX, S0);
    a.shift(true, 0, RCX, 1);
    find_entry(a, RCX, SWITCHES);
    let mut unknown = Vec::new();
    a.alu(true, Alu::Cmp, RCX, at(RAX, switches::BY));
    unknown.push(a.jcc(cc::NE));
    a.load32(RCX, at(TLB, mmu::l1::VIEW));
    a.alu(false, Alu::Cmp, RCX, at(RAX, switches::VIEW));
    unknown.push(a.jcc(cc::NE));
    // The mode is in the key's low bits.
    a.load32(RCX, gs(KEY));
    a.alu(false, Alu::Xor, RCX, at(RAX, switches::KEY));
    a.shift(false, 4, RCX, (u32::BITS - Mode::WIDTH) as u8);
    unknown.push(a.jcc(cc::NE));
    a.rr(true, &[0x85], S0, S0); // test
    let flushes = a.jcc(cc::NS);
    unknown.push(vouches(a, SwitchEpochs::KEEPING));
    a.rr(true, &[0x85], RCX, RCX); // test
    let is_promised = a.jcc(cc::NE);
    last_load(a);
    a.load(RCX, at(RCX, SwitchEpochs::LAST));
    a.alu_rr(true, Alu::Xor, RCX, S0);
    // Without bit 63.
    a.shift(true, 4, RCX, 1);
    unknown.push(a.jcc(cc::NE));
    let is_last = a.jmp();
    let here = a.here();
    a.patch(is_promised, here);
    a.alu_mem_imm8(false, Alu::Cmp, at(RCX, 0), 1);
    unknown.push(a.jcc(cc::NE));
    let kept = a.jmp();

    let here = a.here();
    a.patch(flushes, here);
    unknown.push(vouches(a, SwitchEpochs::FLUSHING));
    a.alu_mem_imm8(false, Alu::Cmp, at(RCX, compared::USES_LEFT), 0);
    unknown.push(a.jcc(cc::E));
    a.alu_mem_imm8(true, Alu::Cmp, gs(FLUSHING_LOADS), MAX_FLUSHING);
    unknown.push(a.jcc(cc::E));
    unknown.push(compare(a));
    a.alu_mem_imm8(false, Alu::Sub, at(RCX, compared::USES_LEFT), 1);
    note_flushing_load(a);
    let here = a.here();
    for from in [is_last, kept] {
        a.patch(from, here);
    }

    // Without bit 63.
    a.shift(true, 4, S0, 1);
    a.shift(true, 5, S0, 1);
    a.store(gs(CR3), S0);
    a.store_imm(gs(WANTED_ROOT), 0);
    a.load(S0, at(RAX, switches::TABLES));
    move_to_tables(a);
    a.load(S0, at(RAX, switches::KEY));
    a.store(gs(KEY), S0);
    become_key(
        a,
        S0,
        [switches::SALT, switches::NUMBER].map(|n| at(RAX, n)),
    );
    a.load32(S0, at(RAX, switches::ADDRESS_SPACE));
    a.store(gs(ADDRESS_SPACE), S0);
    become_views(a);
    pop(a, RCX);
    pop(a, RAX);
    a.ret();

    let here = a.here();
    unknown.into_iter().for_each(|from| a.patch(from, here));
    pop(a, RCX);
    pop(a, RAX);
    a.lea(RSP, at(RSP, 8));
    a.jmp_to(bail);
    place
}

/// Compares the number of the entry at rax with what vouches for its context. Returns the branch that is taken if that has changed. Otherwise
/// rcx is [`Switch::kept`](crate::frame::switches::Switch::kept).
fn vouches(a: &mut Asm, number: i32) -> usize {
    push(a, RDX);
    a.load(RDX, gs(SWITCH_EPOCHS));
    a.load32(RCX, at(RAX, switches::ADDRESS_SPACE));
    // The context is marked before it is known whether the entry is right: a mark too many does no harm.
    a.rm(false, &[0xc6], 0, at(RDX, SwitchEpochs::USED).plus(RCX, 0)); // mov
    a.bytes(&[1]);
    sum_epochs(a, RCX, RDX, number);
    a.alu(true, Alu::Cmp, RCX, at(RAX, switches::EPOCH));
    pop(a, RDX);
    let has_changed = a.jcc(cc::NE);
    a.load(RCX, at(RAX, switches::KEPT));
    has_changed
}

/// Makes `context`, which is a context's index, what vouches for loads that lead to it. `epochs` has the address of
/// [`mmu::SwitchEpochs`], and `number` is the offset of the number of all contexts.
pub(super) fn sum_epochs(a: &mut Asm, context: Reg, epochs: Reg, number: i32) {
    a.load(context, at(epochs, SwitchEpochs::CONTEXTS).plus(context, 3));
    a.alu(true, Alu::Add, context, at(epochs, number));
}

/// Makes rcx the address of [`mmu::SwitchEpochs`] plus eight times the PCID in r14.
fn last_load(a: &mut Asm) {
    a.mov32(RCX, S0);
    a.alu_imm(false, Alu::And, RCX, cr3::PCID as i32);
    a.shift(true, 4, RCX, 3);
    a.alu(true, Alu::Add, RCX, gs(SWITCH_EPOCHS));
}

/// Notes a load of CR3 with r14 that flushes. Changes rcx.
fn note_flushing_load(a: &mut Asm) {
    last_load(a);
    a.store(at(RCX, SwitchEpochs::LAST), S0);
    a.load(RCX, gs(FLUSHING_LOADS));
    a.shift(true, 4, RCX, 3);
    a.alu(true, Alu::Add, RCX, gs(SWITCH_EPOCHS));
    a.store(at(RCX, SwitchEpochs::FLUSHED), S0);
    a.alu_mem_imm8(true, Alu::Add, gs(FLUSHING_LOADS), 1);
}

/// Sets the views known of the address space that rax says. Changes r14.
fn become_views(a: &mut Asm) {
    for view in VIEWS {
        a.store_imm(gs(view), 0);
    }
    a.load32(S0, at(RAX, switches::ACCESS));
    a.rr(false, &[0x85], S0, S0); // test
    let unknown = a.jcc(cc::E);
    a.shift(true, 4, S0, switches::PLACE_SHIFT);
    a.alu_imm(true, Alu::Or, S0, mmu::l1::BASE as i32);
    a.store(gs(VIEWS[view_of(true, false)]), TLB);
    a.store(gs(VIEWS[view_of(true, true)]), S0);
    let here = a.here();
    a.patch(unknown, here);
}

/// Emits the comparison of the words of guest tables that rcx says ([`mmu::compared`]) with memory. Returns the jump that
/// is taken if one has changed.
fn compare(a: &mut Asm) -> usize {
    push(a, RDX);
    push(a, RSI);
    // What is left is the difference of the last word that was compared.
    a.alu_rr(false, Alu::Xor, RSI, RSI);
    a.load(RDX, at(RCX, compared::FIRST));
    let next = a.here();
    a.alu(true, Alu::Cmp, RDX, at(RCX, compared::END));
    let end = a.jcc(cc::E);
    a.load(RSI, at(RDX, compared::AT));
    a.load(RSI, at(RSI, 0));
    a.alu(true, Alu::Xor, RSI, at(RDX, compared::VALUE));
    a.alu(true, Alu::And, RSI, at(RDX, compared::MASK));
    let differs = a.jcc(cc::NE);
    a.alu_imm(true, Alu::Add, RDX, compared::SIZE.into());
    a.jmp_to(next);
    let here = a.here();
    a.patch(end, here);
    a.patch(differs, here);
    a.rr(true, &[0x85], RSI, RSI); // test
    pop(a, RSI);
    pop(a, RDX);
    a.jcc(cc::NE)
}

/// Loads the salt and the number of a key that generated code goes on with from two words of a table. Changes `by`.
pub(super) fn become_key(a: &mut Asm, by: Reg, [salt, number]: [Mem; 2]) {
    a.load(by, salt);
    a.store(gs(SALT), by);
    a.store(SHORT_SALT, by);
    a.load32(by, number);
    a.store(gs(NUMBER), by);
    a.store32(SHORT_NUMBER, by);
}
