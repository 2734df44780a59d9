//! 32-bit protected mode without paging: debug registers and breakpoints, and programs of virtual-8086 mode with their monitor.
//!
//! Each exception comes to a handler that leaves to the test, which looks at the frame on the guest's stack and changes it before the handler's IRETD.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod engines;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 1 << 20;
const GDT: u64 = 0x1000;
const IDT: u64 = 0x2000;
const HANDLERS: u32 = 0x3000;
const HANDLER_LEN: u32 = 16;
const TSS: u64 = 0xc000;
const CODE: u32 = 0x6000;
const DATA: u32 = 0x7000;
const STACK: u32 = 0x9000;
/// Where a program of virtual-8086 mode is, as a segment; its data; its stack.
const V86_CODE: u16 = 0x2000;
const V86_DATA: u16 = 0x3000;
const V86_STACK: u16 = 0x4000;
/// Flags.
const TF: u32 = 1 << 8;
const RF: u32 = 1 << 16;
const VM: u32 = 1 << 17;
/// The port that handlers leave by, and the one that says the end.
const PORT: u16 = 0x10;
const END: u16 = 0x11;

type Assemble = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// A breakpoint's test: its name, DR7, DR0 to DR3, and the stops: vector, EIP, DR6.
type Breakpoint = (&'static str, u64, [u32; 4], &'static [(u32, u32, u64)]);
/// A program that is stopped: its name, its code, its flags, and vector, error and IP.
type Refused = (&'static str, &'static [u8], u32, u32, u32, u32);

/// What a handler found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stop {
    vector: u32,
    error: u32,
    ip: u32,
    selector: u32,
    flags: u32,
}

struct Machine {
    memory: &'static GuestMemoryMmap<()>,
    _vm: VmFd,
    vcpu: VcpuFd,
}

