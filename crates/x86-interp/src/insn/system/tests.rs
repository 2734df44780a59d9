//! System instructions through the decoder, one at a time.

use x86_cpu::{CodeSize, CpuState, Feature, Flush, Shadow};
use x86_defs::{
    control::{cr0, cr4, efer},
    msr, reg, rflags, vector,
};

use crate::{
    Interp, RunStop,
    test_bus::{TestBus, at, gate, machine, memory, sel},
};

/// Executes one instruction at [`at::CODE`].
fn exec(cpu: &mut CpuState, bus: &mut TestBus, code: &[u8]) -> RunStop {
    bus.put(cpu.seg[reg::CS].base + cpu.rip(), code);
    Interp::new().step(cpu, bus)
}

/// Makes gates for all exceptions, each with its own target.
fn catch_all(bus: &mut TestBus, long: bool) {
    for v in 0..32 {
        gate(bus, long, v, 14, 0, 0);
        let entry = at::IDT + u64::from(v) * if long { 16 } else { 8 };
        bus.put(entry, &(at::HANDLER as u16 + u16::from(v)).to_le_bytes());
    }
}

/// Returns the vector that was delivered, if one was.
fn delivered(cpu: &CpuState) -> Option<u8> {
    let n = cpu.rip().wrapping_sub(at::HANDLER);
    (n < 32).then_some(n as u8)
}

#[test]
fn from_reset_to_long_mode() {
    let mut bus = memory();
    let mut cpu = CpuState::default();
    for f in [Feature::Pae, Feature::Lm, Feature::Msr, Feature::Syscall] {
        cpu.features.set(f, true);
    }
    let (_, mut template) = machine(true, 0);
    bus.memory(0).copy_from_slice(template.memory(0));
    cpu.seg[reg::CS].base = 0;
    cpu.seg[reg::CS].selector = 0;
    cpu.set_rip(at::CODE);
    bus.put(0x700, &[0xff, 0, 0, 0x20, 0, 0]);
    assert_eq!(
        exec(&mut cpu, &mut bus, &[0x0f, 0x01, 0x16, 0x00, 0x07]),
        RunStop::Poll
    );
    assert_eq!((cpu.gdtr.base, cpu.gdtr.limit), (at::GDT, 0xff));
    cpu.gpr[reg::RAX] = cr0::PE;
    exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xc0]);
    assert!(cpu.is_protected());
    exec(
        &mut cpu,
        &mut bus,
        &[0x66, 0xea, 0x00, 0x11, 0, 0, sel::CODE32 as u8, 0],
    );
    assert_eq!((cpu.code_size, cpu.rip()), (CodeSize::Bits32, 0x1100));
    cpu.gpr[reg::RAX] = u64::from(sel::DATA0);
    exec(&mut cpu, &mut bus, &[0x8e, 0xd0]);
    assert_eq!(
        (cpu.shadow, cpu.seg[reg::SS].limit),
        (Shadow::MovSs, u32::MAX)
    );
    cpu.gpr[reg::RAX] = cr4::PAE;
    exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xe0]);
    cpu.gpr[reg::RAX] = 0x4000;
    exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xd8]);
    cpu.gpr[reg::RCX] = u64::from(msr::IA32_EFER);
    cpu.gpr[reg::RAX] = efer::LME;
    cpu.gpr[reg::RDX] = 0;
    exec(&mut cpu, &mut bus, &[0x0f, 0x30]);
    cpu.gpr[reg::RAX] = cr0::PE | cr0::PG;
    exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xc0]);
    assert!(cpu.is_long_mode());
    assert_eq!(cpu.code_size, CodeSize::Bits32);
    exec(
        &mut cpu,
        &mut bus,
        &[0xea, 0x00, 0x12, 0, 0, sel::CODE0 as u8, 0],
    );
    assert_eq!((cpu.code_size, cpu.rip()), (CodeSize::Bits64, 0x1200));
    // By CR4.PAE and by CR0.PG: MOV to CR3 loads nothing before paging is enabled.
    assert_eq!(bus.roots, 2);
    cpu.gpr[reg::RAX] = u64::from(sel::TSS);
    exec(&mut cpu, &mut bus, &[0x0f, 0x00, 0xd8]);
    assert_eq!((cpu.tr.base, cpu.tr.attr.kind()), (at::TSS, 11));
    assert_eq!(
        bus.memory(0)[at::GDT as usize + usize::from(sel::TSS) + 5] & 0xf,
        11
    );
}

