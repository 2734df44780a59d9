//! Guests of random bytes in ring 0, with random tables and control registers: whatever they do,
//! the hypervisor neither panics nor hangs, writes nothing outside their slots, and can save and
//! restore what they have become.
//!
//! `ANYKVM_SEEDS=from..to` runs others than the fixed seeds, e.g. one that failed.

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod random;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VcpuStopper, VmFd};
use guest::Ram;
use kvm_bindings::*;
use random::Random;

const PAGE: u64 = 4096;
/// RAM of a guest, from address 0.
const PAGES: u64 = 24;
const CANARY: u64 = 0xdead_beef_0bad_f00d;
const SEEDS: u64 = 10_000;
/// KVM_RUNs of one guest.
const RUNS: u32 = 24;
/// A guest that computes is stopped this often.
const TICK: Duration = Duration::from_micros(500);

/// Beginnings of instructions that reach far; random operands follow.
const FAR_REACHING: &[&[u8]] = &[
    &[0x0f, 0x20], // mov r, cr
    &[0x0f, 0x22], // mov cr, r
    &[0x0f, 0x21],
    &[0x0f, 0x23],       // mov dr, r
    &[0x0f, 0x30],       // wrmsr
    &[0x0f, 0x32],       // rdmsr
    &[0x0f, 0x01],       // lgdt, lidt, lmsw, invlpg, swapgs, xsetbv, vmcall …
    &[0x0f, 0x01, 0xc1], // vmcall
    &[0x0f, 0x01, 0xd1], // xsetbv
    &[0x0f, 0x00],       // lldt, ltr, verr …
    &[0x0f, 0x05],       // syscall
    &[0x0f, 0x07],       // sysret
    &[0x48, 0x0f, 0x07],
    &[0x0f, 0x34],             // sysenter
    &[0x0f, 0x35],             // sysexit
    &[0x0f, 0xaa],             // rsm
    &[0x0f, 0xae],             // fxsave, xsave, clflush …
    &[0x0f, 0xc7],             // cmpxchg8b, xsavec, rdrand …
    &[0x66, 0x0f, 0x38, 0x82], // invpcid
    &[0x0f, 0xa2],             // cpuid
    &[0xcf],                   // iret
    &[0x48, 0xcf],
    &[0xcb],       // retf
    &[0xca],       // retf n
    &[0xea],       // jmp far
    &[0x9a],       // call far
    &[0xff],       // call, jmp, push through memory
    &[0xcd],       // int n
    &[0xcc],       // int3
    &[0xf1],       // int1
    &[0x8e],       // mov sreg, r/m
    &[0x17],       // pop ss
    &[0x0f, 0xa1], // pop fs
    &[0x0f, 0xb2], // lss
    &[0xfa],       // cli
    &[0xfb],       // sti
    &[0xf4],       // hlt
    &[0x9d],       // popf
    &[0xc8],       // enter
    &[0xf3, 0xa4], // rep movsb
    &[0xf3, 0xab], // rep stosd
    &[0xf2, 0xa6], // repne cmpsb
    &[0xf3, 0x6c], // rep insb
    &[0xf3, 0x6f], // rep outsd
    &[0xe4],       // in
    &[0xe7],       // out
    &[0xec],
    &[0xef],
    &[0xf0], // lock
    &[0x67],
    &[0x66],
    &[0x48],
    &[0xc4], // vex
    &[0xc5],
    &[0xdd], // x87
    &[0x62], // evex
];

/// RAM between two pages that nobody may touch.
struct Fenced {
    ram: Ram,
}

impl Fenced {
    fn new() -> Self {
        let ram = Ram::new(((PAGES + 2) * PAGE) as usize);
        for page in [0, PAGES + 1] {
            for at in (0..PAGE).step_by(8) {
                ram.write(page * PAGE + at, &CANARY.to_le_bytes());
            }
        }
        Self { ram }
    }
    fn hva(&self) -> u64 {
        self.ram.hva() + PAGE
    }
    fn write(&self, gpa: u64, bytes: &[u8]) {
        self.ram.write(PAGE + gpa, bytes);
    }
    fn write64(&self, gpa: u64, value: u64) {
        self.write(gpa, &value.to_le_bytes());
    }
    fn check(&self, seed: u64) {
        for page in [0, PAGES + 1] {
            for at in (0..PAGE).step_by(8) {
                let word = u64::from_le_bytes(self.ram.read(page * PAGE + at));
                assert_eq!(word, CANARY, "seed {seed}: page {page} offset {at:#x}");
            }
        }
    }
}

