//! What KVM_SET_* stores, KVM_GET_* shows (KVM API document): all state of a vCPU and a VM.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod host_cpu;
mod stats_fd;

use anykvm_ioctls::{Cap, Kvm, KvmNestedStateBuffer, VcpuFd, VmFd};
use guest::{Guest, ioctl};
use host_cpu::is_amd;
use kvm_abi::numbers::*;
use kvm_bindings::*;
use stats_fd::read_stats;

fn cpuid(kvm: &Kvm) -> CpuId {
    let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    for leaf in cpuid.as_mut_slice().iter_mut().filter(|l| l.function == 1) {
        leaf.ecx |= 1 << 24;
    }
    cpuid
}

fn with_irqchip() -> (VmFd, VcpuFd) {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    vm.create_irq_chip().unwrap();
    vm.create_pit2(kvm_pit_config::default()).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    vcpu.set_cpuid2(&cpuid(&kvm)).unwrap();
    (vm, vcpu)
}

#[test]
fn regs() {
    let g = Guest::new(&[], false);
    let regs = kvm_regs {
        rax: 1,
        rbx: 2,
        rcx: 3,
        rdx: 4,
        rsi: 5,
        rdi: 6,
        rsp: 7,
        rbp: 8,
        r8: 9,
        r9: 10,
        r10: 11,
        r11: 12,
        r12: 13,
        r13: 14,
        r14: 15,
        r15: u64::MAX,
        rip: 0xdead_beef,
        rflags: 0x246,
    };
    g.vcpu.set_regs(&regs).unwrap();
    assert_eq!(g.vcpu.get_regs().unwrap(), regs);
}

fn long_mode(mut s: kvm_sregs) -> kvm_sregs {
    s.cr0 = 0x8005_0033;
    s.cr2 = 0xffff_8000_1234_5678;
    s.cr3 = 0x2000;
    s.cr4 = 0x6f0;
    s.cr8 = 5;
    s.efer = 0xd01;
    s.cs.l = 1;
    s.cs.db = 0;
    s.cs.g = 1;
    s.cs.limit = 0xffff_ffff;
    s.fs.base = 0x7fff_1234_5000;
    s.ldt.unusable = 1;
    s.tr.base = 0xfffe_0000_0000;
    s.tr.limit = 0x206f;
    s.gdt.base = 0xffff_fe00_0000_1000;
    s.gdt.limit = 127;
    s.idt.base = 0xffff_fe00_0000_0000;
    s.idt.limit = 4095;
    s
}

#[test]
fn sregs_with_and_without_irqchip() {
    for irqchip in [false, true] {
        let kvm = Kvm::new().unwrap();
        let g = Guest::new(&[], irqchip);
        g.vcpu.set_cpuid2(&cpuid(&kvm)).unwrap();
        let mut s = long_mode(g.vcpu.get_sregs().unwrap());
        // x2APIC mode, address and BSP as they were.
        s.apic_base |= 0xc00;
        g.vcpu.set_sregs(&s).unwrap();
        assert_eq!(g.vcpu.get_sregs().unwrap(), s);
        // An interrupt on its way, without the in-kernel LAPIC's doing.
        s.interrupt_bitmap[1] = 1 << 5;
        g.vcpu.set_sregs(&s).unwrap();
        assert_eq!(g.vcpu.get_sregs().unwrap(), s);
        assert_eq!(g.vcpu.get_vcpu_events().unwrap().interrupt.nr, 69);
    }
}

#[test]
fn impossible_sregs_change_nothing() {
    let g = Guest::new(&[], true);
    let good = long_mode(g.vcpu.get_sregs().unwrap());
    let before = g.vcpu.get_sregs().unwrap();
    type Spoil = fn(&mut kvm_sregs);
    let rows: [(&str, Spoil); 6] = [
        ("LMA without LME and PG", |s| s.cr0 &= !(1 << 31)),
        ("long mode without PAE", |s| s.cr4 &= !(1 << 5)),
        ("reserved CR4", |s| s.cr4 |= 1 << 40),
        ("reserved CR0", |s| s.cr0 |= 1 << 40),
        ("reserved CR3", |s| s.cr3 |= 1 << 60),
        ("reserved APIC base", |s| s.apic_base |= 1),
    ];
    for (what, spoil) in rows {
        let mut s = good;
        spoil(&mut s);
        let e = g.vcpu.set_sregs(&s).unwrap_err();
        assert_eq!(e.errno(), libc::EINVAL, "{what}");
        assert_eq!(g.vcpu.get_sregs().unwrap(), before, "{what}");
    }
}