impl Machine {
    fn new(code: Assemble) -> Self {
        let memory: &'static GuestMemoryMmap<()> = Box::leak(Box::new(
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap(),
        ));
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_static_memory(memory).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        let machine = Self {
            memory,
            _vm: vm,
            vcpu,
        };
        let mut a = CodeAssembler::new(32).unwrap();
        code(&mut a).unwrap();
        machine.put(CODE, &a.assemble(CODE.into()).unwrap());
        machine.set_up();
        machine
    }

    fn put(&self, at: u32, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(at.into()))
            .unwrap();
    }

    fn word(&self, at: u32) -> u32 {
        self.memory.read_obj(GuestAddress(at.into())).unwrap()
    }

    fn set_word(&self, at: u32, value: u32) {
        self.memory
            .write_obj(value, GuestAddress(at.into()))
            .unwrap();
    }

    fn set_up(&self) {
        // Null, code, data, the TSS, which is busy.
        let tss = 0x0000_8b00_c000_0000 | 0x2068;
        for (n, entry) in [0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff, tss]
            .iter()
            .enumerate()
        {
            self.memory
                .write_obj::<u64>(*entry, GuestAddress(GDT + 8 * n as u64))
                .unwrap();
        }
        for vector in 0..32u32 {
            let at = HANDLERS + vector * HANDLER_LEN;
            // Interrupt gates; a program may ask for #BP and #OF itself.
            let dpl = if matches!(vector, 3 | 4) { 3 } else { 0 };
            let gate = u64::from(at & 0xffff) | 8 << 16 | (0x8e | dpl << 5) << 40;
            self.memory
                .write_obj(gate, GuestAddress(IDT + 8 * u64::from(vector)))
                .unwrap();
            let mut a = CodeAssembler::new(32).unwrap();
            if !matches!(vector, 8 | 10..=14 | 17) {
                a.push(0).unwrap();
            }
            a.push(vector as i32).unwrap();
            a.out(PORT as i32, al).unwrap();
            a.add(esp, 8).unwrap();
            a.iretd().unwrap();
            self.put(at, &a.assemble(at.into()).unwrap());
        }
        // ESP0 and SS0; the bitmaps begin at 0x88: interrupts below it, then ports.
        self.set_word(TSS as u32 + 4, STACK);
        self.set_word(TSS as u32 + 8, 0x10);
        self.set_word(TSS as u32 + 0x64, 0x88 << 16);
        self.put(TSS as u32 + 0x88 + 0x2000, &[0xff]);
        let mut s = self.vcpu.get_sregs().unwrap();
        s.cr0 |= 1;
        (s.gdt.base, s.gdt.limit) = (GDT, 0x1f);
        (s.idt.base, s.idt.limit) = (IDT, 0xff);
        let flat = |selector, type_| kvm_segment {
            base: 0,
            limit: u32::MAX,
            selector,
            type_,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        s.cs = flat(8, 11);
        (s.ds, s.es, s.ss, s.fs, s.gs) = (
            flat(16, 3),
            flat(16, 3),
            flat(16, 3),
            flat(16, 3),
            flat(16, 3),
        );
        s.tr = kvm_segment {
            base: TSS,
            limit: 0x2088,
            selector: 24,
            type_: 11,
            present: 1,
            ..Default::default()
        };
        self.vcpu.set_sregs(&s).unwrap();
        self.begin();
    }

    fn begin(&self) {
        let regs = kvm_regs {
            rip: CODE.into(),
            rsp: STACK.into(),
            rflags: 2,
            ..Default::default()
        };
        self.vcpu.set_regs(&regs).unwrap();
    }

    /// The next exception; `None` at the end.
    fn next(&mut self) -> Option<Stop> {
        match self.vcpu.run().unwrap() {
            VcpuExit::IoOut(PORT, _) => {}
            VcpuExit::IoOut(END, _) => return None,
            other => panic!("{other:?}"),
        }
        let at = self.frame();
        let [vector, error, ip, selector, flags] = [0, 4, 8, 12, 16].map(|n| self.word(at + n));
        Some(Stop {
            vector,
            error,
            ip,
            selector,
            flags,
        })
    }

    /// Where the handler's frame is.
    fn frame(&self) -> u32 {
        self.vcpu.get_regs().unwrap().rsp as u32
    }

    /// All of them: vector, EIP, DR6, which is then cleared.
    fn all(&mut self) -> Vec<(u32, u32, u64)> {
        let mut stops = Vec::new();
        while let Some(stop) = self.next() {
            let mut debug = self.vcpu.get_debug_regs().unwrap();
            stops.push((stop.vector, stop.ip - CODE, debug.dr6 & 0xe00f));
            debug.dr6 = 0xffff_0ff0;
            self.vcpu.set_debug_regs(&debug).unwrap();
            // As a debugger does: an execution breakpoint is passed once.
            let at = self.frame() + 16;
            self.set_word(at, self.word(at) | RF);
            assert!(stops.len() < 1000);
        }
        stops
    }

    fn debug(&self, control: u64, addresses: [u32; 4]) {
        let mut debug = self.vcpu.get_debug_regs().unwrap();
        debug.db = addresses.map(u64::from);
        debug.dr7 = control | 0x400;
        debug.dr6 = 0xffff_0ff0;
        self.vcpu.set_debug_regs(&debug).unwrap();
    }
}

/// Five stores of two bytes, a read of four, and pushes around a call.
fn stores(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    let mut function = a.create_label();
    a.mov(ecx, 5)?; // 0
    a.set_label(&mut again)?;
    a.mov(word_ptr(DATA + 2), cx)?; // 5
    a.mov(eax, dword_ptr(DATA))?; // 0xc
    a.dec(ecx)?; // 0x11
    a.jnz(again)?; // 0x12
    a.push(ecx)?; // 0x14
    a.call(function)?; // 0x15
    a.pop(edx)?; // 0x1a
    a.out(END as i32, al)?; // 0x1b
    a.set_label(&mut function)?;
    a.ret() // 0x1d
}

#[test]
fn breakpoints_of_a_32_bit_kernel() {
    let mut m = Machine::new(stores);
    // Until it is translated.
    for _ in 0..50 {
        m.begin();
        assert_eq!(m.all(), []);
    }
    let stack = STACK - 8;
    let rows: [Breakpoint; 7] = [
        ("executed", 1, [CODE, 0, 0, 0], &[(1, 0, 1)]),
        (
            "in a loop, globally",
            8,
            [0, CODE + 0x11, 0, 0],
            &[(1, 0x11, 2); 5],
        ),
        ("inside of an instruction", 1, [CODE + 1, 0, 0, 0], &[]),
        (
            "written",
            1 | 0x5 << 16,
            [DATA + 2, 0, 0, 0],
            &[(1, 0xc, 1); 5],
        ),
        ("the byte beside", 1 | 0x1 << 16, [DATA + 1, 0, 0, 0], &[]),
        (
            "read",
            0x40 | 0x3 << 28,
            [0, 0, 0, DATA],
            &[(1, 0x11, 8); 5],
        ),
        (
            "the stack, written",
            4 | 0xd << 20,
            [0, stack, 0, 0],
            &[(1, 0x1d, 2)],
        ),
    ];
    for (name, control, addresses, want) in rows {
        m.debug(control, addresses);
        m.begin();
        assert_eq!(m.all(), want, "{name}");
    }
    // Two at once.
    m.debug(5 | 0x5 << 16 | 0xd << 20, [DATA + 2, DATA, 0, 0]);
    m.begin();
    assert_eq!(m.all(), [(1, 0xc, 3); 5]);
    m.debug(0, [CODE; 4]);
    m.begin();
    assert_eq!(m.all(), []);
}