#[test]
fn control_register_checks() {
    // (CR, value, accepted) in 64-bit mode at CPL 0.
    let on = cr0::PE | cr0::PG | cr0::ET;
    for (n, value, good) in [
        (0u8, on | cr0::WP, true),
        (0, on | cr0::NW, false),
        (0, cr0::PE, false),
        (0, cr0::PG, false),
        (0, on | 1 << 32, false),
        (3, 0x5000, true),
        (3, 1 << 36, false),
        (3, 1 << 63, false),
        (4, cr4::PAE | cr4::PGE, true),
        (4, cr4::PGE, false),
        (4, cr4::PAE | cr4::SMEP, false),
        (4, cr4::PAE | cr4::PCIDE, true),
        (4, cr4::PAE | 1 << 40, false),
    ] {
        let (mut cpu, mut bus) = machine(true, 0);
        catch_all(&mut bus, true);
        for f in [Feature::Pae, Feature::Pge, Feature::Pcid] {
            cpu.features.set(f, true);
        }
        cpu.gpr[reg::RAX] = value;
        let old = [cpu.cr0, 0, 0, cpu.cr3, cpu.cr4];
        exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xc0 | n << 3]);
        let new = [cpu.cr0, 0, 0, cpu.cr3, cpu.cr4];
        assert_eq!(
            delivered(&cpu),
            (!good).then_some(vector::GP),
            "cr{n} {value:#x}"
        );
        assert_eq!(
            new[usize::from(n)],
            if good { value } else { old[usize::from(n)] }
        );
    }
}

#[test]
fn cr3_flushes_as_the_manual_says() {
    let (mut cpu, mut bus) = machine(true, 0);
    cpu.cr4 |= cr4::PCIDE;
    cpu.gpr[reg::RAX] = 0x5007;
    exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xd8]);
    assert_eq!(
        (cpu.cr3, bus.flushes.as_slice()),
        (0x5007, &[Flush::Pcid(7)][..])
    );
    cpu.gpr[reg::RAX] = 0x6008 | 1 << 63;
    exec(&mut cpu, &mut bus, &[0x0f, 0x22, 0xd8]);
    assert_eq!((cpu.cr3, bus.flushes.len(), bus.roots), (0x6008, 1, 2));
}

#[test]
fn privileged_at_cpl3() {
    // hlt, mov cr0, clts, lgdt, ltr, rdmsr, wrmsr, invlpg, wbinvd, cli, in, out
    for code in [
        &[0xf4][..],
        &[0x0f, 0x22, 0xc0],
        &[0x0f, 0x20, 0xc0],
        &[0x0f, 0x23, 0xc0],
        &[0x0f, 0x06],
        &[0x0f, 0x01, 0x10],
        &[0x0f, 0x00, 0xd8],
        &[0x0f, 0x32],
        &[0x0f, 0x30],
        &[0x0f, 0x01, 0x38],
        &[0x0f, 0x09],
        &[0x0f, 0x01, 0xf8],
        &[0x0f, 0x07],
        &[0xfa],
        &[0xfb],
        &[0xe4, 0x60],
        &[0x6e],
    ] {
        let (mut cpu, mut bus) = machine(true, 3);
        catch_all(&mut bus, true);
        for f in [Feature::Msr, Feature::Syscall] {
            cpu.features.set(f, true);
        }
        cpu.efer |= efer::SCE;
        // The bitmap is past the TSS's limit: no port is allowed.
        bus.put(at::TSS + 0x66, &[0xff, 0xff]);
        exec(&mut cpu, &mut bus, code);
        assert_eq!(delivered(&cpu), Some(vector::GP), "{code:x?}");
    }
}

