//! `anykvm boot`: puts memory, kernel, devices and vCPUs together, and waits for the end.

mod board;
mod threads;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use anykvm_ioctls::{Cap, Kvm};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;

use crate::cli::{BootArgs, ConsoleKind};
use crate::devices::{Output, Stream};
use crate::ending::Ending;
use crate::error::BootError;
use crate::images::{self, Init, Overlay, Root};
use crate::input::{Destination, Route};
use crate::kernel::{self, BootInfo, Image};
use crate::layout::{HIGH_RAM, RSDP};
use crate::memory::GuestMemory;
use crate::terminal::{self, RawMode};
use crate::virtio::{ConsoleInput, Disk, DiskOption};
use crate::{acpi, memory, vcpu};
use board::Extras;
use threads::{Gate, Vcpus};

/// APIC ids are 8 bits wide here, 255 is the broadcast, and the IOAPIC has one too.
const CPUS_MAX: u32 = 254;
/// How the guest's init finds the root file system among the disks.
const ROOT_SERIAL: &str = "anykvm-root";
/// How long a slow reader of our output may hold up our end.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Runs `anykvm boot`; returns the exit status and the line to print with it.
pub(crate) fn boot(args: &BootArgs) -> Result<(u8, Option<String>), BootError> {
    let cpus = check(args)?;
    let disks = disks(args)?;
    let is_interactive = args.command.is_empty() || terminal::is_interactive();
    let path = match &args.kernel {
        Some(path) => path.clone(),
        None => images::kernel()?,
    };
    let image = Image::open(&path)?;
    let initrd = initrd(args, &path, is_interactive)?;
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
    let vm = Arc::new(board::new_vm(&kvm, cpus)?);
    vm.set_static_memory(memory)
        .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    let mut supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    // Not in the list, as it needs the in-kernel LAPIC, which this machine has.
    if kvm.check_extension(Cap::TscDeadlineTimer) {
        vcpu::offer_tsc_deadline(&mut supported);
    }

    let (endings, ended) = channel();
    let closed = endings.clone();
    let on_closed = move || threads::send(&closed, Ending::OutputClosed);
    let output = Output::start(Stream::Out, on_closed.clone())
        .map_err(BootError::host("cannot start a thread"))?;
    let errors =
        Output::start(Stream::Err, on_closed).map_err(BootError::host("cannot start a thread"))?;

    let gate = Arc::new(Gate::default());
    let hvc = match args.console {
        ConsoleKind::TtyS0 => None,
        ConsoleKind::Hvc0 => Some(ConsoleInput::new()),
    };
    let extras = Extras {
        disks,
        console: hvc.clone(),
        size: is_interactive.then(terminal::size).flatten(),
    };
    let ready = Arc::clone(&gate);
    let on_ready = Box::new(move || ready.open());
    let devices = board::new_devices(&vm, memory, &output, &errors, on_ready, extras)?;
    let mut vcpus = Vec::new();
    for id in 0..cpus {
        let vcpu = vm
            .create_vcpu(u64::from(id))
            .map_err(BootError::kvm("KVM_CREATE_VCPU"))?;
        vcpu::set_up(&vcpu, id, cpus, &supported, (id == 0).then_some(entry))?;
        vcpus.push((id, vcpu));
    }

    let raw = RawMode::enter();
    threads::watch_signals(&endings)?;
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
    let destination = Destination {
        devices: Arc::clone(&devices),
        hvc,
    };
    threads::start_input(route, destination, &endings, gate)?;
    let mut running = Vcpus::new(args.confine, args.stats)?;
    for (id, vcpu) in vcpus {
        running.start(vcpu, id, &devices, &endings)?;
    }

    // The senders live in the threads above; our own keeps the channel open.
    let ending = ended.recv().unwrap_or(Ending::Quit);
    let stats = running.stop();
    output.drain(DRAIN_LIMIT);
    errors.drain(DRAIN_LIMIT);
    if args.stats {
        print_stats(&stats);
    }
    drop(raw);
    // The other threads end with the process; what they use stays until then.
    std::mem::forget((vm, kvm, devices));
    Ok(ending.verdict(!args.command.is_empty()))
}

/// One line for each statistic that is not zero everywhere, a column for each vCPU.
fn print_stats(vcpus: &[threads::Stats]) {
    let Some(first) = vcpus.first() else { return };
    for (n, (name, _)) in first.iter().enumerate() {
        let values: Vec<u64> = vcpus.iter().filter_map(|v| Some(v.get(n)?.1)).collect();
        if values.iter().any(|v| *v != 0) {
            let cells: Vec<String> = values.iter().map(|v| format!("{v:>14}")).collect();
            eprintln!("{name:26}{}", cells.concat());
        }
    }
}

/// The user's disks, and the root file system after them.
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

/// The number of vCPUs, if the options make sense.
fn check(args: &BootArgs) -> Result<u8, BootError> {
    if args.mem < HIGH_RAM || !args.mem.is_multiple_of(4096) {
        return Err(BootError::Usage(format!(
            "--mem {}: must be a multiple of 4096 bytes, and at least {HIGH_RAM} (1M)",
            args.mem
        )));
    }
    u8::try_from(args.cpus)
        .ok()
        .filter(|cpus| (1..=CPUS_MAX).contains(&u32::from(*cpus)))
        .ok_or_else(|| BootError::Usage(format!("--cpus {}: must be 1 to {CPUS_MAX}", args.cpus)))
}

fn initrd(args: &BootArgs, kernel: &Path, is_interactive: bool) -> Result<Vec<u8>, BootError> {
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
    if args.console == ConsoleKind::Hvc0 {
        wanted.push("virtio_console");
    }
    if !args.disk.is_empty() || args.root.is_some() {
        wanted.push("virtio_blk");
    }
    if !wanted.is_empty() {
        // Its device is always there, but loading modules takes the guest time.
        wanted.extend(["virtio_pci", "virtio_rng"]);
    }
    let init = Init {
        command: &args.command,
        is_interactive,
        size: is_interactive.then(terminal::size).flatten(),
        console: args.console.device(),
        root_serial: args.root.as_ref().map(|_| ROOT_SERIAL),
        modules: images::modules(kernel, &wanted)?,
    };
    let busybox = match &args.busybox {
        Some(path) => path.clone(),
        None => images::busybox()?,
    };
    images::build(&busybox, &init, &overlays)
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
