//! System-management mode: entry on an SMI, and RSM (SDM vol. 3, chapter 32;
//! AMD APM vol. 2, 10.2, whose 64-bit save-state area KVM uses for every vendor).
//!
//! DEVIATION: CPUs without long mode get the 64-bit save-state area too.

use x86_cpu::{CodeSize, CpuState, Events, Fault, Flush, GuestBus, Privilege, Shadow};
use x86_defs::{
    control::{cr0, efer},
    dr, reg, rflags,
    segment::{Attr, DescriptorTable, Segment},
};

use crate::Stop;

/// Offset of the 512-byte save-state area from SMBASE.
const AREA: u64 = 0xfe00;
/// Size of the save-state area in bytes.
const SIZE: usize = 512;
/// SMM revision: SMBASE relocation, AMD64 format.
const REVISION: u32 = 0x0002_0064;

/// Offsets in the area (AMD APM vol. 2, table 10-1, less 0xfe00).
mod at {
    /// ES, CS, SS, DS, FS, GS, each: selector, attributes, limit, base.
    pub(super) const SEG: usize = 0;
    pub(super) const GDTR: usize = 0x60;
    pub(super) const LDTR: usize = 0x70;
    pub(super) const IDTR: usize = 0x80;
    pub(super) const TR: usize = 0x90;
    pub(super) const EFER: usize = 0xd0;
    pub(super) const REVISION: usize = 0xfc;
    pub(super) const SMBASE: usize = 0x100;
    pub(super) const CR4: usize = 0x148;
    pub(super) const CR3: usize = 0x150;
    pub(super) const CR0: usize = 0x158;
    pub(super) const DR7: usize = 0x160;
    pub(super) const DR6: usize = 0x168;
    pub(super) const RFLAGS: usize = 0x170;
    pub(super) const RIP: usize = 0x178;
    /// RAX; RCX to R15 follow downwards.
    pub(super) const RAX: usize = 0x1f8;
}

macro_rules! saved {
    ($($field:ident: $type:ty),* $(,)?) => {
        /// The state that an SMI or RSM changes, except SMBASE: less than half of all state.
        struct Saved {
            smbase: u64,
            $($field: $type),*
        }

        impl Saved {
            fn of(cpu: &CpuState) -> Self {
                Self {
                    smbase: cpu.msr.smbase,
                    $($field: cpu.$field.clone()),*
                }
            }

            fn put_back(self, cpu: &mut CpuState) {
                cpu.msr.smbase = self.smbase;
                $(cpu.$field = self.$field;)*
            }
        }
    };
}

saved! {
    gpr: [u64; reg::NR_SLOTS], rflags: u64, cpl: u8, code_size: CodeSize, shadow: Shadow, fault_gva: u64, seg: [Segment; 6],
    ldtr: Segment, tr: Segment, gdtr: DescriptorTable, idtr: DescriptorTable, cr0: u64, cr3: u64, cr4: u64, efer: u64,
    pdpte: [u64; 4], dr6: u64, dr7: u64, events: Events, smi_controls: [u64; 4],
}

/// The save-state area.
struct Image([u8; SIZE]);