#[test]
fn sregs2_has_pdptrs_in_pae_mode() {
    let kvm = Kvm::new().unwrap();
    let g = Guest::new(&[], false);
    g.vcpu.set_cpuid2(&cpuid(&kvm)).unwrap();
    let mut s = kvm_sregs2::default();
    ioctl(&g.vcpu, KVM_GET_SREGS2, &mut s).unwrap();
    assert_eq!(s.flags, 0);
    s.flags = 1;
    assert_eq!(ioctl(&g.vcpu, KVM_SET_SREGS2, &mut s), Err(libc::EINVAL));
    s.flags = 2;
    assert_eq!(ioctl(&g.vcpu, KVM_SET_SREGS2, &mut s), Err(libc::EINVAL));
    s.cr0 = 0x8000_0031;
    s.cr4 = 0x20;
    s.cr3 = 0x2000;
    s.flags = 1;
    s.pdptrs = [0x3001, 0, 0x4001, 0x5001];
    ioctl(&g.vcpu, KVM_SET_SREGS2, &mut s).unwrap();
    let mut back = kvm_sregs2::default();
    ioctl(&g.vcpu, KVM_GET_SREGS2, &mut back).unwrap();
    assert_eq!(back, s);
}

#[test]
fn fpu_and_xsave() {
    let kvm = Kvm::new().unwrap();
    let g = Guest::new(&[], false);
    g.vcpu.set_cpuid2(&cpuid(&kvm)).unwrap();
    let mut fpu = kvm_fpu {
        fcw: 0x27f,
        fsw: 0x3800,
        ftwx: 0x80,
        last_opcode: 0x123,
        last_ip: 0x1122,
        last_dp: 0x3344,
        mxcsr: 0x1fa0,
        ..Default::default()
    };
    for (i, r) in fpu.fpr.iter_mut().enumerate() {
        r[..10].fill(i as u8 + 1);
    }
    for (i, r) in fpu.xmm.iter_mut().enumerate() {
        r.fill(0x80 | i as u8);
    }
    g.vcpu.set_fpu(&fpu).unwrap();
    assert_eq!(g.vcpu.get_fpu().unwrap(), fpu);

    // The same state, and more, as an XSAVE image.
    let image = g.vcpu.get_xsave().unwrap();
    assert_eq!(image.region[0] & 0xffff, 0x27f);
    assert_eq!(image.region[6], 0x1fa0, "MXCSR");
    let copy = |image: &kvm_xsave| kvm_xsave {
        region: image.region,
        ..Default::default()
    };
    let mut changed = copy(&image);
    changed.region[40] = 0x5555_5555; // XMM0
    let has_avx = image.region[128] & 4 != 0;
    if has_avx {
        changed.region[144] = 0x6666_6666; // upper half of YMM0
    }
    // SAFETY: no component lies beyond the structure.
    unsafe { g.vcpu.set_xsave(&changed) }.unwrap();
    assert_eq!(g.vcpu.get_xsave().unwrap().region, changed.region);
    let size = g.vm.check_extension_int(Cap::Xsave2);
    assert_eq!(size, 4096);
    let mut xsave2 = Xsave::new(0).unwrap();
    // SAFETY: KVM_CAP_XSAVE2 says that the structure itself is enough.
    unsafe {
        g.vcpu.get_xsave2(&mut xsave2).unwrap();
        assert_eq!(xsave2.as_fam_struct_ref().xsave.region, changed.region);
        g.vcpu.set_xsave(&image).unwrap();
        g.vcpu.set_xsave2(&xsave2).unwrap();
    }
    assert_eq!(g.vcpu.get_xsave().unwrap().region, changed.region);
    // A vCPU that has no CPUID yet takes the state too.
    let other = g.vm.create_vcpu(1).unwrap();
    // SAFETY: KVM_CAP_XSAVE2 says that the structure itself is enough.
    unsafe { other.set_xsave(&changed) }.unwrap();
    // A component that the vCPU has not.
    let mut bad = copy(&image);
    bad.region[128] |= 1 << 17;
    // SAFETY: KVM_CAP_XSAVE2 says that the structure itself is enough.
    let e = unsafe { g.vcpu.set_xsave(&bad) }.unwrap_err();
    assert_eq!(e.errno(), libc::EINVAL);
}

