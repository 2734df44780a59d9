//! Trampolines: code that all blocks share. They enter and leave translated code, and call Rust.
//!
//! A guest's call is a call of the host's, so that the processor predicts where the guest's return goes. The block
//! pushes the guest's return address on the host's stack first. The return compares the address on the guest's stack
//! with that one; if they differ, it goes through the target table. The host's stack is dropped when mapping or mode
//! change, or when code is dropped; and at a poll if it is deep, which bounds it.

mod branches;
mod calls;
mod exits;
mod misses;
mod registers;
mod state_images;

use crate::{
    asm::*,
    codegen::countdown::exact::{self, Layout},
    codegen::fp_state::load_fp,
    codegen::levels::change_level,
    codegen::string::{self, Strings},
    codegen::switches,
    codegen::view_changes::{change_access, change_cr0, change_key_rights, move_to_tables},
    frame::words::*,
    ir::streams::Streams,
};

/// Offsets of the trampolines in the code buffer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trampolines {
    /// `extern "C" fn()`: loads the registers and jumps to [`ENTRY`].
    pub enter: usize,
    /// Has the interpreter execute the instruction whose offset in its page is r13d.
    pub(crate) bail: usize,
    /// Does the same for an instruction that has nothing to do with FP state.
    pub(crate) bail_integer: usize,
    /// Handles code of the page that has changed; r13d is the offset of the instruction to go on with.
    pub stale: usize,
    /// Handles other pages of a trace that have changed or moved; r13d is the offset of the trace.
    pub(crate) moved: usize,
    /// Handles a block that counts and is longer than it is to a counter's overflow; r13d is the block's offset.
    pub(crate) too_long: usize,
    /// Polls; called when the countdown is used up. r13d is the block's offset.
    pub(crate) poll: usize,
    /// Handles a direct branch that is not linked yet; r13d is the site's number, flags are saved.
    pub(crate) link: usize,
    /// Does the same with flags in RFLAGS.
    pub(crate) link_live: usize,
    /// Handles a branch whose target the target table does not have. r14 is the target's tag, r13d is `branch`.
    pub(crate) branch: usize,
    /// Called when an inline cache does not have the target whose tag is in r14. If the target table has it, the cache
    /// has it then, and the flags say "equal". The upper half of r13 is the cache's number; the lower half is kept.
    pub(crate) fill_inline_cache: usize,
    /// Handles the same miss for a jump, which then goes on by the table; r13d is `branch`.
    pub(crate) inline_cache: usize,
    /// Returns to r14 through the target table; r13d is `branch`.
    pub(crate) ret: usize,
    /// Does the same for 32-bit code.
    pub(crate) ret32: usize,
    /// Handles a direct branch to another page, by the target table. r14 is the target relative to the page, r13d the
    /// number of the [`crate::codegen::CrossPageSite`]; flags are saved.
    pub(crate) cross_page: usize,
    /// Does the same for a call of 64-bit code.
    pub(crate) cross_page_call: usize,
    /// Does the same for a call of 32-bit code.
    pub(crate) cross_page_call32: usize,
    /// Does what [`Self::ret32`] does, for a stack that is addressed by SP.
    pub(crate) ret16: usize,
    /// Handles a direct call of another page in code with segments.
    pub(crate) cross_page_segmented: usize,
    /// Called for an instruction that changes the view. r13d is its bit (`SET_AC` and so on), and its offset. Does not
    /// return if the answer is 0.
    pub(crate) switch: usize,
    /// Called for an instruction that changes no view, with the same r13d. Returns the answer in r14. Changes flags.
    pub(crate) call: usize,
    /// Called by CLAC and by STAC, like [`Self::switch`].
    pub(crate) access: [usize; 2],
    /// Called by MOV to CR0 and by CLTS, like [`Self::switch`]; r14 is the value.
    pub(crate) to_cr0: usize,
    /// Called by WRPKRU, like [`Self::switch`]; r14 is the value.
    pub(crate) key_rights: usize,
    /// Called by SYSCALL and by SYSRETQ, like [`Self::switch`]; the guest's RCX is in its place in memory, too, and the
    /// answer is the target.
    pub(crate) levels: [usize; 2],
    /// Called by MOV to CR3. r14 is the value, r13d the offset. Does not return if the tables of that root are not
    /// known.
    pub(crate) root: usize,
    /// Called after a TLB miss. r14 is the gva, r13d is `site`. Returns the host address in r14, and "above" in the
    /// flags. Other flags mean that the access is for [`Self::refused`]; with "overflow" among them, r14 is the address
    /// of a copy, which the access may be made to before [`Self::write_back`].
    pub(crate) miss: usize,
    /// Does the same for a group of accesses. If the flags say "below", each access has to probe for itself.
    pub(crate) miss_group: usize,
    /// Does the same for a group that must not be refilled, as its first access reads while others write.
    pub(crate) split: usize,
    /// Has the interpreter make the access, with flags and r13d as they come from a miss. It is jumped to after the
    /// return: without the return, the processor would mispredict all the returns that come next.
    pub(crate) refused: usize,
    /// Called after an instruction was executed on what [`Self::miss`] has copied from two pages: writes it back.
    pub(crate) write_back: usize,
    /// The same three trampolines for the stack's entry, if that has another page.
    pub(crate) stack: usize,
    pub(crate) stack_group: usize,
    pub(crate) stack_split: usize,
    /// The same three trampolines for a per-site entry that has another page.
    pub(crate) site_entry: usize,
    pub(crate) site_entry_group: usize,
    pub(crate) site_entry_split: usize,
    /// Called by a block that uses FP when FP state is not loaded.
    pub(crate) load_fp: usize,
    /// Called by the XSAVE family and FXSAVE. r14 is the operand's gva, r13d a [`crate::frame::requests::image`]. The answer in r14 is 0 if the
    /// interpreter has to execute the instruction.
    pub(crate) save_image: usize,
    /// Does the same for XRSTOR and FXRSTOR, after which FP state is not in the host's registers.
    pub(crate) restore_image: usize,
    /// Called for string instructions.
    pub(crate) strings: Strings,
    /// Goes on at [`COUNTED_ENTRY`] with code that counts, and below, with code that does not. Only code that counts
    /// has these two.
    go_on_counting: usize,
    go_on_plainly: usize,
    /// Where a return to address 0 goes when the host's stack has no call left.
    last_frame: usize,
}

