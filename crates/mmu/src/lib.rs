//! gva to gpa to hva: guest page walks, permission views, software TLBs, write-protection.
//!
//! One [`Mmu`] belongs to one vCPU thread. A guest access goes through
//!
//! 1. L1: the live view's direct-mapped table of {gva page, host page} ([`l1`]);
//! 2. L2: results of walks, for all contexts and views ([`l2`]);
//! 3. the walk of the guest's tables ([`walk`]) and the memslot lookup.
//!
//! A *context* is what hardware tags translations with: paging mode and PCID. A
//! *view* is a setting of the permission inputs that are not in the tables: user
//! or supervisor, CR0.WP, SMAP and AC, SMEP, NXE, PKRU, PKRS. Every (context,
//! view) has L1 tables of its own, so that a change of CPL, AC or WP is a change
//! of an index: nothing is flushed.
//!
//! Invariants:
//! * An L1 tag is present only if an access in that view needs no check, no A or
//!   D bit, and no bookkeeping. For the write table that means: D is set in the
//!   guest's entry, the page's dirty bit is set if its slot logs, nothing of the
//!   page is tracked as code, and the slot may be written.
//! * Translations are forgotten exactly when the manual says (SDM vol. 3, 4.10.4)
//!   or earlier. Flushes of contexts that are not current are recorded and
//!   carried out when they become current.
//! * Requests of other threads (slot changes, dirty harvests, new code) take
//!   effect in [`Mmu::sync`], which the run loop calls when
//!   [`Mmu::needs_sync`] says so: at the latest before the next block.
//!
//! # Code that changes
//!
//! Bytes fetched through [`Mmu::code_bytes`] are tracked per 64-byte chunk of the
//! slot's page. A vCPU's own later write to them is always noticed: it has no
//! write tag for the page. Another vCPU may still have one when a page first
//! becomes code; it drops the tag when it synchronises, and invalidates the
//! page's code then, as it may have written. So code written by another vCPU is
//! executed anew at the latest once that vCPU has begun its next block, which is
//! earlier than any serialising handshake that cross-modifying code needs (SDM
//! vol. 3, 8.1.3) can complete. Writes of the VMM (DMA) are found by comparing
//! checksums when a page is mapped for fetching again.
//!
//! DEVIATION: code that the VMM writes while it stays mapped for fetching is
//! noticed after the next KVM_SET_REGS, KVM_SET_SREGS or KVM_SET_GUEST_DEBUG of
//! the vCPU, or after a flush of the guest's, and not at once.
//!
//! DEVIATION: RAM that the VMM maps at two gpas is tracked at each gpa by itself.

#![forbid(unsafe_code)]

mod access;
mod budget;
mod bulk;
mod catch_up;
mod code;
mod context;
mod donors;
mod exact;
mod families;
mod fault;
mod fetch;
mod fetched;
mod flush;
mod front;
mod give_up;
mod globals;
mod growth;
pub mod hash;
pub mod l1;
mod l2;
pub mod mixed;
mod neighbours;
mod paging;
mod ram;
pub mod reach;
mod resolve;
mod shadow;
mod shared;
mod source;
mod structures;
mod sum;
mod switches;
mod tables;
mod view;
pub mod walk;
mod watched;
mod written;

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicU64},
};

use guest_memory::{GuestMemory, HostPage, Mailbox, SlotTable};
use x86_cpu::{CpuState, Exception};

pub use budget::Kept;
pub use front::Front;
pub use paging::{Mode, Paging};
pub use ram::Ram;
pub use resolve::DevicePage;
pub use shadow::{
    promised::{RootArea, RootIsKept},
    roots::Policy,
    words as compared,
};
pub use source::Source;
pub use switches::SwitchEpochs;
pub use view::View;

/// Why an access was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The guest gets an exception; `cpu.fault_gva` is set for #PF.
    Exception(Exception),
    /// Not RAM (no memslot, a write to a read-only one, or the APIC page):
    /// nothing was done. If the access crosses a page, at least one of the two
    /// is not RAM and `gpa` is the first such byte: split it with [`Mmu::translate`].
    Device {
        /// Guest-physical address of the access.
        gpa: u64,
    },
    /// RAM, of the access or of a table on the way to it, that the process cannot access so, as the VMM has it: nothing was done.
    Host {
        /// Guest-physical address of the page.
        gpa: u64,
    },
}

/// Where a gva leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Guest-physical address.
    pub gpa: u64,
    /// The host page, if it is RAM that may be accessed so. Read through it;
    /// write with [`Mmu::write_gpa`], which keeps the dirty log and code tracking.
    pub page: Option<HostPage>,
}

