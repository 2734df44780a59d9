//! Doorbells and irqfds: every ring counts once, whatever happens around it, and nothing is left
//! behind (KVM API document, KVM_IOEVENTFD and KVM_IRQFD).

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod guest;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{
    DoorbellQueue, DoorbellSpec, IoEventAddress, NoDatamatch, Space, VcpuExit, VmFd,
};
use kvm_abi::numbers::{KVM_IOEVENTFD, KVM_IRQFD};
use kvm_bindings::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use guest::{Guest, RAM, Ram, add_slot, ioctl, start};

const PIO: u32 = 1 << kvm_ioeventfd_flag_nr_pio;
const MATCH: u32 = 1 << kvm_ioeventfd_flag_nr_datamatch;
const DEASSIGN: u32 = 1 << kvm_ioeventfd_flag_nr_deassign;

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

fn ioeventfd(vm: &VmFd, fd: i32, addr: u64, len: u32, value: u64, flags: u32) -> i32 {
    let mut args = kvm_ioeventfd {
        datamatch: value,
        addr,
        len,
        fd,
        flags,
        ..Default::default()
    };
    ioctl(vm, KVM_IOEVENTFD, &mut args).err().unwrap_or(0)
}

#[test]
fn bad_ioeventfds_have_their_errno() {
    let g = Guest::new(&[0xf4], false);
    let (a, b) = (event(), event());
    let null = std::fs::File::open("/dev/null").unwrap();
    let closed = 1_000_000;
    let (a, b, file) = (a.as_raw_fd(), b.as_raw_fd(), null.as_raw_fd());
    for (fd, addr, len, value, flags, want) in [
        (a, 0x100, 3, 0, PIO, libc::EINVAL),
        (a, 0x100, 16, 0, 0, libc::EINVAL),
        (a, 0x100, 0, 1, MATCH, libc::EINVAL),
        (a, 0x100, 1, 0, 1 << 31, libc::EINVAL),
        (a, u64::MAX, 2, 0, 0, libc::EINVAL),
        (closed, 0x100, 1, 0, PIO, libc::EBADF),
        (-1, 0x100, 1, 0, PIO, libc::EBADF),
        (file, 0x100, 1, 0, PIO, libc::EINVAL),
        // Good ones, and what they exclude.
        (a, 0x100, 1, 5, PIO | MATCH, 0),
        (b, 0x100, 1, 5, PIO | MATCH, libc::EEXIST),
        (b, 0x100, 1, 0, PIO, libc::EEXIST),
        (b, 0x100, 0, 0, PIO, libc::EEXIST),
        (b, 0x100, 1, 6, PIO | MATCH, 0),
        (b, 0x100, 2, 0, PIO, 0),
        (a, 0x100, 1, 5, MATCH, 0),
        (a, 0x8000, 0, 0, 0, 0),
        (b, 0x8000, 8, 0, 0, libc::EEXIST),
        (b, 0x8001, 8, 0, 0, 0),
        // Removal: everything has to be the same, and what cannot be is not there.
        (a, 0x100, 1, 7, PIO | MATCH | DEASSIGN, libc::ENOENT),
        (b, 0x100, 1, 5, PIO | MATCH | DEASSIGN, libc::ENOENT),
        (a, 0x100, 1, 5, PIO | DEASSIGN, libc::ENOENT),
        (a, 0x100, 3, 5, PIO | DEASSIGN, libc::ENOENT),
        (closed, 0x100, 1, 5, PIO | MATCH | DEASSIGN, libc::EBADF),
        (file, 0x100, 1, 5, PIO | MATCH | DEASSIGN, libc::EINVAL),
        (a, 0x100, 1, 5, PIO | MATCH | DEASSIGN, 0),
        (a, 0x100, 1, 5, PIO | MATCH | DEASSIGN, libc::ENOENT),
        (a, 0x8000, 0, 0, DEASSIGN, 0),
    ] {
        let got = ioeventfd(&g.vm, fd, addr, len, value, flags);
        assert_eq!(got, want, "{fd} {addr:#x} {len} {value} {flags:#x}");
    }
}