#[test]
fn instructions_that_are_breakpoints() {
    let code = |a: &mut CodeAssembler| {
        a.inc(eax)?; // 0
        a.db(&[0xf1])?; // 1: INT1
        a.int3()?; // 2
        a.db(&[0xcd, 3])?; // 3
        a.db(&[0xcd, 1])?; // 5
        a.mov(ecx, 0x7fff_ffff)?; // 7
        a.into()?; // 0xc
        a.inc(ecx)?; // 0xd
        a.into()?; // 0xe
        a.out(END as i32, al)
    };
    let mut m = Machine::new(code);
    for _ in 0..20 {
        m.begin();
        let vectors: Vec<_> = m.all().iter().map(|stop| (stop.0, stop.1)).collect();
        // All are traps: EIP is behind them.
        assert_eq!(vectors, [(1, 2), (3, 3), (3, 5), (1, 7), (4, 0xf)]);
    }
}

#[test]
fn single_steps_and_what_holds_them_up() {
    let code = |a: &mut CodeAssembler| {
        a.pushfd()?; // 0
        a.or(dword_ptr(esp), TF as i32)?; // 1
        a.popfd()?; // 8
        a.nop()?; // 9
        a.mov(ax, ss)?; // 0xa
        a.mov(ss, ax)?; // 0xd
        a.nop()?; // 0x10
        a.mov(ecx, 3)?; // 0x11
        a.mov(esi, DATA)?; // 0x16
        a.mov(edi, DATA + 8)?; // 0x1b
        a.rep().movsb()?; // 0x20
        a.into()?; // 0x22
        a.sti()?; // 0x23
        a.nop()?; // 0x24
        a.pushfd()?; // 0x25
        a.and(dword_ptr(esp), !TF as i32)?; // 0x26
        a.popfd()?; // 0x2d
        a.out(END as i32, al)
    };
    let mut m = Machine::new(code);
    m.begin();
    let stops = m.all();
    let at: Vec<_> = stops.iter().map(|stop| stop.1).collect();
    let want = [
        0xa, 0xd, 0x11, 0x16, 0x1b, 0x20, 0x20, 0x20, 0x22, 0x23, 0x24, 0x25, 0x26, 0x2d, 0x2e,
    ];
    assert_eq!(at, want);
    assert!(
        stops.iter().all(|stop| (stop.0, stop.2) == (1, 0x4000)),
        "{stops:x?}"
    );
}

