//! [`EngineFrame`]: the words that translated code and its engine both read and write, beside the state of a vCPU.
//!
//! Translated code addresses the frame by offsets from one base register, so its layout is fixed, and each
//! offset is asserted. The fields are of two kinds:
//!
//! - **Values** are public. A wrong value makes the guest's execution wrong, and nothing else.
//! - **Pointers**, to data that translated code reads and writes or to code that it goes on at, are private. Each is
//!   set by an `unsafe fn`, whose caller promises what the pointer addresses, and for how long.
//!
//! A frame is not part of the architectural state: all frames are equal, and a copy of a vCPU's state has an empty one.

use core::mem::offset_of;

/// The words of translated code, of 64 bits each.
#[repr(C, align(64))]
#[derive(Default)]
pub struct EngineFrame {
    tables: u64,
    /// How many more direct branches to other pages go through the target table before one of them is remembered.
    pub cross_page_left: u64,
    host_rsp: u64,
    devices: u64,
    targets: u64,
    /// The target key, which stands for a mapping and a mode.
    pub key: u64,
    /// The number by which the key's targets are XORed in the target table.
    pub salt: u64,
    /// The gva of the page that is executed.
    pub page: u64,
    /// Arithmetic flags, while they are not in RFLAGS.
    pub flags: u64,
    /// Two words that trampolines pass on.
    pub spill: [u64; 2],
    entry: u64,
    requests: u64,
    /// Polls that are left until the time is looked at, or the run loop is returned to.
    pub polls_left: u64,
    /// The reason why translated code has called Rust or was left.
    pub reason: u64,
    /// An argument of the reason.
    pub argument: u64,
    /// Not 0 if FP state is in the host's registers.
    pub fp_live: u64,
    context: u64,
    /// The host's default MXCSR, for LDMXCSR.
    pub host_mxcsr: u64,
    /// Not 0 if an interrupt waits for RFLAGS.IF.
    pub irq_waiting: u64,
    /// Guest TSC less host TSC.
    pub tsc_offset: u64,
    /// What the last call of Rust took, in instructions.
    pub cost: u64,
    /// Instructions until the first poll after translated code is entered.
    pub count: u64,
    log: u64,
    slot: u64,
    /// The number of the key, in 32 bits.
    pub number: u64,
    views_writing_through: [u64; 2],
    /// Not 0 if translated code has changed to another view by itself, and the MMU does not know.
    pub is_other_view: u64,
    /// The host's TSC at which the run loop has to be returned to at the latest. If 0, it is returned to when
    /// [`Self::polls_left`] is used up.
    pub until: u64,
    /// PAUSE instructions that have been executed.
    pub pauses: u64,
    stack: u64,
    vectors: [[u64; 4]; 16],
    stop: u64,
    /// Not 0 if per-site entries have missed often.
    pub site_entries_missed: u64,
    uppers_in_use: u64,
    owed: u64,
    anchors: [u64; EngineFrame::ANCHORS],
    rest: u64,
    began: u64,
    /// What may still be added to the countdown until the next poll.
    pub credit_left: u64,
    reluctances: [u32; EngineFrame::RELUCTANCES],
    random: u64,
    views_protected: [u64; 2],
    key_views: [KeyView; EngineFrame::KEY_VIEWS],
    key_views_used: u64,
    switches: u64,
    switch_epochs: u64,
    /// The CR3 that an instruction loads which is left to the interpreter; or 0.
    pub wanted_root: u64,
    /// Not 0 if translated code has loaded CR3 by itself, and the MMU does not know.
    pub is_other_root: u64,
    /// The countdown of code that counts, as it was set last. If 0, such code does not run.
    pub counted_from: u64,
    /// That countdown now, while Rust runs.
    pub counted_to: u64,
    /// Instructions that polls have taken off that countdown.
    pub counted: u64,
    /// Facts other than registers that a change of the privilege level by translated code depends on.
    pub level_facts: u64,
    refund: u64,
    counted_entry: u64,
    /// What code that counts counts: the number of its streams, and in bit 8 the level.
    pub counted_as: u64,
    /// For each segment, the highest offset at which there are 1, 2, 4 … 32 bytes.
    pub bounds: [[u32; EngineFrame::BOUND_SIZES]; 6],
    /// The six limits that [`Self::bounds`] were computed from.
    pub bounds_of: [u32; 6],
    counted_go_on: u64,
    /// The salt of the branch's target when a change of level leads from code that counts to code that does not, or
    /// back.
    pub counted_salt: u64,
    keys: u64,
    /// In code that counts several streams, the sums that are not in the countdown, 16 bits each.
    pub counted_beside: [u64; 2],
    refund_beside: [u64; 2],
    counted_spill: u64,
    /// Events that polls have taken off the countdown, by sum.
    pub counted_events: [u64; EngineFrame::COUNTED_SUMS],
    /// For each of these sums, after how many events a counter may overflow.
    pub counted_left: [i64; EngineFrame::COUNTED_SUMS],
    /// What [`Self::counted_beside`] began at.
    pub counted_beside_from: [u64; 2],
    /// The host's TSC at which a counter of cycles overflows, or [`Self::NEVER`].
    pub overflow_at: u64,
    /// The host's TSC when it was looked at last.
    pub looked: u64,
    elapsed: u64,
    /// The rate by which that overflow is approached. If 0, it is not known yet.
    pub pace: u64,
    /// How many instructions may be executed from the last look at the time to the next one, where such an overflow is
    /// near.
    pub window: u64,
    /// Number of loads of CR3 behind [`Self::is_other_root`] that have flushed.
    pub flushing_loads: u64,
    gathered: [[u64; 4]; 3],
    bounced: [u64; 4],
    mixed: u64,
    levels: u64,
    /// The countdown of code that does not count, while Rust runs that such code has called.
    pub left_to_poll: u64,
    /// The salt that no key has.
    pub no_salt: u64,
    goes_on: [u64; 4],
    /// Not 0 if what code that counts has counted is still in [`Self::counted`] and [`Self::counted_events`], and code runs
    /// that does not count.
    pub counted_pending: u64,
    /// The number of the address space, whose tables others may share.
    pub address_space: u64,
}

