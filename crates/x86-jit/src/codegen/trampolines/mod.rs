//! Trampolines: code that all blocks share, the ways in and out, and the calls into Rust.
//!
//! A guest's call is a call of the host's, so that the processor predicts where the guest's return goes. A block
//! pushes the guest's return address first. The return compares what it finds on the guest's stack with that; if they
//! differ, the return goes by the table of targets. What is on the host's stack is dropped when mapping or mode have
//! become others, or code was dropped; and at a poll if there is much of it, which bounds its depth.

mod branches;
mod calls;
mod exits;
mod misses;
mod registers;

use crate::{
    asm::*,
    codegen::countdown::exact::{self, Layout},
    codegen::fp_state::load_fp,
    codegen::string::{self, Strings},
    codegen::switches,
    codegen::view_changes::{change_access, change_cr0, change_key_rights, move_to_tables},
    frame::words::*,
    ir::streams::Streams,
};

/// Offsets of the shared pieces in the code buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trampolines {
    /// `extern "C" fn()`: loads the registers and jumps to [`ENTRY`].
    pub(crate) enter: usize,
    /// The interpreter executes the instruction whose offset in its page is r13d.
    pub(crate) bail: usize,
    /// The same, for instructions that have nothing to do with FP state.
    pub(crate) bail_integer: usize,
    /// The page's code has changed; r13d as above.
    pub(crate) stale: usize,
    /// The same of the other pages of the trace at r13d, or they are elsewhere.
    pub(crate) moved: usize,
    /// A block that counts is longer than it is to a counter's overflow; r13d as above.
    pub(crate) too_long: usize,
    /// Called when the budget is used up; r13d as above.
    pub(crate) poll: usize,
    /// A direct branch that is not linked yet; r13d is the site, flags are saved.
    pub(crate) link: usize,
    /// The same with flags in RFLAGS.
    pub(crate) link_live: usize,
    /// A branch to r14 that the target table does not have; r13d is `branch`.
    pub(crate) branch: usize,
    /// Called when an inline cache has not what r14 has the tag of: it has then, and the answer is "equal", if the table has it.
    /// r13 has the cache's number in its upper half, whose lower half is kept.
    pub(crate) fill_inline_cache: usize,
    /// The same for a jump, which goes by the table; r13d is `branch`.
    pub(crate) inline_cache: usize,
    /// A return to r14 by the table; r13d is `branch`.
    pub(crate) ret: usize,
    /// The same of 32-bit code.
    pub(crate) ret32: usize,
    /// A direct branch to another page by the table: r14 is the target relative
    /// to the page, r13d the number of the [`crate::codegen::CrossPageSite`], flags are saved.
    pub(crate) cross_page: usize,
    /// The same for a call.
    pub(crate) cross_page_call: usize,
    /// The same for one of 32-bit code.
    pub(crate) cross_page_call32: usize,
    /// [`Self::ret32`] for a stack that is addressed by SP.
    pub(crate) ret16: usize,
    /// A direct call of another page in code with segments.
    pub(crate) cross_page_segmented: usize,
    /// Called for what changes the view: r13d is its bit (`SET_AC` and so on), and the offset. Does not
    /// return if the result is 0.
    pub(crate) switch: usize,
    /// The same for what changes no view, whose result it returns in r14. Changes flags.
    pub(crate) call: usize,
    /// Called by CLAC, and by STAC, as [`Self::switch`].
    pub(crate) access: [usize; 2],
    /// Called by MOV to CR0 and CLTS, as [`Self::switch`]; r14 is the value.
    pub(crate) to_cr0: usize,
    /// Called by WRPKRU, as [`Self::switch`]; r14 is the value.
    pub(crate) key_rights: usize,
    /// Called by MOV to CR3: r14 is the value, r13d the offset. Returns if the tables that it leads to
    /// are known.
    pub(crate) root: usize,
    /// Called after a TLB miss; r14 is the gva, r13d is `site`. Returns the host address in r14, and
    /// "above" in the flags; or something else, for [`Self::refused`].
    pub(crate) miss: usize,
    /// The same for a group of accesses. If it returns "below" each has to be made for itself.
    pub(crate) miss_group: usize,
    /// The same for a group whose first access is none that may be refilled.
    pub(crate) split: usize,
    /// The interpreter makes the access, with the flags and r13d as they come from a miss. (A call that is
    /// not returned from would have the processor predict all the next returns wrongly.)
    pub(crate) refused: usize,
    /// The same three when the stack's entry is another page's.
    pub(crate) stack: usize,
    pub(crate) stack_group: usize,
    pub(crate) stack_split: usize,
    /// The same three when a per-site entry has another page.
    pub(crate) site_entry: usize,
    pub(crate) site_entry_group: usize,
    pub(crate) site_entry_split: usize,
    /// Called by a block that uses FP when the state is not loaded.
    pub(crate) load_fp: usize,
    /// Called for string instructions.
    pub(crate) strings: Strings,
    /// Of code that counts: goes on with such code, and with other code, at [`COUNTED_ENTRY`].
    go_on_counting: usize,
    go_on_plainly: usize,
    /// Where a return to address 0 goes that finds no call.
    last_frame: usize,
}

