//! The calls on a VM that make an object and its descriptor: KVM_CREATE_VCPU and KVM_CREATE_DEVICE.
//!
//! They are in a layer above the objects: a vCPU or a device knows its VM, and a VM knows neither.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::*;

use crate::device::Device;
use crate::dirty_ring::{self, DirtyRing};
use crate::errno::{Errno, Result};
use crate::internal::Internal;
use crate::memfd;
use crate::objects::{Object, publish, register};
use crate::ring::Ring;
use crate::run_page::{RunPage, VCPU_MMAP_SIZE};
use crate::vcpu::Vcpu;
use crate::vm::Vm;

const EINVAL: Errno = Errno::new(libc::EINVAL);
const ENOMEM: Errno = Errno::new(libc::ENOMEM);

/// Memory in bytes that the process must still be able to have for a new vCPU: the least of its translated code and TLB,
/// and all of its other tables.
const VCPU_MEMORY: usize = 128 << 20;

impl Vm {
    /// KVM_CREATE_VCPU: returns the descriptor, whose file has kvm_run, and the object.
    ///
    /// # Errors
    ///
    /// EINVAL for an id of KVM_CAP_MAX_VCPU_ID or more, EEXIST for one that is taken, ENOMEM.
    pub fn create_vcpu(self: &Arc<Self>, id: u64) -> Result<(OwnedFd, Arc<Vcpu>)> {
        let id = u32::try_from(id).map_err(|_| EINVAL)?;
        let name = CString::new(format!("kvm-vcpu:{id}")).map_err(|_| EINVAL)?;
        // Everything that may fail comes first, because a vCPU cannot be removed once it exists.
        host::allocator::can_have(VCPU_MEMORY).map_err(|_| ENOMEM)?;
        let entries = self.hypervisor().dirty_ring_entries();
        let len = match entries {
            0 => VCPU_MMAP_SIZE,
            entries => dirty_ring::file_size(entries),
        };
        let fd = memfd::create(&name, len, true)?;
        let dirty_ring = match entries {
            0 => None,
            entries => Some(DirtyRing::map(fd.as_fd(), entries)?),
        };
        let page = RunPage::map(fd.as_fd())?;
        let ring = if self.lacks_ring() {
            Some((Internal::duplicate(&fd)?, Ring::map(fd.as_fd())?))
        } else {
            None
        };
        let has_ring = ring.is_some();
        let vcpu = self.hypervisor().create_vcpu(id)?;
        if let Some(ring) = dirty_ring {
            vcpu.set_dirty_ring(entries, Box::new(ring));
        }
        if let Some((file, ring)) = ring {
            self.set_ring(file, ring);
        }
        let vcpu = Arc::new(Vcpu::new(vcpu, Arc::clone(self), page, id.into(), has_ring));
        register(&fd, Object::Vcpu(Arc::clone(&vcpu)))?;
        Ok((fd, vcpu))
    }

    /// KVM_CREATE_DEVICE: returns no descriptor if `flags` only asks whether the type exists.
    ///
    /// # Errors
    ///
    /// ENODEV for a type other than VFIO, EBUSY for a second VFIO device.
    pub fn create_device(
        self: &Arc<Self>,
        device: &kvm_create_device,
    ) -> Result<Option<(OwnedFd, Arc<Device>)>> {
        if device.type_ != kvm_device_type_KVM_DEV_TYPE_VFIO {
            return Err(Errno::new(libc::ENODEV));
        }
        if device.flags & KVM_CREATE_DEVICE_TEST != 0 {
            return Ok(None);
        }
        let device = Arc::new(Device::new(Arc::clone(self), self.claim_vfio()?));
        let fd = publish(Object::Device(Arc::clone(&device)), c"kvm-vfio", true)?;
        Ok(Some((fd, device)))
    }
}