#[test]
fn xcrs() {
    let kvm = Kvm::new().unwrap();
    let g = Guest::new(&[], false);
    g.vcpu.set_cpuid2(&cpuid(&kvm)).unwrap();
    let mut x = g.vcpu.get_xcrs().unwrap();
    assert_eq!((x.nr_xcrs, x.xcrs[0].value), (1, 1));
    for (value, is_good) in [
        (3, true),
        (1, true),
        (2, false),
        (5, false),
        (1 << 63, false),
    ] {
        x.xcrs[0].value = value;
        assert_eq!(g.vcpu.set_xcrs(&x).is_ok(), is_good, "{value:#x}");
    }
    assert_eq!(g.vcpu.get_xcrs().unwrap().xcrs[0].value, 1);
}

#[test]
fn state_components_that_are_not_supported_cannot_be_promised() {
    let kvm = Kvm::new().unwrap();
    let g = Guest::new(&[], false);
    let mut table = cpuid(&kvm);
    // Those of AVX-512.
    const COMPONENTS: u32 = 0b111 << 5;
    let leaf = (table.as_mut_slice().iter_mut()).find(|e| (e.function, e.index) == (0xd, 0));
    leaf.unwrap().eax |= COMPONENTS;
    g.vcpu.set_cpuid2(&table).unwrap();
    let mut x = g.vcpu.get_xcrs().unwrap();
    x.xcrs[0].value = u64::from(COMPONENTS | 7);
    assert_eq!(g.vcpu.set_xcrs(&x).unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn every_listed_msr_round_trips() {
    let (vm, vcpu) = with_irqchip();
    let list = Kvm::new().unwrap().get_msr_index_list().unwrap();
    let _ = vm;
    let entries: Vec<kvm_msr_entry> = list
        .as_slice()
        .iter()
        .map(|index| kvm_msr_entry {
            index: *index,
            ..Default::default()
        })
        .collect();
    let mut msrs = Msrs::from_entries(&entries).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), entries.len());
    assert_eq!(vcpu.set_msrs(&msrs).unwrap(), entries.len());
    let mut again = Msrs::from_entries(&entries).unwrap();
    vcpu.get_msrs(&mut again).unwrap();
    for (a, b) in msrs.as_slice().iter().zip(again.as_slice()) {
        // IA32_TSC, and Hyper-V's run time and reference time.
        const CLOCKS: [u32; 3] = [0x10, 0x4000_0010, 0x4000_0020];
        if !CLOCKS.contains(&a.index) {
            assert_eq!(a, b);
        }
    }
    // Values other than those after reset.
    let rows = [
        (0x174, 0x10),
        (0x175, 0xffff_8000_0000_1000),
        (0xc000_0081, 0x0023_0010_0000_0000),
        (0xc000_0082, 0xffff_8000_0000_2000),
        (0xc000_0084, 0x4_7700),
        (0xc000_0102, 0x7fff_0000_1000),
        (0xc000_0103, 7),
        (0x277, 0x0007_0406_0001_0506),
        (0x3b, 12_345),
        (0x2ff, 0xc06),
        (0x200, 0x8000_0006),
        (0x17a, 4),
        (0x4b56_4d00, 0x3000),
    ];
    for (index, data) in rows {
        let entry = kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[entry]).unwrap();
        assert_eq!(vcpu.set_msrs(&msrs).unwrap(), 1, "{index:#x}");
        let mut back = Msrs::from_entries(&[kvm_msr_entry { data: 0, ..entry }]).unwrap();
        assert_eq!(vcpu.get_msrs(&mut back).unwrap(), 1);
        // AMD's processors keep 32 bits of IA32_SYSENTER_ESP.
        let kept = match index {
            0x175 if is_amd() => data & u64::from(u32::MAX),
            _ => data,
        };
        assert_eq!(back.as_slice()[0].data, kept, "{index:#x}");
    }
}

#[test]
fn unknown_msrs_end_the_list() {
    let g = Guest::new(&[], false);
    let entry = |index| kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry(0x174), entry(0x1234_5678), entry(0x175)]).unwrap();
    assert_eq!(g.vcpu.get_msrs(&mut msrs).unwrap(), 1);
    assert_eq!(g.vcpu.set_msrs(&msrs).unwrap(), 1);
}

