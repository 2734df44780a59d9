//! Tiny guests: exits and their answers, interrupts, doorbells, dirty pages, signals
//! (KVM API document).

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{
    Cap, IoEventAddress, Kvm, NoDatamatch, SyncReg, VcpuExit, interrupt_current_thread,
};
use guest::{Guest, RAM, RAM_END, Ram, add_slot, ioctl, start, vm};
use kvm_abi::numbers::*;
use kvm_bindings::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// `jmp $`.
const FOREVER: &[u8] = &[0xeb, 0xfe];

/// The errno with which KVM_RUN fails.
fn errno(g: &mut Guest) -> i32 {
    match g.vcpu.run() {
        Err(e) => e.errno(),
        Ok(exit) => panic!("{exit:?}"),
    }
}

#[test]
fn ports_memory_and_halt() {
    let mut g = Guest::new(
        &[
            0xb0, 0x41, // mov al, 'A'
            0xba, 0xf8, 0x03, // mov dx, 0x3f8
            0xee, // out dx, al
            0xe5, 0x60, // in ax, 0x60
            0xa3, 0x00, 0x80, // mov [0x8000], ax
            0x66, 0xa1, 0x10, 0x80, // mov eax, [0x8010]
            0x66, 0xa3, 0x00, 0x20, // mov [0x2000], eax
            0xf4, // hlt
        ],
        false,
    );
    match g.vcpu.run().unwrap() {
        VcpuExit::IoOut(0x3f8, data) => assert_eq!(data, b"A"),
        exit => panic!("{exit:?}"),
    }
    match g.vcpu.run().unwrap() {
        VcpuExit::IoIn(0x60, data) => data.copy_from_slice(&[0x34, 0x12]),
        exit => panic!("{exit:?}"),
    }
    match g.vcpu.run().unwrap() {
        VcpuExit::MmioWrite(0x8000, data) => assert_eq!(data, [0x34, 0x12]),
        exit => panic!("{exit:?}"),
    }
    match g.vcpu.run().unwrap() {
        VcpuExit::MmioRead(0x8010, data) => data.copy_from_slice(&[1, 2, 3, 4]),
        exit => panic!("{exit:?}"),
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.ram.read(0x2000 - RAM), [1, 2, 3, 4]);
    assert_eq!(g.vcpu.get_regs().unwrap().rip, RAM + 20);
}

#[test]
fn string_io_exits_for_each_element() {
    let mut g = Guest::new(
        &[
            0xb9, 0x03, 0x00, // mov cx, 3
            0xbe, 0x00, 0x30, // mov si, 0x3000
            0xba, 0x80, 0x00, // mov dx, 0x80
            0xf3, 0x6f, // rep outsw
            0xf4,
        ],
        false,
    );
    g.ram.write(0x3000 - RAM, &[1, 2, 3, 4, 5, 6]);
    let mut seen = Vec::new();
    loop {
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x80, data) => seen.extend_from_slice(data),
            VcpuExit::Hlt => break,
            exit => panic!("{exit:?}"),
        }
    }
    assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
    assert_eq!(g.vcpu.get_regs().unwrap().rcx, 0);
}