#[test]
fn port_bitmap_and_string_io() {
    let (mut cpu, mut bus) = machine(true, 3);
    catch_all(&mut bus, true);
    bus.put(at::TSS + 0x66, &[0x68, 0]);
    bus.memory(0)[at::TSS as usize + 0x68 + 0x60 / 8] = 0b10;
    exec(&mut cpu, &mut bus, &[0xe4, 0x60]);
    assert_eq!((delivered(&cpu), cpu.gpr[reg::RAX]), (None, 0x78));
    exec(&mut cpu, &mut bus, &[0xe5, 0x60]);
    assert_eq!(delivered(&cpu), Some(vector::GP));

    let (mut cpu, mut bus) = machine(true, 0);
    cpu.gpr[reg::RCX] = 2;
    cpu.gpr[reg::RDX] = 0x3f8;
    cpu.gpr[reg::RSI] = 0xb000;
    bus.put(0xb000, b"ok");
    for _ in 0..2 {
        exec(&mut cpu, &mut bus, &[0xf3, 0x6e]);
    }
    assert_eq!(bus.out, [(0x3f8, 1, 0x6f), (0x3f8, 1, 0x6b)]);
    assert_eq!((cpu.gpr[reg::RCX], cpu.gpr[reg::RSI]), (0, 0xb002));
    assert_eq!(cpu.rip(), at::CODE + 2);
}

#[test]
fn syscall_and_back() {
    let (mut cpu, mut bus) = machine(true, 3);
    cpu.features.set(Feature::Syscall, true);
    cpu.efer |= efer::SCE;
    cpu.msr.star = 0x0013_0008 << 32;
    cpu.msr.lstar = at::HANDLER;
    cpu.msr.fmask = rflags::IF;
    let before = cpu.clone();
    exec(&mut cpu, &mut bus, &[0x0f, 0x05]);
    assert_eq!(
        (cpu.cpl, cpu.rip(), cpu.gpr[reg::RCX]),
        (0, at::HANDLER, at::CODE + 2)
    );
    assert_eq!(
        (cpu.gpr[reg::R11], cpu.rflags & rflags::IF),
        (before.rflags, 0)
    );
    assert_eq!(
        (cpu.seg[reg::CS].selector, cpu.seg[reg::SS].selector),
        (8, 16)
    );
    exec(&mut cpu, &mut bus, &[0x48, 0x0f, 0x07]);
    assert_eq!(
        (cpu.cpl, cpu.rip(), cpu.rflags),
        (3, at::CODE + 2, before.rflags)
    );
    assert_eq!(
        (cpu.seg[reg::CS].selector, cpu.seg[reg::SS].selector),
        (0x23, 0x1b)
    );
    // With SCE clear the instruction is undefined.
    catch_all(&mut bus, true);
    cpu.efer &= !efer::SCE;
    exec(&mut cpu, &mut bus, &[0x0f, 0x05]);
    assert_eq!(delivered(&cpu), Some(vector::UD));
}

#[test]
fn call_gate_copies_parameters() {
    let (mut cpu, mut bus) = machine(false, 3);
    // A gate of DPL 3 with two parameters to CODE0.
    let d = at::HANDLER | u64::from(sel::CODE0) << 16 | 2 << 32 | 0xec << 40;
    bus.put64(at::GDT + u64::from(sel::GATE & !7), d);
    bus.put64(at::STACK, 0x2222_0000_1111);
    exec(&mut cpu, &mut bus, &[0x9a, 0, 0, 0, 0, sel::GATE as u8, 0]);
    assert_eq!((cpu.cpl, cpu.rip()), (0, at::HANDLER));
    let sp = cpu.gpr[reg::RSP];
    assert_eq!(sp, at::STACK0 - 24);
    assert_eq!(bus.get32(sp), at::CODE as u32 + 7);
    assert_eq!((bus.get32(sp + 8), bus.get32(sp + 12)), (0x1111, 0x2222));
    assert_eq!(bus.get32(sp + 16), at::STACK as u32);
    exec(&mut cpu, &mut bus, &[0xca, 8, 0]);
    assert_eq!(
        (cpu.cpl, cpu.rip(), cpu.gpr[reg::RSP]),
        (3, at::CODE + 7, at::STACK + 8)
    );
}