fn fill(r: &mut Random, ram: &Fenced) {
    for at in (0..PAGES * PAGE).step_by(8) {
        ram.write64(at, r.next());
    }
    // Half of the code pages: instructions that reach far between random bytes.
    for page in 8..PAGES {
        if r.one_in(3) {
            continue;
        }
        let mut at = page * PAGE;
        while at < (page + 1) * PAGE - 16 {
            let insn = r.pick(FAR_REACHING);
            ram.write(at, insn);
            at += insn.len() as u64 + r.below(6);
        }
    }
    // Descriptor tables in page 1 and 2: some entries make sense.
    for i in 0..64 {
        let kind = r.pick(&[
            0x9b_u64, 0x93, 0xfb, 0xf3, 0x8b, 0x82, 0x89, 0x8c, 0xee, 0x85,
        ]);
        let base = r.below(PAGES) * PAGE;
        let flags = r.pick(&[0xc_u64, 0xa, 0x4, 0x0, 0xe]);
        let limit = r.pick(&[0xf_ffff_u64, 0xffff, 0x67, 0]);
        let descriptor = limit & 0xffff
            | (base & 0xff_ffff) << 16
            | kind << 40
            | (limit >> 16) << 48
            | flags << 52
            | (base >> 24) << 56;
        if !r.one_in(6) {
            ram.write64(PAGE + 8 * i, descriptor);
        }
    }
    let wide = r.one_in(2);
    for i in 0..if wide { 256 } else { 512 } {
        let target = r.below(PAGES * PAGE);
        let kind = r.pick(&[0x8e_u64, 0x8f, 0xee, 0x86, 0x85, 0x8c]);
        let selector = r.below(64) << 3;
        let ist = u64::from(r.one_in(4)) * r.below(8);
        let gate = target & 0xffff | selector << 16 | ist << 32 | kind << 40 | (target >> 16) << 48;
        if !r.one_in(8) {
            let step = if wide { 16 } else { 8 };
            ram.write64(2 * PAGE + step * i, gate);
            if wide {
                ram.write64(2 * PAGE + 16 * i + 8, 0);
            }
        }
    }
    // Paging structures in pages 3 to 7: most entries are present and point at RAM.
    for page in 3..8 {
        for i in 0..512 {
            let mut entry = r.below(PAGES) << 12 | r.below(512) | 3;
            if page < 6 {
                entry = (page + 1) << 12 | 0x67;
            }
            if r.one_in(24) {
                entry = r.next();
            } else if r.one_in(16) {
                entry |= 1 << r.below(64);
            }
            ram.write64(page * PAGE + 8 * i, entry);
        }
    }
}

