//! More than 255 vCPUs: ids that only x2APIC has, and what a vCPU takes that does nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod guest;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use guest::{Ram, add_slot, lapic_bit, set_limit, set_msr};
use kvm_bindings::*;

const CODE: u64 = 0x1000;
const STARTED: u64 = 0x2000;
const APIC_BASE: u32 = 0x1b;
/// Enabled, in x2APIC mode.
const X2APIC: u64 = 0xfee0_0c00;
const ICR: u32 = 0x830;
const SPIV: u32 = 0x80f;
/// The last of them is a vCPU with an id of more than 8 bits.
const FAR: u64 = 300;

/// The process's memory is measured: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    // The C library would have later zeroed arrays out of its heap, and touch all of them, once large ones were freed.
    // SAFETY: sets a number of the allocator's.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn enable(vm: &VmFd, cap: u32, arg: u64) {
    let mut cap = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    cap.args[0] = arg;
    vm.enable_cap(&cap).unwrap();
}

/// Lets the process have as many descriptors as it may.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a structure that is written.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(result, 0);
    set_limit(libc::RLIMIT_NOFILE, limit.rlim_max);
}

struct Machine {
    kvm: Kvm,
    vm: VmFd,
    ram: Ram,
}

impl Machine {
    /// Split: the VMM has PIC and IOAPIC.
    fn new(is_split: bool) -> Self {
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        let ram = Ram::new(0x10000);
        add_slot(&vm, 0, 0, &ram, 0);
        if is_split {
            enable(&vm, KVM_CAP_SPLIT_IRQCHIP, 24);
        } else {
            vm.create_irq_chip().unwrap();
        }
        // hlt, and hlt behind each interrupt.
        ram.write(CODE, &[0xf4, 0xeb, 0xfd]);
        // out 0x10, al; hlt
        ram.write(STARTED, &[0xe6, 0x10, 0xf4]);
        Self { kvm, vm, ram }
    }

    fn vcpu(&self, id: u64) -> VcpuFd {
        let vcpu = self.vm.create_vcpu(id).unwrap();
        let supported = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        vcpu.set_cpuid2(&supported.unwrap()).unwrap();
        vcpu
    }
}

fn state(vcpu: &VcpuFd) -> u32 {
    vcpu.get_mp_state().unwrap().mp_state
}

fn lapic_id(vcpu: &VcpuFd) -> u32 {
    let regs = vcpu.get_lapic().unwrap().regs;
    u32::from_le_bytes([0x20, 0x21, 0x22, 0x23].map(|at| regs[at] as u8))
}

#[test]
fn a_vcpu_that_only_x2apic_can_name_is_started_by_its_id() {
    let _alone = alone();
    for is_split in [false, true] {
        let machine = Machine::new(is_split);
        let mut boot = machine.vcpu(0);
        // The low 8 bits of the other one's id.
        let near = machine.vcpu(FAR & 0xff);
        let mut far = machine.vcpu(FAR);
        assert_eq!(lapic_id(&far) >> 24, FAR as u32 & 0xff);
        // mov ecx, ICR; mov eax, INIT; mov edx, FAR; wrmsr; mov eax, SIPI; wrmsr; hlt
        let mut code = vec![0x66, 0xb9];
        code.extend(ICR.to_le_bytes());
        for command in [0x4500u32, 0x4600 | (STARTED >> 12) as u32] {
            code.extend([0x66, 0xb8]);
            code.extend(command.to_le_bytes());
            code.extend([0x66, 0xba]);
            code.extend((FAR as u32).to_le_bytes());
            code.extend([0x0f, 0x30]);
        }
        code.extend([0xe6, 0x11]);
        machine.ram.write(CODE, &code);
        assert!(set_msr(&boot, APIC_BASE, X2APIC | 0x100));
        guest::start(&boot);
        assert!(matches!(boot.run(), Ok(VcpuExit::IoOut(0x11, _))));
        // As with KVM, the call in which it is started ends with that.
        assert_eq!(far.run().unwrap_err().errno(), libc::EAGAIN);
        let exit = far.run();
        assert!(matches!(exit, Ok(VcpuExit::IoOut(0x10, _))), "{exit:?}");
        let sregs = far.get_sregs().unwrap();
        assert_eq!(sregs.cs.base, STARTED);
        assert_eq!(state(&near), KVM_MP_STATE_UNINITIALIZED);
    }
}