#[test]
fn bad_irqfds_have_their_errno() {
    let null = std::fs::File::open("/dev/null").unwrap();
    let (a, b, file) = (event(), event(), null.as_raw_fd().cast_unsigned());
    let (fd, other) = (a.as_raw_fd().cast_unsigned(), b.as_raw_fd().cast_unsigned());
    let without_chips = Guest::new(&[0xf4], false);
    let with_chips = Guest::new(&[0xf4], true);
    let call = |g: &Guest, fd, resamplefd, flags| {
        let mut args = kvm_irqfd {
            fd,
            gsi: 5,
            flags,
            resamplefd,
            ..Default::default()
        };
        ioctl(&g.vm, KVM_IRQFD, &mut args).err().unwrap_or(0)
    };
    assert_eq!(call(&without_chips, fd, 0, 0), libc::EINVAL);
    let resample = KVM_IRQFD_FLAG_RESAMPLE;
    let deassign = KVM_IRQFD_FLAG_DEASSIGN;
    for (fd, resamplefd, flags, want) in [
        (fd, 0, 4, libc::EINVAL),
        (1_000_000, 0, 0, libc::EBADF),
        (file, 0, 0, libc::EINVAL),
        (fd, 1_000_000, resample, libc::EBADF),
        (fd, file, resample, libc::EINVAL),
        (1_000_000, 0, deassign, libc::EBADF),
        (file, 0, deassign, libc::EINVAL),
        (fd, 0, deassign, 0),
        (fd, other, resample, 0),
        (fd, 0, 0, libc::EBUSY),
        (fd, 0, deassign, 0),
        (fd, 0, 0, 0),
    ] {
        let got = call(&with_chips, fd, resamplefd, flags);
        assert_eq!(got, want, "{fd} {resamplefd} {flags}");
    }
}

/// Rings ports 0x100 to 0x13f in turn, EDI times, then halts.
const RINGS_64: [u8; 16] = [
    0xba, 0x00, 0x01, // mov dx, 0x100
    0xee, // out dx, al
    0x42, // inc dx
    0x81, 0xfa, 0x40, 0x01, // cmp dx, 0x140
    0x75, 0xf8, // jne out
    0x66, 0x4f, // dec edi
    0x75, 0xf1, // jnz mov
    0xf4, // hlt
];
const BELLS: usize = 64;
const VCPUS: u64 = 4;

/// How often each vCPU rings each bell: `ANYKVM_RINGS` in all.
fn rounds() -> u64 {
    let rings = std::env::var("ANYKVM_RINGS").ok();
    let rings = rings.and_then(|n| n.parse().ok()).unwrap_or(100_000u64);
    rings.div_ceil(VCPUS * BELLS as u64)
}

