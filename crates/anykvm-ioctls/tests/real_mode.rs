//! 16-bit code of real mode: where its segments and its addresses end, and what changes its own code.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod engines;

use std::{thread, time::Duration};

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 2 << 20;
const CODE: u64 = 0x1000;
const STACK: u64 = 0x8000;
/// Where each vector leads: it is said by port 0x10.
const HANDLERS: u64 = 0x600;
const HANDLER_LEN: u64 = 8;
/// DS and ES.
const DATA: u16 = 0x2000;

type Assemble = fn(&mut CodeAssembler) -> Result<(), IcedError>;

struct Machine {
    memory: &'static GuestMemoryMmap<()>,
    _vm: VmFd,
    vcpu: VcpuFd,
}

impl Machine {
    fn new(code: Assemble) -> Self {
        let ranges = [(GuestAddress(0), MEMORY)];
        let memory: &'static _ =
            Box::leak(Box::new(GuestMemoryMmap::from_ranges(&ranges).unwrap()));
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_static_memory(memory).unwrap();
        for vector in 0..32 {
            let at = HANDLERS + HANDLER_LEN * vector;
            memory
                .write_obj(at as u32, GuestAddress(4 * vector))
                .unwrap();
            // mov al, vector; out 0x10, al; hlt
            let code = [0xb0, vector as u8, 0xe6, 0x10, 0xf4];
            memory.write_slice(&code, GuestAddress(at)).unwrap();
        }
        let mut a = CodeAssembler::new(16).unwrap();
        code(&mut a).unwrap();
        let code = a.assemble(CODE).unwrap();
        memory.write_slice(&code, GuestAddress(CODE)).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        let mut s = vcpu.get_sregs().unwrap();
        (s.cs.base, s.cs.selector) = (0, 0);
        for data in [&mut s.ds, &mut s.es] {
            (data.base, data.selector) = (u64::from(DATA) << 4, DATA);
        }
        vcpu.set_sregs(&s).unwrap();
        vcpu.set_regs(&kvm_regs {
            rip: CODE,
            rsp: STACK,
            rflags: 2,
            ..Default::default()
        })
        .unwrap();
        Self {
            memory,
            _vm: vm,
            vcpu,
        }
    }

    /// What is written to ports until HLT.
    fn run(&mut self) -> Vec<(u16, Vec<u8>)> {
        let mut said = Vec::new();
        loop {
            match self.vcpu.run().unwrap() {
                VcpuExit::IoOut(port, bytes) => said.push((port, bytes.to_vec())),
                VcpuExit::Hlt => return said,
                other => panic!("{other:?}"),
            }
        }
    }

    fn word(&self, at: u64) -> u16 {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }
}

/// Runs it; it ends with HLT, or with the exception `vector`.
fn ends(code: Assemble, vector: Option<u8>) -> Machine {
    let mut m = Machine::new(code);
    let said = m.run();
    let wanted: Vec<_> = vector.into_iter().map(|v| (0x10, vec![v])).collect();
    assert_eq!(said, wanted);
    m
}

#[test]
fn the_last_byte_of_a_segment_and_the_word_there() {
    let m = ends(
        |a| {
            a.mov(bx, 0xffff)?;
            a.mov(byte_ptr(bx), 0x5a)?;
            a.mov(word_ptr(bx - 1), 0x1234)?;
            a.hlt()
        },
        None,
    );
    assert_eq!(m.word(0x2_fffe), 0x1234);
    let word = |a: &mut CodeAssembler| {
        a.mov(bx, 0xffff)?;
        a.mov(ax, word_ptr(bx))?;
        a.hlt()
    };
    ends(word, Some(13));
    let wide = |a: &mut CodeAssembler| {
        a.mov(ebx, 0x1_0000)?;
        a.mov(al, byte_ptr(ebx))?;
        a.hlt()
    };
    ends(wide, Some(13));
    let stack = |a: &mut CodeAssembler| {
        a.mov(bp, 0xffff)?;
        a.mov(ax, word_ptr(bp))?;
        a.hlt()
    };
    ends(stack, Some(12));
}

#[test]
fn offsets_of_16_bits_go_round_and_linear_addresses_go_on() {
    let m = ends(
        |a| {
            a.mov(bx, 0xfff0)?;
            a.mov(si, 0x0020)?;
            a.mov(word_ptr(bx + si), 0x4321)?;
            a.mov(ax, 0xffff)?;
            a.mov(ds, ax)?;
            a.mov(word_ptr(bx), 0x7777)?;
            a.hlt()
        },
        None,
    );
    assert_eq!(m.word(0x2_0010), 0x4321);
    // ffff:fff0, beyond the first mebibyte.
    assert_eq!(m.word(0x10_ffe0), 0x7777);
}

