//! anykvm's own system calls, all made by one instruction.
//!
//! In a VMM's process these are subject to the VMM's system call filters, to which KVM's own work in the kernel is not.
//! A filter sees the address that a call is made from: by [`site`] anykvm's calls can be allowed, and none of the VMM's
//! with them. All system calls of vCPU threads and of threads that serve them are made here.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
};

/// Makes the call. Returns the kernel's result, in which an errno is negative.
///
/// # Safety
///
/// As for the call.
#[unsafe(naked)]
unsafe extern "C" fn system_call(number: libc::c_long, arguments: *const [usize; 6]) -> isize {
    std::arch::naked_asm!(
        "mov rax, rdi",
        "mov rcx, rsi",
        "mov rdi, [rcx]",
        "mov rsi, [rcx + 8]",
        "mov rdx, [rcx + 16]",
        "mov r10, [rcx + 24]",
        "mov r8, [rcx + 32]",
        "mov r9, [rcx + 40]",
        "syscall",
        ".globl anykvm_after_own_call",
        ".hidden anykvm_after_own_call",
        "anykvm_after_own_call:",
        "ret",
    )
}

unsafe extern "C" {
    /// Label of the code behind the instruction.
    safe static anykvm_after_own_call: u8;
}

/// The address that the kernel reports for these calls: that of the next instruction.
pub fn site() -> Range<usize> {
    let after = &raw const anykvm_after_own_call as usize;
    after..after + 1
}

/// Makes a system call. `errno` is not changed.
///
/// # Errors
/// Those of the call.
///
/// # Safety
///
/// As for the call.
pub unsafe fn call<const N: usize>(
    number: libc::c_long,
    arguments: [usize; N],
) -> io::Result<usize> {
    let mut all = [0; 6];
    for (to, from) in all.iter_mut().zip(arguments) {
        *to = from;
    }
    // SAFETY: the caller's; the array lives for the call.
    let result = unsafe { system_call(number, &raw const all) };
    usize::try_from(result).or_else(|_| match i32::try_from(-result) {
        Ok(errno @ 1..=4095) => Err(io::Error::from_raw_os_error(errno)),
        // Addresses in the upper half are no errors.
        _ => Ok(result as usize),
    })
}

/// Makes a system call that returns a new descriptor.
///
/// # Errors
/// Those of the call.
///
/// # Safety
///
/// As for the call, which must return a new descriptor.
pub unsafe fn open<const N: usize>(
    number: libc::c_long,
    arguments: [usize; N],
) -> io::Result<OwnedFd> {
    // SAFETY: the caller's.
    let fd = unsafe { call(number, arguments)? };
    // SAFETY: the kernel has just made it; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Maps a part of a file for good: shared, readable and writable, at an address of the kernel's choice.
///
/// # Errors
/// Those of `mmap`.
pub fn map_shared(fd: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<NonNull<u8>> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = libc::MAP_SHARED as usize;
    let arguments = [0, len, protection, flags, fd.as_raw_fd() as usize, offset];
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let address = unsafe { call(libc::SYS_mmap, arguments)? };
    NonNull::new(std::ptr::with_exposed_provenance_mut(address))
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Removes a mapping.
///
/// # Safety
///
/// The mapping is the caller's, and nothing refers to it.
pub unsafe fn unmap(first: NonNull<u8>, len: usize) {
    // An error would mean that there is no such mapping.
    // SAFETY: the caller's.
    let _ = unsafe { call(libc::SYS_munmap, [first.as_ptr() as usize, len]) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_errors_are_the_kernels() {
        // SAFETY: calls without pointers.
        let (process, bad) = unsafe {
            (
                call(libc::SYS_getpid, []),
                call(libc::SYS_close, [usize::MAX]),
            )
        };
        assert_eq!(process.unwrap(), std::process::id() as usize);
        assert_eq!(bad.unwrap_err().raw_os_error(), Some(libc::EBADF));
        let mut pipe = [0i32; 2];
        // SAFETY: two numbers are written.
        unsafe { call(libc::SYS_pipe2, [pipe.as_mut_ptr() as usize, 0]).unwrap() };
        let word = 7u64;
        // SAFETY: the descriptors are ours, and the buffers have eight bytes.
        unsafe {
            let (from, to) = (pipe[0] as usize, pipe[1] as usize);
            let at = &raw const word as usize;
            assert_eq!(call(libc::SYS_write, [to, at, 8]).unwrap(), 8);
            let mut read = 0u64;
            assert_eq!(
                call(libc::SYS_read, [from, &raw mut read as usize, 8]).unwrap(),
                8
            );
            assert_eq!(read, 7);
            call(libc::SYS_close, [from]).unwrap();
            call(libc::SYS_close, [to]).unwrap();
        }
    }
}