/// A view that differs from another in PKRU alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyView {
    from: u64,
    /// The PKRU that translated code changes to.
    pkru: u64,
    tables: u64,
    key: u64,
    salt: u64,
    number: u64,
}

/// Defines offset and setter of private fields, which are addresses that translated code follows.
macro_rules! pointers {
    ($($(#[$doc:meta])* $field:ident, $offset:ident, $set:ident;)*) => {
        impl EngineFrame {
            $(
                $(#[$doc])*
                pub const $offset: usize = offset_of!(Self, $field);

                $(#[$doc])*
                ///
                /// # Safety
                /// `address` is what is said above, or 0 where that is said, whenever translated code runs.
                pub unsafe fn $set(&mut self, address: u64) {
                    self.$field = address;
                }
            )*
        }
    };
}

pointers! {
    /// Base of the live view's software TLB.
    tables, TABLES, set_tables;
    /// Address of the MMU's two device pages that were accessed last.
    devices, DEVICES, set_devices;
    /// Address of the target table.
    targets, TARGETS, set_targets;
    /// Address of code in the vCPU's own buffer: where to go on once the registers are loaded.
    entry, ENTRY, set_entry;
    /// Address of the request word, 32 bits.
    requests, REQUESTS, set_requests;
    /// Address of the context that the functions work on that translated code calls.
    context, CONTEXT, set_context;
    /// Address of the log of writes in lock-step; or 0.
    log, LOG, set_log;
    /// Address of the byte that is not 0 when the run loop has to be returned to at once. It is looked at where
    /// [`EngineFrame::until`] is not 0.
    stop, STOP, set_stop;
    /// Address of the table of roots that translated code loads to CR3 by itself.
    switches, SWITCHES, set_switches;
    /// Address of the numbers that vouch for those roots.
    switch_epochs, SWITCH_EPOCHS, set_switch_epochs;
    /// Address of the table of target keys that translated code changes to by itself.
    keys, KEYS, set_keys;
    /// Address of code in the vCPU's own buffer that counts: where to go on once the countdown is loaded.
    counted_entry, COUNTED_ENTRY, set_counted_entry;
    /// Address of the trampoline by which code that does not count goes on with code that counts, or the other way
    /// round; or 0.
    counted_go_on, COUNTED_GO_ON, set_counted_go_on;
    /// Address of the MMU's mixed pages.
    mixed, MIXED, set_mixed;
    /// Address of the table of changes of the privilege level that translated code makes by itself.
    levels, LEVELS, set_levels;
}

/// Offsets of words that only translated code writes.
impl EngineFrame {
    /// The host's RSP at a call of Rust.
    pub const HOST_RSP: usize = offset_of!(Self, host_rsp);
    /// What a string instruction has found for its first operand, while it looks for the second.
    pub const SLOT: usize = offset_of!(Self, slot);
    /// The host's RSP while it has no call to return from.
    pub const STACK: usize = offset_of!(Self, stack);
    /// Room for YMM0 to YMM15 while Rust runs.
    pub const VECTORS: usize = offset_of!(Self, vectors);
    /// Where a gather keeps its data, mask and indexes, and FNSTENV and FLDENV the environment.
    pub const GATHERED: usize = offset_of!(Self, gathered);
    /// Where a write to two pages that lie apart in the host's memory keeps what it writes back to, and a far CALL what
    /// it pushes.
    pub const BOUNCED: usize = offset_of!(Self, bounced);
    /// Not 0 if the upper halves of these are among what is stored.
    pub const UPPERS_IN_USE: usize = offset_of!(Self, uppers_in_use);
    /// In a hoisted loop, what was left of the countdown beyond the fast iterations.
    pub const OWED: usize = offset_of!(Self, owed);
    /// In a hoisted loop, the anchors.
    pub const ANCHORS_AT: usize = offset_of!(Self, anchors);
    /// In a hoisted loop, the iterations that do not fill a block, in 32 bits.
    pub const REST: usize = offset_of!(Self, rest);
    /// In a hoisted loop, the negative of the countdown when the fast iterations began.
    pub const BEGAN: usize = offset_of!(Self, began);
    /// How often loops go back before their probes are hoisted. Loops share these words.
    pub const RELUCTANCES_AT: usize = offset_of!(Self, reluctances);
    /// The random number that budgets vary by.
    pub const RANDOM: usize = offset_of!(Self, random);
    /// What is given back if the instruction that calls a trampoline is left to the interpreter.
    pub const REFUND: usize = offset_of!(Self, refund);
    /// What is given back with [`Self::REFUND`] to [`Self::counted_beside`].
    pub const REFUND_BESIDE: usize = offset_of!(Self, refund_beside);
    /// A word in which code that counts keeps a register for a moment.
    pub const COUNTED_SPILL: usize = offset_of!(Self, counted_spill);
    /// How long that was after the look before, in ticks; not 0.
    pub const ELAPSED: usize = offset_of!(Self, elapsed);
    /// The addresses of [`Self::set_goes_on`].
    pub const GOES_ON: usize = offset_of!(Self, goes_on);
    /// The table of [`KeyView`]s.
    pub const KEY_VIEWS_AT: usize = offset_of!(Self, key_views);
    /// The tables of the supervisor's views, by CR0.WP and RFLAGS.AC.
    pub const VIEWS_AT: [[usize; 2]; 2] = {
        let (through, protected) = (
            offset_of!(Self, views_writing_through),
            offset_of!(Self, views_protected),
        );
        [[through, through + 8], [protected, protected + 8]]
    };
}

impl EngineFrame {
    /// A time of the host's TSC that never comes.
    pub const NEVER: u64 = 1 << 63;
    /// Number of anchors.
    pub const ANCHORS: usize = 6;
    /// Number of words that say how often a loop goes back.
    pub const RELUCTANCES: usize = 32;
    /// Number of access sizes that segments have bounds for.
    pub const BOUND_SIZES: usize = 6;
    /// Number of sums besides that of instructions.
    pub const COUNTED_SUMS: usize = 11;
    /// Number of views in the table by PKRU.
    pub const KEY_VIEWS: usize = 8;
    /// The factor of PKRU's hash: the upper three bits of the product are the view's index.
    pub const KEY_VIEW_HASH: u32 = 0x9e37_79b1;

    /// Returns the base of the live view's software TLB.
    pub fn tables(&self) -> u64 {
        self.tables
    }

    /// Returns the address that [`Self::set_counted_go_on`] has set.
    pub fn counted_go_on(&self) -> u64 {
        self.counted_go_on
    }

    /// Sets where code that does not count goes on behind code that counts, and code that counts behind such code: a
    /// stream besides instructions, several, and several with accesses to memory.
    ///
    /// # Safety
    /// They are the addresses of trampolines of that purpose in the vCPU's own code buffer.
    pub unsafe fn set_goes_on(&mut self, places: [u64; 4]) {
        self.goes_on = places;
    }

    /// Returns the address of the log of writes in lock-step; or 0.
    pub fn log(&self) -> u64 {
        self.log
    }

    /// Drops the calls that translated code is in: it goes on where no call has anything to return from.
    pub fn drop_calls(&mut self) {
        self.host_rsp = self.stack;
    }

    /// Makes translated code ask Rust for each change of the view.
    pub fn forget_views(&mut self) {
        self.forget_supervisor_views();
        if core::mem::take(&mut self.key_views_used) != 0 {
            self.key_views.fill(KeyView::default());
        }
    }

    /// Makes translated code ask Rust for each change of CR0.WP and RFLAGS.AC.
    pub fn forget_supervisor_views(&mut self) {
        (self.views_writing_through, self.views_protected) = ([0; 2], [0; 2]);
    }

    /// Lets translated code change by itself to the supervisor's view with this CR0.WP and this RFLAGS.AC, whose
    /// software TLB is at `tables`. Nothing but the tables differs between it and the other views that are set.
    ///
    /// # Safety
    /// `tables` is the base of a software TLB of the vCPU for as long as the view is set.
    pub unsafe fn set_view(&mut self, wp: bool, ac: bool, tables: u64) {
        let views = match wp {
            true => &mut self.views_protected,
            false => &mut self.views_writing_through,
        };
        views[usize::from(ac)] = tables;
    }

    /// Lets translated code change by itself from the software TLB at `from` to the live one, with the live key. Only
    /// PKRU, which becomes `pkru`, differs between the two.
    ///
    /// # Safety
    /// The live tables are the base of a software TLB of the vCPU for as long as the view is set.
    pub unsafe fn set_key_view(&mut self, from: u64, pkru: u32) {
        self.key_views_used = 1;
        let place = pkru.wrapping_mul(Self::KEY_VIEW_HASH) >> 29;
        self.key_views[place as usize % Self::KEY_VIEWS] = KeyView {
            from,
            pkru: pkru.into(),
            tables: self.tables,
            key: self.key,
            salt: self.salt,
            number: self.number,
        };
    }

    /// Returns a copy that can be restored.
    #[must_use]
    pub fn snapshot(&self) -> Self {
        Self { ..*self }
    }
}

impl Clone for EngineFrame {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for EngineFrame {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for EngineFrame {}

impl core::fmt::Debug for EngineFrame {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("EngineFrame")
    }
}

/// The order of fields is kept, because golden files contain the displacements.
const _: () = {
    assert!(EngineFrame::TABLES == 0);
    assert!(EngineFrame::TARGETS == 8 * 4);
    assert!(EngineFrame::ENTRY == 8 * 11);
    assert!(EngineFrame::STACK == 8 * 31);
    assert!(EngineFrame::VECTORS == 8 * 32);
    assert!(EngineFrame::STOP == 8 * 96);
    assert!(EngineFrame::RANDOM == 8 * 125);
    assert!(EngineFrame::KEY_VIEWS_AT == 8 * 128);
    assert!(EngineFrame::SWITCHES == 8 * 177);
    assert!(EngineFrame::REFUND == 8 * 185);
    assert!(offset_of!(EngineFrame, bounds) == 8 * 188);
    assert!(EngineFrame::KEYS == 8 * 211);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_forgotten_together() {
        let mut frame = EngineFrame::default();
        // SAFETY: no translated code runs.
        unsafe {
            frame.set_tables(0x1000);
            frame.set_view(true, false, 0x2000);
            frame.set_view(false, true, 0x3000);
            frame.set_key_view(0x4000, 0x5555_5554);
        }
        assert_eq!(frame.views_protected, [0x2000, 0]);
        assert_eq!(frame.views_writing_through, [0, 0x3000]);
        let known = frame.key_views.iter().filter(|v| v.tables == 0x1000);
        assert_eq!(known.count(), 1);
        frame.forget_views();
        assert_eq!(frame.views_protected, [0; 2]);
        assert_eq!(frame.views_writing_through, [0; 2]);
        assert!(frame.key_views.iter().all(|v| v.tables == 0 && v.from == 0));
        assert_eq!(frame.key_views_used, 0);
    }

    #[test]
    fn a_copy_of_a_state_has_an_empty_frame_and_a_snapshot_has_all() {
        let frame = EngineFrame {
            key: 5,
            ..EngineFrame::default()
        };
        assert_eq!((frame.clone().key, frame.snapshot().key), (0, 5));
        assert!(frame == EngineFrame::default());
    }
}