impl Image {
    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        if let Some(slot) = self.0.get_mut(at..at + N) {
            slot.copy_from_slice(&bytes);
        }
    }
    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        if let Some(slot) = self.0.get(at..at + N) {
            bytes.copy_from_slice(slot);
        }
        bytes
    }
    fn put64(&mut self, at: usize, v: u64) {
        self.put(at, v.to_le_bytes());
    }
    fn get64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.get(at))
    }
    fn put_segment(&mut self, at: usize, s: &Segment) {
        let attr = if s.attr.is_unusable() { 0 } else { s.attr.0 };
        self.put(at, s.selector.to_le_bytes());
        self.put(at + 2, (attr as u16 & 0xf0ff).to_le_bytes());
        self.put(at + 4, s.limit.to_le_bytes());
        self.put64(at + 8, s.base);
    }
    fn segment(&self, at: usize) -> Segment {
        let attr = u32::from(u16::from_le_bytes(self.get(at + 2))) & 0xf0ff;
        // An unusable register is saved as not present.
        let unusable = if attr & Attr::P == 0 {
            Attr::UNUSABLE
        } else {
            0
        };
        Segment {
            base: self.get64(at + 8),
            limit: u32::from_le_bytes(self.get(at + 4)),
            attr: Attr(attr | unusable),
            selector: u16::from_le_bytes(self.get(at)),
        }
    }
    fn put_table(&mut self, at: usize, t: &DescriptorTable) {
        self.put(at + 4, u32::from(t.limit).to_le_bytes());
        self.put64(at + 8, t.base);
    }
    fn table(&self, at: usize) -> DescriptorTable {
        DescriptorTable {
            base: self.get64(at + 8),
            limit: u16::from_le_bytes(self.get(at + 4)),
        }
    }

    fn of(cpu: &CpuState) -> Self {
        let mut image = Self([0; SIZE]);
        for (i, v) in cpu.gpr.iter().take(16).enumerate() {
            image.put64(at::RAX - 8 * i, *v);
        }
        for (offset, v) in [
            (at::RIP, cpu.rip()),
            (at::RFLAGS, cpu.rflags),
            (at::DR6, cpu.dr6),
            (at::DR7, cpu.dr7),
            (at::CR0, cpu.cr0),
            (at::CR3, cpu.cr3),
            (at::CR4, cpu.cr4),
            (at::EFER, cpu.efer),
        ] {
            image.put64(offset, v);
        }
        image.put(at::SMBASE, (cpu.msr.smbase as u32).to_le_bytes());
        image.put(at::REVISION, REVISION.to_le_bytes());
        for (i, s) in cpu.seg.iter().enumerate() {
            image.put_segment(at::SEG + 16 * i, s);
        }
        image.put_segment(at::LDTR, &cpu.ldtr);
        image.put_segment(at::TR, &cpu.tr);
        image.put_table(at::GDTR, &cpu.gdtr);
        image.put_table(at::IDTR, &cpu.idtr);
        image
    }

    fn restore(&self, cpu: &mut CpuState) {
        for (i, v) in cpu.gpr.iter_mut().take(16).enumerate() {
            *v = self.get64(at::RAX - 8 * i);
        }
        cpu.set_rip(self.get64(at::RIP));
        cpu.rflags = self.get64(at::RFLAGS) & rflags::DEFINED | rflags::FIXED1;
        cpu.dr6 = self.get64(at::DR6) & 0xffff_ffff | dr::DR6_FIXED1;
        cpu.dr7 = self.get64(at::DR7) & dr::DR7_WRITABLE | dr::DR7_FIXED1;
        cpu.cr0 = self.get64(at::CR0);
        cpu.cr3 = self.get64(at::CR3);
        cpu.cr4 = self.get64(at::CR4);
        cpu.efer = self.get64(at::EFER);
        cpu.msr.smbase = u64::from(u32::from_le_bytes(self.get(at::SMBASE)));
        for (i, s) in cpu.seg.iter_mut().enumerate() {
            *s = self.segment(at::SEG + 16 * i);
        }
        cpu.ldtr = self.segment(at::LDTR);
        cpu.tr = self.segment(at::TR);
        cpu.gdtr = self.table(at::GDTR);
        cpu.idtr = self.table(at::IDTR);
        cpu.cpl = if !cpu.is_protected() {
            0
        } else if cpu.is_v86() {
            3
        } else {
            // A null SS was saved without its DPL; CS tells the CPL then.
            let ss = cpu.seg[reg::SS].attr;
            if ss.is_unusable() {
                (cpu.seg[reg::CS].selector & 3) as u8
            } else {
                ss.dpl()
            }
        };
    }

    /// False for values of CR0 and EFER that no MOV can produce, on which the CPU shuts down.
    fn is_consistent(&self) -> bool {
        let (c0, e) = (self.get64(at::CR0), self.get64(at::EFER));
        let paging = c0 & cr0::PG != 0;
        (!paging || c0 & cr0::PE != 0)
            && (e & efer::LMA != 0) == (paging && e & efer::LME != 0)
            && c0 >> 32 == 0
    }
}

