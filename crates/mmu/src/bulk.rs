//! Runs of repeated string instructions on plain RAM, done as a whole.

use guest_memory::HostPage;
use x86_cpu::{Access, CpuState, Privilege};
use x86_defs::paging::PAGE_SIZE;

use crate::{Mmu, fault::Resolved, l1::Half};

/// A page that a run accesses.
struct Plain {
    host: HostPage,
    /// The page, if it has code, so that what was written has to be noted.
    noted: Option<Resolved>,
}

impl Mmu {
    /// Returns the page of `gva` if it is RAM that the access may reach without an exception.
    fn plain_page(&mut self, cpu: &mut CpuState, gva: u64, access: Access) -> Option<Plain> {
        let half = match access {
            Access::Write => Half::Write,
            _ => Half::Read,
        };
        if let Some(host) = self.views[self.live].l1.find(half, gva) {
            return Some(Plain { host, noted: None });
        }
        // The instruction makes this access next anyway, so the A and D bits that are set here are its own. A fault is
        // not: its address is taken back.
        let fault_gva = cpu.fault_gva;
        let page = self.resolve(cpu, gva, access, Privilege::Current);
        cpu.fault_gva = fault_gva;
        let page = page.ok()?;
        Some(Plain {
            host: page.host,
            noted: page.note.then_some(page),
        })
    }

    /// Notes that `len` bytes of the page have been written, if that has to be noted.
    fn written_plain(&self, page: &Plain, offset: u64, len: u64) {
        if let Some(page) = &page.noted {
            self.written(page, offset, len);
        }
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
        let offset = dst % PAGE_SIZE;
        if !to
            .host
            .copy_elements(offset, from.host, src % PAGE_SIZE, count, unit)
        {
            return 0;
        }
        self.written_plain(&to, offset, count * unit);
        count * unit
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
        let offset = dst % PAGE_SIZE;
        if !to
            .host
            .copy_elements_down(offset, from.host, src % PAGE_SIZE, count, unit)
        {
            return 0;
        }
        self.written_plain(&to, offset + unit - count * unit, count * unit);
        count * unit
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
        let offset = dst % PAGE_SIZE;
        if !to.host.fill_elements(offset, value, count, unit) {
            return 0;
        }
        self.written_plain(&to, offset, count * unit);
        count * unit
    }

    /// Reads as many bytes of `buf` as there are before the page's end, and returns the number. 0 means that the caller
    /// must read one element the slow way. Never faults.
    pub fn bulk_read(&mut self, cpu: &mut CpuState, src: u64, buf: &mut [u8]) -> usize {
        let room = (PAGE_SIZE - src % PAGE_SIZE) as usize;
        let len = buf.len().min(room);
        let Some(from) = self.plain_page(cpu, src, Access::Read) else {
            return 0;
        };
        if from.host.read_bytes(src % PAGE_SIZE, &mut buf[..len]) {
            len
        } else {
            0
        }
    }
}
