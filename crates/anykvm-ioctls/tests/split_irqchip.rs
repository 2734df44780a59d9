//! KVM_CAP_SPLIT_IRQCHIP: LAPICs here, PIC and IOAPIC in the VMM.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::{thread, time::Duration};

use anykvm_ioctls::{Cap, IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use guest::{Guest, RAM, Ram, add_slot, enable_lapic, ioctl, start};
use kvm_abi::numbers::*;
use kvm_bindings::*;
use vmm_sys_util::eventfd::EventFd;

const PINS: u64 = 24;
/// Where the handlers of the tests' interrupts are.
const HANDLER: u64 = 0x1800;

fn split(vm: &VmFd, pins: u64) -> Result<(), i32> {
    let cap = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        args: [pins, 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap).map_err(|e| e.errno())
}

/// An enabled LAPIC, segments of 4 GiB, an IDT whose every vector leads to `handler`.
fn split_guest(code: &[u8], handler: &[u8]) -> Guest {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    split(&vm, PINS).unwrap();
    let ram = Ram::new(0x5000);
    add_slot(&vm, 0, 0, &ram, 0);
    for vector in 0..256 {
        ram.write(vector * 4, &(HANDLER as u32).to_le_bytes());
    }
    ram.write(RAM, code);
    ram.write(HANDLER, handler);
    let vcpu = vm.create_vcpu(0).unwrap();
    start(&vcpu);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.ds.limit = u32::MAX;
    vcpu.set_sregs(&sregs).unwrap();
    enable_lapic(&vcpu);
    Guest { vcpu, vm, ram }
}

fn route(vm: &VmFd, routes: &[(u32, u32)]) {
    let entries: Vec<_> = routes
        .iter()
        .map(|&(gsi, data)| {
            let mut entry = kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_MSI,
                ..Default::default()
            };
            entry.u.msi.address_lo = 0xfee0_0000;
            entry.u.msi.data = data;
            entry
        })
        .collect();
    vm.set_gsi_routing(&KvmIrqRouting::from_entries(&entries).unwrap())
        .unwrap();
}

/// `mov dword [0xfee000b0], 0`: EOI.
const EOI: [u8; 12] = [0x67, 0x66, 0xc7, 0x05, 0xb0, 0x00, 0xe0, 0xfe, 0, 0, 0, 0];

fn handler_with_eoi() -> Vec<u8> {
    // out 0x80, al; EOI; iret
    [&[0xe6, 0x80], &EOI[..], &[0xcf]].concat()
}

#[test]
fn what_needs_the_other_chips_is_refused() {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    assert!(vm.check_extension(Cap::SplitIrqchip));
    assert_eq!(split(&vm, 4097), Err(libc::EINVAL));
    assert_eq!(split(&vm, PINS), Ok(()));
    assert_eq!(split(&vm, PINS), Err(libc::EEXIST));
    let errno = |r: Result<(), vmm_sys_util::errno::Error>| r.unwrap_err().errno();
    assert_eq!(errno(vm.create_irq_chip()), libc::EEXIST);
    assert_eq!(
        errno(vm.create_pit2(kvm_pit_config::default())),
        libc::ENOENT
    );
    for chip_id in 0..3 {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        assert_eq!(errno(vm.get_irqchip(&mut chip)), libc::ENXIO);
    }
    let event = EventFd::new(0).unwrap();
    let resample = EventFd::new(0).unwrap();
    let refused = vm.register_irqfd_with_resample(&event, &resample, 4);
    assert_eq!(errno(refused), libc::EINVAL);
    vm.register_irqfd(&event, 4).unwrap();
    // A route to a chip that is not here.
    let mut to_pin = kvm_irq_routing_entry {
        gsi: 1,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    to_pin.u.irqchip.irqchip = KVM_IRQCHIP_IOAPIC;
    let table = KvmIrqRouting::from_entries(&[to_pin]).unwrap();
    assert_eq!(errno(vm.set_gsi_routing(&table)), libc::EINVAL);
    // No default routes either.
    vm.set_irq_line(4, true).unwrap();

    let late = kvm.create_vm().unwrap();
    let _vcpu = late.create_vcpu(0).unwrap();
    assert_eq!(split(&late, PINS), Err(libc::EEXIST));
}

#[test]
fn ends_of_level_triggered_interrupts_reach_the_vmms_ioapic() {
    // sti; hlt; cli; out 0x81, al; jmp back
    let code = [0xfb, 0xf4, 0xfa, 0xe6, 0x81, 0xeb, 0xf9];
    let mut g = split_guest(&code, &handler_with_eoi());
    // Level, edge, and a level beyond the IOAPIC's pins.
    route(&g.vm, &[(4, 0x8031), (5, 0x41), (30, 0x8051)]);
    for (gsi, exits) in [(4, true), (5, false), (30, false), (4, true)] {
        g.vm.set_irq_line(gsi, true).unwrap();
        g.vm.set_irq_line(gsi, false).unwrap();
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        if exits {
            assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoapicEoi(0x31)));
            // EOI is the VMM's business and done here: nothing is in service.
            let lapic = g.vcpu.get_lapic().unwrap();
            assert_eq!(lapic.regs[0x110], 0);
        }
        assert!(
            matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)),
            "{gsi}"
        );
    }
}

