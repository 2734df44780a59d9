//! [`FlatBus`]: identity-mapped memory in a `Vec`, for tests and benches of execution.
//!
//! No paging: linear is physical. Pages can be made absent, read-only or
//! device-like; ports, MSRs and hypercalls are recorded; exceptions can be
//! caught before delivery. Code is tracked in 64-byte lines, so that writes
//! change [`CodePage::generation`] as the contract asks.

use std::collections::{BTreeMap, VecDeque};

use x86_cpu::{Access, CodePage, CpuState, Exception, Fault, Flush, GuestBus, Privilege, Word};
use x86_defs::vector;

const PAGE: u64 = 4096;
/// Not mapped: #PF.
const ABSENT: u8 = 1;
/// Writes are #PF.
const READ_ONLY: u8 = 2;
/// Accesses exit until there is an answer.
const DEVICE: u8 = 4;
/// Some line was fetched as code.
const CODE: u8 = 8;

/// One IN or OUT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAccess {
    /// Port number.
    pub port: u16,
    /// 1, 2 or 4.
    pub size: u8,
    /// Value written, or given to IN.
    pub value: u32,
    /// OUT.
    pub out: bool,
}

/// See the module.
#[derive(Debug)]
pub struct FlatBus {
    /// Memory from address 0.
    pub memory: Vec<u8>,
    pages: Vec<u8>,
    lines: Vec<u64>,
    generations: Vec<u32>,
    epoch: u64,
    /// Every port access, in order.
    pub ports: Vec<PortAccess>,
    /// What the next INs give; all ones when it is empty.
    pub port_inputs: VecDeque<u32>,
    /// MSRs; others are #GP(0).
    pub msrs: BTreeMap<u32, u64>,
    /// Answers for device pages; an access without one exits.
    pub device_reads: VecDeque<u64>,
    /// Writes to device pages.
    pub device_writes: Vec<(u64, u64)>,
    /// [`GuestBus::poll`] is true after this many polls.
    pub polls_left: u64,
    /// Catch exceptions in `caught` rather than deliver them.
    pub catch: bool,
    /// Exceptions caught.
    pub caught: Vec<Exception>,
    /// Flushes asked for.
    pub flushes: Vec<Flush>,
    /// Completed instructions and iterations that used the bus.
    pub commits: u64,
    /// Time-stamp counter: one more each time it is read.
    pub clock: u64,
    /// CR8.
    pub priority: u8,
    /// Number of hypercalls.
    pub hypercalls: u64,
    /// IRETs that unmasked NMIs.
    pub nmi_unmasked: u64,
    random: u64,
}

