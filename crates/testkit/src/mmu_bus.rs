//! [`MmuBus`]: a [`GuestBus`] over a real MMU and memslot, for both engines.
//!
//! There is no device. An access outside of memory is an exit, which ends a program as a fault does.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use guest_memory::{GuestMemory, SlotConfig};
use host::Mapping;
use mmu::{Front, Mmu, Ram};
use x86_cpu::{Access, CodePage, CpuState, Exception, Fault, Flush, GuestBus, Privilege, Word};
use x86_defs::vector;

use crate::surroundings::surroundings;

/// A vCPU's memory, without devices.
#[derive(Debug)]
pub struct MmuBus {
    /// The vCPU's MMU.
    pub mmu: Mmu,
    /// The request word, which translated code reads.
    request: Box<AtomicU32>,
    /// True if an interrupt is said to wait.
    pub waits: bool,
    /// Number of polls after which the run loop is returned to.
    pub poll_every: u32,
    /// The time-stamp counter shows this; the host's without.
    pub stopped_tsc: Option<u64>,
    /// DR6 of the last #DB, if the VMM's breakpoints are in force: it then stops the vCPU and is not delivered.
    pub hits: Option<u64>,
    polls: u32,
    _ram: Mapping,
}

impl MmuBus {
    /// Makes a bus with `size` bytes of RAM at gpa 0.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn new(size: usize) -> std::io::Result<Self> {
        let memory = GuestMemory::new();
        let ram = Mapping::anonymous(size)?;
        let slot = SlotConfig {
            slot: 0,
            flags: 0,
            gpa: 0,
            size: size as u64,
            hva: ram.as_ptr() as u64,
        };
        memory
            .set_slot(slot)
            .map_err(|e| std::io::Error::other(format!("{e:?}")))?;
        Ok(Self {
            mmu: Mmu::new(Arc::clone(&memory)),
            request: Box::new(AtomicU32::new(0)),
            waits: false,
            poll_every: 128,
            stopped_tsc: None,
            hits: None,
            polls: 0,
            _ram: ram,
        })
    }

    /// Sets the request word.
    pub fn request(&self, on: bool) {
        self.request.store(on.into(), Ordering::Relaxed);
    }
}

impl GuestBus for MmuBus {
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, who: Privilege) -> Result<T, Fault> {
        self.mmu.ram().read(cpu, gva, who)
    }
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        self.mmu.ram().write(cpu, gva, value, who)
    }
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        self.mmu.ram().rmw(cpu, gva, who, lock, f)
    }
    fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        self.mmu.ram().read_bytes(cpu, gva, buf, who)
    }
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        self.mmu.ram().write_bytes(cpu, gva, buf, who)
    }
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Fault> {
        self.mmu.ram().probe(cpu, gva, len, access, who)
    }
    fn bulk_copy(&mut self, cpu: &mut CpuState, dst: u64, src: u64, len: u64, unit: u64) -> u64 {
        self.mmu.bulk_copy(cpu, dst, src, len, unit)
    }
    fn bulk_fill(&mut self, cpu: &mut CpuState, dst: u64, value: u64, len: u64, unit: u64) -> u64 {
        self.mmu.bulk_fill(cpu, dst, value, len, unit)
    }
    fn bulk_read(&mut self, cpu: &mut CpuState, src: u64, buf: &mut [u8]) -> usize {
        self.mmu.bulk_read(cpu, src, buf)
    }
    fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        self.mmu.ram().code_page(cpu, gva)
    }
    fn code_bytes(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        self.mmu.ram().code_bytes(cpu, gva, buf)
    }
    fn peek_code(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        self.mmu.ram().peek_code(cpu, gva, buf)
    }
    fn code_generation(&mut self, id: u64) -> u32 {
        self.mmu.code_generation(id)
    }
    fn code_changes(&self) -> u64 {
        self.mmu.code_changes()
    }
    fn fetch_epoch(&self) -> u64 {
        self.mmu.fetch_epoch()
    }
    fn load_root(&mut self, cpu: &mut CpuState) -> Result<(), Fault> {
        Ok(self.mmu.load_root(cpu)?)
    }
    fn load_cr3(&mut self, cpu: &mut CpuState, flushes: bool) -> Result<(), Fault> {
        Ok(self.mmu.load_cr3(cpu, flushes)?)
    }
    fn select_view(&mut self, cpu: &mut CpuState) {
        self.mmu.select_view(cpu);
    }
    fn flush(&mut self, cpu: &mut CpuState, what: Flush) {
        self.mmu.flush(cpu, what);
    }
    fn port_in(&mut self, _: &mut CpuState, _: u16, _: u8) -> Result<u32, Fault> {
        Ok(u32::MAX)
    }
    fn port_out(&mut self, _: &mut CpuState, _: u16, _: u8, _: u32) -> Result<(), Fault> {
        Ok(())
    }
    fn tsc(&mut self, _: &mut CpuState) -> u64 {
        self.stopped_tsc.unwrap_or_else(host::cpu::rdtsc)
    }
    fn task_priority(&mut self, _: &mut CpuState) -> u8 {
        0
    }
    surroundings!();
    fn intercept(&mut self, cpu: &mut CpuState, exception: Exception) -> bool {
        let wanted = exception.vector == vector::DB && cpu.vmm_debug.active;
        if wanted {
            self.hits = Some(cpu.fault_dr6);
        }
        wanted
    }
    fn poll(&mut self, cpu: &CpuState) -> bool {
        if cpu.retired.is_due() {
            return true;
        }
        self.polls += 1;
        if self.polls >= self.poll_every {
            self.polls = 0;
            return true;
        }
        self.mmu.needs_sync()
    }
}

impl x86_jit::JitBus for MmuBus {
    fn mmu(&mut self) -> Front<'_> {
        self.mmu.front()
    }
    fn ram(&mut self) -> Ram<'_> {
        self.mmu.ram()
    }
    fn request_word(&self) -> &AtomicU32 {
        &self.request
    }
    fn interrupt_waits(&self) -> bool {
        self.waits
    }
    fn must_return(&self, cpu: &CpuState) -> bool {
        self.mmu.needs_sync() || cpu.retired.is_due()
    }
    fn follows_levels(&self) -> bool {
        false
    }
    fn tsc_offset(&self) -> Option<u64> {
        self.stopped_tsc.is_none().then_some(0)
    }
}
