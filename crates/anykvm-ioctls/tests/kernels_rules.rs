//! Rules that KVM has had for some time only: what the kernels of today do.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod host_cpu;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use guest::ioctl;
use host_cpu::is_amd;
use kvm_bindings::*;
use vmm_sys_util::eventfd::EventFd;

fn enable(vm: &VmFd, cap: u32, arg: u64) -> Result<(), i32> {
    let mut cap = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    cap.args[0] = arg;
    vm.enable_cap(&cap).map_err(|e| e.errno())
}

#[test]
fn exits_are_disabled_before_there_are_vcpus_or_not_at_all() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let hlt = u64::from(KVM_X86_DISABLE_EXITS_HLT);
    assert_eq!(enable(&vm, KVM_CAP_X86_DISABLE_EXITS, hlt), Ok(()));
    let _vcpu = vm.create_vcpu(0).unwrap();
    let late = enable(&vm, KVM_CAP_X86_DISABLE_EXITS, hlt);
    assert_eq!(late, Err(libc::EINVAL));
}

#[test]
fn sregs_have_no_efer_bits_that_cpuid_does_not_promise() {
    const NX: u32 = 1 << 20;
    const LM: u32 = 1 << 29;
    const NXE: u64 = 1 << 11;
    const LME_LMA: u64 = 0x500;
    const SVME: u64 = 1 << 12;
    const AUTO_IBRS: u64 = 1 << 21;
    let kvm = Kvm::new().unwrap();
    for (without, efer, want) in [
        (0, NXE, Ok(())),
        (NX, NXE, Err(libc::EINVAL)),
        (NX, 1, Ok(())),
        (LM, 1 << 8, Err(libc::EINVAL)),
        (0, SVME, Err(libc::EINVAL)),
        (0, AUTO_IBRS, Err(libc::EINVAL)),
        (0, 1 << 63, Err(libc::EINVAL)),
    ] {
        let vm = kvm.create_vm().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        for e in cpuid.as_mut_slice() {
            if e.function == 0x8000_0001 {
                e.edx &= !without;
            }
        }
        vcpu.set_cpuid2(&cpuid).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.efer = efer & !LME_LMA | efer & 1 << 8;
        let got = vcpu.set_sregs(&sregs).map_err(|e| e.errno());
        assert_eq!(got, want, "{without:#x} {efer:#x}");
    }
}

/// Direct mode of synthetic timers, and IPIs to many processors by a hypercall.
fn needs_lapic(list: &CpuId) -> [bool; 2] {
    let leaf = |function: u32| {
        let mut leaves = list.as_slice().iter();
        *leaves.find(|e| e.function == function).unwrap()
    };
    let bits = [leaf(0x4000_0003).edx >> 19, leaf(0x4000_0004).eax >> 10];
    bits.map(|bit| bit & 1 != 0)
}

/// KVM_GET_SUPPORTED_HV_CPUID on a vCPU.
fn hv_cpuid(vcpu: &VcpuFd) -> CpuId {
    const KVM_GET_SUPPORTED_HV_CPUID: u32 = 0xc008_aec1;
    let mut list = CpuId::new(KVM_MAX_CPUID_ENTRIES).unwrap();
    // SAFETY: the header and as many entries as it says.
    let header = unsafe { &mut *list.as_mut_fam_struct_ptr() };
    ioctl(vcpu, KVM_GET_SUPPORTED_HV_CPUID, header).unwrap();
    let entries = list.as_slice()[..].to_vec();
    CpuId::from_entries(&entries).unwrap()
}

#[test]
fn direct_timers_and_cluster_ipis_need_a_lapic_in_the_kernel() {
    for irqchip in [false, true] {
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        if irqchip {
            vm.create_irq_chip().unwrap();
        }
        let vcpu = vm.create_vcpu(0).unwrap();
        assert_eq!(needs_lapic(&hv_cpuid(&vcpu)), [irqchip; 2]);
    }
}

