//! Code that changes: by its own stores, by another vCPU, by the VMM (SDM vol.
//! 3, 8.1.3). Whatever engine runs it, the next execution sees the new bytes.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;

use std::{
    sync::{atomic::Ordering, mpsc::channel},
    thread,
    time::Duration,
};

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Assemble, Machine, start};
use vm_memory::{Bytes, GuestAddress};

const CODE: u64 = 0x1000;
const OTHER_CODE: u64 = 0x8000;

/// Runs to HLT; EBX.
fn run(vcpu: &mut VcpuFd) -> u64 {
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => vcpu.get_regs().unwrap().rbx,
        other => panic!("{other:?}"),
    }
}

#[test]
fn stores_change_the_code_that_follows() {
    let rows: &[(&str, u64, Assemble)] = &[
        ("the next instruction", 0x55, |a| {
            let mut next = a.create_label();
            a.lea(rdi, qword_ptr(next))?;
            a.mov(byte_ptr(rdi + 1), 0x55)?;
            a.set_label(&mut next)?;
            a.mov(ebx, 0x11)?;
            a.hlt()
        }),
        ("itself, each time around", (1..=1000).sum(), |a| {
            let (mut again, mut immediate) = (a.create_label(), a.create_label());
            a.mov(ecx, 1000)?;
            a.set_label(&mut again)?;
            a.lea(rdi, qword_ptr(immediate))?;
            a.inc(dword_ptr(rdi + 2))?;
            a.set_label(&mut immediate)?;
            // 81 /0 id: the immediate is at offset 2.
            a.db(&[0x81, 0xc3, 0, 0, 0, 0])?;
            a.dec(ecx)?;
            a.jne(again)?;
            a.hlt()
        }),
        ("by a locked operation", (1..=100).sum(), |a| {
            let (mut again, mut immediate) = (a.create_label(), a.create_label());
            a.mov(ecx, 100)?;
            a.set_label(&mut again)?;
            a.lea(rdi, qword_ptr(immediate))?;
            a.lock().add(dword_ptr(rdi + 2), 1)?;
            a.set_label(&mut immediate)?;
            a.db(&[0x81, 0xc3, 0, 0, 0, 0])?;
            a.dec(ecx)?;
            a.jne(again)?;
            a.hlt()
        }),
        ("by a push", 0x2a, |a| {
            let mut next = a.create_label();
            a.mov(ebx, 7)?;
            // The immediate's eight bytes are from offset 2.
            a.lea(rsp, qword_ptr(next))?;
            a.add(rsp, 10)?;
            a.push(0x2a)?;
            a.set_label(&mut next)?;
            a.mov(rbx, 0x1122_3344_5566_7788_u64)?;
            a.hlt()
        }),
        ("by a string copy", 0x1234, |a| {
            let (mut from, mut to) = (a.create_label(), a.create_label());
            a.mov(ecx, 5)?;
            a.lea(rsi, qword_ptr(from))?;
            a.lea(rdi, qword_ptr(to))?;
            a.rep().movsb()?;
            a.set_label(&mut to)?;
            a.mov(ebx, 1)?;
            a.hlt()?;
            a.set_label(&mut from)?;
            a.mov(ebx, 0x1234)
        }),
        ("a function called before", 1 + 2 + 3 + 4, |a| {
            let (mut again, mut function) = (a.create_label(), a.create_label());
            a.mov(ecx, 4)?;
            a.set_label(&mut again)?;
            a.lea(rdi, qword_ptr(function))?;
            a.inc(byte_ptr(rdi + 1))?;
            a.call(function)?;
            a.add(ebx, eax)?;
            a.loop_(again)?;
            a.hlt()?;
            a.set_label(&mut function)?;
            a.mov(eax, 0)?;
            a.ret()
        }),
        ("data beside code stays data", 3000, |a| {
            let (mut again, mut data, mut end) =
                (a.create_label(), a.create_label(), a.create_label());
            a.mov(ecx, 1000)?;
            a.set_label(&mut again)?;
            a.add(dword_ptr(data), 3)?;
            a.mov(ebx, dword_ptr(data))?;
            a.loop_(again)?;
            a.jmp(end)?;
            a.set_label(&mut data)?;
            a.dd(&[0])?;
            a.set_label(&mut end)?;
            a.hlt()
        }),
    ];
    for (name, want, assemble) in rows {
        let machine = Machine::new();
        machine.load(CODE, *assemble);
        assert_eq!(run(&mut machine.vcpu(0, CODE)), *want, "{name}");
    }
}

#[test]
fn what_the_vmm_writes_between_two_runs_is_executed() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        a.mov(ebx, 1)?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    for value in [1_u8, 2, 3, 200] {
        let at = GuestAddress(CODE + 1);
        machine.memory.write_obj(value, at).unwrap();
        start(&vcpu, CODE);
        assert_eq!(run(&mut vcpu), u64::from(value));
    }
}

