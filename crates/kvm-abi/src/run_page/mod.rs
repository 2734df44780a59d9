//! The memory that a vCPU shares with its VMM (KVM API document, §5 "The kvm_run structure").
//!
//! ```text
//!      0  struct kvm_run
//!   4096  data of a PIO exit (kvm_run.io.data_offset)
//!   8192  coalesced MMIO ring (KVM_COALESCED_MMIO_PAGE_OFFSET)
//!  12288  end = KVM_GET_VCPU_MMAP_SIZE
//! ```
//!
//! The VMM's threads may write here at any time, so fields are read and written
//! one by one with volatile accesses, each value is read once, and no reference to
//! the structure is ever made (`immediate_exit`, an atomic, excepted).

use std::mem::size_of;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU8;

use hypervisor::{Answer, Exit, HyperVExit, Question, RunStatus};
use kvm_bindings::*;

use crate::errno::Result;

/// Page size of the ABI, as the host's on x86.
pub(crate) const PAGE_SIZE: usize = 4096;

/// KVM_GET_VCPU_MMAP_SIZE.
pub const VCPU_MMAP_SIZE: usize = 3 * PAGE_SIZE;

const PIO_DATA: usize = KVM_PIO_PAGE_OFFSET as usize * PAGE_SIZE;

const _: () = assert!(size_of::<kvm_run>() <= PAGE_SIZE);

/// anykvm's mapping of the three pages.
#[derive(Debug)]
pub(crate) struct RunPage {
    run: NonNull<kvm_run>,
}

// SAFETY: the pages are shared memory that belongs to no thread; every access below is a volatile
// copy or an atomic one.
unsafe impl Send for RunPage {}
// SAFETY: the pages are shared memory that belongs to no thread; every access below is a volatile
// copy or an atomic one.
unsafe impl Sync for RunPage {}

/// Reads `len` bytes, at most 8, of the run page, by a load of the size that the VMM has most likely stored with, so
/// that the processor can forward the store.
fn read_word(at: *const u8, len: u8) -> u64 {
    // SAFETY: callers pass places of eight bytes and more, aligned to that, in the run page.
    unsafe {
        match len {
            1 => at.read_volatile().into(),
            2 => at.cast::<u16>().read_volatile().into(),
            4 => at.cast::<u32>().read_volatile().into(),
            _ => {
                let word = at.cast::<u64>().read_volatile();
                let bits = 8 * u32::from(len.min(8));
                word & u64::MAX.checked_shr(64 - bits).unwrap_or(0)
            }
        }
    }
}

impl RunPage {
    /// Maps the vCPU's file, which must be [`VCPU_MMAP_SIZE`] long.
    pub(crate) fn map(fd: BorrowedFd<'_>) -> Result<Self> {
        // The memory stays, because the file's size is sealed (`memfd::create`).
        let run = host::system::map_shared(fd, 0, VCPU_MMAP_SIZE)?.cast();
        Ok(Self { run })
    }

    /// Returns the address of kvm_run in anykvm's mapping.
    pub(crate) fn address(&self) -> u64 {
        self.run.as_ptr() as u64
    }

