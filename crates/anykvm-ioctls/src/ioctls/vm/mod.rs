//! A VM's descriptor.

mod interrupts;

use std::ffi::c_ulong;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use bitflags::bitflags;
use kvm_abi::{Errno, Object, Vm};
use kvm_bindings::*;
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use crate::cap::Cap;
use crate::ioctls::device::{DeviceFd, new_device};
use crate::ioctls::vcpu::{VcpuFd, new_vcpu};
use crate::ioctls::{Descriptor, KvmRunWrapper, PAGE_SIZE, Result};
use crate::kvm_ioctls::*;

/// Where [`VmFd::register_ioevent`] listens.
#[derive(Debug, Clone, Copy)]
pub enum IoEventAddress {
    /// A port.
    Pio(u64),
    /// A guest-physical address.
    Mmio(u64),
}

/// For [`VmFd::register_ioevent`]: any value and any length.
#[derive(Debug, Clone, Copy)]
pub struct NoDatamatch;

impl From<NoDatamatch> for u64 {
    fn from(_: NoDatamatch) -> u64 {
        0
    }
}

/// MSRs that [`VmFd::set_msr_filter`] singles out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MsrFilterRange<'a> {
    /// Which accesses the range is about.
    pub flags: MsrFilterRangeFlags,
    /// First MSR.
    pub base: u32,
    /// Bits of `bitmap` in use.
    pub msr_count: u32,
    /// One bit per MSR: 1 lets the guest access it.
    pub bitmap: &'a [u8],
}

bitflags! {
    /// Accesses that a [`MsrFilterRange`] filters.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct MsrFilterRangeFlags: u32 {
        /// RDMSR.
        const READ = KVM_MSR_FILTER_READ;
        /// WRMSR.
        const WRITE = KVM_MSR_FILTER_WRITE;
    }
}

/// What happens to MSRs outside all ranges.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MsrFilterDefaultAction {
    /// As without a filter.
    ALLOW = KVM_MSR_FILTER_DEFAULT_ALLOW,
    /// #GP, or an exit if the VMM asked for those.
    DENY = KVM_MSR_FILTER_DEFAULT_DENY,
}

/// A virtual machine.
#[derive(Debug)]
pub struct VmFd {
    vm: Descriptor,
    /// Absent when the descriptor is some other file.
    object: std::result::Result<Arc<Vm>, Errno>,
    run_size: usize,
}

impl VmFd {
    fn object(&self) -> Result<&Arc<Vm>> {
        self.object.as_ref().map_err(|error| refused(*error))
    }

    pub(super) fn typed(&self) -> Result<&Arc<kvm_abi::TypedVm>> {
        Ok(self.object()?.hypervisor())
    }

    /// KVM_SET_USER_MEMORY_REGION: creates, changes or (size 0) deletes a memory slot.
    ///
    /// # Errors
    ///
    /// EINVAL for misaligned or unknown values, EEXIST for an overlap.
    ///
    /// # Safety
    ///
    /// `userspace_addr` must point to `memory_size` bytes that stay mapped as long as the slot exists, or change under
    /// [`begin_memory_change`](crate::begin_memory_change), and that Rust holds no references to: the guest writes there.
    pub unsafe fn set_user_memory_region(
        &self,
        user_memory_region: kvm_userspace_memory_region,
    ) -> Result<()> {
        self.object()?
            .set_user_memory_region(&user_memory_region)
            .map_err(refused)
    }

    /// KVM_SET_USER_MEMORY_REGION2: the same with room for private memory, which is refused.
    ///
    /// # Errors
    ///
    /// As [`Self::set_user_memory_region`].
    ///
    /// # Safety
    ///
    /// As [`Self::set_user_memory_region`].
    pub unsafe fn set_user_memory_region2(
        &self,
        user_memory_region2: kvm_userspace_memory_region2,
    ) -> Result<()> {
        self.object()?
            .set_user_memory_region2(&user_memory_region2)
            .map_err(refused)
    }

    /// KVM_SET_TSS_ADDR: three pages that Intel hosts need in real mode.
    ///
    /// # Errors
    ///
    /// EINVAL when they do not lie below 4 GiB.
    pub fn set_tss_address(&self, offset: usize) -> Result<()> {
        self.typed()?.set_tss_addr(offset as u64).map_err(refused)
    }

