//! Measures how long firmware and boot loaders in QEMU take until they say that they are done, on anykvm and on TCG.
//!
//! They execute most code once, in modes that kernels soon leave, and wait for devices by polling them. The bar is for
//! the processor time of all of QEMU, which is never more than the time on a clock.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::machines::{Machine, missing, own, succeed};
use super::report::{self, Verdict};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Minimum of TCG's processor time divided by anykvm's.
const BAR: f64 = 1.5;
/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(300);
const COMMON: &str = "-nodefaults -no-reboot -display none -serial stdio";
/// The line that OVMF's shell prints, before it waits five seconds for a key.
const OVMF_END: &str = "Interactive Shell";
const OVMF: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const OVMF_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// A firmware or boot loader.
struct Firmware {
    name: &'static str,
    /// Files, with the package that each is in.
    needs: &'static [(&'static str, &'static str)],
    /// QEMU's arguments. `{dir}` stands for a folder of its own, `{space}` for a space within an argument.
    arguments: &'static str,
    /// True if the processor is the host's; for TCG it is one with as many address bits.
    is_hosts: bool,
    /// What it prints when it is done. Empty: it ends the machine.
    end: &'static str,
    prepare: fn(&Path) -> Result<(), BootError>,
}

const fn firmware(name: &'static str, arguments: &'static str, end: &'static str) -> Firmware {
    Firmware {
        name,
        needs: &[],
        arguments,
        is_hosts: false,
        end,
        prepare: |_| Ok(()),
    }
}

const SPLIT: &str = "-M q35 -m 256 -drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd \
                     -drive if=pflash,format=raw,file={dir}/variables";
/// Arguments with more memory, as OVMF's tables for 48 address bits take a gibibyte.
const SPLIT_LARGE: &str = "-M q35 -m 3072 -drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd \
                           -drive if=pflash,format=raw,file={dir}/variables";

const ALL: &[Firmware] = &[
    Firmware {
        needs: &[(OVMF, "ovmf")],
        prepare: copy_variables,
        ..firmware("OVMF, split flash, q35", SPLIT, OVMF_END)
    },
    Firmware {
        needs: &[(OVMF, "ovmf")],
        is_hosts: true,
        prepare: copy_variables,
        ..firmware("the same, host's processor", SPLIT_LARGE, OVMF_END)
    },
    Firmware {
        needs: &[("/usr/share/ovmf/OVMF.fd", "ovmf")],
        ..firmware(
            "OVMF, -bios, q35",
            "-M q35 -m 256 -bios /usr/share/ovmf/OVMF.fd",
            OVMF_END,
        )
    },
    Firmware {
        needs: &[
            ("/usr/lib/grub/i386-pc/boot.img", "grub-pc-bin"),
            ("/usr/bin/grub-mkimage", "grub-common"),
        ],
        prepare: make_grub,
        ..firmware(
            "SeaBIOS, GRUB",
            "-m 128 -drive format=raw,file={dir}/grub",
            "over",
        )
    },
    Firmware {
        needs: &[("/usr/lib/ipxe/ipxe.lkrn", "ipxe")],
        prepare: |folder| write(&folder.join("script"), b"#!ipxe\nreboot\n"),
        ..firmware(
            "iPXE",
            "-m 256 -kernel /usr/lib/ipxe/ipxe.lkrn -initrd {dir}/script",
            "",
        )
    },
    Firmware {
        needs: &[("/usr/lib/u-boot/qemu-x86/u-boot.rom", "u-boot-qemu")],
        ..firmware(
            "U-Boot, 32 bits",
            "-m 256 -bios /usr/lib/u-boot/qemu-x86/u-boot.rom",
            "Hit any key",
        )
    },
    Firmware {
        needs: &[("/usr/lib/u-boot/qemu-x86_64/u-boot.rom", "u-boot-qemu")],
        ..firmware(
            "U-Boot, 64 bits",
            "-m 256 -bios /usr/lib/u-boot/qemu-x86_64/u-boot.rom",
            "Hit any key",
        )
    },
    Firmware {
        needs: &[("/boot/memtest86+x64.bin", "memtest86+")],
        ..firmware(
            "memtest86+, to its third test",
            "-m 64 -kernel /boot/memtest86+x64.bin -append console=ttyS0,115200{space}nopause",
            "Moving inversions",
        )
    },
];

