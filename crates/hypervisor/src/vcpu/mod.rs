//! A virtual CPU: its state, its run loop, and the bus through which it executes.

mod bus;
mod counters;
mod cpuid;
mod creation;
mod engine;
mod events;
mod fpu;
mod inject;
mod mce;
mod mp_state;
mod msr;
mod park;
mod pmu;
mod read_ahead;
mod regs;
mod remote_flush;
mod replay;
mod run;

pub use bus::{
    stats::VCPU_STATS,
    xen::{XenRunstate, XenVcpuAttr},
};

use std::sync::Arc;

use guest_memory::DirtyRing;
use host::{BriefLock, Held};
use kvm_bindings::*;
use mmu::Mmu;
use x86_cpu::{CpuState, Flush, GuestBus, PendingInterrupt, Privilege};
use x86_defs::reg;
use x86_interp::Interp;
use x86_jit::Jit;

use self::{
    bus::{Bus, debug},
    regs::KVM_SREGS2_FLAGS_PDPTRS_VALID,
};
use crate::{
    Error, Question, Result, RunPage,
    limits::GUEST_DEBUG,
    shared::{VcpuShared, request},
    vm::{VmState, clock},
};

/// Returns the linear address of the current instruction.
fn linear_rip(cpu: &CpuState) -> u64 {
    if cpu.is_64bit() {
        cpu.rip()
    } else {
        cpu.seg[reg::CS].base.wrapping_add(cpu.rip()) & 0xffff_ffff
    }
}

/// The state that only the thread which holds the vCPU touches.
#[derive(Debug)]
struct Inner {
    cpu: Box<CpuState>,
    interp: Interp<Bus>,
    /// `None` if the translator is switched off, or the host allows no generated code.
    jit: Option<Box<Jit<Bus>>>,
    bus: Bus,
    /// KVM_MP_STATE_*.
    mp_state: u32,
    /// When pending signals were last compared with the VMM's mask.
    signals_checked_ns: u64,
    /// The last exit only asked the VMM for a device access.
    is_device_exit: bool,
    /// The VMM has made a call that it also makes after it has written code.
    may_have_new_code: bool,
    /// The last exit came from translated code, and no call but KVM_RUN was made since: see [`Inner::can_resume`].
    resumes: bool,
    /// Entries since the clock was last read.
    quick_entries: u8,
    /// KVM_RUN has entered the guest.
    has_run: bool,
    /// The vCPU is in an HLT that does not exit (KVM_X86_DISABLE_EXITS_HLT).
    sleeps_in_guest: bool,
    /// KVM_HC_KICK_CPU came while the vCPU ran: its next HLT returns at once.
    pv_unhalted: bool,
    poll: park::HaltPoll,
    /// What the last exit asked of the VMM.
    question: Question,
    /// The vCPU's dirty ring; `None` if dirty pages are reported by the slots' bitmaps.
    dirty_ring: Option<Arc<DirtyRing>>,
    /// Room for the bytes of an IN; absent while KVM_RUN uses it.
    io: Option<Box<[u8; 4096]>>,
}

/// A virtual CPU. One thread uses it at a time; others wait, as on KVM's vCPU mutex.
#[derive(Debug)]
pub struct Vcpu {
    inner: BriefLock<Inner>,
    shared: Arc<VcpuShared>,
}

