//! Translation against interpretation: random programs in 64-bit and compatibility mode with
//! paging, at CPL 0 and 3, run by `x86-jit` and by `x86-interp`; registers, FP
//! state and all of memory (page tables included) must be the same at the end,
//! which is a HLT, an exception's handler or an exit.
//!
//! Two things are not compared: arithmetic flags that are dead at a fault, and the addresses of the last x87
//! instruction (see `x86_jit`).

mod breakpoints;
mod elements;
mod gathers;
mod generate;
mod machine;
mod narrow;
mod program;
pub mod segments;
mod states;

use core::fmt::Write as _;

use iced_x86::{Decoder, DecoderOptions, FastFormatter, FlowControl};
use mmu::Policy;
use x86_cpu::CpuState;
use x86_defs::retired::{BRANCHES, INSTRUCTIONS, STREAMS, bit};
use x86_interp::RunStop;
use x86_native::{decoded_flags, oracle::AREA_SIZE};

use self::{
    generate::Generator,
    machine::{CODE, Counting, FRAMES, KERNEL, KERNEL32, Machine, RAM, USER, initial_memory},
    program::Program,
};

/// Number of returns to the run loop after which a program is given up.
const PATIENCE: u32 = 400;
/// The same number for the interpreter, whose returns are closer to each other.
const FEWER: u32 = 200;
/// Number of programs between two flushes of all code.
const FLUSH_EVERY: u64 = 0x400;
/// Number of programs between two changes of how translations are kept.
const POLICY_EVERY: u64 = 0x20;

/// How much was tested.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    /// Number of runs that were compared.
    pub compared: u64,
    /// Number of these that ended without an exception or exit.
    pub completed: u64,
    /// Number of runs that were given up because they took too long.
    pub endless: u64,
    /// Counters of the translator.
    pub stats: x86_jit::Stats,
}

/// Both machines.
#[derive(Debug)]
pub struct Jits {
    generator: Generator,
    interp: Machine,
    jit: Machine,
    initial: Vec<u8>,
    summary: Summary,
    programs: u64,
}

/// How a run ended.
type End = Option<RunStop>;

impl Jits {
    /// Makes both machines. `cache`: bytes of translated code; a small number makes the cache overflow.
    ///
    /// # Errors
    /// Memory cannot be mapped.
    pub fn new(cache: usize) -> std::io::Result<Self> {
        Ok(Self {
            generator: Generator::new(),
            interp: Machine::new(None)?,
            jit: Machine::new(Some(cache))?,
            initial: initial_memory(),
            summary: Summary::default(),
            programs: 0,
        })
    }

    /// Does what [`Self::new`] does, and turns lock-step on. `planted`: an instruction is translated wrongly.
    ///
    /// # Errors
    /// Memory cannot be mapped.
    pub fn in_lockstep(planted: bool) -> std::io::Result<Self> {
        let mut jits = Self::new(64 << 20)?;
        jits.jit.set_lockstep(planted);
        Ok(jits)
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
        self.programs += 1;
        if self.programs.is_multiple_of(FLUSH_EVERY) {
            self.interp.forget_code();
            self.jit.forget_code();
        }
        if self.programs.is_multiple_of(POLICY_EVERY) {
            let policies = [Policy::Tdp, Policy::Shadow, Policy::Auto];
            let n = (self.programs / POLICY_EVERY) as usize;
            self.jit.set_policy(policies[n % policies.len()]);
        }
        let program = self.generator.program(seed);
        match self.compare(&program) {
            Ok(()) => Ok(()),
            Err(first) => Err(self.shrink(program, first)),
        }
    }

    /// Returns the listing of a seed's program.
    pub fn listing(&self, seed: u64) -> String {
        listing(&self.generator.program(seed))
    }