#[test]
fn debug_registers_by_instructions() {
    let code = |a: &mut CodeAssembler| {
        a.mov(eax, DATA as i32)?; // 0
        a.mov(dr0, eax)?; // 5
        a.mov(eax, 0x000d_0402)?; // 8
        a.mov(dr7, eax)?; // 0xd
        a.mov(dword_ptr(DATA), eax)?; // 0x10
        a.mov(ebx, dr6)?; // 0x15
        a.xor(eax, eax)?; // 0x18
        a.mov(dr6, eax)?; // 0x1a
        a.mov(eax, 0x2400)?; // 0x1d
        a.mov(dr7, eax)?; // 0x22
        a.mov(ecx, dr0)?; // 0x25
        a.out(END as i32, al)
    };
    let mut m = Machine::new(code);
    m.debug(0, [0; 4]);
    m.begin();
    let first = m.next().unwrap();
    assert_eq!((first.vector, first.ip), (1, CODE + 0x15));
    assert_eq!(m.vcpu.get_debug_regs().unwrap().dr6, 0xffff_0ff1);
    // General detect: before the instruction, and DR7.GD is off in the handler.
    let second = m.next().unwrap();
    assert_eq!((second.vector, second.ip), (1, CODE + 0x25));
    let debug = m.vcpu.get_debug_regs().unwrap();
    assert_eq!((debug.dr6 & 0xe00f, debug.dr7), (0x2000, 0x400));
    assert_eq!(m.next(), None);
    let regs = m.vcpu.get_regs().unwrap();
    assert_eq!((regs.rbx, regs.rcx), (0xffff_0ff1, DATA.into()));
    // DR4 and DR5 are DR6 and DR7, unless CR4.DE is set.
    let other = |a: &mut CodeAssembler| {
        a.db(&[0x0f, 0x21, 0xe0])?; // mov eax, dr4
        a.db(&[0x0f, 0x21, 0xeb])?; // mov ebx, dr5
        a.out(END as i32, al)
    };
    let mut m = Machine::new(other);
    assert_eq!(m.next(), None);
    let regs = m.vcpu.get_regs().unwrap();
    assert_eq!((regs.rax, regs.rbx), (0xffff_0ff0, 0x400));
    let mut s = m.vcpu.get_sregs().unwrap();
    s.cr4 |= 8;
    m.vcpu.set_sregs(&s).unwrap();
    m.begin();
    assert_eq!(m.next().unwrap().vector, 6);
}

#[test]
fn breakpoints_at_ports() {
    let code = |a: &mut CodeAssembler| {
        a.mov(dx, 0x62)?; // 0
        a.in_(al, dx)?; // 4
        a.out(0x64, al)?; // 5
        a.out(END as i32, al)
    };
    let mut m = Machine::new(code);
    let mut s = m.vcpu.get_sregs().unwrap();
    s.cr4 |= 8;
    m.vcpu.set_sregs(&s).unwrap();
    m.debug(1 | 0xe << 16, [0x60, 0, 0, 0]);
    m.begin();
    assert!(matches!(m.vcpu.run().unwrap(), VcpuExit::IoIn(0x62, _)));
    assert_eq!(
        m.next().map(|stop| (stop.vector, stop.ip)),
        Some((1, CODE + 5))
    );
    assert!(matches!(m.vcpu.run().unwrap(), VcpuExit::IoOut(0x64, _)));
    assert_eq!(m.next(), None);
}

/// A machine about to enter a program of virtual-8086 mode.
fn v86(program: &[u8], flags: u32) -> Machine {
    let m = Machine::new(|a| a.iretd());
    m.put(u32::from(V86_CODE) << 4, program);
    enter(&m, flags);
    m
}

/// IRETD's frame: EIP, CS, EFLAGS, ESP, SS, ES, DS, FS, GS.
fn enter(m: &Machine, flags: u32) {
    m.begin();
    let frame = [
        0,
        V86_CODE.into(),
        flags | VM | 2,
        0xf000,
        V86_STACK.into(),
        V86_DATA.into(),
        V86_DATA.into(),
        0x1111,
        0x2222,
    ];
    let at = STACK - 4 * frame.len() as u32;
    for (n, word) in (0..).zip(frame) {
        m.set_word(at + 4 * n, word);
    }
    let mut regs = m.vcpu.get_regs().unwrap();
    regs.rsp = at.into();
    (regs.rax, regs.rbx, regs.rcx, regs.rdx) = (0x1234, 0x40, 3, 0x3f8);
    m.vcpu.set_regs(&regs).unwrap();
}

const IOPL3: u32 = 3 << 12;

