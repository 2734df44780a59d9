//! Reading and setting registers: conversions between `CpuState` and KVM's structures.

use kvm_bindings::*;
use x86_cpu::{CpuState, Features};
use x86_defs::{
    control::{cr0, cr4, efer},
    reg, rflags,
    segment::{Attr, DescriptorTable, Segment},
};

use crate::{Error, Result};

/// kvm_sregs2.flags: `pdptrs` holds the PDPTEs.
pub(super) const KVM_SREGS2_FLAGS_PDPTRS_VALID: u64 = 1;

pub(super) fn regs(cpu: &CpuState) -> kvm_regs {
    let g = &cpu.gpr;
    kvm_regs {
        rax: g[0],
        rcx: g[1],
        rdx: g[2],
        rbx: g[3],
        rsp: g[4],
        rbp: g[5],
        rsi: g[6],
        rdi: g[7],
        r8: g[8],
        r9: g[9],
        r10: g[10],
        r11: g[11],
        r12: g[12],
        r13: g[13],
        r14: g[14],
        r15: g[15],
        rip: cpu.rip(),
        rflags: cpu.rflags,
    }
}

pub(super) fn set_regs(cpu: &mut CpuState, r: &kvm_regs) {
    let values = [
        r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12,
        r.r13, r.r14, r.r15,
    ];
    cpu.gpr[..16].copy_from_slice(&values);
    cpu.set_rip(r.rip);
    cpu.rflags = r.rflags & rflags::DEFINED | rflags::FIXED1;
    // KVM drops a pending exception, because the VMM has moved the guest elsewhere.
    cpu.events.exception = None;
}

fn segment(s: &Segment) -> kvm_segment {
    let a = s.attr.0;
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: (a & 0xf) as u8,
        present: (a >> 7 & 1) as u8,
        dpl: (a >> 5 & 3) as u8,
        db: (a >> 14 & 1) as u8,
        s: (a >> 4 & 1) as u8,
        l: (a >> 13 & 1) as u8,
        g: (a >> 15 & 1) as u8,
        avl: (a >> 12 & 1) as u8,
        unusable: (a >> 16 & 1) as u8,
        padding: 0,
    }
}

fn from_segment(s: &kvm_segment) -> Segment {
    let bit = |v: u8, n: u32| u32::from(v & 1) << n;
    let attr = u32::from(s.type_ & 0xf)
        | bit(s.s, 4)
        | u32::from(s.dpl & 3) << 5
        | bit(s.present, 7)
        | bit(s.avl, 12)
        | bit(s.l, 13)
        | bit(s.db, 14)
        | bit(s.g, 15)
        | bit(s.unusable, 16);
    Segment {
        base: s.base,
        limit: s.limit,
        attr: Attr(attr),
        selector: s.selector,
    }
}

const fn table(t: &DescriptorTable) -> kvm_dtable {
    kvm_dtable {
        base: t.base,
        limit: t.limit,
        padding: [0; 3],
    }
}

/// Returns the special registers that both KVM_GET_SREGS and KVM_GET_SREGS2 show; `cr8` and `apic_base` come from the
/// LAPIC.
pub(super) fn sregs(cpu: &CpuState, cr8: u64, apic_base: u64) -> kvm_sregs {
    let s = &cpu.seg;
    let mut r = kvm_sregs {
        cs: segment(&s[reg::CS]),
        ds: segment(&s[reg::DS]),
        es: segment(&s[reg::ES]),
        fs: segment(&s[reg::FS]),
        gs: segment(&s[reg::GS]),
        ss: segment(&s[reg::SS]),
        tr: segment(&cpu.tr),
        ldt: segment(&cpu.ldtr),
        gdt: table(&cpu.gdtr),
        idt: table(&cpu.idtr),
        cr0: cpu.cr0,
        cr2: cpu.cr2,
        cr3: cpu.cr3,
        cr4: cpu.cr4,
        cr8,
        efer: cpu.efer,
        apic_base,
        interrupt_bitmap: [0; 4],
    };
    if let Some(i) = cpu.events.interrupt.filter(|i| !i.soft)
        && let Some(word) = r.interrupt_bitmap.get_mut(usize::from(i.vector >> 6))
    {
        *word |= 1 << (i.vector & 63);
    }
    r
}

/// Builds the structure from its `own` members and the members that it has in common with the `other` structure.
macro_rules! sregs_of {
    ($name:ident, $other:expr, $($own:ident: $value:expr),*) => {
        sregs_of!(@ $name, $other, $($own: $value),*;
            cs ds es fs gs ss tr ldt gdt idt cr0 cr2 cr3 cr4 cr8 efer apic_base)
    };
    (@ $name:ident, $other:expr, $($own:ident: $value:expr),*; $($same:ident)*) => {
        $name { $($same: $other.$same,)* $($own: $value),* }
    };
}

