//! KVM_IRQFD: eventfds that raise a GSI, and the thread that waits for them.
//!
//! The thread starts with the first vCPU. VMMs that fork processes for devices before that check that they have only
//! one thread, and later a system call filter may forbid to make threads. A signal that comes before the thread exists
//! waits in the eventfd.
//!
//! An irqfd ends when its eventfd does, so no descriptor that the thread waits on may keep the eventfd alive. An epoll
//! set does not: it refers to the VMM's own descriptor, and the entry vanishes with the eventfd's last descriptor in
//! any process. But taking the counter needs a descriptor. anykvm's own one is closed as soon as the VMM has closed its
//! own ([`Irqfds::sweep`]).
//!
//! If writes of the VMM's are intercepted before they reach the kernel, the writer delivers ([`direct`]).
//!
//! Lock order: an irqfd's gate, then the irqchip, then the list.

use std::{
    collections::BTreeMap,
    os::fd::AsRawFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use host::{
    EventFd,
    poll::{Epoll, Trigger},
};
use irqchip::line::source;
use kvm_bindings::{KVM_IRQFD_FLAG_DEASSIGN, KVM_IRQFD_FLAG_RESAMPLE, kvm_irqfd};

pub mod direct;

use super::{Vm, VmState, work::WorkQueue};
use crate::{
    Error, Result,
    bell::{Identity, not_an_eventfd},
};

/// Epoll token of the eventfd that tells the thread that the VM is gone.
const CONTROL: u64 = 0;
/// Interval of checks whether the VMM has closed an eventfd.
const SWEEP: Duration = Duration::from_secs(1);

/// An eventfd that raises a GSI.
#[derive(Debug)]
struct Irqfd {
    gsi: u32,
    id: Identity,
    /// The VMM's descriptor, which is in the epoll set under this token.
    fd: i32,
    token: u64,
    /// Signalled at EOI. The GSI then follows a level-triggered line.
    resample: Option<EventFd>,
    gate: Mutex<Gate>,
}

/// State that is locked while an interrupt is delivered.
#[derive(Debug)]
struct Gate {
    is_open: bool,
    /// anykvm's own descriptor of the eventfd, while the VMM has one.
    event: Option<EventFd>,
    /// Reading the eventfd may block.
    blocks: bool,
}

/// A VM's irqfds, and the thread that waits for them.
#[derive(Debug, Default)]
pub(super) struct Irqfds {
    list: Mutex<List>,
    waiting: Mutex<Option<Waiting>>,
    work_queue: WorkQueue,
}

#[derive(Debug, Default)]
struct List {
    /// The irqfds by token.
    irqfds: Vec<Arc<Irqfd>>,
    last_token: u64,
}

#[derive(Debug)]
struct Waiting {
    set: Arc<Epoll>,
    control: EventFd,
    /// [`host::fork::generation`] of the process that has the thread, if there is one.
    thread: Option<u32>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Irqfd {
    /// Raises the GSI if the eventfd was signalled.
    fn deliver(&self, vm: &VmState) {
        let gate = locked(&self.gate);
        if gate.is_open {
            self.deliver_through(&gate, vm);
        }
    }

    fn deliver_through(&self, gate: &Gate, vm: &VmState) {
        // If only other processes have descriptors left, the counter cannot be taken. Each signal still wakes the
        // thread.
        let is_signalled = match &gate.event {
            Some(event) if gate.blocks => matches!(event.take_now(), Ok(Some(_))),
            Some(event) => matches!(event.take(), Ok(Some(_))),
            None => true,
        };
        if is_signalled {
            vm.raise(self.gsi, self.resample.is_some());
        }
    }

    /// Raises the GSI for a write that the kernel has not seen. False if the irqfd is closed.
    fn inject(&self, vm: &VmState) -> bool {
        let gate = locked(&self.gate);
        if gate.is_open {
            vm.raise(self.gsi, self.resample.is_some());
        }
        gate.is_open
    }

    fn is_open(&self) -> bool {
        locked(&self.gate).is_open
    }

    /// Ends the irqfd: delivers what was signalled before, and nothing afterwards.
    fn close(&self, vm: &VmState) {
        let mut gate = locked(&self.gate);
        if gate.is_open && gate.event.is_some() {
            self.deliver_through(&gate, vm);
        }
        gate.is_open = false;
        gate.event = None;
    }
}

/// A handle by which a device in this process raises a GSI without an eventfd.
#[derive(Clone, Debug)]
pub struct IrqTrigger {
    vm: Arc<Vm>,
    gsi: u32,
}

impl IrqTrigger {
    /// Raises one edge, or sends one message, as a write to an irqfd does. May be called on any thread.
    pub fn trigger(&self) {
        self.vm.state.raise(self.gsi, false);
    }
}

impl Vm {
    /// Returns a handle by which a device in this process raises the GSI. EINVAL without in-kernel LAPICs.
    pub fn irq_trigger(self: &Arc<Self>, gsi: u32) -> Result<IrqTrigger> {
        if self.state.chips().is_none() {
            return Err(Error::InvalidArgument);
        }
        Ok(IrqTrigger {
            vm: Arc::clone(self),
            gsi,
        })
    }

    /// KVM_IRQFD. EBADF or EINVAL for what is no eventfd, EMFILE if the process has all the descriptors that it may have,
    /// EINVAL for unknown flags and without chips, EBUSY if the eventfd is in use already, by this or another VM. When an irqfd is removed, what was signalled before is
    /// delivered, and nothing afterwards.
    pub fn irqfd(&self, args: &kvm_irqfd) -> Result<()> {
        let args = *args;
        self.state.on_worker(move |state| state.irqfd(&args))
    }
}

impl VmState {
    fn irqfd(self: &Arc<Self>, args: &kvm_irqfd) -> Result<()> {
        let known = KVM_IRQFD_FLAG_DEASSIGN | KVM_IRQFD_FLAG_RESAMPLE;
        if args.flags & !known != 0 {
            return Err(Error::InvalidArgument);
        }
        let open = |fd: u32| EventFd::duplicate(fd as i32).map_err(not_an_eventfd);
        if args.flags & KVM_IRQFD_FLAG_DEASSIGN != 0 {
            let event = open(args.fd)?;
            self.remove_irqfd(Identity::of(&event, args.fd as i32), args.gsi);
            return Ok(());
        }
        // Resampling needs the IOAPIC in the kernel, because only there an EOI is known to have come.
        let is_resampled = args.flags & KVM_IRQFD_FLAG_RESAMPLE != 0;
        let has_chip = if is_resampled {
            self.has_pic()
        } else {
            self.chips().is_some()
        };
        if !has_chip {
            return Err(Error::InvalidArgument);
        }
        let event = open(args.fd)?;
        let resample = is_resampled.then(|| open(args.resamplefd)).transpose()?;
        let irqfds = &self.irqfds;
        irqfds.sweep();
        let id = Identity::of(&event, args.fd as i32);
        // Checked before the list is locked, because it takes the gates of other VMs' irqfds.
        let is_anothers = direct::is_anothers(self, id);
        let mut list = locked(&irqfds.list);
        if is_anothers || list.irqfds.iter().any(|i| i.id.is(id)) {
            return Err(Error::Busy);
        }
        let set = self.irqfd_set()?;
        list.last_token += 1;
        let irqfd = Arc::new(Irqfd {
            gsi: args.gsi,
            id,
            fd: args.fd as i32,
            token: list.last_token,
            resample,
            gate: Mutex::new(Gate {
                is_open: true,
                blocks: event.blocks(),
                event: Some(event),
            }),
        });
        list.irqfds.push(Arc::clone(&irqfd));
        // An earlier signal counts: an entry that is ready when it is added is reported.
        let added = set.add(irqfd.fd, irqfd.token, Trigger::Edge);
        let is_same = || open(args.fd).is_ok_and(|now| Identity::of(&now, irqfd.fd).is(id));
        if added.is_err() || !is_same() {
            // The VMM has meanwhile closed the descriptor, or made it another file, which may be the one that was added.
            if added.is_ok() {
                let _ = set.remove(irqfd.fd);
            }
            list.irqfds.pop();
            return Err(Error::BadFd);
        }
        direct::insert(self, &irqfd);
        Ok(())
    }

    fn remove_irqfd(&self, id: Identity, gsi: u32) {
        let irqfds = &self.irqfds;
        let mut removed = Vec::new();
        let mut list = locked(&irqfds.list);
        list.irqfds.retain(|i| {
            let is_meant = i.id.is(id) && i.gsi == gsi;
            if is_meant {
                // In the same critical section: who assigns the eventfd anew may not find its entry. If the VMM refers to
                // the eventfd by another number now, the entry vanishes with the eventfd.
                let _ = irqfds.set().map(|set| set.remove(i.fd));
                removed.push(Arc::clone(i));
            }
            !is_meant
        });
        drop(list);
        for irqfd in removed {
            direct::remove(&irqfd);
            irqfd.close(self);
        }
    }
}

impl Irqfds {
    /// True if this process has the thread.
    pub(super) fn has_thread(&self) -> bool {
        let waiting = locked(&self.waiting);
        let thread = waiting.as_ref().and_then(|w| w.thread);
        thread.is_some_and(|of| of == host::fork::generation())
    }

    pub(super) fn work_queue(&self) -> &WorkQueue {
        &self.work_queue
    }

    /// Ends the thread, because the VM is gone.
    pub(super) fn end(&self) {
        if self.has_thread() {
            self.tell();
        } else {
            // There never was a vCPU, so there is no thread.
            direct::forget_dead();
        }
    }

    /// Has the thread check for work and for the end of the VM.
    pub(super) fn tell(&self) {
        if let Some(waiting) = &*locked(&self.waiting) {
            let _ = waiting.control.signal(1);
        }
    }

    fn set(&self) -> Option<Arc<Epoll>> {
        locked(&self.waiting).as_ref().map(|w| Arc::clone(&w.set))
    }

    /// Closes anykvm's descriptors of eventfds that the VMM has closed, and removes the irqfds whose eventfds have no
    /// descriptor left anywhere.
    fn sweep(&self) {
        let Some(set) = self.set() else { return };
        let irqfds = locked(&self.list).irqfds.clone();
        // Which irqfd a number belongs to: the last one, if the VMM has given it to several eventfds. Not a HashMap: it asks
        // for random numbers, which a filter may forbid.
        let owners: BTreeMap<i32, u64> = irqfds.iter().map(|i| (i.fd, i.token)).collect();
        let mut orphans = Vec::new();
        for irqfd in irqfds {
            // The set identifies an entry by file and number: another file with the same number is another entry.
            let is_owner = owners.get(&irqfd.fd) == Some(&irqfd.token);
            if !is_owner || set.renew(irqfd.fd, irqfd.token, Trigger::Edge).is_err() {
                direct::remove(&irqfd);
                locked(&irqfd.gate).event = None;
                orphans.push(irqfd.token);
            }
        }
        if orphans.is_empty() {
            return;
        }
        // Descriptors elsewhere, for instance in another process, keep the entry in the set.
        let Some(left) = set.tokens() else { return };
        locked(&self.list)
            .irqfds
            .retain(|i| !orphans.contains(&i.token) || left.contains(&i.token));
    }
}

impl VmState {
    /// Raises a device's edge or, with `is_resampled`, its level until the EOI.
    fn raise(&self, gsi: u32, is_resampled: bool) {
        self.note_device_event();
        self.with_routing(|chip, lapics| {
            if is_resampled {
                chip.set_gsi(lapics, gsi, source::RESAMPLE, true)
            } else {
                chip.pulse_gsi(lapics, gsi, source::USERSPACE)
            }
        });
    }

    /// Signals the resample eventfds of a GSI whose level-triggered interrupt has ended.
    pub(crate) fn resample(&self, gsi: u32) {
        let list = locked(&self.irqfds.list);
        for irqfd in list.irqfds.iter().filter(|i| i.gsi == gsi) {
            if let Some(resample) = &irqfd.resample {
                // A full counter already tells the device, and waiting for room would hold up the vCPU.
                if !resample.blocks() || resample.has_room() {
                    let _ = resample.signal(1);
                }
            }
        }
    }

    /// Returns the set that the thread waits on. Starts the thread if there is a vCPU.
    pub(super) fn irqfd_set(self: &Arc<Self>) -> Result<Arc<Epoll>> {
        let mut waiting = locked(&self.irqfds.waiting);
        let waiting = match &mut *waiting {
            Some(waiting) => waiting,
            none => none.insert(Waiting::new().map_err(|_| Error::NoMemory)?),
        };
        // Decided under the lock: the thread that adds the first vCPU takes it afterwards.
        if !self.vcpus().is_empty() {
            waiting.start(self)?;
        }
        Ok(Arc::clone(&waiting.set))
    }

    /// Starts the thread for the irqfds that exist, because there is a vCPU now.
    pub(super) fn start_irqfd_thread(self: &Arc<Self>) -> Result<()> {
        match &mut *locked(&self.irqfds.waiting) {
            Some(waiting) => waiting.start(self),
            None => Ok(()),
        }
    }
}

impl Waiting {
    fn new() -> std::io::Result<Self> {
        let set = Arc::new(Epoll::new()?);
        let control = EventFd::new(0)?;
        set.add(control.as_raw_fd(), CONTROL, Trigger::Level)?;
        Ok(Self {
            set,
            control,
            thread: None,
        })
    }

    fn start(&mut self, vm: &Arc<VmState>) -> Result<()> {
        if self.thread.is_some() {
            return Ok(());
        }
        let no_memory = |_| Error::NoMemory;
        let set = Arc::clone(&self.set);
        let control = self.control.try_clone().map_err(no_memory)?;
        let vm = Arc::downgrade(vm);
        let wait = move || wait_for_irqfds(&vm, &set, &control);
        host::thread::start("anykvm-irqfd", wait).map_err(no_memory)?;
        self.thread = Some(host::fork::generation());
        Ok(())
    }
}

/// Body of the thread: raises the GSI of each signalled irqfd until the VM is gone.
fn wait_for_irqfds(vm: &Weak<VmState>, set: &Epoll, control: &EventFd) {
    let mut tokens = Vec::new();
    let mut swept_ns = host::clock::monotonic_ns();
    loop {
        // A signal makes it fail. The timeout covers a VMM that closes descriptors which are not its own, among them
        // the one that announces the end.
        let _ = set.wait(&mut tokens, Some(SWEEP));
        if tokens.contains(&CONTROL) {
            let _ = control.take();
        }
        let Some(vm) = vm.upgrade() else {
            direct::forget_dead();
            return;
        };
        vm.irqfds.work_queue.run(&vm);
        for token in &tokens {
            let irqfd = {
                let list = locked(&vm.irqfds.list);
                let at = list.irqfds.binary_search_by_key(token, |i| i.token);
                at.ok().and_then(|at| list.irqfds.get(at).cloned())
            };
            if let Some(irqfd) = irqfd {
                irqfd.deliver(&vm);
            }
        }
        let now = host::clock::monotonic_ns();
        if now.saturating_sub(swept_ns) >= SWEEP.as_nanos() as u64 {
            swept_ns = now;
            vm.irqfds.sweep();
        }
    }
}