#[test]
fn what_a_program_of_8086_mode_may_not_do() {
    let rows: [Refused; 27] = [
        ("cli", &[0x90, 0xfa], 0, 13, 0, 1),
        ("sti", &[0xfb], 0, 13, 0, 0),
        ("pushf", &[0x9c], 0, 13, 0, 0),
        ("popf", &[0x9d], 0, 13, 0, 0),
        ("int", &[0xcd, 0x21], 0, 13, 0, 0),
        ("iret", &[0xcf], 0, 13, 0, 0),
        ("hlt", &[0xf4], IOPL3, 13, 0, 0),
        ("int without a gate", &[0xcd, 0x21], IOPL3, 13, 0x10a, 0),
        ("int of a kernel's gate", &[0xcd, 0x10], IOPL3, 13, 0x82, 0),
        ("int3", &[0xcc], 0, 3, 0, 1),
        ("int 3", &[0xcd, 3], IOPL3, 3, 0, 2),
        ("int 3, not allowed", &[0xcd, 3], 0, 13, 0, 0),
        ("into", &[0xb0, 0x7f, 0xfe, 0xc0, 0xce], 0, 4, 0, 5),
        ("in", &[0xe4, 0x61], IOPL3, 13, 0, 0),
        (
            "a port behind the bitmap",
            &[0xba, 0xff, 0xff, 0xec],
            IOPL3,
            13,
            0,
            3,
        ),
        ("lgdt", &[0x0f, 0x01, 0x16, 0, 0], IOPL3, 13, 0, 0),
        ("mov to cr0", &[0x0f, 0x22, 0xc0], IOPL3, 13, 0, 0),
        ("mov from dr7", &[0x0f, 0x21, 0xf8], IOPL3, 13, 0, 0),
        ("clts", &[0x0f, 0x06], IOPL3, 13, 0, 0),
        ("sldt", &[0x0f, 0x00, 0xc0], IOPL3, 6, 0, 0),
        ("arpl", &[0x63, 0xc0], IOPL3, 6, 0, 0),
        ("lar", &[0x0f, 0x02, 0xc0], IOPL3, 6, 0, 0),
        (
            "a word at 0xffff",
            &[0xbb, 0xff, 0xff, 0x8b, 0x07],
            0,
            13,
            0,
            3,
        ),
        (
            "beyond 64 KiB",
            &[0x66, 0xbb, 0, 0, 1, 0, 0x67, 0x8a, 0x03],
            0,
            13,
            0,
            6,
        ),
        ("a stack that ends", &[0xbc, 1, 0, 0x50], 0, 12, 0, 3),
        ("division", &[0x31, 0xdb, 0xf7, 0xf3], 0, 0, 0, 2),
        ("ud2", &[0x0f, 0x0b], 0, 6, 0, 0),
    ];
    for (name, program, flags, vector, error, ip) in rows {
        let mut m = v86(program, flags);
        // Its ports' bits are set.
        m.put(TSS as u32 + 0x88, &[0xff; 0x2000]);
        for round in 0..3 {
            let stop = m.next().unwrap();
            let got = (stop.vector, stop.error, stop.ip, stop.selector);
            assert_eq!(got, (vector, error, ip, V86_CODE.into()), "{name}, {round}");
            assert_eq!(stop.flags & (VM | IOPL3), VM | flags, "{name}");
            // The frame has the program's segments, and the handler none.
            let at = m.frame();
            let segments = [24, 28, 32, 36, 40].map(|n| m.word(at + n) & 0xffff);
            let want = [V86_STACK, V86_DATA, V86_DATA, 0x1111, 0x2222].map(u32::from);
            assert_eq!(segments, want, "{name}");
            let s = m.vcpu.get_sregs().unwrap();
            let selectors = [s.ds, s.es, s.fs, s.gs].map(|segment| segment.selector);
            assert_eq!((selectors, s.ss.selector, s.cs.selector), ([0; 4], 0x10, 8));
            enter(&m, flags);
        }
    }
}

