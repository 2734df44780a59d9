//! Translation against interpretation where segments have bases and limits: random programs in real mode, in virtual-8086
//! mode, and in protected mode with code of 16 and of 32 bits.
//!
//! There is no paging. Each interrupt and exception leads to a HLT. Arithmetic flags are not compared after an
//! exception or exit (see [`super`]).

mod generate;
mod pieces;
mod state;

use core::fmt::Write as _;

use iced_x86::{Decoder, DecoderOptions, FastFormatter};
use x86_cpu::CpuState;
use x86_defs::{reg, rflags};
use x86_interp::RunStop;

use self::{
    generate::{Forms, Program},
    state::{HANDLERS, HANDLERS_END, RAM, initial_memory},
};
use super::machine::{Machine, Weather};

/// Number of returns to the run loop after which a program is given up.
const PATIENCE: u32 = 4_000;
/// Number of instructions of a program that are searched for those after which the engines may differ.
const STEPS: u32 = 1_000_000;

/// How much was tested.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Number of programs that were compared.
    pub compared: u64,
    /// Number of these that ended with their last instruction.
    pub completed: u64,
    /// Number of programs that were given up because they took too long.
    pub endless: u64,
    /// Counters of the translator.
    pub stats: x86_jit::Stats,
}

/// Both machines.
#[derive(Debug)]
pub struct Segments {
    forms: Forms,
    interp: Machine,
    jit: Machine,
    initial: Vec<u8>,
    summary: Summary,
}

impl Segments {
    /// # Errors
    /// Memory cannot be mapped.
    pub fn new() -> std::io::Result<Self> {
        let mut all = Self {
            forms: Forms::new(),
            interp: Machine::new(None)?,
            jit: Machine::new(Some(8 << 20))?,
            initial: initial_memory(),
            summary: Summary::default(),
        };
        // A far return leads anywhere, also to bytes that read the time.
        for machine in [&mut all.interp, &mut all.jit] {
            machine.stop_tsc();
        }
        Ok(all)
    }

    /// Does what [`Self::new`] does, and turns lock-step on.
    ///
    /// # Errors
    /// Memory cannot be mapped.
    pub fn in_lockstep() -> std::io::Result<Self> {
        let mut all = Self::new()?;
        all.jit.set_lockstep(false);
        Ok(all)
    }

    /// Returns the number of entries into translated code that were compared with the interpreter.
    pub fn stretches(&self) -> u64 {
        self.jit.stretches()
    }

    /// Returns how much was tested so far.
    pub fn summary(&self) -> Summary {
        Summary {
            stats: self.jit.stats(),
            ..self.summary
        }
    }

    /// Runs the program of a seed on both machines.
    ///
    /// # Errors
    /// What differs, with the shortest program found that shows it.
    pub fn run(&mut self, seed: u64) -> Result<(), String> {
        let mut program = Program::new(&self.forms, seed);
        let Err(mut report) = self.compare(&program) else {
            return Ok(());
        };
        let mut again = true;
        while core::mem::take(&mut again) {
            for n in 0..program.elements.len() {
                if core::mem::replace(&mut program.elements[n].off, true) {
                    continue;
                }
                match self.compare(&program) {
                    Err(shorter) => (report, again) = (shorter, true),
                    Ok(()) => program.elements[n].off = false,
                }
            }
        }
        Err(format!("seed {seed:#x}\n{}{report}", listing(&program)))
    }

    /// Returns the listing of a seed's program.
    pub fn listing(&self, seed: u64) -> String {
        listing(&Program::new(&self.forms, seed))
    }

    fn compare(&mut self, program: &Program) -> Result<(), String> {
        let Some(memory) = self.memory(program) else {
            return Ok(());
        };
        let differences = self.run_both(program, &memory);
        if differences.is_ok() {
            return differences;
        }
        // A branch into the middle of an instruction leads to any other one.
        self.interp.load(&memory, &program.start);
        if self.interp.may_differ(STEPS) {
            return Ok(());
        }
        differences
    }

    /// Returns what is in memory when a program begins.
    fn memory(&self, program: &Program) -> Option<Vec<u8>> {
        let code = program.assemble()?;
        let mut memory = self.initial.clone();
        memory[0x8000..].copy_from_slice(&program.data[0x8000..]);
        let at = program.linear() as usize;
        memory[at..at + code.len()].copy_from_slice(&code);
        Some(memory)
    }

