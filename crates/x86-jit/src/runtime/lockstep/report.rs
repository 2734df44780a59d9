//! The report of a difference: the states, the guest's code and the code made of it.

use core::fmt::Write as _;

use iced_x86::{Decoder, DecoderOptions, FastFormatter};
use x86_cpu::CpuState;

use super::{Difference, FP_BYTES, Lockstep, TRAIL, normal, registers};
use crate::{Jit, JitBus};
use x86_codegen::ir::segment::{code_at, code_bits, linear};

/// How many of the guest's instructions are shown.
const SHOWN: usize = 24;

/// Returns the report. `before`: where the stretch began; `good`: up to where both engines agree; `end`: where
/// translated code came to.
pub(super) fn text<B: JitBus>(
    jit: &Jit<B>,
    l: &Lockstep<B>,
    bus: &mut B,
    (before, good, end): (&CpuState, &CpuState, &CpuState),
    difference: &Difference,
) -> String {
    let mut t = format!(
        "lock-step: translated code and the interpreter differ: {}\n",
        difference.why
    );
    let _ = writeln!(t, "start of the stretch:\n  {}", registers(before));
    if good.rip() != before.rip() {
        let _ = writeln!(t, "both come to:\n  {}", registers(good));
    }
    let _ = writeln!(t, "translated code comes to:\n  {}", registers(end));
    if let Some(near) = &difference.nearest {
        let _ = writeln!(t, "the interpreter:\n  {}", registers(near));
        differences(&mut t, near, end);
    }
    let changes = |t: &mut String, name: &str, log: &super::Log| {
        for (host, old, new) in log.changes().take(12) {
            let _ = writeln!(
                t,
                "  {name}: memory at host {host:#x}: {old:#x} to {new:#x}"
            );
        }
    };
    changes(&mut t, "translated code", &l.log);
    changes(&mut t, "the interpreter", &l.second);
    let _ = writeln!(t, "guest code from {:x}:", good.rip());
    guest_code(&mut t, good, bus);
    let shown = l.steps.min(TRAIL);
    let path: Vec<String> = (l.steps - shown..l.steps)
        .map(|n| format!("{:x}", l.trail[n % TRAIL]))
        .collect();
    let _ = writeln!(
        t,
        "the interpreter's last {shown} of {} instructions: {}",
        l.steps,
        path.join(" ")
    );
    for (offset, code) in jit.code_of(code_at(good)) {
        let _ = writeln!(t, "translated code at {offset:#x}:");
        host_code(&mut t, offset, &code);
    }
    t
}

fn differences(t: &mut String, interp: &CpuState, jit: &CpuState) {
    let (a, b) = (normal(interp), normal(jit));
    for n in 0..16 {
        if a.gpr[n] != b.gpr[n] {
            let _ = writeln!(
                t,
                "  r{n}: interpreter {:x}, translated {:x}",
                a.gpr[n], b.gpr[n]
            );
        }
    }
    if a.rflags != b.rflags {
        let _ = writeln!(
            t,
            "  rflags: interpreter {:x}, translated {:x}",
            a.rflags, b.rflags
        );
    }
    for at in (0..FP_BYTES).step_by(8) {
        let (x, y) = (&a.fp.area[at..at + 8], &b.fp.area[at..at + 8]);
        if x != y {
            let _ = writeln!(t, "  fp+{at}: interpreter {x:02x?}, translated {y:02x?}");
        }
    }
}

fn guest_code<B: JitBus>(t: &mut String, cpu: &CpuState, bus: &mut B) {
    let mut formatter = FastFormatter::new();
    let mut rip = cpu.rip();
    for _ in 0..SHOWN {
        let mut bytes = [0; 15];
        let n = bus.ram().peek(cpu, linear(cpu, rip), &mut bytes);
        let i = Decoder::with_ip(code_bits(cpu), &bytes[..n], rip, DecoderOptions::NONE).decode();
        if i.is_invalid() {
            return;
        }
        let _ = write!(t, "  {rip:x} ");
        formatter.format(&i, t);
        t.push('\n');
        rip = i.next_ip();
    }
}

fn host_code(t: &mut String, offset: usize, code: &[u8]) {
    let mut formatter = FastFormatter::new();
    let mut decoder = Decoder::with_ip(64, code, offset as u64, DecoderOptions::NONE);
    while decoder.can_decode() {
        let i = decoder.decode();
        let _ = write!(t, "  {:x} ", i.ip());
        formatter.format(&i, t);
        t.push('\n');
    }
}