/// Those of all kinds of code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllTrampolines {
    pub(crate) plain: Trampolines,
    /// For code that counts what is retired, and one stream besides, or several.
    counting: [Trampolines; 2],
}

impl AllTrampolines {
    /// Emits them from the start of the buffer on, as [`emit`] has it, and hands each kind's place and code to `write`.
    pub(crate) fn emit(
        isa: Isa,
        serve: u64,
        handle: u64,
        mut write: impl FnMut(usize, &[u8]),
    ) -> Self {
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
        let counting = [Layout::One, Layout::Several].map(|l| next(Some((&plain, l))));
        Self { plain, counting }
    }
    /// Of code that counts these streams, or does not count.
    pub(crate) const fn of(&self, streams: Option<Streams>) -> &Trampolines {
        match streams {
            None => &self.plain,
            Some(streams) => &self.counting[streams.are_several() as usize],
        }
    }
    /// Goes on with code that counts these streams, or does not count, at [`COUNTED_ENTRY`].
    pub(crate) const fn go_on(&self, streams: Option<Streams>) -> usize {
        match streams {
            None => self.counting[0].go_on_plainly,
            Some(_) => self.of(streams).go_on_counting,
        }
    }
}

/// What emits them.
struct Emitter<'a> {
    a: &'a mut Asm,
    t: Trampolines,
    /// Addresses of the Rust functions behind [`Trampolines::miss`], and behind the trampolines that have a
    /// [`crate::frame::exit::Reason`].
    serve: u64,
    handle: u64,
    /// For code that counts what is retired.
    counts: Option<Layout>,
    /// Leaves translated code.
    exit: usize,
    /// The same, with registers in memory.
    exit_stored: usize,
    /// Calls `handle`: registers are in memory.
    call_handle: usize,
    /// A direct branch to another page that the table does not have.
    missed: usize,
}

/// Emits all trampolines at the start of the buffer. `serve` and `handle` are the addresses of the Rust functions
/// behind [`Trampolines::miss`] and the trampolines that have a [`crate::frame::exit::Reason`]. `plain`: these
/// are for code that counts what is retired, and lie behind those of other code.
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
    /// The view's changes that are known.
    fn view_changes(&mut self) {
        self.t.access = [false, true].map(|set| change_access(self.a, set, self.t.switch));
        self.t.to_cr0 = change_cr0(self.a, self.t.switch, self.counts.is_some());
        self.t.key_rights = change_key_rights(self.a, self.t.switch);
    }

    /// FP state, for a block that uses it.
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

    /// Loads of CR3 to a root that is known.
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