impl Vcpu {
    pub(crate) fn new(vm: Arc<VmState>, shared: Arc<VcpuShared>, mmu: Mmu) -> Self {
        let mut cpu = Box::<CpuState>::default();
        cpu.features = cpuid::features(&[]);
        cpu.msr.arch_capabilities = crate::system::Speculation::here().arch_capabilities;
        cpu.msr.ucode_rev = crate::system::microcode();
        let jit = engine::translator(&vm.engine, vm.small_memory());
        if let Some(jit) = &jit {
            // The service thread gives the code huge pages. Without it, code stays in small pages.
            let _ = vm.service_thread.add(jit.code_views());
        }
        let stuffs = vm.options.has_quirk(KVM_X86_QUIRK_STUFF_FEATURE_MSRS);
        let mut bus = Bus::new(vm, Arc::clone(&shared), mmu);
        if !stuffs {
            // The VMM says what the processor can do, by MSRs as by CPUID.
            let m = &mut cpu.msr;
            (m.arch_capabilities, m.platform_info, m.ucode_rev) = (0, 0, 0);
            bus.pmu.capabilities = 0;
        }
        // Paging is off in a fresh vCPU, so nothing can fault.
        let _ = bus.load_root(&mut cpu);
        bus.select_view(&mut cpu);
        bus.update_apic_page();
        // APs of a VM with in-kernel LAPICs wait for INIT and SIPI.
        let waits = bus.has_lapic() && !shared.is_bsp;
        let mp_state = if waits {
            KVM_MP_STATE_UNINITIALIZED
        } else {
            KVM_MP_STATE_RUNNABLE
        };
        let inner = Inner {
            cpu,
            interp: Interp::new(),
            jit,
            bus,
            mp_state,
            signals_checked_ns: 0,
            is_device_exit: false,
            may_have_new_code: false,
            resumes: false,
            quick_entries: 0,
            has_run: false,
            sleeps_in_guest: false,
            pv_unhalted: false,
            poll: park::HaltPoll::default(),
            question: Question::None,
            dirty_ring: None,
            io: None,
        };
        Self {
            inner: BriefLock::new(inner),
            shared,
        }
    }

