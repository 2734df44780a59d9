//! What a user sees who got something wrong: one line on standard error, status 2, no panic.

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

/// Each row: arguments, and what the only line must contain.
fn assert_refused(rows: &[(&[&str], &str)]) {
    for (args, want) in rows {
        let (status, stderr) = boot(args);
        assert_eq!(status, Some(2), "{args:?}: {stderr}");
        assert!(stderr.starts_with("anykvm: "), "{args:?}: {stderr}");
        assert!(stderr.contains(want), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
}

/// A bzImage as far as its header goes, with a compressed kernel of nothing behind it.
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
    // Bridge, random numbers and thirty disks fill the bus.
    let read_only = format!("{disk},ro");
    let mut args = vec!["--kernel", kernel, "--no-initrd"];
    for _ in 0..31 {
        args.extend(["--disk", &read_only]);
    }
    assert_refused(&[(&args, "room for 31 PCI devices")]);
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