/// INS asks for what is left of the page, OUTS for each element.
#[test]
fn a_repeated_input_is_one_exit_for_each_page() {
    let mut g = Guest::new(
        &[
            0xb9, 0x05, 0x00, // mov cx, 5
            0xbf, 0xfc, 0x2f, // mov di, 0x2ffc
            0xba, 0x80, 0x00, // mov dx, 0x80
            0xf3, 0x6d, // rep insw
            0xf4,
        ],
        false,
    );
    let mut next = 0;
    for len in [4, 6] {
        match g.vcpu.run().unwrap() {
            VcpuExit::IoIn(0x80, data) => {
                assert_eq!(data.len(), len);
                for byte in data {
                    next += 1;
                    *byte = next;
                }
            }
            exit => panic!("{exit:?}"),
        }
        // Nothing of it is in memory before the answer is taken.
        let regs = g.vcpu.get_regs().unwrap();
        assert_eq!(regs.rip, RAM + 9);
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    let regs = g.vcpu.get_regs().unwrap();
    assert_eq!((regs.rcx as u16, regs.rdi as u16), (0, 0x3006));
    let got: [u8; 10] = g.ram.read(0x2ffc - RAM);
    assert_eq!(got, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    // Backwards each element is below the one before.
    let code = [
        0xfd, 0xb9, 0x02, 0x00, 0xbf, 0x02, 0x30, 0xba, 0x80, 0x00, 0xf3, 0x6d, 0xf4,
    ];
    let mut g = Guest::new(&code, false);
    match g.vcpu.run().unwrap() {
        VcpuExit::IoIn(0x80, data) => data[..2].copy_from_slice(&[1, 2]),
        exit => panic!("{exit:?}"),
    }
    match g.vcpu.run().unwrap() {
        VcpuExit::IoIn(0x80, data) => data[..2].copy_from_slice(&[3, 4]),
        exit => panic!("{exit:?}"),
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.ram.read::<4>(0x3000 - RAM), [3, 4, 1, 2]);
}

/// An access across the end of RAM: its parts go where they belong, each once.
#[test]
fn accesses_across_ram_and_device() {
    let at = (RAM_END - 2) as u16;
    let [lo, hi] = at.to_le_bytes();
    let mut g = Guest::new(
        &[
            0x66, 0xb8, 0x44, 0x33, 0x22, 0x11, // mov eax, 0x11223344
            0x66, 0xa3, lo, hi, // mov [at], eax
            0x66, 0x8b, 0x1e, lo, hi, // mov ebx, [at]
            0x66, 0x01, 0x06, lo, hi, // add [at], eax
            0xf4,
        ],
        false,
    );
    match g.vcpu.run().unwrap() {
        VcpuExit::MmioWrite(gpa, data) => assert_eq!((gpa, data), (RAM_END, &[0x22, 0x11][..])),
        exit => panic!("{exit:?}"),
    }
    for _ in 0..2 {
        // The load, then the read of the addition.
        match g.vcpu.run().unwrap() {
            VcpuExit::MmioRead(gpa, data) => {
                assert_eq!((gpa, data.len()), (RAM_END, 2));
                data.copy_from_slice(&[0x66, 0x55]);
            }
            exit => panic!("{exit:?}"),
        }
    }
    assert_eq!(g.vcpu.get_regs().unwrap().rbx, 0x5566_3344);
    match g.vcpu.run().unwrap() {
        VcpuExit::MmioWrite(gpa, data) => assert_eq!((gpa, data), (RAM_END, &[0x88, 0x66][..])),
        exit => panic!("{exit:?}"),
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.ram.read(RAM_END - 2 - RAM), [0x88, 0x66]);
}

#[test]
fn a_write_to_read_only_memory_is_mmio() {
    let code = [0xc6, 0x06, 0x00, 0x60, 0x07, 0xa0, 0x01, 0x60, 0xf4];
    let mut g = Guest::new(&code, false);
    let rom = Ram::new(0x1000);
    rom.write(1, &[0x77]);
    add_slot(&g.vm, 1, 0x6000, &rom, KVM_MEM_READONLY);
    match g.vcpu.run().unwrap() {
        VcpuExit::MmioWrite(0x6000, data) => assert_eq!(data, [7]),
        exit => panic!("{exit:?}"),
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.vcpu.get_regs().unwrap().rax as u8, 0x77);
    assert_eq!(rom.read(0), [0]);
}

#[test]
fn dirty_pages_are_reported_once() {
    let (vm, ram) = vm(
        &[
            0xc6, 0x06, 0x10, 0x30, 0x01, // mov byte [0x3010], 1
            0xf4, // hlt
            0xc6, 0x06, 0x10, 0x40, 0x01, // mov byte [0x4010], 1
            0xf4,
        ],
        false,
        KVM_MEM_LOG_DIRTY_PAGES,
    );
    let vcpu = vm.create_vcpu(0).unwrap();
    start(&vcpu);
    let mut g = Guest { vcpu, vm, ram };
    let log = |g: &Guest| g.vm.get_dirty_log(0, (RAM_END - RAM) as usize).unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    // With the page of the code, as KVM maps it writable when the guest comes there.
    assert_eq!(log(&g), [1 << 2 | 1]);
    assert_eq!(log(&g), [0]);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(log(&g), [1 << 3]);
}

#[test]
fn doorbells() {
    let mut g = Guest::new(
        &[
            0xb0, 0x05, // mov al, 5
            0xe6, 0x90, // out 0x90, al: any value rings
            0xe6, 0x91, // out 0x91, al: 5 rings
            0xfe, 0xc0, // inc al
            0xe6, 0x91, // out 0x91, al: 6 does not
            0x66, 0xa3, 0x00, 0x80, // mov [0x8000], eax: rings
            0x66, 0xa1, 0x00, 0x80, // mov eax, [0x8000]: reads are the VMM's
            0xf4,
        ],
        false,
    );
    let bell = || EventFd::new(EFD_NONBLOCK).unwrap();
    let (any, five, mmio) = (bell(), bell(), bell());
    let vm = &g.vm;
    vm.register_ioevent(&any, &IoEventAddress::Pio(0x90), NoDatamatch)
        .unwrap();
    vm.register_ioevent(&five, &IoEventAddress::Pio(0x91), 5u8)
        .unwrap();
    vm.register_ioevent(&mmio, &IoEventAddress::Mmio(0x8000), NoDatamatch)
        .unwrap();
    let twice = vm.register_ioevent(&any, &IoEventAddress::Pio(0x90), NoDatamatch);
    assert_eq!(twice.unwrap_err().errno(), libc::EEXIST);
    match g.vcpu.run().unwrap() {
        VcpuExit::IoOut(0x91, data) => assert_eq!(data, [6]),
        exit => panic!("{exit:?}"),
    }
    assert!(matches!(
        g.vcpu.run().unwrap(),
        VcpuExit::MmioRead(0x8000, _)
    ));
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    for event in [&any, &five, &mmio] {
        assert_eq!(event.read().unwrap(), 1);
    }
    let vm = &g.vm;
    vm.unregister_ioevent(&any, &IoEventAddress::Pio(0x90), NoDatamatch)
        .unwrap();
    let gone = vm.unregister_ioevent(&any, &IoEventAddress::Pio(0x90), NoDatamatch);
    assert_eq!(gone.unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn coalesced_writes_wait_in_the_ring() {
    let mut g = Guest::new(
        &[
            0xb0, 0x07, // mov al, 7
            0xe6, 0x70, // out 0x70, al
            0xc6, 0x06, 0x08, 0x80, 0x09, // mov byte [0x8008], 9
            0xe6, 0x71, // out 0x71, al: not in the zone
            0xe6, 0x70, // out 0x70, al
            0xf4,
        ],
        false,
    );
    let vm = &g.vm;
    vm.register_coalesced_mmio(IoEventAddress::Mmio(0x8000), 0x100)
        .unwrap();
    vm.register_coalesced_mmio(IoEventAddress::Pio(0x70), 1)
        .unwrap();
    // A later vCPU sees the same ring.
    let mut other = vm.create_vcpu(1).unwrap();
    other.map_coalesced_mmio_ring().unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x71, _)));
    let mut seen = Vec::new();
    while let Some(entry) = other.coalesced_mmio_read().unwrap() {
        // SAFETY: both members of the union are 32-bit integers.
        let pio = unsafe { entry.__bindgen_anon_1.pio };
        seen.push((pio, entry.phys_addr, entry.len, entry.data[0]));
    }
    assert_eq!(seen, [(1, 0x70, 1, 7), (0, 0x8008, 1, 9)]);
    g.vm.unregister_coalesced_mmio(IoEventAddress::Pio(0x70), 1)
        .unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x70, _)));
}