/// Counters, for `stat` and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Walks of guest tables.
    pub walks: u64,
    /// Of these, those that a paging-structure cache has shortened.
    pub short_walks: u64,
    /// Accesses that L1 had not, and generated code could not find in the second level either.
    pub l1_misses: u64,
    /// Of these, answered by the second level all the same.
    pub reach_hits: u64,
    /// Accesses of generated code that the second level has answered without a call.
    pub reach_code_hits: u64,
    /// Pages that the second level's table of small pages has entries for.
    pub reach_pages: u64,
    /// Walks that a kept walk has answered.
    pub l2_hits: u64,
    /// Pages that came to the second level because one beside them was walked for.
    pub neighbours: u64,
    /// Misses that led to a device.
    pub device_misses: u64,
    /// Faults by what the tables or keys allow.
    pub permission_misses: u64,
    /// Times that every page has to be noted again when it is written.
    pub rounds: u64,
    /// Flush requests of the guest.
    pub flushes: u64,
    /// Contexts made.
    pub contexts_made: u64,
    /// Contexts dropped, for others.
    pub contexts_dropped: u64,
    /// Views made.
    pub views_made: u64,
    /// Tables of the first level that have grown.
    pub tables_grown: u64,
    /// Synchronisations that had something to do.
    pub syncs: u64,
    /// Times that this vCPU was asked to give up pages that it could write unnoticed.
    pub posts: u64,
    /// Pages that it has given up.
    pub pages_given_up: u64,
    /// Writes that found their page clean, and noted it.
    pub dirty_faults: u64,
    /// Ticks of the TSC that dirty logging has taken: giving up pages, and noting those that are written again.
    pub stall_tsc: u64,
    /// Refills of the fetch TLB.
    pub fetch_misses: u64,
    /// Pages whose code was compared with what was fetched.
    pub code_rechecks: u64,
    /// Code pages found changed by the VMM.
    pub code_changed_by_vmm: u64,
    /// Flushes that a tracked context has caught up with.
    pub catch_ups: u64,
    /// Entries of guest tables compared for it.
    pub entries_compared: u64,
    /// Entries of these that had changed.
    pub entries_changed: u64,
    /// Flushes that dropped all of a tracked context.
    pub catch_ups_failed: u64,
}

/// A vCPU's memory management unit.
#[derive(Debug)]
pub struct Mmu {
    memory: Arc<GuestMemory>,
    table: Arc<SlotTable>,
    mailbox: Arc<Mailbox>,
    seen_epoch: u64,
    seen_generation: u64,
    seen_write_flushes: u64,
    seen_posted: u64,
    /// True if some slot logs writes.
    is_logging: bool,
    /// A buffer for the pages that are given up.
    given_up: Vec<written::Pages>,
    apic_page: Option<u64>,
    /// Pages with data breakpoints: see [`watched`].
    watched: Vec<u64>,
    paging: Paging,
    /// The registers that `paging` was made from.
    controls: Option<paging::Controls>,
    /// The slot of the last table walked: where the next one is looked for first.
    near: usize,
    /// The last device pages read and written.
    devices: [DevicePage; 2],
    /// Pages with code whose data translated code may write.
    mixed: mixed::Mixed,

    /// (context, view) tables; `live` and `system` are indices.
    views: Vec<tables::Tables>,
    live: usize,
    system: usize,
    /// Number of times that tables of `views` have become another view's.
    views_made: u64,
    contexts: Vec<context::Context>,
    /// The contexts that were current last, the very last one first.
    last: Vec<usize>,
    /// The maximum numbers of contexts and views.
    budget: budget::Budget,
    /// The memory of tables, and which are to grow.
    growth: growth::Growth,
    /// The number of views from which on others' tables are taken before new ones are made.
    enough_tables: usize,
    /// [`Stats::reach_code_hits`] of tables that were given to another view.
    reach_hits_gone: u64,
    donors: donors::Donors,
    /// A number that changes when write permission of pages is taken: see [`shadow::derived`].
    writes_epoch: u64,
    current: usize,
    /// The index at which the search for an unused context goes on.
    hand: usize,
    /// Source of LRU stamps, flush ticks and fetch epochs: never repeats.
    tick: u64,
    source: Source,
    l2: l2::L2,
    structures: structures::Structures,
    /// The entries that the last walk went through.
    trail: walk::Trail,
    reach: reach::Reach,
    /// The keys of global pages, by world.
    global_keys: [guest_memory::tagged::L2Key; context::WORLDS],
    /// The regions of large global pages.
    global_regions: l1::RegionFilter,
    flushes: shadow::flushes::Flushes,
    globals: globals::Globals,
    /// Tables that contexts share.
    shared: shared::Shared,
    roots: shadow::roots::Roots,
    /// Roots that the guest has promised to flush by itself.
    promised: Option<Box<shadow::promised::Promised>>,
    switch_epochs: Box<SwitchEpochs>,
    /// The views, by the numbers that tables have for them.
    view_numbers: view::Numbers,
    /// A buffer for the pages whose translation has changed.
    changed: Vec<u64>,
    /// True if a device may have written guest memory since code was last compared for that reason.
    is_written_by_device: bool,

