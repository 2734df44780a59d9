//! A virtual machine: memory, clock and the vCPUs that share them.

mod address_spaces;
pub(crate) mod chips;
pub(crate) mod clock;
pub(crate) mod coalesced;
mod debugger;
mod dirty_log;
mod dirty_ring;
pub(crate) mod doorbell;
pub(crate) mod hyperv;
mod irq;
mod irqfd;
pub(crate) mod load;
pub(crate) mod options;
mod pvclock;
mod work;
pub(crate) mod xen;

pub use doorbell::Doorbell;
pub use irqfd::{IrqTrigger, direct as irqfd_direct};
pub use options::{EventFilter, MsrRange};
pub use xen::{XEN_PRIORITY, XenAttr, XenPort};

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use guest_memory::{GuestMemory, HostChange, MemslotError, SlotConfig};
use host::ServiceThread;
use io_bus::{Published, Reader};
use kvm_bindings::*;
use mmu::Mmu;

use self::{chips::Chips, clock::VmClock, coalesced::Ring, irqfd::Irqfds, options::Options};
use crate::{
    EngineOptions, Error, Result,
    bell::{Bell, IoTable},
    limits::MAX_VCPUS,
    shared::{VcpuShared, request},
    sink::{Sink, StatKind, StatsSink},
};

/// What a VM's vCPUs share.
#[derive(Debug)]
pub(crate) struct VmState {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) clock: VmClock,
    vcpus: RwLock<Vec<Arc<VcpuShared>>>,
    chips: OnceLock<Chips>,
    irqfds: Irqfds,
    /// Those of eventfds: one for each eventfd, however many doorbells it has.
    bells: Mutex<Vec<Weak<Bell>>>,
    boot_id: AtomicU32,
    /// Times that vCPUs were asked to drop translations.
    flush_requests: AtomicU64,
    stats: OnceLock<Sink>,
    pub(crate) load: load::Load,
    /// Interrupts of devices outside: guest memory may have been written before each.
    pub(crate) device_events: AtomicU64,
    /// A LAPIC has, or had, another id than its vCPU.
    has_renumbered: AtomicBool,
    pub(crate) options: Options,
    pub(crate) io: Arc<Published<IoTable>>,
    /// There is, or was, a doorbell or a coalesced zone.
    pub(crate) has_io: AtomicBool,
    pub(crate) ring: Ring,
    /// Makes system calls for the vCPUs' threads.
    pub(crate) service_thread: Arc<ServiceThread>,
    pub(crate) hyperv: hyperv::HyperV,
    pub(crate) xen: xen::Xen,
    /// How vCPUs execute.
    pub(crate) engine: EngineOptions,
}

/// Where a GSI goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteTarget {
    /// KVM_IRQ_ROUTING_IRQCHIP.
    Irqchip {
        /// KVM_IRQCHIP_PIC_MASTER, _PIC_SLAVE or _IOAPIC.
        chip: u32,
        /// Pin.
        pin: u32,
    },
    /// KVM_IRQ_ROUTING_MSI.
    Msi {
        /// Message address, upper half included.
        address: u64,
        /// Message data.
        data: u32,
    },
    /// KVM_IRQ_ROUTING_HV_SINT.
    HvSint {
        /// HV_X64_MSR_VP_INDEX of the vCPU.
        vp: u32,
        /// Its synthetic source.
        sint: u32,
    },
    /// KVM_IRQ_ROUTING_XEN_EVTCHN.
    XenEvent {
        /// Id of the vCPU.
        vcpu: u32,
        /// Port.
        port: u32,
    },
}

/// One entry of KVM_SET_GSI_ROUTING.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// GSI.
    pub gsi: u32,
    /// Target.
    pub target: RouteTarget,
}

/// A virtual machine.
#[derive(Debug)]
pub struct Vm {
    state: Arc<VmState>,
}

impl From<MemslotError> for Error {
    fn from(e: MemslotError) -> Self {
        match e {
            MemslotError::Overlap(_) => Self::Exists,
            MemslotError::NotFound(_) => Self::NotFound,
            MemslotError::NoMemory => Self::NoMemory,
            _ => Self::InvalidArgument,
        }
    }
}

