//! `anykvm boot`: assembles memory, kernel or an arriving guest, devices and vCPUs, and waits for the end.

mod board;
mod threads;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anykvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};

use crate::cli::{BootArgs, ConsoleKind, Mitigations};
use crate::devices::{Connection, Devices, LastWords, Output, Stream};
use crate::ending::Ending;
use crate::endpoint::Endpoint;
use crate::error::BootError;
use crate::images::{self, Init, Overlay, Root};
use crate::input::{Destination, Source};
use crate::kernel::{self, BootInfo, Image};
use crate::layout::{HIGH_RAM, RSDP};
use crate::memory::GuestMemory;
use crate::migrate::{self, Arrival, Built, Config, DiskInfo};
use crate::streams::{self, Shape, Terminals};
use crate::terminal::{self, RawMode};
use crate::virtio::{Disk, DiskHold, DiskOption, Port};
use crate::{acpi, limits, memory, setup, stdio, vcpu};
use board::Extras;
use threads::{Halt, Vcpus};

/// Maximum number of vCPUs. An APIC id has 8 bits, 255 is the broadcast, and the IOAPIC has an id, too.
const CPUS_MAX: u32 = 254;
/// Serial number by which the guest's init finds the root file system among the disks.
const ROOT_SERIAL: &str = "anykvm-root";
/// How long the process waits at its end for a slow reader of our output.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Runs `anykvm boot`. Returns the exit status and the line to print with it.
pub(crate) fn boot(args: &BootArgs) -> Result<(u8, Option<String>), BootError> {
    let (endings, ended) = channel();
    threads::watch_signals(&endings)?;
    match &args.incoming {
        Some(place) => receive(args, place, (endings, ended)),
        None => start(args, (endings, ended)),
    }
}

/// Boots a kernel.
fn start(args: &BootArgs, endings: Endings) -> Result<(u8, Option<String>), BootError> {
    let cpus = check(args)?;
    let disks = disks(args)?;
    let terminals = Terminals::of_this_process();
    let shape = streams::shape(args, terminals);
    let path = match args.kernel.as_ref().or(args.image.as_ref()) {
        Some(path) => path.clone(),
        None => images::kernel()?,
    };
    let image = Image::open(&path).map_err(|error| explained(error, args))?;
    let initrd = initrd(args, &path, shape)?;
    // This process has one machine, and its memory lives as long as the process.
    let memory: &'static GuestMemory = Box::leak(Box::new(memory::allocate(args.mem)?));
    limits::warn(args.mem);
    let cmdline = cmdline(args, shape);
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

    let is_console = matches!(shape, Shape::Console { .. });
    let config = Config {
        mem: args.mem,
        cpus,
        shape,
        uses_virtio: wants_virtio(args, shape),
        size: is_console.then(terminal::size).flatten(),
        awaits_status: !args.command.is_empty(),
        disks: Vec::new(),
    };
    let machine = assemble(config, memory, disks, &endings.0)?;
    for (id, vcpu) in &machine.vcpus {
        let entry = (*id == 0).then_some(entry);
        vcpu::set_up(vcpu, *id, cpus, &machine.supported, entry)?;
    }
    // Our init says when it reads. Another init is assumed to read from the start, as on real wires.
    let is_open = args.initrd.is_some() || args.no_initrd;
    let connection = is_open.then_some(match args.console {
        Some(ConsoleKind::Hvc0) => Connection::VirtioConsole,
        _ => Connection::Serial,
    });
    run(args, machine, terminals, endings, |destination| {
        if let Some(connection) = connection {
            destination.open(connection);
        }
    })
}

/// Takes over a guest that comes from another process or from a file.
fn receive(
    args: &BootArgs,
    place: &Endpoint,
    endings: Endings,
) -> Result<(u8, Option<String>), BootError> {
    let mut arrival = Arrival::wait(place)?;
    let built = prepare(args, arrival.config.clone(), &endings);
    let (machine, memory) = built.inspect_err(|error| arrival.refuse(&error.to_string()))?;
    arrival.attempt(|arrival| {
        arrival.receive(memory)?;
        let built = Built {
            vm: &machine.vm,
            vcpus: &machine.vcpus,
            devices: &machine.devices,
            destination: &machine.destination,
        };
        arrival.settle(&built, memory)?;
        arrival.take_over(&machine.disks)
    })?;
    let terminals = Terminals::of_this_process();
    run(args, machine, terminals, endings, move |_| arrival.tell())
}

