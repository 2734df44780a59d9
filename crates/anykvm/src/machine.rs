//! `anykvm boot`: puts memory, kernel, devices and vCPUs together, and waits for the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use anykvm_ioctls::{Kvm, VmFd};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use vmm_sys_util::eventfd::EventFd;

use crate::cli::BootArgs;
use crate::devices::{Devices, Output, SERIAL_IRQS, Sink, Stream};
use crate::ending::Ending;
use crate::error::BootError;
use crate::images::{self, Init, Overlay};
use crate::input::{self, Route};
use crate::kernel::{self, BootInfo, Image};
use crate::layout::{KVM_IDENTITY_MAP, KVM_TSS, RSDP};
use crate::memory::GuestMemory;
use crate::terminal::{self, RawMode};
use crate::{acpi, memory, vcpu};

/// APIC ids are 8 bits wide here, and 255 is the broadcast.
const CPUS_MAX: u32 = 254;
/// How long a slow reader of our output may hold up our end.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Runs `anykvm boot`; returns the exit status and the line to print with it.
pub(crate) fn boot(args: &BootArgs) -> Result<(u8, Option<String>), BootError> {
    let cpus = check(args)?;
    let is_interactive = args.command.is_empty() || terminal::is_interactive();
    let path = match &args.kernel {
        Some(path) => path.clone(),
        None => images::kernel()?,
    };
    let image = Image::open(&path)?;
    let initrd = initrd(args, is_interactive)?;
    // There is one machine in this process; its memory lives as long.
    let memory: &'static GuestMemory = Box::leak(Box::new(memory::allocate(args.mem)?));
    let cmdline = cmdline(args, is_interactive);
    let info = BootInfo {
        cmdline: &cmdline,
        initrd: &initrd,
        mem_size: args.mem,
        rsdp: RSDP,
    };
    let entry = kernel::load(memory, &path, &image, &info)?;
    drop((image, initrd));
    acpi::write(memory, cpus)?;
    vcpu::write_boot_structures(memory, entry)?;

    let kvm = Kvm::new().map_err(BootError::kvm("opening KVM"))?;
    let vm = new_vm(&kvm, cpus)?;
    vm.set_static_memory(memory)
        .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;

    let (endings, ended) = channel();
    let closed = endings.clone();
    let on_closed = move || send(&closed, Ending::OutputClosed);
    let output = Output::start(Stream::Out, on_closed.clone())
        .map_err(BootError::host("cannot start a thread"))?;
    let errors =
        Output::start(Stream::Err, on_closed).map_err(BootError::host("cannot start a thread"))?;

    let gate = Arc::new(Gate::default());
    let devices = new_devices(&vm, &output, &errors, &gate)?;
    let mut vcpus = Vec::new();
    for id in 0..cpus {
        let vcpu = vm
            .create_vcpu(u64::from(id))
            .map_err(BootError::kvm("KVM_CREATE_VCPU"))?;
        vcpu::set_up(&vcpu, id, cpus, &supported, (id == 0).then_some(entry))?;
        vcpus.push((id, vcpu));
    }

    let raw = RawMode::enter();
    watch_signals(&endings)?;
    let route = if is_interactive {
        Route::Console {
            has_escape: terminal::is_stdin_terminal(),
        }
    } else {
        Route::Pipe
    };
    // Our init says when it reads; another's is taken to read from the start, as on real wires.
    if args.initrd.is_some() || args.no_initrd {
        gate.open();
    }
    start_input(route, &devices, &endings, gate)?;
    for (id, vcpu) in vcpus {
        let devices = Arc::clone(&devices);
        let endings = endings.clone();
        thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                let run = AssertUnwindSafe(|| vcpu::run(vcpu, id, &devices));
                let ending = catch_unwind(run).unwrap_or_else(|_| {
                    Ending::Failed(BootError::VcpuStopped {
                        id,
                        reason: "its thread panicked".into(),
                        rip: 0,
                    })
                });
                send(&endings, ending);
            })
            .map_err(BootError::host("cannot start a vCPU's thread"))?;
    }

    // The senders live in the threads above; our own keeps the channel open.
    let ending = ended.recv().unwrap_or(Ending::Quit);
    // The vCPU threads end with the process: there is one machine in it, and `memory`, `vm` and
    // the devices are left to them until then.
    output.drain(DRAIN_LIMIT);
    errors.drain(DRAIN_LIMIT);
    drop(raw);
    std::mem::forget((vm, kvm));
    Ok(ending.verdict(!args.command.is_empty()))
}

/// The number of vCPUs, if the options make sense.
fn check(args: &BootArgs) -> Result<u8, BootError> {
    if args.mem == 0 || !args.mem.is_multiple_of(4096) {
        return Err(BootError::Usage(format!(
            "--mem {}: must be a multiple of 4096 bytes, and not 0",
            args.mem
        )));
    }
    u8::try_from(args.cpus)
        .ok()
        .filter(|cpus| (1..=CPUS_MAX).contains(&u32::from(*cpus)))
        .ok_or_else(|| BootError::Usage(format!("--cpus {}: must be 1 to {CPUS_MAX}", args.cpus)))
}