    written: written::Written,
    generations: code::GenerationCache,
    global_fetch: fetch::GlobalFetch,
    /// The same for the address space of slots that is not current: SMM's, or in SMM the other one.
    other_fetch: fetch::GlobalFetch,
    fetch_space: u8,
    global_pages: fetch::GlobalPages,
    families: families::Families,
    code_changes: Arc<AtomicU64>,
    sums: HashMap<u64, fetch::Sum, hash::ByIdentity>,
    /// Numbers of times that each page was to be compared when fetched from next, for supervisors and for users.
    verification: [u64; 2],
    /// What was fetched from pages whose bytes are tracked one by one.
    exact: exact::Exact,
    /// Pages that supervisors and users have fetched from under the present `verification`.
    fetched: [fetched::Fetched; 2],
    /// Those of them that the guest can write by the address by which it executes them.
    exposed: fetched::Fetched,
    /// Number of changes of `sums`.
    remembered: u64,
    stats: Stats,
}

impl Mmu {
    /// Makes an MMU for the given memory, in the state after reset (no paging).
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        let mut mmu = Self {
            table: memory.table(),
            mailbox: Arc::default(),
            families: families::Families::default(),
            code_changes: memory.code_changes(),
            // Unlike any real value: the first `sync` brings everything up to date.
            seen_epoch: u64::MAX,
            seen_generation: u64::MAX,
            seen_write_flushes: u64::MAX,
            seen_posted: 0,
            is_logging: false,
            given_up: Vec::new(),
            memory,
            apic_page: None,
            watched: Vec::new(),
            paging: Paging::default(),
            controls: None,
            near: 0,
            devices: [DevicePage::NONE; 2],
            mixed: mixed::Mixed::default(),
            views: Vec::new(),
            live: 0,
            views_made: 0,
            system: 0,
            contexts: Vec::new(),
            last: Vec::new(),
            budget: budget::Budget::default(),
            growth: growth::Growth::default(),
            enough_tables: budget::FEW_TABLES,
            reach_hits_gone: 0,
            donors: donors::Donors::default(),
            writes_epoch: 1,
            current: 0,
            hand: 0,
            tick: 1,
            source: Source::default(),
            l2: l2::L2::new(),
            structures: structures::Structures::new(),
            trail: walk::Trail::default(),
            reach: reach::Reach::new(reach::DEFAULT_PAGES),
            global_keys: Default::default(),
            global_regions: l1::RegionFilter::default(),
            globals: globals::Globals::default(),
            shared: shared::Shared::default(),
            flushes: shadow::flushes::Flushes::default(),
            roots: shadow::roots::Roots::default(),
            promised: None,
            switch_epochs: SwitchEpochs::new(),
            view_numbers: view::Numbers::default(),
            changed: Vec::new(),
            is_written_by_device: false,
            written: written::Written::default(),
            generations: code::GenerationCache::default(),
            global_fetch: fetch::GlobalFetch::default(),
            other_fetch: fetch::GlobalFetch::default(),
            fetch_space: 0,
            global_pages: fetch::GlobalPages::default(),
            sums: HashMap::default(),
            verification: [0; 2],
            exact: exact::Exact::default(),
            fetched: Default::default(),
            exposed: fetched::Fetched::default(),
            remembered: 1,
            stats: Stats::default(),
        };
        let cpu = CpuState::default();
        mmu.set_root(&cpu);
        mmu.sync();
        mmu
    }

    /// Returns the memory behind the MMU.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns the slots as this vCPU sees them until its next [`Self::sync`].
    pub fn table(&self) -> &SlotTable {
        &self.table
    }

    /// Returns the mailbox by which other threads ask this vCPU for something and learn that it was done.
    pub fn mailbox(&self) -> Arc<Mailbox> {
        Arc::clone(&self.mailbox)
    }

    /// Returns the counters.
    pub fn stats(&self) -> Stats {
        Stats {
            reach_code_hits: self.reach_hits_gone
                + self.views.iter().map(|t| t.l1.reach_hits()).sum::<u64>(),
            reach_pages: self.reach.entries() as u64,
            ..self.stats
        }
    }

    /// Sets the page at which every access is a device access, RAM or not: the local APIC's.
    pub fn set_apic_page(&mut self, gpa: Option<u64>) {
        let gpa = gpa.map(|gpa| gpa & !0xfff);
        if self.apic_page != gpa {
            self.apic_page = gpa;
            self.flush_everything();
        }
    }

    #[inline]
    fn space(&self) -> usize {
        self.paging.space.into()
    }
}
