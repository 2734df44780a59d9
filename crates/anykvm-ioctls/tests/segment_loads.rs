//! Segment registers of flat 32-bit code, in loops that become hot: what loads, pushes and verifies them, and the
//! exception of a load that was right before.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod engines;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 1 << 20;
const GDT: u64 = 0x1000;
const IDT: u64 = 0x2000;
const HANDLER: u64 = 0x3000;
const CODE: u64 = 0x6000;
/// 64 words, which FS addresses: 1000, 1001 and so on.
const WORDS: u32 = 0x8000;
const STACK: u64 = 0x1_0000;
/// The port that says the end, and the one of the handler of #NP.
const END: u16 = 0x11;
const NOT_PRESENT: u16 = 0x12;

/// Rounds of each loop.
const ROUNDS: u32 = 3000;

/// Selectors.
const FLAT: i32 = 0x10;
const UNUSED: i32 = 0x18;
const CODE_ONLY: i32 = 0x20;
const MOVING: i32 = 0x28;

struct Machine {
    memory: &'static GuestMemoryMmap<()>,
    _vm: VmFd,
    vcpu: VcpuFd,
}

impl Machine {
    fn new(code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Self {
        let memory: &'static GuestMemoryMmap<()> = Box::leak(Box::new(
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap(),
        ));
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_static_memory(memory).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        let m = Self {
            memory,
            _vm: vm,
            vcpu,
        };
        let program = |at: u64, code: &mut dyn FnMut(&mut CodeAssembler)| {
            let mut a = CodeAssembler::new(32).unwrap();
            code(&mut a);
            m.put(at, &a.assemble(at).unwrap());
        };
        let mut code = Some(code);
        program(CODE, &mut |a| code.take().unwrap()(a).unwrap());
        program(HANDLER, &mut |a| a.out(i32::from(NOT_PRESENT), al).unwrap());
        for (n, entry) in [
            0,
            0x00cf_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            // Data that has not been accessed; code that cannot be read; data of 4 GiB from WORDS on.
            0x00cf_9200_0000_ffff,
            0x00cf_9900_0000_ffff,
            0x00cf_9300_8000_ffff_u64,
        ]
        .iter()
        .enumerate()
        {
            m.put(GDT + 8 * n as u64, &entry.to_le_bytes());
        }
        let gate = HANDLER | 8 << 16 | 0x8e << 40;
        m.put(IDT + 8 * 11, &gate.to_le_bytes());
        for n in 0..64 {
            m.put(u64::from(WORDS + 4 * n), &(1000 + n).to_le_bytes());
        }
        let mut s = m.vcpu.get_sregs().unwrap();
        s.cr0 |= 1;
        (s.gdt.base, s.gdt.limit) = (GDT, 0x2f);
        (s.idt.base, s.idt.limit) = (IDT, 0xff);
        let flat = |selector, type_| kvm_segment {
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
        let data = flat(FLAT as u16, 3);
        (s.ds, s.es, s.ss, s.fs, s.gs) = (data, data, data, data, data);
        m.vcpu.set_sregs(&s).unwrap();
        let regs = kvm_regs {
            rip: CODE,
            rsp: STACK,
            rflags: 2,
            ..Default::default()
        };
        m.vcpu.set_regs(&regs).unwrap();
        m
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    /// Runs up to the next OUT; returns its port.
    fn run(&mut self) -> u16 {
        match self.vcpu.run().unwrap() {
            VcpuExit::IoOut(port, _) => port,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn loads_and_pushes_in_a_hot_loop() {
    let mut m = Machine::new(|a| {
        let mut again = a.create_label();
        a.mov(ecx, ROUNDS)?;
        a.set_label(&mut again)?;
        // FS with a base that moves, by MOV and by POP.
        a.mov(edx, ecx)?;
        a.and(edx, 63)?;
        a.lea(eax, dword_ptr(WORDS) + edx * 4)?;
        a.mov(word_ptr(GDT + MOVING as u64 + 2), ax)?;
        a.mov(eax, MOVING)?;
        a.mov(fs, ax)?;
        a.add(esi, dword_ptr(0).fs())?;
        a.push(fs)?;
        a.pop(ebp)?;
        a.and(ebp, 0xffff)?;
        a.add(edi, ebp)?;
        // Null selectors, of which nothing is used.
        a.xor(eax, eax)?;
        a.mov(gs, ax)?;
        a.push(0)?;
        a.pop(fs)?;
        a.mov(ebp, fs)?;
        a.add(edi, ebp)?;
        // ES and DS stay flat, or are not for a while.
        a.push(ds)?;
        a.pop(es)?;
        a.mov(eax, MOVING)?;
        a.mov(es, ax)?;
        a.add(esi, dword_ptr(0).es())?;
        a.push(FLAT)?;
        a.pop(es)?;
        a.mov(ebp, es)?;
        a.add(edi, ebp)?;
        a.mov(eax, UNUSED)?;
        a.mov(ds, ax)?;
        a.mov(eax, FLAT)?;
        a.mov(ds, ax)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.out(i32::from(END), al)
    });
    assert_eq!(m.run(), END);
    let regs = m.vcpu.get_regs().unwrap();
    let words: u32 = (1..=ROUNDS).map(|n| 2 * (1000 + n % 64)).sum();
    assert_eq!(regs.rsi as u32, words);
    assert_eq!(regs.rdi as u32, ROUNDS * (MOVING as u32 + FLAT as u32));
    assert_eq!(regs.rsp, STACK);
    // The descriptor that DS was loaded from has been accessed.
    let rights: u8 = m
        .memory
        .read_obj(GuestAddress(GDT + UNUSED as u64 + 5))
        .unwrap();
    assert_eq!(rights, 0x93);
    let s = m.vcpu.get_sregs().unwrap();
    assert_eq!((s.gs.selector, s.gs.unusable), (0, 1));
    assert_eq!((s.ds.selector, s.ds.base, s.ds.limit), (0x10, 0, u32::MAX));
}

#[test]
fn selectors_are_verified() {
    // The selector, and what VERR and VERW say.
    for (selector, readable, writable) in [
        (0, 0, 0),
        (3, 0, 0),
        (8, 1, 0),
        (FLAT, 1, 1),
        (FLAT + 3, 0, 0),
        (UNUSED, 1, 1),
        (CODE_ONLY, 0, 0),
        (0x100, 0, 0),
        (0x14, 0, 0),
    ] {
        let mut m = Machine::new(|a| {
            let mut again = a.create_label();
            a.mov(ecx, ROUNDS)?;
            a.mov(ebx, selector)?;
            a.mov(dword_ptr(WORDS), ebx)?;
            a.set_label(&mut again)?;
            for write in [false, true] {
                let sum = if write { edi } else { esi };
                a.xor(eax, eax)?;
                a.stc()?;
                if write {
                    a.verw(bx)?;
                } else {
                    a.verr(word_ptr(WORDS))?;
                }
                a.setz(al)?;
                // The carry stays.
                a.adc(sum, eax)?;
            }
            a.dec(ecx)?;
            a.jnz(again)?;
            a.out(i32::from(END), al)
        });
        assert_eq!(m.run(), END);
        let regs = m.vcpu.get_regs().unwrap();
        let sums = [regs.rsi, regs.rdi].map(|sum| sum as u32);
        let expected = [readable, writable].map(|zero| ROUNDS * (1 + zero));
        assert_eq!(sums, expected, "{selector:#x}");
    }
}

/// LAR and LSL, to registers of 16 and 32 bits, from a register and from memory. ESI is a register that translated code has
/// at hand, ESP one that it has in memory.
#[test]
fn rights_and_limits_are_told() {
    const KEPT: u32 = 0x1234_5678;
    // The selector, and what LAR and LSL say.
    for (selector, rights, limit) in [
        (0, None, None),
        (8, Some(0x00cf_9b00), Some(u32::MAX)),
        (FLAT, Some(0x00cf_9300), Some(u32::MAX)),
        (FLAT + 3, None, None),
        (MOVING, Some(0x00cf_9300), Some(u32::MAX)),
        (0x100, None, None),
    ] {
        for by_stack in [false, true] {
            let mut m = Machine::new(|a| {
                let mut again = a.create_label();
                a.mov(ecx, ROUNDS)?;
                a.mov(ebx, selector)?;
                a.mov(dword_ptr(WORDS), ebx)?;
                a.mov(ebp, esp)?;
                a.set_label(&mut again)?;
                let to = if by_stack { esp } else { esi };
                a.mov(to, KEPT)?;
                a.lar(to, ebx)?;
                a.setz(dl)?;
                a.mov(dword_ptr(WORDS + 8), to)?;
                a.mov(to, KEPT)?;
                a.lsl(to, word_ptr(WORDS))?;
                a.mov(dword_ptr(WORDS + 12), to)?;
                let word = if by_stack { sp } else { si };
                a.mov(to, KEPT)?;
                a.stc()?;
                a.lsl(word, bx)?;
                // The carry stays.
                a.adc(dl, 0)?;
                a.mov(dword_ptr(WORDS + 16), to)?;
                a.dec(ecx)?;
                a.jnz(again)?;
                a.mov(esp, ebp)?;
                a.out(i32::from(END), al)
            });
            assert_eq!(m.run(), END);
            let told: [u32; 3] = m
                .memory
                .read_obj(GuestAddress(u64::from(WORDS) + 8))
                .unwrap();
            let short = limit.map_or(KEPT, |limit| KEPT & !0xffff | limit & 0xffff);
            let expected = [rights.unwrap_or(KEPT), limit.unwrap_or(KEPT), short];
            assert_eq!(told, expected, "{selector:#x}");
            let zero = u64::from(rights.is_some());
            assert_eq!(
                m.vcpu.get_regs().unwrap().rdx & 0xff,
                1 + zero,
                "{selector:#x}"
            );
        }
    }
}

#[test]
fn a_descriptor_that_is_no_longer_present() {
    // By MOV, and by POP, which leaves the stack pointer where it was.
    for pops in [false, true] {
        let mut m = Machine::new(|a| {
            let mut again = a.create_label();
            let mut present = a.create_label();
            a.mov(ecx, ROUNDS)?;
            a.set_label(&mut again)?;
            a.cmp(ecx, 1)?;
            a.jne(present)?;
            a.mov(byte_ptr(GDT + MOVING as u64 + 5), 0x13)?;
            a.set_label(&mut present)?;
            a.mov(eax, MOVING)?;
            if pops {
                a.push(eax)?;
                a.pop(fs)?;
            } else {
                a.mov(fs, ax)?;
            }
            a.add(esi, dword_ptr(0).fs())?;
            a.dec(ecx)?;
            a.jnz(again)?;
            a.out(i32::from(END), al)
        });
        assert_eq!(m.run(), NOT_PRESENT);
        let regs = m.vcpu.get_regs().unwrap();
        assert_eq!(regs.rsi as u32, 1000 * (ROUNDS - 1));
        assert_eq!(regs.rcx, 1);
        let frame: [u32; 4] = m.memory.read_obj(GuestAddress(regs.rsp)).unwrap();
        assert_eq!(frame[0], MOVING as u32);
        let at = u64::from(frame[1]);
        let code: [u8; 2] = m.memory.read_obj(GuestAddress(at)).unwrap();
        assert_eq!(code, if pops { [0x0f, 0xa1] } else { [0x66, 0x8e] });
        let pushed = 16 + if pops { 4 } else { 0 };
        assert_eq!(regs.rsp, STACK - pushed);
        let s = m.vcpu.get_sregs().unwrap();
        assert_eq!((s.fs.selector, s.fs.base), (MOVING as u16, WORDS.into()));
    }
}

#[test]
fn on_the_interpreter_too() {
    engines::again_on("interp");
}