/// Programs both PICs for vectors 0x20 and 0x28, enables interrupts and halts; IRQ 1's
/// handler says so on port 0x80.
fn waits_for_irq1() -> Guest {
    let code = [
        0xb0, 0x11, 0xe6, 0x20, // ICW1
        0xb0, 0x20, 0xe6, 0x21, // ICW2
        0xb0, 0x04, 0xe6, 0x21, // ICW3
        0xb0, 0x01, 0xe6, 0x21, // ICW4
        0xb0, 0xfd, 0xe6, 0x21, // only IRQ 1
        0xfb, // sti
        0xf4, // hlt
        0xeb, 0xfd, // jmp hlt
    ];
    let g = Guest::new(&code, true);
    // Handler: out 0x80, al; EOI; iret.
    g.ram
        .write(0x800, &[0xe6, 0x80, 0xb0, 0x20, 0xe6, 0x20, 0xcf]);
    let ivt = Box::leak(Box::new(Ram::new(0x1000)));
    ivt.write(0x21 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(&g.vm, 1, 0, ivt, 0);
    g
}

#[test]
fn an_irqfd_wakes_a_halted_guest() {
    let mut g = waits_for_irq1();
    let fd = EventFd::new(EFD_NONBLOCK).unwrap();
    g.vm.register_irqfd(&fd, 1).unwrap();
    let busy = g.vm.register_irqfd(&fd, 2);
    assert_eq!(busy.unwrap_err().errno(), libc::EBUSY);
    let ringer = thread::spawn(move || {
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(20));
            fd.write(1).unwrap();
        }
    });
    for _ in 0..3 {
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    }
    ringer.join().unwrap();
}