/// KVM_GET_ONE_REG: KVM_X86_REG_MSR names an MSR.
#[test]
fn msrs_are_registers() {
    const MSR: u64 = 0x2030_0002_0000_0000;
    const TSC_AUX: u64 = 0xc000_0103;
    const STAR: u64 = 0xc000_0081;
    const LSTAR: u64 = 0xc000_0082;
    let kvm = Kvm::new().unwrap();
    assert!(kvm.check_extension_raw(KVM_CAP_ONE_REG.into()) > 0);
    let vm = kvm.create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    vcpu.set_cpuid2(&cpuid).unwrap();
    for (index, value) in [(TSC_AUX, 7u64), (STAR, 0x0023_0010_1234_5678)] {
        let set = vcpu.set_one_reg(MSR | index, &value.to_le_bytes());
        assert_eq!(set.unwrap(), 8);
        let mut read = [0; 8];
        assert_eq!(vcpu.get_one_reg(MSR | index, &mut read).unwrap(), 8);
        assert_eq!(u64::from_le_bytes(read), value);
    }
    // No MSR, a register of 32 bits, KVM's own without shadow stacks, another architecture's; a value that is refused.
    let others = [
        MSR | 0xffff_0000,
        0x2020_0002_0000_0010,
        0x2030_0003_0000_0000,
    ];
    for id in others.into_iter().chain([0x6030_0002_0000_0010]) {
        let error = vcpu.get_one_reg(id, &mut [0; 8]).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL, "{id:#x}");
    }
    // AMD's processors ignore the upper half, Intel's do not.
    let wide = vcpu.set_one_reg(MSR | TSC_AUX, &u64::MAX.to_le_bytes());
    assert_eq!(
        wide.map_err(|e| e.errno()).err(),
        (!is_amd()).then_some(libc::EINVAL)
    );
    let refused = vcpu.set_one_reg(MSR | LSTAR, &(1u64 << 62).to_le_bytes());
    assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    let mut list = kvm_reg_list {
        n: 5,
        ..Default::default()
    };
    ioctl(&vcpu, kvm_abi::numbers::KVM_GET_REG_LIST, &mut list).unwrap();
    assert_eq!(list.n, 0);
}

#[test]
fn branch_traces_and_sampling_are_not_there() {
    const MISC_ENABLE: u32 = 0x1a0;
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let entry = kvm_msr_entry {
        index: MISC_ENABLE,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
    assert_eq!(msrs.as_slice()[0].data, 1 << 11 | 1 << 12);
}

#[test]
fn features_that_are_listed_can_be_read_on_a_vcpu() {
    const PERF_CAPABILITIES: u32 = 0x345;
    let kvm = Kvm::new().unwrap();
    let features = kvm.get_msr_feature_index_list().unwrap();
    let vm = kvm.create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    vcpu.set_cpuid2(&cpuid).unwrap();
    for index in features.as_slice() {
        let entry = kvm_msr_entry {
            index: *index,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[entry]).unwrap();
        assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1, "{index:#x}");
    }
    assert!(features.as_slice().contains(&PERF_CAPABILITIES));
}

#[test]
fn a_vm_tells_what_was_set_there() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let tick = |vm: &VmFd| vm.check_extension_raw(KVM_CAP_X86_APIC_BUS_CYCLES_NS.into());
    assert_eq!(tick(&vm), 1);
    vm.create_irq_chip().unwrap();
    assert_eq!(enable(&vm, KVM_CAP_X86_APIC_BUS_CYCLES_NS, 40), Ok(()));
    assert_eq!(tick(&vm), 40);
    assert_eq!(tick(&kvm.create_vm().unwrap()), 1);
}

#[test]
fn an_eventfd_is_an_irqfd_of_one_vm() {
    let kvm = Kvm::new().unwrap();
    let vms = [kvm.create_vm().unwrap(), kvm.create_vm().unwrap()];
    vms.iter().for_each(|vm| vm.create_irq_chip().unwrap());
    let event = EventFd::new(0).unwrap();
    let errno = |vm: &VmFd| vm.register_irqfd(&event, 5).map_err(|e| e.errno());
    assert_eq!(errno(&vms[0]), Ok(()));
    assert_eq!(errno(&vms[1]), Err(libc::EBUSY));
    // By whatever number.
    let other = event.try_clone().unwrap();
    let busy = vms[1].register_irqfd(&other, 5).unwrap_err();
    assert_eq!(busy.errno(), libc::EBUSY);
    vms[0].unregister_irqfd(&event, 5).unwrap();
    assert_eq!(errno(&vms[1]), Ok(()));
    let [first, second] = vms;
    assert_eq!(errno(&first), Err(libc::EBUSY));
    drop(second);
    assert_eq!(errno(&first), Ok(()));
}

