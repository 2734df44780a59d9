//! KVM_CAP_DISABLE_QUIRKS2 (KVM API document, 7.31): what each quirk is, and its absence.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod host_cpu;
mod long_mode;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use guest::{Guest, RAM, Ram, add_slot};
use host_cpu::is_amd;
use kvm_bindings::*;
use long_mode::Machine;

fn disable(vm: &VmFd, cap: u32, quirks: u32) -> Result<(), i32> {
    let cap = kvm_enable_cap {
        cap,
        args: [quirks.into(), 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap).map_err(|e| e.errno())
}

/// What the handler of #UD at 0x1800 does: out 0x81, al.
fn with_ud_handler(g: &Guest) -> Ram {
    let ivt = Ram::new(0x1000);
    ivt.write(6 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(&g.vm, 1, 0, &ivt, 0);
    g.ram.write(0x800, &[0xe6, 0x81]);
    ivt
}

fn port(exit: VcpuExit<'_>) -> u16 {
    match exit {
        VcpuExit::IoOut(port, _) => port,
        exit => panic!("{exit:?}"),
    }
}

/// IA32_PERF_CAPABILITIES, IA32_ARCH_CAPABILITIES, MSR_PLATFORM_INFO, IA32_BIOS_SIGN_ID.
const FEATURES: [u32; 4] = [0x345, 0x10a, 0xce, 0x8b];

#[test]
fn without_the_quirk_msrs_of_features_begin_as_zero() {
    let quirk = KVM_X86_QUIRK_STUFF_FEATURE_MSRS;
    let all = |quirks| {
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        disable(&vm, KVM_CAP_DISABLE_QUIRKS2, quirks).unwrap();
        let entries = FEATURES.map(|index| kvm_msr_entry {
            index,
            ..Default::default()
        });
        let mut msrs = Msrs::from_entries(&entries).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), FEATURES.len());
        [0, 1, 2, 3].map(|n| msrs.as_slice()[n].data)
    };
    let stuffed = all(0);
    assert!(stuffed[2] != 0, "{stuffed:x?}");
    let microcode = if is_amd() { 0x0100_0065 } else { 0x1_0000_0000 };
    assert_eq!(stuffed[3], microcode);
    assert_eq!(all(quirk), [0; 4]);
}

#[test]
fn all_of_linux_6_14_and_no_other() {
    let g = Guest::new(&[0xf4], true);
    assert_eq!(g.vm.check_extension_raw(KVM_CAP_DISABLE_QUIRKS.into()), 1);
    assert_eq!(
        g.vm.check_extension_raw(KVM_CAP_DISABLE_QUIRKS2.into()),
        0x1ff
    );
    for (cap, quirks, result) in [
        (KVM_CAP_DISABLE_QUIRKS2, 0x1ff, Ok(())),
        (KVM_CAP_DISABLE_QUIRKS2, 0x200, Err(libc::EINVAL)),
        // The older one never refused any.
        (KVM_CAP_DISABLE_QUIRKS, 0x200, Ok(())),
        (KVM_CAP_DISABLE_QUIRKS2, 0, Ok(())),
    ] {
        assert_eq!(disable(&g.vm, cap, quirks), result, "{cap} {quirks:#x}");
    }
}

#[test]
fn mwait_without_its_cpuid_bit() {
    // monitor; mwait; out 0x80, al
    let code = [0x0f, 0x01, 0xc8, 0x0f, 0x01, 0xc9, 0xe6, 0x80];
    for (quirks, mwait_in_cpuid, want) in [
        (0, false, 0x80),
        (KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS, false, 0x81),
        (KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS, true, 0x80),
    ] {
        let mut g = Guest::new(&code, false);
        let _ivt = with_ud_handler(&g);
        let mut cpuid = Kvm::new()
            .unwrap()
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .unwrap();
        for e in cpuid.as_mut_slice().iter_mut().filter(|e| e.function == 1) {
            e.ecx = e.ecx & !(1 << 3) | u32::from(mwait_in_cpuid) << 3;
        }
        g.vcpu.set_cpuid2(&cpuid).unwrap();
        disable(&g.vm, KVM_CAP_DISABLE_QUIRKS2, quirks).unwrap();
        let what = (quirks, mwait_in_cpuid);
        assert_eq!(port(g.vcpu.run().unwrap()), want, "{what:?}");
        // It is asked each time, not once.
        disable(&g.vm, KVM_CAP_DISABLE_QUIRKS2, 0).unwrap();
        let mut regs = g.vcpu.get_regs().unwrap();
        regs.rip = RAM;
        g.vcpu.set_regs(&regs).unwrap();
        assert_eq!(port(g.vcpu.run().unwrap()), 0x80, "{what:?}");
    }
}

