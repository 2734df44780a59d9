//! Runs of repeated string instructions on plain RAM, done as a whole.

use guest_memory::HostPage;
use x86_cpu::{Access, CpuState, Privilege};
use x86_defs::paging::PAGE_SIZE;

use crate::{Mmu, l1::Half};

impl Mmu {
    /// Returns the page of `gva` if it is in L1 or can be resolved without an exception, and its writes need no note.
    fn plain_page(&mut self, cpu: &mut CpuState, gva: u64, access: Access) -> Option<HostPage> {
        let write = access == Access::Write;
        let tables = &self.views[self.live];
        let hit = if write {
            tables.l1.find(Half::Write, gva)
        } else {
            tables.l1.find(Half::Read, gva)
        };
        if hit.is_some() {
            return hit;
        }
        // The instruction makes this access next anyway, so the A and D bits that are set here are its own. A fault is
        // not: its address is taken back.
        let fault_gva = cpu.fault_gva;
        let page = self.resolve(cpu, gva, access, Privilege::Current);
        cpu.fault_gva = fault_gva;
        page.ok().filter(|p| !p.note).map(|p| p.host)
    }

    /// Copies up to `len` bytes in ascending order in units of `unit` bytes, not beyond the end of either page. Returns
    /// the number of bytes copied, a multiple of `unit`; 0 means that the caller must copy one element the slow way.
    /// Never faults.
    pub fn bulk_copy(
        &mut self,
        cpu: &mut CpuState,
        dst: u64,
        src: u64,
        len: u64,
        unit: u64,
    ) -> u64 {
        let room = PAGE_SIZE - (dst % PAGE_SIZE).max(src % PAGE_SIZE);
        let Some(count) = len.min(room).checked_div(unit).filter(|n| *n != 0) else {
            return 0;
        };
        let Some(from) = self.plain_page(cpu, src, Access::Read) else {
            return 0;
        };
        let Some(to) = self.plain_page(cpu, dst, Access::Write) else {
            return 0;
        };
        if to.copy_elements(dst % PAGE_SIZE, from, src % PAGE_SIZE, count, unit) {
            count * unit
        } else {
            0
        }
    }

    /// As [`Self::bulk_copy`], in descending order from the elements at `dst` and `src` on, not beyond the beginning of
    /// either page.
    pub fn bulk_copy_down(
        &mut self,
        cpu: &mut CpuState,
        dst: u64,
        src: u64,
        len: u64,
        unit: u64,
    ) -> u64 {
        let room = (dst % PAGE_SIZE).min(src % PAGE_SIZE) + unit;
        let Some(count) = len.min(room).checked_div(unit).filter(|n| *n != 0) else {
            return 0;
        };
        let Some(from) = self.plain_page(cpu, src, Access::Read) else {
            return 0;
        };
        let Some(to) = self.plain_page(cpu, dst, Access::Write) else {
            return 0;
        };
        if to.copy_elements_down(dst % PAGE_SIZE, from, src % PAGE_SIZE, count, unit) {
            count * unit
        } else {
            0
        }
    }

    /// Fills up to `len` bytes with the low `unit` bytes of `value`, not beyond the page's end; otherwise like
    /// [`Self::bulk_copy`].
    pub fn bulk_fill(
        &mut self,
        cpu: &mut CpuState,
        dst: u64,
        value: u64,
        len: u64,
        unit: u64,
    ) -> u64 {
        let room = PAGE_SIZE - dst % PAGE_SIZE;
        let Some(count) = len.min(room).checked_div(unit).filter(|n| *n != 0) else {
            return 0;
        };
        let Some(to) = self.plain_page(cpu, dst, Access::Write) else {
            return 0;
        };
        if to.fill_elements(dst % PAGE_SIZE, value, count, unit) {
            count * unit
        } else {
            0
        }
    }

    /// Reads as many bytes of `buf` as there are before the page's end, and returns the number. 0 means that the caller
    /// must read one element the slow way. Never faults.
    pub fn bulk_read(&mut self, cpu: &mut CpuState, src: u64, buf: &mut [u8]) -> usize {
        let room = (PAGE_SIZE - src % PAGE_SIZE) as usize;
        let len = buf.len().min(room);
        let Some(from) = self.plain_page(cpu, src, Access::Read) else {
            return 0;
        };
        if from.read_bytes(src % PAGE_SIZE, &mut buf[..len]) {
            len
        } else {
            0
        }
    }
}