    /// kvm_run.immediate_exit, written by any thread or signal handler of the VMM.
    pub(crate) fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: the byte is mapped as long as `self` lives and a `u8` needs no alignment; all
        // our accesses to it go through this atomic.
        unsafe { AtomicU8::from_ptr(&raw mut (*self.run.as_ptr()).immediate_exit) }
    }

    /// kvm_run.request_interrupt_window.
    pub(crate) fn request_interrupt_window(&self) -> bool {
        // SAFETY: in bounds of the mapping and aligned, as the page is.
        unsafe { (&raw const (*self.run.as_ptr()).request_interrupt_window).read_volatile() != 0 }
    }

    /// Returns kvm_run.cr8. KVM uses the low four bits; with others, hardware raises #GP.
    pub(crate) fn cr8(&self) -> u64 {
        // SAFETY: in bounds of the mapping and aligned, as the page is.
        unsafe { (&raw const (*self.run.as_ptr()).cr8).read_volatile() }
    }

    /// kvm_run.kvm_valid_regs and kvm_dirty_regs.
    pub(crate) fn sync_flags(&self) -> (u64, u64) {
        let run = self.run.as_ptr();
        // SAFETY: in bounds of the mapping and aligned, as the page is.
        unsafe {
            (
                (&raw const (*run).kvm_valid_regs).read_volatile(),
                (&raw const (*run).kvm_dirty_regs).read_volatile(),
            )
        }
    }

    /// Clears kvm_dirty_regs, after the registers were taken over.
    pub(crate) fn clear_dirty_flags(&self) {
        // SAFETY: in bounds of the mapping and aligned, as the page is.
        unsafe { (&raw mut (*self.run.as_ptr()).kvm_dirty_regs).write_volatile(0) }
    }

    /// kvm_run.s.regs.
    pub(crate) fn sync_regs(&self) -> kvm_sync_regs {
        // SAFETY: in bounds of the mapping and aligned, as the page is; any bytes are a
        // `kvm_sync_regs`.
        unsafe { (&raw const (*self.run.as_ptr()).s.regs).read_volatile() }
    }

    /// Stores kvm_run.s.regs.
    pub(crate) fn set_sync_regs(&self, regs: kvm_sync_regs) {
        // SAFETY: in bounds of the mapping and aligned, as the page is.
        unsafe { (&raw mut (*self.run.as_ptr()).s.regs).write_volatile(regs) }
    }

    /// Reads the VMM's answer to `question`. Bytes of an IN are copied to `io`, because the VMM may change the page
    /// while the hypervisor uses them.
    pub(crate) fn answer<'a>(&self, question: Question, io: &'a mut [u8; PAGE_SIZE]) -> Answer<'a> {
        match question {
            Question::None => Answer::None,
            Question::Io { len } => {
                let bytes = io.get_mut(..len.into()).unwrap_or_default();
                let from = self.pio_data().cast_const();
                // SAFETY: `bytes` is at most a page and the PIO page is mapped; the two do not
                // overlap, `io` being the caller's.
                unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
                Answer::Io(bytes)
            }
            Question::Port { len } => Answer::Word(read_word(self.pio_data(), len)),
            Question::Mmio { len } => {
                // SAFETY: in bounds of the mapping.
                let data = unsafe {
                    let details = &raw mut (*self.run.as_ptr()).__bindgen_anon_1;
                    details.cast::<u8>().add(std::mem::offset_of!(Mmio, data))
                };
                Answer::Word(read_word(data, len))
            }
            Question::Msr => {
                let msr = self.union::<Msr>();
                Answer::Msr {
                    data: msr.data,
                    error: msr.error != 0,
                }
            }
            Question::Hypercall => Answer::Hypercall(self.union::<Hypercall>().ret),
            Question::HyperVCall => {
                Answer::Hypercall(self.union::<TypedExit<HyperVCall>>().details.result)
            }
            Question::XenCall => {
                Answer::Hypercall(self.union::<TypedExit<XenCall>>().details.result)
            }
            Question::Debugger => {
                Answer::Debugger(self.union::<TypedExit<Debugger>>().details.status)
            }
        }
    }

    /// Describes an exit to the VMM. Returns what the next KVM_RUN has to read from the page.
    pub(crate) fn store(&self, exit: &Exit, status: &RunStatus) -> Question {
        self.store_status(status);
        self.store_exit(exit)
    }

    /// kvm_run.exit_reason.
    pub(crate) fn set_exit_reason(&self, reason: u32) {
        // SAFETY: in bounds of the mapping and aligned, as the page is.
        unsafe { (&raw mut (*self.run.as_ptr()).exit_reason).write_volatile(reason) }
    }

    /// Stores the fields that KVM refreshes at every return from KVM_RUN.
    pub(crate) fn store_status(&self, status: &RunStatus) {
        let run = self.run.as_ptr();
        let flags = if status.in_smm {
            KVM_RUN_X86_SMM as u16
        } else {
            0
        };
        // SAFETY: all in bounds of the mapping and aligned, as the page is.
        unsafe {
            (&raw mut (*run).ready_for_interrupt_injection)
                .write_volatile(u8::from(status.ready_for_interrupt_injection));
            (&raw mut (*run).if_flag).write_volatile(u8::from(status.if_flag));
            (&raw mut (*run).flags).write_volatile(flags);
            (&raw mut (*run).cr8).write_volatile(u64::from(status.cr8));
            (&raw mut (*run).apic_base).write_volatile(status.apic_base);
        }
    }

    fn store_exit(&self, exit: &Exit) -> Question {
        let (reason, question) = match *exit {
            Exit::Io {
                is_in,
                port,
                size,
                count,
                ref data,
            } => (KVM_EXIT_IO, self.store_io(is_in, port, size, count, data)),
            Exit::Mmio {
                gpa,
                len,
                is_write,
                data,
            } => (KVM_EXIT_MMIO, self.store_mmio(gpa, data, len, is_write)),
            Exit::Hlt => (KVM_EXIT_HLT, Question::None),
            Exit::Shutdown => (KVM_EXIT_SHUTDOWN, Question::None),
            Exit::DirtyRingFull => (KVM_EXIT_DIRTY_RING_FULL, Question::None),
            Exit::IrqWindowOpen => (KVM_EXIT_IRQ_WINDOW_OPEN, Question::None),
            Exit::SetTpr => (KVM_EXIT_SET_TPR, Question::None),
            Exit::TprAccess { rip, is_write } => {
                self.set_union(TprAccess {
                    rip,
                    is_write: u32::from(is_write),
                    pad: 0,
                });
                (KVM_EXIT_TPR_ACCESS, Question::None)
            }
            Exit::Debug {
                exception,
                pc,
                dr6,
                dr7,
            } => {
                self.set_union(kvm_debug_exit_arch {
                    exception,
                    pad: 0,
                    pc,
                    dr6,
                    dr7,
                });
                (KVM_EXIT_DEBUG, Question::None)
            }
            Exit::Rdmsr { index, reason } => {
                self.store_msr(index, 0, reason);
                (KVM_EXIT_X86_RDMSR, Question::Msr)
            }
            Exit::Wrmsr {
                index,
                data,
                reason,
            } => {
                self.store_msr(index, data, reason);
                (KVM_EXIT_X86_WRMSR, Question::Msr)
            }
            Exit::IoapicEoi { vector } => {
                self.set_union(vector);
                (KVM_EXIT_IOAPIC_EOI, Question::None)
            }
            Exit::Hypercall { nr, args, longmode } => {
                let mut hypercall = Hypercall {
                    nr,
                    args,
                    ..Default::default()
                };
                hypercall.__bindgen_anon_1.longmode = u32::from(longmode);
                self.set_union(hypercall);
                (KVM_EXIT_HYPERCALL, Question::Hypercall)
            }
            Exit::Xen {
                longmode,
                cpl,
                input,
                params,
            } => {
                self.store_xen(longmode, cpl, input, params);
                (KVM_EXIT_XEN, Question::XenCall)
            }
            Exit::HyperV(ref exit) => (KVM_EXIT_HYPERV, self.store_hyperv(exit)),
            Exit::MemoryFault { gpa } => {
                self.set_union(MemoryFault {
                    flags: 0,
                    gpa,
                    size: PAGE_SIZE as u64,
                });
                (KVM_EXIT_MEMORY_FAULT, Question::None)
            }
            Exit::SystemEvent { kind } => {
                self.set_union([kind, 0]);
                (KVM_EXIT_SYSTEM_EVENT, Question::None)
            }
            Exit::InternalError { suberror, ref data } => {
                self.store_internal(suberror, data);
                (KVM_EXIT_INTERNAL_ERROR, Question::None)
            }
        };
        self.set_exit_reason(reason);
        question
    }

    fn store_xen(&self, longmode: bool, cpl: u8, input: u64, params: [u64; 6]) {
        let call = XenCall {
            longmode: longmode.into(),
            cpl: cpl.into(),
            input,
            params,
            ..Default::default()
        };
        self.set_union(TypedExit::new(KVM_EXIT_XEN_HCALL, call));
    }

    fn store_mmio(&self, gpa: u64, data: [u8; 8], len: u8, is_write: bool) -> Question {
        self.set_union(Mmio {
            phys_addr: gpa,
            data,
            len: u32::from(len),
            is_write: u8::from(is_write),
        });
        if is_write {
            Question::None
        } else {
            Question::Mmio { len }
        }
    }

    fn store_internal(&self, suberror: u32, data: &[u64]) {
        let mut internal = Internal {
            suberror,
            ndata: data.len().min(16) as u32,
            data: [0; 16],
        };
        for (to, from) in internal.data.iter_mut().zip(data) {
            *to = *from;
        }
        self.set_union(internal);
    }

    fn store_io(&self, is_in: bool, port: u16, size: u8, count: u32, data: &[u8]) -> Question {
        // The hypervisor splits strings at a page. A longer one would be a defect, which must not lead to writes past
        // the PIO page.
        let len = (usize::from(size).saturating_mul(count as usize)).min(PAGE_SIZE);
        self.set_union(Io {
            direction: if is_in {
                KVM_EXIT_IO_IN
            } else {
                KVM_EXIT_IO_OUT
            } as u8,
            size,
            port,
            count,
            data_offset: PIO_DATA as u64,
        });
        let to = self.pio_data();
        if is_in {
            // As with KVM: a VMM may add what it has to what is there. A single element is read again
            // by one load of its size.
            // SAFETY: at most a page, and the PIO page is mapped and aligned.
            unsafe {
                match len {
                    1 => to.write_volatile(0),
                    2 => to.cast::<u16>().write_volatile(0),
                    4 => to.cast::<u32>().write_volatile(0),
                    _ => std::ptr::write_bytes(to, 0, len),
                }
            }
            return if count == 1 {
                Question::Port { len: size }
            } else {
                // At most a page.
                Question::Io { len: len as u16 }
            };
        }
        let bytes = data.get(..len).unwrap_or(data);
        // SAFETY: at most a page, and the PIO page is mapped; `data` lies elsewhere. (Single elements
        // by a store of their size: the VMM will read them so.)
        unsafe {
            match *bytes {
                [a] => to.write_volatile(a),
                [a, b] => to.cast::<[u8; 2]>().write_volatile([a, b]),
                [a, b, c, d] => to.cast::<[u8; 4]>().write_volatile([a, b, c, d]),
                _ => std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()),
            }
        }
        Question::None
    }

    fn store_hyperv(&self, exit: &HyperVExit) -> Question {
        match *exit {
            HyperVExit::Synic {
                msr,
                control,
                events,
                messages,
            } => {
                let details = Synic {
                    msr,
                    control,
                    evt_page: events,
                    msg_page: messages,
                    ..Default::default()
                };
                self.set_union(TypedExit::new(KVM_EXIT_HYPERV_SYNIC, details));
                Question::None
            }
            HyperVExit::Call { input, params } => {
                let details = HyperVCall {
                    input,
                    params,
                    ..Default::default()
                };
                self.set_union(TypedExit::new(KVM_EXIT_HYPERV_HCALL, details));
                Question::HyperVCall
            }
            HyperVExit::Debugger {
                msr,
                control,
                status,
                pages: [send_page, recv_page, pending_page],
            } => {
                let details = Debugger {
                    msr,
                    pad2: 0,
                    control,
                    status,
                    send_page,
                    recv_page,
                    pending_page,
                };
                self.set_union(TypedExit::new(KVM_EXIT_HYPERV_SYNDBG, details));
                if msr == hypervisor::SYNDBG_CONTROL {
                    Question::Debugger
                } else {
                    Question::None
                }
            }
        }
    }

    fn store_msr(&self, index: u32, data: u64, reason: u32) {
        self.set_union(Msr {
            error: 0,
            pad: [0; 7],
            reason,
            index,
            data,
        });
    }

    fn pio_data(&self) -> *mut u8 {
        // SAFETY: PIO_DATA is inside the mapping of VCPU_MMAP_SIZE bytes.
        unsafe { self.run.as_ptr().cast::<u8>().add(PIO_DATA) }
    }

    /// Stores one member of kvm_run's union of exit details. All members are at its start.
    fn set_union<T: Copy>(&self, details: T) {
        const { assert!(size_of::<T>() <= size_of::<kvm_run__bindgen_ty_1>()) };
        // SAFETY: in bounds as asserted; the union is aligned to 8, the most that a member asks.
        unsafe {
            (&raw mut (*self.run.as_ptr()).__bindgen_anon_1)
                .cast::<T>()
                .write_volatile(details);
        }
    }

    /// Reads one member of the union; `T` is one of the integer structures below.
    fn union<T: Copy>(&self) -> T {
        const { assert!(size_of::<T>() <= size_of::<kvm_run__bindgen_ty_1>()) };
        // SAFETY: in bounds as asserted; the union is aligned to 8, the most that a member asks; any
        // bytes are a `T`.
        unsafe {
            (&raw const (*self.run.as_ptr()).__bindgen_anon_1)
                .cast::<T>()
                .read_volatile()
        }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference outlives `self`.
        unsafe { host::system::unmap(self.run.cast(), VCPU_MMAP_SIZE) };
    }
}

