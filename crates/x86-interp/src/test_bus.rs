//! Flat memory as a [`GuestBus`] for unit tests: linear address = offset.

use x86_cpu::{
    Access, CodePage, CpuState, Exception, Fault, Flush, GuestBus, Privilege, Word, msr_model,
};
use x86_defs::vector;

/// A megabyte of memory, with a record of what was asked of it.
#[derive(Debug)]
pub(crate) struct TestBus {
    pub(crate) mem: Vec<u8>,
    pub(crate) flushes: Vec<Flush>,
    pub(crate) roots: usize,
    pub(crate) out: Vec<(u16, u8, u32)>,
    pub(crate) input: u32,
    /// Accesses that still succeed; the next one is an exit.
    pub(crate) budget: usize,
    pub(crate) unmasked: usize,
}

impl TestBus {
    pub(crate) fn new() -> Self {
        Self {
            mem: vec![0; 1 << 20],
            flushes: Vec::new(),
            roots: 0,
            out: Vec::new(),
            input: 0x1234_5678,
            budget: usize::MAX,
            unmasked: 0,
        }
    }
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.mem[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }
    pub(crate) fn put64(&mut self, at: u64, v: u64) {
        self.put(at, &v.to_le_bytes());
    }
    pub(crate) fn get64(&self, at: u64) -> u64 {
        u64::from_le(u64::from_le_bytes(
            self.mem[at as usize..at as usize + 8].try_into().unwrap(),
        ))
    }
    pub(crate) fn get32(&self, at: u64) -> u32 {
        self.get64(at) as u32
    }
    pub(crate) fn get16(&self, at: u64) -> u16 {
        self.get64(at) as u16
    }
    fn range(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: usize,
    ) -> Result<core::ops::Range<usize>, Fault> {
        if self.budget == 0 {
            return Err(Fault::Exit);
        }
        self.budget -= 1;
        let at = gva as usize;
        match at.checked_add(len) {
            Some(end) if end <= self.mem.len() => Ok(at..end),
            _ => {
                cpu.fault_gva = gva;
                Err(Exception::with_code(vector::PF, 0).into())
            }
        }
    }
}

impl GuestBus for TestBus {
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, _: Privilege) -> Result<T, Fault> {
        let r = self.range(cpu, gva, T::SIZE)?;
        Ok(T::from_le(&self.mem[r]))
    }
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        _: Privilege,
    ) -> Result<(), Fault> {
        let r = self.range(cpu, gva, T::SIZE)?;
        self.mem[r].copy_from_slice(&value.to_le()[..T::SIZE]);
        Ok(())
    }
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        _: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        let old = self.read::<T>(cpu, gva, who)?;
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
        let r = self.range(cpu, gva, buf.len())?;
        buf.copy_from_slice(&self.mem[r]);
        Ok(())
    }
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        _: Privilege,
    ) -> Result<(), Fault> {
        let r = self.range(cpu, gva, buf.len())?;
        self.mem[r].copy_from_slice(buf);
        Ok(())
    }
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        _: Access,
        _: Privilege,
    ) -> Result<(), Fault> {
        self.range(cpu, gva, len as usize).map(|_| ())
    }
    fn code_page(&mut self, _: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        Ok(CodePage {
            id: gva & !0xfff,
            generation: 0,
        })
    }
    fn code_bytes(&mut self, _: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        let n = buf.len().min(4096 - (gva as usize & 4095));
        let at = gva as usize;
        buf[..n].copy_from_slice(&self.mem[at..at + n]);
        Ok(n)
    }
    fn code_generation(&mut self, _: u64) -> u32 {
        0
    }
    fn code_changes(&self) -> u64 {
        0
    }
    fn fetch_epoch(&self) -> u64 {
        0
    }
    fn load_root(&mut self, _: &mut CpuState) -> Result<(), Fault> {
        self.roots += 1;
        Ok(())
    }
    fn select_view(&mut self, _: &mut CpuState) {}
    fn flush(&mut self, _: &mut CpuState, what: Flush) {
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
    fn read_msr(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        msr_model::read(cpu, index).ok_or(Exception::GP0.into())
    }
    fn write_msr(&mut self, cpu: &mut CpuState, index: u32, value: u64) -> Result<(), Fault> {
        match msr_model::write(cpu, index, value) {
            msr_model::MsrWrite::Rejected | msr_model::MsrWrite::Unknown => {
                Err(Exception::GP0.into())
            }
            _ => Ok(()),
        }
    }
    fn cpuid(&mut self, _: &mut CpuState, leaf: u32, subleaf: u32) -> [u32; 4] {
        [leaf, subleaf, 3, 4]
    }
    fn tsc(&mut self, _: &mut CpuState) -> u64 {
        0x1_0000_0002
    }
    fn read_pmc(&mut self, _: &mut CpuState, _: u32) -> Result<u64, Fault> {
        Err(Exception::GP0.into())
    }
    fn task_priority(&mut self, _: &mut CpuState) -> u8 {
        7
    }
    fn set_task_priority(&mut self, _: &mut CpuState, _: u8) {}
    fn hypercall(&mut self, _: &mut CpuState) -> Result<(), Fault> {
        Ok(())
    }
    fn random(&mut self) -> u64 {
        0
    }
    fn nmi_unmasked(&mut self) {
        self.unmasked += 1;
    }
    fn commit(&mut self) {}
    fn poll(&mut self, _: &CpuState) -> bool {
        false
    }
}

