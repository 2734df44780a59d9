//! What other threads may touch of a vCPU: requests and the wake-up.
//!
//! A request is a bit in one word; a parked vCPU sleeps on that same word, so a
//! request can neither be lost nor need a second check.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, compiler_fence},
    },
    time::Duration,
};

use guest_memory::Mailbox;
use host::{
    BriefLock,
    brief_lock::Held,
    futex::{self, Wait},
};
use io_bus::Reader;
use irqchip::{Accepted, Lapic, LapicConfig, LapicIrq};

use crate::{bell::IoTable, sink::Sink};

/// An address that is none.
pub(crate) const NOWHERE: u64 = u64::MAX;

/// Returns the address, unless it is none.
pub(crate) fn somewhere(gpa: u64) -> Option<u64> {
    (gpa != NOWHERE).then_some(gpa)
}

/// Longest sleep at once.
const PARK_LIMIT: Duration = Duration::from_secs(3600);

/// Requests to a vCPU (KVM_REQ_*).
pub(crate) mod request {
    /// Look at immediate_exit.
    pub(crate) const KICK: u32 = 1 << 0;
    /// An event may have become deliverable.
    pub(crate) const EVENT: u32 = 1 << 1;
    /// Memory slots or page tracking changed: `Mmu::sync`.
    pub(crate) const MEMORY: u32 = 1 << 2;
    /// Rewrite the paravirtual clock.
    pub(crate) const CLOCK: u32 = 1 << 3;
    /// An NMI was requested.
    pub(crate) const NMI: u32 = 1 << 4;
    /// An SMI was requested.
    pub(crate) const SMI: u32 = 1 << 5;
    /// INIT.
    pub(crate) const INIT: u32 = 1 << 6;
    /// A start-up IPI; the page is in the shared state.
    pub(crate) const SIPI: u32 = 1 << 7;
    /// Wake from HLT whatever RFLAGS.IF is (KVM_HC_KICK_CPU).
    pub(crate) const UNHALT: u32 = 1 << 8;
    /// The dirty ring is full.
    pub(crate) const RING: u32 = 1 << 9;
    /// Drop all translations: `Bus::serve_flushes`.
    pub(crate) const FLUSH: u32 = 1 << 10;
    /// The event filter of performance counters has changed.
    pub(crate) const FILTER: u32 = 1 << 11;
    /// The share of KVM_SET_NR_MMU_PAGES has changed.
    pub(crate) const MMU_PAGES: u32 = 1 << 12;
}

/// Where a vCPU is.
mod state {
    /// Not in `KVM_RUN`.
    pub(super) const OUTSIDE: u8 = 0;
    /// In `KVM_RUN`.
    pub(super) const RUNNING: u8 = 1;
    /// In `KVM_RUN`, asleep.
    pub(super) const ASLEEP: u8 = 2;
    /// In `KVM_RUN`, asleep between two instructions: all that is asked of it is done before the next one.
    pub(super) const HALTED: u8 = 3;
}

/// How a vCPU is told of Xen's events.
#[derive(Debug)]
pub(crate) struct XenReceiver {
    /// Address of its `struct vcpu_info`, or [`NOWHERE`].
    info: AtomicU64,
    /// The vector that its own LAPIC gets; 0: none.
    pub(crate) vector: AtomicU8,
    /// Words of the pending bits with events that its structure could not be told of.
    pub(crate) untold: AtomicU64,
    /// It waits for an event.
    pub(crate) is_polling: AtomicBool,
}

impl Default for XenReceiver {
    fn default() -> Self {
        Self {
            info: AtomicU64::new(NOWHERE),
            vector: AtomicU8::default(),
            untold: AtomicU64::default(),
            is_polling: AtomicBool::default(),
        }
    }
}

impl XenReceiver {
    /// Returns the address of its `struct vcpu_info`.
    #[inline]
    pub(crate) fn info(&self) -> Option<u64> {
        somewhere(self.info.load(Ordering::Acquire))
    }
    pub(crate) fn set_info(&self, gpa: Option<u64>) {
        self.info.store(gpa.unwrap_or(NOWHERE), Ordering::Release);
    }
}

/// The shared part of a vCPU.
#[derive(Debug)]
pub(crate) struct VcpuShared {
    /// APIC id.
    pub(crate) id: u32,
    /// The vCPU that starts at reset (KVM_SET_BOOT_CPU_ID).
    pub(crate) is_bsp: bool,
    /// Position among the VM's vCPUs.
    pub(crate) index: usize,
    /// HV_X64_MSR_VP_INDEX.
    pub(crate) vp_index: AtomicU32,
    pub(crate) xen: XenReceiver,
    /// Who wants to see the statistics.
    pub(crate) stats: OnceLock<Sink>,
    lapic: Mutex<Lapic>,
    sipi_page: AtomicU32,
    nmis: AtomicU32,
    requests: AtomicU32,
    /// Flushes that other vCPUs have asked for, and those that are done.
    flushes: [AtomicU32; 2],
    io: BriefLock<Reader<IoTable>>,
    /// [`state`]; while it is not [`state::OUTSIDE`], memory may be accessed without asking again.
    state: AtomicU8,
    /// The thread that has the vCPU sleeps on `requests`, or is about to. (`state` may say otherwise: another thread's KVM_RUN sets it
    /// before it waits for the vCPU.)
    is_parked: AtomicBool,
    /// Where it shares which roots it keeps: gpa of a page, and how many there are.
    root_area: AtomicU64,
    /// What the vCPU's MMU has done of what it was asked.
    mailbox: Arc<Mailbox>,
}