// The union's members, under the names of the C structure.
type Io = kvm_run__bindgen_ty_1__bindgen_ty_4;
type Mmio = kvm_run__bindgen_ty_1__bindgen_ty_6;
type Hypercall = kvm_run__bindgen_ty_1__bindgen_ty_8;
type TprAccess = kvm_run__bindgen_ty_1__bindgen_ty_9;
type Internal = kvm_run__bindgen_ty_1__bindgen_ty_13;
type Msr = kvm_run__bindgen_ty_1__bindgen_ty_23;
type MemoryFault = kvm_run__bindgen_ty_1__bindgen_ty_27;

type Synic = kvm_hyperv_exit__bindgen_ty_1__bindgen_ty_1;
type HyperVCall = kvm_hyperv_exit__bindgen_ty_1__bindgen_ty_2;
type Debugger = kvm_hyperv_exit__bindgen_ty_1__bindgen_ty_3;
type XenCall = kvm_xen_exit__bindgen_ty_1__bindgen_ty_1;

/// `struct kvm_hyperv_exit`, or `struct kvm_xen_exit`, with one member of its union.
#[derive(Clone, Copy)]
#[repr(C)]
struct TypedExit<T> {
    kind: u32,
    pad: u32,
    details: T,
}

impl<T> TypedExit<T> {
    const fn new(kind: u32, details: T) -> Self {
        const {
            assert!(
                std::mem::offset_of!(Self, details) == std::mem::offset_of!(kvm_hyperv_exit, u)
                    && std::mem::offset_of!(Self, details) == std::mem::offset_of!(kvm_xen_exit, u)
            );
        };
        Self {
            kind,
            pad: 0,
            details,
        }
    }
}

#[cfg(test)]
mod tests;