impl FlatBus {
    /// `size` bytes of zeroed memory, rounded up to pages; exceptions are caught.
    pub fn new(size: usize) -> Self {
        let pages = size.div_ceil(PAGE as usize);
        Self {
            memory: vec![0; pages * PAGE as usize],
            pages: vec![0; pages],
            lines: vec![0; pages],
            generations: vec![1; pages],
            epoch: 1,
            ports: Vec::new(),
            port_inputs: VecDeque::new(),
            msrs: BTreeMap::new(),
            device_reads: VecDeque::new(),
            device_writes: Vec::new(),
            polls_left: u64::MAX,
            catch: true,
            caught: Vec::new(),
            flushes: Vec::new(),
            commits: 0,
            clock: 0,
            priority: 0,
            hypercalls: 0,
            nmi_unmasked: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Copies bytes into memory as a loader would: decoded code is outdated.
    ///
    /// # Panics
    /// If they are outside the memory.
    pub fn load(&mut self, at: u64, bytes: &[u8]) {
        let start = at as usize;
        self.memory[start..start + bytes.len()].copy_from_slice(bytes);
        self.note_write(at, bytes.len() as u64);
    }

    /// Makes the page at an address absent or present.
    pub fn set_absent(&mut self, gva: u64, on: bool) {
        self.set_page(gva, ABSENT, on);
    }
    /// Makes the page at an address read-only or writable.
    pub fn set_read_only(&mut self, gva: u64, on: bool) {
        self.set_page(gva, READ_ONLY, on);
    }
    /// Makes the page at an address a device.
    pub fn set_device(&mut self, gva: u64, on: bool) {
        self.set_page(gva, DEVICE, on);
    }

    fn set_page(&mut self, gva: u64, flag: u8, on: bool) {
        self.epoch += 1;
        if let Some(p) = self.pages.get_mut((gva / PAGE) as usize) {
            *p = if on { *p | flag } else { *p & !flag };
        }
    }

    /// Flags of all pages of an access, or #PF.
    #[inline(always)]
    fn check(
        &self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<u8, Fault> {
        let first = (gva / PAGE) as usize;
        let last = (gva.wrapping_add(len.max(1) - 1) / PAGE) as usize;
        if first == last
            && let Some(&p) = self.pages.get(first)
            && p & !CODE == 0
        {
            return Ok(p);
        }
        self.check_slow(cpu, gva, len, access, who)
    }

    fn check_slow(
        &self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<u8, Fault> {
        let mut all = 0;
        let mut at = gva;
        for page in gva / PAGE..=gva.wrapping_add(len.max(1) - 1) / PAGE {
            let flags = self.pages.get(page as usize).copied().unwrap_or(ABSENT);
            let read_only = access == Access::Write && flags & READ_ONLY != 0;
            if flags & ABSENT != 0 || read_only {
                cpu.fault_gva = at;
                let mut code = 0;
                if flags & ABSENT == 0 {
                    code |= vector::pf::P;
                }
                if access == Access::Write {
                    code |= vector::pf::W;
                }
                if access == Access::Fetch {
                    code |= vector::pf::I;
                }
                if cpu.cpl == 3 && who == Privilege::Current {
                    code |= vector::pf::U;
                }
                return Err(Exception::with_code(vector::PF, code).into());
            }
            all |= flags;
            at = (page + 1).wrapping_mul(PAGE);
        }
        Ok(all)
    }

    fn note_write(&mut self, gva: u64, len: u64) {
        for line in gva / 64..=(gva + len.max(1) - 1) / 64 {
            let page = (line / 64) as usize;
            let bit = 1 << (line % 64);
            if let (Some(lines), Some(generation)) =
                (self.lines.get_mut(page), self.generations.get_mut(page))
                && *lines & bit != 0
            {
                *lines = 0;
                *generation = generation.wrapping_add(1);
                self.pages[page] &= !CODE;
            }
        }
    }

    fn bytes(&self, gva: u64, len: usize) -> &[u8] {
        &self.memory[gva as usize..gva as usize + len]
    }
}

impl GuestBus for FlatBus {
    #[inline(always)]
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, who: Privilege) -> Result<T, Fault> {
        let flags = self.check(cpu, gva, T::SIZE as u64, Access::Read, who)?;
        if flags & DEVICE != 0 {
            let answer = self.device_reads.pop_front().ok_or(Fault::Exit)?;
            return Ok(T::from_u128(answer.into()));
        }
        Ok(T::from_le(self.bytes(gva, T::SIZE)))
    }
    #[inline(always)]
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        let flags = self.check(cpu, gva, T::SIZE as u64, Access::Write, who)?;
        if flags & DEVICE != 0 {
            self.device_writes.push((gva, value.to_u128() as u64));
            return Ok(());
        }
        let at = gva as usize;
        self.memory[at..at + T::SIZE].copy_from_slice(&value.to_le()[..T::SIZE]);
        if flags & CODE != 0 {
            self.note_write(gva, T::SIZE as u64);
        }
        Ok(())
    }
    #[inline(always)]
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        _lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        self.check(cpu, gva, T::SIZE as u64, Access::Write, who)?;
        let old = self.read(cpu, gva, who)?;
        self.write(cpu, gva, f(old), who)?;
        Ok(old)
    }
    fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        self.check(cpu, gva, buf.len() as u64, Access::Read, who)?;
        buf.copy_from_slice(self.bytes(gva, buf.len()));
        Ok(())
    }
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        self.check(cpu, gva, buf.len() as u64, Access::Write, who)?;
        self.load(gva, buf);
        Ok(())
    }
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Fault> {
        self.check(cpu, gva, len, access, who).map(drop)
    }
    fn bulk_copy(&mut self, cpu: &mut CpuState, dst: u64, src: u64, len: u64, unit: u64) -> u64 {
        let page_left = |a: u64| PAGE - a % PAGE;
        let len = len.min(page_left(dst)).min(page_left(src)) / unit * unit;
        // An overlap from behind repeats a pattern: one unit at a time.
        let repeats = dst > src && dst < src + len;
        let plain = |r: Result<u8, Fault>| r.is_ok_and(|flags| flags & DEVICE == 0);
        if len == 0
            || repeats
            || !plain(self.check(cpu, src, len, Access::Read, Privilege::Current))
            || !plain(self.check(cpu, dst, len, Access::Write, Privilege::Current))
        {
            return 0;
        }
        let src = src as usize;
        self.memory
            .copy_within(src..src + len as usize, dst as usize);
        self.note_write(dst, len);
        len
    }
    fn bulk_fill(&mut self, cpu: &mut CpuState, dst: u64, value: u64, len: u64, unit: u64) -> u64 {
        let len = len.min(PAGE - dst % PAGE) / unit * unit;
        let checked = self.check(cpu, dst, len, Access::Write, Privilege::Current);
        if len == 0 || !checked.is_ok_and(|flags| flags & DEVICE == 0) {
            return 0;
        }
        let pattern = value.to_le_bytes();
        let at = dst as usize;
        for chunk in self.memory[at..at + len as usize].chunks_mut(unit as usize) {
            chunk.copy_from_slice(&pattern[..chunk.len()]);
        }
        self.note_write(dst, len);
        len
    }

    fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        self.check(cpu, gva, 1, Access::Fetch, Privilege::Current)?;
        Ok(CodePage {
            id: gva & !(PAGE - 1),
            generation: self.generations[(gva / PAGE) as usize],
        })
    }
    fn code_bytes(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        let len = buf.len().min((PAGE - gva % PAGE) as usize);
        self.check(cpu, gva, len as u64, Access::Fetch, Privilege::Current)?;
        let page = (gva / PAGE) as usize;
        for line in gva / 64..=(gva + len.max(1) as u64 - 1) / 64 {
            self.lines[page] |= 1 << (line % 64);
        }
        self.pages[page] |= CODE;
        buf[..len].copy_from_slice(self.bytes(gva, len));
        Ok(len)
    }
    #[inline(always)]
    fn code_generation(&mut self, id: u64) -> u32 {
        self.generations
            .get((id / PAGE) as usize)
            .copied()
            .unwrap_or(0)
    }
    #[inline(always)]
    fn fetch_epoch(&self) -> u64 {
        self.epoch
    }

    fn load_root(&mut self, _cpu: &mut CpuState) -> Result<(), Fault> {
        self.epoch += 1;
        Ok(())
    }
    fn select_view(&mut self, _cpu: &mut CpuState) {
        self.epoch += 1;
    }
    fn flush(&mut self, _cpu: &mut CpuState, what: Flush) {
        self.epoch += 1;
        self.flushes.push(what);
    }

    fn port_in(&mut self, _cpu: &mut CpuState, port: u16, size: u8) -> Result<u32, Fault> {
        let value = self.port_inputs.pop_front().unwrap_or(u32::MAX);
        let value = value & (u64::MAX >> (64 - 8 * u32::from(size))) as u32;
        self.ports.push(PortAccess {
            port,
            size,
            value,
            out: false,
        });
        Ok(value)
    }
    fn port_out(
        &mut self,
        _cpu: &mut CpuState,
        port: u16,
        size: u8,
        value: u32,
    ) -> Result<(), Fault> {
        self.ports.push(PortAccess {
            port,
            size,
            value,
            out: true,
        });
        Ok(())
    }
    fn read_msr(&mut self, _cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        self.msrs
            .get(&index)
            .copied()
            .ok_or(Fault::Exception(Exception::GP0))
    }
    fn write_msr(&mut self, _cpu: &mut CpuState, index: u32, value: u64) -> Result<(), Fault> {
        match self.msrs.get_mut(&index) {
            Some(v) => {
                *v = value;
                Ok(())
            }
            None => Err(Exception::GP0.into()),
        }
    }
    fn cpuid(&mut self, _cpu: &mut CpuState, leaf: u32, subleaf: u32) -> [u32; 4] {
        [leaf, subleaf, 0, 0]
    }
    fn tsc(&mut self, _cpu: &mut CpuState) -> u64 {
        self.clock += 1;
        self.clock
    }
    fn read_pmc(&mut self, _cpu: &mut CpuState, _index: u32) -> Result<u64, Fault> {
        Err(Exception::GP0.into())
    }
    fn task_priority(&mut self, _cpu: &mut CpuState) -> u8 {
        self.priority
    }
    fn set_task_priority(&mut self, _cpu: &mut CpuState, priority: u8) {
        self.priority = priority;
    }
    fn hypercall(&mut self, _cpu: &mut CpuState) -> Result<(), Fault> {
        self.hypercalls += 1;
        Ok(())
    }
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
    fn intercept(&mut self, _cpu: &mut CpuState, exception: Exception) -> bool {
        if self.catch {
            self.caught.push(exception);
        }
        self.catch
    }
    fn nmi_unmasked(&mut self) {
        self.nmi_unmasked += 1;
    }
    #[inline(always)]
    fn commit(&mut self) {
        self.commits += 1;
    }
    #[inline(always)]
    fn poll(&mut self, _cpu: &CpuState) -> bool {
        match self.polls_left.checked_sub(1) {
            Some(left) => {
                self.polls_left = left;
                false
            }
            None => true,
        }
    }
}
