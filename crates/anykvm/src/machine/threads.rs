//! The machine's threads: one for each vCPU, one for the input, and one for the signals that end us.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{VcpuFd, VcpuStopper};

use crate::devices::Devices;
use crate::ending::Ending;
use crate::error::BootError;
use crate::input::{self, Destination, Source};
use crate::lock::lock;
use crate::vcpu::{Gate, Surroundings};
use crate::{setup, terminal, vcpu};

/// How long the vCPUs may take to leave the guest.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Index of the serial port by which the guest's init talks to us: COM4.
const CONTROL: usize = 3;
/// How often halted vCPUs are looked at.
const HALT_LOOK: Duration = Duration::from_millis(100);

/// Statistics of a vCPU, by name.
pub(super) type Stats = Vec<(&'static str, u64)>;

/// Address space for all that this process allocates while vCPUs are confined, and what a host that commits memory for it
/// has to have at least.
const HEAP: usize = 16 << 30;
const LEAST_HEAP: usize = 4 << 30;

/// The running vCPU threads.
pub(super) struct Vcpus {
    /// The stopper of each vCPU, and the channel by which its statistics come when it has left the guest.
    threads: Vec<(VcpuStopper, Receiver<Stats>)>,
    is_ending: Arc<AtomicBool>,
    /// True if the threads may make almost no system calls.
    is_confined: bool,
    /// True if a vCPU prints its statistics when the guest asks for them.
    shows_stats: bool,
    halt: Arc<Halt>,
    /// Where vCPUs wait while the machine is paused or leaves.
    gate: Arc<Gate>,
    /// MSRs that vCPUs may have.
    msrs: Arc<[u32]>,
}

/// Finds out whether all vCPUs have halted for good, that is with interrupts off. It only looks after the guest's
/// kernel has said that it halts.
#[derive(Default)]
pub(super) struct Halt {
    /// True if the kernel has said that it halts.
    is_announced: AtomicBool,
    vcpus: Mutex<Vec<(VcpuStopper, bool)>>,
}

impl Halt {
    /// Notes that the kernel says that it halts. A vCPU's thread calls this, so it does nothing else.
    pub(super) fn announce(&self) {
        self.is_announced.store(true, Ordering::Release);
    }

    /// Has each vCPU report, again and again, once the kernel has said that it halts.
    fn watch(self: Arc<Self>) {
        loop {
            thread::sleep(HALT_LOOK);
            if self.is_announced.load(Ordering::Acquire) {
                for (stopper, _) in lock(&self.vcpus).iter() {
                    stopper.kick();
                }
            }
        }
    }

    /// Notes whether vCPU `id`, which has left the guest, has halted for good. Returns true if all have.
    fn report(&self, id: u8, has_halted: bool) -> bool {
        if !self.is_announced.load(Ordering::Acquire) {
            return false;
        }
        let mut vcpus = lock(&self.vcpus);
        if let Some((_, halted)) = vcpus.get_mut(usize::from(id)) {
            *halted = has_halted;
        }
        vcpus.iter().all(|(_, halted)| *halted)
    }
}

impl Vcpus {
    /// Makes the set without any vCPU.
    pub(super) fn new(
        is_confined: bool,
        shows_stats: bool,
        halt: Arc<Halt>,
        msrs: Vec<u32>,
    ) -> Result<Self, BootError> {
        if is_confined {
            let reserved = host::allocator::reserve(HEAP);
            let reserved = reserved.or_else(|_| host::allocator::reserve(LEAST_HEAP));
            reserved.map_err(BootError::host("cannot reserve memory"))?;
        }
        Ok(Self {
            threads: Vec::new(),
            is_ending: Arc::default(),
            is_confined,
            // Confined vCPUs cannot print, as that takes a system call.
            shows_stats: shows_stats && !is_confined,
            halt,
            gate: Arc::default(),
            msrs: msrs.into(),
        })
    }

    /// Returns the gate at which vCPUs wait.
    pub(super) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Starts the thread of vCPU `id`.
    pub(super) fn start(
        &mut self,
        vcpu: VcpuFd,
        id: u8,
        devices: &Arc<Devices>,
        endings: &Sender<Ending>,
    ) -> Result<(), BootError> {
        let stopper = vcpu.stopper().map_err(BootError::kvm("KVM_RUN"))?;
        let devices = Arc::clone(devices);
        let endings = endings.clone();
        let is_ending = Arc::clone(&self.is_ending);
        let (is_confined, shows_stats) = (self.is_confined, self.shows_stats);
        let halt = Arc::clone(&self.halt);
        let (gate, msrs) = (Arc::clone(&self.gate), Arc::clone(&self.msrs));
        gate.add(stopper.clone());
        lock(&halt.vcpus).push((vcpu.stopper().map_err(BootError::kvm("KVM_RUN"))?, false));
        if id == 0 {
            let halt = Arc::clone(&halt);
            thread::Builder::new()
                .name("halt".into())
                .spawn(move || halt.watch())
                .map_err(BootError::host("cannot start a thread"))?;
        }
        let (give_stats, stats) = sync_channel(1);
        thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                let mut vcpu = vcpu;
                let run = || {
                    if is_confined && let Err(error) = host::confine::confine() {
                        let failed = BootError::host("cannot confine a vCPU's thread")(error);
                        return Some(Ending::Failed(failed));
                    }
                    let report = |has_halted| halt.report(id, has_halted);
                    let around = Surroundings {
                        devices: &devices,
                        shows_stats,
                        is_ending: &is_ending,
                        report: &report,
                        gate: &gate,
                        msrs: &msrs,
                    };
                    vcpu::run(&mut vcpu, id, &around)
                };
                let ending = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
                    Some(Ending::Failed(BootError::VcpuStopped {
                        id,
                        reason: "its thread panicked".into(),
                        rip: 0,
                    }))
                });
                if let Some(ending) = ending {
                    send(&endings, ending);
                }
                let stats = vcpu.statistics().unwrap_or_default();
                if !is_confined {
                    // The vCPU is dropped first, so that what it prints at its end comes before the process ends.
                    drop(vcpu);
                    // Nobody waits for the statistics any more if the vCPU took too long.
                    let _ = give_stats.send(stats);
                    return;
                }
                let _ = give_stats.send(stats);
                // A confined thread cannot end, as its end and the vCPU's take system calls.
                loop {
                    thread::park();
                }
            })
            .map_err(BootError::host("cannot start a vCPU's thread"))?;
        self.threads.push((stopper, stats));
        Ok(())
    }

    /// Has all vCPUs leave the guest, and waits for that for a limited time: a reader of our output that does not read
    /// may hold a thread up. The process ends all the same. Returns the statistics of the vCPUs that have left.
    pub(super) fn stop(self) -> Vec<Stats> {
        self.is_ending.store(true, Ordering::SeqCst);
        for (stopper, _) in &self.threads {
            stopper.stop();
        }
        // Nothing may keep a vCPU whose thread has ended: what it prints at its end has to come before ours.
        lock(&self.halt.vcpus).clear();
        self.gate.clear();
        let deadline = Instant::now() + STOP_LIMIT;
        let mut all = Vec::new();
        for (_, stats) in self.threads {
            // A thread that has panicked has reported that as the ending.
            let left = deadline.saturating_duration_since(Instant::now());
            all.extend(stats.recv_timeout(left));
        }
        all
    }
}