/// Layout of the test machine.
pub(crate) mod at {
    pub(crate) const CODE: u64 = 0x1000;
    pub(crate) const GDT: u64 = 0x2000;
    pub(crate) const IDT: u64 = 0x3000;
    pub(crate) const TSS: u64 = 0x5000;
    pub(crate) const TSS2: u64 = 0x5800;
    pub(crate) const STACK0: u64 = 0x8000;
    pub(crate) const IST1: u64 = 0x9000;
    pub(crate) const STACK: u64 = 0xa000;
    pub(crate) const HANDLER: u64 = 0x1800;
}

/// Selectors of the test GDT.
pub(crate) mod sel {
    pub(crate) const CODE0: u16 = 0x08;
    pub(crate) const DATA0: u16 = 0x10;
    pub(crate) const DATA3: u16 = 0x1b;
    pub(crate) const CODE3: u16 = 0x23;
    pub(crate) const CODE32: u16 = 0x28;
    pub(crate) const TSS: u16 = 0x30;
    pub(crate) const GATE: u16 = 0x43;
    pub(crate) const TSS2: u16 = 0x50;
}

use x86_defs::{
    control::{cr0, cr4, efer},
    reg, rflags,
    segment::{Attr, DescriptorTable, Segment},
};

fn system_descriptor(base: u64, limit: u64, kind: u64) -> u64 {
    limit & 0xffff | (base & 0xff_ffff) << 16 | (0x80 | kind) << 40 | (base >> 24 & 0xff) << 56
}

/// GDT, TSS and a CPU in 64-bit or 32-bit protected mode at `cpl`.
pub(crate) fn machine(long: bool, cpl: u8) -> (CpuState, TestBus) {
    let mut bus = TestBus::new();
    let code = if long {
        0x00af_9a00_0000_ffff
    } else {
        0x00cf_9a00_0000_ffff
    };
    let dpl3 = 3 << 45;
    for (selector, d) in [
        (sel::CODE0, code),
        (sel::DATA0, 0x00cf_9200_0000_ffff),
        (sel::DATA3, 0x00cf_9200_0000_ffff | dpl3),
        (sel::CODE3, code | dpl3),
        (sel::CODE32, 0x00cf_9a00_0000_ffff),
        (sel::TSS, system_descriptor(at::TSS, 0x2fff, 9)),
        (sel::TSS2, system_descriptor(at::TSS2, 0x67, 9)),
    ] {
        bus.put64(at::GDT + u64::from(selector & !7), d);
    }
    let mut cpu = CpuState::default();
    let flat = |attr: u32, dpl: u8, selector: u16| Segment {
        base: 0,
        limit: u32::MAX,
        attr: Attr(attr | u32::from(dpl) << 5),
        selector: selector & !3 | u16::from(dpl),
    };
    cpu.cpl = cpl;
    let (cs, ss) = if cpl == 0 {
        (sel::CODE0, sel::DATA0)
    } else {
        (sel::CODE3, sel::DATA3)
    };
    for s in &mut cpu.seg {
        *s = flat(0xc093, 3, sel::DATA3);
    }
    cpu.seg[reg::CS] = flat(if long { 0xa09b } else { 0xc09b }, cpl, cs);
    cpu.seg[reg::SS] = flat(0xc093, cpl, ss);
    cpu.tr = Segment {
        base: at::TSS,
        limit: 0x2fff,
        attr: Attr(0x8b),
        selector: sel::TSS,
    };
    cpu.ldtr.attr = Attr(Attr::UNUSABLE);
    cpu.gdtr = DescriptorTable {
        base: at::GDT,
        limit: 0xff,
    };
    cpu.idtr = DescriptorTable {
        base: at::IDT,
        limit: 0xfff,
    };
    cpu.cr0 = cr0::PE | cr0::ET;
    if long {
        cpu.cr0 |= cr0::PG;
        cpu.cr4 = cr4::PAE;
        cpu.efer = efer::LMA | efer::LME;
        bus.put64(at::TSS + 4, at::STACK0 + 8);
        bus.put64(at::TSS + 36, at::IST1);
    } else {
        bus.put(at::TSS + 4, &(at::STACK0 as u32).to_le_bytes());
        bus.put(at::TSS + 8, &u32::from(sel::DATA0).to_le_bytes());
    }
    cpu.gpr[reg::RSP] = at::STACK;
    cpu.set_rip(at::CODE);
    cpu.rflags = rflags::FIXED1 | rflags::IF | rflags::CF;
    cpu.update_mode();
    (cpu, bus)
}

/// Installs a gate to [`at::HANDLER`] in CODE0: `kind` 14 or 15, with DPL and IST.
pub(crate) fn gate(bus: &mut TestBus, long: bool, vector: u8, kind: u64, dpl: u64, ist: u64) {
    let d = at::HANDLER | u64::from(sel::CODE0) << 16 | ist << 32 | (0x80 | dpl << 5 | kind) << 40;
    bus.put64(at::IDT + u64::from(vector) * if long { 16 } else { 8 }, d);
}
