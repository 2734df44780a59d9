//! How long it takes to wake a vCPU from HLT: two vCPUs send each other an IPI and halt.
//!
//! Prints the time of a round trip for several limits of KVM_CAP_HALT_POLL.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::thread;
use std::time::Instant;

use anykvm_ioctls::{Error, Kvm, VcpuExit, VcpuFd};
use kvm_bindings::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

const ROUNDS: u32 = 20_000;
const PONG: u64 = 0x1100;
const HANDLER: u64 = 0x1200;
const IDT: u64 = 0x2000;
const GDT: u64 = 0x3000;

/// `mov edi, ROUNDS; again: <IPI to 1>; sti; hlt; cli; dec edi; jnz again; out 0x80, al`.
fn ping() -> Vec<u8> {
    let mut code = vec![0xbf];
    code.extend_from_slice(&ROUNDS.to_le_bytes());
    let ipi = ipi_to(1);
    let back = -(ipi.len() as i8 + 6);
    code.extend_from_slice(&ipi);
    code.extend_from_slice(&[
        0xfb,
        0xf4,
        0xfa,
        0x4f,
        0x75,
        back.cast_unsigned(),
        0xe6,
        0x80,
    ]);
    code
}

/// `again: sti; hlt; cli; <IPI to 0>; jmp again`.
fn pong() -> Vec<u8> {
    let mut code = vec![0xfb, 0xf4, 0xfa];
    let ipi = ipi_to(0);
    let back = -(ipi.len() as i8 + 5);
    code.extend_from_slice(&ipi);
    code.extend_from_slice(&[0xeb, back.cast_unsigned()]);
    code
}

/// `mov ecx, 0x830; mov edx, id; mov eax, 0x4040; wrmsr`.
fn ipi_to(id: u8) -> Vec<u8> {
    vec![
        0xb9, 0x30, 0x08, 0, 0, 0xba, id, 0, 0, 0, 0xb8, 0x40, 0x40, 0, 0, 0x0f, 0x30,
    ]
}

/// `push eax, ecx, edx; EOI; pop edx, ecx, eax; iretd`.
const EOI: &[u8] = &[
    0x50, 0x51, 0x52, 0xb9, 0x0b, 0x08, 0, 0, 0x31, 0xc0, 0x31, 0xd2, 0x0f, 0x30, 0x5a, 0x59, 0x58,
    0xcf,
];

fn set_up(vcpu: &VcpuFd, cpuid: &CpuId, rip: u64, rsp: u64) -> Result<(), Error> {
    vcpu.set_cpuid2(cpuid)?;
    let mut s = vcpu.get_sregs()?;
    s.cr0 |= 1;
    for (seg, selector) in [(&mut s.cs, 8), (&mut s.ds, 16), (&mut s.ss, 16)] {
        seg.base = 0;
        seg.limit = u32::MAX;
        (seg.g, seg.db) = (1, 1);
        seg.selector = selector;
    }
    (s.gdt.base, s.gdt.limit) = (GDT, 23);
    (s.idt.base, s.idt.limit) = (IDT, 0x7ff);
    s.apic_base |= 0xc00;
    vcpu.set_sregs(&s)?;
    let mut lapic = vcpu.get_lapic()?;
    lapic.regs[0xf1] = 1;
    vcpu.set_lapic(&lapic)?;
    vcpu.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })?;
    vcpu.set_regs(&kvm_regs {
        rip,
        rsp,
        rflags: 2,
        ..Default::default()
    })
}

fn measure(poll_ns: u64) -> Result<f64, Box<dyn std::error::Error>> {
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    vm.create_irq_chip()?;
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_HALT_POLL,
        ..Default::default()
    };
    cap.args[0] = poll_ns;
    vm.enable_cap(&cap)?;
    let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)])?;
    ram.write_slice(&ping(), GuestAddress(0x1000))?;
    ram.write_slice(&pong(), GuestAddress(PONG))?;
    ram.write_slice(EOI, GuestAddress(HANDLER))?;
    let gate = HANDLER & 0xffff | 8 << 16 | 0x8e << 40;
    ram.write_obj(gate, GuestAddress(IDT + 8 * 0x40))?;
    ram.write_obj(0x00cf_9b00_0000_ffff_u64, GuestAddress(GDT + 8))?;
    ram.write_obj(0x00cf_9300_0000_ffff_u64, GuestAddress(GDT + 16))?;
    for region in ram.iter() {
        let slot = kvm_userspace_memory_region {
            memory_size: region.len(),
            userspace_addr: ram.get_host_address(region.start_addr())? as u64,
            ..Default::default()
        };
        // SAFETY: the memory outlives both vCPUs' threads.
        unsafe { vm.set_user_memory_region(slot) }?;
    }
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    let (mut zero, mut one) = (vm.create_vcpu(0)?, vm.create_vcpu(1)?);
    set_up(&zero, &cpuid, 0x1000, 0x8000)?;
    set_up(&one, &cpuid, PONG, 0x9000)?;
    let stopper = one.stopper()?;
    thread::scope(|s| {
        s.spawn(move || one.run().map(|exit| format!("{exit:?}")));
        let begin = Instant::now();
        let exit = zero.run();
        let took = begin.elapsed();
        stopper.kick();
        match exit? {
            VcpuExit::IoOut(0x80, _) => Ok(took.as_secs_f64() / f64::from(ROUNDS)),
            exit => Err(format!("{exit:?}").into()),
        }
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for poll_ns in [0, 10_000, 50_000, 200_000] {
        let us = measure(poll_ns)? * 1e6;
        println!(
            "halt poll {:>3} us: {us:.2} us a round trip",
            poll_ns / 1000
        );
    }
    Ok(())
}
