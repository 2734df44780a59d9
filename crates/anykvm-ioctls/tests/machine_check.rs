//! Machine checks: KVM_X86_SETUP_MCE, KVM_X86_SET_MCE, the banks' registers and CMCI (SDM vol. 3, chapter 16).

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use anykvm_ioctls::{Cap, Kvm, VcpuFd};
use guest::{Guest, ioctl, set_msr};
use kvm_abi::numbers::*;
use kvm_bindings::*;

/// IA32_MCG_CAP: IA32_MCi_CTL2 and the LVT's CMCI entry exist.
const CMCI: u64 = 1 << 10;
/// IA32_MCi_CTL2: errors that need no action raise an interrupt.
const CMCI_EN: u64 = 1 << 30;
/// IA32_MCi_STATUS: valid, uncorrected.
const UNCORRECTED: u64 = 1 << 63 | 1 << 61;
/// Registers of the LAPIC.
const VERSION: usize = 0x30;
const SPIV: usize = 0xf0;
const IRR: usize = 0x200;
const LVT_CMCI: usize = 0x2f0;
/// The CMCI entry's vector.
const VECTOR: u32 = 0x55;

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

fn get(vcpu: &VcpuFd, index: u32) -> Option<u64> {
    let mut msrs = Msrs::from_entries(&[entry(index, 0)]).unwrap();
    (vcpu.get_msrs(&mut msrs).unwrap() == 1).then(|| msrs.as_slice()[0].data)
}

fn lapic(vcpu: &VcpuFd, register: usize) -> u32 {
    let bytes = vcpu.get_lapic().unwrap().regs;
    let bytes = [0, 1, 2, 3].map(|n| bytes[register + n] as u8);
    u32::from_le_bytes(bytes)
}

fn set_lapic(vcpu: &VcpuFd, register: usize, value: u32) {
    let mut state = vcpu.get_lapic().unwrap();
    for (n, byte) in value.to_le_bytes().into_iter().enumerate() {
        state.regs[register + n] = byte as _;
    }
    vcpu.set_lapic(&state).unwrap();
}

#[test]
fn machine_check_banks() {
    let g = Guest::new(&[], false);
    let kvm = Kvm::new().unwrap();
    assert_eq!(kvm.check_extension_int(Cap::Mce), 32);
    let mut cap = 0u64;
    ioctl(&kvm, KVM_X86_GET_MCE_CAP_SUPPORTED, &mut cap).unwrap();
    assert_eq!(cap, 1 << 24 | CMCI | 1 << 8);
    for (cap, want) in [
        (0, Err(libc::EINVAL)),
        (33, Err(libc::EINVAL)),
        (1 << 9 | 10, Err(libc::EINVAL)),
        (1 << 8 | 10, Ok(0)),
    ] {
        let mut cap: u64 = cap;
        assert_eq!(ioctl(&g.vcpu, KVM_X86_SETUP_MCE, &mut cap), want);
    }
    let mut msrs = Msrs::from_entries(&[
        entry(0x179, 0),
        entry(0x17b, 0),
        entry(0x400, 0),
        entry(0x427, 0),
        entry(0x428, 0),
    ])
    .unwrap();
    assert_eq!(g.vcpu.get_msrs(&mut msrs).unwrap(), 4, "ten banks");
    let data: Vec<u64> = msrs.as_slice().iter().map(|m| m.data).collect();
    assert_eq!(data[..4], [1 << 8 | 10, u64::MAX, u64::MAX, 0]);
    // A corrected error is recorded, a second one overflows.
    let mut mce = kvm_x86_mce {
        status: 1 << 63 | 7,
        addr: 0x1234,
        misc: 0x99,
        bank: 3,
        ..Default::default()
    };
    for want in [1 << 63 | 7, 3 << 62 | 7] {
        ioctl(&g.vcpu, KVM_X86_SET_MCE, &mut mce).unwrap();
        let mut bank = Msrs::from_entries(&[entry(0x40d, 0), entry(0x40e, 0)]).unwrap();
        assert_eq!(g.vcpu.get_msrs(&mut bank).unwrap(), 2);
        assert_eq!(bank.as_slice()[0].data, want);
        assert_eq!(bank.as_slice()[1].data, 0x1234);
    }
    mce.bank = 10;
    assert_eq!(ioctl(&g.vcpu, KVM_X86_SET_MCE, &mut mce), Err(libc::EINVAL));
}