impl VcpuShared {
    /// Returns the vCPU with this id. Ids are mostly dense, so the id is tried as the index first.
    pub(crate) fn with_id(vcpus: &[Arc<Self>], id: u32) -> Option<&Arc<Self>> {
        let guess = vcpus.get(id as usize).filter(|v| v.id == id);
        guess.or_else(|| vcpus.iter().find(|v| v.id == id))
    }
    pub(crate) fn new(
        id: u32,
        is_bsp: bool,
        index: usize,
        mailbox: Arc<Mailbox>,
        lapic: LapicConfig,
        io: Reader<IoTable>,
    ) -> Self {
        let lapic = Lapic::new(LapicConfig {
            vcpu_id: id,
            bsp: is_bsp,
            ..lapic
        });
        Self {
            id,
            is_bsp,
            index,
            vp_index: AtomicU32::new(index as u32),
            xen: XenReceiver::default(),
            stats: OnceLock::new(),
            lapic: Mutex::new(lapic),
            sipi_page: AtomicU32::new(0),
            nmis: AtomicU32::new(0),
            requests: AtomicU32::new(0),
            flushes: Default::default(),
            io: BriefLock::new(io),
            state: AtomicU8::new(state::OUTSIDE),
            is_parked: AtomicBool::new(false),
            root_area: AtomicU64::new(0),
            mailbox,
        }
    }
    /// The LAPIC; no other lock is taken while it is held.
    pub(crate) fn lapic(&self) -> MutexGuard<'_, Lapic> {
        self.lapic.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Page, and in the low bits the number of roots that the vCPU shares; 0: none.
    pub(crate) fn root_area(&self) -> u64 {
        self.root_area.load(Ordering::Acquire)
    }
    pub(crate) fn set_root_area(&self, area: u64) {
        self.root_area.store(area, Ordering::Release);
    }
    /// Gives the LAPIC a message that is for it.
    pub(crate) fn interrupt(&self, irq: &LapicIrq) -> Accepted {
        let accepted = self.lapic().accept(irq);
        self.accepted(accepted);
        accepted
    }
    /// The LAPIC accepted a message: the vCPU has to look.
    pub(crate) fn accepted(&self, what: Accepted) {
        match what {
            Accepted::Ignored | Accepted::Coalesced => {}
            Accepted::Interrupt => self.request(request::EVENT),
            Accepted::Nmi => self.queue_nmi(),
            Accepted::Smi => self.request(request::SMI),
            Accepted::Init => self.request(request::INIT),
            Accepted::Sipi(page) => {
                self.sipi_page.store(page.into(), Ordering::Release);
                self.request(request::SIPI);
            }
            Accepted::Unhalt => self.request(request::UNHALT),
        }
    }
    /// An NMI: two at once are two.
    pub(crate) fn queue_nmi(&self) {
        self.nmis.fetch_add(1, Ordering::SeqCst);
        self.request(request::NMI);
    }
    /// NMIs that were queued since the last call.
    pub(crate) fn take_nmis(&self) -> u32 {
        self.nmis.swap(0, Ordering::SeqCst)
    }
    /// Page of the last start-up IPI.
    pub(crate) fn sipi_page(&self) -> u8 {
        self.sipi_page.load(Ordering::Acquire) as u8
    }
    /// Asks for something and wakes the vCPU if it is parked.
    pub(crate) fn request(&self, bits: u32) {
        self.requests.fetch_or(bits, Ordering::SeqCst);
        self.wake();
    }
    /// Takes requests back.
    pub(crate) fn cancel(&self, bits: u32) {
        self.requests.fetch_and(!bits, Ordering::SeqCst);
    }
    /// True if anything is asked.
    #[inline]
    pub(crate) fn is_requested(&self) -> bool {
        self.requests.load(Ordering::Relaxed) != 0
    }
    /// The word that requests are bits of.
    pub(crate) fn request_word(&self) -> &AtomicU32 {
        &self.requests
    }
    /// Takes all requests.
    pub(crate) fn take(&self) -> u32 {
        self.requests.swap(0, Ordering::SeqCst)
    }
    /// Wakes the vCPU after something has been asked of it. One that does not sleep looks by itself before it does: see [`Self::park`].
    fn wake(&self) {
        if self.is_parked.load(Ordering::SeqCst) {
            futex::wake(&self.requests, 1);
        }
    }
    /// Sleeps until something is asked, a signal arrives or the time is over.
    ///
    /// There is always a limit: the kernel would restart an unlimited wait after
    /// a handler with SA_RESTART, where KVM_RUN has to return EINTR.
    pub(crate) fn park(&self, timeout: Duration) -> Wait {
        // Either the wait finds the request, or `wake` finds a vCPU that is parked: a store that is a full barrier.
        self.is_parked.swap(true, Ordering::SeqCst);
        let wait = futex::wait(&self.requests, 0, Some(timeout.min(PARK_LIMIT)));
        self.is_parked.store(false, Ordering::Release);
        wait
    }
    /// The doorbells as this vCPU sees them: locked while it rings one.
    pub(crate) fn io(&self) -> Held<'_, Reader<IoTable>> {
        self.io.lock()
    }
    /// Enters `KVM_RUN` by taking a lock. What is read of shared state after this is at least as new as
    /// what [`Self::has_acknowledged`] has not waited for.
    ///
    /// The store and those reads need a full barrier in between, which on x86 every exchange is: the
    /// lock's own does, and one of our own would cost as much again.
    pub(crate) fn enter<T>(&self, lock: impl FnOnce() -> T) -> T {
        self.state.store(state::RUNNING, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let locked = lock();
        // Whoever had the lock may have left meanwhile.
        if self.state.load(Ordering::Relaxed) != state::RUNNING {
            self.state.swap(state::RUNNING, Ordering::SeqCst);
        }
        locked
    }
    /// Leaves it: all accesses to memory are over.
    pub(crate) fn leave(&self) {
        self.state.store(state::OUTSIDE, Ordering::Release);
    }
    /// Inside `KVM_RUN`: begins or ends a sleep.
    pub(crate) fn set_asleep(&self, on: bool) {
        let state = if on { state::ASLEEP } else { state::RUNNING };
        self.state.store(state, Ordering::Release);
        if !on {
            // Requests are looked at after this, or whoever made them sees a vCPU that is awake.
            host::cpu::barrier();
        }
    }
    /// The same in the run loop, where no instruction is under way.
    pub(crate) fn set_halted(&self, on: bool) {
        let state = if on { state::HALTED } else { state::RUNNING };
        self.state.store(state, Ordering::Release);
        if !on {
            host::cpu::barrier();
        }
    }
    /// Asks for a flush of the TLB: its number, for [`Self::has_flushed`].
    pub(crate) fn ask_for_flush(&self) -> u32 {
        let number = self.flushes[0]
            .fetch_add(1, Ordering::SeqCst)
            .wrapping_add(1);
        self.request(request::FLUSH);
        number
    }
    /// It is done, or will be before anything is executed.
    pub(crate) fn has_flushed(&self, number: u32) -> bool {
        self.state.load(Ordering::SeqCst) != state::RUNNING
            || self.flushes[1].load(Ordering::Acquire).wrapping_sub(number) as i32 >= 0
    }
    /// The number of the last flush that is asked for, if it is to be done.
    pub(crate) fn wanted_flush(&self) -> Option<u32> {
        let wanted = self.flushes[0].load(Ordering::SeqCst);
        (wanted != self.flushes[1].load(Ordering::Relaxed)).then_some(wanted)
    }
    /// It is done.
    pub(crate) fn set_flushed(&self, number: u32) {
        self.flushes[1].store(number, Ordering::Release);
    }
    /// In `KVM_RUN` and not asleep.
    pub(crate) fn wants_core(&self) -> bool {
        self.state.load(Ordering::Relaxed) == state::RUNNING
    }
    /// True if the vCPU cannot use state older than `epoch` any more.
    pub(crate) fn has_acknowledged(&self, epoch: u64) -> bool {
        self.state.load(Ordering::SeqCst) == state::OUTSIDE || self.mailbox.epoch() >= epoch
    }
    /// Has the vCPU look for pages that it was asked for, or for a request of this epoch. Returns what to wait for, unless it is done.
    pub(crate) fn ask_for_pages(self: &Arc<Self>, epoch: u64) -> Option<(Arc<Self>, u64)> {
        let posted = self.mailbox.posted();
        if self.has_given_up(posted, epoch) {
            return None;
        }
        self.requests.fetch_or(request::MEMORY, Ordering::SeqCst);
        self.wake();
        Some((Arc::clone(self), posted))
    }
    /// True if it cannot write the pages unnoticed any more that it was asked for up to that count, and uses no state older
    /// than `epoch`.
    pub(crate) fn has_given_up(&self, posted: u64, epoch: u64) -> bool {
        // Either this sees a vCPU that runs, or the vCPU sees what it is asked for before it goes on.
        host::cpu::barrier();
        matches!(
            self.state.load(Ordering::SeqCst),
            state::OUTSIDE | state::HALTED
        ) || self.mailbox.done() >= posted && self.mailbox.epoch() >= epoch
    }
}
