//! `--confine`: what vCPUs do without system calls. (`cargo xtask boots confined`: a kernel.)

use std::fs;
use std::io::Read;

use crate::endings::{out8, say_ready, spin};
use crate::guest::{boot, kernel, wait};
use iced_x86::code_asm::{CodeAssembler, ax, byte_ptr, dx, rcx, rdi};

/// Writes a byte to each page from 4 MiB up to 15 MiB, and says that it has.
fn touch(a: &mut CodeAssembler) {
    let mut again = a.create_label();
    a.mov(rdi, 0x40_0000u64).unwrap();
    a.mov(rcx, 0xb00u64).unwrap();
    a.set_label(&mut again).unwrap();
    a.mov(byte_ptr(rdi), 1).unwrap();
    a.add(rdi, 0x1000).unwrap();
    a.dec(rcx).unwrap();
    a.jnz(again).unwrap();
    say_ready(a);
}

#[test]
fn a_confined_guest_powers_off() {
    let kernel = kernel(|a| {
        touch(a);
        a.mov(dx, 0x604).unwrap();
        a.mov(ax, 0x3400).unwrap();
        a.out(dx, ax).unwrap();
    });
    for engine in ["jit", "interp"] {
        let mut command = boot(&kernel);
        let child = command.arg("--confine").env("ANYKVM_ENGINE", engine);
        let mut child = child.spawn().unwrap();
        assert_eq!(wait(&mut child), Some(0), "{engine}");
        let mut text = String::new();
        child.stdout.unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "up\n", "{engine}");
    }
}

/// The filter is there, in the vCPUs' threads alone, and the guest can be stopped from outside.
#[test]
fn vcpu_threads_have_the_filter() {
    let kernel = kernel(|a| {
        touch(a);
        out8(a, 0x3f8, b'!');
        spin(a);
    });
    let mut child = boot(&kernel)
        .args(["--confine", "--cpus", "2"])
        .spawn()
        .unwrap();
    let mut text = [0; 4];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"up\n!");
    let mut filtered = Vec::new();
    for thread in fs::read_dir(format!("/proc/{}/task", child.id())).unwrap() {
        let folder = thread.unwrap().path();
        let name = fs::read_to_string(folder.join("comm")).unwrap();
        let status = fs::read_to_string(folder.join("status")).unwrap();
        match status.lines().find_map(|l| l.strip_prefix("Seccomp:\t")) {
            Some("2") => filtered.push(name.trim().to_owned()),
            other => assert_eq!(other, Some("0"), "{name}"),
        }
    }
    filtered.sort();
    assert_eq!(filtered, ["vcpu0", "vcpu1"]);
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    assert_eq!(wait(&mut child), Some(128 + 15));
}