impl Vm {
    /// What its vCPUs share.
    pub(crate) fn state(&self) -> &Arc<VmState> {
        &self.state
    }
    /// KVM_CREATE_VM.
    pub fn new(engine: EngineOptions) -> Result<Arc<Self>> {
        let state = VmState {
            memory: address_spaces::new_memory(engine.harvest),
            clock: VmClock::new(),
            vcpus: RwLock::default(),
            chips: OnceLock::new(),
            irqfds: Irqfds::default(),
            bells: Mutex::default(),
            boot_id: AtomicU32::new(0),
            flush_requests: AtomicU64::new(0),
            stats: OnceLock::new(),
            load: load::Load::default(),
            device_events: AtomicU64::new(0),
            has_renumbered: AtomicBool::new(false),
            options: Options::new(engine.mmu_pages),
            io: Arc::new(Published::new(IoTable::default())),
            has_io: AtomicBool::new(false),
            ring: Ring::default(),
            service_thread: Arc::default(),
            hyperv: hyperv::HyperV::default(),
            xen: xen::Xen::default(),
            engine,
        };
        Ok(Arc::new(Self {
            state: Arc::new(state),
        }))
    }
    /// KVM_CHECK_EXTENSION on the VM.
    pub fn check_extension(&self, cap: u32) -> i32 {
        match cap {
            // What the VMM has set.
            KVM_CAP_X86_APIC_BUS_CYCLES_NS => self.state.options.apic_tick_ns() as i32,
            _ => crate::system::check_extension(cap),
        }
    }
    /// KVM_SET_USER_MEMORY_REGION. Returns when no vCPU uses the old slot any more.
    ///
    /// The VMM owns the memory at `userspace_addr`; what it does to it while the slot exists, it says before: [`Self::begin_host_change`].
    pub fn set_user_memory_region(&self, region: &kvm_userspace_memory_region) -> Result<()> {
        let epoch = self.state.memory.set_slot(SlotConfig {
            slot: region.slot,
            flags: region.flags,
            gpa: region.guest_phys_addr,
            size: region.memory_size,
            hva: region.userspace_addr,
        })?;
        self.state.wait_for_memory(epoch);
        Ok(())
    }
    /// The VMM is about to change what the process can access between two host addresses: mprotect(2), munmap(2) and the like. When
    /// this returns no vCPU accesses that memory; an access waits for the drop of what it returns, and then asks for the page again: one
    /// that is not allowed makes KVM_RUN give EFAULT. `None` if nothing of it is under a slot.
    pub fn begin_host_change(&self, start: u64, end: u64) -> Result<Option<HostChange>> {
        // Looks at vCPUs before a change that some thread waits for begins anew, about 50 µs apart. They become more, as a
        // vCPU that is only preempted is worth a longer wait.
        let mut patience = 4;
        while let Some(change) = self.state.memory.begin_host_change(start, end)? {
            if self.state.wait_for_host_change(&change, patience) {
                return Ok(Some(change));
            }
            patience = (2 * patience).min(16);
        }
        Ok(None)
    }
    /// The VMM has mapped all of the slot's memory, to be read and written, and keeps it while the slot
    /// exists, which it need not be asked for then.
    pub fn set_mapped(&self, slot: u32) {
        self.state.memory.set_mapped(slot);
    }
    /// KVM_SET_TSS_ADDR: three pages that Intel's hardware needs and a software
    /// CPU does not; the range is checked as KVM checks it.
    pub fn set_tss_addr(&self, gpa: u64) -> Result<()> {
        if gpa > (1 << 32) - 3 * 4096 {
            Err(Error::InvalidArgument)
        } else {
            Ok(())
        }
    }
    /// KVM_SET_IDENTITY_MAP_ADDR: as with the TSS address, nothing is placed
    /// there; EINVAL once there are vCPUs.
    pub fn set_identity_map_addr(&self, _gpa: u64) -> Result<()> {
        if self.state.vcpus().is_empty() {
            Ok(())
        } else {
            Err(Error::InvalidArgument)
        }
    }
    /// KVM_SET_BOOT_CPU_ID: EBUSY once there are vCPUs, EINVAL above KVM_CAP_MAX_VCPU_ID.
    pub fn set_boot_cpu_id(&self, id: u32) -> Result<()> {
        // The lock keeps vCPUs from appearing meanwhile.
        let vcpus = self.state.vcpus();
        if !vcpus.is_empty() {
            return Err(Error::Busy);
        }
        if id > self.state.options.vcpu_id_limit() {
            return Err(Error::InvalidArgument);
        }
        self.state.boot_id.store(id, Ordering::Relaxed);
        Ok(())
    }
    /// Where the statistics go from now on; the first sink stays.
    pub fn set_stats_sink(&self, sink: Box<dyn StatsSink>) {
        let _ = self.state.stats.set(Sink::new(sink));
        self.state.show_stats();
    }
    /// KVM_GET_CLOCK.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        Ok(self.state.clock.get())
    }
    /// KVM_SET_CLOCK.
    pub fn set_clock(&self, clock: &kvm_clock_data) -> Result<()> {
        self.state.clock.set(clock)?;
        self.state.request_all(request::CLOCK);
        Ok(())
    }
    /// KVM_SET_TSC_KHZ on the VM: the frequency of vCPUs created later.
    pub fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        self.state.clock.set_default_khz(khz)
    }
    /// KVM_GET_TSC_KHZ on the VM.
    pub fn tsc_khz(&self) -> Result<u32> {
        Ok(self.state.clock.default_tsc().khz)
    }
}

