//! [`EngineFrame`]: what translated code and the engine that runs it both read and write, beside the state of a vCPU.
//!
//! Translated code addresses the frame by offsets from one base register, so its layout is fixed, and each
//! offset is asserted. The fields are of two kinds:
//!
//! - **Values** are public. A wrong one makes the guest's execution wrong, and nothing else.
//! - **Pointers**, to data that translated code reads and writes or to code that it goes on at, are private. Each is
//!   set by an `unsafe fn`, whose caller promises what the pointer addresses, and for how long.
//!
//! A frame is no part of the architectural state: it is equal to any other, and a copy of a vCPU's state has an empty one.

use core::mem::offset_of;

/// Words of 64 bits, laid out for translated code.
#[repr(C, align(64))]
#[derive(Default)]
pub struct EngineFrame {
    tables: u64,
    /// Direct branches to other pages that go by the table until one of them is remembered.
    pub cross_page_left: u64,
    host_rsp: u64,
    devices: u64,
    targets: u64,
    /// What identifies mapping and mode in the table of indirect targets.
    pub key: u64,
    /// What tags in that table are XORed with, by the key.
    pub salt: u64,
    /// gva of the page that executes.
    pub page: u64,
    /// Arithmetic flags, when not in RFLAGS.
    pub flags: u64,
    /// Two words for what a trampoline hands on.
    pub spill: [u64; 2],
    entry: u64,
    requests: u64,
    /// Looks that are left.
    pub polls_left: u64,
    /// Why translated code was left.
    pub reason: u64,
    /// What belongs to the reason.
    pub argument: u64,
    /// FP state is in the host's registers.
    pub fp_live: u64,
    context: u64,
    /// The host's default MXCSR, for LDMXCSR.
    pub host_mxcsr: u64,
    /// An interrupt waits for RFLAGS.IF.
    pub irq_waiting: u64,
    /// Guest TSC less host TSC.
    pub tsc_offset: u64,
    /// What an instruction of the interpreter's cost, in instructions.
    pub cost: u64,
    /// Instructions until the first poll after entry.
    pub count: u64,
    log: u64,
    slot: u64,
    /// The key's number in 32 bits.
    pub number: u64,
    views_writing_through: [u64; 2],
    /// Translated code has changed to another view by itself, and the MMU has not been told.
    pub is_other_view: u64,
    /// Host TSC at which the run loop has to be returned to at the latest; 0: whenever [`Self::polls_left`] is used up.
    pub until: u64,
    /// PAUSEs executed.
    pub pauses: u64,
    stack: u64,
    vectors: [[u64; 4]; 16],
    stop: u64,
    /// Misses of a per-site entry have become many.
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
    switches_epoch: u64,
    /// The CR3 that an instruction is left to the interpreter with, which flushes nothing; or 0.
    pub wanted_root: u64,
    /// Translated code has loaded CR3 by itself, and the MMU has not been told.
    pub is_other_root: u64,
    /// Of code that counts: the countdown when it was last set, or 0: such code does not run.
    pub counted_from: u64,
    /// What that countdown is now, while Rust runs.
    pub counted_to: u64,
    /// Instructions that polls have taken off that countdown.
    pub counted: u64,
    spare: u64,
    refund: u64,
    counted_entry: u64,
    /// The other streams by their number, and in bit 8 the level.
    pub counted_as: u64,
    /// Of each segment, the highest offset at which there are 1, 2, 4 … 32 bytes.
    pub bounds: [[u32; EngineFrame::BOUND_SIZES]; 6],
    /// The six limits that [`Self::bounds`] are of.
    pub bounds_of: [u32; 6],
    counted_go_on: u64,
    /// The salt by which the target is found of a branch between levels of which one is counted.
    pub counted_salt: u64,
    keys: u64,
    /// Of code that counts several streams: what the countdown has no room for, 16 bits each.
    pub counted_beside: u64,
    refund_beside: u64,
    counted_spill: u64,
    /// Events that polls have taken off the countdown, by sum.
    pub counted_events: [u64; EngineFrame::COUNTED_SUMS],
}

/// A view that differs from another in PKRU alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyView {
    from: u64,
    /// The PKRU that is changed to.
    pkru: u64,
    tables: u64,
    key: u64,
    salt: u64,
    number: u64,
}