/// What a removed bell has counted is all it ever counts, and a ring that finds none is an exit.
#[test]
fn every_ring_counts_while_registrations_change() {
    let rounds = rounds();
    let (vm, _ram) = guest::vm(&RINGS_64, false, 0);
    let bells: Vec<EventFd> = (0..BELLS).map(|_| event()).collect();
    let heard: Vec<AtomicU64> = (0..BELLS).map(|_| AtomicU64::new(0)).collect();
    let port = |n: usize| IoEventAddress::Pio(0x100 + n as u64);
    let take = |n: usize| heard[n].fetch_add(bells[n].read().unwrap_or(0), Ordering::Relaxed);
    for (n, bell) in bells.iter().enumerate() {
        vm.register_ioevent(bell, &port(n), NoDatamatch).unwrap();
    }
    let running = AtomicU64::new(VCPUS);
    let mut changes = 0u64;
    thread::scope(|s| {
        for id in 0..VCPUS {
            let mut vcpu = vm.create_vcpu(id).unwrap();
            start(&vcpu);
            let mut regs = vcpu.get_regs().unwrap();
            regs.rdi = rounds;
            vcpu.set_regs(&regs).unwrap();
            let (heard, running) = (&heard, &running);
            s.spawn(move || {
                loop {
                    match vcpu.run().unwrap() {
                        VcpuExit::IoOut(port, _) => {
                            heard[usize::from(port - 0x100)].fetch_add(1, Ordering::Relaxed);
                        }
                        VcpuExit::Hlt => break,
                        exit => panic!("{exit:?}"),
                    }
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        let mut random = 1u64;
        while running.load(Ordering::SeqCst) != 0 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let n = (random >> 33) as usize % BELLS;
            vm.unregister_ioevent(&bells[n], &port(n), NoDatamatch)
                .unwrap();
            take(n);
            // Nobody rings it now.
            if random & 1 << 50 != 0 {
                thread::yield_now();
            }
            assert!(bells[n].read().is_err(), "rung after it was removed");
            // Others come and go beside it.
            let beside = IoEventAddress::Mmio(0x8000 + random % 4096 * 8);
            vm.register_ioevent(&bells[n], &beside, 7u32).unwrap();
            vm.register_ioevent(&bells[n], &port(n), NoDatamatch)
                .unwrap();
            vm.unregister_ioevent(&bells[n], &beside, 7u32).unwrap();
            changes += 1;
        }
    });
    assert!(changes > 0);
    for (n, heard) in heard.iter().enumerate() {
        take(n);
        assert_eq!(heard.load(Ordering::Relaxed), rounds * VCPUS, "bell {n}");
    }
}

#[test]
fn a_full_counter_holds_nobody_up() {
    for flags in [0, EFD_NONBLOCK] {
        let code = [0xe6, 0x90, 0xe6, 0x90, 0xe6, 0x90, 0xf4];
        let mut g = Guest::new(&code, false);
        let bell = EventFd::new(flags).unwrap();
        bell.write(u64::MAX - 2).unwrap();
        g.vm.register_ioevent(&bell, &IoEventAddress::Pio(0x90), NoDatamatch)
            .unwrap();
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(bell.read().unwrap(), u64::MAX - 1);
    }
}

#[test]
fn a_doorbell_outlives_the_number_it_was_given_by() {
    let code = [0xe6, 0x90, 0xf4, 0xe6, 0x90, 0xf4];
    let mut g = Guest::new(&code, false);
    let bell = event();
    let number = bell.try_clone().unwrap();
    let port = IoEventAddress::Pio(0x90);
    g.vm.register_ioevent(&number, &port, NoDatamatch).unwrap();
    drop(number);
    // Most likely the same number.
    let other = event();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(bell.read().unwrap(), 1);
    assert!(other.read().is_err());
    let wrong = g.vm.unregister_ioevent(&other, &port, NoDatamatch);
    assert_eq!(wrong.unwrap_err().errno(), libc::ENOENT);
    g.vm.unregister_ioevent(&bell, &port, NoDatamatch).unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x90, _)));
}

/// The kernel's number of an eventfd.
fn identity(fd: i32) -> Option<String> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
    let line = info.lines().find(|l| l.starts_with("eventfd-id:"))?;
    Some(line.to_owned())
}

/// How many descriptors of it this process has.
fn descriptors(id: &str) -> usize {
    let folder = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = folder.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    numbers
        .filter(|n: &i32| identity(*n).as_deref() == Some(id))
        .count()
}

#[test]
fn nothing_is_left_of_removed_doorbells() {
    let g = Guest::new(&[0xf4], false);
    let bell = event();
    let id = identity(bell.as_raw_fd()).unwrap();
    let port = IoEventAddress::Pio(0x90);
    g.vm.register_ioevent(&bell, &port, 1u8).unwrap();
    assert_eq!(descriptors(&id), 2);
    g.vm.unregister_ioevent(&bell, &port, 1u8).unwrap();
    assert_eq!(descriptors(&id), 1);
    g.vm.register_ioevent(&bell, &port, 1u8).unwrap();
    drop(g);
    assert_eq!(descriptors(&id), 1);
}