/// The trampolines of all kinds of code.
#[derive(Clone, Copy, Debug)]
pub struct AllTrampolines {
    /// For code that counts nothing.
    pub plain: Trampolines,
    /// For code that counts what is retired, by its layout.
    counting: [Trampolines; Layout::ALL.len()],
}

impl AllTrampolines {
    /// Emits the trampolines at the start of the buffer, as [`emit`] does for each kind, and passes each kind's offset
    /// and code to `write`.
    pub fn emit(isa: Isa, serve: u64, handle: u64, mut write: impl FnMut(usize, &[u8])) -> Self {
        let mut a = Asm::new(isa);
        let mut next = |plain: Option<(&Trampolines, Layout)>| {
            let begin = a.here();
            a.start(begin);
            let t = emit(&mut a, serve, handle, plain);
            match a.parts() {
                Some((code, _)) => write(begin, code),
                None => unreachable!("they are shorter than blocks may be"),
            }
            t
        };
        let plain = next(None);
        let counting = Layout::ALL.map(|layout| next(Some((&plain, layout))));
        Self { plain, counting }
    }
    /// Returns the trampolines of code that counts these streams, or of code that does not count.
    pub const fn of(&self, streams: Option<Streams>) -> &Trampolines {
        match streams {
            None => &self.plain,
            Some(streams) => &self.counting[Layout::of(streams) as usize],
        }
    }
    /// Returns the trampoline that goes on at [`COUNTED_ENTRY`] with code that counts these streams, or does not count.
    pub const fn go_on(&self, streams: Option<Streams>) -> usize {
        match streams {
            None => self.counting[0].go_on_plainly,
            Some(_) => self.of(streams).go_on_counting,
        }
    }
}

