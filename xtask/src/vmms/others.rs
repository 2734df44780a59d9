//! `cargo xtask vmms others [--firecracker FILE] [--cloud-hypervisor FILE] [--crosvm FILE] [--kvmtool FILE]`: VMMs
//! without Debian packages, as somebody has built or fetched them.
//!
//! Each VMM boots Debian's kernel with two vCPUs and a virtio disk. The guest checks both as QEMU's guests do, and
//! shuts down. Firecracker and Cloud Hypervisor also save the VM while it computes, and a second process goes on with
//! it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use testkit::boot::run_limited;

use super::{LIMIT, files::Files, guest, saved};

/// The guest's check of a disk that is equal to `data.img`.
const CHECK: &str = "same $(cat /dev/vda | sum) $data";
const CPUS: u32 = 2;
const MEM_MIB: u64 = 512;

type Boot = fn(&Files) -> Result<Command, String>;
type Save = fn(&Files) -> Result<(), String>;

/// A VMM: its name, the option with its program, the package of its kernel, how it boots, and how it saves.
struct Vmm {
    name: &'static str,
    program: fn(&Options) -> Option<&PathBuf>,
    package: (&'static str, &'static str),
    boot: Boot,
    save: Option<Save>,
}

const CLOUD: (&str, &str) = ("linux-image-cloud-amd64", "kernel-cloud-amd64");
/// The full kernel reads the tables by which kvmtool describes CPUs.
const FULL: (&str, &str) = ("linux-image-amd64", "kernel-amd64");

const VMMS: &[Vmm] = &[
    Vmm {
        name: "firecracker",
        program: |o| o.firecracker.as_ref(),
        package: CLOUD,
        boot: firecracker,
        save: Some(saved::firecracker),
    },
    Vmm {
        name: "cloud-hypervisor",
        program: |o| o.cloud_hypervisor.as_ref(),
        package: CLOUD,
        boot: cloud_hypervisor,
        save: Some(saved::cloud_hypervisor),
    },
    Vmm {
        name: "crosvm",
        program: |o| o.crosvm.as_ref(),
        package: CLOUD,
        boot: crosvm,
        save: None,
    },
    Vmm {
        name: "kvmtool",
        program: |o| o.kvmtool.as_ref(),
        package: FULL,
        boot: kvmtool,
        save: None,
    },
];

/// The reboot of a guest without ACPI, or with an ACPI without a power button: by the keyboard controller.
const REBOOTS: &str = "reboot=k again";

fn firecracker(files: &Files) -> Result<Command, String> {
    let config = format!(
        r#"{{"boot-source":{{"kernel_image_path":"{}","initrd_path":"{}","boot_args":"{} {REBOOTS}"}},
"drives":[{{"drive_id":"d","path_on_host":"{}","is_root_device":false,"is_read_only":true}}],
"machine-config":{{"vcpu_count":{CPUS},"mem_size_mib":{MEM_MIB}}}}}"#,
        files.vmlinux.display(),
        files.initrd.display(),
        guest::COMMAND_LINE,
        files.disk.display(),
    );
    let path = files.dir.join("config.json");
    fs::write(&path, config).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut command = files.command();
    command.args(["--no-api", "--config-file"]).arg(path);
    Ok(command)
}

fn cloud_hypervisor(files: &Files) -> Result<Command, String> {
    let mut command = files.command();
    command.arg("--kernel").arg(&files.vmlinux);
    command.arg("--initramfs").arg(&files.initrd);
    command.args(["--cmdline", guest::COMMAND_LINE]);
    command.args(["--cpus", &format!("boot={CPUS}")]);
    command.args(["--memory", &format!("size={MEM_MIB}M")]);
    let disk = format!("path={},readonly=on,image_type=raw", files.disk.display());
    command.args(["--disk", &disk]);
    command.args(["--serial", "tty", "--console", "off"]);
    Ok(command)
}

fn crosvm(files: &Files) -> Result<Command, String> {
    let mut command = files.command();
    command.args(["run", "--disable-sandbox", "--cpus", &CPUS.to_string()]);
    command.args(["--mem", &MEM_MIB.to_string()]);
    command.args(["--serial", "type=stdout,hardware=serial,num=1,console=true"]);
    let disk = format!("{},ro=true", files.disk.display());
    command.args(["--block", &disk]);
    command.arg("--initrd").arg(&files.initrd);
    command.args(["--params", &format!("{} {REBOOTS}", guest::COMMAND_LINE)]);
    command.arg(&files.kernel);
    Ok(command)
}

fn kvmtool(files: &Files) -> Result<Command, String> {
    let mut command = files.command();
    command.args(["run", "--cpus", &CPUS.to_string()]);
    command.args(["--mem", &MEM_MIB.to_string()]);
    command.arg("--kernel").arg(&files.kernel);
    command.arg("--initrd").arg(&files.initrd);
    command
        .arg("--disk")
        .arg(format!("{},ro", files.disk.display()));
    command.args(["--params", &format!("{} {REBOOTS}", guest::COMMAND_LINE)]);
    command.args(["--console", "serial", "--network", "mode=none"]);
    // The VMM's sockets are in its HOME.
    command.env("HOME", &files.dir);
    Ok(command)
}