fn random_segment(r: &mut Random, type_: u8) -> kvm_segment {
    kvm_segment {
        base: if r.one_in(3) {
            r.next() & 0xffff_ffff
        } else {
            0
        },
        limit: if r.one_in(3) {
            r.next() as u32
        } else {
            u32::MAX
        },
        selector: r.next() as u16,
        type_,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

fn random_sregs(r: &mut Random, mut s: kvm_sregs) -> kvm_sregs {
    let long = r.one_in(2);
    s.cr0 = 0x11 | r.next() & 0x6005_002e;
    // VME and PVI are not offered.
    s.cr4 = r.next() & 0x0037_06fc;
    s.cr3 = 3 * PAGE;
    s.cr2 = r.next();
    s.cr8 = r.below(16);
    s.efer = r.next() & 0x801;
    if s.cr0 >> 29 & 3 == 1 {
        s.cr0 &= !(3 << 29);
    }
    if long {
        s.cr0 |= 1 << 31;
        s.cr4 |= 1 << 5;
        s.efer |= 0x500;
    } else {
        s.cr4 &= !(1 << 17);
        match r.below(3) {
            0 => s.cr0 &= !1,
            1 => s.cr0 |= 1 << 31,
            _ => {}
        }
    }
    s.cs = random_segment(r, 0xb);
    for seg in [&mut s.ds, &mut s.es, &mut s.fs, &mut s.gs, &mut s.ss] {
        *seg = random_segment(r, 3);
        seg.db = u8::from(r.one_in(2));
    }
    s.cs.l = u8::from(long && !r.one_in(4));
    s.cs.db = u8::from(s.cs.l == 0 && r.one_in(2));
    if s.cs.l != 0 || r.one_in(2) {
        s.cs.base = 0;
    }
    s.gdt.base = PAGE;
    s.gdt.limit = r.pick(&[0x1ff, 0xffff, 7]);
    s.idt.base = 2 * PAGE;
    s.idt.limit = r.pick(&[0xfff, 0xffff, 0x3f]);
    s.tr.base = r.below(PAGES) * PAGE;
    s.tr.limit = r.pick(&[0x67, 0xffff, 0x2b]);
    s.tr.type_ = r.pick(&[0xb, 3]);
    s.tr.present = 1;
    s.ldt.base = PAGE;
    s.ldt.limit = 0xffff;
    s
}

fn random_regs(r: &mut Random) -> kvm_regs {
    let mut value = || match r.below(4) {
        0 => r.next(),
        1 => r.below(256),
        2 => r.pick(&[0xc000_0080, 0x4b56_4d01, 0x1b, 0x830, 0x10, 0x277, 0xda0]),
        _ => r.below(PAGES * PAGE),
    };
    let mut regs = kvm_regs {
        rax: value(),
        rbx: value(),
        rcx: value(),
        rdx: value(),
        rsi: value(),
        rdi: value(),
        rbp: value(),
        r8: value(),
        r12: value(),
        r15: value(),
        ..Default::default()
    };
    regs.rsp = r.below(PAGES * PAGE);
    regs.rip = 8 * PAGE + r.below((PAGES - 8) * PAGE);
    regs.rflags = 2 | r.next() & 0x3f_7fd5;
    if !r.one_in(8) {
        // TF, NT, RF and VM are for a few.
        regs.rflags &= !0x3_4100;
    }
    regs
}

/// Gives a vCPU random registers.
fn start(r: &mut Random, vcpu: &VcpuFd, fresh: &kvm_sregs) {
    // Out of SMM, with no event on its way.
    vcpu.set_vcpu_events(&kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING
            | KVM_VCPUEVENT_VALID_SHADOW
            | KVM_VCPUEVENT_VALID_SMM,
        ..Default::default()
    })
    .unwrap();
    vcpu.set_sregs(fresh).unwrap();
    let sregs = random_sregs(r, *fresh);
    if vcpu.set_sregs(&sregs).is_err() {
        // Real mode then.
        vcpu.set_sregs(fresh).unwrap();
    }
    vcpu.set_regs(&random_regs(r)).unwrap();
    let mp_state = KVM_MP_STATE_RUNNABLE;
    vcpu.set_mp_state(kvm_mp_state { mp_state }).unwrap();
}

/// Runs a guest until it ends, is stopped, or has had enough exits.
fn run(r: &mut Random, seed: u64, vcpu: &mut VcpuFd, vm: &VmFd, irqchip: bool) {
    for _ in 0..RUNS {
        if r.one_in(4) {
            match r.below(3) {
                0 => vcpu.nmi().unwrap(),
                1 => vcpu.smi().unwrap(),
                _ if irqchip => {
                    let line = r.below(24) as u32;
                    let level = r.one_in(2);
                    vm.set_irq_line(line, level).unwrap();
                }
                _ => {}
            }
        }
        match vcpu.run() {
            Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => {
                let value = r.next().to_le_bytes();
                for (to, from) in data.iter_mut().zip(value) {
                    *to = from;
                }
            }
            Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) | VcpuExit::Hlt) => {}
            Ok(VcpuExit::Shutdown | VcpuExit::InternalError) => break,
            Ok(exit) => panic!("seed {seed}: {exit:?}"),
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => break,
            Err(e) => panic!("seed {seed}: {e}"),
        }
    }
}

/// A virtual machine that serves a few guests in turn.
struct Machine {
    ram: Fenced,
    vcpu: VcpuFd,
    vm: VmFd,
    stopper: VcpuStopper,
    irqchip: bool,
}

impl Machine {
    fn new(kvm: &Kvm, cpuid: &CpuId, irqchip: bool) -> Self {
        let vm = kvm.create_vm().unwrap();
        if irqchip {
            vm.create_irq_chip().unwrap();
            vm.create_pit2(kvm_pit_config::default()).unwrap();
        }
        let ram = Fenced::new();
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: 0,
            memory_size: PAGES * PAGE,
            userspace_addr: ram.hva(),
        };
        // SAFETY: the RAM is kept as long as the VM.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        vcpu.set_cpuid2(cpuid).unwrap();
        let stopper = vcpu.stopper().unwrap();
        Self {
            ram,
            vcpu,
            vm,
            stopper,
            irqchip,
        }
    }

    fn guest(&mut self, seed: u64, fresh: &kvm_sregs) {
        let mut r = Random(seed);
        fill(&mut r, &self.ram);
        let vcpu = &mut self.vcpu;
        start(&mut r, vcpu, fresh);
        run(&mut r, seed, vcpu, &self.vm, self.irqchip);
        self.ram.check(seed);
        // What the guest has become can be saved and restored.
        let (regs, mut sregs) = (vcpu.get_regs().unwrap(), vcpu.get_sregs().unwrap());
        if sregs.efer & 0x400 == 0 {
            // KVM shows this bit, which means nothing outside long mode, but does not take it.
            sregs.cs.l = 0;
        }
        vcpu.set_sregs(&sregs)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}: {sregs:#x?}"));
        vcpu.set_regs(&regs).unwrap();
        assert_eq!(vcpu.get_sregs().unwrap(), sregs, "seed {seed}");
        let events = vcpu.get_vcpu_events().unwrap();
        vcpu.set_vcpu_events(&events)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}: {events:?}"));
        let image = vcpu.get_xsave().unwrap();
        // SAFETY: no component lies beyond the structure.
        unsafe { vcpu.set_xsave(&image) }.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let debug = vcpu.get_debug_regs().unwrap();
        vcpu.set_debug_regs(&debug)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}: {debug:?}"));
        self.vm.get_dirty_log(0, (PAGES * PAGE) as usize).unwrap();
    }
}

fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("ANYKVM_SEEDS") else {
        return 0..SEEDS;
    };
    let (from, to) = text.split_once("..").unwrap();
    from.parse().unwrap()..to.parse().unwrap()
}

#[test]
fn ten_thousand_guests() {
    const THREADS: u64 = 2;
    thread::scope(|s| {
        for part in 0..THREADS {
            s.spawn(move || run_part(part, THREADS));
        }
    });
}

fn run_part(part: u64, parts: u64) {
    let kvm = Kvm::new().unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    // The seed that runs, for the watchdog.
    let current = Arc::new(AtomicU64::new(u64::MAX));
    let mut begin = seeds().start + part;
    while begin < seeds().end {
        // A few guests in one VM, the next ones in another.
        let mut machine = Machine::new(&kvm, &cpuid, (begin / parts).is_multiple_of(2));
        let fresh = machine.vcpu.get_sregs().unwrap();
        let stopper = machine.stopper.clone();
        current.store(begin, Ordering::Release);
        let now = Arc::clone(&current);
        let watchdog = thread::spawn(move || {
            let mut last = (u64::MAX, Instant::now());
            loop {
                thread::sleep(TICK);
                let seed = now.load(Ordering::Acquire);
                if seed == u64::MAX {
                    return;
                }
                if seed != last.0 {
                    last = (seed, Instant::now());
                }
                if last.1.elapsed() > Duration::from_secs(20) {
                    eprintln!("seed {seed} hangs");
                    std::process::abort();
                }
                stopper.kick();
            }
        });
        let end = (begin + 32 * parts).min(seeds().end);
        for seed in (begin..end).step_by(parts as usize) {
            current.store(seed, Ordering::Release);
            machine.guest(seed, &fresh);
        }
        current.store(u64::MAX, Ordering::Release);
        watchdog.join().unwrap();
        begin += 32 * parts;
    }
}

/// Two vCPUs in one guest: the same memory, code that each changes under the other, IPIs.
#[test]
fn guests_with_two_vcpus() {
    let kvm = Kvm::new().unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let seeds = if std::env::var_os("ANYKVM_SEEDS").is_some() {
        seeds()
    } else {
        0..SEEDS / 10
    };
    for seed in seeds {
        let machine = Machine::new(&kvm, &cpuid, true);
        let mut r = Random(seed ^ 0x5555_5555);
        fill(&mut r, &machine.ram);
        let (vm, ram) = (&machine.vm, &machine.ram);
        let second = vm.create_vcpu(1).unwrap();
        second.set_cpuid2(&cpuid).unwrap();
        let fresh = machine.vcpu.get_sregs().unwrap();
        let mut vcpus = [machine.vcpu, second];
        for vcpu in &vcpus {
            start(&mut r, vcpu, &fresh);
        }
        let stoppers = [vcpus[0].stopper().unwrap(), vcpus[1].stopper().unwrap()];
        let ended = AtomicU64::new(0);
        thread::scope(|s| {
            for (i, vcpu) in vcpus.iter_mut().enumerate() {
                let ended = &ended;
                s.spawn(move || {
                    let mut r = Random(seed + i as u64);
                    run(&mut r, seed, vcpu, vm, true);
                    ended.fetch_add(1, Ordering::Release);
                });
            }
            let begin = Instant::now();
            while ended.load(Ordering::Acquire) < 2 {
                thread::sleep(TICK);
                for stopper in &stoppers {
                    stopper.kick();
                }
                // Slots and dirty pages change under the running vCPUs.
                vm.get_dirty_log(0, (PAGES * PAGE) as usize).unwrap();
                if begin.elapsed() > Duration::from_secs(20) {
                    eprintln!("seed {seed} hangs");
                    std::process::abort();
                }
            }
        });
        ram.check(seed);
        // The VM ends before its memory.
        drop(vcpus);
    }
}
