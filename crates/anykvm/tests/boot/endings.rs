//! Every way in which a guest, or its user, ends: the status, the message, and the terminal.

use std::io::Read;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::guest::{File, boot, kernel, wait};
use crate::terminal::Terminal;
use iced_x86::code_asm::{CodeAssembler, al, ax, dword_ptr, dx, qword_ptr, rax, rsp};
use rustix::process::{Pid, Signal, kill_process};

const COM1: u32 = 0x3f8;

pub(crate) fn out8(a: &mut CodeAssembler, port: u32, value: u8) {
    a.mov(dx, port).unwrap();
    a.mov(al, u32::from(value)).unwrap();
    a.out(dx, al).unwrap();
}

/// Tells the test that the guest runs.
pub(crate) fn say_ready(a: &mut CodeAssembler) {
    for byte in b"up\n" {
        out8(a, COM1, *byte);
    }
}

pub(crate) fn spin(a: &mut CodeAssembler) {
    let mut here = a.create_label();
    a.set_label(&mut here).unwrap();
    a.jmp(here).unwrap();
}

fn halt(a: &mut CodeAssembler) {
    let mut here = a.create_label();
    a.cli().unwrap();
    a.set_label(&mut here).unwrap();
    a.hlt().unwrap();
    a.jmp(here).unwrap();
}

#[test]
fn the_guest_ends_itself() {
    type Code = fn(&mut CodeAssembler);
    let triple_fault: Code = |a| {
        a.push(0).unwrap();
        a.push(0).unwrap();
        a.lidt(dword_ptr(rsp)).unwrap();
        a.int3().unwrap();
    };
    let rows: [(&str, Code, i32, &str); 6] = [
        (
            "ACPI S5",
            |a| {
                a.mov(dx, 0x604).unwrap();
                a.mov(ax, 0x3400).unwrap();
                a.out(dx, ax).unwrap();
            },
            0,
            "",
        ),
        ("keyboard controller", |a| out8(a, 0x64, 0xfe), 0, ""),
        ("reset port", |a| out8(a, 0xcf9, 6), 0, ""),
        (
            "triple fault",
            triple_fault,
            125,
            "anykvm: the guest crashed: triple fault on vCPU 0\n",
        ),
        (
            "no stack and no handler",
            |a| {
                a.mov(rsp, 0x0080_0000_0000_0000u64).unwrap();
                a.push(rax).unwrap();
            },
            125,
            "anykvm: the guest crashed: triple fault on vCPU 0\n",
        ),
        (
            "unmapped memory",
            |a| {
                a.mov(rax, 0x1000_0000_0000u64).unwrap();
                a.mov(rax, qword_ptr(rax)).unwrap();
            },
            125,
            "anykvm: the guest crashed: triple fault on vCPU 0\n",
        ),
    ];
    for (what, code, want, message) in rows {
        let kernel = kernel(|a| {
            code(a);
            spin(a);
        });
        let mut child = boot(&kernel).spawn().unwrap();
        assert_eq!(wait(&mut child), Some(want), "{what}");
        let mut stderr = String::new();
        let mut pipe = child.stderr.take().unwrap();
        pipe.read_to_string(&mut stderr).unwrap();
        assert_eq!(stderr, message, "{what}");
    }
}

/// Starts `command` and waits until the guest has said that it runs.
fn started(command: &mut Command) -> Child {
    let mut child = command.spawn().unwrap();
    let mut ready = [0; 3];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    assert_eq!(&ready, b"up\n");
    child
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[test]
fn signals_end_busy_and_halted_guests() {
    let busy = kernel(|a| {
        say_ready(a);
        spin(a);
    });
    let halted = kernel(|a| {
        say_ready(a);
        halt(a);
    });
    for (kernel, what) in [(&busy, "busy"), (&halted, "halted")] {
        for cpus in ["1", "3"] {
            for (number, name) in [(15, Signal::TERM), (1, Signal::HUP), (2, Signal::INT)] {
                let mut child = started(boot(kernel).args(["--cpus", cpus]));
                let start = Instant::now();
                signal(&child, name);
                assert_eq!(wait(&mut child), Some(128 + number), "{what}, {cpus} vCPUs");
                assert!(start.elapsed() < Duration::from_secs(5), "{what}: slow");
            }
        }
    }
}

#[test]
fn nobody_reads_the_output() {
    let kernel = kernel(|a| {
        say_ready(a);
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        out8(a, COM1, b'x');
        a.jmp(again).unwrap();
    });
    let mut child = started(&mut boot(&kernel));
    drop(child.stdout.take());
    assert_eq!(wait(&mut child), Some(141));
}

#[test]
fn a_reader_that_stops_reading_does_not_keep_us() {
    let kernel = kernel(|a| {
        say_ready(a);
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        out8(a, COM1, b'x');
        a.jmp(again).unwrap();
    });
    let mut child = started(&mut boot(&kernel));
    // Long enough for the pipe and `anykvm`'s buffer to fill.
    std::thread::sleep(Duration::from_secs(1));
    signal(&child, Signal::TERM);
    assert_eq!(wait(&mut child), Some(143));
}

/// Starts `kernel` on a terminal, which is raw when this returns.
fn started_on_terminal(kernel: &File) -> Terminal {
    let mut terminal = Terminal::start(&boot(kernel), [true; 3]);
    terminal.read_until("up");
    assert!(!terminal.is_cooked(), "raw while the guest runs");
    terminal
}

fn busy_kernel() -> File {
    kernel(|a| {
        say_ready(a);
        spin(a);
    })
}

#[test]
fn the_escape_key_ends_the_guest_and_restores_the_terminal() {
    let kernel = busy_kernel();
    for keys in [b"\x01x".as_slice(), b"abc\x01\x01\x01X"] {
        let mut terminal = started_on_terminal(&kernel);
        // Keys that a terminal in its usual mode would take for itself.
        terminal.type_keys(b"\x03\x1a\x1c");
        terminal.type_keys(keys);
        assert_eq!(wait(&mut terminal.child), Some(0));
        assert!(terminal.is_cooked());
    }
}

#[test]
fn signals_and_crashes_restore_the_terminal() {
    let busy = busy_kernel();
    for (name, want) in [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::QUIT, 131)] {
        let mut terminal = started_on_terminal(&busy);
        signal(&terminal.child, name);
        assert_eq!(wait(&mut terminal.child), Some(want));
        assert!(terminal.is_cooked());
    }
    let crashing = kernel(|a| {
        say_ready(a);
        // The guest spins, so that the test has time to look at the terminal.
        a.mov(rax, 30_000_000u64).unwrap();
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.dec(rax).unwrap();
        a.jne(again).unwrap();
        a.push(0).unwrap();
        a.push(0).unwrap();
        a.lidt(dword_ptr(rsp)).unwrap();
        a.int3().unwrap();
    });
    let mut terminal = started_on_terminal(&crashing);
    let text = terminal.read_until("triple fault on vCPU 0\r\n");
    // The message is printed when the terminal has its usual mode again, so it begins at a line's start.
    assert!(text.contains("anykvm: the guest crashed"), "{text}");
    assert_eq!(wait(&mut terminal.child), Some(125));
    assert!(terminal.is_cooked());
}

#[test]
fn a_terminal_that_is_closed_ends_the_guest() {
    let kernel = busy_kernel();
    let mut terminal = started_on_terminal(&kernel);
    terminal.hang_up();
    assert_eq!(wait(&mut terminal.child), Some(129));
}