#[test]
fn an_irqfd_is_a_message() {
    let code = [0xfb, 0xf4, 0xe6, 0x81];
    let mut g = split_guest(&code, &handler_with_eoi());
    route(&g.vm, &[(7, 0x61)]);
    let event = EventFd::new(0).unwrap();
    g.vm.register_irqfd(&event, 7).unwrap();
    let bell = EventFd::new(0).unwrap();
    g.vm.register_ioevent(&bell, &IoEventAddress::Pio(0x80), NoDatamatch)
        .unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            event.write(1).unwrap();
        });
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    });
    assert_eq!(bell.read().unwrap(), 1);
}

fn inject(vcpu: &VcpuFd, irq: u32) -> Result<i32, i32> {
    ioctl(vcpu, KVM_INTERRUPT, &mut kvm_interrupt { irq })
}

#[test]
fn the_vmms_pic_injects_through_lint0() {
    // out 0x81, al; sti; nop; out 0x82, al; hlt; out 0x83, al
    let code = [0xe6, 0x81, 0xfb, 0x90, 0xe6, 0x82, 0xf4, 0xe6, 0x83];
    // out 0x80, al; iret: the PIC's interrupts end at the PIC.
    let mut g = split_guest(&code, &[0xe6, 0x80, 0xcf]);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    let run = g.vcpu.get_kvm_run();
    assert_eq!((run.ready_for_interrupt_injection, run.if_flag), (0, 0));
    // It waits for RFLAGS.IF, and so does the exit that says that it may come.
    assert_eq!(inject(&g.vcpu, 256), Err(libc::EINVAL));
    assert_eq!(inject(&g.vcpu, 0x20), Ok(0));
    assert_eq!(inject(&g.vcpu, 0x21), Err(libc::EEXIST));
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    g.vcpu.get_kvm_run().request_interrupt_window = 1;
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IrqWindowOpen));
    let run = g.vcpu.get_kvm_run();
    assert_eq!((run.ready_for_interrupt_injection, run.if_flag), (1, 1));
    run.request_interrupt_window = 0;
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x82, _)));
    // HLT stays inside; EINTR says that the PIC may inject, and that ends HLT.
    let stopper = g.vcpu.stopper().unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            stopper.stop();
        });
        assert_eq!(g.vcpu.run().unwrap_err().errno(), libc::EINTR);
    });
    assert_eq!(g.vcpu.get_mp_state().unwrap().mp_state, KVM_MP_STATE_HALTED);
    let stopped = g.vcpu.get_kvm_run();
    stopped.immediate_exit = 0;
    let flags = (stopped.ready_for_interrupt_injection, stopped.if_flag);
    assert_eq!(flags, (1, 1));
    assert_eq!(inject(&g.vcpu, 0x20), Ok(0));
    for port in [0x80, 0x83] {
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(at, _) => assert_eq!(at, port),
            exit => panic!("{exit:?}"),
        }
    }
}

#[test]
fn a_masked_lint0_keeps_the_pic_out() {
    // sti; nop; out 0x81, al; out 0x82, al
    let code = [0xfb, 0x90, 0xe6, 0x81, 0xe6, 0x82];
    let mut g = split_guest(&code, &[0xe6, 0x80, 0xcf]);
    let mut lapic = g.vcpu.get_lapic().unwrap();
    lapic.regs[0x352] = 1;
    g.vcpu.set_lapic(&lapic).unwrap();
    assert_eq!(inject(&g.vcpu, 0x20), Ok(0));
    g.vcpu.get_kvm_run().request_interrupt_window = 1;
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    assert_eq!(g.vcpu.get_kvm_run().ready_for_interrupt_injection, 0);
    lapic = g.vcpu.get_lapic().unwrap();
    lapic.regs[0x352] = 0;
    g.vcpu.set_lapic(&lapic).unwrap();
    g.vcpu.get_kvm_run().request_interrupt_window = 0;
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}