#[test]
fn lapic_in_both_modes() {
    let (vm, vcpu) = with_irqchip();
    let _ = vm;
    for x2apic in [false, true] {
        let mut s = vcpu.get_sregs().unwrap();
        s.apic_base = 0xfee0_0900 | u64::from(x2apic) << 10;
        vcpu.set_sregs(&s).unwrap();
        let mut lapic = vcpu.get_lapic().unwrap();
        let mut put = |at: usize, v: u32| {
            for (to, from) in lapic.regs[at..at + 4].iter_mut().zip(v.to_le_bytes()) {
                *to = from as _;
            }
        };
        put(0x80, 0x20); // TPR
        put(0xf0, 0x1ff); // enabled
        put(0x110, 1 << 4); // in service: 36
        put(0x210, 1 << 9); // requested: 41
        put(0x320, 0x300ec); // periodic timer, masked
        put(0x350, 0x700);
        put(0x370, 0x100fe);
        put(0x380, 0xffff_fff0);
        put(0x390, 0x8000_0000);
        put(0x3e0, 0xb);
        vcpu.set_lapic(&lapic).unwrap();
        let back = vcpu.get_lapic().unwrap();
        let get = |l: &kvm_lapic_state, at: usize| {
            u32::from_le_bytes(std::array::from_fn(|i| l.regs[at + i] as u8))
        };
        for at in (0..0x400).step_by(16) {
            match at {
                // The timer runs.
                0x390 => assert!(get(&back, at).abs_diff(0x8000_0000) < 0x2000_0000),
                // PPR is computed.
                0xa0 => assert_eq!(get(&back, at), 0x20),
                _ => assert_eq!(get(&back, at), get(&lapic, at), "{at:#x}, x2apic {x2apic}"),
            }
        }
    }
}

