//! A vCPU descriptor: KVM_RUN over the shared run page, and the calls whose structures end in
//! an array (KVM API document, "vcpu ioctls").
//!
//! Calls without an ABI of their own are made on [`Vcpu::hypervisor`] directly.

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, PoisonError};

use hypervisor::{Exit, Question, RunInput, RunStatus};
use kvm_bindings::*;

use crate::errno::{Errno, Result};
use crate::lists::{check_msr_count, fit};
use crate::run_page::{PAGE_SIZE, RunPage};
use crate::signals::{self, THREAD, Thread};
use crate::stats::StatsFile;
use crate::vm::Vm;

const EINVAL: Errno = Errno::new(libc::EINVAL);

/// The object behind a vCPU descriptor.
#[derive(Debug)]
pub struct Vcpu {
    hypervisor: Arc<hypervisor::Vcpu>,
    page: RunPage,
    id: u64,
    /// The vCPU's file has the VM's ring of coalesced writes.
    has_ring: bool,
    stats: Mutex<Option<StatsFile>>,
    /// The mask of KVM_SET_SIGNAL_MASK, and whether there is one.
    signal_mask: Mutex<Option<u64>>,
    has_signal_mask: AtomicBool,
    /// The VM, which lives as long as its vCPU.
    vm: Arc<Vm>,
}

/// Access to the run page while KVM_RUN holds the vCPU.
struct Session<'a> {
    page: &'a RunPage,
    blocked_signals: Option<u64>,
}

impl hypervisor::RunPage for Session<'_> {
    #[inline]
    fn input<'a>(&'a self, question: Question, io: &'a mut [u8; PAGE_SIZE]) -> RunInput<'a> {
        RunInput {
            answer: self.page.answer(question, io),
            request_interrupt_window: self.page.request_interrupt_window(),
            cr8: (self.page.cr8() & 0xf) as u8,
            immediate_exit: self.page.immediate_exit(),
            blocked_signals: self.blocked_signals,
        }
    }
    #[inline]
    fn store(&self, exit: &Exit, status: &RunStatus) -> Question {
        self.page.store(exit, status)
    }
    fn store_status(&self, status: &RunStatus) {
        self.page.store_status(status);
    }
}

/// While this lives, [`signals::interrupt_current_thread`] reaches the vCPU.
struct Interruptible<'a>(&'a Thread, PhantomData<&'a hypervisor::Vcpu>);

impl<'a> Interruptible<'a> {
    fn enter(thread: &'a Thread, vcpu: &'a hypervisor::Vcpu) -> Self {
        thread.current.set(vcpu);
        // A signal that came before this point has been noted, and the note is checked after it.
        compiler_fence(Ordering::SeqCst);
        Self(thread, PhantomData)
    }
}

impl Drop for Interruptible<'_> {
    fn drop(&mut self) {
        self.0.current.set(std::ptr::null());
        compiler_fence(Ordering::SeqCst);
    }
}

impl Vcpu {
    pub(crate) fn new(
        hypervisor: Arc<hypervisor::Vcpu>,
        vm: Arc<Vm>,
        page: RunPage,
        id: u64,
        has_ring: bool,
    ) -> Self {
        Self {
            hypervisor,
            page,
            id,
            has_ring,
            stats: Mutex::new(None),
            signal_mask: Mutex::new(None),
            has_signal_mask: AtomicBool::new(false),
            vm,
        }
    }

    /// The typed calls.
    pub fn hypervisor(&self) -> &Arc<hypervisor::Vcpu> {
        &self.hypervisor
    }

    /// Returns the address of kvm_run in anykvm's own mapping, for [`crate::trace::write_exit`].
    pub fn run_address(&self) -> u64 {
        self.page.address()
    }

    pub(crate) fn has_ring(&self) -> bool {
        self.has_ring
    }