/// Makes a machine for a guest that is on its way.
fn prepare(
    args: &BootArgs,
    config: Config,
    endings: &Endings,
) -> Result<(Assembled, &'static GuestMemory), BootError> {
    limits::check(config.mem, config.cpus.into())?;
    let disks = disks_of(args, &config)?;
    let memory: &'static GuestMemory = Box::leak(Box::new(memory::allocate(config.mem)?));
    limits::warn(config.mem);
    Ok((assemble(config, memory, disks, &endings.0)?, memory))
}

/// Opens the disks that a guest knows. The process that it comes from may still have them.
fn disks_of(args: &BootArgs, config: &Config) -> Result<Vec<Disk>, BootError> {
    let wrong = |why: String| Err(BootError::Usage(why));
    if args.disk.len() != config.disks.len() {
        let known: Vec<String> = config
            .disks
            .iter()
            .map(|d| format!("'{}'", d.serial))
            .collect();
        return wrong(format!(
            "the guest has {} disks ({}), and --disk names {}",
            config.disks.len(),
            known.join(", "),
            args.disk.len()
        ));
    }
    let mut disks = Vec::new();
    for ((index, option), known) in (0..).zip(&args.disk).zip(&config.disks) {
        let mut disk = Disk::open_unlocked(option, index)?;
        disk.call(&known.serial);
        let own = DiskInfo::from(&disk.hold()?);
        if own != *known {
            return wrong(format!(
                "disk '{}' is not the guest's: {} bytes{} here, {} bytes{} there",
                known.serial,
                own.len,
                if own.is_read_only { ", read-only" } else { "" },
                known.len,
                if known.is_read_only {
                    ", read-only"
                } else {
                    ""
                },
            ));
        }
        disks.push(disk);
    }
    Ok(disks)
}

/// The channel of the reasons why the machine stops.
type Endings = (Sender<Ending>, Receiver<Ending>);

/// A machine whose vCPUs have no state yet.
struct Assembled {
    kvm: Kvm,
    vm: Arc<VmFd>,
    supported: CpuId,
    memory: &'static GuestMemory,
    config: Config,
    disks: Arc<[DiskHold]>,
    output: Arc<Output>,
    errors: Arc<Output>,
    words: Arc<LastWords>,
    halted: Arc<Halt>,
    destination: Arc<Destination>,
    devices: Arc<Devices>,
    vcpus: Vec<(u8, VcpuFd)>,
}

/// Makes the VM, its devices and its vCPUs.
fn assemble(
    mut config: Config,
    memory: &'static GuestMemory,
    disks: Vec<Disk>,
    endings: &Sender<Ending>,
) -> Result<Assembled, BootError> {
    let kvm = Kvm::new().map_err(BootError::kvm("opening KVM"))?;
    let vm = Arc::new(board::new_vm(&kvm, config.cpus)?);
    vm.set_static_memory(memory)
        .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    let supported = supported_cpuid(&kvm)?;

    let closed = endings.clone();
    let output = Output::start(Stream::Out, move |errno| {
        threads::send(&closed, Ending::OutputClosed(errno));
    })
    .map_err(BootError::host("cannot start a thread"))?;
    // If nobody reads standard error, the guest goes on all the same.
    let errors =
        Output::start(Stream::Err, |_| {}).map_err(BootError::host("cannot start a thread"))?;

    let destination = Arc::new(Destination::default());
    let ready = Arc::clone(&destination);
    let on_ready = Box::new(move |connection| ready.open(connection));
    let halted = Arc::new(Halt::default());
    let on_halt = Arc::clone(&halted);
    let words = LastWords::new(move || on_halt.announce());
    let holds: Arc<[DiskHold]> = disks.iter().map(Disk::hold).collect::<Result<_, _>>()?;
    config.disks = holds.iter().map(DiskInfo::from).collect();
    let extras = Extras {
        disks,
        ports: ports(&config, &destination, &output, &errors),
        size: config.size,
    };
    let devices = board::new_devices(&vm, memory, &output, &errors, &words, on_ready, extras)?;
    let _ = destination.devices.set(Arc::clone(&devices));
    let mut vcpus = Vec::new();
    for id in 0..config.cpus {
        let vcpu = vm
            .create_vcpu(u64::from(id))
            .map_err(BootError::kvm("KVM_CREATE_VCPU"))?;
        vcpus.push((id, vcpu));
    }
    Ok(Assembled {
        kvm,
        vm,
        supported,
        memory,
        config,
        disks: holds,
        output,
        errors,
        words,
        halted,
        destination,
        devices,
        vcpus,
    })
}

