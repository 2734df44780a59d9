//! Notes where a load of CR3 that flushes nothing has led to, so that generated code does the next one itself.

use mmu::RootIsKept;
use x86_cpu::CpuState;
use x86_defs::control::{cr3, cr4};

use crate::{Jit, JitBus, runtime::state::target_key};
use x86_codegen::frame::switches::Switch;

/// The word that [`Switch::kept`] points to where the guest cannot take anything back.
static KEPT: u32 = 1;

impl<B: JitBus> Jit<B> {
    /// Notes a MOV of `value` to CR3 that the interpreter has executed, once code was found for what comes next.
    pub(crate) fn note_switch(&mut self, cpu: &CpuState, bus: &mut B, value: u64) {
        let frame = &cpu.engine;
        let flushes_nothing = cpu.cr4 & cr4::PCIDE != 0 || bus.keeps_roots();
        let is_loaded = cpu.cr3 == value & !cr3::NO_FLUSH && cpu.cpl == 0 && cpu.is_64bit();
        if !flushes_nothing || !is_loaded || frame.log() != 0 || self.disturbance.flush_every != 0 {
            return;
        }
        let kept = match bus.mmu().root_is_kept() {
            Some(RootIsKept::Always) => &raw const KEPT as u64,
            Some(RootIsKept::WhileOne { word }) => word,
            None => return,
        };
        let (key, salt) = target_key(cpu);
        let mmu = bus.mmu();
        self.session.switches.set(Switch {
            value,
            epoch: mmu.switches_epoch(),
            view: mmu.live_view(),
            kept,
            tables: frame.tables(),
            key,
            salt,
            number: frame.number,
        });
    }
}