/// Their descriptors and the VM's are closed while vCPUs ring.
#[test]
fn nothing_is_left_of_a_vm_that_is_closed_under_fire() {
    let (vm, _ram) = guest::vm(&RINGS_64, false, 0);
    let bells: Vec<EventFd> = (0..BELLS).map(|_| event()).collect();
    let ids: Vec<String> = bells
        .iter()
        .map(|bell| identity(bell.as_raw_fd()).unwrap())
        .collect();
    for (n, bell) in bells.iter().enumerate() {
        vm.register_ioevent(bell, &IoEventAddress::Pio(0x100 + n as u64), NoDatamatch)
            .unwrap();
    }
    let started = AtomicU64::new(0);
    thread::scope(|s| {
        for id in 0..VCPUS {
            let mut vcpu = vm.create_vcpu(id).unwrap();
            start(&vcpu);
            let mut regs = vcpu.get_regs().unwrap();
            regs.rdi = 2_000;
            vcpu.set_regs(&regs).unwrap();
            let started = &started;
            s.spawn(move || {
                started.fetch_add(1, Ordering::SeqCst);
                let exit = vcpu.run().unwrap();
                assert!(matches!(exit, VcpuExit::Hlt), "{exit:?}");
            });
        }
        while started.load(Ordering::SeqCst) != VCPUS {
            thread::yield_now();
        }
        drop(bells);
        drop(vm);
    });
    for id in ids {
        assert_eq!(descriptors(&id), 0, "{id}");
    }
}

#[test]
fn an_irqfd_ends_with_its_eventfd() {
    let g = Guest::new(&[0xf4], true);
    let fd = event();
    let id = identity(fd.as_raw_fd()).unwrap();
    g.vm.register_irqfd(&fd, 5).unwrap();
    drop(fd);
    let begin = Instant::now();
    while descriptors(&id) != 0 {
        assert!(begin.elapsed() < Duration::from_secs(10), "kept open");
        thread::sleep(Duration::from_millis(50));
    }
    let next = event();
    g.vm.register_irqfd(&next, 5).unwrap();
}

#[test]
fn functions_hear_values_until_they_are_dropped() {
    let code = [
        0xb0, 0x05, // mov al, 5
        0xe6, 0x90, // out 0x90, al
        0xb0, 0x07, // mov al, 7
        0xe6, 0x90, // out 0x90, al
        0xc6, 0x06, 0x00, 0x80, 0x09, // mov byte [0x8000], 9
        0xf4, // hlt
        0xe6, 0x90, // out 0x90, al
        0xf4,
    ];
    let mut g = Guest::new(&code, false);
    let sum = Arc::new(AtomicU64::new(0));
    let place = |space, address, datamatch| DoorbellSpec {
        space,
        address,
        len: 1,
        datamatch,
    };
    let adds = |factor: u64| {
        let sum = Arc::clone(&sum);
        move |value| _ = sum.fetch_add(factor * value, Ordering::Relaxed)
    };
    let port = place(Space::Pio, 0x90, None);
    let doorbell = g.vm.subscribe(port, adds(1)).unwrap();
    let twice = g.vm.subscribe(place(Space::Pio, 0x90, Some(1)), adds(1));
    assert_eq!(twice.unwrap_err().errno(), libc::EEXIST);
    let wrong = DoorbellSpec { len: 3, ..port };
    let wrong = g.vm.subscribe(wrong, adds(1)).unwrap_err();
    assert_eq!(wrong.errno(), libc::EINVAL);
    let queue = Arc::new(DoorbellQueue::new());
    let mmio = place(Space::Mmio, 0x8000, Some(9));
    let _mmio = g.vm.subscribe(mmio, queue.ringer(4)).unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(sum.load(Ordering::Relaxed), 12);
    assert_eq!(queue.wait(None), 1 << 4);
    drop(doorbell);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x90, _)));
    assert_eq!(sum.load(Ordering::Relaxed), 12);
}

/// VMCALL with the registers as they are, HLT, and again.
fn hypercalls() -> Guest {
    let g = Guest::new(&[0x0f, 0x01, 0xc1, 0xf4, 0xeb, 0xfa], false);
    let mut s = g.vcpu.get_sregs().unwrap();
    s.cr0 |= 1;
    g.vcpu.set_sregs(&s).unwrap();
    g
}

