//! CPUID as each vCPU shows it: the supported leaves with this machine's topology.
//!
//! SDM vol. 2A, CPUID. One package, one thread per core, APIC id = vCPU number.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

/// Adds the LAPIC timer's TSC-deadline mode (leaf 1 ECX), which the guest need not calibrate.
pub(crate) fn offer_tsc_deadline(leaves: &mut CpuId) {
    const TSC_DEADLINE: u32 = 1 << 24;
    for leaf in leaves.as_mut_slice().iter_mut().filter(|l| l.function == 1) {
        leaf.ecx |= TSC_DEADLINE;
    }
}

/// Returns the leaves for vCPU `id` of `cpus`.
pub(super) fn for_vcpu(supported: &CpuId, id: u8, cpus: u8) -> CpuId {
    let mut leaves = supported.clone();
    for leaf in leaves.as_mut_slice() {
        fix(leaf, u32::from(id), u32::from(cpus));
    }
    leaves
}

fn fix(leaf: &mut kvm_cpuid_entry2, id: u32, cpus: u32) {
    match leaf.function {
        0x1 => {
            // EBX: 31:24 initial APIC id, 23:16 logical processors in the package.
            leaf.ebx = (leaf.ebx & 0xffff) | (id << 24) | (cpus << 16);
            // EDX.HTT: the field above is valid.
            leaf.edx = (leaf.edx & !(1 << 28)) | (u32::from(cpus > 1) << 28);
        }
        // The cache leaves end at type 0.
        0x4 if leaf.eax & 0x1f != 0 => {
            let level = (leaf.eax >> 5) & 7;
            let sharers = if level >= 3 { cpus } else { 1 };
            let cores = cpus.next_power_of_two().min(64);
            // EAX 31:26 core ids − 1, 25:14 threads sharing this cache − 1.
            leaf.eax = (leaf.eax & 0x3fff) | ((cores - 1) << 26) | ((sharers - 1) << 14);
        }
        0xb | 0x1f => {
            let (shift, count, kind) = match leaf.index {
                0 => (0, 1, 1),
                1 => (id_bits(cpus), cpus, 2),
                _ => (0, 0, 0),
            };
            leaf.eax = shift;
            leaf.ebx = count;
            leaf.ecx = (leaf.index & 0xff) | (kind << 8);
            leaf.edx = id;
        }
        // ECX: 15:12 APIC id bits, 7:0 cores − 1 (AMD APM vol. 3, E.4.7).
        0x8000_0008 => leaf.ecx = (id_bits(cpus) << 12) | (cpus - 1),
        // Extended APIC id; core id, with one thread per core; node 0.
        0x8000_001e => {
            leaf.eax = id;
            leaf.ebx = id & 0xff;
            leaf.ecx = 0;
        }
        _ => {}
    }
}

/// Returns the number of bits that tell the cores of the package apart.
fn id_bits(cpus: u32) -> u32 {
    cpus.next_power_of_two().trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed(function: u32, index: u32, eax: u32, id: u32, cpus: u32) -> kvm_cpuid_entry2 {
        let mut leaf = kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx: 0xffff_ffff,
            ecx: 0xffff_ffff,
            edx: 0xffff_ffff,
            ..Default::default()
        };
        fix(&mut leaf, id, cpus);
        leaf
    }

    #[test]
    fn leaf_1_has_the_apic_id_and_count() {
        let leaf = fixed(1, 0, 0, 3, 4);
        assert_eq!(leaf.ebx, 0x0304_ffff);
        assert_ne!(leaf.edx & (1 << 28), 0);
        assert_eq!(fixed(1, 0, 0, 0, 1).edx & (1 << 28), 0);
    }

    #[test]
    fn topology_leaves_agree() {
        for cpus in [1u32, 2, 3, 8, 200] {
            let smt = fixed(0xb, 0, 0, cpus - 1, cpus);
            let core = fixed(0xb, 1, 0, cpus - 1, cpus);
            assert_eq!((smt.eax, smt.ebx, smt.ecx), (0, 1, 0x100));
            assert_eq!((core.ebx, core.ecx, core.edx), (cpus, 0x201, cpus - 1));
            assert_eq!((cpus - 1) >> core.eax, 0, "all cores in one package");
            assert_eq!(fixed(0xb, 2, 0, 0, cpus).ecx, 2);
        }
    }

    #[test]
    fn caches_say_who_shares_them() {
        let l1 = fixed(4, 0, 0x21, 0, 4);
        let l3 = fixed(4, 3, 0x63, 0, 4);
        assert_eq!((l1.eax >> 14) & 0xfff, 0);
        assert_eq!((l3.eax >> 14) & 0xfff, 3);
        assert_eq!(l3.eax >> 26, 3);
        assert_eq!(fixed(4, 4, 0, 0, 4).eax, 0);
    }
}