#[test]
fn mwait_follows_misc_enable() {
    // mov ecx, 0x1a0; mov eax, 0x41801; xor edx, edx; wrmsr; mov eax, 1; cpuid; mov eax, ecx;
    // mov dx, 0x80; out dx, eax
    let code = [
        0x66, 0xb9, 0xa0, 0x01, 0, 0, 0x66, 0xb8, 0x01, 0x18, 0x04, 0, 0x66, 0x31, 0xd2, 0x0f,
        0x30, //
        0x66, 0xb8, 1, 0, 0, 0, 0x0f, 0xa2, 0x66, 0x89, 0xc8, 0xba, 0x80, 0, 0x66, 0xef,
    ];
    for follows in [false, true] {
        let mut g = Guest::new(&code, false);
        let mut cpuid = Kvm::new()
            .unwrap()
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .unwrap();
        for e in cpuid.as_mut_slice().iter_mut().filter(|e| e.function == 1) {
            e.ecx &= !(1 << 3);
        }
        if follows {
            let quirk = KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT;
            disable(&g.vm, KVM_CAP_DISABLE_QUIRKS2, quirk).unwrap();
        }
        g.vcpu.set_cpuid2(&cpuid).unwrap();
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x80, data) => {
                let ecx = u32::from_le_bytes(data.try_into().unwrap());
                assert_eq!(ecx >> 3 & 1 != 0, follows);
            }
            exit => panic!("{exit:?}"),
        }
    }
}

#[test]
fn rip_at_the_exit_for_port_7e() {
    // out 0x7e, al; out 0x7f, al; out 0x80, al
    let code = [0xe6, 0x7e, 0xe6, 0x7f, 0xe6, 0x80];
    for (quirks, at_7e) in [(0, RAM + 2), (KVM_X86_QUIRK_OUT_7E_INC_RIP, RAM)] {
        let mut g = Guest::new(&code, false);
        disable(&g.vm, KVM_CAP_DISABLE_QUIRKS2, quirks).unwrap();
        for (want, rip) in [(0x7e, at_7e), (0x7f, RAM + 2), (0x80, RAM + 4)] {
            assert_eq!(port(g.vcpu.run().unwrap()), want, "each exits once");
            assert_eq!(g.vcpu.get_regs().unwrap().rip, rip, "{want:#x}");
        }
    }
}

#[test]
fn a_lapic_that_is_off_answers_or_not() {
    // mov eax, [0xfee00030]; mov [0xfee00080], eax; out 0x80, al
    for (quirks, goes_out) in [(0, false), (KVM_X86_QUIRK_LAPIC_MMIO_HOLE, true)] {
        let m = Machine::new();
        m.vm.create_irq_chip().unwrap();
        disable(&m.vm, KVM_CAP_DISABLE_QUIRKS2, quirks).unwrap();
        m.load(0x1000, |a| {
            use iced_x86::code_asm::*;
            a.mov(rbx, 0xfee0_0030u64)?;
            a.mov(eax, dword_ptr(rbx))?;
            a.mov(dword_ptr(rbx + 0x50), eax)?;
            a.out(0x80, eax)
        });
        // The LAPIC's page has to be mapped: 0xfee00000 by a large page of its own.
        m.map_large(0xfee0_0000);
        let mut vcpu = m.vcpu(0, 0x1000);
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.apic_base &= !(1 << 11);
        vcpu.set_sregs(&sregs).unwrap();
        if goes_out {
            match vcpu.run().unwrap() {
                VcpuExit::MmioRead(0xfee0_0030, data) => data.copy_from_slice(&[1, 2, 3, 4]),
                exit => panic!("{exit:?}"),
            }
            match vcpu.run().unwrap() {
                VcpuExit::MmioWrite(0xfee0_0080, data) => assert_eq!(data, [1, 2, 3, 4]),
                exit => panic!("{exit:?}"),
            }
        }
        match vcpu.run().unwrap() {
            VcpuExit::IoOut(0x80, data) if goes_out => assert_eq!(data, [1, 2, 3, 4]),
            VcpuExit::IoOut(0x80, data) => assert_eq!(data, [0xff; 4]),
            exit => panic!("{exit:?}"),
        }
    }
}