#[test]
fn chips() {
    let (vm, vcpu) = with_irqchip();
    let _ = vcpu;
    for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip).unwrap();
        // SAFETY: the PIC's member belongs to these chips.
        let mut pic = unsafe { chip.chip.pic };
        pic.irq_base = 0x30;
        pic.imr = 0xfb;
        pic.isr = 2;
        pic.irr = 1;
        pic.priority_add = 3;
        chip.chip.pic = pic;
        vm.set_irqchip(&chip).unwrap();
        let mut back = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut back).unwrap();
        // SAFETY: the PIC's member belongs to this chip.
        assert_eq!(unsafe { back.chip.pic }, pic);
    }
    let mut chip = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    vm.get_irqchip(&mut chip).unwrap();
    // SAFETY: the IOAPIC's member belongs to this chip.
    unsafe {
        chip.chip.ioapic.redirtbl[4].bits = 0x0300_0000_0001_a931;
        chip.chip.ioapic.ioregsel = 0x18;
        chip.chip.ioapic.id = 2;
    }
    vm.set_irqchip(&chip).unwrap();
    let mut back = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        ..Default::default()
    };
    vm.get_irqchip(&mut back).unwrap();
    // SAFETY: the IOAPIC's member belongs to this chip.
    unsafe {
        assert_eq!(back.chip.ioapic.redirtbl[4].bits, 0x0300_0000_0001_a931);
        assert_eq!(back.chip.ioapic.ioregsel, 0x18);
        assert_eq!(back.chip.ioapic.id, 2);
    }
    chip.chip_id = 3;
    assert_eq!(vm.get_irqchip(&mut chip).unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn pit2() {
    let (vm, vcpu) = with_irqchip();
    let _ = vcpu;
    let mut pit = vm.get_pit2().unwrap();
    pit.channels[0].mode = 2;
    pit.channels[0].count = 0x4a9;
    pit.channels[0].rw_mode = 3;
    pit.channels[2].gate = 1;
    pit.flags = KVM_PIT_FLAGS_SPEAKER_DATA_ON;
    vm.set_pit2(&pit).unwrap();
    let mut back = vm.get_pit2().unwrap();
    for (b, p) in back.channels.iter_mut().zip(pit.channels) {
        // Counting starts again, as in KVM.
        b.count_load_time = p.count_load_time;
    }
    assert_eq!(back, pit);
}

#[test]
fn mp_state() {
    let (vm, vcpu) = with_irqchip();
    let ap = vm.create_vcpu(1).unwrap();
    let state = |v: &VcpuFd| v.get_mp_state().unwrap().mp_state;
    assert_eq!(state(&vcpu), KVM_MP_STATE_RUNNABLE);
    assert_eq!(state(&ap), KVM_MP_STATE_UNINITIALIZED);
    for mp_state in [
        KVM_MP_STATE_HALTED,
        KVM_MP_STATE_INIT_RECEIVED,
        KVM_MP_STATE_UNINITIALIZED,
        KVM_MP_STATE_RUNNABLE,
    ] {
        ap.set_mp_state(kvm_mp_state { mp_state }).unwrap();
        assert_eq!(state(&ap), mp_state);
    }
    let e = ap.set_mp_state(kvm_mp_state { mp_state: 99 });
    assert_eq!(e.unwrap_err().errno(), libc::EINVAL);
    let alone = Guest::new(&[], false);
    let halted = kvm_mp_state {
        mp_state: KVM_MP_STATE_HALTED,
    };
    assert!(alone.vcpu.set_mp_state(halted).is_err());
}

#[test]
fn vcpu_events() {
    let (vm, vcpu) = with_irqchip();
    let _ = vm;
    let mut e = vcpu.get_vcpu_events().unwrap();
    e.exception.injected = 1;
    e.exception.nr = 14;
    e.exception.has_error_code = 1;
    e.exception.error_code = 6;
    e.interrupt.injected = 1;
    e.interrupt.nr = 0x41;
    e.interrupt.shadow = KVM_X86_SHADOW_INT_STI as u8;
    e.nmi.pending = 1;
    e.nmi.masked = 1;
    e.smi.pending = 1;
    e.smi.smm = 1;
    e.smi.smm_inside_nmi = 1;
    vcpu.set_vcpu_events(&e).unwrap();
    assert_eq!(vcpu.get_vcpu_events().unwrap(), e);
    e.flags |= 1 << 20;
    let refused = vcpu.set_vcpu_events(&e).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
}

#[test]
fn debugregs() {
    let g = Guest::new(&[], false);
    let mut d = g.vcpu.get_debug_regs().unwrap();
    d.db = [1, 2, 0xffff_8000_0000_0000, 4];
    d.dr6 = 0xffff_0ff1;
    d.dr7 = 0x401;
    g.vcpu.set_debug_regs(&d).unwrap();
    assert_eq!(g.vcpu.get_debug_regs().unwrap(), d);
    // As KVM does, without the bits that are always set.
    (d.dr6, d.dr7) = (0, 13);
    g.vcpu.set_debug_regs(&d).unwrap();
    assert_eq!(g.vcpu.get_debug_regs().unwrap(), d);
    d.dr7 |= 1 << 40;
    assert!(g.vcpu.set_debug_regs(&d).is_err());
}

#[test]
fn clock_and_tsc() {
    let (vm, vcpu) = with_irqchip();
    let clock = kvm_clock_data {
        clock: 1 << 40,
        ..Default::default()
    };
    vm.set_clock(&clock).unwrap();
    let now = vm.get_clock().unwrap().clock;
    assert!(now >= 1 << 40 && now - (1 << 40) < 1_000_000_000, "{now}");
    // What was read can be written as it is.
    let saved = vm.get_clock().unwrap();
    assert_ne!(saved.flags, 0);
    vm.set_clock(&saved).unwrap();
    assert!(vm.get_clock().unwrap().clock >= saved.clock);
    let unknown = kvm_clock_data { flags: 1, ..saved };
    assert!(vm.set_clock(&unknown).is_err());
    let khz = vcpu.get_tsc_khz().unwrap();
    vcpu.set_tsc_khz(khz / 2).unwrap();
    assert_eq!(vcpu.get_tsc_khz().unwrap(), khz / 2);
    assert!(vcpu.set_tsc_khz(u32::MAX).is_err());
    vcpu.set_tsc_khz(0).unwrap();
    assert_eq!(vcpu.get_tsc_khz().unwrap(), khz, "the host's");
    // TSC and deadline as MSRs.
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let set = Msrs::from_entries(&[entry(0x10, 1 << 50)]).unwrap();
    assert_eq!(vcpu.set_msrs(&set).unwrap(), 1);
    let mut get = Msrs::from_entries(&[entry(0x10, 0)]).unwrap();
    vcpu.get_msrs(&mut get).unwrap();
    let passed = get.as_slice()[0].data - (1 << 50);
    assert!(passed < u64::from(khz) * 1000, "{passed}");
}

#[test]
fn a_vcpu_without_nested_guests_has_a_nested_state() {
    let g = Guest::new(&[], false);
    let header = size_of::<kvm_nested_state>();
    let cap = Kvm::new().unwrap().check_extension_int(Cap::NestedState);
    assert_eq!(cap as usize, header);
    let mut state = KvmNestedStateBuffer::empty();
    assert_eq!(g.vcpu.nested_state(&mut state).unwrap(), None);
    assert_eq!(state.size as usize, header);
    g.vcpu.set_nested_state(&state).unwrap();
    let mut small = KvmNestedStateBuffer::empty();
    small.size = 8;
    let error = g.vcpu.nested_state(&mut small).unwrap_err();
    assert_eq!((error.errno(), small.size as usize), (libc::E2BIG, header));
    state.flags |= KVM_STATE_NESTED_GUEST_MODE as u16;
    let error = g.vcpu.set_nested_state(&state).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL);
}