/// Sets of private fields: what translated code follows.
macro_rules! pointers {
    ($($(#[$doc:meta])* $field:ident, $offset:ident, $set:ident;)*) => {
        impl EngineFrame {
            $(
                $(#[$doc])*
                pub const $offset: usize = offset_of!(Self, $field);

                $(#[$doc])*
                ///
                /// # Safety
                /// It is that, or 0 where that is said, whenever translated code runs.
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
    /// Address of the MMU's last device pages, two of them.
    devices, DEVICES, set_devices;
    /// Address of the table of indirect targets.
    targets, TARGETS, set_targets;
    /// Address of code of the vCPU's own buffer: where to go on after the registers are loaded.
    entry, ENTRY, set_entry;
    /// Address of the request word, 32 bits.
    requests, REQUESTS, set_requests;
    /// Address of what the functions that translated code calls work on.
    context, CONTEXT, set_context;
    /// Address of the log of writes in lock-step; or 0.
    log, LOG, set_log;
    /// Address of the byte that is not zero when the run loop has to be returned to at once, where [`EngineFrame::until`] is not 0.
    stop, STOP, set_stop;
    /// Address of the table of roots that CR3 is switched to without leaving translated code.
    switches, SWITCHES, set_switches;
    /// Address of the word that those roots are right for.
    switches_epoch, SWITCHES_EPOCH, set_switches_epoch;
    /// Address of the table of keys.
    keys, KEYS, set_keys;
    /// Address of code of the vCPU's own buffer that counts: where to go on once the countdown is loaded.
    counted_entry, COUNTED_ENTRY, set_counted_entry;
    /// Address of the trampoline at which code goes on that counts while the code before does not, or the other way round; or 0.
    counted_go_on, COUNTED_GO_ON, set_counted_go_on;
}

/// Offsets of what translated code alone writes.
impl EngineFrame {
    /// The host's RSP before a call of Rust, and after it.
    pub const HOST_RSP: usize = offset_of!(Self, host_rsp);
    /// What a string instruction found for its first operand, while it looks at the second.
    pub const SLOT: usize = offset_of!(Self, slot);
    /// The host's RSP with no call to return from.
    pub const STACK: usize = offset_of!(Self, stack);
    /// Room for YMM0 to YMM15 while Rust runs.
    pub const VECTORS: usize = offset_of!(Self, vectors);
    /// Their upper halves are among what is there.
    pub const UPPERS_IN_USE: usize = offset_of!(Self, uppers_in_use);
    /// Of hoisted loops: what the countdown is less than it was.
    pub const OWED: usize = offset_of!(Self, owed);
    /// Of hoisted loops: the anchors.
    pub const ANCHORS_AT: usize = offset_of!(Self, anchors);
    /// Of hoisted loops: turns of the first pass, in 32 bits.
    pub const REST: usize = offset_of!(Self, rest);
    /// What the countdown has been less than zero when the loop began.
    pub const BEGAN: usize = offset_of!(Self, began);
    /// How often each loop goes back before its probes are hoisted: there are fewer of them than loops.
    pub const RELUCTANCES_AT: usize = offset_of!(Self, reluctances);
    /// What budgets vary by.
    pub const RANDOM: usize = offset_of!(Self, random);
    /// What is to be given back if the instruction that calls a trampoline is left to the interpreter.
    pub const REFUND: usize = offset_of!(Self, refund);
    /// What [`Self::REFUND`] is of [`Self::counted_beside`].
    pub const REFUND_BESIDE: usize = offset_of!(Self, refund_beside);
    /// A word for a moment, of code that counts.
    pub const COUNTED_SPILL: usize = offset_of!(Self, counted_spill);
    /// Of [`KeyView`]s.
    pub const KEY_VIEWS_AT: usize = offset_of!(Self, key_views);
    /// Of the tables of the supervisor's views, by CR0.WP and RFLAGS.AC.
    pub const VIEWS_AT: [[usize; 2]; 2] = {
        let (through, protected) = (
            offset_of!(Self, views_writing_through),
            offset_of!(Self, views_protected),
        );
        [[through, through + 8], [protected, protected + 8]]
    };
}

impl EngineFrame {
    /// Anchors of hoisted loops.
    pub const ANCHORS: usize = 6;
    /// Counters of hoisted loops.
    pub const RELUCTANCES: usize = 32;
    /// Sizes that segments have bounds for.
    pub const BOUND_SIZES: usize = 6;
    /// Sums of events besides instructions.
    pub const COUNTED_SUMS: usize = 7;
    /// Views that are known by PKRU.
    pub const KEY_VIEWS: usize = 8;
    /// The upper three bits of PKRU times this are the place of a view.
    pub const KEY_VIEW_HASH: u32 = 0x9e37_79b1;

    /// Base of the live view's software TLB.
    pub fn tables(&self) -> u64 {
        self.tables
    }

    /// Address of the log of writes in lock-step; or 0.
    pub fn log(&self) -> u64 {
        self.log
    }

    /// The calls of Rust that translated code is in are not returned to: it goes on where no call has anything to return from.
    pub fn drop_calls(&mut self) {
        self.host_rsp = self.stack;
    }

    /// Translated code asks for each change of the view from now on.
    pub fn forget_views(&mut self) {
        self.forget_supervisor_views();
        if core::mem::take(&mut self.key_views_used) != 0 {
            self.key_views.fill(KeyView::default());
        }
    }

    /// Translated code asks for each change of CR0.WP and RFLAGS.AC from now on.
    pub fn forget_supervisor_views(&mut self) {
        (self.views_writing_through, self.views_protected) = ([0; 2], [0; 2]);
    }

    /// The supervisor has the software TLB at `tables` with this CR0.WP and this RFLAGS.AC, and nothing else differs from where it
    /// has another one: translated code changes between them by itself.
    ///
    /// # Safety
    /// `tables` is the base of a software TLB of the vCPU for as long as it is there.
    pub unsafe fn set_view(&mut self, wp: bool, ac: bool, tables: u64) {
        let views = match wp {
            true => &mut self.views_protected,
            false => &mut self.views_writing_through,
        };
        views[usize::from(ac)] = tables;
    }

    /// PKRU alone leads from the software TLB at `from` to the live one, with the live key: translated code changes by itself.
    ///
    /// # Safety
    /// The live tables are the base of a software TLB of the vCPU for as long as the view is there.
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

    /// A copy, to come back to.
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

/// Displacements that the code of older builds and the golden files know: the order of fields is kept.
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
