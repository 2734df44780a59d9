//! `ioctl(fd, number, argument)`. One table per type of descriptor says for every x86 ioctl what it does, or why it is
//! refused. `docs/compat.md` is generated from the same tables (`compat`).
//!
//! A number that is in no table gets KVM's answer for such a number: EINVAL on system and vCPU descriptors, ENOTTY on
//! VMs and devices.

pub(crate) mod device;
pub(crate) mod system;
pub(crate) mod vcpu;
pub(crate) mod vm;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::KVMIO;

use crate::errno::{Errno, Result};
use crate::numbers::KVM_RUN;
use crate::objects::{Object, adopt, lookup, lookup_vcpu_unchecked};
use crate::user_memory::{Arg, Plain};
use crate::vm::Vm;

/// One ioctl on descriptors whose object is a `T`.
#[derive(Debug)]
pub(crate) struct Row<T: 'static> {
    pub(crate) name: &'static str,
    pub(crate) number: u32,
    pub(crate) status: Status<T>,
}

/// How an ioctl is answered.
#[derive(Debug)]
pub(crate) enum Status<T: 'static> {
    /// Decodes the argument, makes the typed call, encodes its result.
    Done(fn(&T, Arg) -> Result<i32>),
    /// Refused with this errno, which KVM gives if it lacks the feature. The text says why anykvm lacks it.
    Refused(i32, &'static str),
}

impl<T> Row<T> {
    pub(crate) const fn done(
        name: &'static str,
        number: u32,
        call: fn(&T, Arg) -> Result<i32>,
    ) -> Self {
        Self {
            name,
            number,
            status: Status::Done(call),
        }
    }

    pub(crate) const fn refused(
        name: &'static str,
        number: u32,
        errno: i32,
        reason: &'static str,
    ) -> Self {
        Self {
            name,
            number,
            status: Status::Refused(errno, reason),
        }
    }
}

/// The types of descriptor that accept ioctls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FdKind {
    /// `/dev/kvm`.
    System,
    /// From KVM_CREATE_VM.
    Vm,
    /// From KVM_CREATE_VCPU.
    Vcpu,
    /// From KVM_CREATE_DEVICE.
    Device,
}

/// One ioctl that x86 has on descriptors of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The type of descriptor that it is called on.
    pub kind: FdKind,
    /// KVM's name for it.
    pub name: &'static str,
    /// Its number.
    pub number: u32,
    /// The errno, if it is refused here.
    pub refusal: Option<i32>,
}

/// Returns every ioctl of x86, for each type of descriptor that has it.
pub fn calls() -> Vec<Call> {
    fn of<T>(kind: FdKind, rows: &[Row<T>]) -> impl Iterator<Item = Call> {
        rows.iter().map(move |row| Call {
            kind,
            name: row.name,
            number: row.number,
            refusal: match row.status {
                Status::Done(_) => None,
                Status::Refused(errno, _) => Some(errno),
            },
        })
    }
    of(FdKind::System, system::TABLE)
        .chain(of(FdKind::Vm, vm::TABLE))
        .chain(of(FdKind::Vcpu, vcpu::TABLE))
        .chain(of(FdKind::Device, device::TABLE))
        .collect()
}

/// Returns KVM's name for a number on descriptors of that type.
pub(crate) fn name_of(kind: FdKind, number: u32) -> Option<&'static str> {
    fn of<T>(rows: &[Row<T>], number: u32) -> Option<&'static str> {
        let row = rows.iter().find(|row| row.number == number);
        row.map(|row| row.name)
    }
    match kind {
        FdKind::System => of(system::TABLE, number),
        FdKind::Vm => of(vm::TABLE, number),
        FdKind::Vcpu => of(vcpu::TABLE, number),
        FdKind::Device => of(device::TABLE, number),
    }
}