#[test]
fn an_irqfd_is_its_counter_not_its_number() {
    let g = waits_for_irq1();
    let fd = EventFd::new(EFD_NONBLOCK).unwrap();
    g.vm.register_irqfd(&fd, 1).unwrap();
    // Another number of the same counter.
    let other = fd.try_clone().unwrap();
    let busy = g.vm.register_irqfd(&other, 2);
    assert_eq!(busy.unwrap_err().errno(), libc::EBUSY);
    g.vm.unregister_irqfd(&other, 1).unwrap();
    g.vm.register_irqfd(&fd, 1).unwrap();
    // The number is free again, and the next eventfd most likely gets it.
    drop(fd);
    let next = EventFd::new(EFD_NONBLOCK).unwrap();
    g.vm.register_irqfd(&next, 1).unwrap();
}

#[test]
fn a_line_interrupts_a_busy_guest() {
    let mut g = waits_for_irq1();
    // `jmp $` instead of HLT.
    g.ram.write(21, FOREVER);
    let vm = &g.vm;
    thread::scope(|s| {
        s.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            vm.set_irq_line(1, true).unwrap();
            vm.set_irq_line(1, false).unwrap();
        });
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    });
}

#[test]
fn immediate_exit_completes_the_previous_exit() {
    let mut g = Guest::new(&[0xe4, 0x60, 0xeb, 0xfe], false);
    match g.vcpu.run().unwrap() {
        VcpuExit::IoIn(0x60, data) => data[0] = 0x5a,
        exit => panic!("{exit:?}"),
    }
    g.vcpu.set_kvm_immediate_exit(1);
    assert_eq!(errno(&mut g), libc::EINTR);
    // The reason of the exit that was completed stays, as with KVM.
    assert_eq!(g.vcpu.get_kvm_run().exit_reason, KVM_EXIT_IO);
    let regs = g.vcpu.get_regs().unwrap();
    assert_eq!((regs.rax as u8, regs.rip), (0x5a, RAM + 2));
}

#[test]
fn immediate_exit_stops_a_busy_guest() {
    let mut g = Guest::new(FOREVER, false);
    let run = std::ptr::from_mut(g.vcpu.get_kvm_run()) as usize;
    let stopper = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        // SAFETY: the run page lives until the thread is joined; one byte.
        unsafe { (*(run as *mut kvm_run)).immediate_exit = 1 };
    });
    let begin = Instant::now();
    assert_eq!(errno(&mut g), libc::EINTR);
    assert!(begin.elapsed() >= Duration::from_millis(25));
    stopper.join().unwrap();
}

#[test]
fn a_kick_ends_computing_and_halting() {
    for (code, irqchip) in [(FOREVER, false), (&[0xf4][..], true)] {
        let mut g = Guest::new(code, irqchip);
        let kicker = g.vcpu.stopper().unwrap();
        let other = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            kicker.kick();
        });
        assert_eq!(errno(&mut g), libc::EINTR);
        other.join().unwrap();
    }
}