    /// The VM that this vCPU belongs to.
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// KVM_RUN: completes the previous exit with what the VMM left in the run page, runs the
    /// guest, and describes the next exit there.
    ///
    /// # Errors
    ///
    /// EINTR for `immediate_exit` or a kick, EAGAIN for a vCPU that waits for its start-up IPI,
    /// EFAULT, with KVM_EXIT_MEMORY_FAULT in the run page, for guest memory that the process cannot access,
    /// EINVAL for sync register flags that do not exist or registers that cannot be.
    pub fn run(&self) -> Result<()> {
        THREAD.with(|thread| self.run_on(thread))
    }

    fn run_on(&self, thread: &Thread) -> Result<()> {
        let (valid, dirty) = self.page.sync_flags();
        if (valid | dirty) & !u64::from(KVM_SYNC_X86_VALID_FIELDS) != 0 {
            return Err(EINVAL);
        }
        if dirty != 0 {
            self.take_sync_regs(dirty)?;
        }
        // With immediate_exit set, KVM_RUN only completes the previous exit, whose reason stays in the page.
        let only_completes = self.page.immediate_exit().load(Ordering::Relaxed) != 0;
        let interruptible = Interruptible::enter(thread, &self.hypervisor);
        if thread.is_deferred() {
            // A signal came after the call began, when there was nothing to interrupt yet.
            self.hypervisor.kick();
        }
        // If handlers are wrapped, a signal announces itself; otherwise KVM_RUN must check for it.
        let signal_mask = if self.has_signal_mask.load(Ordering::Acquire) {
            *self.mask()
        } else {
            None
        };
        let run_mask = signal_mask.and_then(signals::RunMask::enter);
        let blocked_signals = signal_mask.filter(|_| run_mask.as_ref().is_none_or(|r| r.asks));
        let result = self.hypervisor.run(&Session {
            page: &self.page,
            blocked_signals,
        });
        drop(run_mask);
        drop(interruptible);
        if thread.is_deferred() {
            // The handler runs before the next KVM_RUN, which must not be interrupted by it.
            self.hypervisor.cancel_kick();
        }
        if result == Err(hypervisor::Error::Interrupted) && !only_completes {
            self.page.set_exit_reason(KVM_EXIT_INTR);
        }
        if valid != 0 {
            self.give_sync_regs(valid)?;
        }
        Ok(result?)
    }

    fn mask(&self) -> std::sync::MutexGuard<'_, Option<u64>> {
        self.signal_mask
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets `immediate_exit` and has a running vCPU check it: KVM_RUN returns EINTR, now and until the VMM clears the
    /// field. With a kernel's KVM this takes a signal handler.
    pub fn stop(&self) {
        self.page.immediate_exit().store(1, Ordering::SeqCst);
        self.hypervisor.kick();
    }

    /// kvm_dirty_regs: loads the VMM's registers into the vCPU.
    fn take_sync_regs(&self, dirty: u64) -> Result<()> {
        let regs = self.page.sync_regs();
        if dirty & u64::from(KVM_SYNC_X86_REGS) != 0 {
            self.hypervisor.set_regs(&regs.regs).map_err(|_| EINVAL)?;
        }
        if dirty & u64::from(KVM_SYNC_X86_SREGS) != 0 {
            self.hypervisor.set_sregs(&regs.sregs).map_err(|_| EINVAL)?;
        }
        if dirty & u64::from(KVM_SYNC_X86_EVENTS) != 0 {
            self.hypervisor
                .set_vcpu_events(&regs.events)
                .map_err(|_| EINVAL)?;
        }
        self.page.clear_dirty_flags();
        Ok(())
    }

    /// kvm_valid_regs: stores the vCPU's registers in the run page, for the VMM to read without ioctls.
    fn give_sync_regs(&self, valid: u64) -> Result<()> {
        let mut regs = self.page.sync_regs();
        if valid & u64::from(KVM_SYNC_X86_REGS) != 0 {
            regs.regs = self.hypervisor.get_regs()?;
        }
        if valid & u64::from(KVM_SYNC_X86_SREGS) != 0 {
            regs.sregs = self.hypervisor.get_sregs()?;
        }
        if valid & u64::from(KVM_SYNC_X86_EVENTS) != 0 {
            regs.events = self.hypervisor.get_vcpu_events()?;
        }
        self.page.set_sync_regs(regs);
        Ok(())
    }

