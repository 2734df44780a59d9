//! [`FlatBus`]: a [`GuestBus`] of flat memory regions, without paging.
//!
//! Linear addresses outside of the regions raise #PF. Ports and flushes are recorded, MSRs are those of the model.
//! Every exception is recorded, and intercepted unless [`FlatBus::deliver`] is set, so that a test sees the exception
//! and not its delivery.

use x86_cpu::{Access, CodePage, CpuState, Exception, Fault, Flush, GuestBus, Privilege, Word};
use x86_defs::vector::{self, pf};

use crate::surroundings::surroundings;

/// A region of memory.
#[derive(Clone, Debug)]
struct Region {
    base: u64,
    bytes: Vec<u8>,
    writable: bool,
    executable: bool,
}

/// Flat memory, and recorded events.
#[derive(Clone, Debug)]
pub struct FlatBus {
    regions: Vec<Region>,
    generation: u32,
    /// The last exception that was not delivered.
    pub exception: Option<Exception>,
    /// True if exceptions are delivered through the guest's IDT.
    pub deliver: bool,
    /// Number of blocks until the interpreter is asked to return; `None`: never.
    pub polls: Option<u32>,
    /// Number of accesses that still succeed. The next one is an exit.
    pub budget: usize,
    /// The value that ports read as.
    pub input: u32,
    /// Writes to ports: port, size, value.
    pub out: Vec<(u16, u8, u32)>,
    /// The flushes that were requested.
    pub flushes: Vec<Flush>,
    /// How often the paging root was loaded.
    pub roots: usize,
    /// How often NMIs were unmasked.
    pub unmasked: usize,
}

impl Default for FlatBus {
    fn default() -> Self {
        Self {
            regions: Vec::new(),
            generation: 0,
            exception: None,
            deliver: false,
            polls: None,
            budget: usize::MAX,
            input: u32::MAX,
            out: Vec::new(),
            flushes: Vec::new(),
            roots: 0,
            unmasked: 0,
        }
    }
}

impl FlatBus {
    /// Makes a bus without memory.
    pub fn new() -> Self {
        Self::default()
    }
    /// Adds `size` bytes of zeroed memory.
    pub fn map(&mut self, base: u64, size: usize) {
        self.map_as(base, size, true, true);
    }
    /// Adds memory that can be written, executed, both or neither.
    pub fn map_as(&mut self, base: u64, size: usize, writable: bool, executable: bool) {
        self.regions.push(Region {
            base,
            bytes: vec![0; size],
            writable,
            executable,
        });
    }
    /// Returns the bytes of memory from `gva` to the end of its region.
    pub fn memory(&mut self, gva: u64) -> &mut [u8] {
        self.generation = self.generation.wrapping_add(1);
        self.slice(gva).unwrap_or_default()
    }
    /// Stores bytes.
    pub fn put(&mut self, gva: u64, bytes: &[u8]) {
        self.memory(gva)[..bytes.len()].copy_from_slice(bytes);
    }
    /// Stores a word.
    pub fn put64(&mut self, gva: u64, v: u64) {
        self.put(gva, &v.to_le_bytes());
    }
    /// Returns the 64-bit word at `gva`.
    pub fn get64(&mut self, gva: u64) -> u64 {
        <u64 as Word>::from_le(&self.memory(gva)[..8])
    }
    /// Returns the 32-bit word at `gva`.
    pub fn get32(&mut self, gva: u64) -> u32 {
        <u32 as Word>::from_le(&self.memory(gva)[..4])
    }
    /// Returns the 16-bit word at `gva`.
    pub fn get16(&mut self, gva: u64) -> u16 {
        <u16 as Word>::from_le(&self.memory(gva)[..2])
    }
    fn slice(&mut self, gva: u64) -> Option<&mut [u8]> {
        self.regions.iter_mut().find_map(|r| {
            let at = usize::try_from(gva.checked_sub(r.base)?).ok()?;
            r.bytes.get_mut(at..).filter(|s| !s.is_empty())
        })
    }
    /// Reads or checks `len` bytes page by page, in ascending order.
    fn check(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: usize,
        access: Access,
    ) -> Result<(), Fault> {
        self.budget = self.budget.checked_sub(1).ok_or(Fault::Exit)?;
        let region = self.regions.iter().find_map(|r| {
            let at = gva.checked_sub(r.base)?;
            let have = (r.bytes.len() as u64).checked_sub(at)?;
            (have > 0).then_some((r, have))
        });
        let have = region.map_or(0, |(_, have)| have);
        let allowed = region.is_none_or(|(r, _)| match access {
            Access::Read => true,
            Access::Write => r.writable,
            Access::Fetch => r.executable,
        });
        if have >= len as u64 && allowed {
            return Ok(());
        }
        cpu.fault_gva = if allowed { gva.wrapping_add(have) } else { gva };
        let mut code = if allowed { 0 } else { pf::P };
        if cpu.cpl == 3 {
            code |= pf::U;
        }
        match access {
            Access::Write => code |= pf::W,
            Access::Fetch => code |= pf::I,
            Access::Read => {}
        }
        Err(Exception::with_code(vector::PF, code).into())
    }
}