fn initrd(args: &BootArgs, is_interactive: bool) -> Result<Vec<u8>, BootError> {
    if args.no_initrd {
        return Ok(Vec::new());
    }
    if let Some(path) = &args.initrd {
        return std::fs::read(path).map_err(|source| BootError::Unreadable {
            what: "initrd",
            path: PathBuf::from(path),
            source,
        });
    }
    let overlays: Vec<Overlay> = args
        .overlay
        .iter()
        .map(|text| Overlay::parse(text))
        .collect::<Result<_, _>>()?;
    let init = Init {
        command: &args.command,
        is_interactive,
        size: is_interactive.then(terminal::size).flatten(),
    };
    images::build(&images::busybox()?, &init, &overlays)
}

/// A command's streams are kept clean: the kernel then talks on COM2, which is standard error.
fn cmdline(args: &BootArgs, is_interactive: bool) -> String {
    let console = if is_interactive { "ttyS0" } else { "ttyS1" };
    let mut words = Vec::new();
    if !args.no_default_cmdline {
        words.push(format!("console={console} panic=-1 8250.nr_uarts=4"));
        words.push(if args.verbose {
            format!("earlyprintk=serial,{console}")
        } else {
            "quiet".into()
        });
    }
    if !args.append.is_empty() {
        words.push(args.append.clone());
    }
    words.join(" ")
}

fn new_vm(kvm: &Kvm, cpus: u8) -> Result<VmFd, BootError> {
    let max = kvm.get_max_vcpus();
    if usize::from(cpus) > max {
        return Err(BootError::Usage(format!(
            "--cpus {cpus}: this hypervisor supports up to {max}"
        )));
    }
    let vm = kvm.create_vm().map_err(BootError::kvm("KVM_CREATE_VM"))?;
    vm.set_identity_map_address(KVM_IDENTITY_MAP)
        .map_err(BootError::kvm("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(KVM_TSS)
        .map_err(BootError::kvm("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip()
        .map_err(BootError::kvm("KVM_CREATE_IRQCHIP"))?;
    let pit = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit)
        .map_err(BootError::kvm("KVM_CREATE_PIT2"))?;
    Ok(vm)
}

fn new_devices(
    vm: &VmFd,
    output: &Arc<Output>,
    errors: &Arc<Output>,
    gate: &Arc<Gate>,
) -> Result<Arc<Devices>, BootError> {
    let irqfd = |gsi| -> Result<EventFd, BootError> {
        let fd = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK)
            .map_err(BootError::host("cannot make an eventfd"))?;
        vm.register_irqfd(&fd, gsi)
            .map_err(BootError::kvm("KVM_IRQFD"))?;
        Ok(fd)
    };
    let gate = Arc::clone(gate);
    let [irq1, irq2, irq3, irq4] = SERIAL_IRQS;
    Ok(Devices::new([
        (Sink::Output(Arc::clone(output)), irqfd(irq1)?),
        (Sink::Output(Arc::clone(errors)), irqfd(irq2)?),
        (Sink::Discard, irqfd(irq3)?),
        (Sink::control(Box::new(move || gate.open())), irqfd(irq4)?),
    ]))
}

/// Holds input back until the guest's init reads it; a UART that is being probed drops bytes.
#[derive(Default)]
struct Gate(AtomicBool);

impl Gate {
    fn open(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn wait(&self) {
        while !self.0.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn start_input(
    route: Route,
    devices: &Arc<Devices>,
    endings: &Sender<Ending>,
    gate: Arc<Gate>,
) -> Result<(), BootError> {
    let devices = Arc::clone(devices);
    let endings = endings.clone();
    thread::Builder::new()
        .name("input".into())
        .spawn(move || {
            // Ctrl-A X must work before the guest reads anything.
            if !matches!(route, Route::Console { has_escape: true }) {
                gate.wait();
            }
            input::forward(route, &devices, &endings);
        })
        .map(drop)
        .map_err(BootError::host("cannot start the input thread"))
}

/// Turns the signals that ask us to end into an orderly end.
fn watch_signals(endings: &Sender<Ending>) -> Result<(), BootError> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT])
        .map_err(BootError::host("cannot watch signals"))?;
    let endings = endings.clone();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                send(&endings, Ending::Signal(signal));
            }
        })
        .map(drop)
        .map_err(BootError::host("cannot start the signal thread"))
}

/// Nobody listens any more only when the first ending was received, and then this one is late.
fn send(endings: &Sender<Ending>, ending: Ending) {
    let _ = endings.send(ending);
}
