//! The two machines that run cases: the host CPU and the interpreter.

use std::sync::OnceLock;

use testkit::FlatBus;
use x86_cpu::{CpuState, Features};
use x86_defs::{segment::Segment, vector};
use x86_interp::{Interp, RunStop};
use x86_native::oracle::{
    AREA_SIZE, CODE, CODE_SIZE, Mode, Oracle, Registers, Trap, WINDOW, WINDOW_SIZE,
};

use crate::{Case, Random, state};

/// UD2, which ends the interpreter's block as a jump ends the host's.
const STOP: [u8; 2] = [0x0f, 0x0b];
/// Number of steps or blocks after which a case is given up. No case has as many.
const PATIENCE: u32 = 0x4000;
/// Number of cases between two flushes of the interpreter. By then its store of native code is not full yet; afterwards
/// every addition would cost a serializing instruction.
const FLUSH_EVERY: u32 = 0x1000;

/// The end of a case.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Registers afterwards.
    pub regs: Registers,
    /// The exception that stopped the case.
    pub trap: Option<Trap>,
}

/// Returns the window's content before a case, without the case's patches.
fn initial_window() -> Box<[u8; WINDOW_SIZE]> {
    let mut window = Box::new([0; WINDOW_SIZE]);
    let mut r = Random::new(0x77);
    for chunk in window.chunks_exact_mut(8) {
        chunk.copy_from_slice(&state::vector_part(&mut r));
    }
    window
}

/// Returns the window's content before a case.
pub(crate) fn case_window(case: &Case) -> Box<[u8; WINDOW_SIZE]> {
    static INITIAL: OnceLock<Box<[u8; WINDOW_SIZE]>> = OnceLock::new();
    let mut window = Box::new([0; WINDOW_SIZE]);
    fill(&mut window[..], INITIAL.get_or_init(initial_window), case);
    window
}

fn fill(window: &mut [u8], initial: &[u8; WINDOW_SIZE], case: &Case) {
    window.copy_from_slice(initial);
    for p in &case.patches {
        window[p.offset..p.offset + p.bytes.len()].copy_from_slice(&p.bytes);
    }
}

/// The host CPU.
#[derive(Debug)]
pub struct Host {
    oracle: Oracle,
    initial: Box<[u8; WINDOW_SIZE]>,
}

impl Host {
    /// Maps the fixed addresses at which cases run. A process has one of these.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            oracle: Oracle::new()?,
            initial: initial_window(),
        })
    }
    /// Runs a case.
    pub fn run(&mut self, case: &Case) -> Outcome {
        fill(self.oracle.window(), &self.initial, case);
        let mut regs = case.start.clone();
        let trap = self.oracle.run(case.mode, &case.bytes, &mut regs);
        Outcome { regs, trap }
    }
    /// Returns memory after the last case.
    pub fn window(&mut self) -> &[u8; WINDOW_SIZE] {
        self.oracle.window()
    }
}

/// The interpreter.
pub struct Guest {
    interp: Interp<FlatBus>,
    bus: FlatBus,
    /// The vCPU in 64-bit mode, and in compatibility mode.
    cpus: [CpuState; 2],
    segments: [[Segment; 6]; 2],
    since_flush: u32,
    initial: Box<[u8; WINDOW_SIZE]>,
}

impl core::fmt::Debug for Guest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Guest").finish_non_exhaustive()
    }
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    /// Makes a user-mode guest with the host's features.
    pub fn new() -> Self {
        Self::with(state::host_features())
    }
    /// Makes a user-mode guest with these features.
    pub fn with(features: Features) -> Self {
        let mut bus = FlatBus::new();
        bus.map_as(WINDOW, WINDOW_SIZE, true, false);
        bus.map_as(CODE, CODE_SIZE + 0x1000, false, true);
        let cpus = [Mode::Bits64, Mode::Bits32].map(|m| state::cpu(features, m));
        Self {
            interp: Interp::new(),
            bus,
            segments: [0, 1].map(|n| cpus[n].seg),
            cpus,
            since_flush: 0,
            initial: initial_window(),
        }
    }

    /// Runs a case.
    pub fn run(&mut self, case: &Case) -> Outcome {
        self.since_flush += 1;
        if self.since_flush == FLUSH_EVERY {
            self.since_flush = 0;
            self.interp.flush_all();
        }
        let end = case.end();
        let code = self.bus.memory(case.start.rip);
        let len = case.bytes.len();
        code[..len].copy_from_slice(&case.bytes);
        code[len..len + 2].copy_from_slice(&STOP);
        let window = &mut self.bus.memory(WINDOW)[..WINDOW_SIZE];
        fill(window, &self.initial, case);
        self.bus.exception = None;
        let n = usize::from(case.mode == Mode::Bits32);
        let cpu = &mut self.cpus[n];
        cpu.seg = self.segments[n];
        state::load(cpu, &case.start);
        if case.stepped {
            for _ in 0..PATIENCE {
                let _ = self.interp.step(cpu, &mut self.bus);
                if cpu.rip() == end || self.bus.exception.is_some() {
                    break;
                }
            }
        } else {
            self.bus.polls = Some(PATIENCE);
            let stop = self.interp.run(cpu, &mut self.bus);
            debug_assert_ne!(stop, RunStop::TripleFault);
            let stopped = |e: &x86_cpu::Exception| e.vector == vector::UD;
            if cpu.rip() == end && self.bus.exception.as_ref().is_some_and(stopped) {
                self.bus.exception = None;
            }
        }
        let mut regs = Registers {
            gpr: [0; 16],
            rflags: cpu.rflags,
            rip: cpu.rip(),
            area: [0; AREA_SIZE],
        };
        regs.gpr.copy_from_slice(&cpu.gpr[..16]);
        if case.mode == Mode::Bits32 {
            for v in &mut regs.gpr {
                *v &= 0xffff_ffff;
            }
        }
        regs.area.copy_from_slice(&cpu.fp.area[..AREA_SIZE]);
        let trap = self.bus.exception.map(|e| Trap {
            vector: e.vector,
            error_code: u64::from(e.error_code.unwrap_or(0)),
            gva: cpu.fault_gva,
        });
        Outcome { regs, trap }
    }

    /// Returns memory after the last case.
    pub fn window(&mut self) -> &[u8] {
        &self.bus.memory(WINDOW)[..WINDOW_SIZE]
    }
}