    /// KVM_SET_IDENTITY_MAP_ADDR: one page that Intel hosts need in real mode.
    ///
    /// # Errors
    ///
    /// EINVAL once a vCPU exists.
    pub fn set_identity_map_address(&self, address: u64) -> Result<()> {
        self.typed()?
            .set_identity_map_addr(address)
            .map_err(refused)
    }

    /// KVM_GET_CLOCK: kvmclock's time in nanoseconds.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a VM.
    pub fn get_clock(&self) -> Result<kvm_clock_data> {
        self.typed()?.get_clock().map_err(refused)
    }

    /// KVM_SET_CLOCK.
    ///
    /// # Errors
    ///
    /// EINVAL for unknown flags.
    pub fn set_clock(&self, clock: &kvm_clock_data) -> Result<()> {
        self.typed()?.set_clock(clock).map_err(refused)
    }

    /// KVM_X86_SET_MSR_FILTER from the raw structure.
    ///
    /// # Errors
    ///
    /// EINVAL for flags and ranges that KVM refuses.
    ///
    /// # Safety
    ///
    /// Every range's `bitmap` must point to `nmsrs` bits.
    pub unsafe fn set_msr_filter_unchecked(&self, filter: &kvm_msr_filter) -> Result<()> {
        ioctl_with_ref(self, KVM_X86_SET_MSR_FILTER, filter).map(drop)
    }

