//! `anykvm bench vpmu`: measures what a guest's accesses to its performance counters cost, and what it costs that these
//! count ([`counted`]).
//!
//! The guest is a loop around one access, and the time of the same loop without the access is subtracted. The best of
//! many runs counts. Beside it are the figures of the patch series of 2019 that made KVM reuse the host's events: its
//! longest latencies before and after.

mod counted;
mod events;
mod interrupts;

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anykvm_ioctls::VcpuExit;

use super::bare::{Bare, Mode};
use super::machines::Files;
use super::report::{self, Verdict};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Number of accesses between two exits, and of runs.
const TURNS: u32 = 1_000;
const RUNS: u32 = 100;

/// Parts of the suite beside programs, as `--only` names them.
pub(super) const PARTS: [&str; 5] = ["accesses", "overflows", "host-events", "profile", "loops"];

/// The registers of a vendor's counters.
struct Registers {
    select: u32,
    counter: u32,
    global_ctrl: u32,
    /// The register that clears overflow bits in the global status.
    overflow_clear: u32,
}

impl Registers {
    const fn is_amd(&self) -> bool {
        self.select == AMD.select
    }
    /// Returns the distance between two event selects.
    const fn step(&self) -> u32 {
        if self.is_amd() { 2 } else { 1 }
    }
}

const INTEL: Registers = Registers {
    select: 0x186,
    counter: 0xc1,
    global_ctrl: 0x38f,
    overflow_clear: 0x390,
};
const AMD: Registers = Registers {
    select: 0xc001_0200,
    counter: 0xc001_0201,
    global_ctrl: 0xc000_0301,
    overflow_clear: 0xc000_0302,
};

/// An event select of instructions at both levels, enabled.
const COUNTING: u32 = 0x43_00c0;

fn load(register: u8, value: u32) -> Vec<u8> {
    let mut code = vec![0xb8 | register];
    code.extend(value.to_le_bytes());
    code
}

/// Returns MOV ECX, MOV EAX, XOR EDX, WRMSR.
fn wrmsr(index: u32, value: u32) -> Vec<u8> {
    [load(1, index), load(0, value), vec![0x31, 0xd2, 0x0f, 0x30]].concat()
}

/// Returns MOV ECX, and RDMSR (0x32) or RDPMC (0x33).
fn read(index: u32, opcode: u8) -> Vec<u8> {
    [load(1, index), vec![0x0f, opcode]].concat()
}

/// Measures all parts. Returns the tables.
pub(super) fn run(
    args: &BenchArgs,
    files: &mut Files,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    files.add_program("events", include_str!("events.c"))?;
    let r = if hypervisor_is_amd()? { AMD } else { INTEL };
    let mut first = String::new();
    for part in PARTS {
        if !args.only.is_empty() && !args.only.iter().any(|name| name == part) {
            continue;
        }
        first += &match part {
            "accesses" => accesses(&r, verdict)?,
            "overflows" => interrupts::measure(&r, verdict)?,
            "host-events" => events::host(&r, files)?,
            "profile" => events::profile(files, verdict)?,
            _ => counted::loops(&r, verdict)?,
        };
    }
    // The rest takes minutes. Nobody who closes our output wants it.
    let _ = std::io::stdout().write_all(first.as_bytes());
    counted::programs(args, files, verdict)
}

