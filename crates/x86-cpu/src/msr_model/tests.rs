//! One row per rule.

use super::*;

fn cpu(features: &[Feature]) -> CpuState {
    let mut cpu = CpuState::default();
    for f in features {
        cpu.features.set(*f, true);
    }
    cpu
}

const LONG: &[Feature] = &[Feature::Lm, Feature::Syscall, Feature::Nx];

#[test]
fn values_that_are_rejected_leave_the_register() {
    let rows: &[(u32, u64)] = &[
        (IA32_LSTAR, 0x8000_0000_0000),
        (IA32_CSTAR, 0x8000_0000_0000),
        (IA32_FS_BASE, 1 << 63),
        (IA32_GS_BASE, 1 << 63),
        (IA32_KERNEL_GS_BASE, 1 << 63),
        (IA32_SYSENTER_EIP, 1 << 63),
        (IA32_PAT, 2),
        (IA32_PAT, 3 << 56),
        (IA32_MTRR_DEF_TYPE, 2),
        (IA32_MTRR_DEF_TYPE, 1 << 9),
        (IA32_MTRR_PHYSBASE0, 1 << 36),
        (IA32_MTRR_PHYSBASE0, 1 << 8),
        (IA32_MTRR_PHYSBASE0 + 1, 1 << 10),
        (IA32_MTRR_FIX4K_C0000, 7),
        (IA32_TSC_AUX, 1),
        (IA32_SPEC_CTRL, 1),
        (IA32_XSS, 0),
        (IA32_PKRS, 0),
        (IA32_EFER, 1 << 1),
        (IA32_EFER, efer::FFXSR),
        (IA32_MTRRCAP, MTRRCAP),
        (MSR_PLATFORM_INFO, 0),
        (MSR_MISC_FEATURES_ENABLES, 2),
        (IA32_MISC_ENABLE, 1 | 1 << 11),
        (IA32_DEBUGCTL, 1 << 6),
        (AMD64_HWCR, 1),
        (FAM10H_MMIO_CONF_BASE, 1),
    ];
    for (index, value) in rows {
        let mut c = cpu(LONG);
        let before = c.clone();
        assert_eq!(
            write(&mut c, *index, *value),
            MsrWrite::Rejected,
            "{index:#x}"
        );
        assert_eq!(c, before, "{index:#x}");
    }
}

#[test]
fn values_that_are_stored() {
    let rows: &[(u32, u64)] = &[
        (IA32_STAR, u64::MAX),
        (IA32_LSTAR, 0xffff_8000_0000_0000),
        (IA32_FS_BASE, 0x7fff_ffff_ffff),
        (IA32_PAT, 0x0007_0406_0501_0406),
        (IA32_MTRR_DEF_TYPE, 0xc06),
        (IA32_MTRR_PHYSBASE0 + 14, 0xf_ffff_f006),
        (IA32_MTRR_PHYSBASE0 + 15, 0xf_ffff_f800),
        (IA32_MTRR_FIX64K_00000, 0x0606_0606_0606_0606),
        (IA32_MTRR_FIX4K_F8000, 0x0505_0505_0505_0505),
        (IA32_SYSENTER_CS, 0x10),
        (AMD64_HWCR, HWCR_MC_STATUS_WR),
    ];
    let mut c = cpu(LONG);
    for (index, value) in rows {
        assert_eq!(write(&mut c, *index, *value), MsrWrite::Done, "{index:#x}");
        assert_eq!(read(&c, *index), Some(*value), "{index:#x}");
    }
}

#[test]
fn efer_rules() {
    let mut c = cpu(LONG);
    assert_eq!(
        write(&mut c, IA32_EFER, efer::LME | efer::SCE),
        MsrWrite::Done
    );
    assert_eq!(
        write(&mut c, IA32_EFER, efer::LME | efer::NXE),
        MsrWrite::LoadRoot
    );
    // LMA follows CR0.PG only.
    assert_eq!(
        write(&mut c, IA32_EFER, efer::LMA | efer::LME | efer::NXE),
        MsrWrite::Done
    );
    assert_eq!(c.efer & efer::LMA, 0);
    c.cr0 |= cr0::PG;
    c.efer |= efer::LMA;
    assert_eq!(write(&mut c, IA32_EFER, efer::NXE), MsrWrite::Rejected);
    assert_eq!(
        write(&mut c, IA32_EFER, efer::LME | efer::NXE | efer::SCE),
        MsrWrite::Done
    );
    assert_eq!(c.efer & efer::LMA, efer::LMA);
}