/// Records an error in bank 3 that needs no action.
fn deferred(vcpu: &VcpuFd) {
    let mut mce = kvm_x86_mce {
        status: UNCORRECTED | 0x9f,
        addr: 0x1234,
        misc: 0x8c,
        bank: 3,
        ..Default::default()
    };
    ioctl(vcpu, KVM_X86_SET_MCE, &mut mce).unwrap();
}

#[test]
fn an_error_that_needs_no_action_is_recorded_without_an_exception() {
    let g = Guest::new(&[], false);
    let mut cap = 1 << 8 | 10;
    ioctl(&g.vcpu, KVM_X86_SETUP_MCE, &mut cap).unwrap();
    deferred(&g.vcpu);
    assert_eq!(get(&g.vcpu, 0x40d), Some(UNCORRECTED | 0x9f));
    assert_eq!(get(&g.vcpu, 0x40e), Some(0x1234));
    let events = g.vcpu.get_vcpu_events().unwrap();
    assert_eq!(events.exception.injected | events.exception.pending, 0);
    // The same with MCG_STATUS says that the processor is to act.
    let mut mce = kvm_x86_mce {
        status: UNCORRECTED | 1 << 55 | 0x9f,
        mcg_status: 5,
        bank: 4,
        ..Default::default()
    };
    let mut sregs = g.vcpu.get_sregs().unwrap();
    sregs.cr4 |= 1 << 6;
    g.vcpu.set_sregs(&sregs).unwrap();
    ioctl(&g.vcpu, KVM_X86_SET_MCE, &mut mce).unwrap();
    assert_eq!(get(&g.vcpu, 0x17a), Some(5));
    let events = g.vcpu.get_vcpu_events().unwrap();
    assert_eq!(events.exception.nr, 18);
}

#[test]
fn cmci_is_raised_where_the_bank_allows_it() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    vm.create_irq_chip().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    // Without CMCI neither the registers nor the entry are there.
    assert_eq!(lapic(&vcpu, VERSION) >> 16 & 0xff, 5);
    assert!(!set_msr(&vcpu, 0x283, CMCI_EN));
    let mut cap = CMCI | 1 << 8 | 10;
    ioctl(&vcpu, KVM_X86_SETUP_MCE, &mut cap).unwrap();
    assert_eq!(lapic(&vcpu, VERSION) >> 16 & 0xff, 6);
    assert_eq!(lapic(&vcpu, LVT_CMCI), 1 << 16, "masked");
    set_lapic(&vcpu, SPIV, 0x1ff);
    set_lapic(&vcpu, LVT_CMCI, VECTOR);
    // Reserved bits, and a bank that is not there.
    assert!(!set_msr(&vcpu, 0x283, 1 << 31));
    assert!(!set_msr(&vcpu, 0x28a, CMCI_EN));
    let raised = || lapic(&vcpu, IRR + 16 * (VECTOR as usize / 32)) >> (VECTOR % 32) & 1;
    deferred(&vcpu);
    assert_eq!(raised(), 0, "the bank does not allow it");
    assert!(set_msr(&vcpu, 0x283, CMCI_EN | 1));
    assert_eq!(get(&vcpu, 0x283), Some(CMCI_EN | 1));
    deferred(&vcpu);
    assert_eq!(raised(), 1);
    // The VMM takes it away again.
    cap = 1 << 8 | 10;
    ioctl(&vcpu, KVM_X86_SETUP_MCE, &mut cap).unwrap();
    assert_eq!(lapic(&vcpu, VERSION) >> 16 & 0xff, 5);
    assert!(!set_msr(&vcpu, 0x283, CMCI_EN));
}
