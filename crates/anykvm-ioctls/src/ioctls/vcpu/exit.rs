//! KVM_RUN and the translation of `kvm_run` into a [`VcpuExit`].

use kvm_bindings::*;
use vmm_sys_util::errno;

use super::{HypercallExit, MsrExitReason, ReadMsrExit, VcpuExit, VcpuFd, WriteMsrExit};
use crate::ioctls::Result;
use crate::kvm_ioctls::refused;

impl VcpuFd {
    /// KVM_RUN: runs the guest until it needs the VMM. Answers are written through what the
    /// returned exit borrows, and taken by the next call.
    ///
    /// # Errors
    ///
    /// EINTR for `immediate_exit` or a kick, EAGAIN for a vCPU that waits for its start-up IPI. EFAULT is
    /// [`VcpuExit::MemoryFault`] in place of an error, as in kvm-ioctls.
    pub fn run(&mut self) -> Result<VcpuExit<'_>> {
        let result = self.object()?.run().map_err(refused);
        let page = &mut self.kvm_run_ptr;
        let reason = page.as_ref().exit_reason;
        if let Err(error) = result {
            return memory_fault(page.as_ref(), error);
        }
        if reason == KVM_EXIT_IO {
            // SAFETY: the member that belongs to this exit reason; all are integers.
            let io = unsafe { page.as_ref().__bindgen_anon_1.io };
            let len = usize::from(io.size).saturating_mul(io.count as usize);
            let data = page
                .bytes_mut(io.data_offset, len)
                .ok_or(errno::Error::new(libc::EINVAL))?;
            return match u32::from(io.direction) {
                KVM_EXIT_IO_IN => Ok(VcpuExit::IoIn(io.port, data)),
                KVM_EXIT_IO_OUT => Ok(VcpuExit::IoOut(io.port, data)),
                _ => Err(errno::Error::new(libc::EINVAL)),
            };
        }
        let details = &mut page.as_mut_ref().__bindgen_anon_1;
        Ok(match reason {
            KVM_EXIT_UNKNOWN => VcpuExit::Unknown,
            KVM_EXIT_EXCEPTION => VcpuExit::Exception,
            KVM_EXIT_HYPERCALL => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let hypercall = unsafe { &mut details.hypercall };
                VcpuExit::Hypercall(HypercallExit {
                    nr: hypercall.nr,
                    args: hypercall.args,
                    ret: &mut hypercall.ret,
                    // SAFETY: the member that belongs to this exit reason; all are integers.
                    longmode: unsafe { hypercall.__bindgen_anon_1.longmode },
                })
            }
            KVM_EXIT_DEBUG => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                VcpuExit::Debug(unsafe { details.debug }.arch)
            }
            KVM_EXIT_HLT => VcpuExit::Hlt,
            KVM_EXIT_MMIO => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let mmio = unsafe { &mut details.mmio };
                let len = mmio.data.len().min(mmio.len as usize);
                let data = mmio.data.split_at_mut(len).0;
                if mmio.is_write != 0 {
                    VcpuExit::MmioWrite(mmio.phys_addr, data)
                } else {
                    VcpuExit::MmioRead(mmio.phys_addr, data)
                }
            }
            KVM_EXIT_X86_RDMSR => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let msr = unsafe { &mut details.msr };
                VcpuExit::X86Rdmsr(ReadMsrExit {
                    error: &mut msr.error,
                    reason: MsrExitReason::from_bits_truncate(msr.reason),
                    index: msr.index,
                    data: &mut msr.data,
                })
            }
            KVM_EXIT_X86_WRMSR => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let msr = unsafe { &mut details.msr };
                VcpuExit::X86Wrmsr(WriteMsrExit {
                    error: &mut msr.error,
                    reason: MsrExitReason::from_bits_truncate(msr.reason),
                    index: msr.index,
                    data: msr.data,
                })
            }
            KVM_EXIT_IRQ_WINDOW_OPEN => VcpuExit::IrqWindowOpen,
            KVM_EXIT_SHUTDOWN => VcpuExit::Shutdown,
            KVM_EXIT_FAIL_ENTRY => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let fail = unsafe { details.fail_entry };
                VcpuExit::FailEntry(fail.hardware_entry_failure_reason, fail.cpu)
            }
            KVM_EXIT_INTR => VcpuExit::Intr,
            KVM_EXIT_SET_TPR => VcpuExit::SetTpr,
            KVM_EXIT_TPR_ACCESS => VcpuExit::TprAccess,
            KVM_EXIT_NMI => VcpuExit::Nmi,
            KVM_EXIT_INTERNAL_ERROR => VcpuExit::InternalError,
            KVM_EXIT_SYSTEM_EVENT => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let event = unsafe { &details.system_event };
                // SAFETY: the member that belongs to this exit reason; all are integers.
                let data = unsafe { &event.__bindgen_anon_1.data };
                let ndata = data.len().min(event.ndata as usize);
                VcpuExit::SystemEvent(event.type_, data.split_at(ndata).0)
            }
            KVM_EXIT_IOAPIC_EOI => {
                // SAFETY: the member that belongs to this exit reason; all are integers.
                VcpuExit::IoapicEoi(unsafe { details.eoi }.vector)
            }
            KVM_EXIT_HYPERV => VcpuExit::Hyperv,
            other => VcpuExit::Unsupported(other),
        })
    }
}

/// The exit that comes with EFAULT, or the error.
fn memory_fault(run: &kvm_run, error: errno::Error) -> Result<VcpuExit<'static>> {
    if error.errno() != libc::EFAULT || run.exit_reason != KVM_EXIT_MEMORY_FAULT {
        return Err(error);
    }
    // SAFETY: the member that belongs to this exit reason; all are integers.
    let fault = unsafe { run.__bindgen_anon_1.memory_fault };
    Ok(VcpuExit::MemoryFault {
        flags: fault.flags,
        gpa: fault.gpa,
        size: fault.size,
    })
}