#[test]
fn task_switch_there_and_back() {
    let (mut cpu, mut bus) = machine(false, 0);
    cpu.gpr[reg::RBX] = 0xb0b;
    let t = at::TSS2;
    for (offset, v) in [
        (0x20, at::HANDLER as u32),
        (0x24, 2),
        (0x34, 0xcafe),
        (0x38, at::IST1 as u32),
        (0x48, u32::from(sel::DATA0)),
        (0x4c, u32::from(sel::CODE0)),
        (0x50, u32::from(sel::DATA0)),
    ] {
        bus.put(t + offset, &v.to_le_bytes());
    }
    bus.memory(0)[at::GDT as usize + usize::from(sel::TSS) + 5] |= 2;
    exec(&mut cpu, &mut bus, &[0x9a, 0, 0, 0, 0, sel::TSS2 as u8, 0]);
    assert_eq!(
        (cpu.rip(), cpu.gpr[reg::RBX], cpu.gpr[reg::RSP]),
        (at::HANDLER, 0xcafe, at::IST1)
    );
    assert_eq!((cpu.tr.selector, bus.get16(t)), (sel::TSS2, sel::TSS));
    assert_ne!(cpu.rflags & rflags::NT, 0);
    assert_ne!(cpu.cr0 & cr0::TS, 0);
    exec(&mut cpu, &mut bus, &[0xcf]);
    assert_eq!((cpu.rip(), cpu.gpr[reg::RBX]), (at::CODE + 7, 0xb0b));
    assert_eq!((cpu.tr.selector, cpu.rflags & rflags::NT), (sel::TSS, 0));
    assert_eq!(
        bus.memory(0)[at::GDT as usize + usize::from(sel::TSS2) + 5] & 2,
        0
    );
}

#[test]
fn debug_register_rules() {
    let (mut cpu, mut bus) = machine(true, 0);
    catch_all(&mut bus, true);
    cpu.gpr[reg::RAX] = u64::from(u32::MAX);
    exec(&mut cpu, &mut bus, &[0x0f, 0x23, 0xf0]);
    assert_eq!(cpu.dr6, 0xffff_efff & 0xe00f | 0xffff_0ff0);
    cpu.gpr[reg::RAX] = 1 << 13;
    exec(&mut cpu, &mut bus, &[0x0f, 0x23, 0xf8]);
    exec(&mut cpu, &mut bus, &[0x0f, 0x21, 0xf0]);
    assert_eq!(delivered(&cpu), Some(vector::DB));
    assert_ne!(cpu.dr6 & 1 << 13, 0);
    assert_eq!(cpu.dr7 & 1 << 13, 0);
    // DR4 is DR6 unless CR4.DE.
    cpu.set_rip(at::CODE);
    cpu.cr4 |= cr4::DE;
    exec(&mut cpu, &mut bus, &[0x0f, 0x21, 0xe0]);
    assert_eq!(delivered(&cpu), Some(vector::UD));
}

#[test]
fn lar_lsl_verr_verw() {
    let (mut cpu, mut bus) = machine(true, 3);
    for (selector, readable, writable) in [
        (sel::DATA3, true, true),
        (sel::CODE3, true, false),
        (sel::DATA0, false, false),
        (0, false, false),
        (0x1f8, false, false),
    ] {
        cpu.set_rip(at::CODE);
        cpu.gpr[reg::RAX] = u64::from(selector);
        for (code, want) in [
            (&[0x0f, 0x00, 0xe0][..], readable),
            (&[0x0f, 0x00, 0xe8], writable),
            (&[0x0f, 0x02, 0xd8], readable),
            (&[0x0f, 0x03, 0xd8], readable),
        ] {
            exec(&mut cpu, &mut bus, code);
            assert_eq!(
                cpu.rflags & rflags::ZF != 0,
                want,
                "{selector:#x} {code:x?}"
            );
        }
        if readable {
            assert_eq!(cpu.gpr[reg::RBX], u64::from(u32::MAX));
        }
    }
}