fn write(file: &Path, bytes: &[u8]) -> Result<(), BootError> {
    fs::write(file, bytes).map_err(BootError::host("cannot write"))
}

fn copy_variables(folder: &Path) -> Result<(), BootError> {
    let copied = fs::copy(OVMF_VARIABLES, folder.join("variables"));
    copied.map(|_| ()).map_err(BootError::host("cannot copy"))
}

/// Makes a disk with only GRUB, which prints a word and halts.
fn make_grub(folder: &Path) -> Result<(), BootError> {
    const SECTOR: usize = 512;
    const SIZE: usize = 8 << 20;
    let (core, script) = (folder.join("core"), folder.join("script"));
    write(
        &script,
        b"serial --unit=0 --speed=115200\nterminal_output serial\necho over\nhalt\n",
    )?;
    let mut command = Command::new("grub-mkimage");
    command
        .args(["-O", "i386-pc", "-p", "/boot/grub", "-o"])
        .arg(&core);
    command.arg("-c").arg(&script);
    let modules = "biosdisk part_msdos ext2 fat normal serial terminal echo halt";
    succeed(command.args(modules.split(' ')), "grub-mkimage")?;
    let read = |path: &Path| fs::read(path).map_err(BootError::host("cannot read"));
    let mut disk = read(Path::new("/usr/lib/grub/i386-pc/boot.img"))?;
    disk.resize(SECTOR, 0);
    disk.extend(read(&core)?);
    disk.resize(SIZE.max(disk.len()), 0);
    write(&folder.join("grub"), &disk)
}

/// Runs each on both in turn, for the number of rounds.
pub(super) fn run(args: &BenchArgs, verdict: &mut Verdict) -> Result<String, BootError> {
    let folder = std::env::temp_dir().join(format!("anykvm-firmware-{}", std::process::id()));
    fs::create_dir_all(&folder).map_err(BootError::host("cannot make a folder"))?;
    let result = compare(args, &folder, verdict);
    // A leftover only takes space.
    let _ = fs::remove_dir_all(&folder);
    result
}