/// Measures all accesses. Returns the table.
fn accesses(r: &Registers, verdict: &mut Verdict) -> Result<String, BootError> {
    let on = wrmsr(r.select, COUNTING);
    let off = wrmsr(r.select, 0);
    let nothing = Vec::new();
    // Each row has a name, the code before the loop, the loop's accesses and their number, the bar, and the figures
    // before and after in 2019.
    let rows = [
        (
            "disable and enable by the event select",
            &on,
            [&off[..], &on].concat(),
            2.0,
            1000.0,
            ["36,000", "17,000"],
        ),
        (
            "enable by the event select, others idle",
            &nothing,
            [&on[..], &off].concat(),
            2.0,
            1000.0,
            ["36,000", "17,000"],
        ),
        (
            "disable and enable by the global control",
            &on,
            [wrmsr(r.global_ctrl, 0), wrmsr(r.global_ctrl, 1)].concat(),
            2.0,
            1000.0,
            ["57,000,000", "17,000,000"],
        ),
        (
            "set the counter",
            &on,
            wrmsr(r.counter, 0),
            1.0,
            1000.0,
            ["-", "-"],
        ),
        (
            "RDMSR of the counter",
            &on,
            read(r.counter, 0x32),
            1.0,
            1000.0,
            ["-", "-"],
        ),
        (
            "RDPMC, counting",
            &on,
            read(0, 0x33),
            1.0,
            30.0,
            ["35,000", "18,000"],
        ),
        (
            "RDPMC, idle",
            &nothing,
            read(0, 0x33),
            1.0,
            30.0,
            ["35,000", "18,000"],
        ),
    ];
    let head = [
        "one access, ns",
        "anykvm",
        "TCG",
        "KVM 2019, before",
        "after",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (name, before, body, accesses, bar, [legacy, v2]) in rows {
        let with = measure(before, &body)?;
        let without = measure(before, &[])?;
        let ns = (with - without).max(0.0) / accesses;
        verdict.at_most(name, ns, bar);
        lines.push(vec![
            name.to_owned(),
            report::cell(Some(ns)),
            "not supported".to_owned(),
            legacy.to_owned(),
            v2.to_owned(),
        ]);
    }
    let mut text = report::aligned(&lines);
    if !Path::new("/sys/bus/event_source/devices/cpu").exists() {
        text.push_str(
            "This host shows no hardware counters: there is nothing native to compare with.\n",
        );
    }
    Ok(text)
}

/// Returns true if the counters that KVM_GET_SUPPORTED_CPUID shows are AMD's.
fn hypervisor_is_amd() -> Result<bool, BootError> {
    const AUTH: u32 = u32::from_le_bytes(*b"Auth");
    let kvm = anykvm_ioctls::Kvm::new().map_err(BootError::kvm("opening KVM"))?;
    let list = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    let first = list.as_slice().iter().find(|e| e.function == 0);
    Ok(first.is_some_and(|e| e.ebx == AUTH))
}

/// Makes a guest that executes `before`, and then for ever `turns` iterations of `body` and an exit.
fn looping(before: &[u8], body: &[u8], turns: u32) -> Result<Bare, BootError> {
    looping_with(before, body, turns, false)
}

/// Makes the same guest with or without interrupt controllers.
fn looping_with(
    before: &[u8],
    body: &[u8],
    turns: u32,
    has_chips: bool,
) -> Result<Bare, BootError> {
    let mut code = before.to_vec();
    let begin = code.len();
    code.extend([0x41, 0xb8]); // mov r8d, turns
    code.extend(turns.to_le_bytes());
    let turn = code.len();
    code.extend(body);
    code.extend([0x41, 0xff, 0xc8, 0x0f, 0x85]); // dec r8d; jne
    let back = turn as i32 - (code.len() as i32 + 4);
    code.extend(back.to_le_bytes());
    code.extend([0xe6, 0x80, 0xe9]); // out 0x80, al; jmp
    let back = begin as i32 - (code.len() as i32 + 4);
    code.extend(back.to_le_bytes());
    Bare::new(Mode::Long, has_chips, &code)
}

/// Returns the nanoseconds of an iteration of the loop around `body`.
fn measure(before: &[u8], body: &[u8]) -> Result<f64, BootError> {
    let Bare {
        mut vcpu, vm: _vm, ..
    } = looping(before, body, TURNS)?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let begin = Instant::now();
        match vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
            VcpuExit::IoOut(..) => {}
            exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
        }
        best = best.min(begin.elapsed().as_secs_f64() / f64::from(TURNS));
    }
    Ok(best * 1e9)
}
