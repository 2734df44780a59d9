//! How many guest instructions a vCPU executes per second: `cargo xtask bench`
//! runs it. Each kernel is a loop in 64-bit mode that ends with HLT; the best
//! of a few runs counts, by the time that the thread was on a CPU, as other load
//! on the machine only makes it slower.
//!
//! Prints one line per kernel: its name, a tab, million instructions per second.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::error::Error;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 4 << 20;
const PML4: u64 = 0x1000;
const CODE: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const STACK: u64 = 0x30_0000;
const RUNS: u32 = 3;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A loop: its body is repeated RCX times.
struct Kernel {
    name: &'static str,
    /// Instructions of an iteration, DEC and JNZ included.
    per_iteration: u64,
    iterations: u64,
    body: fn(&mut CodeAssembler) -> Result<(), IcedError>,
}

const KERNELS: &[Kernel] = &[
    Kernel {
        name: "registers and memory",
        per_iteration: 11,
        iterations: 10_000_000,
        body: |a| {
            let mut never = a.create_label();
            a.mov(rax, qword_ptr(rbx))?;
            a.add(rax, rdx)?;
            a.mov(qword_ptr(rbx), rax)?;
            a.lea(rdx, qword_ptr(rdx + rax * 2 + 1))?;
            a.xor(rax, rdx)?;
            a.shr(rdx, 3)?;
            a.mov(qword_ptr(rbx + 8), rdx)?;
            a.cmp(rax, 7)?;
            a.je(never)?;
            a.set_label(&mut never)
        },
    },
    Kernel {
        name: "calls and stack",
        per_iteration: 8,
        iterations: 10_000_000,
        body: |a| {
            let (mut function, mut after) = (a.create_label(), a.create_label());
            a.call(function)?;
            a.jmp(after)?;
            a.set_label(&mut function)?;
            a.push(rax)?;
            a.add(rax, 1)?;
            a.pop(rdx)?;
            a.ret()?;
            a.set_label(&mut after)?;
            a.nop()
        },
    },
    Kernel {
        name: "bytes and branches",
        per_iteration: 10,
        iterations: 10_000_000,
        body: |a| {
            let (mut odd, mut join) = (a.create_label(), a.create_label());
            a.movzx(eax, byte_ptr(rbx))?;
            a.add(al, cl)?;
            a.mov(byte_ptr(rbx), al)?;
            a.test(al, 1)?;
            a.jne(odd)?;
            a.inc(edx)?;
            a.jmp(join)?;
            a.set_label(&mut odd)?;
            a.sub(edx, 3)?;
            a.shl(edx, 1)?;
            a.set_label(&mut join)?;
            a.nop()
        },
    },
    Kernel {
        name: "scalar double",
        per_iteration: 6,
        iterations: 2_000_000,
        body: |a| {
            a.addsd(xmm0, qword_ptr(rbx))?;
            a.mulsd(xmm1, xmm0)?;
            a.subsd(xmm0, xmm1)?;
            a.movsd_2(qword_ptr(rbx + 16), xmm0)
        },
    },
];

fn main() -> Outcome<()> {
    let memory: &'static GuestMemoryMmap<()> = Box::leak(Box::new(GuestMemoryMmap::from_ranges(
        &[(GuestAddress(0), MEMORY)],
    )?));
    // One identity-mapped GiB in large pages.
    memory.write_obj((PML4 + 0x1000) | 3, GuestAddress(PML4))?;
    memory.write_obj((PML4 + 0x2000) | 3, GuestAddress(PML4 + 0x1000))?;
    for i in 0..512_u64 {
        memory.write_obj((i << 21) | 0x83, GuestAddress(PML4 + 0x2000 + i * 8))?;
    }
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    vm.set_static_memory(memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    enter_long_mode(&vcpu)?;
    for (kernel, at) in KERNELS.iter().zip((CODE..).step_by(0x1000)) {
        let mut assembler = CodeAssembler::new(64)?;
        let mut start = assembler.create_label();
        assembler.set_label(&mut start)?;
        (kernel.body)(&mut assembler)?;
        assembler.dec(rcx)?;
        assembler.jne(start)?;
        assembler.hlt()?;
        memory.write_slice(&assembler.assemble(at)?, GuestAddress(at))?;
        let mut best = f64::MAX;
        for _ in 0..RUNS {
            vcpu.set_regs(&kvm_regs {
                rip: at,
                rcx: kernel.iterations,
                rbx: DATA,
                rsp: STACK,
                rflags: 2,
                ..Default::default()
            })?;
            let begin = on_cpu()?;
            match vcpu.run()? {
                VcpuExit::Hlt => {}
                other => return Err(format!("{}: {other:?}", kernel.name).into()),
            }
            best = best.min(on_cpu()? - begin);
        }
        let executed = (kernel.per_iteration * kernel.iterations) as f64;
        println!("{}\t{:.1}", kernel.name, executed / best / 1e6);
    }
    Ok(())
}

/// Seconds that this thread has been on a CPU (proc_pid_schedstat(5)).
fn on_cpu() -> Outcome<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let ns = text.split(' ').next().unwrap_or_default();
    Ok(ns.parse::<f64>()? / 1e9)
}

fn enter_long_mode(vcpu: &VcpuFd) -> Outcome<()> {
    let mut sregs = vcpu.get_sregs()?;
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x18,
        type_: 3,
        present: 1,
        s: 1,
        g: 1,
        db: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment {
        selector: 0x10,
        type_: 11,
        l: 1,
        db: 0,
        ..data
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    // PE, ET, NE, PG; PAE, OSFXSR, OSXMMEXCPT; LME, LMA.
    sregs.cr0 = 0x8000_0031;
    sregs.cr3 = PML4;
    sregs.cr4 = 0x620;
    sregs.efer = 0x500;
    vcpu.set_sregs(&sregs)?;
    Ok(())
}