/// The programs.
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct Options {
    /// Firecracker.
    #[arg(long, value_name = "FILE")]
    firecracker: Option<PathBuf>,
    /// Cloud Hypervisor.
    #[arg(long, value_name = "FILE")]
    cloud_hypervisor: Option<PathBuf>,
    /// crosvm.
    #[arg(long, value_name = "FILE")]
    crosvm: Option<PathBuf>,
    /// kvmtool.
    #[arg(long, value_name = "FILE")]
    kvmtool: Option<PathBuf>,
}

/// Runs the VMMs that are named.
pub(super) fn run(options: &Options) -> Result<(), String> {
    let mut wanted = Vec::new();
    for vmm in VMMS {
        if let Some(file) = (vmm.program)(options) {
            let path = fs::canonicalize(file).map_err(|e| format!("{}: {e}", file.display()))?;
            wanted.push((vmm, path));
        }
    }
    crate::debian::install(&["busybox-static", "lz4", "xz-utils", "zstd"])?;
    let anykvm = crate::build::anykvm()?;
    let mut failed = Vec::new();
    for (vmm, program) in wanted {
        let name = vmm.name;
        let files = prepare(vmm, name, &anykvm, program)?;
        let mut report = |what: &str, start: Instant, result: Result<(), String>| {
            let name = format!("{name} {what}");
            let seconds = start.elapsed().as_secs_f64();
            match result {
                Ok(()) => eprintln!("{name:28} ok    {seconds:6.1} s"),
                Err(why) => {
                    eprintln!("{name:28} FAILED {seconds:5.1} s: {why}");
                    failed.push(name);
                }
            }
        };
        let start = Instant::now();
        report("boot", start, boot(vmm, &files));
        if let Some(save) = vmm.save {
            let start = Instant::now();
            report("save-restore", start, save(&files));
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("VMMs failed: {}", failed.join(", ")))
    }
}

fn prepare(vmm: &Vmm, name: &str, anykvm: &Path, program: PathBuf) -> Result<Files, String> {
    let dir = crate::build::cache().join("vmms").join(name);
    // The folder may be left over from the last run.
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let kernel = crate::debian::kernel(vmm.package.0, vmm.package.1)?;
    let disk = dir.join("data.img");
    fs::write(&disk, guest::data()).map_err(|e| format!("{}: {e}", disk.display()))?;
    Ok(Files {
        anykvm: anykvm.into(),
        program,
        vmlinux: elf(&kernel, &dir)?,
        initrd: guest::initramfs(&kernel, &dir, CHECK, (CPUS, MEM_MIB), None)?,
        kernel,
        disk,
        dir,
    })
}

fn boot(vmm: &Vmm, files: &Files) -> Result<(), String> {
    let mut command = (vmm.boot)(files)?;
    let outcome = run_limited(&mut command, LIMIT).map_err(|e| e.to_string())?;
    guest::verdict(&outcome)
}

/// The compressions of Debian's kernels: the first bytes of each, and its program.
const COMPRESSIONS: &[(&[u8], &str)] = &[
    (b"\xfd7zXZ\0", "xz"),
    (&[0x02, 0x21, 0x4c, 0x18], "lz4"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
];

/// Returns the ELF file inside of a bzImage ("The Linux/x86 Boot Protocol", payload_offset).
fn elf(kernel: &Path, dir: &Path) -> Result<PathBuf, String> {
    let bytes = fs::read(kernel).map_err(|e| format!("{}: {e}", kernel.display()))?;
    let (packed, program) =
        payload(&bytes).ok_or_else(|| format!("{}: nothing inside", kernel.display()))?;
    let (from, to) = (dir.join("payload"), dir.join("vmlinux"));
    fs::write(&from, packed).map_err(|e| format!("{}: {e}", from.display()))?;
    let input = fs::File::open(&from).map_err(|e| format!("{}: {e}", from.display()))?;
    let output = fs::File::create(&to).map_err(|e| format!("{}: {e}", to.display()))?;
    let mut command = Command::new(program);
    match command.arg("-dc").stdin(input).stdout(output).status() {
        Ok(status) if status.success() => Ok(to),
        other => Err(format!("{program}: {other:?}")),
    }
}

fn payload(image: &[u8]) -> Option<(&[u8], &'static str)> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    // The number of sectors of real-mode code; the first sector is added.
    let sectors = usize::from(*image.get(0x1f1)?) + 1;
    let begin = (sectors * 512).checked_add(word(0x248)?)?;
    // Behind the payload is the length that it decompresses to.
    let len = word(0x24c)?.checked_sub(4)?;
    let packed = image.get(begin..begin.checked_add(len)?)?;
    let known = |(magic, _): &&(&[u8], &str)| packed.starts_with(magic);
    let (_, program) = COMPRESSIONS.iter().find(known)?;
    Some((packed, program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_is_where_the_header_says() {
        let mut image = vec![0; 4096];
        image[0x1f1] = 3;
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&12u32.to_le_bytes());
        assert_eq!(payload(&image), None);
        image[2064..2074].copy_from_slice(b"\xfd7zXZ\0abSI");
        assert_eq!(payload(&image), Some((&b"\xfd7zXZ\0ab"[..], "xz")));
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(payload(&image), None);
        assert_eq!(payload(&[]), None);
    }
}