#[test]
fn messages_find_wide_ids_where_the_vmm_has_asked_for_them() {
    let _alone = alone();
    let machine = Machine::new(true);
    let near = machine.vcpu(FAR & 0xff);
    let far = machine.vcpu(FAR);
    for vcpu in [&near, &far] {
        assert!(set_msr(vcpu, APIC_BASE, X2APIC));
        assert!(set_msr(vcpu, SPIV, 0x1ff));
    }
    let msi = |vector: u32| kvm_msi {
        address_lo: 0xfee0_0000 | (FAR as u32 & 0xff) << 12,
        address_hi: FAR as u32 & !0xff,
        data: vector,
        ..Default::default()
    };
    // 8 bits name the other one.
    assert_eq!(lapic_id(&far), (FAR as u32) << 24);
    machine.vm.signal_msi(msi(0x51)).unwrap();
    assert!(lapic_bit(&near, guest::IRR, 0x51) && !lapic_bit(&far, guest::IRR, 0x51));
    enable(
        &machine.vm,
        KVM_CAP_X2APIC_API,
        KVM_X2APIC_API_USE_32BIT_IDS.into(),
    );
    assert_eq!(lapic_id(&far), FAR as u32);
    machine.vm.signal_msi(msi(0x52)).unwrap();
    assert!(!lapic_bit(&near, guest::IRR, 0x52) && lapic_bit(&far, guest::IRR, 0x52));
    // By a route, as an irqfd goes.
    let mut route = KvmIrqRouting::new(1).unwrap();
    let entry = &mut route.as_mut_slice()[0];
    (entry.gsi, entry.type_) = (5, KVM_IRQ_ROUTING_MSI);
    entry.u.msi = kvm_irq_routing_msi {
        address_lo: msi(0).address_lo,
        address_hi: msi(0).address_hi,
        data: 0x53,
        ..Default::default()
    };
    machine.vm.set_gsi_routing(&route).unwrap();
    machine.vm.set_irq_line(5, true).unwrap();
    assert!(!lapic_bit(&near, guest::IRR, 0x53) && lapic_bit(&far, guest::IRR, 0x53));
    // What is saved is restored, and is nobody else's.
    let saved = far.get_lapic().unwrap();
    far.set_lapic(&saved).unwrap();
    assert_eq!(near.set_lapic(&saved).unwrap_err().errno(), libc::EINVAL);
}

/// Resident bytes of the process, and its mappings.
fn used() -> (usize, usize) {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let resident: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (resident * 4096, maps.lines().count())
}

#[test]
fn there_are_as_many_as_the_capabilities_say_and_idle_ones_take_little() {
    let _alone = alone();
    raise_descriptor_limit();
    let kvm = Kvm::new().unwrap();
    let (max, ids) = (kvm.get_max_vcpus() as u64, kvm.get_max_vcpu_id() as u64);
    assert_eq!((max, ids), (1024, 4096));
    let machine = Machine::new(false);
    let supported = Arc::new(kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap());
    let refused = |id: u64| machine.vm.create_vcpu(id).unwrap_err().errno();
    assert_eq!(refused(ids), libc::EINVAL);
    let before = used();
    let mut vcpus = Vec::new();
    // The last ids that there are.
    for id in ids - max..ids {
        let vcpu = machine.vm.create_vcpu(id).unwrap();
        vcpu.set_cpuid2(&supported).unwrap();
        vcpus.push(vcpu);
    }
    assert_eq!(refused(0), libc::EINVAL);
    let after = used();
    let each = (after.0 - before.0) / max as usize;
    let mappings = (after.1 - before.1) as u64;
    eprintln!(
        "{each} bytes and {} mappings each",
        mappings as f64 / max as f64
    );
    assert!(each < 768 << 10, "{each}");
    // A process has 65530.
    assert!(mappings < 32 * max, "{mappings}");
    // All of them execute something.
    for vcpu in vcpus.iter_mut().rev().step_by(64) {
        let mp_state = kvm_mp_state {
            mp_state: KVM_MP_STATE_RUNNABLE,
        };
        vcpu.set_mp_state(mp_state).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let regs = kvm_regs {
            rip: STARTED,
            rflags: 2,
            ..Default::default()
        };
        vcpu.set_regs(&regs).unwrap();
        assert!(matches!(vcpu.run(), Ok(VcpuExit::IoOut(0x10, _))));
    }
}
