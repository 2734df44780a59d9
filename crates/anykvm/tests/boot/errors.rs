//! What a user sees who got something wrong: one line on standard error, status 2, no panic.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::guest::{File, elf, kernel};

fn boot(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_anykvm"))
        .arg("boot")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the command runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.stdout.is_empty(), "{args:?}");
    (output.status.code(), stderr)
}

/// Checks each row: arguments, and what the only line must contain.
fn assert_refused(rows: &[(&[&str], &str)]) {
    for (args, want) in rows {
        let (status, stderr) = boot(args);
        assert_eq!(status, Some(2), "{args:?}: {stderr}");
        assert!(stderr.starts_with("anykvm: "), "{args:?}: {stderr}");
        assert!(stderr.contains(want), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
}

/// Returns a bzImage as far as its header goes, with an empty compressed kernel behind it.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0u8; 4096];
    image[0x1f1] = 1;
    image[0x1f4..0x1f8].copy_from_slice(&192u32.to_le_bytes());
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
    image[0x211] = 1;
    image[0x238..0x23c].copy_from_slice(&2047u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&64u32.to_le_bytes());
    image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
    image[0x260..0x264].copy_from_slice(&0x200_0000u32.to_le_bytes());
    image[1024..1028].copy_from_slice(b"\x02\x21\x4c\x18");
    image
}

#[test]
fn kernels() {
    let whole = bzimage();
    let damaged = |at: usize, bytes: &[u8]| {
        let mut image = whole.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        image
    };
    let zeros = File::new("zeros", &[0; 8192]);
    let empty = File::new("empty", &[]);
    let script = File::new("script", b"#!/bin/sh\nexit 0\n");
    let truncated = File::new("truncated", &whole[..3000]);
    let no_size = File::new("nosize", &damaged(0x1f4, &[0, 0]));
    let payload = File::new("payload", &damaged(1024, &[0xff; 4]));
    let old = File::new("old", &damaged(0x206, &[0, 2]));
    let arm = File::new("arm", &elf(183, &[0; 64]));
    let mut arm64_image = vec![0; 4096];
    arm64_image[0x38..0x3c].copy_from_slice(b"ARMd");
    let arm64_image = File::new("arm64", &arm64_image);
    let half_elf = elf(62, &[0; 4096]);
    let half_elf = File::new("halfelf", &half_elf[..2000]);
    let mut far = elf(62, &[0; 64]);
    far[64 + 0x18..64 + 0x20].copy_from_slice(&0xffff_ffff_f000u64.to_le_bytes());
    let far = File::new("far", &far);
    let library = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let library = File::new("library", &library);
    let kernel = |file: &File| ["--kernel".to_owned(), file.path().to_owned()];
    let rows = [
        (kernel(&zeros), "not an x86 kernel"),
        (kernel(&empty), "only 0 bytes"),
        (kernel(&script), "not a kernel"),
        (kernel(&truncated), "truncated"),
        (kernel(&no_size), "corrupted"),
        (kernel(&payload), "corrupted"),
        (kernel(&old), "too old"),
        (kernel(&arm), "another machine"),
        (kernel(&arm64_image), "not an x86 kernel"),
        (kernel(&half_elf), "truncated"),
        (kernel(&far), "too small"),
        (kernel(&library), "no executable"),
    ];
    for ([option, path], want) in &rows {
        assert_refused(&[(&[option, path, "--no-initrd"], want)]);
    }
    assert_refused(&[
        (
            &["--kernel", "/nonexistent"],
            "cannot read kernel /nonexistent",
        ),
        (&["--kernel", "/"], "cannot read kernel /"),
    ]);
}

#[test]
fn memory_and_cpus() {
    let image = File::new("bzimage", &bzimage());
    let kernel = kernel(|a| a.nop().unwrap());
    let initrd = File::new("initrd", &vec![0; 12 << 20]);
    let (image, kernel, initrd) = (image.path(), kernel.path(), initrd.path());
    assert_refused(&[
        (
            &["--kernel", image, "--no-initrd", "--mem", "1M"],
            "guest memory of 1 MiB is too small: this kernel needs at least",
        ),
        (
            &["--kernel", kernel, "--no-initrd", "--mem", "1M"],
            "too small",
        ),
        (
            &["--kernel", kernel, "--initrd", initrd, "--mem", "8M"],
            "guest memory of 8 MiB is too small: the kernel with its initramfs needs at least",
        ),
        (
            &["--kernel", kernel, "--initrd", "/nonexistent"],
            "cannot read initrd /nonexistent",
        ),
        (
            &["--kernel", kernel, "--initrd", "/"],
            "cannot read initrd /",
        ),
        (&["--mem", "1048577"], "multiple of 4096"),
        (&["--mem", "0"], "at least 1048576"),
        (&["--mem", "4096"], "at least 1048576"),
        (
            &["--kernel", kernel, "--no-initrd", "--mem", "8000000G"],
            "cannot allocate",
        ),
        (&["--cpus", "0"], "must be 1 to 254"),
        (&["--cpus", "255"], "must be 1 to 254"),
        (&["--cpus", "1000"], "must be 1 to 254"),
        (
            &[
                "--kernel",
                kernel,
                "--no-initrd",
                "--append",
                &"x".repeat(4000),
            ],
            "command line",
        ),
        (&["--overlay", "/nonexistent"], "cannot read overlay"),
    ]);
}

#[test]
fn more_memory_than_the_machine_has() {
    let kernel = kernel(|a| a.ud2().unwrap());
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = text
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap();
    let mem = format!("{}G", 2 * (total >> 20) + 1);
    let (status, stderr) = boot(&[kernel.path(), "--no-initrd", "--mem", &mem]);
    // The machine may refuse it, too.
    assert!(matches!(status, Some(2 | 125)), "{stderr}");
    let is_told = stderr.contains("--mem: the guest's ") && stderr.contains(" are more than the ");
    assert!(is_told, "{stderr}");
}

#[test]
fn disks() {
    let kernel = kernel(|a| a.nop().unwrap());
    let kernel = kernel.path();
    let odd = File::new("odd", &[0; 1000]);
    let empty = File::new("nothing", &[]);
    let disk = File::new("disk", &[0; 4096]);
    let (odd, empty, disk) = (odd.path(), empty.path(), disk.path());
    assert_refused(&[
        (&["--disk", "/nonexistent"], "cannot read disk /nonexistent"),
        (&["--disk", "/"], "disk /: not a file or block device"),
        (&["--disk", "/dev/null"], "not a file or block device"),
        (&["--disk", odd], "1000 bytes is not a multiple of 512"),
        (&["--disk", empty], "empty"),
        (
            &["--disk", disk, "--disk", disk],
            "in use by another process",
        ),
        (
            &["--disk", disk, "--disk", &format!("{disk},ro")],
            "in use by another process",
        ),
        (&["--root", "/nonexistent"], "cannot read root /nonexistent"),
        (&["--root", "/"], "--root /: "),
        (&["--root", empty], "empty"),
    ]);
    // The bridge, the random numbers and thirty disks fill the bus.
    let read_only = format!("{disk},ro");
    let mut args = vec!["--kernel", kernel, "--no-initrd"];
    for _ in 0..31 {
        args.extend(["--disk", &read_only]);
    }
    assert_refused(&[(&args, "room for 31 PCI devices")]);
}

/// Images of other formats are refused: taken for raw disks, the first write would destroy them.
#[test]
fn images_of_other_formats() {
    let kernel = kernel(|a| a.ud2().unwrap());
    let rows: [(&str, usize, &[u8]); 21] = [
        ("a QED image", 0, b"QED\0"),
        ("a VMDK image", 0, b"KDMV\x01"),
        ("a VMDK image", 0, b"COWD\x01"),
        ("a VMDK image", 0, b"# Disk DescriptorFile\nversion=1\n"),
        ("a VDI image", 0x40, b"\x7f\x10\xda\xbe"),
        ("a VHDX image", 0, b"vhdxfile"),
        ("a VHD image", 0, b"conectix"),
        ("a VHD image", 4096 - 512, b"conectix"),
        ("a DMG image", 4096 - 512, b"koly"),
        ("(gzip): unpack", 0, b"\x1f\x8b\x08"),
        ("(xz): unpack", 0, b"\xfd7zXZ\0"),
        ("(zstd): unpack", 0, b"\x28\xb5\x2f\xfd"),
        ("(bzip2): unpack", 0, b"BZh91AY&SY"),
        ("(lz4): unpack", 0, b"\x04\x22\x4d\x18"),
        ("(zip): unpack", 0, b"PK\x03\x04"),
        ("(7z): unpack", 0, b"7z\xbc\xaf\x27\x1c"),
        ("a Parallels image", 0, b"WithoutFreeSpace"),
        ("a Parallels image", 0, b"WithouFreSpacExt"),
        ("a Bochs image", 0, b"Bochs Virtual HD Image\0"),
        ("an Android sparse image", 0, b"\x3a\xff\x26\xed"),
        ("an EWF image", 0, b"EVF\x09\x0d\x0a\xff\0"),
    ];
    for (want, at, magic) in rows {
        let mut bytes = vec![0; 4096];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        let image = File::new("image", &bytes);
        let path = image.path();
        for option in ["", ",ro"] {
            let disk = format!("{path}{option}");
            assert_refused(&[
                (&["--disk", &disk], want),
                (&["--disk", &disk], "format=raw"),
            ]);
        }
        assert_refused(&[(&["--root", path], want)]);
        assert_eq!(std::fs::read(path).unwrap(), bytes);
        // With `format=raw` the file is used as it is, and the kernel ends at once.
        let raw = format!("{path},format=raw");
        let (status, stderr) = boot(&["--kernel", kernel.path(), "--no-initrd", "--disk", &raw]);
        assert_eq!(status, Some(125), "{stderr}");
    }
    let disk = File::new("disk", &[0; 4096]);
    let (unknown, qcow) = (
        format!("{},rdonly", disk.path()),
        format!("{},format=vmdk", disk.path()),
    );
    assert_refused(&[(&["--disk", &unknown], "not ,rdonly")]);
    // An image that ends after its header's first words, whatever format it is taken for.
    let mut bytes = vec![0; 4096];
    bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    let image = File::new("image", &bytes);
    for option in ["", ",format=qcow2", ",ro"] {
        let disk = format!("{}{option}", image.path());
        assert_refused(&[(&["--disk", &disk], "clusters have 2^0 bytes")]);
    }
    assert_eq!(std::fs::read(image.path()).unwrap(), bytes);
    let raw = format!("{},format=raw", image.path());
    let (status, stderr) = boot(&["--kernel", kernel.path(), "--no-initrd", "--disk", &raw]);
    assert_eq!(status, Some(125), "{stderr}");
    let (status, stderr) = boot(&["--disk", &qcow]);
    assert_eq!(status, Some(2));
    assert!(stderr.contains("qemu-img convert"), "{stderr}");
}

#[test]
fn what_other_programs_options_look_like() {
    let kernel = kernel(|a| a.ud2().unwrap());
    let disk = File::new("disk", &[0; 4096]);
    let disks = [",readonly", ",readonly=on", ",format=raw", ",ro,serial=x"];
    let mut rows: Vec<Vec<String>> = disks
        .map(|d| vec!["--disk".into(), format!("{}{d}", disk.path())])
        .into();
    rows.push(vec![
        "-d".into(),
        format!("file={},format=raw", disk.path()),
    ]);
    for size in ["512MB", "0.5G", "512MiB", "512m"] {
        rows.push(vec!["-m".into(), size.into()]);
        rows.push(vec!["--memory".into(), size.into()]);
    }
    rows.push(vec!["-c".into(), "2".into()]);
    rows.push(vec!["--smp".into(), "2".into()]);
    for row in rows {
        let mut args = vec![kernel.path(), "--no-initrd"];
        args.extend(row.iter().map(String::as_str));
        let (status, stderr) = boot(&args);
        assert_eq!(status, Some(125), "{args:?}: {stderr}");
        assert!(stderr.contains("triple fault"), "{args:?}: {stderr}");
    }
    assert_refused(&[
        (&["uname"], "anykvm boot -- uname"),
        (
            &["--root", "/etc", "--append", "init=/x", "--", "true"],
            "init=",
        ),
    ]);
}

/// What a limit forbids is found out before the guest starts, and no limit ends in a panic.
#[test]
fn limits_of_the_process() {
    let kernel = kernel(|a| a.ud2().unwrap());
    let too_low = [
        "-v 100000",
        "-v 300000",
        "-v 600000",
        "-v 1100000",
        "-d 100000",
    ];
    let enough = ["-v 1250000", "-d 270000", "-s 256", "-f 1000"];
    for limit in too_low.iter().chain(&enough).chain(&["-n 12", "-f 0"]) {
        let anykvm = env!("CARGO_BIN_EXE_anykvm");
        let script = format!(
            "ulimit {limit} && exec {anykvm} boot --kernel {} --no-initrd --mem 64M",
            kernel.path()
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let is_refused = output.status.code() == Some(2) && stderr.lines().count() == 1;
        let has_run = output.status.code() == Some(125) && stderr.contains("triple fault");
        assert!(
            is_refused || has_run,
            "{limit}: {:?} {stderr}",
            output.status
        );
        assert!(!too_low.contains(limit) || is_refused, "{limit}: {stderr}");
        assert!(!enough.contains(limit) || has_run, "{limit}: {stderr}");
    }
}

#[test]
fn a_doctor_whom_nobody_listens_to() {
    let anykvm = env!("CARGO_BIN_EXE_anykvm");
    let status = |script: &str| {
        let script = format!("set -o pipefail; {}", script.replace("anykvm", anykvm));
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        (output.status.code(), output.stderr.is_empty())
    };
    assert_eq!(status("anykvm doctor | true"), (Some(0), true));
    assert_eq!(status("anykvm doctor --json | true"), (Some(0), true));
    assert_eq!(status("anykvm doctor >/dev/full"), (Some(2), false));
    assert_eq!(
        status("anykvm doctor /nonexistent >/dev/full 2>/dev/full"),
        (Some(2), true)
    );
    assert_eq!(status("anykvm boot --mem x 2>/dev/full"), (Some(2), true));
    assert_eq!(
        status("anykvm boot --kernel /nonexistent 2>&- >&- <&-"),
        (Some(2), true)
    );
    assert_eq!(status("anykvm --help | true"), (Some(0), true));
    let output = Command::new(anykvm)
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("[\n  {\"finding\": \"ok\", \"about\": \"trial\""),
        "{text}"
    );
    let output = Command::new(anykvm).arg("--version").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("anykvm ") && text.contains(env!("CARGO_PKG_VERSION")),
        "{text}"
    );
    // Of a checkout also which one.
    let is_checkout = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../.git")
        .exists();
    let commit = text.split(['(', ')']).nth(1).unwrap_or_default();
    assert!(!is_checkout || commit.len() == 12, "{text}");
}

#[test]
fn a_disk_that_may_not_be_read_or_written() {
    if rustix::process::geteuid().is_root() {
        // Root may read everything.
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    for (mode, option) in [(0o000, ",ro"), (0o444, "")] {
        let disk = File::new("locked", &[0; 4096]);
        std::fs::set_permissions(disk.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        let argument = format!("{}{option}", disk.path());
        assert_refused(&[(&["--disk", &argument], "cannot read disk")]);
    }
}

#[test]
fn wrong_options_are_refused_with_status_2() {
    let rows: [&[&str]; 7] = [
        &["--mem", "lots"],
        &["--cpus", "many"],
        &["--no-such-option"],
        &["--initrd", "x", "--", "true"],
        &["--disk", ""],
        &["--disk", "x,serial=a-serial-number-that-is-too-long"],
        &["--console", "tty9"],
    ];
    for args in rows {
        let (status, stderr) = boot(args);
        assert_eq!(status, Some(2), "{args:?}");
        assert!(stderr.starts_with("error:"), "{args:?}: {stderr}");
    }
}