    fn compare(&mut self, program: &Program) -> Result<(), String> {
        let Some(parts) = program.assemble() else {
            return Ok(());
        };
        let mut memory = self.initial.clone();
        for (gpa, bytes) in program.data.iter().chain(&parts) {
            let at = *gpa as usize;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
        for (n, start) in program.starts.iter().enumerate() {
            if start.features != self.interp.cpu.features {
                // KVM_SET_CPUID2 has this effect.
                self.interp.forget_code();
                self.jit.forget_code();
            }
            let mut start = start.clone();
            start.set_rip(program.base() + program.at[0]);
            let (a, b) = (&mut self.interp, &mut self.jit);
            let counting = counting(program.seed ^ n as u64);
            start.vmm_debug = breakpoints::breakpoints(program, n);
            a.load(&memory, &start);
            a.count(counting);
            let theirs = a.run(
                machine::Weather {
                    poll_every: 64,
                    ..Default::default()
                },
                FEWER,
            );
            if theirs.is_none() {
                self.summary.endless += 1;
                continue;
            }
            b.load(&memory, &start);
            b.count(counting);
            let ours = b.run(program.weather, PATIENCE * 64);
            if let Some(report) = b.take_difference() {
                return Err(report);
            }
            self.summary.compared += 1;
            let ended = theirs == Some(RunStop::Halt) && !in_handler(&a.cpu);
            self.summary.completed += u64::from(ended);
            let d = differences((theirs, a), (ours, b), &memory, program.bits());
            if !d.is_empty() {
                return Err(format!(
                    "start {n}, cpl {}, {:?}, {counting:?}, {:x?}\ninterpreter {theirs:?} rip {:x}, jit {ours:?} rip {:x}\n{d}",
                    start.cpl,
                    program.weather,
                    start.vmm_debug,
                    a.cpu.rip(),
                    b.cpu.rip(),
                ));
            }
        }
        Ok(())
    }

    /// Leaves out elements that are not needed for the difference.
    fn shrink(&mut self, mut program: Program, first: String) -> String {
        let mut report = first;
        let mut again = true;
        while again {
            again = false;
            for n in 0..program.elements.len() - 1 {
                if program.elements[n].off {
                    continue;
                }
                program.elements[n].off = true;
                match self.compare(&program) {
                    Err(d) => (report, again) = (d, true),
                    Ok(()) => program.elements[n].off = false,
                }
            }
        }
        format!("seed {:#x}\n{}{report}", program.seed, listing(&program))
    }
}

/// Returns what is counted: in every other run, at some levels, some streams, with or without overflows.
fn counting(seed: u64) -> Counting {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 32;
    if x & 1 == 0 {
        return Counting::default();
    }
    let stream = bit((x >> 1 & 0xf) as usize % STREAMS);
    let other = bit((x >> 5 & 0xf) as usize % STREAMS);
    let mut periods = [0; STREAMS];
    periods[INSTRUCTIONS] = match x >> 19 & 7 {
        0 => 1 + (x >> 22 & 7),
        1 => 1 + (x >> 22 & 0x3ff),
        2 => 60 + (x >> 22 & 0xf),
        _ => 0,
    };
    let streams = match x >> 17 & 3 {
        0 => bit(INSTRUCTIONS),
        1 => bit(INSTRUCTIONS) | stream,
        2 => stream,
        // Two streams, or any number of them.
        _ if x >> 40 & 1 == 0 => stream | other,
        _ => stream | other | (x >> 41) as u16 & (bit(STREAMS) - 1),
    };
    // In every third run, each stream has a period, or has none.
    let mut y = x.wrapping_mul(0x2545_f491_4f6c_dd1d);
    if y >> 60 < 6 {
        let counted = (BRANCHES..STREAMS).filter(|stream| streams & bit(*stream) != 0);
        for stream in counted {
            y = y.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            periods[stream] = match y >> 62 {
                0 => 0,
                1 => 1 + (y >> 32 & 7),
                2 => 1 + (y >> 32 & 0x7f),
                _ => 1 + (y >> 32 & 0x3fff),
            };
        }
    }
    Counting {
        levels: 1 + (x >> 9 & 0xff) as u8 % 3,
        streams,
        periods,
    }
}

/// Clears counts of streams that are not counted, which may or may not have grown.
fn forget_uncounted(cpu: &mut CpuState) {
    let streams = cpu.retired.streams;
    for counts in &mut cpu.retired.counts {
        for (stream, count) in counts.iter_mut().enumerate() {
            if streams >> stream & 1 == 0 {
                *count = 0;
            }
        }
    }
}

fn listing(program: &Program) -> String {
    let mut text = String::new();
    let Some(parts) = program.assemble() else {
        return text;
    };
    let mut formatter = FastFormatter::new();
    for (gpa, bytes) in parts {
        let ip = program.base() + gpa;
        let mut d = Decoder::with_ip(program.bits(), &bytes, ip, DecoderOptions::NONE);
        while d.can_decode() {
            let i = d.decode();
            let _ = write!(text, "{:x} ", i.ip());
            formatter.format(&i, &mut text);
            let _ = writeln!(text, "  [{:?}]", i.code());
        }
    }
    text
}

/// Clears what engines may differ in.
fn leave_out(cpu: &mut CpuState) {
    // The header and MXCSR_MASK, which have no meaning there, and the last x87 instruction.
    for part in [512..576, 28..32, 6..24] {
        cpu.fp.area[part].fill(0);
    }
    // It belongs to the last exception raised, delivered or not; a #PF has set CR2.
    cpu.fault_gva = 0;
}

/// Returns the differences at the end of two runs that began with `before` in memory.
fn differences(
    (theirs, interp): (End, &mut Machine),
    (ours, jit): (End, &mut Machine),
    before: &[u8],
    bits: u32,
) -> String {
    let mut d = String::new();
    if theirs != ours {
        let _ = writeln!(d, "  stop: interpreter {theirs:?}, jit {ours:?}");
    }
    if theirs == ours && theirs == Some(RunStop::TripleFault) {
        return d;
    }
    let mut memories = [interp.memory().to_vec(), jit.memory().to_vec()];
    let landings = [&interp.landings, &jit.landings];
    if landings[0] != landings[1] {
        let pairs = landings[0].iter().zip(landings[1]);
        let first = pairs.take_while(|(a, b)| a == b).count();
        let [a, b] = landings.map(|l| l.get(first));
        let _ = writeln!(
            d,
            "  overflow or breakpoint {first}: interpreter {a:x?}, jit {b:x?}"
        );
    }
    let (a, b) = (&mut interp.cpu, &mut jit.cpu);
    forget_uncounted(a);
    forget_uncounted(b);
    if a.retired != b.retired {
        let (a, b) = (a.retired, b.retired);
        let _ = writeln!(d, "  counts: interpreter {a:?}\n          jit {b:?}");
    }
    let rip = stopped_at(theirs, a, &memories[0]);
    // Flags may be dead by the instructions in memory now, or by those that were translated and overwritten afterwards.
    let dead = dead_flags(rip, &memories[0], bits) | dead_flags(rip, before, bits);
    for (cpu, memory) in [&mut *a, &mut *b].into_iter().zip(&mut memories) {
        cpu.rflags &= !dead;
        let frame = FRAMES as usize - 24;
        for (at, byte) in memory[frame..frame + 2].iter_mut().enumerate() {
            *byte &= !(dead >> (8 * at)) as u8;
        }
    }
    pointer(&b.fp.area, bits, &mut d);
    leave_out(a);
    leave_out(b);
    if a.rip() != b.rip() {
        let _ = writeln!(d, "  rip: interpreter {:#x}, jit {:#x}", a.rip(), b.rip());
    }
    for n in 0..16 {
        let (a, b) = (a.gpr[n], b.gpr[n]);
        if a != b {
            let _ = writeln!(d, "  gpr{n}: interpreter {a:#x}, jit {b:#x}");
        }
    }
    if a.rflags != b.rflags {
        let (a, b) = (a.rflags, b.rflags);
        let _ = writeln!(d, "  rflags: interpreter {a:#x}, jit {b:#x}");
    }
    for at in (0..AREA_SIZE).step_by(8) {
        let range = at..at + 8;
        let (a, b) = (&a.fp.area[range.clone()], &b.fp.area[range]);
        if a != b {
            let _ = writeln!(d, "  fp+{at}: interpreter {a:02x?}, jit {b:02x?}");
        }
    }
    if d.is_empty() && a != b {
        let _ = writeln!(d, "  system state: interpreter {a:x?}\n jit {b:x?}");
    }
    let [a, b] = memories;
    let mut shown = 0;
    for at in (0..RAM).step_by(8) {
        let range = at..at + 8;
        if a[range.clone()] != b[range.clone()] && shown < 6 {
            shown += 1;
            let (a, b) = (&a[range.clone()], &b[range]);
            let _ = writeln!(d, "  memory {at:#x}: interpreter {a:02x?}, jit {b:02x?}");
        }
    }
    d
}

/// Checks that the address of the last x87 instruction, which translated code does not keep, is not one of the host.
fn pointer(area: &[u8], bits: u32, d: &mut String) {
    let mut b = [0; 8];
    b.copy_from_slice(&area[8..16]);
    // The upper half has CS in 32-bit code.
    let v = u64::from_le_bytes(b) & u64::MAX >> (64 - bits);
    let guest = |base: u64| (base..base + RAM as u64).contains(&v);
    if v != 0 && ![USER, KERNEL, KERNEL32].into_iter().any(guest) {
        let _ = writeln!(d, "  fp+8: jit {v:#x}");
    }
}

/// Returns the address of the instruction at which an exception or exit stopped a program.
fn stopped_at(stop: End, cpu: &CpuState, memory: &[u8]) -> Option<u64> {
    let word = |at: usize| {
        let mut b = [0; 8];
        b.copy_from_slice(&memory[at..at + 8]);
        u64::from_le_bytes(b)
    };
    match stop {
        Some(RunStop::Exit) => Some(cpu.rip()),
        Some(RunStop::Halt) if in_handler(cpu) => Some(word(FRAMES as usize - 40)),
        _ => None,
    }
}

/// Returns the arithmetic flags that are overwritten unread from an instruction on.
fn dead_flags(rip: Option<u64>, memory: &[u8], bits: u32) -> u64 {
    let Some(rip) = rip else { return 0 };
    let gpa = match rip {
        USER..0x2000_0000 => rip - USER,
        KERNEL32..0x3000_0000 => rip - KERNEL32,
        _ => rip.wrapping_sub(KERNEL),
    };
    use iced_x86::Mnemonic as M;
    let (mut read, mut dead) = (0, 0);
    let mut at = gpa;
    for _ in 0..48 {
        let Some(code) = memory.get(at as usize..) else {
            break;
        };
        let i = Decoder::with_ip(bits, code, at, DecoderOptions::AMD).decode();
        match i.flow_control() {
            _ if i.is_invalid() => break,
            FlowControl::Next => at = i.next_ip(),
            // Blocks follow jumps, and traces follow calls.
            FlowControl::UnconditionalBranch | FlowControl::Call
                if i.is_jmp_short_or_near() || i.is_call_near() =>
            {
                at = i.near_branch_target();
            }
            _ => break,
        }
        read |= i.rflags_read() & !dead;
        let set = match i.mnemonic() {
            // Processors set the flags that the manual leaves undefined.
            M::And | M::Or | M::Xor | M::Test | M::Shl | M::Sal | M::Shr | M::Sar => {
                i.rflags_modified()
            }
            _ => i.rflags_written() | i.rflags_cleared() | i.rflags_set(),
        };
        dead |= set & !read;
    }
    decoded_flags(dead)
}

/// Returns true if an exception was delivered.
fn in_handler(cpu: &CpuState) -> bool {
    cpu.rip().wrapping_sub(KERNEL) < CODE
}