fn compare(args: &BenchArgs, folder: &Path, verdict: &mut Verdict) -> Result<String, BootError> {
    let mut lines = vec![
        [
            "",
            "anykvm, s",
            "TCG, s",
            "TCG/anykvm",
            "wall clock: anykvm, s",
            "TCG, s",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for firmware in ALL {
        for (file, package) in firmware.needs {
            if !Path::new(file).exists() {
                return Err(missing(package));
            }
        }
        let mut times = [const { (Vec::new(), Vec::new()) }; 2];
        for _ in 0..args.rounds {
            for (machine, times) in [Machine::Anykvm, Machine::Tcg].into_iter().zip(&mut times) {
                if machine == Machine::Tcg && args.no_tcg {
                    continue;
                }
                (firmware.prepare)(folder)?;
                let took = time(firmware, machine, &args.qemu, folder)?;
                super::note(&format!(
                    "{}: {machine:?}: {:.3} s of the processor's time, {:.2} s",
                    firmware.name, took.processor, took.wall
                ));
                times.0.push(took.processor);
                times.1.push(took.wall);
            }
        }
        let [(ours, our_wall), (theirs, their_wall)] = times;
        let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(o, t)| t / o).collect();
        let ratio = report::median(&ratios);
        if let Some(ratio) = ratio {
            verdict.at_least(firmware.name, ratio, BAR);
        }
        lines.push(vec![
            firmware.name.to_owned(),
            report::cell(report::median(&ours)),
            report::cell(report::median(&theirs)),
            report::cell(ratio),
            report::cell(report::median(&our_wall)),
            report::cell(report::median(&their_wall)),
        ]);
    }
    Ok(report::aligned(&lines))
}

fn command(
    firmware: &Firmware,
    machine: Machine,
    qemu: &Path,
    folder: &Path,
) -> Result<Command, BootError> {
    let mut command = if machine == Machine::Anykvm {
        let mut command = Command::new(own()?);
        command.args(["exec", "--quiet", "--"]).arg(qemu);
        command.args(["-accel", "kvm"]);
        if firmware.is_hosts {
            command.args(["-cpu", "host"]);
        }
        command
    } else {
        let mut command = Command::new(qemu);
        let bits = host::cpu::cpuid(0x8000_0008, 0)[0] & 0xff;
        let more = if firmware.is_hosts {
            format!(",phys-bits={bits}")
        } else {
            String::new()
        };
        let processor = format!("max,monitor=off{more}");
        command.args(["-accel", "tcg", "-cpu", &processor]);
        command
    };
    let folder = folder.to_string_lossy();
    let words = COMMON
        .split_whitespace()
        .chain(firmware.arguments.split_whitespace());
    let filled = |word: &str| word.replace("{dir}", &folder).replace("{space}", " ");
    command.args(words.map(filled));
    Ok(command)
}

/// Seconds of a run.
#[derive(Clone, Copy, Debug)]
struct Took {
    /// Processor time of all of QEMU.
    processor: f64,
    wall: f64,
}

/// Runs until the firmware is done. Returns the times.
fn time(
    firmware: &Firmware,
    machine: Machine,
    qemu: &Path,
    folder: &Path,
) -> Result<Took, BootError> {
    let errors = folder.join("errors");
    let file = fs::File::create(&errors).map_err(BootError::host("cannot make a file"))?;
    let (start, before) = (Instant::now(), host::clock::children_cpu_ns());
    let mut child = command(firmware, machine, qemu, folder)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file)
        .spawn()
        .map_err(|e| BootError::NoImage(format!("cannot run {}: {e}", qemu.display())))?;
    let (sender, receiver) = std::sync::mpsc::channel();
    let (end, output) = (firmware.end.as_bytes(), child.stdout.take());
    std::thread::spawn(move || {
        let is_done = output.is_some_and(|output| follow(output, end));
        // After the limit, nobody listens any more.
        let _ = sender.send((start.elapsed(), is_done));
    });
    let result = receiver.recv_timeout(LIMIT);
    // The process may have ended by itself.
    let _ = child.kill();
    child.wait().map_err(BootError::host("cannot wait"))?;
    match result {
        Ok((wall, true)) => Ok(Took {
            processor: (host::clock::children_cpu_ns() - before) as f64 / 1e9,
            wall: wall.as_secs_f64(),
        }),
        _ => {
            let text = fs::read_to_string(&errors).unwrap_or_default();
            let name = firmware.name;
            Err(BootError::NoImage(format!(
                "{name} was not done on {machine:?}\n{text}"
            )))
        }
    }
}

/// Reads until `end` has come. Returns true if it has, or if the output ends and `end` is empty.
fn follow(mut output: impl Read, end: &[u8]) -> bool {
    let mut text = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(n @ 1..) = output.read(&mut piece) {
        text.extend_from_slice(&piece[..n]);
        if !end.is_empty() && text.windows(end.len()).any(|window| window == end) {
            return true;
        }
        let keep = text.len().saturating_sub(end.len());
        text.drain(..keep);
    }
    end.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_found_wherever_it_is_cut() {
        for split in 0..8 {
            let (first, second) = b"ab over".split_at(split.min(7));
            assert!(follow(first.chain(second), b"over"), "{split}");
        }
        assert!(!follow(&b"ove"[..], b"over"));
        assert!(follow(&b"anything"[..], b""));
    }

    #[test]
    fn what_is_not_said_in_time_is_an_error() {
        let folder = std::env::temp_dir();
        let silent = firmware("silent", "", "never");
        let error = time(&silent, Machine::Tcg, Path::new("/bin/true"), &folder);
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("silent was not done")
        );
    }
}