#[test]
fn another_vcpu_sees_the_change() {
    let machine = Machine::new();
    machine.load(CODE, |a| {
        let (mut again, mut function) = (a.create_label(), a.create_label());
        a.set_label(&mut again)?;
        // Tells the other that the code is in use.
        a.inc(dword_ptr(0x6000))?;
        a.call(function)?;
        a.cmp(ebx, 7)?;
        a.jne(again)?;
        a.hlt()?;
        for _ in 0..200 {
            a.nop()?;
        }
        a.set_label(&mut function)?;
        a.mov(ebx, 1)?;
        a.ret()
    });
    // Found by its bytes: MOV EBX, 1; RET.
    let mut code = [0_u8; 512];
    machine
        .memory
        .read_slice(&mut code, GuestAddress(CODE))
        .unwrap();
    let at = code
        .windows(6)
        .position(|w| w == [0xbb, 1, 0, 0, 0, 0xc3])
        .unwrap();
    machine.load(OTHER_CODE, |a| {
        let mut wait = a.create_label();
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(0x6000), 1000)?;
        a.jb(wait)?;
        // EAX is not set by anything else: the address comes from the test.
        a.mov(edx, dword_ptr(0x6004))?;
        a.mov(byte_ptr(edx), 7)?;
        a.mov(ebx, 9)?;
        a.hlt()
    });
    let address = CODE as u32 + at as u32 + 1;
    machine
        .memory
        .write_obj(address, GuestAddress(0x6004))
        .unwrap();
    let (done, finished) = channel();
    for (id, rip, want) in [(0, CODE, 7), (1, OTHER_CODE, 9)] {
        let mut vcpu = machine.vcpu(id, rip);
        let done = done.clone();
        thread::spawn(move || done.send((run(&mut vcpu), want)));
    }
    for _ in 0..2 {
        let (got, want) = finished
            .recv_timeout(Duration::from_secs(60))
            .expect("a vCPU does not see the other's change");
        assert_eq!(got, want);
    }
}

/// A function that the VMM replaces while it answers an access to a port: as a device that
/// copies what it was asked for into guest memory, with or without asking for the page again. A second function, which is
/// called before and after all the accesses, is replaced early.
#[test]
fn what_the_vmm_writes_during_an_exit_is_executed() {
    const FUNCTION: u64 = 0x7000;
    const RARE: u64 = 0x9000;
    const EXITS: u32 = 4000;
    let machine = Machine::new();
    for function in [FUNCTION, RARE] {
        machine.load(function, |a| {
            a.mov(eax, 0)?;
            a.ret()
        });
    }
    machine.load(CODE, |a| {
        let mut again = a.create_label();
        a.mov(esi, RARE as u32)?;
        a.call(rsi)?;
        a.add(ebx, eax)?;
        a.mov(ecx, EXITS)?;
        a.set_label(&mut again)?;
        a.mov(esi, FUNCTION as u32)?;
        a.call(rsi)?;
        a.add(ebx, eax)?;
        a.out(0x80, al)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.mov(esi, RARE as u32)?;
        a.call(rsi)?;
        a.add(ebx, eax)?;
        a.hlt()
    });
    let mut vcpu = machine.vcpu(0, CODE);
    let (mut value, mut sum) = (0_u32, 0_u64);
    for exit in 0.. {
        match vcpu.run().unwrap() {
            VcpuExit::IoOut(0x80, _) => sum += u64::from(value),
            VcpuExit::Hlt => break,
            other => panic!("{other:?}"),
        }
        if exit == 5 {
            let at = GuestAddress(RARE + 1);
            machine.memory.write_obj(EXITS, at).unwrap();
        }
        // Not each time, so that the same code is also executed again, and at times for long.
        if exit % 3 != 0 && exit % 1500 < 200 {
            value += 1;
            let at = GuestAddress(FUNCTION + 1);
            machine.memory.write_obj(value, at).unwrap();
        }
    }
    assert_eq!(vcpu.get_regs().unwrap().rbx, sum + u64::from(EXITS));
}

/// A thread of the VMM's overwrites a function again and again while the guest executes it: as a
/// disk's thread that reads into a page that was code. The guest serializes once it has seen the
/// flag, as it has to after code that another agent has changed.
#[test]
fn what_a_thread_of_the_vmm_writes_is_executed_after_cpuid() {
    const FUNCTION: u64 = 0x7000;
    const ASKED: u64 = 0x6000;
    const WRITTEN: u64 = 0x6040;
    const ROUNDS: u32 = 2000;
    let machine = Machine::new();
    machine.load(FUNCTION, |a| {
        a.mov(eax, 0)?;
        a.ret()
    });
    machine.load(CODE, |a| {
        let (mut again, mut wait) = (a.create_label(), a.create_label());
        a.mov(edi, 1)?;
        a.xor(r8d, r8d)?;
        a.set_label(&mut again)?;
        a.mov(dword_ptr(ASKED), edi)?;
        a.set_label(&mut wait)?;
        // The old code stays in use meanwhile.
        a.mov(esi, FUNCTION as u32)?;
        a.call(rsi)?;
        a.cmp(dword_ptr(WRITTEN), edi)?;
        a.jne(wait)?;
        a.xor(eax, eax)?;
        a.cpuid()?;
        a.mov(esi, FUNCTION as u32)?;
        a.call(rsi)?;
        a.add(r8d, eax)?;
        a.inc(edi)?;
        a.cmp(edi, ROUNDS)?;
        a.jbe(again)?;
        a.mov(ebx, r8d)?;
        a.hlt()
    });
    let memory = machine.memory;
    let writer = thread::spawn(move || {
        for round in 1..=ROUNDS {
            while memory
                .load::<u32>(GuestAddress(ASKED), Ordering::Acquire)
                .unwrap()
                != round
            {
                thread::yield_now();
            }
            let function = GuestAddress(FUNCTION + 1);
            memory.write_obj(round, function).unwrap();
            memory
                .store(round, GuestAddress(WRITTEN), Ordering::Release)
                .unwrap();
        }
    });
    let mut vcpu = machine.vcpu(0, CODE);
    assert_eq!(run(&mut vcpu), (1..=u64::from(ROUNDS)).sum::<u64>());
    writer.join().unwrap();
}