/// Number of ioctls refused since the process started.
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Returns how many calls were refused because the ioctl is unsupported or unknown.
pub fn refused_count() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// Executes `ioctl(2)`: returns the non-negative result, or the errno.
///
/// # Errors
///
/// EBADF and ENOTTY for a descriptor that is not anykvm's, EFAULT for a bad pointer, and those that the API document
/// lists for each call.
pub fn ioctl(fd: RawFd, number: u32, arg: u64) -> Result<i32> {
    // KVM_RUN, the only call that is made millions of times, makes no system call of its own.
    if number == KVM_RUN
        && let Some(vcpu) = lookup_vcpu_unchecked(fd)
    {
        in_own_process(vcpu.vm())?;
        return vcpu::run(&vcpu, Arg(arg));
    }
    let arg = Arg(arg);
    let object = lookup(fd).or_else(|error| {
        if error.get() == libc::ENOTTY && number >> 8 & 0xff == KVMIO {
            adopt(fd)
        } else {
            Err(error)
        }
    })?;
    match &object {
        Object::System => {}
        Object::Vm(vm) => in_own_process(vm)?,
        Object::Vcpu(vcpu) => in_own_process(vcpu.vm())?,
        Object::Device(device) => in_own_process(device.vm())?,
    }
    match object {
        Object::System => call(system::TABLE, &(), number, arg, libc::EINVAL),
        Object::Vm(vm) => call(vm::TABLE, &vm, number, arg, libc::ENOTTY),
        Object::Vcpu(vcpu) => call(vcpu::TABLE, &vcpu, number, arg, libc::EINVAL),
        Object::Device(device) => call(device::TABLE, &device, number, arg, libc::ENOTTY),
    }
}

/// Fails with EIO for a VM whose memory is another process's.
fn in_own_process(vm: &Vm) -> Result<()> {
    if vm.is_inherited() {
        Err(Errno::new(libc::EIO))
    } else {
        Ok(())
    }
}

fn call<T>(table: &[Row<T>], object: &T, number: u32, arg: Arg, unknown: i32) -> Result<i32> {
    let row = table.iter().find(|row| row.number == number);
    let errno = match row.map(|row| &row.status) {
        Some(Status::Done(call)) => return call(object, arg),
        Some(Status::Refused(errno, _)) => *errno,
        None if number >> 8 & 0xff != KVMIO => libc::ENOTTY,
        None => unknown,
    };
    REFUSED.fetch_add(1, Ordering::Relaxed);
    Err(Errno::new(errno))
}

/// The result of an ioctl that returns nothing.
pub(crate) fn done<E: Into<Errno>>(result: std::result::Result<(), E>) -> Result<i32> {
    result.map(|()| 0).map_err(Into::into)
}

/// The result of an ioctl that returns a count.
pub(crate) fn count(count: usize) -> Result<i32> {
    i32::try_from(count).map_err(|_| Errno::new(libc::EINVAL))
}

/// EINVAL unless the argument is 0, which KVM requires of calls without an argument.
pub(crate) fn no_argument(arg: Arg) -> Result<()> {
    if arg == Arg(0) {
        Ok(())
    } else {
        Err(Errno::new(libc::EINVAL))
    }
}

/// Offset of the array in `kvm_cpuid2`, `kvm_msrs` and `kvm_irq_routing`: behind the count and
/// another 32 bits.
pub(crate) const LIST: usize = 8;

/// The count at the beginning of a list structure, E2BIG above `limit`.
pub(crate) fn list_len(arg: Arg, limit: usize) -> Result<usize> {
    let len = arg.read::<u32>()? as usize;
    if len > limit {
        Err(Errno::new(libc::E2BIG))
    } else {
        Ok(len)
    }
}

/// Answers KVM_GET_*CPUID*: entries and their count, behind a count that said how many fit.
pub(crate) fn write_cpuid<T: Plain>(
    arg: Arg,
    entries: impl FnOnce(usize) -> Result<Vec<T>>,
) -> Result<i32> {
    let entries = entries(arg.read::<u32>()? as usize)?;
    arg.offset(LIST).write_list(&entries)?;
    arg.write(&(entries.len() as u32))
}

#[cfg(test)]
mod tests;