#[test]
fn another_vcpu_may_boot() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    vm.create_irq_chip().unwrap();
    let set = |id: u64| {
        use std::os::fd::AsRawFd;
        kvm_abi::ioctl(vm.as_raw_fd(), KVM_SET_BOOT_CPU_ID, id).map_err(|e| e.get())
    };
    assert_eq!(set(1), Ok(0));
    let zero = vm.create_vcpu(0).unwrap();
    let one = vm.create_vcpu(1).unwrap();
    assert_eq!(set(0), Err(libc::EBUSY));
    const BSP: u64 = 1 << 8;
    assert_eq!(zero.get_sregs().unwrap().apic_base & BSP, 0);
    assert_eq!(one.get_sregs().unwrap().apic_base & BSP, BSP);
    let state = |v: &VcpuFd| v.get_mp_state().unwrap().mp_state;
    assert_eq!(state(&zero), KVM_MP_STATE_UNINITIALIZED);
    assert_eq!(state(&one), KVM_MP_STATE_RUNNABLE);
}

#[test]
fn statistics_count() {
    use std::os::fd::AsRawFd;
    // out 0x80, al; mov [0x8000], al; hlt
    let mut g = Guest::new(&[0xe6, 0x80, 0xa2, 0x00, 0x80, 0xf4], false);
    let stats = |fd: i32| read_stats(kvm_abi::ioctl(fd, KVM_GET_STATS_FD, 0).unwrap());
    let (id, first) = stats(g.vcpu.as_raw_fd());
    assert_eq!(id, format!("kvm-{}/vcpu-0", std::process::id()));
    assert_eq!(first[0], ("exits".to_owned(), 0));
    for _ in 0..3 {
        g.vcpu.run().unwrap();
    }
    let (_, stats_now) = stats(g.vcpu.as_raw_fd());
    for (name, want) in [
        ("exits", 3),
        ("io_exits", 1),
        ("mmio_exits", 1),
        ("halt_exits", 1),
        ("signal_exits", 0),
    ] {
        assert!(
            stats_now.contains(&(name.to_owned(), want)),
            "{stats_now:?}"
        );
    }
    let (id, vm) = stats(g.vm.as_raw_fd());
    assert_eq!(id, format!("kvm-{}", std::process::id()));
    assert_eq!(vm[0].0, "remote_tlb_flush_requests");
    assert!(vm[0].1 >= 1, "{vm:?}");
}

#[test]
fn init_and_start_up_wait_for_the_end_of_smm() {
    let (_vm, vcpu) = with_irqchip();
    let set = |mp_state| vcpu.set_mp_state(kvm_mp_state { mp_state }).is_ok();
    let smi = |smm, pending| {
        let mut events = vcpu.get_vcpu_events().unwrap();
        events.smi.smm = smm;
        events.smi.pending = pending;
        vcpu.set_vcpu_events(&events).is_ok()
    };
    for (smm, pending) in [(1, 0), (0, 1)] {
        assert!(smi(smm, pending));
        assert!(!set(KVM_MP_STATE_INIT_RECEIVED) && !set(KVM_MP_STATE_SIPI_RECEIVED));
        assert!(set(KVM_MP_STATE_HALTED) && set(KVM_MP_STATE_RUNNABLE));
        assert!(smi(0, 0));
        assert!(set(KVM_MP_STATE_INIT_RECEIVED));
        assert!(!smi(smm, pending) && smi(0, 0));
        assert!(set(KVM_MP_STATE_RUNNABLE));
    }
}