/// Starts the thread that reads standard input.
pub(super) fn start_input(
    source: Source,
    destination: Arc<Destination>,
    endings: &Sender<Ending>,
) -> Result<(), BootError> {
    let endings = endings.clone();
    thread::Builder::new()
        .name("input".into())
        .spawn(move || input::forward(source, &destination, &endings))
        .map(drop)
        .map_err(BootError::host("cannot start the input thread"))
}

/// Tells the guest's init when the terminal has another size.
pub(super) fn watch_size(devices: &Arc<Devices>) -> Result<(), BootError> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGWINCH])
        .map_err(BootError::host("cannot watch signals"))?;
    let devices = Arc::clone(devices);
    thread::Builder::new()
        .name("window".into())
        .spawn(move || {
            for _ in signals.forever() {
                if let Some((rows, columns)) = terminal::size() {
                    devices.feed(CONTROL, format!("size {rows} {columns}\n").as_bytes());
                }
            }
        })
        .map(drop)
        .map_err(BootError::host("cannot start the window thread"))
}

/// Turns signals that ask us to end into an ending of the machine. A file that would become longer than it may
/// (`ulimit -f`) is an error of that write, and ends nobody.
pub(super) fn watch_signals(endings: &Sender<Ending>) -> Result<(), BootError> {
    use rustix::process::Signal;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

    signal_hook::flag::register(Signal::XFSZ.as_raw(), Arc::default())
        .map_err(BootError::host("cannot watch signals"))?;
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT])
        .map_err(BootError::host("cannot watch signals"))?;
    let endings = endings.clone();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                setup::interrupt(signal);
                send(&endings, Ending::Signal(signal));
            }
        })
        .map(drop)
        .map_err(BootError::host("cannot start the signal thread"))
}

/// Sends an ending. The receiver is gone only after the first ending was received, and then this one is too late.
pub(super) fn send(endings: &Sender<Ending>, ending: Ending) {
    let _ = endings.send(ending);
}
