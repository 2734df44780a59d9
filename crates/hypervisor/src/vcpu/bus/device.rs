//! Accesses of a vCPU to addresses that are no memory: doorbells first, then chips, then the VMM.

use io_bus::{RingEntry, Space};
use x86_cpu::{Access, CpuState, Fault, GuestBus, Privilege};
use x86_defs::paging::PAGE_SIZE;

use super::Bus;
use crate::{
    Exit,
    vcpu::replay::{Answered, DeviceAccess},
    vm::doorbell::{self, Rung},
};

impl Bus {
    /// Returns the answer from the replay log, or stops the instruction for the VMM to answer.
    pub(in crate::vcpu) fn ask(
        &mut self,
        cpu: &CpuState,
        access: DeviceAccess,
        exit: impl FnOnce() -> Exit,
    ) -> Result<Answered, Fault> {
        if let Some(answered) = self.replay.next(access) {
            return Ok(answered);
        }
        self.replay.wait(access, crate::vcpu::linear_rip(cpu));
        self.exit = Some(exit());
        Err(Fault::Exit)
    }

    /// Loads 1 to 8 bytes from an address without a memslot.
    pub(in crate::vcpu) fn device_load(
        &mut self,
        cpu: &CpuState,
        gpa: u64,
        len: u8,
    ) -> Result<u64, Fault> {
        let access = DeviceAccess::Load { gpa, len };
        if self.replay.is_new(access)
            && let Some(value) = self.chip_load(cpu, gpa, len)
        {
            self.replay.made(access, value);
            return Ok(value & mask(len));
        }
        self.ask_load(cpu, gpa, len)
    }

    /// Loads from an address without a memslot that no chip has.
    pub(in crate::vcpu) fn ask_load(
        &mut self,
        cpu: &CpuState,
        gpa: u64,
        len: u8,
    ) -> Result<u64, Fault> {
        let access = DeviceAccess::Load { gpa, len };
        let exit = || Exit::Mmio {
            gpa,
            len,
            is_write: false,
            data: [0; 8],
        };
        Ok(self.ask(cpu, access, exit)?.value & mask(len))
    }

    /// Stores 1 to 8 bytes to an address without a memslot.
    pub(in crate::vcpu) fn device_store(
        &mut self,
        cpu: &CpuState,
        gpa: u64,
        len: u8,
        value: u64,
    ) -> Result<(), Fault> {
        let access = DeviceAccess::Store { gpa, len };
        if self.replay.is_new(access)
            && (self.ring(Space::Mmio, gpa, len, value) || self.chip_store(cpu, gpa, len, value))
        {
            self.replay.made(access, 0);
            return Ok(());
        }
        self.ask_store(cpu, gpa, len, value)
    }

    /// Stores to an address without a memslot that neither a doorbell nor a chip has.
    pub(in crate::vcpu) fn ask_store(
        &mut self,
        cpu: &CpuState,
        gpa: u64,
        len: u8,
        value: u64,
    ) -> Result<(), Fault> {
        let access = DeviceAccess::Store { gpa, len };
        let exit = || Exit::Mmio {
            gpa,
            len,
            is_write: true,
            data: (value & mask(len)).to_le_bytes(),
        };
        self.ask(cpu, access, exit)?;
        Ok(())
    }

    /// The slow path of loads: at least one byte is not RAM.
    pub(in crate::vcpu) fn load_pieces(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        let mut at = gva;
        let mut rest = buf;
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut(in_page(at, rest.len()));
            let to = self.translate(cpu, at, Access::Read, who)?;
            if !to
                .page
                .is_some_and(|page| page.read_bytes(at % PAGE_SIZE, now))
            {
                for (i, chunk) in now.chunks_mut(8).enumerate() {
                    let gpa = to.gpa.wrapping_add(8 * i as u64);
                    let value = self.device_load(cpu, gpa, chunk.len() as u8)?;
                    chunk.copy_from_slice(&value.to_le_bytes()[..chunk.len()]);
                }
            }
            at = self.mmu.next_page(cpu, at, who);
            rest = later;
        }
        Ok(())
    }

    /// The slow path of stores. Pieces for devices come first: one of them may send the instruction to the VMM and back
    /// to its start, and RAM must then be as it was.
    pub(in crate::vcpu) fn store_pieces(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        // All pages are checked before the first byte is written.
        self.probe(cpu, gva, buf.len() as u64, Access::Write, who)?;
        for is_ram in [false, true] {
            let mut at = gva;
            let mut rest = buf;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(in_page(at, rest.len()));
                let to = self.translate(cpu, at, Access::Write, who)?;
                match (to.page.is_some(), is_ram) {
                    // If the slot has gone away meanwhile, nothing is written: the write might as well have come
                    // before.
                    (true, true) => _ = self.mmu.write_gpa(to.gpa, now),
                    (false, false) => self.device_store_bytes(cpu, to.gpa, now)?,
                    _ => {}
                }
                at = self.mmu.next_page(cpu, at, who);
                rest = later;
            }
        }
        Ok(())
    }

    fn device_store_bytes(&mut self, cpu: &CpuState, gpa: u64, bytes: &[u8]) -> Result<(), Fault> {
        for (i, chunk) in bytes.chunks(8).enumerate() {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            let gpa = gpa.wrapping_add(8 * i as u64);
            self.device_store(cpu, gpa, chunk.len() as u8, u64::from_le_bytes(value))?;
        }
        Ok(())
    }

    /// Rings the doorbell for this write, or puts the write into the coalesced ring; false if neither exists.
    pub(in crate::vcpu) fn ring(&self, space: Space, address: u64, len: u8, value: u64) -> bool {
        let value = value & mask(len);
        let place = (space, address);
        match doorbell::write(&self.vm, &self.shared, place, len.into(), value) {
            Rung::Doorbell => true,
            // A full ring is an exit, at which the VMM drains it.
            Rung::Coalesce => {
                let entry = RingEntry::new(space, address, len.into(), value);
                self.vm.ring.push(entry)
            }
            Rung::Nobody => false,
        }
    }

    /// Rings a doorbell for a hypercall that stands for a write; false if there is no doorbell.
    pub(in crate::vcpu) fn ring_doorbell(
        &self,
        space: Space,
        address: u64,
        len: u8,
        value: u64,
    ) -> bool {
        let place = (space, address);
        let value = value & mask(len);
        doorbell::write(&self.vm, &self.shared, place, len.into(), value) == Rung::Doorbell
    }
}

/// Returns how many bytes of an access at `gva` are in its first page.
pub(in crate::vcpu) fn in_page(gva: u64, len: usize) -> usize {
    len.min((PAGE_SIZE - gva % PAGE_SIZE) as usize)
}

/// True if the access stays in one page.
pub(in crate::vcpu) fn is_in_page(gva: u64, len: usize) -> bool {
    gva % PAGE_SIZE + len as u64 <= PAGE_SIZE
}

pub(in crate::vcpu) const fn mask(len: u8) -> u64 {
    if len >= 8 {
        u64::MAX
    } else {
        (1 << (8 * len)) - 1
    }
}