#[test]
fn a_program_of_8086_mode_and_its_monitor() {
    let mut a = CodeAssembler::new(16).unwrap();
    let write = |a: &mut CodeAssembler| -> Result<(), IcedError> {
        let (mut again, mut function) = (a.create_label(), a.create_label());
        a.mov(cx, 300)?;
        a.set_label(&mut again)?;
        a.mov(ax, cx)?;
        a.mul(cx)?;
        a.add(word_ptr(bx), ax)?;
        a.adc(word_ptr(bx + 2), dx)?;
        a.push(ax)?;
        a.call(function)?;
        a.pop(dx)?;
        a.db(&[0xcd, 0x20])?; // The monitor counts.
        a.loop_(again)?;
        // Segments of its own making, and a word that goes round.
        a.mov(ax, 0x3800)?;
        a.mov(es, ax)?;
        a.xor(di, di)?;
        a.xor(si, si)?;
        a.mov(cx, 0x100)?;
        a.cld()?;
        a.rep().movsw()?;
        a.pushf()?;
        a.cli()?;
        a.pushf()?;
        a.pop(ax)?;
        a.popf()?;
        a.mov(word_ptr(0x50), ax)?;
        a.mov(al, 0x5a)?;
        a.mov(dx, END as i32)?;
        a.out(dx, al)?;
        a.set_label(&mut function)?;
        a.inc(word_ptr(bx + 4))?;
        a.ret()
    };
    write(&mut a).unwrap();
    let program = a.assemble(0).unwrap();
    // IOPL 3: flags are its own, INT 0x20 is not in the IDT.
    let mut m = v86(&program, IOPL3 | 1 << 9);
    let mut counted = 0;
    while let Some(stop) = m.next() {
        assert_eq!((stop.vector, stop.error), (13, 0x20 * 8 + 2));
        let at = m.frame() + 8;
        m.set_word(at, m.word(at) + 2);
        counted += 1;
    }
    assert_eq!(counted, 300);
    let data = u32::from(V86_DATA) << 4;
    let sum: u32 = (1..=300).map(|n| n * n).sum();
    assert_eq!(m.word(data + 0x40), sum);
    assert_eq!(m.word(data + 0x44) & 0xffff, 300);
    assert_eq!(m.word(0x38040), sum, "copied");
    // IF was off after CLI.
    assert_eq!(m.word(data + 0x50) & 0x3202, 0x3002);
    let regs = m.vcpu.get_regs().unwrap();
    assert_eq!(
        (regs.rsi & 0xffff, regs.rdi & 0xffff, regs.rcx & 0xffff),
        (0x200, 0x200, 0)
    );
    assert_eq!(regs.rflags as u32 & (VM | IOPL3), VM | IOPL3);
}

/// Breakpoints find linear addresses, and a single step goes through the program and not through the monitor.
#[test]
fn a_debugger_of_8086_mode() {
    // mov [0x40], ax; inc ax; int3; push ax; nop
    let program = [0xa3, 0x40, 0, 0x40, 0xcc, 0x50, 0x90, 0xe6, END as u8];
    let mut m = v86(&program, IOPL3);
    let all = |m: &mut Machine| {
        let mut stops = Vec::new();
        while let Some(stop) = m.next() {
            let mut debug = m.vcpu.get_debug_regs().unwrap();
            stops.push((stop.vector, stop.ip, debug.dr6 & 0xe00f));
            assert!(stops.len() < 30, "{stops:x?}");
            debug.dr6 = 0xffff_0ff0;
            m.vcpu.set_debug_regs(&debug).unwrap();
            let at = m.frame() + 16;
            m.set_word(at, m.word(at) | RF);
        }
        stops
    };
    let code = u32::from(V86_CODE) << 4;
    let stored = (u32::from(V86_DATA) << 4) + 0x40;
    let pushed = (u32::from(V86_STACK) << 4) + 0xeffe;
    m.debug(0x15 | 0x5 << 20 | 0x5 << 24, [code + 5, stored, pushed, 0]);
    assert_eq!(all(&mut m), [(1, 3, 2), (3, 5, 0), (1, 6, 4)]);
    let mut m = v86(&program, IOPL3 | TF);
    assert_eq!(
        all(&mut m),
        [
            (1, 3, 0x4000),
            (1, 4, 0x4000),
            (3, 5, 0),
            (1, 6, 0x4000),
            (1, 7, 0x4000)
        ]
    );
}

/// A relative branch with an operand size of 16 bits leads to an address of 16 bits.
#[test]
fn branches_of_16_bits_in_32_bit_code() {
    const BASE: u32 = 0x5_7000;
    let forms: [&[u8]; 7] = [
        &[0x66, 0x0f, 0x84, 0x20, 0],
        &[0x66, 0x74, 0x20],
        &[0x66, 0xe9, 0x20, 0],
        &[0x66, 0xeb, 0x20],
        &[0x66, 0xe8, 0x20, 0],
        &[0x66, 0xe3, 0x20],
        &[0x66, 0xe2, 0x20],
    ];
    for form in forms {
        let code = |a: &mut CodeAssembler| {
            a.xor(ecx, ecx)?;
            a.mov(eax, BASE)?;
            a.jmp(eax)
        };
        let mut m = Machine::new(code);
        m.put(BASE, &[0xcc; 0x40]);
        m.put(BASE, form);
        let target = (BASE + form.len() as u32 + 0x20) & 0xffff;
        m.put(target, &[0xe6, END as u8]);
        for _ in 0..20 {
            m.begin();
            assert_eq!(m.all(), [], "{form:x?}");
        }
    }
}

#[test]
fn on_the_interpreter_too() {
    engines::again_on("interp");
}