    fn run_both(&mut self, program: &Program, memory: &[u8]) -> Result<(), String> {
        let (a, b) = (&mut self.interp, &mut self.jit);
        a.load(memory, &program.start);
        let weather = Weather {
            poll_every: 64,
            ..Default::default()
        };
        let Some(theirs) = a.run(weather, PATIENCE / 64) else {
            self.summary.endless += 1;
            return Ok(());
        };
        b.load(memory, &program.start);
        let ours = b.run(program.weather, PATIENCE * 8);
        if let Some(report) = b.take_difference() {
            return Err(report);
        }
        self.summary.compared += 1;
        let ended = theirs == RunStop::Halt && !is_in_handler(&a.cpu);
        self.summary.completed += u64::from(ended);
        let mut d = String::new();
        if Some(theirs) != ours {
            let _ = writeln!(d, "stop: interpreter {theirs:?}, translated {ours:?}");
        }
        if theirs == RunStop::TripleFault {
            // Flags may have been pushed to anywhere on the way.
            return if d.is_empty() { Ok(()) } else { Err(d) };
        }
        let mut memories = [a.memory().to_vec(), b.memory().to_vec()];
        for (cpu, memory) in [&mut a.cpu, &mut b.cpu].into_iter().zip(&mut memories) {
            if !ended {
                forget_flags(cpu, memory);
            }
            super::leave_out(cpu);
        }
        for n in 0..16 {
            let (a, b) = (a.cpu.gpr[n], b.cpu.gpr[n]);
            if a != b {
                let _ = writeln!(d, "gpr{n}: interpreter {a:#x}, translated {b:#x}");
            }
        }
        let (x, y) = (&a.cpu, &b.cpu);
        if (x.rip(), x.rflags) != (y.rip(), y.rflags) {
            let _ = writeln!(
                d,
                "rip, rflags: interpreter {:#x} {:#x}, translated {:#x} {:#x}",
                x.rip(),
                x.rflags,
                y.rip(),
                y.rflags
            );
        }
        if d.is_empty() && x != y {
            let _ = writeln!(d, "system state: interpreter {x:x?}\ntranslated {y:x?}");
        }
        let [x, y] = memories;
        let differing = (0..RAM).filter(|at| x[*at] != y[*at]);
        for at in differing.take(6) {
            let _ = writeln!(
                d,
                "memory {at:#x}: interpreter {:#x}, translated {:#x}",
                x[at], y[at]
            );
        }
        if d.is_empty() { Ok(()) } else { Err(d) }
    }
}

fn is_in_handler(cpu: &CpuState) -> bool {
    let at = cpu.seg[reg::CS].base.wrapping_add(cpu.rip()) & 0xffff_ffff;
    (HANDLERS..HANDLERS_END).contains(&at)
}

/// Clears arithmetic flags, and those that were pushed.
fn forget_flags(cpu: &mut CpuState, memory: &mut [u8]) {
    cpu.rflags &= !rflags::ARITH;
    if !is_in_handler(cpu) {
        return;
    }
    let ss = &cpu.seg[reg::SS];
    let mask = if ss.attr.is_big() {
        0xffff_ffff
    } else {
        0xffff
    };
    // Frames have words of 16 and 32 bits, with an error code and without.
    let word = if cpu.is_protected() { 4 } else { 2 };
    for n in 2..4 {
        let offset = cpu.gpr[reg::RSP].wrapping_add(n * word) & mask;
        let at = (ss.base.wrapping_add(offset) & 0xffff_ffff) as usize;
        for (byte, flags) in [
            (at, rflags::ARITH as u8),
            (at + 1, (rflags::ARITH >> 8) as u8),
        ] {
            if let Some(byte) = memory.get_mut(byte) {
                *byte &= !flags;
            }
        }
    }
}

fn listing(program: &Program) -> String {
    let c = &program.start;
    let mut text = format!(
        "cr0 {:x} rflags {:x} cpl {} gpr {:x?}\nsegments {:x?}\n",
        c.cr0,
        c.rflags,
        c.cpl,
        &c.gpr[..8],
        c.seg
    );
    let Some(code) = program.assemble() else {
        return text;
    };
    let mut formatter = FastFormatter::new();
    let ip = program.start.rip();
    let mut d = Decoder::with_ip(program.bits, &code, ip, DecoderOptions::NONE);
    while d.can_decode() {
        let i = d.decode();
        let _ = write!(text, "{:x} ", i.ip());
        formatter.format(&i, &mut text);
        let _ = writeln!(text, "  [{:?}]", i.code());
    }
    text
}