/// In a segment of 4 GiB, as firmware makes them, the word at offset FFFF goes on behind 64 KiB. A selector behind an
/// offset at FFFE or FFFF does not: it is at an address of 16 bits of its own (as a processor does in 16-bit code of
/// protected mode).
#[test]
fn selectors_of_far_pointers_go_round_in_large_segments() {
    let mut m = Machine::new(|a| {
        a.mov(bx, 0xffff)?;
        a.les(cx, dword_ptr(bx))?;
        a.mov(word_ptr(0x10), es)?;
        a.mov(word_ptr(0x20), cx)?;
        // jmp far [bx]
        a.db(&[0xff, 0x2f])
    });
    let mut s = m.vcpu.get_sregs().unwrap();
    (s.ds.limit, s.ds.g) = (u32::MAX, 1);
    m.vcpu.set_sregs(&s).unwrap();
    let write = |bytes: &[u8], at| m.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    write(&[0x34, 0x12, 0x11, 0x11], 0x2_ffff);
    write(&[0x00, 0x02], 0x2_0001);
    // mov al, 0x77; out 0x11, al; hlt
    write(&[0xb0, 0x77, 0xe6, 0x11, 0xf4], 0x2000 + 0x1234);
    assert_eq!(m.run(), [(0x11, vec![0x77])]);
    assert_eq!([m.word(0x2_0010), m.word(0x2_0020)], [0x200, 0x1234]);
}

#[test]
fn the_stack_goes_round_by_words() {
    let m = ends(
        |a| {
            a.mov(esp, 0x5_0000)?;
            a.mov(ax, 0xbeef)?;
            a.push(ax)?;
            a.mov(word_ptr(0x10), sp)?;
            a.mov(dword_ptr(0x20), esp)?;
            a.pop(cx)?;
            a.mov(dword_ptr(0x30), esp)?;
            a.mov(word_ptr(0x40), cx)?;
            a.hlt()
        },
        None,
    );
    assert_eq!(m.word(0xfffe), 0xbeef);
    assert_eq!(m.word(0x2_0010), 0xfffe);
    assert_eq!([m.word(0x2_0020), m.word(0x2_0022)], [0xfffe, 5]);
    assert_eq!([m.word(0x2_0030), m.word(0x2_0032)], [0, 5]);
    assert_eq!(m.word(0x2_0040), 0xbeef);
}

#[test]
fn calls_and_returns_of_both_sizes() {
    let m = ends(
        |a| {
            let (mut short, mut wide, mut over) =
                (a.create_label(), a.create_label(), a.create_label());
            a.jmp(over)?;
            a.set_label(&mut short)?;
            a.inc(di)?;
            a.ret()?;
            a.set_label(&mut wide)?;
            a.add(di, 0x100)?;
            // retd
            a.db(&[0x66, 0xc3])?;
            a.set_label(&mut over)?;
            a.mov(cx, 300)?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.call(short)?;
            a.push(0_i32)?;
            a.call(wide)?;
            a.loop_(again)?;
            a.mov(word_ptr(0x10), di)?;
            a.mov(word_ptr(0x12), sp)?;
            a.hlt()
        },
        None,
    );
    assert_eq!(m.word(0x2_0010), (300u32 + 300 * 0x100) as u16);
    assert_eq!(m.word(0x2_0012), STACK as u16);
}

#[test]
fn calls_that_come_to_their_own_code_and_what_comes_to_the_end() {
    // The stack grows down to the call, which is one of zeros then; those are executed up to CS's limit.
    let calls = |a: &mut CodeAssembler| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.call(here)
    };
    let m = ends(calls, Some(13));
    let regs = m.vcpu.get_regs().unwrap();
    let frame = [0, 2].map(|n| m.word((regs.rsp & 0xffff) + n));
    assert_eq!(frame, [0, 0], "0000:10000, beyond the last instruction");
}

/// Code that the guest writes.
const MADE: u64 = 0x3000;