#[test]
fn a_hypercall_rings_as_a_write_does() {
    const DOORBELL: u64 = 0x616b_0001;
    let mut g = hypercalls();
    let (port, memory) = (event(), event());
    g.vm.register_ioevent(&port, &IoEventAddress::Pio(0x90), 5u16)
        .unwrap();
    g.vm.register_ioevent(&memory, &IoEventAddress::Mmio(0x8000), NoDatamatch)
        .unwrap();
    let error = |n: u64| n.wrapping_neg() & 0xffff_ffff;
    for (address, place, value, want) in [
        (0, 0, 0, 0),                       // asks whether it is there
        (0x90, 2 << 8 | 1, 5, 0),           // rings
        (0x90, 2 << 8 | 1, 0x1_0005, 0),    // the low bytes count
        (0x90, 2 << 8 | 1, 6, error(2)),    // another value
        (0x90, 1 << 8 | 1, 5, error(2)),    // another length
        (0x8000, 8 << 8, 0, 0),             // any length, any value
        (0x8001, 8 << 8, 0, error(2)),      // nothing there
        (0x8000, 3 << 8, 0, error(22)),     // no length
        (0x8000, 4 << 8 | 2, 0, error(22)), // no space
    ] {
        let mut regs = g.vcpu.get_regs().unwrap();
        (regs.rax, regs.rbx, regs.rcx, regs.rdx) = (DOORBELL, address, place, value);
        g.vcpu.set_regs(&regs).unwrap();
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
        let rax = g.vcpu.get_regs().unwrap().rax;
        assert_eq!(rax, want, "{address:#x} {place:#x} {value:#x}");
    }
    assert_eq!(port.read().unwrap(), 2);
    assert_eq!(memory.read().unwrap(), 1);
}

/// As in `guests.rs`: PICs set up, port 0x81 written, interrupts on, HLT in a loop; IRQ 1's handler
/// writes to port 0x80. An edge from before would be lost with the PICs' first command.
fn waits_for_irq1() -> Guest {
    let code = [
        0xb0, 0x11, 0xe6, 0x20, 0xb0, 0x20, 0xe6, 0x21, 0xb0, 0x04, 0xe6, 0x21, 0xb0, 0x01, 0xe6,
        0x21, 0xb0, 0xfd, 0xe6, 0x21, 0xe6, 0x81, 0xfb, 0xf4, 0xeb, 0xfd,
    ];
    let mut g = Guest::new(&code, true);
    g.ram
        .write(0x800, &[0xe6, 0x80, 0xb0, 0x20, 0xe6, 0x20, 0xcf]);
    let ivt = Box::leak(Box::new(Ram::new(RAM as usize)));
    ivt.write(0x21 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(&g.vm, 1, 0, ivt, 0);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x81, _)));
    g
}

#[test]
fn a_trigger_wakes_a_halted_guest() {
    let mut g = waits_for_irq1();
    let irq = g.vm.irq_trigger(1).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    thread::scope(|s| {
        s.spawn(move || {
            irq.trigger();
            while told.recv().is_ok() {
                irq.trigger();
            }
        });
        for _ in 0..100 {
            assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
            tell.send(()).unwrap();
        }
        drop(tell);
    });
    let none = Guest::new(&[0xf4], false).vm.irq_trigger(1);
    assert_eq!(none.unwrap_err().errno(), libc::EINVAL);
}

/// Each signal is an interrupt, while the routing table is replaced all the time and other irqfds
/// come and go.
#[test]
fn irqfds_deliver_while_routes_change() {
    const INTERRUPTS: u32 = 500;
    let mut g = waits_for_irq1();
    let fd = event();
    g.vm.register_irqfd(&fd, 1).unwrap();
    let is_over = AtomicBool::new(false);
    let vm = &g.vm;
    let vcpu = &mut g.vcpu;
    thread::scope(|s| {
        s.spawn(|| {
            let route = |gsi, pin| {
                let mut entry = kvm_irq_routing_entry {
                    gsi,
                    type_: KVM_IRQ_ROUTING_IRQCHIP,
                    ..Default::default()
                };
                entry.u.irqchip.irqchip = KVM_IRQCHIP_PIC_MASTER;
                entry.u.irqchip.pin = pin;
                entry
            };
            let tables = [vec![route(1, 1)], vec![route(1, 1), route(7, 7)]];
            let other = event();
            while !is_over.load(Ordering::Relaxed) {
                for table in &tables {
                    let table = KvmIrqRouting::from_entries(table).unwrap();
                    vm.set_gsi_routing(&table).unwrap();
                }
                vm.register_irqfd(&other, 6).unwrap();
                vm.unregister_irqfd(&other, 6).unwrap();
            }
        });
        for _ in 0..INTERRUPTS {
            fd.write(1).unwrap();
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(fd.read().is_err(), "taken");
}