/// No VMM can answer for an IDT, nor for a stack, while an exception is delivered.
#[test]
fn an_event_is_not_delivered_through_a_device() {
    const NOWHERE: u64 = 0x9000;
    // ud2
    let cases = [
        (NOWHERE, 0x4000, NOWHERE..NOWHERE + 0x100),
        (
            guest::RAM + 0x100,
            NOWHERE + 0x800,
            NOWHERE + 0x7f0..NOWHERE + 0x800,
        ),
    ];
    for (idt, rsp, place) in cases {
        let mut g = guest::Guest::new(&[0x0f, 0x0b], false);
        let mut sregs = g.vcpu.get_sregs().unwrap();
        sregs.idt.base = idt;
        g.vcpu.set_sregs(&sregs).unwrap();
        let mut regs = g.vcpu.get_regs().unwrap();
        regs.rsp = rsp;
        g.vcpu.set_regs(&regs).unwrap();
        for _ in 0..2 {
            assert!(matches!(g.vcpu.run(), Ok(VcpuExit::InternalError)));
            let run = g.vcpu.get_kvm_run();
            // SAFETY: the member that this exit fills.
            let internal = unsafe { run.__bindgen_anon_1.internal };
            assert_eq!(internal.suberror, KVM_INTERNAL_ERROR_DELIVERY_EV);
            assert_eq!(internal.ndata, 5);
            assert!(place.contains(&internal.data[3]));
            assert_eq!(g.vcpu.get_regs().unwrap().rip, guest::RAM);
        }
    }
}

#[test]
fn a_message_without_a_receiver() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let to = |id: u32| kvm_msi {
        address_lo: 0xfee0_0000 | id << 12,
        data: 0x40,
        ..Default::default()
    };
    assert_eq!(vm.signal_msi(to(0)).unwrap_err().errno(), libc::EINVAL);
    vm.create_irq_chip().unwrap();
    assert_eq!(vm.signal_msi(to(0)).unwrap_err().errno(), libc::EPERM);
    let _vcpu = vm.create_vcpu(0).unwrap();
    assert_eq!(vm.signal_msi(to(7)).unwrap(), 0);
}

/// As far as KVM emulates real mode: the stack is a device's.
#[test]
fn int_n_of_real_mode_is_an_instruction() {
    const DEVICE: u64 = 0x9000;
    let mut g = guest::Guest::new(&[0xcd, 0x80], false);
    let ivt = guest::Ram::new(0x1000);
    ivt.write(0x80 * 4, &[0x00, 0x18, 0, 0]);
    guest::add_slot(&g.vm, 1, 0, &ivt, 0);
    // out 0x81, al
    g.ram.write(0x800, &[0xe6, 0x81]);
    let mut regs = g.vcpu.get_regs().unwrap();
    (regs.rsp, regs.rflags) = (DEVICE + 0x800, 0x202);
    g.vcpu.set_regs(&regs).unwrap();
    let pushed: [(u64, u16); 3] = [(0x7fe, 0x202), (0x7fc, 0), (0x7fa, guest::RAM as u16 + 2)];
    for (at, value) in pushed {
        match g.vcpu.run().unwrap() {
            VcpuExit::MmioWrite(gpa, bytes) => {
                assert_eq!((gpa, bytes), (DEVICE + at, &value.to_le_bytes()[..]));
            }
            exit => panic!("{exit:?}"),
        }
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    let regs = g.vcpu.get_regs().unwrap();
    assert_eq!((regs.rsp, regs.rflags & 0x200), (DEVICE + 0x7fa, 0));
}
