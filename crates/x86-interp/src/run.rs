//! [`Interp`]: block cache and execution loop.

use x86_cpu::{CpuState, Event, Exception, GuestBus, Shadow};
use x86_defs::{dr, reg, rflags};
use x86_native::Native;

use crate::{
    Exec, Flow, Selector, Stop,
    decode::{self, Incomplete, MAX_LEN},
    deliver,
};

/// Why [`Interp::run`] returned. `CpuState` is exact in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStop {
    /// [`GuestBus::poll`] asked for it, or a step is complete.
    Poll,
    /// The bus has recorded an exit for the VMM.
    Exit,
    /// The guest executed HLT (RIP is after it).
    Halt,
    /// A triple fault.
    TripleFault,
}

/// One vCPU's interpreter: its decoded blocks.
#[derive(Debug)]
pub struct Interp<B> {
    native: Native,
    marker: core::marker::PhantomData<fn(B)>,
}

impl<B: GuestBus> Default for Interp<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: GuestBus> Interp<B> {
    /// An interpreter with an empty block cache.
    pub fn new() -> Self {
        Self {
            native: Native::new(),
            marker: core::marker::PhantomData,
        }
    }
    /// Forgets every decoded instruction. To be called when `cpu.features`
    /// changed or code was replaced behind the bus's back.
    pub fn flush_all(&mut self) {
        self.native = Native::new();
    }
    /// Executes until something stops it.
    pub fn run(&mut self, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        loop {
            if cpu.shadow == Shadow::None && bus.poll(cpu) {
                return RunStop::Poll;
            }
            match self.step(cpu, bus) {
                RunStop::Poll => {}
                other => return other,
            }
        }
    }
    /// Executes exactly one instruction (one iteration of a `rep` one), with
    /// debug traps and the end of an interrupt shadow as the manual has them.
    pub fn step(&mut self, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.single_step = true;
        let result = step_one(&mut ex);
        ex.sync_flags();
        finish(result)
    }
    /// Delivers an event through the IDT. `Exit` means that delivery needs the
    /// VMM first: inject again afterwards.
    pub fn inject(&mut self, cpu: &mut CpuState, bus: &mut B, event: Event) -> Result<(), RunStop> {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        let result = deliver::event(&mut ex, event);
        ex.sync_flags();
        result.map_err(|s| finish(Err(s)))
    }
}

fn finish(result: Result<(), Stop>) -> RunStop {
    match result {
        Ok(()) => RunStop::Poll,
        Err(Stop::Exit | Stop::Exception(_)) => RunStop::Exit,
        Err(Stop::Halt) => RunStop::Halt,
        Err(Stop::TripleFault) => RunStop::TripleFault,
    }
}

fn step_one<B: GuestBus>(ex: &mut Exec<'_, B>) -> Result<(), Stop> {
    let tf = ex.cpu.rflags & rflags::TF != 0;
    let shadow = ex.cpu.shadow;
    ex.watch_hits = 0;
    let flow = fetch_and_execute(ex);
    match flow {
        Ok(flow) => {
            if shadow == ex.cpu.shadow {
                ex.cpu.shadow = Shadow::None;
            }
            ex.bus.commit();
            ex.refresh();
            let mut dr6 = ex.watch_hits;
            if tf {
                dr6 |= dr::DR6_BS;
            }
            let _ = flow;
            if dr6 != 0 && ex.cpu.shadow != Shadow::MovSs {
                ex.cpu.fault_dr6 = dr6;
                return raise(ex, Exception::DB);
            }
            Ok(())
        }
        Err(Stop::Exception(e)) => raise(ex, e),
        Err(other) => Err(other),
    }
}

fn raise<B: GuestBus>(ex: &mut Exec<'_, B>, e: Exception) -> Result<(), Stop> {
    if ex.bus.intercept(ex.cpu, e) {
        return Err(Stop::Exit);
    }
    deliver::exception(ex, e)?;
    ex.bus.commit();
    Ok(())
}

fn fetch_and_execute<B: GuestBus>(ex: &mut Exec<'_, B>) -> Result<Flow, Stop> {
    let rip = ex.cpu.rip();
    let base = if ex.cpu.is_64bit() {
        0
    } else {
        ex.cpu.seg[reg::CS].base
    };
    let mut bytes = [0; MAX_LEN];
    let mut have = 0;
    loop {
        let at = base.wrapping_add(rip).wrapping_add(have as u64);
        let Some(rest) = bytes.get_mut(have..) else {
            return Err(Exception::GP0.into());
        };
        have += ex.bus.code_bytes(ex.cpu, at, rest)?;
        let mut selector = Selector {
            native: ex.native,
            bytes: &[],
            features: &ex.cpu.features,
            code_size: ex.cpu.code_size,
        };
        match decode::decode::<B>(bytes.get(..have).unwrap_or(&bytes), &mut selector) {
            Ok(insn) => {
                let flow = (insn.handler)(ex, &insn)?;
                if matches!(flow, Flow::Next | Flow::EndBlock) {
                    let next = ex.next_rip(&insn);
                    ex.cpu.set_rip(next);
                }
                return Ok(flow);
            }
            Err(Incomplete::NeedsMore) => {}
            Err(Incomplete::TooLong) => return Err(Exception::GP0.into()),
        }
    }
}
