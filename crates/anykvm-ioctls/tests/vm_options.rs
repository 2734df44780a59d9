//! What KVM_ENABLE_CAP and its kin change of a VM, as its guest and its VMM see it.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::{os::fd::AsRawFd, thread, time::Duration};

use anykvm_ioctls::{Cap, Kvm, MsrExitReason, VcpuExit, VmFd};
use guest::{Guest, RAM, Ram, add_slot, ioctl};
use kvm_abi::numbers::*;
use kvm_bindings::*;

fn enable(vm: &VmFd, cap: u32, arg: u64) -> Result<(), i32> {
    let cap = kvm_enable_cap {
        cap,
        args: [arg, 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap).map_err(|e| e.errno())
}

#[test]
fn arguments_that_no_kvm_takes_are_refused() {
    let g = Guest::new(&[0xf4], false);
    for (cap, arg) in [
        (KVM_CAP_HALT_POLL, 1 << 32),
        (KVM_CAP_X2APIC_API, 4),
        (KVM_CAP_X86_USER_SPACE_MSR, 8),
        (KVM_CAP_EXIT_HYPERCALL, 1),
        (KVM_CAP_X86_DISABLE_EXITS, 16),
        (KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 2),
        (KVM_CAP_MAX_VCPU_ID, 1 << 20),
        (KVM_CAP_X86_BUS_LOCK_EXIT, 2),
        (KVM_CAP_X86_NOTIFY_VMEXIT, 1),
        (KVM_CAP_USER_MEMORY, 0),
    ] {
        assert_eq!(enable(&g.vm, cap, arg), Err(libc::EINVAL), "{cap}");
    }
    assert_eq!(enable(&g.vm, KVM_CAP_X86_BUS_LOCK_EXIT, 1), Ok(()));
    assert_eq!(enable(&g.vm, KVM_CAP_MAX_VCPU_ID, 2), Ok(()));
    assert_eq!(enable(&g.vm, KVM_CAP_MAX_VCPU_ID, 3), Err(libc::EINVAL));
    assert_eq!(g.vm.create_vcpu(2).unwrap_err().errno(), libc::EINVAL);
}

/// A guest whose CPUID has RDMSR.
fn guest_with_msrs(code: &[u8]) -> Guest {
    with_msrs(Guest::new(code, false))
}

fn with_msrs(g: Guest) -> Guest {
    let cpuid = Kvm::new()
        .unwrap()
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap();
    g.vcpu.set_cpuid2(&cpuid).unwrap();
    g
}

#[test]
fn the_vcpu_that_starts_at_reset_has_to_be_possible() {
    let kvm = Kvm::new().unwrap();
    let boot_id = |vm: &VmFd, id| {
        kvm_abi::ioctl(vm.as_raw_fd(), KVM_SET_BOOT_CPU_ID, id).map_err(|e| e.get())
    };
    let vm = kvm.create_vm().unwrap();
    let most = vm.check_extension_int(Cap::MaxVcpuId) as u64;
    assert_eq!(boot_id(&vm, most + 1), Err(libc::EINVAL));
    assert_eq!(boot_id(&vm, 5), Ok(0));
    assert_eq!(enable(&vm, KVM_CAP_MAX_VCPU_ID, 4), Err(libc::EINVAL));
    assert_eq!(enable(&vm, KVM_CAP_MAX_VCPU_ID, 8), Ok(()));
    assert_eq!(boot_id(&vm, 9), Err(libc::EINVAL));
}

/// KVM_FEATURE_PV_UNHALT.
const PV_UNHALT: u32 = 1 << 7;

#[test]
fn nobody_has_to_be_woken_from_a_halt_that_does_not_exit() {
    let unhalt = |g: &Guest| {
        let cpuid = g.vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
        let mut leaves = cpuid.as_slice().iter();
        leaves.find(|e| e.function == 0x4000_0001).unwrap().eax & PV_UNHALT
    };
    assert_eq!(unhalt(&guest_with_msrs(&[0xf4])), PV_UNHALT);
    let hlt = KVM_X86_DISABLE_EXITS_HLT.into();
    let g = Guest::prepared(&[0xf4], false, |vm| {
        enable(vm, KVM_CAP_X86_DISABLE_EXITS, hlt).unwrap();
    });
    assert_eq!(unhalt(&with_msrs(g)), 0);
}

#[test]
fn refused_msrs_go_to_the_vmm_that_asked_for_them() {
    // mov ecx, 0x12345; rdmsr; wrmsr; out 0x80, al
    let code = [
        0x66, 0xb9, 0x45, 0x23, 0x01, 0x00, 0x0f, 0x32, 0x0f, 0x30, 0xe6, 0x80,
    ];
    let mut g = guest_with_msrs(&code);
    let reasons = KVM_MSR_EXIT_REASON_UNKNOWN | KVM_MSR_EXIT_REASON_FILTER;
    enable(&g.vm, KVM_CAP_X86_USER_SPACE_MSR, reasons.into()).unwrap();
    match g.vcpu.run().unwrap() {
        VcpuExit::X86Rdmsr(exit) => {
            assert_eq!(exit.index, 0x12345);
            assert_eq!(exit.reason, MsrExitReason::Unknown);
            *exit.data = 0x1122_3344_5566_7788;
        }
        exit => panic!("{exit:?}"),
    }
    match g.vcpu.run().unwrap() {
        VcpuExit::X86Wrmsr(exit) => {
            assert_eq!((exit.index, exit.data), (0x12345, 0x1122_3344_5566_7788));
        }
        exit => panic!("{exit:?}"),
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));

    // An error is #GP, vector 13; and without a VMM that asks it is #GP at once.
    for asks in [true, false] {
        let mut g = guest_with_msrs(&code);
        let ivt = Ram::new(0x1000);
        ivt.write(13 * 4, &[0x00, 0x18, 0, 0]);
        add_slot(&g.vm, 1, 0, &ivt, 0);
        g.ram.write(0x800, &[0xe6, 0x81]);
        if asks {
            enable(&g.vm, KVM_CAP_X86_USER_SPACE_MSR, reasons.into()).unwrap();
            match g.vcpu.run().unwrap() {
                VcpuExit::X86Rdmsr(exit) => *exit.error = 1,
                exit => panic!("{exit:?}"),
            }
        }
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    }
}