    /// KVM_X86_SET_MSR_FILTER: no ranges and ALLOW switch the filter off.
    ///
    /// # Errors
    ///
    /// EINVAL for too many ranges, a bitmap that is too short, or DENY without ranges.
    pub fn set_msr_filter(
        &self,
        default_action: MsrFilterDefaultAction,
        ranges: &[MsrFilterRange<'_>],
    ) -> Result<()> {
        let mut filter = kvm_msr_filter {
            flags: default_action as u32,
            ..Default::default()
        };
        let too_short =
            |range: &MsrFilterRange<'_>| range.bitmap.len() < range.msr_count.div_ceil(8) as usize;
        if ranges.len() > filter.ranges.len() || ranges.iter().any(too_short) {
            return Err(errno::Error::new(libc::EINVAL));
        }
        for (raw, range) in filter.ranges.iter_mut().zip(ranges) {
            *raw = kvm_msr_filter_range {
                flags: range.flags.bits(),
                nmsrs: range.msr_count,
                base: range.base,
                bitmap: range.bitmap.as_ptr().cast_mut(),
            };
        }
        // SAFETY: the bitmaps are slices that were found long enough; they are only read.
        unsafe { self.set_msr_filter_unchecked(&filter) }
    }

    /// KVM_IOEVENTFD: signals `fd` when the guest writes at `addr`, without an exit. A
    /// `datamatch` other than [`NoDatamatch`] also asks for its length and value.
    ///
    /// # Errors
    ///
    /// EEXIST for a registration that is there already, EINVAL, EBADF.
    pub fn register_ioevent<T: Into<u64>>(
        &self,
        fd: &EventFd,
        addr: &IoEventAddress,
        datamatch: T,
    ) -> Result<()> {
        self.ioeventfd(fd, addr, datamatch, 0)
    }

    /// KVM_IOEVENTFD with the deassign flag; all arguments as at registration.
    ///
    /// # Errors
    ///
    /// ENOENT when there is no such registration.
    pub fn unregister_ioevent<T: Into<u64>>(
        &self,
        fd: &EventFd,
        addr: &IoEventAddress,
        datamatch: T,
    ) -> Result<()> {
        self.ioeventfd(fd, addr, datamatch, 1 << kvm_ioeventfd_flag_nr_deassign)
    }

    fn ioeventfd<T: Into<u64>>(
        &self,
        fd: &EventFd,
        addr: &IoEventAddress,
        datamatch: T,
        mut flags: u32,
    ) -> Result<()> {
        let len = size_of::<T>() as u32;
        if len > 0 {
            flags |= 1 << kvm_ioeventfd_flag_nr_datamatch;
        }
        let addr = match *addr {
            IoEventAddress::Pio(port) => {
                flags |= 1 << kvm_ioeventfd_flag_nr_pio;
                port
            }
            IoEventAddress::Mmio(gpa) => gpa,
        };
        self.typed()?
            .ioeventfd(&kvm_ioeventfd {
                datamatch: datamatch.into(),
                addr,
                len,
                fd: fd.as_raw_fd(),
                flags,
                ..Default::default()
            })
            .map_err(refused)
    }

    /// KVM_GET_DIRTY_LOG: one bit per page of the slot, set if written since the last call.
    /// `memory_size` is the slot's size in bytes.
    ///
    /// # Errors
    ///
    /// ENOENT for a slot without dirty logging, EINVAL for a slot number out of range.
    pub fn get_dirty_log(&self, slot: u32, memory_size: usize) -> Result<Vec<u64>> {
        self.dirty_bitmap(slot, memory_size.div_ceil(PAGE_SIZE * 64))
    }

    fn irqfd(&self, irqfd: kvm_irqfd) -> Result<()> {
        self.typed()?.irqfd(&irqfd).map_err(refused)
    }

    /// KVM_CREATE_VCPU, and the mapping of its run page.
    ///
    /// # Errors
    ///
    /// EINVAL for an id of KVM_CAP_MAX_VCPU_ID or more, EEXIST for one that is taken, ENOMEM.
    pub fn create_vcpu(&self, id: u64) -> Result<VcpuFd> {
        let (fd, vcpu) = self.object()?.create_vcpu(id).map_err(refused)?;
        vcpu_from(fd.into(), Ok(vcpu), self.run_size)
    }

    /// A [`VcpuFd`] from the number of a vCPU's descriptor.
    ///
    /// # Errors
    ///
    /// Those of `mmap(2)`.
    ///
    /// # Safety
    ///
    /// `fd` is open and the caller's to give away.
    pub unsafe fn create_vcpu_from_rawfd(&self, fd: RawFd) -> Result<VcpuFd> {
        // SAFETY: the caller's promise.
        let descriptor = unsafe { Descriptor::from_raw(fd) };
        let vcpu = match kvm_abi::lookup(fd) {
            Ok(Object::Vcpu(vcpu)) => Ok(vcpu),
            Ok(_) => Err(Errno::new(libc::ENOTTY)),
            Err(error) => Err(error),
        };
        vcpu_from(descriptor, vcpu, self.run_size)
    }

    /// KVM_CREATE_DEVICE: the number of the new descriptor is also stored in `device`. With
    /// KVM_CREATE_DEVICE_TEST nothing is created and every call on the result fails.
    ///
    /// # Errors
    ///
    /// ENODEV for a type that x86 has not.
    pub fn create_device(&self, device: &mut kvm_create_device) -> Result<DeviceFd> {
        if let Some((fd, object)) = self.object()?.create_device(device).map_err(refused)? {
            device.fd = fd.as_raw_fd().cast_unsigned();
            return Ok(new_device(fd.into(), Ok(object)));
        }
        // DEVIATION: kvm-ioctls wraps, and later closes, whatever number `device.fd` held.
        let nothing = std::fs::File::open("/dev/null").map_err(errno::Error::from)?;
        Ok(new_device(
            OwnedFd::from(nothing).into(),
            Err(Errno::new(libc::ENOTTY)),
        ))
    }

    /// KVM_ENABLE_CAP on the VM.
    ///
    /// # Errors
    ///
    /// EINVAL for a capability that cannot be enabled, or not so.
    pub fn enable_cap(&self, cap: &kvm_enable_cap) -> Result<()> {
        self.typed()?.enable_cap(cap).map_err(refused)
    }

    /// Bytes that are mapped of each vCPU's descriptor.
    pub fn run_size(&self) -> usize {
        self.run_size
    }

    /// KVM_CHECK_EXTENSION on the VM: 0 means no, more may be a limit.
    pub fn check_extension_int(&self, c: Cap) -> i32 {
        self.check_extension_raw(c as c_ulong)
    }

    /// KVM_CHECK_EXTENSION on the VM for a capability by number; 0 for an unknown one.
    pub fn check_extension_raw(&self, c: c_ulong) -> i32 {
        self.object().map_or(-1, |vm| vm.check_extension(c))
    }

    /// KVM_CHECK_EXTENSION on the VM as yes or no.
    pub fn check_extension(&self, c: Cap) -> bool {
        self.check_extension_int(c) > 0
    }

    /// KVM_CREATE_GUEST_MEMFD.
    ///
    /// # Errors
    ///
    /// ENOTTY: private memory needs hardware.
    pub fn create_guest_memfd(&self, gmem: kvm_create_guest_memfd) -> Result<RawFd> {
        ioctl_with_ref(self, KVM_CREATE_GUEST_MEMFD, &gmem)
    }

    /// KVM_SET_MEMORY_ATTRIBUTES.
    ///
    /// # Errors
    ///
    /// ENOTTY: private memory needs hardware.
    pub fn set_memory_attributes(&self, attr: kvm_memory_attributes) -> Result<()> {
        ioctl_with_ref(self, KVM_SET_MEMORY_ATTRIBUTES, &attr).map(drop)
    }

    /// KVM_MEMORY_ENCRYPT_OP.
    ///
    /// # Errors
    ///
    /// ENOTTY: encrypted memory needs hardware.
    ///
    /// # Safety
    ///
    /// `op` must point to a command structure whose own pointers are good.
    pub unsafe fn encrypt_op<T>(&self, op: *mut T) -> Result<()> {
        ioctl_with_mut_ptr(self, KVM_MEMORY_ENCRYPT_OP, op).map(drop)
    }

    /// KVM_MEMORY_ENCRYPT_OP with an SEV command.
    ///
    /// # Errors
    ///
    /// ENOTTY: encrypted memory needs hardware.
    pub fn encrypt_op_sev(&self, op: &mut kvm_sev_cmd) -> Result<()> {
        // SAFETY: nothing follows the command's pointers.
        unsafe { self.encrypt_op(op) }
    }

    /// KVM_MEMORY_ENCRYPT_REG_REGION.
    ///
    /// # Errors
    ///
    /// ENOTTY: encrypted memory needs hardware.
    pub fn register_enc_memory_region(&self, memory_region: &kvm_enc_region) -> Result<()> {
        ioctl_with_ref(self, KVM_MEMORY_ENCRYPT_REG_REGION, memory_region).map(drop)
    }

    /// KVM_MEMORY_ENCRYPT_UNREG_REGION.
    ///
    /// # Errors
    ///
    /// ENOTTY: encrypted memory needs hardware.
    pub fn unregister_enc_memory_region(&self, memory_region: &kvm_enc_region) -> Result<()> {
        ioctl_with_ref(self, KVM_MEMORY_ENCRYPT_UNREG_REGION, memory_region).map(drop)
    }

    /// KVM_REGISTER_COALESCED_MMIO: writes to the zone go to a ring instead of causing exits.
    ///
    /// # Errors
    ///
    /// ENOSPC for too many zones.
    pub fn register_coalesced_mmio(&self, addr: IoEventAddress, size: u32) -> Result<()> {
        self.object()?
            .register_coalesced_mmio(&zone(addr, size))
            .map_err(refused)
    }

    /// KVM_UNREGISTER_COALESCED_MMIO.
    ///
    /// # Errors
    ///
    /// ENOTTY or EBADF when this is not a VM.
    pub fn unregister_coalesced_mmio(&self, addr: IoEventAddress, size: u32) -> Result<()> {
        self.object()?
            .unregister_coalesced_mmio(&zone(addr, size))
            .map_err(refused)
    }
}

fn zone(addr: IoEventAddress, size: u32) -> kvm_coalesced_mmio_zone {
    let (addr, pio) = match addr {
        IoEventAddress::Pio(port) => (port, 1),
        IoEventAddress::Mmio(gpa) => (gpa, 0),
    };
    let mut zone = kvm_coalesced_mmio_zone {
        addr,
        size,
        ..Default::default()
    };
    zone.__bindgen_anon_1.pio = pio;
    zone
}

fn vcpu_from(
    fd: Descriptor,
    vcpu: std::result::Result<Arc<kvm_abi::Vcpu>, Errno>,
    run_size: usize,
) -> Result<VcpuFd> {
    let run = KvmRunWrapper::mmap_from_fd(&fd, run_size)?;
    Ok(new_vcpu(fd, vcpu, run))
}

/// Wraps a descriptor whose object is known.
pub(crate) fn new_vmfd(
    vm: Descriptor,
    object: std::result::Result<Arc<Vm>, Errno>,
    run_size: usize,
) -> VmFd {
    VmFd {
        vm,
        object,
        run_size,
    }
}

impl AsRawFd for VmFd {
    fn as_raw_fd(&self) -> RawFd {
        self.vm.as_raw_fd()
    }
}
