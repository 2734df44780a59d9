//! A tiny real-mode guest: a few pages of RAM, code, and one vCPU or more.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ptr::NonNull;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use kvm_bindings::*;

/// First byte of RAM, and where the code starts.
pub(crate) const RAM: u64 = 0x1000;
/// First byte after the RAM.
pub(crate) const RAM_END: u64 = 0x5000;

/// Sets a limit of the process for good: setrlimit(2).
pub(crate) fn set_limit(resource: libc::__rlimit_resource_t, value: u64) {
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: a limit that is read.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

/// KVM_SET_MSRS of one register; false if it or the value is refused.
pub(crate) fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) -> bool {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = Msrs::from_entries(&[entry]).unwrap();
    vcpu.set_msrs(&msrs).unwrap() == 1
}

/// Runs to the next OUT, and returns its port.
#[track_caller]
pub(crate) fn next_port(vcpu: &mut VcpuFd) -> u16 {
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(port, _) => port,
        exit => panic!("{exit:?}"),
    }
}

/// Returns the page of a KVM_EXIT_MEMORY_FAULT, or none if the run has ended with something else.
#[track_caller]
pub(crate) fn faulting_page(exit: &VcpuExit<'_>) -> Option<u64> {
    let VcpuExit::MemoryFault { flags, gpa, size } = *exit else {
        return None;
    };
    assert_eq!((flags, size), (0, 4096));
    Some(gpa)
}

/// RAM of a guest, ours to read and write.
pub(crate) struct Ram {
    address: NonNull<u8>,
    len: usize,
}

impl Ram {
    pub(crate) fn new(len: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        let address = NonNull::new(address.cast()).unwrap();
        Self { address, len }
    }
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= self.len);
        for (i, b) in bytes.iter().enumerate() {
            // SAFETY: in bounds.
            unsafe {
                self.address
                    .as_ptr()
                    .add(offset as usize + i)
                    .write_volatile(*b);
            }
        }
    }
    pub(crate) fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        assert!(offset as usize + N <= self.len);
        // SAFETY: in bounds.
        std::array::from_fn(|i| unsafe {
            self.address
                .as_ptr()
                .add(offset as usize + i)
                .read_volatile()
        })
    }
    pub(crate) fn hva(&self) -> u64 {
        self.address.as_ptr() as u64
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the guests of these tests have ended.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

pub(crate) struct Guest {
    pub(crate) vcpu: VcpuFd,
    pub(crate) vm: VmFd,
    pub(crate) ram: Ram,
}

pub(crate) fn add_slot(vm: &VmFd, slot: u32, gpa: u64, ram: &Ram, flags: u32) {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: ram.len as u64,
        userspace_addr: ram.hva(),
    };
    // SAFETY: the tests keep the memory as long as the guest runs.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
}

/// A VM with RAM from [`RAM`] to [`RAM_END`] and `code` at its beginning.
pub(crate) fn vm(code: &[u8], irqchip: bool, flags: u32) -> (VmFd, Ram) {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    if irqchip {
        vm.create_irq_chip().unwrap();
    }
    let ram = Ram::new((RAM_END - RAM) as usize);
    ram.write(0, code);
    add_slot(&vm, 0, RAM, &ram, flags);
    (vm, ram)
}

/// An irqfd that sends vCPU 0 the MSI with vector 0x40, and the real-mode table that has its handler at 0x1800.
pub(crate) fn message(vm: &VmFd) -> (host::EventFd, Ram) {
    use std::os::fd::AsRawFd;
    let ivt = Ram::new(0x1000);
    ivt.write(0x40 * 4, &[0x00, 0x18, 0, 0]);
    add_slot(vm, 1, 0, &ivt, 0);
    let event = host::EventFd::new(0).unwrap();
    let mut routing = KvmIrqRouting::new(1).unwrap();
    let entry = &mut routing.as_mut_slice()[0];
    entry.gsi = 5;
    entry.type_ = KVM_IRQ_ROUTING_MSI;
    entry.u.msi.address_lo = 0xfee0_0000;
    entry.u.msi.data = 0x40;
    vm.set_gsi_routing(&routing).unwrap();
    let mut irqfd = kvm_irqfd {
        fd: event.as_raw_fd() as u32,
        gsi: 5,
        ..Default::default()
    };
    ioctl(vm, kvm_abi::numbers::KVM_IRQFD, &mut irqfd).unwrap();
    (event, ivt)
}

/// Real mode with flat segments, about to execute at [`RAM`].
pub(crate) fn start(vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).unwrap();
    let regs = kvm_regs {
        rip: RAM,
        rsp: RAM_END - 0x100,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
}

/// Flat 32-bit protected mode.
pub(crate) fn protected(vcpu: &VcpuFd) {
    let mut s = vcpu.get_sregs().unwrap();
    s.cr0 |= 1;
    for seg in [&mut s.cs, &mut s.ds, &mut s.es, &mut s.ss] {
        seg.base = 0;
        seg.limit = u32::MAX;
        seg.g = 1;
        seg.db = 1;
    }
    s.cs.selector = 8;
    vcpu.set_sregs(&s).unwrap();
}

/// Software-enables the LAPIC.
pub(crate) fn enable_lapic(vcpu: &VcpuFd) {
    let mut lapic = vcpu.get_lapic().unwrap();
    lapic.regs[0xf0] = 0xff_u8 as _;
    lapic.regs[0xf1] = 1;
    vcpu.set_lapic(&lapic).unwrap();
}

pub(crate) const ISR: usize = 0x100;
pub(crate) const IRR: usize = 0x200;

/// A vector's bit in [`ISR`] or [`IRR`].
pub(crate) fn lapic_bit(vcpu: &VcpuFd, register: usize, vector: u8) -> bool {
    let lapic = vcpu.get_lapic().unwrap();
    let at = register + usize::from(vector) / 32 * 16 + usize::from(vector) % 32 / 8;
    lapic.regs[at] as u8 >> (vector % 8) & 1 != 0
}

impl Guest {
    pub(crate) fn new(code: &[u8], irqchip: bool) -> Self {
        Self::prepared(code, irqchip, |_| ())
    }
    /// With a VM that something is done to before it has a vCPU.
    pub(crate) fn prepared(code: &[u8], irqchip: bool, prepare: impl FnOnce(&VmFd)) -> Self {
        let (vm, ram) = vm(code, irqchip, 0);
        prepare(&vm);
        let vcpu = vm.create_vcpu(0).unwrap();
        start(&vcpu);
        Self { vcpu, vm, ram }
    }
}

/// `ioctl` on anykvm for calls that kvm-ioctls has no method for.
pub(crate) fn ioctl<T>(
    fd: &impl std::os::fd::AsRawFd,
    number: u32,
    arg: &mut T,
) -> Result<i32, i32> {
    kvm_abi::ioctl(fd.as_raw_fd(), number, std::ptr::from_mut(arg) as u64).map_err(|e| e.get())
}