/// Takes an SMI: saves the state in SMRAM and starts the handler. The run loop calls this between instructions, with
/// `cpu.rflags` exact, when an SMI is pending and the CPU is not in SMM. On [`Stop::Exit`] nothing has changed.
pub fn enter<B: GuestBus>(cpu: &mut CpuState, bus: &mut B) -> Result<(), Stop> {
    let saved = Saved::of(cpu);
    let image = Image::of(cpu);
    cpu.smi_controls = controls(cpu);
    flat_mode(cpu);
    cpu.events.in_smm = true;
    let segment = |selector: u16, base: u64| Segment {
        base,
        limit: u32::MAX,
        attr: Attr(Attr::G | 0x93),
        selector,
    };
    for s in &mut cpu.seg {
        *s = segment(0, 0);
    }
    let smbase = cpu.msr.smbase;
    cpu.seg[reg::CS] = segment((smbase >> 4) as u16, smbase);
    cpu.cpl = 0;
    cpu.rflags = rflags::FIXED1;
    cpu.set_rip(0x8000);
    cpu.idtr = DescriptorTable::default();
    cpu.dr7 = dr::DR7_FIXED1;
    cpu.shadow = Shadow::None;
    cpu.events.smi_pending = false;
    cpu.events.smm_inside_nmi = cpu.events.nmi_masked;
    cpu.events.nmi_masked = true;
    cpu.update_mode();
    let written = switch(cpu, bus).and_then(|()| {
        bus.write_bytes(
            cpu,
            smbase.wrapping_add(AREA) & 0xffff_ffff,
            &image.0,
            Privilege::System,
        )
    });
    finish(cpu, bus, saved, written)
}

/// RSM, executed in SMM: restores the state in the save-state area.
pub(crate) fn leave<B: GuestBus>(cpu: &mut CpuState, bus: &mut B) -> Result<(), Stop> {
    let saved = Saved::of(cpu);
    // The area is addressed physically, whatever paging the handler has set up.
    let is_flat = !cpu.is_paging();
    flat_mode(cpu);
    cpu.update_mode();
    let mut image = Image([0; SIZE]);
    let area = cpu.msr.smbase.wrapping_add(AREA) & 0xffff_ffff;
    let selected = if is_flat { Ok(()) } else { switch(cpu, bus) };
    let read = selected.and_then(|()| bus.read_bytes(cpu, area, &mut image.0, Privilege::System));
    if read.is_ok() && !image.is_consistent() {
        return finish(cpu, bus, saved, Err(x86_cpu::Exception::GP0.into()));
    }
    let restored = read.and_then(|()| {
        image.restore(cpu);
        cpu.events.in_smm = false;
        if !cpu.events.smm_inside_nmi {
            cpu.events.nmi_masked = false;
        }
        cpu.events.smm_inside_nmi = false;
        cpu.update_mode();
        switch(cpu, bus)?;
        if core::mem::take(&mut cpu.smi_controls) != controls(cpu) {
            bus.flush(cpu, Flush::All);
        }
        Ok(())
    });
    let unmasked = saved.events.nmi_masked;
    finish(cpu, bus, saved, restored)?;
    if unmasked && !cpu.events.nmi_masked {
        bus.nmi_unmasked();
    }
    Ok(())
}

/// Switches paging and protection off.
fn flat_mode(cpu: &mut CpuState) {
    cpu.cr0 &= !(cr0::PE | cr0::EM | cr0::TS | cr0::PG);
    cpu.cr4 = 0;
    cpu.efer = 0;
    cpu.rflags &= !rflags::VM;
}