/// KVM_GET_SREGS2: the registers of KVM_GET_SREGS, and the PDPTEs if they are in use.
pub(super) fn sregs2(s: &kvm_sregs, pdptrs: Option<[u64; 4]>) -> kvm_sregs2 {
    let flags = pdptrs.map_or(0, |_| KVM_SREGS2_FLAGS_PDPTRS_VALID);
    sregs_of!(kvm_sregs2, s, flags: flags, pdptrs: pdptrs.unwrap_or_default())
}

/// Returns the part of KVM_SET_SREGS2 that KVM_SET_SREGS has, too.
pub(super) fn from_sregs2(s: &kvm_sregs2) -> kvm_sregs {
    sregs_of!(kvm_sregs, s, interrupt_bitmap: [0; 4])
}

/// Makes KVM's checks of the values (kvm_is_valid_sregs); EINVAL if one fails.
pub(super) fn check_sregs(features: &Features, r: &kvm_sregs) -> Result<()> {
    let long = r.efer & efer::LME != 0 && r.cr0 & cr0::PG != 0;
    if long {
        // Paging in long mode needs PAE, and LMA must be set.
        if r.cr4 & cr4::PAE == 0 || r.efer & efer::LMA == 0 {
            return Err(Error::InvalidArgument);
        }
        let reserved = !0u64 << features.maxphyaddr.min(52);
        if r.cr3 & reserved != 0 {
            return Err(Error::InvalidArgument);
        }
    } else if r.efer & efer::LMA != 0 || r.cs.l != 0 {
        // Outside of long mode there is neither LMA nor a 64-bit CS.
        return Err(Error::InvalidArgument);
    }
    let valid_efer = x86_cpu::msr_model::efer_valid_bits(features);
    if r.cr4 & !x86_interp::cr4_valid_bits(features) != 0 || r.efer & !valid_efer != 0 {
        return Err(Error::InvalidArgument);
    }
    if r.cr0 & !0xffff_ffff != 0
        || r.cr0 & cr0::NW != 0 && r.cr0 & cr0::CD == 0
        || r.cr0 & cr0::PG != 0 && r.cr0 & cr0::PE == 0
    {
        return Err(Error::InvalidArgument);
    }
    Ok(())
}

/// Stores the special registers after [`check_sregs`]. The caller reloads the MMU's root and writes CR8 and APIC_BASE.
pub(super) fn set_sregs(cpu: &mut CpuState, r: &kvm_sregs) {
    cpu.seg = [
        from_segment(&r.es),
        from_segment(&r.cs),
        from_segment(&r.ss),
        from_segment(&r.ds),
        from_segment(&r.fs),
        from_segment(&r.gs),
    ];
    cpu.tr = from_segment(&r.tr);
    cpu.ldtr = from_segment(&r.ldt);
    cpu.gdtr = DescriptorTable {
        base: r.gdt.base,
        limit: r.gdt.limit,
    };
    cpu.idtr = DescriptorTable {
        base: r.idt.base,
        limit: r.idt.limit,
    };
    cpu.cr0 = r.cr0 | cr0::ET;
    cpu.cr2 = r.cr2;
    cpu.cr3 = r.cr3;
    cpu.cr4 = r.cr4;
    cpu.efer = r.efer;
    update_privilege(cpu);
}

/// Derives CPL and code size from SS.DPL, CR0.PE, RFLAGS.VM and CS.
pub(super) fn update_privilege(cpu: &mut CpuState) {
    cpu.cpl = if !cpu.is_protected() {
        0
    } else if cpu.is_v86() {
        3
    } else {
        cpu.seg[reg::SS].attr.dpl()
    };
    cpu.update_mode();
}

pub(super) fn debugregs(cpu: &CpuState) -> kvm_debugregs {
    kvm_debugregs {
        db: cpu.dr,
        dr6: cpu.dr6,
        dr7: cpu.dr7,
        ..Default::default()
    }
}

pub(super) fn set_debugregs(cpu: &mut CpuState, r: &kvm_debugregs) -> Result<()> {
    if r.flags != 0 || r.dr6 >> 32 != 0 || r.dr7 >> 32 != 0 {
        return Err(Error::InvalidArgument);
    }
    cpu.dr = r.db;
    // Bits that are always set are not added, as KVM does not: a VMM reads what it has set.
    (cpu.dr6, cpu.dr7) = (r.dr6, r.dr7);
    Ok(())
}
