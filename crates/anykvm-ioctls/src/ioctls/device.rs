//! A device's descriptor.

use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::Arc;

use kvm_abi::{Device, Errno, Object};
use kvm_bindings::kvm_device_attr;

use crate::ioctls::{Descriptor, Result};
use crate::kvm_ioctls::refused;

/// A device made by [`crate::VmFd::create_device`]; on x86 that is KVM's VFIO device.
#[derive(Debug)]
pub struct DeviceFd {
    fd: Descriptor,
    /// Absent when the descriptor is some other file.
    device: std::result::Result<Arc<Device>, Errno>,
}

impl DeviceFd {
    fn device(&self) -> Result<&Device> {
        self.device.as_deref().map_err(|error| refused(*error))
    }

    /// KVM_HAS_DEVICE_ATTR.
    ///
    /// # Errors
    ///
    /// ENXIO when the device has no such attribute.
    pub fn has_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        self.device()?.has_attr(device_attr).map_err(refused)
    }

    /// KVM_SET_DEVICE_ATTR.
    ///
    /// # Errors
    ///
    /// ENXIO when the device has no such attribute; EFAULT for a bad `addr`, and what the
    /// attribute's value deserves.
    pub fn set_device_attr(&self, device_attr: &kvm_device_attr) -> Result<()> {
        self.device()?.set_attr(device_attr).map_err(refused)
    }

    /// KVM_GET_DEVICE_ATTR: stores the value at `device_attr.addr`.
    ///
    /// # Errors
    ///
    /// EPERM: the VFIO device has nothing to read.
    ///
    /// # Safety
    ///
    /// `device_attr.addr` must point to memory that the attribute's value may overwrite.
    pub unsafe fn get_device_attr(&self, device_attr: &mut kvm_device_attr) -> Result<()> {
        self.device()?.get_attr(device_attr).map_err(refused)
    }
}

/// Wraps a descriptor whose object is known.
pub(crate) fn new_device(
    fd: Descriptor,
    device: std::result::Result<Arc<Device>, Errno>,
) -> DeviceFd {
    DeviceFd { fd, device }
}

impl AsRawFd for DeviceFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl FromRawFd for DeviceFd {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        let device = match kvm_abi::lookup(fd) {
            Ok(Object::Device(device)) => Ok(device),
            Ok(_) => Err(Errno::new(libc::ENOTTY)),
            Err(error) => Err(error),
        };
        // SAFETY: the caller's promise.
        new_device(unsafe { Descriptor::from_raw(fd) }, device)
    }
}
