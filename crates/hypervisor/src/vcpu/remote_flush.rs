//! Flushes of other vCPUs' TLBs, which a guest requests by a hypercall.
//!
//! When the call ends, none of the vCPUs may use a translation from before. A vCPU that is outside of KVM_RUN or asleep
//! drops its translations before it executes anything; the others are asked to, and waited for. The waiting vCPU counts
//! as asleep, so two vCPUs that wait for each other both go on.

use std::{sync::Arc, time::Duration};

use x86_cpu::{CpuState, Flush, GuestBus};

use super::bus::Bus;
use crate::shared::VcpuShared;

/// Checks of a target before the waiting thread gives up its core.
const LOOKS: u32 = 200;
/// How long it gives up the core for.
const NAP: Duration = Duration::from_micros(20);

impl Bus {
    /// Drops all translations of these vCPUs, which may include this one.
    pub(super) fn flush_translations_of(
        &mut self,
        cpu: &mut CpuState,
        targets: &[Arc<VcpuShared>],
    ) {
        let asked: Vec<_> = targets
            .iter()
            .filter(|vcpu| vcpu.index != self.shared.index)
            .map(|vcpu| (vcpu, vcpu.ask_for_flush()))
            .collect();
        if asked.len() < targets.len() {
            self.flush(cpu, Flush::Global);
        }
        if asked.is_empty() {
            return;
        }
        self.shared.set_asleep(true);
        for (vcpu, number) in asked {
            let mut looks = 0;
            while !vcpu.has_flushed(number) {
                looks += 1;
                if looks < LOOKS {
                    core::hint::spin_loop();
                } else {
                    looks = 0;
                    // A request to this vCPU or the end of the time ends it.
                    let _ = self.shared.park(NAP);
                    // A thread that waits for this vCPU to acknowledge a change of memory may be what the target waits
                    // for.
                    self.sync_memory();
                }
            }
        }
        self.shared.set_asleep(false);
        self.serve_flushes(cpu);
        self.note_pause();
    }

    /// Carries out the changes of memory that other threads have made.
    pub(super) fn sync_memory(&mut self) {
        if self.mmu.needs_sync() {
            self.mmu.sync();
        }
    }

    /// Carries out the flush that other vCPUs have asked for.
    pub(super) fn serve_flushes(&mut self, cpu: &mut CpuState) {
        if let Some(number) = self.shared.wanted_flush() {
            self.flush(cpu, Flush::Global);
            self.shared.set_flushed(number);
        }
    }
}