static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn handler(_: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
    interrupt_current_thread();
}

extern "C" fn silent(_: libc::c_int) {}

fn install(signal: i32, handler: extern "C" fn(i32), flags: i32) {
    // SAFETY: the handlers are async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
    }
}

/// Sends `signal` to the calling thread in a while.
fn signal_me(signal: i32) -> thread::JoinHandle<()> {
    // SAFETY: the calling thread outlives the sender, which it joins.
    let me = unsafe { libc::pthread_self() } as usize;
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        // SAFETY: the thread is alive: it joins this one.
        unsafe { libc::pthread_kill(me as libc::pthread_t, signal) };
    })
}

#[test]
fn a_handler_that_says_so_ends_computing() {
    let signal = libc::SIGRTMIN() + 1;
    install(signal, handler, libc::SA_RESTART);
    let mut g = Guest::new(FOREVER, false);
    let sender = signal_me(signal);
    assert_eq!(errno(&mut g), libc::EINTR);
    assert_eq!(HANDLED.load(Ordering::SeqCst), 1);
    sender.join().unwrap();
    // Outside KVM_RUN it does nothing.
    interrupt_current_thread();
    g.ram.write(0, &[0xf4]);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn any_handler_ends_halting() {
    let signal = libc::SIGRTMIN() + 2;
    install(signal, silent, libc::SA_RESTART);
    let mut g = Guest::new(&[0xf4], true);
    let sender = signal_me(signal);
    assert_eq!(errno(&mut g), libc::EINTR);
    sender.join().unwrap();
}

#[test]
fn a_signal_mask_lets_pending_signals_end_kvm_run() {
    let signal = libc::SIGRTMIN() + 3;
    // SAFETY: only this thread's mask changes.
    let set = unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        set
    };
    #[repr(C, packed)]
    struct Mask {
        len: u32,
        set: u64,
    }
    for (code, irqchip) in [(FOREVER, false), (&[0xf4][..], true)] {
        let mut g = Guest::new(code, irqchip);
        let mut wrong = Mask { len: 4, set: 0 };
        let refused = ioctl(&g.vcpu, KVM_SET_SIGNAL_MASK, &mut wrong);
        assert_eq!(refused, Err(libc::EINVAL));
        let mut mask = Mask { len: 8, set: 0 };
        ioctl(&g.vcpu, KVM_SET_SIGNAL_MASK, &mut mask).unwrap();
        let sender = signal_me(signal);
        assert_eq!(errno(&mut g), libc::EINTR);
        sender.join().unwrap();
        // Still pending: the next KVM_RUN fails at once, until the VMM takes the signal.
        assert_eq!(errno(&mut g), libc::EINTR);
        // SAFETY: a set made by libc; no information is asked for.
        let taken = unsafe { libc::sigwaitinfo(&set, std::ptr::null_mut()) };
        assert_eq!(taken, signal);
        let fd = g.vcpu.as_raw_fd();
        assert_eq!(kvm_abi::ioctl(fd, KVM_SET_SIGNAL_MASK, 0), Ok(0));
    }
}