#[test]
fn lint0_of_the_boot_processor() {
    const LVT0: usize = 0x350;
    for (quirks, extint) in [(0, true), (KVM_X86_QUIRK_LINT0_REENABLED, false)] {
        let (vm, _ram) = guest::vm(&[0xf4], true, 0);
        disable(&vm, KVM_CAP_DISABLE_QUIRKS2, quirks).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let lapic = vcpu.get_lapic().unwrap();
        let lint0 = [0, 1, 2, 3].map(|i| lapic.regs[LVT0 + i] as u8);
        let want = if extint { 0x700u32 } else { 0x1_0000 };
        assert_eq!(u32::from_le_bytes(lint0), want);
    }
}

const VMCALL: [u8; 3] = [0x0f, 0x01, 0xc1];
const VMMCALL: [u8; 3] = [0x0f, 0x01, 0xd9];

/// The hypercall instruction of this processor's vendor.
fn native_hypercall() -> [u8; 3] {
    let cpuid = Kvm::new()
        .unwrap()
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap();
    let vendor = cpuid.as_slice().iter().find(|e| e.function == 0).unwrap();
    if vendor.ebx == u32::from_le_bytes(*b"Genu") {
        VMCALL
    } else {
        VMMCALL
    }
}

/// A vCPU at `code`, which is followed by `out 0x80, al`, with a number that is no hypercall's: -KVM_ENOSYS.
/// Without IDT #UD ends the guest.
fn caller(m: &Machine, code: &[u8]) -> VcpuFd {
    m.write(0x1000, &[code, &[0xe6, 0x80]].concat());
    let vcpu = m.vcpu(0, 0x1000);
    let mut regs = vcpu.get_regs().unwrap();
    regs.rax = 999;
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

#[test]
fn vmgexit_is_vmmcall_without_encryption() {
    for prefix in [0xf2, 0xf3] {
        let m = Machine::new();
        let mut vcpu = caller(&m, &[&[prefix], &VMMCALL[..]].concat());
        let exit = vcpu.run().unwrap();
        if native_hypercall() == VMMCALL {
            assert_eq!(port(exit), 0x80);
            assert_eq!(vcpu.get_regs().unwrap().rax, 1000u64.wrapping_neg());
        } else {
            assert!(matches!(exit, VcpuExit::Shutdown), "{exit:?}");
        }
    }
}

#[test]
fn the_other_vendors_hypercall() {
    let native = native_hypercall();
    for quirks in [0, KVM_X86_QUIRK_FIX_HYPERCALL_INSN] {
        for insn in [VMCALL, VMMCALL] {
            let m = Machine::new();
            disable(&m.vm, KVM_CAP_DISABLE_QUIRKS2, quirks).unwrap();
            let mut vcpu = caller(&m, &insn);
            let exit = vcpu.run().unwrap();
            if quirks == 0 || insn == native {
                assert_eq!(port(exit), 0x80);
                assert_eq!(vcpu.get_regs().unwrap().rax, 1000u64.wrapping_neg());
                assert_eq!(m.read::<3>(0x1000), native, "replaced where it was");
            } else {
                assert!(matches!(exit, VcpuExit::Shutdown), "{exit:?}");
            }
        }
    }
}
