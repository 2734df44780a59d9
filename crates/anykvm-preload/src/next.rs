//! Definitions that come after ours: the next one in the search order, or the system call itself.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_long, c_void};

/// A C function of the same name that comes after ours.
#[derive(Debug)]
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Returns the function's address; null if there is none.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a C string. dlsym(3) allocates nothing when it succeeds.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next definition of a function. Returns -1 with ENOSYS if the C library has none.
macro_rules! next {
    ($name:ident ( $($argument:expr => $type:ty),* $(,)? ) -> $result:ty) => {{
        static NEXT: $crate::next::Next = $crate::next::Next::new(
            // SAFETY: the literal ends with its only zero.
            unsafe {
                std::ffi::CStr::from_bytes_with_nul_unchecked(
                    concat!(stringify!($name), "\0").as_bytes(),
                )
            },
        );
        let address = NEXT.address();
        if address.is_null() {
            $crate::next::fail(libc::ENOSYS) as $result
        } else {
            // SAFETY: the function of that name has this type, by the C library's headers.
            let function = unsafe {
                std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn($($type),*) -> $result>(
                    address,
                )
            };
            // SAFETY: the caller's own arguments.
            unsafe { function($($argument),*) }
        }
    }};
}
pub(crate) use next;

/// Sets errno. Returns -1.
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Returns a KVM call's result as C has it.
pub(crate) fn answer(result: kvm_abi::Result<i32>) -> c_int {
    result.unwrap_or_else(|errno| fail(errno.get()))
}

/// Makes a system call. Returns the kernel's result, in which an errno is negative.
///
/// # Safety
///
/// The requirements of the call.
pub(crate) unsafe fn system_call(number: c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the kernel's calling convention.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Does what [`system_call`] does, with the C library's result: -1 and errno.
///
/// # Safety
///
/// The requirements of the call.
pub(crate) unsafe fn system_call_c(number: c_long, arguments: [usize; 6]) -> c_long {
    // SAFETY: the caller keeps the call's requirements.
    as_c(unsafe { system_call(number, arguments) })
}

/// Returns the C library's result for a result of the kernel.
pub(crate) fn as_c(result: isize) -> c_long {
    if (-4095..0).contains(&result) {
        fail(-result as c_int).into()
    } else {
        result as c_long
    }
}