#[test]
fn halt_without_an_exit_waits_for_the_vmm() {
    // sti; hlt; out 0x80, al
    let mut g = Guest::prepared(&[0xfb, 0xf4, 0xe6, 0x80], false, |vm| {
        let hlt = KVM_X86_DISABLE_EXITS_HLT.into();
        enable(vm, KVM_CAP_X86_DISABLE_EXITS, hlt).unwrap();
    });
    let stopper = g.vcpu.stopper().unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            stopper.stop();
        });
        assert_eq!(g.vcpu.run().unwrap_err().errno(), libc::EINTR);
    });
    assert_eq!(g.vcpu.get_regs().unwrap().rip, RAM + 2);
    g.vcpu.set_kvm_immediate_exit(0);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}

#[test]
fn init_ends_a_halt_without_an_exit() {
    let (vm, ram) = guest::vm(&[0xfa, 0xf4], true, 0);
    // At the second page, where the SIPI leads: out 0x81, al
    ram.write(0x1000, &[0xe6, 0x81]);
    let hlt = KVM_X86_DISABLE_EXITS_HLT.into();
    enable(&vm, KVM_CAP_X86_DISABLE_EXITS, hlt).unwrap();
    let _bsp = vm.create_vcpu(0).unwrap();
    let mut ap = vm.create_vcpu(1).unwrap();
    let runnable = kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    };
    ap.set_mp_state(runnable).unwrap();
    guest::start(&ap);
    thread::scope(|s| {
        s.spawn(|| {
            const INIT: u32 = 5 << 8;
            const STARTUP: u32 = 6 << 8;
            for data in [INIT, STARTUP | 2] {
                thread::sleep(Duration::from_millis(30));
                let msi = kvm_msi {
                    address_lo: 0xfee0_1000,
                    data,
                    ..Default::default()
                };
                vm.signal_msi(msi).unwrap();
            }
        });
        loop {
            match ap.run() {
                Ok(VcpuExit::IoOut(0x81, _)) => break,
                Err(e) if e.errno() == libc::EAGAIN => {}
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn dirty_bits_stay_until_they_are_cleared_by_hand() {
    // mov byte [0x3000], 1; out 0x80, al; mov byte [0x3000], 2; hlt
    let code = [
        0xc6, 0x06, 0x00, 0x30, 0x01, 0xe6, 0x80, 0xc6, 0x06, 0x00, 0x30, 0x02, 0xf4,
    ];
    let (vm, ram) = guest::vm(&code, false, KVM_MEM_LOG_DIRTY_PAGES);
    enable(&vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 1).unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    guest::start(&vcpu);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    let log = |vm: &VmFd| vm.get_dirty_log(0, 0x4000).unwrap()[0];
    // The third page of the slot, which begins at 0x1000, and the page of the code.
    assert_eq!((log(&vm), log(&vm)), (5, 5));
    let mut kept = [7; 2];
    vm.read_dirty_log(0, &mut kept).unwrap();
    assert_eq!((kept, vm.read_dirty_log(0, &mut [])), ([5, 7], Ok(())));
    let mut mask = [5u64];
    let mut clear = kvm_clear_dirty_log {
        num_pages: 4,
        ..Default::default()
    };
    clear.__bindgen_anon_1.dirty_bitmap = mask.as_mut_ptr().cast();
    for (first, pages, errno) in [
        (1, 3, libc::EINVAL),
        (0, 5, libc::EINVAL),
        (0, 3, libc::EINVAL),
    ] {
        (clear.first_page, clear.num_pages) = (first, pages);
        assert_eq!(
            ioctl(&vm, KVM_CLEAR_DIRTY_LOG, &mut clear),
            Err(errno),
            "{first} {pages}"
        );
    }
    (clear.first_page, clear.num_pages) = (0, 4);
    assert_eq!(ioctl(&vm, KVM_CLEAR_DIRTY_LOG, &mut clear), Ok(0));
    assert_eq!(log(&vm), 0);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(log(&vm), 4);
    assert_eq!(ram.read::<1>(0x2000), [2]);
}

#[test]
fn two_nmis_at_once_are_two() {
    // jmp $
    let mut g = Guest::new(&[0xeb, 0xfe], false);
    let ivt = Ram::new(0x1000);
    ivt.write(2 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(&g.vm, 1, 0, &ivt, 0);
    // out 0x80, al; iret
    g.ram.write(0x800, &[0xe6, 0x80, 0xcf]);
    for _ in 0..3 {
        g.vcpu.nmi().unwrap();
    }
    assert_eq!(g.vcpu.get_vcpu_events().unwrap().nmi.pending, 2);
    for _ in 0..2 {
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    }
    // Back in the loop, with none left.
    g.vcpu.stopper().unwrap().stop();
    assert_eq!(g.vcpu.run().unwrap_err().errno(), libc::EINTR);
    assert_eq!(g.vcpu.get_vcpu_events().unwrap().nmi.pending, 0);
}

#[test]
fn event_flags_need_their_capabilities() {
    let mut g = Guest::new(&[0xf4], false);
    let mut events = g.vcpu.get_vcpu_events().unwrap();
    let base = events.flags;
    for (cap, flag) in [
        (KVM_CAP_EXCEPTION_PAYLOAD, KVM_VCPUEVENT_VALID_PAYLOAD),
        (
            KVM_CAP_X86_TRIPLE_FAULT_EVENT,
            KVM_VCPUEVENT_VALID_TRIPLE_FAULT,
        ),
    ] {
        events.flags = base | flag;
        let refused = g.vcpu.set_vcpu_events(&events).unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL);
        enable(&g.vm, cap, 1).unwrap();
        assert_ne!(g.vcpu.get_vcpu_events().unwrap().flags & flag, 0);
        g.vcpu.set_vcpu_events(&events).unwrap();
    }
    events.flags = base | KVM_VCPUEVENT_VALID_TRIPLE_FAULT;
    events.triple_fault.pending = 1;
    g.vcpu.set_vcpu_events(&events).unwrap();
    assert_eq!(g.vcpu.get_vcpu_events().unwrap().triple_fault.pending, 1);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Shutdown));
}

#[test]
fn the_apic_timer_ticks_as_the_vmm_says() {
    let bare = Kvm::new().unwrap().create_vm().unwrap();
    let cap = KVM_CAP_X86_APIC_BUS_CYCLES_NS;
    assert_eq!(enable(&bare, cap, 20), Err(libc::ENXIO));
    // Timer: one shot, masked, divided by 1; what is left of the count after a while, to port 0x80.
    // mov ax, 0x...: the LAPIC's page is reached by its MSRs in x2APIC mode.
    let code = [
        0x66, 0xb9, 0x3e, 0x08, 0x00, 0x00, // mov ecx, 0x83e
        0x66, 0x31, 0xd2, // xor edx, edx
        0x66, 0xb8, 0x0b, 0x00, 0x00, 0x00, // mov eax, 11: divide by 1
        0x0f, 0x30, // wrmsr
        0x66, 0xb9, 0x38, 0x08, 0x00, 0x00, // mov ecx, 0x838
        0x66, 0xb8, 0xff, 0xff, 0xff, 0xff, // mov eax, -1
        0x0f, 0x30, // wrmsr
        0xe6, 0x80, // out 0x80, al: the VMM sleeps
        0x66, 0xb9, 0x39, 0x08, 0x00, 0x00, // mov ecx, 0x839
        0x0f, 0x32, // rdmsr
        0x66, 0xf7, 0xd0, // not eax
        0xba, 0x81, 0x00, // mov dx, 0x81
        0x66, 0xef, // out dx, eax
    ];
    for (ns, bad) in [(1u64, false), (20, false), (0, true), (1 << 40, true)] {
        let (vm, _ram) = guest::vm(&code, true, 0);
        let set = enable(&vm, cap, ns);
        if bad {
            assert_eq!(set, Err(libc::EINVAL), "{ns}");
            continue;
        }
        assert_eq!(set, Ok(()));
        let mut vcpu = vm.create_vcpu(0).unwrap();
        assert_eq!(enable(&vm, cap, ns), Err(libc::EINVAL), "there is a vCPU");
        guest::start(&vcpu);
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.apic_base |= 1 << 10 | 1 << 11;
        vcpu.set_sregs(&sregs).unwrap();
        let start = std::time::Instant::now();
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        thread::sleep(Duration::from_millis(20));
        let VcpuExit::IoOut(0x81, data) = vcpu.run().unwrap() else {
            panic!("no count");
        };
        let ticks = u64::from(u32::from_le_bytes(data.try_into().unwrap()));
        let took = start.elapsed().as_nanos() as u64;
        assert!(
            (20_000_000 / ns..=took / ns + 1).contains(&ticks),
            "{ns}: {ticks} in {took} ns"
        );
    }
}

#[test]
fn three_pages_for_the_tss_end_below_4_gib() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    for (address, is_good) in [(0, true), (0xffff_d000, true), (0xffff_d001, false)] {
        let result = vm.set_tss_address(address);
        assert_eq!(result.is_ok(), is_good, "{address:#x}");
    }
}
