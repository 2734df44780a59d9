//! [`Shadow`]: the vCPU's bus for the second run. It logs what is written, and has no effects outside of memory.

use mmu::Ram;
use x86_cpu::{Access, CodePage, CpuState, Exception, Fault, Flush, GuestBus, Privilege, Word};
use x86_defs::msr;

use super::log::Log;
use crate::JitBus;

/// The bus of the interpreter's second run.
#[derive(Debug)]
pub(crate) struct Shadow<B> {
    bus: *mut B,
    log: *mut Log,
    /// The page of the last write, which is already in the log, and on whose behalf it was written.
    last: Option<(u64, Privilege)>,
    /// The interpreter does not execute blocks as a whole that may contain this address.
    target: u64,
    /// How many blocks may still be executed.
    patience: u32,
}

/// More than the length of any block of the interpreter's, in bytes.
const BLOCK_BYTES: u64 = 1024;

impl<B: JitBus> Shadow<B> {
    /// Makes a bus. The caller uses neither reference while the bus lives.
    pub(super) fn new(bus: &mut B, log: &mut Log, target: u64) -> Self {
        Self {
            bus,
            log,
            last: None,
            target,
            patience: 10_000,
        }
    }
    fn bus(&mut self) -> &mut B {
        // SAFETY: `new`'s caller keeps the reference alive and unused.
        unsafe { &mut *self.bus }
    }
    pub(super) fn ram(&mut self) -> Ram<'_> {
        self.bus().ram()
    }
    pub(super) fn log(&mut self) -> &mut Log {
        // SAFETY: `new`'s caller keeps the reference alive and unused.
        unsafe { &mut *self.log }
    }
    /// Logs the pages of bytes that are about to be written.
    fn note(&mut self, cpu: &mut CpuState, gva: u64, len: u64, who: Privilege) {
        let (mut page, end) = (gva & !0xfff, gva.wrapping_add(len.max(1) - 1) & !0xfff);
        loop {
            if self.last != Some((page, who)) {
                let to = self.ram().translate(cpu, page, Access::Write, who);
                let Ok(to) = to else {
                    return;
                };
                if let Some(host) = to.page {
                    self.log().note(host.hva());
                    self.last = Some((page, who));
                }
            }
            if page == end {
                return;
            }
            page = page.wrapping_add(0x1000);
        }
    }
}

/// Returns true if most registers agree: such a state says more in a report than the first one.
pub(super) fn is_close(a: &CpuState, b: &CpuState) -> bool {
    a.gpr.iter().zip(&b.gpr).filter(|(a, b)| a != b).count() <= 1
}

/// Returns true for MSRs without an effect beyond `CpuState`.
fn is_plain(index: u32) -> bool {
    matches!(
        index,
        msr::IA32_FS_BASE | msr::IA32_GS_BASE | msr::IA32_KERNEL_GS_BASE | msr::IA32_TSC_AUX
    )
}

impl<B: JitBus> GuestBus for Shadow<B> {
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, who: Privilege) -> Result<T, Fault> {
        self.ram().read(cpu, gva, who)
    }
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        self.note(cpu, gva, T::SIZE as u64, who);
        self.ram().write(cpu, gva, value, who)
    }
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        self.note(cpu, gva, T::SIZE as u64, who);
        self.ram().rmw(cpu, gva, who, lock, f)
    }
    fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        self.ram().read_bytes(cpu, gva, buf, who)
    }
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        self.note(cpu, gva, buf.len() as u64, who);
        self.ram().write_bytes(cpu, gva, buf, who)
    }
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Fault> {
        self.ram().probe(cpu, gva, len, access, who)
    }
    // Bulk operations stay at the trait's "one at a time", so that a repeated instruction can be
    // compared after each repetition.
    fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        self.ram().code_page(cpu, gva)
    }
    fn code_bytes(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        self.ram().code_bytes(cpu, gva, buf)
    }
    fn peek_code(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        self.ram().peek_code(cpu, gva, buf)
    }
    fn code_generation(&mut self, id: u64) -> u32 {
        self.bus().code_generation(id)
    }
    fn code_changes(&self) -> u64 {
        // SAFETY: `new`'s caller keeps the reference alive and unused.
        unsafe { &*self.bus }.code_changes()
    }
    fn fetch_epoch(&self) -> u64 {
        // SAFETY: `new`'s caller keeps the reference alive and unused.
        unsafe { &*self.bus }.fetch_epoch()
    }
    fn load_root(&mut self, cpu: &mut CpuState) -> Result<(), Fault> {
        self.last = None;
        self.bus().load_root(cpu)
    }
    fn load_cr3(&mut self, cpu: &mut CpuState, flushes: bool) -> Result<(), Fault> {
        self.last = None;
        self.bus().load_cr3(cpu, flushes)
    }
    fn keeps_roots(&self) -> bool {
        // SAFETY: `new`'s caller keeps the reference alive and unused.
        unsafe { &*self.bus }.keeps_roots()
    }
    fn select_view(&mut self, cpu: &mut CpuState) {
        self.last = None;
        self.bus().select_view(cpu);
    }
    fn flush(&mut self, cpu: &mut CpuState, what: Flush) {
        self.last = None;
        self.bus().flush(cpu, what);
    }
    fn port_in(&mut self, _: &mut CpuState, _: u16, _: u8) -> Result<u32, Fault> {
        Err(Fault::Exit)
    }
    fn port_out(&mut self, _: &mut CpuState, _: u16, _: u8, _: u32) -> Result<(), Fault> {
        Err(Fault::Exit)
    }
    fn read_msr(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        if is_plain(index) {
            self.bus().read_msr(cpu, index)
        } else {
            Err(Fault::Exit)
        }
    }
    fn write_msr(&mut self, cpu: &mut CpuState, index: u32, value: u64) -> Result<(), Fault> {
        if is_plain(index) {
            self.bus().write_msr(cpu, index, value)
        } else {
            Err(Fault::Exit)
        }
    }
    fn cpuid(&mut self, cpu: &mut CpuState, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.bus().cpuid(cpu, leaf, subleaf)
    }
    fn tsc(&mut self, cpu: &mut CpuState) -> u64 {
        self.bus().tsc(cpu)
    }
    fn read_pmc(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        self.bus().read_pmc(cpu, index)
    }
    fn task_priority(&mut self, cpu: &mut CpuState) -> u8 {
        self.bus().task_priority(cpu)
    }
    fn set_task_priority(&mut self, _: &mut CpuState, _: u8) {}
    fn hypercall(&mut self, _: &mut CpuState) -> Result<(), Fault> {
        Err(Fault::Exit)
    }
    fn random(&mut self) -> u64 {
        self.bus().random()
    }
    fn intercept(&mut self, _: &mut CpuState, _: Exception) -> bool {
        false
    }
    fn commit(&mut self) {}
    fn poll(&mut self, cpu: &CpuState) -> bool {
        self.patience = self.patience.saturating_sub(1);
        self.patience == 0 || self.target.wrapping_sub(cpu.rip()) < BLOCK_BYTES
    }
}
