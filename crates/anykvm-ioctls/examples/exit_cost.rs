//! What an exit to the VMM and back costs: OUT, IN, and a load and a store outside RAM.
//!
//! Prints one line per kind: its name, a tab, nanoseconds from one KVM_RUN to the next. The best
//! of a few runs counts, as other load on the machine only makes it slower.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::{error::Error, time::Instant};

use anykvm_ioctls::{Kvm, VcpuExit};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_userspace_memory_region};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const EXITS: u32 = 1_000;
const RUNS: u32 = 1_000;

fn measure(code: &[u8], irqchip: bool) -> Result<f64, Box<dyn Error>> {
    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    if irqchip {
        vm.create_irq_chip()?;
    }
    let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)])?;
    ram.write_slice(code, GuestAddress(0x1000))?;
    let slot = kvm_userspace_memory_region {
        memory_size: 0x10000,
        userspace_addr: ram.get_host_address(GuestAddress(0))? as u64,
        ..Default::default()
    };
    // SAFETY: the memory outlives the vCPU's last KVM_RUN.
    unsafe { vm.set_user_memory_region(slot) }?;
    let mut vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    // Flat 32-bit protected mode.
    let mut s = vcpu.get_sregs()?;
    s.cr0 |= 1;
    for seg in [&mut s.cs, &mut s.ds, &mut s.es, &mut s.ss] {
        seg.base = 0;
        seg.limit = u32::MAX;
        (seg.g, seg.db) = (1, 1);
    }
    vcpu.set_sregs(&s)?;
    vcpu.set_regs(&kvm_regs {
        rip: 0x1000,
        rflags: 2,
        ..Default::default()
    })?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let begin = Instant::now();
        for _ in 0..EXITS {
            match vcpu.run()? {
                VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {}
                VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => data.fill(1),
                exit => return Err(format!("{exit:?}").into()),
            }
        }
        best = best.min(begin.elapsed().as_secs_f64() / f64::from(EXITS));
    }
    Ok(best * 1e9)
}

fn main() -> Result<(), Box<dyn Error>> {
    let kinds: [(&str, &[u8]); 4] = [
        ("out", &[0xe6, 0x80, 0xeb, 0xfc]),
        ("in", &[0xe4, 0x80, 0xeb, 0xfc]),
        ("store", &[0xa3, 0, 0, 0x10, 0, 0xeb, 0xf9]),
        ("load", &[0xa1, 0, 0, 0x10, 0, 0xeb, 0xf9]),
    ];
    for irqchip in [false, true] {
        for (name, code) in kinds {
            let chips = if irqchip { " (with irqchip)" } else { "" };
            println!("{name}{chips}\t{:.0}", measure(code, irqchip)?);
        }
    }
    Ok(())
}
