//! KVM_IOEVENTFD: guest writes that signal an eventfd and nothing else.

use std::sync::Arc;

use host::EventFd;
use io_bus::{DoorbellError, DoorbellSpec, Doorbells, Published, Space};
use kvm_bindings::*;

use super::Vm;
use crate::{Error, Result};

/// An eventfd and the VMM's number for it, by which it is removed.
#[derive(Debug)]
pub(crate) struct Bell {
    fd: i32,
    pub(crate) event: EventFd,
}

/// The doorbells of a VM, as vCPUs read them.
pub(crate) type Bells = Published<Doorbells<Arc<Bell>>>;

impl From<DoorbellError> for Error {
    fn from(e: DoorbellError) -> Self {
        match e {
            DoorbellError::Invalid => Self::InvalidArgument,
            DoorbellError::Exists => Self::Exists,
            DoorbellError::NotFound => Self::NotFound,
        }
    }
}

impl Vm {
    /// KVM_IOEVENTFD: EINVAL for unknown flags and lengths, EEXIST if some write
    /// would ring two doorbells, ENOENT for removing what is not there.
    pub fn ioeventfd(&self, args: &kvm_ioeventfd) -> Result<()> {
        let flag = |nr: u32| args.flags & 1 << nr != 0;
        let known = 1 << kvm_ioeventfd_flag_nr_datamatch
            | 1 << kvm_ioeventfd_flag_nr_pio
            | 1 << kvm_ioeventfd_flag_nr_deassign;
        if args.flags & !known != 0 {
            return Err(Error::InvalidArgument);
        }
        let spec = DoorbellSpec {
            space: if flag(kvm_ioeventfd_flag_nr_pio) {
                Space::Pio
            } else {
                Space::Mmio
            },
            address: args.addr,
            len: args.len,
            datamatch: flag(kvm_ioeventfd_flag_nr_datamatch).then_some(args.datamatch),
        };
        let bells = &self.state.doorbells;
        if flag(kvm_ioeventfd_flag_nr_deassign) {
            bells
                .update(|b| b.deassign(spec, |bell| bell.fd == args.fd))
                .map_err(Error::from)?;
            return Ok(());
        }
        let event = EventFd::duplicate(args.fd).map_err(|_| Error::BadFd)?;
        let bell = Arc::new(Bell { fd: args.fd, event });
        bells.update(|b| b.assign(spec, bell)).map_err(Error::from)
    }
}