/// SMM: the handler at SMBASE + 0x8000 says so on a port, and RSM goes back.
#[test]
fn system_management_mode() {
    for irqchip in [false, true] {
        // out 0x80, al; hlt; out 0x81, al; hlt
        let mut g = Guest::new(&[0xe6, 0x80, 0xf4, 0xe6, 0x81, 0xf4], irqchip);
        let smram = Ram::new(0x10000);
        add_slot(&g.vm, 1, 0x30000, &smram, 0);
        // The same RAM in the address space of SMM.
        add_slot(&g.vm, 1 << 16, 0x30000, &smram, 0);
        // mov al, 0x66; out 0x82, al; rsm
        smram.write(0x8000, &[0xb0, 0x66, 0xe6, 0x82, 0x0f, 0xaa]);
        let mut regs = g.vcpu.get_regs().unwrap();
        regs.rax = 0x11;
        g.vcpu.set_regs(&regs).unwrap();
        assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
        g.vcpu.smi().unwrap();
        let flags = |g: &mut Guest| u32::from(g.vcpu.get_kvm_run().flags);
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x82, data) => assert_eq!(data, [0x66]),
            exit => panic!("{exit:?}"),
        }
        assert_eq!(flags(&mut g) & KVM_RUN_X86_SMM, KVM_RUN_X86_SMM);
        assert_eq!(g.vcpu.get_vcpu_events().unwrap().smi.smm, 1);
        if irqchip {
            // HLT waits inside: another SMI gets the guest out, whatever IF is.
            let kicker = thread::scope(|s| {
                let vcpu = &mut g.vcpu;
                let k = vcpu.stopper().unwrap();
                s.spawn(move || {
                    thread::sleep(Duration::from_millis(20));
                    k.kick();
                });
                vcpu.run().map(|exit| format!("{exit:?}")).unwrap_err()
            });
            assert_eq!(kicker.errno(), libc::EINTR);
            g.vcpu.smi().unwrap();
            assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x82, _)));
        } else {
            assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
            assert_eq!(flags(&mut g) & KVM_RUN_X86_SMM, 0);
        }
        match g.vcpu.run().unwrap() {
            VcpuExit::IoOut(0x81, data) => assert_eq!(data, [0x11], "RSM restores AL"),
            exit => panic!("{exit:?}"),
        }
        assert_eq!(g.vcpu.get_vcpu_events().unwrap().smi.smm, 0);
    }
}

#[test]
fn a_machine_check_is_an_exception_or_a_shutdown() {
    for cr4_mce in [true, false] {
        let mut g = Guest::new(FOREVER, false);
        let ivt = Ram::new(0x1000);
        ivt.write(18 * 4, &[0x00, 0x18, 0, 0]);
        add_slot(&g.vm, 1, 0, &ivt, 0);
        g.ram.write(0x800, &[0xe6, 0x80]);
        let kvm = Kvm::new().unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        g.vcpu.set_cpuid2(&cpuid).unwrap();
        let mut sregs = g.vcpu.get_sregs().unwrap();
        sregs.cr4 = u64::from(cr4_mce) << 6;
        g.vcpu.set_sregs(&sregs).unwrap();
        let mut cap = 1u64 << 8 | 4;
        ioctl(&g.vcpu, KVM_X86_SETUP_MCE, &mut cap).unwrap();
        let mut mce = kvm_x86_mce {
            status: 1 << 63 | 1 << 61 | 0x17,
            mcg_status: 5,
            addr: 0x1234,
            bank: 1,
            ..Default::default()
        };
        ioctl(&g.vcpu, KVM_X86_SET_MCE, &mut mce).unwrap();
        match (cr4_mce, g.vcpu.run().unwrap()) {
            (true, VcpuExit::IoOut(0x80, _)) | (false, VcpuExit::Shutdown) => {}
            (_, exit) => panic!("{exit:?}"),
        }
    }
}

/// Without in-kernel chips the VMM injects, when it sees the window open.
#[test]
fn an_interrupt_window() {
    // nop; sti; nop; jmp $
    let mut g = Guest::new(&[0x90, 0xfb, 0x90, 0xeb, 0xfe], false);
    let ivt = Ram::new(0x1000);
    ivt.write(0x21 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(&g.vm, 1, 0, &ivt, 0);
    g.ram.write(0x800, &[0xe6, 0x80, 0xcf]);
    g.vcpu.get_kvm_run().request_interrupt_window = 1;
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IrqWindowOpen));
    let run = g.vcpu.get_kvm_run();
    assert_eq!((run.ready_for_interrupt_injection, run.if_flag), (1, 1));
    run.request_interrupt_window = 0;
    assert!(
        g.vcpu.get_regs().unwrap().rip >= RAM + 3,
        "after STI's shadow"
    );
    // A second one replaces the first.
    for irq in [0x77, 0x21] {
        ioctl(&g.vcpu, KVM_INTERRUPT, &mut kvm_interrupt { irq }).unwrap();
    }
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
    let run = g.vcpu.get_kvm_run();
    assert_eq!((run.ready_for_interrupt_injection, run.if_flag), (0, 0));
}

