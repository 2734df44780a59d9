//! `anykvm bench exits`: what an exit to the VMM and back costs, by kind.
//!
//! The guest is a loop of one instruction that exits; the time is from one KVM_RUN to the next,
//! with nothing done in between. The best of many runs counts, as other load on the machine only
//! makes it slower.

use std::time::Instant;

use anykvm_ioctls::{Kvm, VcpuExit};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs};
use vm_memory::{Bytes, GuestAddress};

use super::report::{self, Verdict};
use crate::error::BootError;
use crate::memory::{self, GuestMemory};

const EXITS: u32 = 1_000;
const RUNS: u32 = 300;
/// Nanoseconds for each of them.
const BAR: f64 = 150.0;

/// Flat 32-bit code at 0x1000; the store and the load are outside of RAM.
const KINDS: [(&str, &[u8]); 4] = [
    ("port write", &[0xe6, 0x80, 0xeb, 0xfc]),
    ("port read", &[0xe4, 0x80, 0xeb, 0xfc]),
    ("MMIO write", &[0xa3, 0, 0, 0x10, 0, 0xeb, 0xf9]),
    ("MMIO read", &[0xa1, 0, 0, 0x10, 0, 0xeb, 0xf9]),
];

/// Measures and prints all kinds.
pub(super) fn run(verdict: &mut Verdict) -> Result<String, BootError> {
    let mut lines = vec![
        ["exit to the VMM and back, ns", "", "with irqchip"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for (name, code) in KINDS {
        let mut line = vec![name.to_owned()];
        for irqchip in [false, true] {
            let ns = measure(code, irqchip)?;
            verdict.at_most(name, ns, BAR);
            line.push(report::cell(Some(ns)));
        }
        lines.push(line);
    }
    Ok(report::aligned(&lines))
}

fn measure(code: &[u8], irqchip: bool) -> Result<f64, BootError> {
    let kvm = Kvm::new().map_err(BootError::kvm("opening KVM"))?;
    let vm = kvm.create_vm().map_err(BootError::kvm("KVM_CREATE_VM"))?;
    if irqchip {
        vm.create_irq_chip()
            .map_err(BootError::kvm("KVM_CREATE_IRQCHIP"))?;
    }
    let ram: &'static GuestMemory = Box::leak(Box::new(memory::allocate(0x10000)?));
    ram.write_slice(code, GuestAddress(0x1000))
        .map_err(BootError::guest("code"))?;
    vm.set_static_memory(ram)
        .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    let mut vcpu = vm
        .create_vcpu(0)
        .map_err(BootError::kvm("KVM_CREATE_VCPU"))?;
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    vcpu.set_cpuid2(&cpuid)
        .map_err(BootError::kvm("KVM_SET_CPUID2"))?;
    let mut s = vcpu.get_sregs().map_err(BootError::kvm("KVM_GET_SREGS"))?;
    s.cr0 |= 1;
    for seg in [&mut s.cs, &mut s.ds, &mut s.es, &mut s.ss] {
        seg.base = 0;
        seg.limit = u32::MAX;
        (seg.g, seg.db) = (1, 1);
    }
    vcpu.set_sregs(&s)
        .map_err(BootError::kvm("KVM_SET_SREGS"))?;
    let start = kvm_regs {
        rip: 0x1000,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&start)
        .map_err(BootError::kvm("KVM_SET_REGS"))?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let begin = Instant::now();
        for _ in 0..EXITS {
            match vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {}
                VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data) => data.fill(1),
                exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
            }
        }
        best = best.min(begin.elapsed().as_secs_f64() / f64::from(EXITS));
    }
    Ok(best * 1e9)
}