#[test]
fn cpuid_faulting_goes_by_what_is_offered() {
    let mut c = cpu(LONG);
    assert!(!c.msr.faults_cpuid());
    assert_eq!(write(&mut c, MSR_MISC_FEATURES_ENABLES, 1), MsrWrite::Done);
    assert_eq!(read(&c, MSR_MISC_FEATURES_ENABLES), Some(1));
    assert!(c.msr.faults_cpuid());
    assert_eq!(host_write(&mut c, MSR_PLATFORM_INFO, 0), MsrWrite::Rejected);
    assert_eq!(write(&mut c, MSR_MISC_FEATURES_ENABLES, 0), MsrWrite::Done);
    assert_eq!(host_write(&mut c, MSR_PLATFORM_INFO, 0), MsrWrite::Done);
    let refused = write(&mut c, MSR_MISC_FEATURES_ENABLES, 1);
    assert_eq!(refused, MsrWrite::Rejected);
}

#[test]
fn host_may_do_what_the_guest_may_not() {
    let mut c = cpu(LONG);
    for (index, value) in [
        (MSR_PLATFORM_INFO, 5),
        (IA32_ARCH_CAPABILITIES, 9),
        (IA32_SMBASE, 0x40000),
        (IA32_BIOS_SIGN_ID, 7),
        (IA32_TSC_AUX, 3),
    ] {
        assert_eq!(
            host_write(&mut c, index, value),
            MsrWrite::Done,
            "{index:#x}"
        );
        assert_eq!(host_read(&c, index), Some(value), "{index:#x}");
    }
    // Read-only ones accept the value they have.
    assert_eq!(host_write(&mut c, IA32_MTRRCAP, MTRRCAP), MsrWrite::Done);
    assert_eq!(host_write(&mut c, IA32_MTRRCAP, 0), MsrWrite::Rejected);
    assert_eq!(write(&mut c, 0x1234_5678, 0), MsrWrite::Unknown);
    assert_eq!(read(&c, IA32_SMBASE), None);
}

#[test]
fn emon_keeps_its_value() {
    let mut c = cpu(LONG);
    let before = read(&c, IA32_MISC_ENABLE).unwrap_or_default();
    assert_eq!(before, 1 << 11 | 1 << 12);
    let asked = before | 1 | 1 << 7;
    assert_eq!(write(&mut c, IA32_MISC_ENABLE, asked), MsrWrite::Done);
    assert_eq!(read(&c, IA32_MISC_ENABLE), Some(before | 1));
}

#[test]
fn vendors_differ() {
    let mut intel = cpu(&[Feature::Rdtscp]);
    let mut amd = cpu(&[Feature::Rdtscp, Feature::Amd]);
    assert_eq!(
        write(&mut intel, IA32_TSC_AUX, 1 << 32 | 1),
        MsrWrite::Rejected
    );
    assert_eq!(write(&mut amd, IA32_TSC_AUX, 1 << 32 | 1), MsrWrite::Done);
    assert_eq!(read(&amd, IA32_TSC_AUX), Some(1));
    for index in [IA32_SYSENTER_ESP, IA32_SYSENTER_EIP] {
        let value = 1 << 63 | 0x1234;
        assert_eq!(write(&mut intel, index, value), MsrWrite::Rejected);
        assert_eq!(write(&mut amd, index, value), MsrWrite::Done);
        assert_eq!(read(&amd, index), Some(0x1234));
    }
    assert_eq!(write(&mut amd, AMD64_DE_CFG, 2), MsrWrite::Done);
    assert_eq!(write(&mut intel, AMD64_DE_CFG, 2), MsrWrite::Unknown);
    assert_eq!(read(&intel, IA32_FEATURE_CONTROL), Some(0));
    assert_eq!(read(&amd, IA32_FEATURE_CONTROL), None);
    // It is locked once; VMX cannot be enabled.
    for (value, answer) in [
        (5, MsrWrite::Rejected),
        (1, MsrWrite::Done),
        (1, MsrWrite::Rejected),
    ] {
        assert_eq!(write(&mut intel, IA32_FEATURE_CONTROL, value), answer);
    }
    assert_eq!(read(&intel, IA32_FEATURE_CONTROL), Some(1));
    assert_eq!(
        host_write(&mut intel, IA32_FEATURE_CONTROL, 0),
        MsrWrite::Done
    );
}