/// CS begins in the middle of a page: what branches to before it goes on at the end of CS, where INT 5 is.
#[test]
fn code_of_the_page_that_cs_begins_in() {
    const BASE: u16 = 0x121;
    const LOOPS: u16 = 300;
    let branches: [(Assemble, u64); 3] = [
        (|a| a.db(&[0xeb, 0xe0]), 2),       // jmp -0x20
        (|a| a.db(&[0x74, 0xe0]), 2),       // je -0x20
        (|a| a.db(&[0xe8, 0xe0, 0xff]), 3), // call -0x20
    ];
    for (branch, len) in branches {
        let mut m = Machine::new(|a| a.hlt());
        // Within the page it loops, first.
        let mut a = CodeAssembler::new(16).unwrap();
        let mut again = a.create_label();
        a.mov(cx, u32::from(LOOPS)).unwrap();
        a.set_label(&mut again).unwrap();
        a.inc(bx).unwrap();
        a.dec(cx).unwrap();
        a.jne(again).unwrap();
        let at = a.assemble(0).unwrap().len() as u64;
        branch(&mut a).unwrap();
        let code = a.assemble(0).unwrap();
        assert_eq!(code.len() as u64, at + len);
        let base = u64::from(BASE) << 4;
        m.memory.write_slice(&code, GuestAddress(base)).unwrap();
        let to = (at + len).wrapping_sub(0x20) & 0xffff;
        assert!(to > 0x8000);
        // Below CS is what must not be executed.
        m.memory
            .write_slice(&[0xcd, 0x06], GuestAddress(base + at + len - 0x20))
            .unwrap();
        m.memory
            .write_slice(&[0xcd, 0x05], GuestAddress(base + to))
            .unwrap();
        let mut s = m.vcpu.get_sregs().unwrap();
        (s.cs.base, s.cs.selector) = (base, BASE);
        m.vcpu.set_sregs(&s).unwrap();
        for _ in 0..3 {
            m.vcpu
                .set_regs(&kvm_regs {
                    rsp: STACK,
                    rflags: 2,
                    ..Default::default()
                })
                .unwrap();
            let mut s = m.vcpu.get_sregs().unwrap();
            (s.cs.base, s.cs.selector) = (base, BASE);
            m.vcpu.set_sregs(&s).unwrap();
            assert_eq!(m.run(), [(0x10, vec![5])]);
            assert_eq!(m.vcpu.get_regs().unwrap().rbx, u64::from(LOOPS));
        }
    }
}

#[test]
fn interrupts_lead_to_their_vectors_and_back() {
    let m = ends(
        |a| {
            // inc word [0x10]; iret
            for (at, byte) in (MADE as u16..).zip([0xff, 0x06, 0x10, 0, 0xcf]) {
                a.mov(byte_ptr(at).cs(), byte)?;
            }
            a.mov(word_ptr(0x21 * 4).cs(), MADE as u32)?;
            a.mov(word_ptr(0x21 * 4 + 2).cs(), 0)?;
            a.mov(word_ptr(0x10), 0)?;
            a.mov(cx, 200)?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.int(0x21)?;
            a.loop_(again)?;
            a.hlt()
        },
        None,
    );
    assert_eq!(m.word(0x2_0010), 200);
}

#[test]
fn code_that_is_changed_does_what_it_says_then() {
    let m = ends(
        |a| {
            // mov ax, imm16; ret
            a.mov(byte_ptr(MADE as u16).cs(), 0xb8)?;
            a.mov(byte_ptr(MADE as u16 + 3).cs(), 0xc3)?;
            a.mov(cx, 100)?;
            a.xor(di, di)?;
            a.xor(dx, dx)?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.inc(dx)?;
            a.mov(word_ptr(MADE as u16 + 1).cs(), dx)?;
            a.call(MADE)?;
            a.add(di, ax)?;
            a.loop_(again)?;
            a.mov(word_ptr(0x10), di)?;
            a.hlt()
        },
        None,
    );
    assert_eq!(m.word(0x2_0010), 5050);
}

#[test]
fn the_same_on_the_interpreter_and_in_lock_step() {
    engines::again_on("interp");
    engines::again_on("lockstep");
}

/// Loops without an end of each kind are stopped by whoever asks for the vCPU.
fn is_interrupted(code: Assemble) {
    let mut m = Machine::new(code);
    let stopper = m.vcpu.stopper().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                thread::sleep(Duration::from_millis(40));
                stopper.stop();
            }
        });
        let result = m.vcpu.run().map(|exit| format!("{exit:?}"));
        assert_eq!(result.unwrap_err().errno(), libc::EINTR);
    });
}

macro_rules! loops {
    ($($name:ident: $code:expr;)*) => {
        $(#[test] fn $name() { is_interrupted($code) })*
    };
}

loops! {
    endless_by_a_jump: |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.jmp(here)
    };
    endless_by_loop: |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.inc(cx)?;
        a.inc(cx)?;
        a.loop_(here)?;
        a.jmp(here)
    };
    endless_by_jcxz: |a| {
        let mut here = a.create_label();
        a.xor(cx, cx)?;
        a.set_label(&mut here)?;
        a.jcxz(here)?;
        a.hlt()
    };
    endless_by_a_far_jump: |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        // jmp 0:1000
        a.db(&[0xea, 0, 0x10, 0, 0])
    };
    endless_by_calls: |a| {
        let (mut here, mut function) = (a.create_label(), a.create_label());
        a.set_label(&mut here)?;
        a.call(function)?;
        a.jmp(here)?;
        a.set_label(&mut function)?;
        a.ret()
    };
    endless_by_segment_registers: |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.push(ds)?;
        a.pop(es)?;
        a.mov(ds, ax)?;
        a.jmp(here)
    };
}