/// Runs the machine to its end. `begin` is called when its vCPUs are about to run.
fn run(
    args: &BootArgs,
    machine: Assembled,
    terminals: Terminals,
    (endings, ended): Endings,
    begin: impl FnOnce(&Destination),
) -> Result<(u8, Option<String>), BootError> {
    let Assembled {
        kvm,
        vm,
        memory,
        config,
        disks,
        output,
        errors,
        words,
        halted,
        destination,
        devices,
        vcpus,
        ..
    } = machine;
    let is_console = matches!(config.shape, Shape::Console { .. });
    let source = Source {
        is_terminal: terminals.input,
        is_raw: terminals.input && is_console,
    };
    setup::finish();
    let raw = source.is_raw.then(RawMode::enter);
    if source.is_raw {
        threads::watch_size(&devices)?;
    }
    let awaits_status = config.awaits_status;
    let msrs = vcpu::state::msr_list(&kvm)?;
    let mut running = Vcpus::new(args.confine, args.stats, halted, msrs)?;
    let socket = match &args.control {
        Some(path) => {
            let machine = migrate::Machine {
                vm: Arc::clone(&vm),
                memory,
                devices: Arc::clone(&devices),
                destination: Arc::clone(&destination),
                gate: Arc::clone(running.gate()),
                config,
                disks: Arc::clone(&disks),
            };
            Some(migrate::listen(path, machine, endings.clone())?)
        }
        None => None,
    };
    begin(&destination);
    if !destination.has_ended() {
        threads::start_input(source, destination, &endings)?;
    }
    for (id, vcpu) in vcpus {
        running.start(vcpu, id, &devices, &endings)?;
    }
    devices.resume();

    // The channel stays open: this function has a sender, besides those of the threads above.
    let ending = ended.recv().unwrap_or(Ending::Quit);
    drop(socket);
    let stats = running.stop();
    // Changes of an image's tables that are not in its file yet are written now.
    let written = disks.iter().map(DiskHold::end).collect::<Vec<_>>();
    output.drain(DRAIN_LIMIT);
    errors.drain(DRAIN_LIMIT);
    if args.stats {
        print_stats(&stats);
    }
    drop(raw);
    // The other threads end with the process; what they use has to live until then.
    std::mem::forget((vm, kvm, devices));
    written.into_iter().collect::<Result<(), _>>()?;
    Ok(ending.verdict(awaits_status, words.panic()))
}

/// Returns the CPUID that vCPUs of this machine may show.
fn supported_cpuid(kvm: &Kvm) -> Result<CpuId, BootError> {
    let mut supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    // The list does not have this feature, because it needs the in-kernel LAPIC, which this machine has.
    if kvm.check_extension(Cap::TscDeadlineTimer) {
        vcpu::offer_tsc_deadline(&mut supported);
    }
    Ok(supported)
}

/// Prints a line for each statistic that is not zero for all vCPUs, with a column for each vCPU.
fn print_stats(vcpus: &[threads::Stats]) {
    let Some(first) = vcpus.first() else { return };
    for (n, (name, _)) in first.iter().enumerate() {
        let values: Vec<u64> = vcpus.iter().filter_map(|v| Some(v.get(n)?.1)).collect();
        if values.iter().any(|v| *v != 0) {
            let cells: Vec<String> = values.iter().map(|v| format!("{v:>14}")).collect();
            stdio::note(&format!("{name:26}{}", cells.concat()));
        }
    }
}

/// Opens the user's disks, and the root file system as the last.
fn disks(args: &BootArgs) -> Result<Vec<Disk>, BootError> {
    let disks = (0..).zip(&args.disk);
    let mut disks: Vec<Disk> = disks
        .map(|(index, option)| Disk::open(option, index))
        .collect::<Result<_, _>>()?;
    if let Some(path) = &args.root {
        disks.push(match images::root(path)? {
            Root::Copy(file) => Disk::own(file, ROOT_SERIAL)?,
            Root::Image(path) => Disk::open(&DiskOption::new(path, ROOT_SERIAL), 0)?,
        });
    }
    Ok(disks)
}

/// Explains an error: a user who writes a command without `--` names a kernel.
fn explained(error: BootError, args: &BootArgs) -> BootError {
    match (error, &args.image) {
        (BootError::Unreadable { what, path, source }, Some(image)) => BootError::Usage(format!(
            "cannot read {what} {}: {source} (a command for the guest comes after --: anykvm boot -- {} …)",
            path.display(),
            image.display()
        )),
        (error, _) => error,
    }
}