impl Drop for VmState {
    fn drop(&mut self) {
        // Ends the irqfd thread; without one there is nobody to tell.
        self.irqfds.end();
    }
}

/// Statistics of a VM, as KVM_GET_STATS_FD shows them.
pub const VM_STATS: &[(&str, StatKind)] = &[("remote_tlb_flush_requests", StatKind::Count)];

impl VmState {
    /// What a new vCPU shares with the others, and its MMU: EEXIST for an id in use, EINVAL for one from
    /// KVM_CAP_MAX_VCPU_ID on, and with more than KVM_CAP_MAX_VCPUS.
    pub(crate) fn add_vcpu(self: &Arc<Self>, id: u32) -> Result<(Arc<VcpuShared>, Mmu)> {
        if id >= self.options.vcpu_id_limit() {
            return Err(Error::InvalidArgument);
        }
        let mut vcpus = self.vcpus.write().unwrap_or_else(PoisonError::into_inner);
        if vcpus.len() >= MAX_VCPUS as usize {
            return Err(Error::InvalidArgument);
        }
        if vcpus.iter().any(|v| v.id == id) {
            return Err(Error::Exists);
        }
        let mmu = self.new_mmu(vcpus.len() + 1);
        let shared = Arc::new(VcpuShared::new(
            id,
            id == self.boot_id.load(Ordering::Relaxed),
            vcpus.len(),
            mmu.mailbox(),
            self.options.lapic(),
            Reader::new(Arc::clone(&self.io)),
        ));
        if self.mmu_pages_of_vcpu(1).is_some() {
            vcpus.iter().for_each(|v| v.request(request::MMU_PAGES));
        }
        vcpus.push(Arc::clone(&shared));
        // Whoever starts the thread may ask for the vCPUs.
        drop(vcpus);
        self.start_irqfd_thread().inspect_err(|_| {
            // As if it had never been, unless another has come after it.
            let mut vcpus = self.vcpus.write().unwrap_or_else(PoisonError::into_inner);
            if vcpus.last().is_some_and(|last| Arc::ptr_eq(last, &shared)) {
                vcpus.pop();
            }
        })?;
        Ok((shared, mmu))
    }
    fn show_stats(&self) {
        if let Some(sink) = self.stats.get() {
            sink.store(&[self.flush_requests.load(Ordering::Relaxed)]);
        }
    }
    /// The in-kernel chips, if KVM_CREATE_IRQCHIP was called.
    #[inline]
    pub(crate) fn chips(&self) -> Option<&Chips> {
        self.chips.get()
    }
    /// The vCPUs in order of creation.
    pub(crate) fn vcpus(&self) -> RwLockReadGuard<'_, Vec<Arc<VcpuShared>>> {
        self.vcpus.read().unwrap_or_else(PoisonError::into_inner)
    }
    /// Asks the same of every vCPU.
    pub(crate) fn request_all(&self, bits: u32) {
        for vcpu in self.vcpus().iter() {
            vcpu.request(bits);
        }
    }
    /// Waits until no vCPU uses memory state older than `epoch`; vCPUs that are
    /// not running are not waited for.
    fn wait_for_memory(&self, epoch: u64) {
        self.flush_requests.fetch_add(1, Ordering::Relaxed);
        self.show_stats();
        self.request_all(request::MEMORY);
        let vcpus: Vec<_> = self.vcpus().clone();
        for vcpu in vcpus {
            while !vcpu.has_acknowledged(epoch) {
                host::thread::yield_now();
            }
        }
    }
}
