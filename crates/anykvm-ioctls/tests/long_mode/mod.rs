//! 64-bit code, identity-mapped, in one memslot.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use anykvm_ioctls::{Kvm, VcpuFd, VmFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_xcrs};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const MEMORY: usize = 2 << 20;
pub(crate) const PML4: u64 = 0x10_0000;
pub(crate) const STACK: u64 = 0x4000;

pub(crate) type Assemble = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// 64-bit code, identity-mapped, in one memslot.
pub(crate) struct Machine {
    pub(crate) memory: &'static GuestMemoryMmap<()>,
    pub(crate) kvm: Kvm,
    pub(crate) vm: VmFd,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let ranges = [(GuestAddress(0), MEMORY)];
        let memory: &'static _ =
            Box::leak(Box::new(GuestMemoryMmap::from_ranges(&ranges).unwrap()));
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_static_memory(memory).unwrap();
        // One large page.
        for (at, entry) in [
            (PML4, PML4 + 0x1003),
            (PML4 + 0x1000, PML4 + 0x2003),
            (PML4 + 0x2000, 0x83),
        ] {
            memory.write_obj(entry, GuestAddress(at)).unwrap();
        }
        Self { memory, kvm, vm }
    }

    pub(crate) fn load(&self, at: u64, assemble: Assemble) {
        let mut a = CodeAssembler::new(64).unwrap();
        assemble(&mut a).unwrap();
        self.write(at, &a.assemble(at).unwrap());
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(crate) fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    /// Has page faults of the vCPU handled at `handler`, by tables in the pages `gdt` and `idt`.
    pub(crate) fn handle_page_faults(&self, vcpu: &VcpuFd, tables: [u64; 2], handler: u64) {
        self.handle(vcpu, 14, tables, handler);
    }

    /// Has events of `vector`, and no others, handled at `handler`, by tables in the pages `gdt` and `idt`.
    pub(crate) fn handle(&self, vcpu: &VcpuFd, vector: u8, [gdt, idt]: [u64; 2], handler: u64) {
        let gate = u64::from(vector) * 16;
        let entries = [
            (gdt + 8, 0x00af_9b00_0000_ffff),
            (gdt + 16, 0x00cf_9300_0000_ffff),
            (idt + gate, handler | 8 << 16 | 0x8e << 40),
        ];
        for (at, entry) in entries {
            self.memory.write_obj(entry, GuestAddress(at)).unwrap();
        }
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.gdt.base, sregs.gdt.limit) = (gdt, 23);
        (sregs.idt.base, sregs.idt.limit) = (idt, gate as u16 + 15);
        vcpu.set_sregs(&sregs).unwrap();
    }

    /// Maps the large page of a gpa from 3 to 4 GiB as well.
    pub(crate) fn map_large(&self, gpa: u64) {
        let entries = [
            (PML4 + 0x1000 + 3 * 8, PML4 + 0x3003),
            (
                PML4 + 0x3000 + (gpa >> 21 & 0x1ff) * 8,
                gpa & !0x1f_ffff | 0x83,
            ),
        ];
        for (at, entry) in entries {
            self.memory.write_obj(entry, GuestAddress(at)).unwrap();
        }
    }

    pub(crate) fn vcpu(&self, id: u64, rip: u64) -> VcpuFd {
        let vcpu = self.vm.create_vcpu(id).unwrap();
        let supported = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        vcpu.set_cpuid2(&supported.unwrap()).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        let data = kvm_segment {
            limit: u32::MAX,
            selector: 0x10,
            type_: 3,
            present: 1,
            s: 1,
            g: 1,
            db: 1,
            ..Default::default()
        };
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        sregs.cs = kvm_segment {
            selector: 8,
            type_: 11,
            l: 1,
            db: 0,
            ..data
        };
        // PE, ET, NE, PG; PAE; LME, LMA.
        sregs.cr0 = 0x8000_0031;
        sregs.cr3 = PML4;
        sregs.cr4 = 0x20;
        sregs.efer = 0x500;
        vcpu.set_sregs(&sregs).unwrap();
        start(&vcpu, rip);
        vcpu
    }
}

/// Sets these bits of CR4.
pub(crate) fn set_cr4(vcpu: &VcpuFd, bits: u64) {
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 |= bits;
    vcpu.set_sregs(&sregs).unwrap();
}

/// Loads XCR0.
pub(crate) fn set_xcr0(vcpu: &VcpuFd, value: u64) {
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = value;
    vcpu.set_xcrs(&xcrs).unwrap();
}

/// About to execute at `rip` with clean registers.
pub(crate) fn start(vcpu: &VcpuFd, rip: u64) {
    let regs = kvm_regs {
        rip,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
}

/// How far these counters get while `f` does something.
pub(crate) fn counted<const N: usize>(
    vcpu: &mut VcpuFd,
    names: [&str; N],
    f: impl FnOnce(&mut VcpuFd),
) -> [u64; N] {
    let read = |vcpu: &VcpuFd| {
        let all = vcpu.statistics().unwrap();
        names.map(|name| all.iter().find(|(n, _)| *n == name).unwrap().1)
    };
    let before = read(vcpu);
    f(vcpu);
    let after = read(vcpu);
    core::array::from_fn(|n| after[n] - before[n])
}

/// Has the vCPU execute user code in flat segments, whose SYSCALL leads to `kernel`.
pub(crate) fn become_user(vcpu: &VcpuFd, kernel: u64) {
    const STAR: u32 = 0xc000_0081;
    const LSTAR: u32 = 0xc000_0082;
    const FMASK: u32 = 0xc000_0084;
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.efer |= 1;
    for (segment, selector) in [
        (&mut sregs.cs, 0x23),
        (&mut sregs.ss, 0x1b),
        (&mut sregs.ds, 0x1b),
        (&mut sregs.es, 0x1b),
    ] {
        (segment.dpl, segment.selector) = (3, selector);
    }
    vcpu.set_sregs(&sregs).unwrap();
    let msr = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = [
        msr(STAR, 0x0010_0008 << 32),
        msr(LSTAR, kernel),
        msr(FMASK, 0x4_0700),
    ];
    let set = vcpu.set_msrs(&Msrs::from_entries(&msrs).unwrap());
    assert_eq!(set.unwrap(), msrs.len());
}