impl GuestBus for FlatBus {
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, _: Privilege) -> Result<T, Fault> {
        self.check(cpu, gva, T::SIZE, Access::Read)?;
        Ok(self
            .slice(gva)
            .map_or(T::default(), |s| T::from_le(&s[..T::SIZE])))
    }
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        self.write_bytes(cpu, gva, &value.to_le()[..T::SIZE], who)
    }
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        _lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        self.check(cpu, gva, T::SIZE, Access::Write)?;
        let old = self.read(cpu, gva, who)?;
        self.write(cpu, gva, f(old), who)?;
        Ok(old)
    }
    fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        _: Privilege,
    ) -> Result<(), Fault> {
        self.check(cpu, gva, buf.len(), Access::Read)?;
        if let Some(s) = self.slice(gva) {
            buf.copy_from_slice(&s[..buf.len()]);
        }
        Ok(())
    }
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        _: Privilege,
    ) -> Result<(), Fault> {
        self.check(cpu, gva, buf.len(), Access::Write)?;
        if let Some(s) = self.slice(gva) {
            s[..buf.len()].copy_from_slice(buf);
        }
        Ok(())
    }
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        _: Privilege,
    ) -> Result<(), Fault> {
        self.check(cpu, gva, len as usize, access)
    }
    fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        self.check(cpu, gva, 1, Access::Fetch)?;
        Ok(CodePage {
            id: gva & !0xfff,
            generation: self.generation,
        })
    }
    fn code_bytes(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        self.check(cpu, gva, 1, Access::Fetch)?;
        let n = buf.len().min(0x1000 - (gva & 0xfff) as usize);
        let s = self.slice(gva).unwrap_or_default();
        let n = n.min(s.len());
        buf[..n].copy_from_slice(&s[..n]);
        Ok(n)
    }
    fn code_generation(&mut self, _id: u64) -> u32 {
        self.generation
    }
    fn code_changes(&self) -> u64 {
        self.generation.into()
    }
    fn fetch_epoch(&self) -> u64 {
        0
    }
    fn load_root(&mut self, _cpu: &mut CpuState) -> Result<(), Fault> {
        self.roots += 1;
        Ok(())
    }
    fn select_view(&mut self, _cpu: &mut CpuState) {}
    fn flush(&mut self, _cpu: &mut CpuState, what: Flush) {
        self.flushes.push(what);
    }
    fn port_in(&mut self, _: &mut CpuState, _: u16, _: u8) -> Result<u32, Fault> {
        if self.budget == 0 {
            return Err(Fault::Exit);
        }
        Ok(self.input)
    }
    fn port_out(&mut self, _: &mut CpuState, port: u16, size: u8, value: u32) -> Result<(), Fault> {
        self.out.push((port, size, value));
        Ok(())
    }
    fn tsc(&mut self, _: &mut CpuState) -> u64 {
        0x1_0000_0002
    }
    fn task_priority(&mut self, _: &mut CpuState) -> u8 {
        7
    }
    fn nmi_unmasked(&mut self) {
        self.unmasked += 1;
    }
    fn bulk_copy(&mut self, _: &mut CpuState, dst: u64, src: u64, len: u64, unit: u64) -> u64 {
        let room = |s: Option<&mut [u8]>| s.map_or(0, |s| s.len()) as u64;
        let len = len.min(room(self.slice(src))).min(room(self.slice(dst)));
        let len = len - len % unit.max(1);
        for n in (0..len).step_by(unit.max(1) as usize) {
            // The copy goes by units, because the regions may overlap.
            let mut b = [0; 8];
            let b = &mut b[..unit as usize];
            if let Some(s) = self.slice(src + n) {
                b.copy_from_slice(&s[..b.len()]);
            }
            if let Some(s) = self.slice(dst + n) {
                s[..b.len()].copy_from_slice(b);
            }
        }
        len
    }
    fn bulk_fill(&mut self, _: &mut CpuState, dst: u64, value: u64, len: u64, unit: u64) -> u64 {
        let b = value.to_le_bytes();
        let unit = unit.clamp(1, 8) as usize;
        let Some(s) = self.slice(dst) else {
            return 0;
        };
        let len = (len as usize).min(s.len());
        let len = len - len % unit;
        for chunk in s[..len].chunks_exact_mut(unit) {
            chunk.copy_from_slice(&b[..unit]);
        }
        len as u64
    }
    fn bulk_read(&mut self, _: &mut CpuState, src: u64, buf: &mut [u8]) -> usize {
        let Some(s) = self.slice(src) else {
            return 0;
        };
        let len = s.len().min(buf.len());
        buf[..len].copy_from_slice(&s[..len]);
        len
    }
    fn intercept(&mut self, _: &mut CpuState, exception: Exception) -> bool {
        self.exception = Some(exception);
        !self.deliver
    }
    surroundings!();
    fn poll(&mut self, _: &CpuState) -> bool {
        match &mut self.polls {
            None => false,
            Some(0) => true,
            Some(n) => {
                *n -= 1;
                false
            }
        }
    }
}