/// Returns the number of vCPUs, if the options make sense.
fn check(args: &BootArgs) -> Result<u8, BootError> {
    if args.mem < HIGH_RAM || !args.mem.is_multiple_of(4096) {
        return Err(BootError::Usage(format!(
            "--mem {}: must be a multiple of 4096 bytes, and at least {HIGH_RAM} (1M)",
            args.mem
        )));
    }
    if args.own_init().is_some() && !args.command.is_empty() {
        return Err(BootError::Usage(
            "init= of --append runs the root's own init: no COMMAND can be given beside it".into(),
        ));
    }
    limits::check(args.mem, args.cpus)?;
    u8::try_from(args.cpus)
        .ok()
        .filter(|cpus| (1..=CPUS_MAX).contains(&u32::from(*cpus)))
        .ok_or_else(|| BootError::Usage(format!("--cpus {}: must be 1 to {CPUS_MAX}", args.cpus)))
}

/// Returns the ports of the virtio console: for users who ask for it, and for commands.
fn ports(
    config: &Config,
    destination: &Destination,
    output: &Arc<Output>,
    errors: &Arc<Output>,
) -> Vec<Port> {
    if !config.uses_virtio {
        return Vec::new();
    }
    let hvc = Port::Console(Arc::clone(&destination.hvc), Arc::clone(output));
    let errors = Port::Out("anykvm.err", Arc::clone(errors));
    match config.shape {
        Shape::Streams => vec![
            hvc,
            Port::In("anykvm.in", Arc::clone(&destination.port)),
            Port::Out("anykvm.out", Arc::clone(output)),
            errors,
        ],
        Shape::Console { has_errors: true } => vec![hvc, errors],
        Shape::Console { has_errors: false } => vec![hvc],
    }
}

/// Returns true if the guest's streams go through virtio, if its kernel has virtio.
fn wants_virtio(args: &BootArgs, shape: Shape) -> bool {
    match args.console {
        Some(console) => console == ConsoleKind::Hvc0,
        None => shape == Shape::Streams || !args.command.is_empty(),
    }
}

fn initrd(args: &BootArgs, kernel: &Path, shape: Shape) -> Result<Vec<u8>, BootError> {
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
    let mut wanted = Vec::new();
    if wants_virtio(args, shape) {
        wanted.push("virtio_console");
    }
    if !args.disk.is_empty() || args.root.is_some() {
        wanted.push("virtio_blk");
    }
    if !wanted.is_empty() {
        // The entropy device is always there, but its modules are loaded only with others, as that takes the guest
        // time.
        wanted.extend(["virtio_pci", "virtio_rng"]);
    }
    let modules = match images::modules(kernel, &wanted) {
        // The guest can do without the console's module: the console is a serial port then.
        Err(_) if !wanted.contains(&"virtio_blk") && args.console.is_none() => Vec::new(),
        other => other?,
    };
    let missing = wanted
        .contains(&"virtio_blk")
        .then(|| images::missing_module(kernel, "virtio_blk", &modules))
        .flatten();
    // Without a terminal, the shell reads commands.
    let shell = ["sh".to_owned()];
    let init = Init {
        command: match shape {
            Shape::Streams if args.command.is_empty() => &shell,
            _ => &args.command,
        },
        shape,
        size: matches!(shape, Shape::Console { .. })
            .then(terminal::size)
            .flatten(),
        console: args.console,
        uses_virtio: wants_virtio(args, shape),
        own_init: args.own_init(),
        root_serial: args.root.as_ref().map(|_| ROOT_SERIAL),
        modules,
        missing,
    };
    let busybox = match &args.busybox {
        Some(path) => path.clone(),
        None => images::busybox()?,
    };
    images::build(&busybox, &init, &overlays)
}

/// Returns the kernel's command line. So that a command's output has nothing else in it, the kernel then prints to
/// COM2, which is standard error.
fn cmdline(args: &BootArgs, shape: Shape) -> String {
    let is_clean = shape == Shape::Streams || !args.command.is_empty();
    let console = if is_clean { "ttyS1" } else { "ttyS0" };
    let mut words = Vec::new();
    if !args.no_default_cmdline {
        words.push(format!("console={console} panic=-1 8250.nr_uarts=4"));
        words.push(if args.verbose {
            format!("earlyprintk=serial,{console}")
        } else {
            "quiet".into()
        });
        if args.mitigations == Mitigations::Off {
            words.push("mitigations=off".into());
        }
    }
    if !args.append.is_empty() {
        words.push(args.append.clone());
    }
    words.join(" ")
}