/// Lowering CR8 is an exit where the VMM has the LAPIC.
#[test]
fn a_lower_task_priority_is_an_exit() {
    let mut g = Guest::new(
        &[
            0xb8, 5, 0, 0, 0, // mov eax, 5
            0x44, 0x0f, 0x22, 0xc0, // mov cr8, rax
            0xb8, 3, 0, 0, 0, // mov eax, 3
            0x44, 0x0f, 0x22, 0xc0, // mov cr8, rax
            0xe6, 0x80, // out 0x80, al
        ],
        false,
    );
    let kvm = Kvm::new().unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    g.vcpu.set_cpuid2(&cpuid).unwrap();
    for (at, entry) in [(0x2000, 0x3003_u64), (0x3000, 0x4003), (0x4000, 0x83)] {
        g.ram.write(at - RAM, &entry.to_le_bytes());
    }
    let mut s = g.vcpu.get_sregs().unwrap();
    (s.cr0, s.cr3, s.cr4, s.efer) = (0x8000_0011, 0x2000, 0x20, 0x500);
    (s.cs.l, s.cs.db) = (1, 0);
    g.vcpu.set_sregs(&s).unwrap();
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::SetTpr));
    assert_eq!(g.vcpu.get_kvm_run().cr8, 3);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::IoOut(0x80, _)));
}

#[test]
fn single_steps_end_with_their_instruction() {
    // nop; out 0x80, al; nop; hlt
    let mut g = Guest::new(&[0x90, 0xe6, 0x80, 0x90, 0xf4], false);
    assert_eq!(g.vm.check_extension_int(Cap::SetGuestDebug), 1);
    g.vcpu
        .set_guest_debug(&kvm_guest_debug {
            control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
            ..Default::default()
        })
        .unwrap();
    let mut seen = Vec::new();
    loop {
        match g.vcpu.run().unwrap() {
            VcpuExit::Debug(debug) => {
                assert_eq!((debug.exception, debug.dr6 >> 14 & 1), (1, 1));
                seen.push(debug.pc - RAM);
            }
            VcpuExit::IoOut(0x80, _) => seen.push(100),
            VcpuExit::Hlt => break,
            exit => panic!("{exit:?}"),
        }
    }
    assert_eq!(seen, [1, 100, 3, 4]);
}

#[test]
fn software_breakpoints_are_the_debuggers() {
    // int3; hlt
    let mut g = Guest::new(&[0xcc, 0xf4], false);
    g.vcpu
        .set_guest_debug(&kvm_guest_debug {
            control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP,
            ..Default::default()
        })
        .unwrap();
    match g.vcpu.run().unwrap() {
        VcpuExit::Debug(debug) => assert_eq!((debug.exception, debug.pc), (3, RAM)),
        exit => panic!("{exit:?}"),
    }
    // The debugger puts the instruction back and goes on.
    g.ram.write(0, &[0x90]);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
}

#[test]
fn registers_in_the_run_page() {
    let mut g = Guest::new(&[0xf4, 0xf4], false);
    assert_eq!(g.vm.check_extension_int(Cap::SyncRegs), 7);
    g.vcpu.set_sync_valid_reg(SyncReg::Register);
    g.vcpu.set_sync_valid_reg(SyncReg::SystemRegister);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(g.vcpu.sync_regs().regs.rip, RAM + 1);
    assert_eq!(g.vcpu.sync_regs().sregs, g.vcpu.get_sregs().unwrap());
    g.vcpu.sync_regs_mut().regs.rip = RAM;
    g.vcpu.sync_regs_mut().regs.rax = 77;
    g.vcpu.set_sync_dirty_reg(SyncReg::Register);
    assert!(matches!(g.vcpu.run().unwrap(), VcpuExit::Hlt));
    let regs = g.vcpu.get_regs().unwrap();
    assert_eq!((regs.rip, regs.rax), (RAM + 1, 77));
    // Flags that do not exist.
    g.vcpu.get_kvm_run().kvm_valid_regs = 1 << 10;
    assert_eq!(errno(&mut g), libc::EINVAL);
}
