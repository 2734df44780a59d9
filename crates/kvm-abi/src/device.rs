//! A device descriptor (KVM API document, KVM_CREATE_DEVICE; devices/vfio).
//!
//! x86 has one device type: VFIO, by which a VMM names the VFIO groups and devices that its guest uses. KVM needs it
//! for hardware coherency. Here nothing depends on it, but a VMM's calls must succeed and fail as with KVM.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::*;

use crate::errno::{Errno, Result};
use crate::memfd::{self, FileIdentity};
use crate::user_memory::Arg;
use crate::vm::{VfioClaim, Vm};

const ENXIO: Errno = Errno::new(libc::ENXIO);

/// The object behind a device descriptor.
#[derive(Debug)]
pub struct Device {
    files: Mutex<Vec<FileIdentity>>,
    /// The VM, which lives as long as its device.
    vm: Arc<Vm>,
    _claim: VfioClaim,
}

impl Device {
    pub(crate) fn new(vm: Arc<Vm>, claim: VfioClaim) -> Self {
        Self {
            files: Mutex::default(),
            vm,
            _claim: claim,
        }
    }

    /// The VM that this device belongs to.
    pub(crate) fn vm(&self) -> &Vm {
        &self.vm
    }

    /// KVM_HAS_DEVICE_ATTR.
    ///
    /// # Errors
    ///
    /// ENXIO when there is no such attribute.
    pub fn has_attr(&self, attr: &kvm_device_attr) -> Result<()> {
        match (attr.group, u32::try_from(attr.attr)) {
            (KVM_DEV_VFIO_FILE, Ok(KVM_DEV_VFIO_FILE_ADD | KVM_DEV_VFIO_FILE_DEL)) => Ok(()),
            _ => Err(ENXIO),
        }
    }

    /// KVM_SET_DEVICE_ATTR: adds or removes the VFIO file whose number `addr` points to.
    ///
    /// # Errors
    ///
    /// ENXIO for other attributes, EFAULT, EBADF, EINVAL when the file is not VFIO's, EEXIST and
    /// ENOENT.
    pub fn set_attr(&self, attr: &kvm_device_attr) -> Result<()> {
        self.has_attr(attr)?;
        let fd = Arg(attr.addr).read::<u32>()?.cast_signed();
        let file = memfd::identity(fd)?;
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let known = files.iter().position(|other| *other == file);
        if attr.attr == u64::from(KVM_DEV_VFIO_FILE_DEL) {
            files.swap_remove(known.ok_or(Errno::new(libc::ENOENT))?);
            return Ok(());
        }
        if !is_vfio(fd)? {
            return Err(Errno::new(libc::EINVAL));
        }
        if known.is_some() {
            return Err(Errno::new(libc::EEXIST));
        }
        files.push(file);
        Ok(())
    }

    /// KVM_GET_DEVICE_ATTR: the VFIO device has no readable attributes.
    ///
    /// # Errors
    ///
    /// EPERM, as KVM answers for a device without readable attributes.
    pub fn get_attr(&self, _attr: &kvm_device_attr) -> Result<()> {
        Err(Errno::new(libc::EPERM))
    }
}

/// True if the open descriptor is a VFIO group or a VFIO device.
fn is_vfio(fd: RawFd) -> Result<bool> {
    if fd < 0 {
        return Err(Errno::new(libc::EBADF));
    }
    // SAFETY: only borrowed to read its link in /proc; should the VMM close it meanwhile, the
    // link is missing or another file's.
    let path = memfd::path(unsafe { BorrowedFd::borrow_raw(fd) })?;
    Ok(path.starts_with("/dev/vfio") || path.to_string_lossy() == "anon_inode:[vfio-device]")
}