#[test]
fn an_exit_restarts_any_instruction() {
    // int 0x40, iretq, retfq, far call, mov ss, lgdt, ltr, pop fs, ins
    let codes: &[&[u8]] = &[
        &[0xcd, 0x40],
        &[0x48, 0xcf],
        &[0x48, 0xcb],
        &[0xff, 0x18],
        &[0x8e, 0xd1],
        &[0x0f, 0x01, 0x10],
        &[0x0f, 0x00, 0xda],
        &[0x0f, 0xa1],
        &[0x6c],
        &[0xe4, 0x60],
    ];
    for code in codes {
        for budget in 0.. {
            let (mut cpu, mut bus) = machine(true, 0);
            gate(&mut bus, true, 0x40, 14, 0, 0);
            for (i, v) in [0x1900, 8, 0x202, 0x9000, 0x10].into_iter().enumerate() {
                bus.put64(at::STACK + 8 * i as u64, v);
            }
            if *code == [0x0f, 0xa1] {
                bus.put64(at::STACK, u64::from(sel::DATA0));
            }
            bus.put64(0xb000, 0x0008_0000_1900);
            cpu.gpr[reg::RAX] = 0xb000;
            cpu.gpr[reg::RCX] = u64::from(sel::DATA0);
            cpu.gpr[reg::RDX] = u64::from(sel::TSS);
            cpu.gpr[reg::RDI] = 0xc000;
            bus.budget = budget;
            let before = cpu.clone();
            match exec(&mut cpu, &mut bus, code) {
                RunStop::Poll => {
                    assert_ne!(cpu, before, "{code:x?}");
                    break;
                }
                stop => assert_eq!(stop, RunStop::Exit, "{code:x?}"),
            }
            assert_eq!(cpu, before, "{code:x?} budget {budget}");
        }
    }
}

/// SDM vol. 3, "CPUID faulting".
#[test]
fn cpuid_faults_outside_of_ring_0_if_told_to() {
    for (cpl, faults, want) in [
        (3, false, None),
        (3, true, Some(vector::GP)),
        (0, true, None),
    ] {
        let (mut cpu, mut bus) = machine(true, cpl);
        catch_all(&mut bus, true);
        cpu.msr.misc_features = faults.into();
        exec(&mut cpu, &mut bus, &[0x0f, 0xa2]);
        assert_eq!(delivered(&cpu), want, "{cpl} {faults}");
    }
}

/// SDM vol. 3, table 6-7: the x87 environment, and the state that begins with it, are aligned like their words.
#[test]
fn alignment_of_x87_states_and_vectors() {
    let forms: [(&[u8], u64); 8] = [
        (&[0xd9, 0x33], 4),       // fnstenv [rbx]
        (&[0xd9, 0x23], 4),       // fldenv [rbx]
        (&[0xdd, 0x33], 4),       // fnsave [rbx]
        (&[0xdd, 0x23], 4),       // frstor [rbx]
        (&[0x66, 0xd9, 0x33], 2), // fnstenv with 14 bytes
        (&[0x66, 0xdd, 0x33], 2), // fnsave with 94 bytes
        (&[0xd9, 0x3b], 2),       // fnstcw [rbx]
        (&[0xdb, 0x2b], 8),       // fld tbyte [rbx]
    ];
    let delivered_at = |code: &[u8], offset: u64, is_amd: bool| {
        let (mut cpu, mut bus) = machine(true, 3);
        catch_all(&mut bus, true);
        cpu.features.set(Feature::Fpu, true);
        cpu.features.set(Feature::Sse, true);
        cpu.features.set(Feature::Amd, is_amd);
        cpu.cr0 |= cr0::AM;
        cpu.cr4 |= cr4::OSFXSR;
        cpu.rflags |= rflags::AC;
        cpu.gpr[reg::RBX] = 0x4_0000 + offset;
        exec(&mut cpu, &mut bus, code);
        delivered(&cpu)
    };
    for is_amd in [true, false] {
        for (code, alignment) in forms {
            for offset in 1..=8 {
                let wanted = (offset % alignment != 0).then_some(vector::AC);
                let got = delivered_at(code, offset, is_amd);
                assert_eq!(got, wanted, "{code:x?} at {offset}");
            }
        }
        // movups xmm0, [rbx]
        let got = delivered_at(&[0x0f, 0x10, 0x03], 1, is_amd);
        assert_eq!(got, is_amd.then_some(vector::AC));
    }
}