    /// Locks the vCPU for a call other than KVM_RUN, any of which may change the state that the guest goes on with.
    fn lock(&self) -> Held<'_, Inner> {
        let mut inner = self.lock_for_run();
        inner.resumes = false;
        inner
    }

    #[inline]
    fn lock_for_run(&self) -> Held<'_, Inner> {
        let inner = self.inner.lock();
        if inner.dirty_ring.is_some() {
            inner.bus.vm.memory.rings().act_for(self.shared.index);
        }
        inner
    }

    pub(crate) fn shared(&self) -> &Arc<VcpuShared> {
        &self.shared
    }

    pub(crate) fn attach_dirty_ring(&self, ring: Arc<DirtyRing>) {
        let mut inner = self.lock();
        let rings = inner.bus.vm.memory.rings();
        rings.add(self.shared.index, Arc::clone(&ring));
        inner.dirty_ring = Some(ring);
    }

    /// KVM_RUN.
    pub fn run(&self, page: &impl RunPage) -> Result<()> {
        let mut guard = self.shared.enter(|| self.lock_for_run());
        let inner = &mut *guard;
        let mut io = inner.io.take().unwrap_or_else(|| Box::new([0; 4096]));
        let question = std::mem::take(&mut inner.question);
        let result = inner.run(&page.input(question, &mut io));
        self.shared.leave();
        if inner.cpu.fp.has_x87() {
            // What is left in the host's registers is the guest's.
            host::cpu::clear_x87();
        }
        inner.io = Some(io);
        let status = inner.status();
        match result {
            Ok(()) => {
                if let Some(exit) = &inner.bus.exit {
                    inner.question = page.store(exit, &status);
                }
                inner.bus.exit = None;
                Ok(())
            }
            Err(error) => {
                // A VMM reads if_flag, cr8 and apic_base after EINTR, too.
                page.store_status(&status);
                // EFAULT is the only error that comes with an exit.
                if matches!(error, Error::Fault)
                    && let Some(exit) = inner.bus.exit.take()
                {
                    page.store(&exit, &status);
                }
                Err(error)
            }
        }
    }
    /// Makes KVM_RUN return EINTR soon: the present one if the vCPU is running or parked, otherwise the next one. Safe
    /// in a signal handler.
    pub fn kick(&self) {
        self.shared.request(request::KICK);
    }
    /// Cancels a [`Self::kick`] that no KVM_RUN has seen yet.
    pub fn cancel_kick(&self) {
        self.shared.cancel(request::KICK);
    }

    /// KVM_GET_REGS.
    pub fn get_regs(&self) -> Result<kvm_regs> {
        Ok(regs::regs(&self.lock().cpu))
    }
    /// KVM_SET_REGS.
    pub fn set_regs(&self, r: &kvm_regs) -> Result<()> {
        let inner = &mut *self.lock();
        regs::set_regs(&mut inner.cpu, r);
        regs::update_privilege(&mut inner.cpu);
        inner.bus.select_view(&mut inner.cpu);
        // A VMM that moves RIP may have loaded the code there.
        inner.may_have_new_code = true;
        Ok(())
    }
    /// KVM_GET_SREGS.
    pub fn get_sregs(&self) -> Result<kvm_sregs> {
        let inner = self.lock();
        Ok(regs::sregs(
            &inner.cpu,
            inner.bus.current_cr8().into(),
            inner.bus.apic_base(),
        ))
    }
    /// KVM_SET_SREGS. EINVAL for combinations that no CPU has.
    pub fn set_sregs(&self, r: &kvm_sregs) -> Result<()> {
        let inner = &mut *self.lock();
        inner.set_sregs(r)?;
        // KVM takes the lowest interrupt of the bitmap. An empty bitmap does not cancel a pending one.
        let bitmap = r.interrupt_bitmap.iter().enumerate();
        if let Some((i, w)) = bitmap.into_iter().find(|(_, w)| **w != 0) {
            inner.cpu.events.interrupt = Some(PendingInterrupt {
                vector: (i as u8) << 6 | w.trailing_zeros() as u8,
                soft: false,
            });
        }
        inner.may_have_new_code = true;
        Ok(())
    }
    /// KVM_GET_SREGS2.
    pub fn get_sregs2(&self) -> Result<kvm_sregs2> {
        let s = self.get_sregs()?;
        let inner = self.lock();
        let pae = inner.cpu.is_paging()
            && inner.cpu.cr4 & x86_defs::control::cr4::PAE != 0
            && !inner.cpu.is_long_mode();
        Ok(regs::sregs2(&s, pae.then_some(inner.cpu.pdpte)))
    }
    /// KVM_SET_SREGS2. EINVAL for unknown flags, for PDPTRs outside PAE paging, and as for [`Self::set_sregs`]. Pending
    /// interrupts stay.
    pub fn set_sregs2(&self, r: &kvm_sregs2) -> Result<()> {
        let has_pdptrs = r.flags & KVM_SREGS2_FLAGS_PDPTRS_VALID != 0;
        let pae = r.cr0 & x86_defs::control::cr0::PG != 0
            && r.cr4 & x86_defs::control::cr4::PAE != 0
            && r.efer & x86_defs::control::efer::LMA == 0;
        if r.flags & !KVM_SREGS2_FLAGS_PDPTRS_VALID != 0 || has_pdptrs && !pae {
            return Err(Error::InvalidArgument);
        }
        let inner = &mut *self.lock();
        inner.set_sregs(&regs::from_sregs2(r))?;
        if has_pdptrs {
            inner.cpu.pdpte = r.pdptrs;
            inner.bus.mmu.set_root(&inner.cpu);
        }
        Ok(())
    }
    /// KVM_GET_FPU.
    pub fn get_fpu(&self) -> Result<kvm_fpu> {
        Ok(fpu::fpu(&self.lock().cpu))
    }
    /// KVM_SET_FPU.
    pub fn set_fpu(&self, f: &kvm_fpu) -> Result<()> {
        fpu::set_fpu(&mut self.lock().cpu, f);
        Ok(())
    }
    /// KVM_GET_MSRS: fills in values in order; returns how many could be read.
    pub fn get_msrs(&self, entries: &mut [kvm_msr_entry]) -> Result<usize> {
        let inner = &mut *self.lock();
        for (i, e) in entries.iter_mut().enumerate() {
            match inner.bus.msr(&mut inner.cpu, e.index, true) {
                Some(v) => e.data = v,
                None => return Ok(i),
            }
        }
        Ok(entries.len())
    }
    /// KVM_SET_MSRS: stores in order; returns how many could be stored.
    pub fn set_msrs(&self, entries: &[kvm_msr_entry]) -> Result<usize> {
        let inner = &mut *self.lock();
        Ok(entries.iter().take_while(|e| inner.store_msr(e)).count())
    }
    /// KVM_GET_CPUID2.
    pub fn get_cpuid2(&self) -> Result<Vec<kvm_cpuid_entry2>> {
        let inner = &mut *self.lock();
        let follows = inner.bus.cpuid_follows();
        Ok(cpuid::shown(&inner.bus.cpuid, &inner.cpu, follows))
    }
    /// KVM_SET_CPUID2. EINVAL for a width of virtual addresses that no CPU has, and, once the vCPU has run, for a table
    /// that differs from the present one.
    pub fn set_cpuid2(&self, entries: &[kvm_cpuid_entry2]) -> Result<()> {
        let inner = &mut *self.lock();
        let mut entries = entries.to_vec();
        cpuid::show_xen_clock(&mut entries, &inner.bus.tsc);
        let entries = &entries;
        if inner.has_run {
            let follows = inner.bus.cpuid_follows();
            let shown = |list| cpuid::shown(list, &inner.cpu, follows);
            return if shown(entries) == shown(&inner.bus.cpuid) {
                Ok(())
            } else {
                Err(Error::InvalidArgument)
            };
        }
        if !cpuid::is_possible(entries) {
            return Err(Error::InvalidArgument);
        }
        inner.bus.cpuid.clone_from(entries);
        inner.bus.hv.set_cpuid(entries);
        inner.cpu.features = cpuid::features(entries);
        let mut lapic = self.shared.lapic();
        let is_split = inner.bus.has_lapic() && !inner.bus.vm.has_pic();
        let config = cpuid::lapic_config(entries, &inner.cpu.features, is_split, *lapic.config());
        lapic.set_config(config);
        drop(lapic);
        inner.bus.lapic_changed();
        inner.bus.configure_counters(&mut inner.cpu);
        inner.interp.flush_all();
        if let Some(jit) = &mut inner.jit {
            jit.flush_all();
        }
        inner.reload();
        Ok(())
    }
    /// KVM_GET_VCPU_EVENTS.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        let mut inner = self.lock();
        inner.take_nmis();
        Ok(events::vcpu_events(&inner.cpu, &inner.bus.vm.options))
    }
    /// KVM_SET_VCPU_EVENTS. EINVAL for a state that no CPU can be in, and for SMM or an SMI after INIT.
    pub fn set_vcpu_events(&self, v: &kvm_vcpu_events) -> Result<()> {
        let inner = &mut *self.lock();
        let sets_smm = v.flags & KVM_VCPUEVENT_VALID_SMM != 0;
        if sets_smm
            && v.smi.smm | v.smi.pending != 0
            && inner.mp_state == KVM_MP_STATE_INIT_RECEIVED
        {
            return Err(Error::InvalidArgument);
        }
        let was_in_smm = inner.cpu.events.in_smm;
        events::set_vcpu_events(&mut inner.cpu, v, &inner.bus.vm.options)?;
        if inner.cpu.events.in_smm != was_in_smm {
            // SMM has an address space of its own.
            inner.reload();
        }
        Ok(())
    }
    /// KVM_GET_DEBUGREGS.
    pub fn get_debugregs(&self) -> Result<kvm_debugregs> {
        Ok(regs::debugregs(&self.lock().cpu))
    }
    /// KVM_SET_DEBUGREGS.
    pub fn set_debugregs(&self, r: &kvm_debugregs) -> Result<()> {
        regs::set_debugregs(&mut self.lock().cpu, r)
    }
    /// KVM_GET_XSAVE.
    pub fn get_xsave(&self) -> Result<kvm_xsave> {
        Ok(fpu::xsave(&self.lock().cpu))
    }
    /// KVM_SET_XSAVE.
    pub fn set_xsave(&self, x: &kvm_xsave) -> Result<()> {
        let inner = &mut *self.lock();
        fpu::set_xsave(&mut inner.cpu, x, cpuid::lacks_pkru(&inner.bus.cpuid))?;
        // PKRU, which is part of the state, selects the view.
        inner.bus.select_view(&mut inner.cpu);
        Ok(())
    }
    /// Size of [`Self::get_xsave2`]'s image in bytes.
    pub fn xsave2_size(&self) -> usize {
        fpu::XSAVE_SIZE
    }
    /// KVM_GET_XSAVE2: the image, 4096 bytes.
    pub fn get_xsave2(&self) -> Result<Vec<u8>> {
        Ok(fpu::xsave_image(&self.lock().cpu, fpu::XSAVE_SIZE))
    }
    /// KVM_GET_XCRS.
    pub fn get_xcrs(&self) -> Result<kvm_xcrs> {
        Ok(fpu::xcrs(&self.lock().cpu))
    }
    /// KVM_SET_XCRS.
    pub fn set_xcrs(&self, x: &kvm_xcrs) -> Result<()> {
        fpu::set_xcrs(&mut self.lock().cpu, x)
    }
    /// KVM_INTERRUPT. ENXIO if the PIC is in the kernel; with a split irqchip, EEXIST while another vector waits.
    pub fn interrupt(&self, vector: u32) -> Result<()> {
        let vector = u8::try_from(vector).map_err(|_| Error::InvalidArgument)?;
        let inner = &mut *self.lock();
        if inner.bus.vm.has_pic() {
            return Err(Error::NoSuchDevice);
        }
        if inner.bus.has_lapic() {
            if inner.bus.user_extint.is_some() {
                return Err(Error::Exists);
            }
            inner.bus.user_extint = Some(vector);
            inner.bus.is_quiet = false;
        } else {
            // As in KVM, a second interrupt replaces the first.
            inner.cpu.events.interrupt = Some(PendingInterrupt {
                vector,
                soft: false,
            });
        }
        Ok(())
    }
    /// KVM_NMI.
    pub fn nmi(&self) -> Result<()> {
        self.shared.queue_nmi();
        Ok(())
    }
    /// KVM_SMI.
    pub fn smi(&self) -> Result<()> {
        self.shared.request(request::SMI);
        Ok(())
    }
    /// KVM_ENABLE_CAP on the vCPU: KVM_CAP_ENFORCE_PV_FEATURE_CPUID, KVM_CAP_HYPERV_ENFORCE_CPUID and, with an
    /// in-kernel LAPIC, KVM_CAP_HYPERV_SYNIC and -SYNIC2. EINVAL for others.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        if cap.flags != 0 {
            return Err(Error::InvalidArgument);
        }
        let enforces = cap.args[0] != 0;
        match cap.cap {
            KVM_CAP_ENFORCE_PV_FEATURE_CPUID => self.lock().bus.enforces_pv = enforces,
            KVM_CAP_HYPERV_ENFORCE_CPUID => self.lock().bus.hv.set_enforces(enforces),
            KVM_CAP_HYPERV_SYNIC | KVM_CAP_HYPERV_SYNIC2 => {
                let keeps_pages = cap.cap == KVM_CAP_HYPERV_SYNIC2;
                return self.lock().bus.activate_synic(keeps_pages);
            }
            _ => return Err(Error::InvalidArgument),
        }
        Ok(())
    }
    /// KVM_VCPU_TSC_OFFSET: the number that is added to the host's TSC after scaling.
    pub fn tsc_offset(&self) -> Result<u64> {
        Ok(self.lock().bus.tsc.offset)
    }
    /// True if the VM has in-kernel LAPICs.
    pub fn has_lapic(&self) -> bool {
        self.lock().bus.has_lapic()
    }
    /// Sets KVM_VCPU_TSC_OFFSET.
    pub fn set_tsc_offset(&self, offset: u64) -> Result<()> {
        let inner = &mut *self.lock();
        inner.bus.tsc = inner.bus.vm.clock.set_offset(inner.bus.tsc, offset);
        inner.bus.update_clock();
        if inner.bus.has_lapic() {
            inner.bus.update_timer();
        }
        Ok(())
    }
    /// KVM_SET_GUEST_DEBUG. EBUSY if it injects an exception while another one waits.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<()> {
        if debug.control & !GUEST_DEBUG != 0 {
            return Err(Error::InvalidArgument);
        }
        let inner = &mut *self.lock();
        debug::set(&mut inner.cpu, &mut inner.bus, debug)?;
        // Software breakpoints are written into guest memory before this call.
        inner.may_have_new_code = true;
        Ok(())
    }
    /// KVM_TRANSLATE.
    pub fn translate(&self, gva: u64) -> Result<kvm_translation> {
        let inner = &mut *self.lock();
        inner.bus.sync_memory();
        // KVM shows an address without a translation as all ones.
        let gpa = inner
            .bus
            .mmu
            .translate_debug(&inner.cpu, gva)
            .filter(|gpa| *gpa != u64::MAX);
        Ok(kvm_translation {
            linear_address: gva,
            physical_address: gpa.unwrap_or(u64::MAX),
            valid: gpa.is_some().into(),
            writeable: 1,
            usermode: 0,
            ..Default::default()
        })
    }
    /// KVM_GET_TSC_KHZ.
    pub fn tsc_khz(&self) -> Result<u32> {
        Ok(self.lock().bus.tsc.khz)
    }
    /// KVM_SET_TSC_KHZ.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let inner = &mut *self.lock();
        inner.bus.tsc = clock::rescale(inner.bus.tsc, khz)?;
        cpuid::show_xen_clock(&mut inner.bus.cpuid, &inner.bus.tsc);
        inner.bus.update_clock();
        Ok(())
    }
    /// KVM_SET_VAPIC_ADDR: the address of the word with the guest's task priority, or 0. EINVAL without an in-kernel
    /// LAPIC, or if the address is no memory.
    pub fn set_vapic_addr(&self, gpa: u64) -> Result<()> {
        self.lock().bus.set_vapic_addr(gpa)
    }
    /// KVM_TPR_ACCESS_REPORTING: makes accesses to the in-kernel LAPIC's task priority exits.
    pub fn set_tpr_access_reporting(&self, enabled: bool) {
        self.lock().bus.set_reports_tpr(enabled);
    }
    /// KVM_PRE_FAULT_MEMORY of one page: has the host make it present. ENOENT without a memslot, EFAULT if the VMM has
    /// not mapped it.
    pub fn pre_fault(&self, gpa: u64) -> Result<()> {
        let inner = &mut *self.lock();
        let table = inner.bus.vm.memory.table();
        let space = usize::from(inner.cpu.events.in_smm);
        let slot = table.lookup(space, gpa).ok_or(Error::NotFound)?;
        slot.host_page(gpa).map(drop).ok_or(Error::Fault)
    }
    /// KVM_KVMCLOCK_CTRL. EINVAL before the guest has set up kvmclock.
    pub fn kvmclock_ctrl(&self) -> Result<()> {
        let inner = &mut *self.lock();
        if inner.bus.pv.system_time & 1 == 0 {
            return Err(Error::InvalidArgument);
        }
        inner.bus.pv.guest_stopped = true;
        inner.bus.update_clock();
        Ok(())
    }
    /// Reads guest memory at a gva, as a debugger does.
    pub fn read_gva(&self, gva: u64, buf: &mut [u8]) -> Result<()> {
        let inner = &mut *self.lock();
        inner.bus.sync_memory();
        inner
            .bus
            .mmu
            .read_bytes(&mut inner.cpu, gva, buf, Privilege::System)
            .map_err(|_| Error::Fault)
    }
}