/// Selects the translations of the new state. SMM has translations of its own, so nothing is flushed.
fn switch<B: GuestBus>(cpu: &mut CpuState, bus: &mut B) -> Result<(), Fault> {
    bus.load_root(cpu)?;
    bus.select_view(cpu);
    Ok(())
}

/// Returns the registers that translations depend on: a handler may return to other values than it came from.
fn controls(cpu: &CpuState) -> [u64; 4] {
    [cpu.cr0 & cr0::PG, cpu.cr3, cpu.cr4, cpu.efer]
}

/// Restores everything after a fault: either the VMM must act first, or it is a shutdown (vol. 3, 32.3.1).
fn finish<B: GuestBus>(
    cpu: &mut CpuState,
    bus: &mut B,
    saved: Saved,
    result: Result<(), Fault>,
) -> Result<(), Stop> {
    let Err(fault) = result else {
        return Ok(());
    };
    saved.put_back(cpu);
    // These values were in force before, so a refusal changes nothing.
    let _ = switch(cpu, bus);
    Err(match fault {
        Fault::Exit => Stop::Exit,
        Fault::Exception(_) => Stop::TripleFault,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Interp, RunStop,
        test_bus::{TestBus, at as place, gate, machine},
    };

    fn rsm(cpu: &mut CpuState, bus: &mut TestBus) -> RunStop {
        bus.put(cpu.seg[reg::CS].base + cpu.rip(), &[0x0f, 0xaa]);
        Interp::new().step(cpu, bus)
    }

    #[test]
    fn smi_and_rsm_are_inverse() {
        for long in [false, true] {
            let (mut cpu, mut bus) = machine(long, 3);
            cpu.ldtr = Segment {
                attr: Attr(Attr::UNUSABLE),
                ..Segment::default()
            };
            cpu.events.smi_pending = true;
            let mut before = cpu.clone();
            assert_eq!(enter(&mut cpu, &mut bus), Ok(()));
            assert_eq!((cpu.rip(), cpu.seg[reg::CS].base), (0x8000, 0x30000));
            assert!(!cpu.is_protected() && cpu.events.in_smm && cpu.events.nmi_masked);
            assert_eq!(bus.get32(0x3fefc), REVISION);
            assert_eq!(bus.get64(0x3fff8 - 32), before.gpr[reg::RSP]);
            assert_eq!(rsm(&mut cpu, &mut bus), RunStop::Poll);
            before.events.smi_pending = false;
            assert_eq!(cpu, before);
            assert_eq!(bus.unmasked, 1);
        }
    }

    #[test]
    fn smbase_can_be_relocated() {
        let (mut cpu, mut bus) = machine(true, 0);
        assert_eq!(enter(&mut cpu, &mut bus), Ok(()));
        bus.put(0x3ff00, &0x50000u32.to_le_bytes());
        rsm(&mut cpu, &mut bus);
        assert_eq!(enter(&mut cpu, &mut bus), Ok(()));
        assert_eq!(cpu.seg[reg::CS].base, 0x50000);
    }

    #[test]
    fn bad_state_shuts_down_and_exits_restart() {
        let (mut cpu, mut bus) = machine(true, 0);
        bus.budget = 0;
        let before = cpu.clone();
        assert_eq!(enter(&mut cpu, &mut bus), Err(Stop::Exit));
        assert_eq!(cpu, before);
        bus.budget = usize::MAX;
        assert_eq!(enter(&mut cpu, &mut bus), Ok(()));
        // CR0.PG without PE.
        bus.put(0x3ff58, &0x8000_0000u64.to_le_bytes());
        assert_eq!(rsm(&mut cpu, &mut bus), RunStop::TripleFault);
    }

    #[test]
    fn rsm_is_undefined_outside_smm() {
        let (mut cpu, mut bus) = machine(true, 0);
        gate(&mut bus, true, 6, 14, 0, 0);
        assert_eq!(rsm(&mut cpu, &mut bus), RunStop::Poll);
        assert_eq!(cpu.rip(), place::HANDLER);
    }
}