    /// KVM_GET_STATS_FD: a descriptor from which the statistics can be read.
    ///
    /// # Errors
    ///
    /// Those of making a file.
    pub fn stats_fd(&self) -> Result<OwnedFd> {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match &mut *stats {
            Some(file) => file,
            empty => {
                let identity = format!("kvm-{}/vcpu-{}", std::process::id(), self.id);
                let file = StatsFile::new(&identity, hypervisor::VCPU_STATS)?;
                self.hypervisor.set_stats_sink(file.sink());
                empty.insert(file)
            }
        };
        file.open()
    }

    /// KVM_SET_SIGNAL_MASK: the signals that do not end KVM_RUN; `None` for no mask.
    ///
    /// A pending signal outside the mask ends KVM_RUN with EINTR and stays pending, as with KVM. DEVIATION: if handlers
    /// are not wrapped ([`signals`]), the thread's own mask is not changed. So a signal that the thread does not block
    /// runs its handler during KVM_RUN even if `mask` blocks it, and pending signals are checked for once a
    /// millisecond.
    pub fn set_signal_mask(&self, mask: Option<u64>) {
        *self.mask() = mask;
        self.has_signal_mask
            .store(mask.is_some(), Ordering::Release);
    }

    /// KVM_GET_CPUID2 into a list of `capacity` entries.
    ///
    /// # Errors
    ///
    /// E2BIG when they do not fit.
    pub fn get_cpuid2(&self, capacity: usize) -> Result<Vec<kvm_cpuid_entry2>> {
        fit(self.hypervisor.get_cpuid2()?, capacity)
    }

    /// KVM_SET_CPUID2.
    ///
    /// # Errors
    ///
    /// E2BIG for more than KVM_MAX_CPUID_ENTRIES.
    pub fn set_cpuid2(&self, entries: &[kvm_cpuid_entry2]) -> Result<()> {
        if entries.len() > KVM_MAX_CPUID_ENTRIES {
            return Err(Errno::new(libc::E2BIG));
        }
        Ok(self.hypervisor.set_cpuid2(entries)?)
    }

    /// KVM_SET_CPUID, the older form without sub-leaves.
    ///
    /// # Errors
    ///
    /// E2BIG for more than KVM_MAX_CPUID_ENTRIES.
    pub fn set_cpuid(&self, entries: &[kvm_cpuid_entry]) -> Result<()> {
        let entries: Vec<_> = entries
            .iter()
            .map(|entry| kvm_cpuid_entry2 {
                function: entry.function,
                eax: entry.eax,
                ebx: entry.ebx,
                ecx: entry.ecx,
                edx: entry.edx,
                ..Default::default()
            })
            .collect();
        self.set_cpuid2(&entries)
    }

    /// KVM_GET_MSRS: returns how many of `entries` were read.
    ///
    /// # Errors
    ///
    /// E2BIG for [`crate::system::MAX_IO_MSRS`] entries and more.
    pub fn get_msrs(&self, entries: &mut [kvm_msr_entry]) -> Result<usize> {
        check_msr_count(entries.len())?;
        Ok(self.hypervisor.get_msrs(entries)?)
    }

    /// KVM_SET_MSRS: returns how many of `entries` were written.
    ///
    /// # Errors
    ///
    /// E2BIG for [`crate::system::MAX_IO_MSRS`] entries and more.
    pub fn set_msrs(&self, entries: &[kvm_msr_entry]) -> Result<usize> {
        check_msr_count(entries.len())?;
        Ok(self.hypervisor.set_msrs(entries)?)
    }
}
