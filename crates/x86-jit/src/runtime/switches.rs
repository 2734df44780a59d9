//! Notes where a load of CR3 has led to, so that generated code does the next one itself.

use mmu::RootIsKept;
use x86_cpu::CpuState;
use x86_defs::control::{cr3, cr4};

use crate::{Jit, JitBus, runtime::state::target_key};
use x86_codegen::frame::switches::Switch;

impl<B: JitBus> Jit<B> {
    /// Notes a MOV of `value` to CR3 that the interpreter has executed, once code was found for what comes next.
    pub(crate) fn note_switch(&mut self, cpu: &CpuState, bus: &mut B, value: u64) {
        let frame = &cpu.engine;
        let is_loaded = cpu.cr3 == value & !cr3::NO_FLUSH && cpu.cpl == 0 && cpu.is_64bit();
        if !is_loaded || frame.log() != 0 || self.disturbance.flush_every != 0 {
            return;
        }
        let has_pcids = cpu.cr4 & cr4::PCIDE != 0;
        let has_promise = !has_pcids && bus.keeps_roots();
        let may_keep = has_pcids || has_promise;
        let keeps = value & cr3::NO_FLUSH != 0;
        let mmu = bus.mmu();
        let kept = match (may_keep, keeps) {
            (true, true) => match mmu.root_is_kept() {
                Some(RootIsKept::WhileLast) => 0,
                Some(RootIsKept::WhileOne { word }) => word,
                None => return,
            },
            (false, true) => return,
            // Such a load of a promised root changes what the guest reads.
            (_, false) if has_promise => return,
            (_, false) => match mmu.compared() {
                Some(head) => head,
                None => return,
            },
        };
        let (key, salt) = target_key(cpu);
        self.session.switches.set(Switch {
            by: Switch::by(value),
            epoch: mmu.switch_epoch(!keeps),
            kept,
            tables: frame.tables(),
            key,
            salt,
            number: frame.number as u32,
            view: mmu.live_view() as u32,
            address_space: frame.address_space as u32,
            access: 0,
        });
    }

    /// Notes that setting RFLAGS.AC leads from the tables `from` to the live ones, so that generated code that loads CR3
    /// knows both views.
    pub(crate) fn note_access(&mut self, cpu: &CpuState, from: u64) {
        let frame = &cpu.engine;
        for value in [cpu.cr3, cpu.cr3 | cr3::NO_FLUSH] {
            let known = self.session.switches.get_mut(Switch::by(value));
            if let Some(switch) = known
                && switch.tables == from
                && u64::from(switch.address_space) == frame.address_space
            {
                switch.access = Switch::place(frame.tables()).unwrap_or(0);
            }
        }
    }
}
