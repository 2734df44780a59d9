//! [`Interp`]: block cache and execution loop.

use x86_cpu::{CpuState, Event, GuestBus};

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
#[derive(Debug, Default)]
pub struct Interp<B> {
    marker: core::marker::PhantomData<fn(B)>,
}

impl<B: GuestBus> Interp<B> {
    /// An interpreter with an empty block cache.
    pub fn new() -> Self {
        Self {
            marker: core::marker::PhantomData,
        }
    }
    /// Executes until something stops it.
    pub fn run(&mut self, _cpu: &mut CpuState, _bus: &mut B) -> RunStop {
        RunStop::Poll
    }
    /// Executes exactly one instruction (one iteration of a `rep` one), with
    /// debug traps and the end of an interrupt shadow as the manual has them.
    pub fn step(&mut self, _cpu: &mut CpuState, _bus: &mut B) -> RunStop {
        RunStop::Poll
    }
    /// Delivers an event through the IDT. `Exit` means that delivery needs the
    /// VMM first: inject again afterwards.
    pub fn inject(
        &mut self,
        _cpu: &mut CpuState,
        _bus: &mut B,
        _event: Event,
    ) -> Result<(), RunStop> {
        Ok(())
    }
}