/// Emits the trampolines of one kind of code.
struct Emitter<'a> {
    a: &'a mut Asm,
    t: Trampolines,
    /// Addresses of the Rust functions behind [`Trampolines::miss`], and behind the trampolines that have a
    /// [`crate::frame::exit::Reason`].
    serve: u64,
    handle: u64,
    /// How sums are laid out, in code that counts what is retired.
    counts: Option<Layout>,
    /// Offset of the code that leaves translated code.
    exit: usize,
    /// Offset of the same, where registers are in memory already.
    exit_stored: usize,
    /// Offset of the code that calls `handle`; registers are in memory.
    call_handle: usize,
    /// Offset of the code for a direct branch to another page that the target table does not have.
    missed: usize,
}

/// Emits all trampolines of one kind of code, behind those that are there. `serve` and `handle` are the addresses of
/// the Rust functions behind [`Trampolines::miss`] and behind the trampolines that have a
/// [`crate::frame::exit::Reason`]. `plain` is given for code that counts what is retired: the trampolines of plain
/// code, and how sums are laid out.
fn emit(
    a: &mut Asm,
    serve: u64,
    handle: u64,
    plain: Option<(&Trampolines, Layout)>,
) -> Trampolines {
    let enter = a.here();
    let mut e = Emitter {
        a,
        t: Trampolines {
            enter,
            ..Trampolines::default()
        },
        serve,
        handle,
        counts: plain.map(|(_, layout)| layout),
        exit: 0,
        exit_stored: 0,
        call_handle: 0,
        missed: 0,
    };
    let last = e.enter();
    e.leave();
    e.call_handle();
    e.bails();
    e.last_frame(last);
    e.table_misses();
    e.inline_caches();
    e.returns();
    e.cross_page();
    e.poll();
    e.links();
    e.switch();
    e.call();
    e.view_changes();
    let within = e.misses();
    e.refused();
    e.other_misses();
    e.load_fp();
    e.state_images(within);
    e.t.strings = string::emit(e.a, e.t.bail_integer, within, e.counts);
    e.root();
    if let Some((plain, _)) = plain {
        e.t.go_on_counting = exact::go_on(e.a, e.t.last_frame);
        e.t.go_on_plainly = exact::go_on(e.a, plain.last_frame);
    }
    e.returns16();
    e.cross_page_segmented();
    e.t
}

impl Emitter<'_> {
    /// Emits the changes of the view that generated code makes by itself, if it knows the other view.
    fn view_changes(&mut self) {
        self.t.access = [false, true].map(|set| change_access(self.a, set, self.t.switch));
        self.t.to_cr0 = change_cr0(self.a, self.t.switch, self.counts.is_some());
        self.t.key_rights = change_key_rights(self.a, self.t.switch);
        self.t.levels = change_level(self.a, self.t.switch, self.counts);
    }

    /// Emits the load of FP state for a block that uses it.
    fn load_fp(&mut self) {
        let a = &mut *self.a;
        self.t.load_fp = a.here();
        push(a, RAX);
        push(a, RDX);
        load_fp(a);
        pop(a, RDX);
        pop(a, RAX);
        a.ret();
    }

    /// Emits the load of CR3 with a root that is known.
    fn root(&mut self) {
        let a = &mut *self.a;
        let mut bail = self.t.bail_integer;
        if let Some(layout) = self.counts {
            bail = a.here();
            exact::refund_noted(a, layout);
            a.jmp_to(self.t.bail_integer);
        }
        self.t.root = switches::change_root(a, bail, |a| move_to_tables(a, IS_OTHER_ROOT));
    }
}