impl Inner {
    /// The common part of KVM_SET_SREGS and KVM_SET_SREGS2.
    fn set_sregs(&mut self, r: &kvm_sregs) -> Result<()> {
        // Before KVM_SET_CPUID2, any CR4 is accepted that some table allows.
        let features = if self.bus.cpuid.is_empty() {
            cpuid::features(&crate::system::supported_cpuid())
        } else {
            self.cpu.features
        };
        regs::check_sregs(&features, r)?;
        // APIC_BASE comes first, because the LAPIC's mode decides what its registers mean.
        if !self.bus.set_apic_base(&self.cpu, r.apic_base, true) {
            return Err(Error::InvalidArgument);
        }
        regs::set_sregs(&mut self.cpu, r);
        self.bus
            .set_task_priority(&mut self.cpu, (r.cr8 & 0xf) as u8);
        self.bus.tpr_lowered = false;
        self.reload();
        Ok(())
    }
    /// Reloads what depends on registers that the VMM has replaced.
    fn reload(&mut self) {
        self.bus.sync_memory();
        // If the PDPTEs are invalid, the old ones stay, as in KVM.
        if self.bus.load_root(&mut self.cpu).is_err() {
            self.bus.mmu.set_root(&self.cpu);
        }
        self.bus.flush(&mut self.cpu, Flush::All);
        self.bus.select_view(&mut self.cpu);
    }
}
