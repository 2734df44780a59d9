//! The border between the program and our code: only here both have state in registers.
//!
//! The program's FS and ours are different thread-local storages. GS is the thread's [`ThreadBlock`] while the program
//! runs; in our code it is whatever translated code makes of it. A system call of the program keeps all registers but
//! rax, rcx and r11, including vector registers and flags. It does not touch the program's stack, which need not exist.
//!
//! The first instruction sets `in_host`, and the last but the way out clears it: a signal in between waits. Signals
//! that have waited are let in on the way out, when everything is the program's again.
//!
//! A call on a signal stack needs more. As soon as the stack pointer is on our own stack, the kernel would begin a
//! handler at the end of the signal stack, over what is there. So signals are blocked while the program's stack is
//! still the current one, until [`StackAside`] has taken the signal stack away; and before it is given back, until the
//! program's stack is the current one again.
//!
//! [`StackAside`]: super::signals::StackAside

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use libc::{c_int, c_long, c_void, siginfo_t};

use super::block::{BLOCKS, BLOCKS_SIZE, ThreadBlock};

/// The program's registers at a system call, from the lowest address up, on our stack.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Frame {
    pub(super) fs: usize,
    /// On entry the address of the thunk's `syscall`, on the way out the address to go on at.
    pub(super) target: usize,
    pub(super) r15: usize,
    pub(super) r14: usize,
    pub(super) r13: usize,
    pub(super) r12: usize,
    pub(super) r10: usize,
    pub(super) r9: usize,
    pub(super) r8: usize,
    pub(super) rbp: usize,
    pub(super) rdi: usize,
    pub(super) rsi: usize,
    pub(super) rdx: usize,
    pub(super) rbx: usize,
    /// On entry the call's number, on the way out its result.
    pub(super) rax: usize,
    pub(super) flags: usize,
    pub(super) rsp: usize,
}

/// Number of bytes that the processor needs for the vector registers.
pub(super) static XSAVE_SIZE: AtomicUsize = AtomicUsize::new(0);
/// State components that are saved: all that a system call must not change.
pub(super) static XSAVE_MASK: AtomicU32 = AtomicU32::new(0);
/// Address of a `syscall; ret` from which user dispatch lets system calls pass.
pub(super) static SYSCALL: AtomicUsize = AtomicUsize::new(0);

/// The number of no system call: it says that [`execute`] has come back.
pub(super) const EXECVE_FAILED: c_long = 0x616b_0000;

/// Signals that are blocked for a moment.
static DEFERRABLE: u64 = kvm_abi::signals::DEFERRABLE;

/// The code at which thunks go on with a call that may be ours. r11 has the address of the thunk's `syscall`.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn enter() {
    std::arch::naked_asm!(
        "mov byte ptr gs:[{in_host}], 1",
        "mov rcx, gs:[{signal_stack} + 8]",
        "jrcxz 5f",
        "jmp 4f",
        "5:",
        "jmp {enter_now}",
        "4:",
        // A handler has begun on a signal stack. The following tests whether the current stack is that one, and keeps
        // the program's flags.
        "mov gs:[{scratch}], rax",
        "lahf",
        "seto al",
        "mov gs:[{scratch} + 8], rax",
        "mov rcx, rsp",
        "sub rcx, gs:[{signal_stack}]",
        "cmp rcx, gs:[{signal_stack} + 8]",
        "jae 3f",
        "mov gs:[{scratch} + 16], rdi",
        "mov gs:[{scratch} + 24], rsi",
        "mov gs:[{scratch} + 32], rdx",
        "mov gs:[{scratch} + 40], r10",
        "mov gs:[{scratch} + 48], r11",
        "mov eax, {sigprocmask}",
        "mov edi, {set}",
        "lea rsi, [rip + {deferrable}]",
        "mov rdx, gs:[{this}]",
        "lea rdx, [rdx + {blocked}]",
        "mov r10d, 8",
        "lea rsp, [rsp - 128]",
        "call [rip + {syscall}]",
        "lea rsp, [rsp + 128]",
        "mov byte ptr gs:[{is_blocked}], 1",
        "mov rdi, gs:[{scratch} + 16]",
        "mov rsi, gs:[{scratch} + 24]",
        "mov rdx, gs:[{scratch} + 32]",
        "mov r10, gs:[{scratch} + 40]",
        "mov r11, gs:[{scratch} + 48]",
        "3:",
        "mov rax, gs:[{scratch} + 8]",
        "add al, 127",
        "sahf",
        "mov rax, gs:[{scratch}]",
        "jmp {enter_now}",
        in_host = const offset_of!(ThreadBlock, in_host),
        signal_stack = const offset_of!(ThreadBlock, signal_stack),
        scratch = const offset_of!(ThreadBlock, scratch),
        is_blocked = const offset_of!(ThreadBlock, is_blocked),
        blocked = const offset_of!(ThreadBlock, blocked),
        sigprocmask = const libc::SYS_rt_sigprocmask,
        set = const libc::SIG_SETMASK,
        deferrable = sym DEFERRABLE,
        syscall = sym SYSCALL,
        this = const offset_of!(ThreadBlock, this),
        enter_now = sym enter_now,
    )
}

/// The rest of [`enter`]. Only rcx has been changed so far.
#[unsafe(naked)]
unsafe extern "C" fn enter_now() {
    std::arch::naked_asm!(
        "mov rcx, rsp",
        "mov rsp, gs:[{host_stack}]",
        "push rcx",
        "pushfq",
        "cld",
        "push rax",
        "push rbx",
        "push rdx",
        "push rsi",
        "push rdi",
        "push rbp",
        "push r8",
        "push r9",
        "push r10",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push r11",
        "rdfsbase rcx",
        "push rcx",
        "mov gs:[{program_fs}], rcx",
        "mov rbp, rsp",
        "sub rsp, [rip + {size}]",
        "and rsp, -64",
        // The header of the area is cleared, because XRSTOR requires zeros in what XSAVE does not write.
        "xor eax, eax",
        "mov [rsp + 512], rax",
        "mov [rsp + 520], rax",
        "mov [rsp + 528], rax",
        "mov [rsp + 536], rax",
        "mov [rsp + 544], rax",
        "mov [rsp + 552], rax",
        "mov [rsp + 560], rax",
        "mov [rsp + 568], rax",
        "xor edx, edx",
        "mov eax, [rip + {mask}]",
        "xsave64 [rsp]",
        "mov rax, gs:[{host_fs}]",
        "wrfsbase rax",
        "mov byte ptr gs:[{selector}], 0",
        "mov rbx, gs:[{this}]",
        "mov rdi, rbp",
        "mov rsi, rbx",
        "call {dispatch}",
        "mov rdi, rbp",
        "mov rsi, rbx",
        "mov rdx, rsp",
        "jmp {leave}",
        selector = const offset_of!(ThreadBlock, selector),
        host_stack = const offset_of!(ThreadBlock, host_stack),
        host_fs = const offset_of!(ThreadBlock, host_fs),
        program_fs = const offset_of!(ThreadBlock, program_fs),
        this = const offset_of!(ThreadBlock, this),
        size = sym XSAVE_SIZE,
        mask = sym XSAVE_MASK,
        dispatch = sym super::dispatch::dispatch,
        leave = sym leave,
    )
}

/// Goes on in the program. The frame is in rdi, the block in rsi, and the vector registers are at rdx.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn leave(
    frame: *mut Frame,
    block: *mut ThreadBlock,
    vectors: usize,
) -> ! {
    std::arch::naked_asm!(
        "wrgsbase rsi",
        "mov rsp, rdi",
        "mov rcx, rdx",
        "xor edx, edx",
        "mov eax, [rip + {mask}]",
        "xrstor64 [rcx]",
        "mov byte ptr gs:[{selector}], 1",
        "pop rcx",
        "wrfsbase rcx",
        "pop r11",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop r10",
        "pop r9",
        "pop r8",
        "pop rbp",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rbx",
        "pop rax",
        "popfq",
        "pop rsp",
        "mov byte ptr gs:[{in_host}], 0",
        // Signals come in from here on. The following lets in those that have waited.
        "movzx ecx, byte ptr gs:[{pending}]",
        "jrcxz 2f",
        "lea rsp, [rsp - 128]",
        "push r11",
        "pushfq",
        "push rax",
        "push rdi",
        "push rsi",
        "push rdx",
        "push r10",
        "mov byte ptr gs:[{pending}], 0",
        "push qword ptr gs:[{block_mask}]",
        "mov eax, {sigprocmask}",
        "mov edi, {set}",
        "mov rsi, rsp",
        "xor edx, edx",
        "mov r10d, 8",
        "call [rip + {syscall}]",
        "lea rsp, [rsp + 8]",
        "pop r10",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rax",
        "popfq",
        "pop r11",
        "lea rsp, [rsp + 128]",
        "2:",
        "jmp r11",
        mask = sym XSAVE_MASK,
        syscall = sym SYSCALL,
        selector = const offset_of!(ThreadBlock, selector),
        in_host = const offset_of!(ThreadBlock, in_host),
        pending = const offset_of!(ThreadBlock, pending),
        block_mask = const offset_of!(ThreadBlock, mask),
        sigprocmask = const libc::SYS_rt_sigprocmask,
        set = const libc::SIG_SETMASK,
    )
}

/// The handler of every signal. If the program was interrupted, the signal is the program's.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn signal(number: c_int, info: *mut siginfo_t, context: *mut c_void) {
    std::arch::naked_asm!(
        "rdgsbase rax",
        "sub rax, [rip + {blocks}]",
        "cmp rax, [rip + {size}]",
        "jae {in_host_code}",
        "cmp byte ptr gs:[{in_host}], 0",
        "jne 2f",
        "push rdi",
        "push rsi",
        "push rdx",
        "mov byte ptr gs:[{selector}], 0",
        "call {in_program}",
        "mov byte ptr gs:[{selector}], 1",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "3:",
        "ret",
        // On the way in or out, FS and the selector may be the program's or ours.
        "2:",
        "rdfsbase rax",
        "push rax",
        "movzx eax, byte ptr gs:[{selector}]",
        "push rax",
        "sub rsp, 8",
        "mov byte ptr gs:[{selector}], 0",
        "mov rax, gs:[{host_fs}]",
        "wrfsbase rax",
        "call {in_host_code}",
        "add rsp, 8",
        "pop rax",
        "mov byte ptr gs:[{selector}], al",
        "pop rax",
        "wrfsbase rax",
        "ret",
        blocks = sym BLOCKS,
        size = sym BLOCKS_SIZE,
        in_host = const offset_of!(ThreadBlock, in_host),
        selector = const offset_of!(ThreadBlock, selector),
        host_fs = const offset_of!(ThreadBlock, host_fs),
        in_program = sym super::signals::in_program,
        in_host_code = sym super::signals::in_host,
    )
}

/// Calls a handler of the program in the middle of our code.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn call_in_the_middle(
    number: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
    handler: usize,
    block: *mut ThreadBlock,
) {
    std::arch::naked_asm!(
        "push rbx",
        "rdgsbase rax",
        "push rax",
        "rdfsbase rbx",
        "wrgsbase r8",
        "mov rax, gs:[{program_fs}]",
        "wrfsbase rax",
        "mov byte ptr gs:[{selector}], 1",
        "mov byte ptr gs:[{in_host}], 0",
        "sub rsp, 8",
        "call rcx",
        "add rsp, 8",
        "mov byte ptr gs:[{in_host}], 1",
        "mov byte ptr gs:[{selector}], 0",
        "wrfsbase rbx",
        "pop rax",
        "wrgsbase rax",
        "pop rbx",
        "ret",
        selector = const offset_of!(ThreadBlock, selector),
        in_host = const offset_of!(ThreadBlock, in_host),
        program_fs = const offset_of!(ThreadBlock, program_fs),
    )
}

/// Copies the program's first stack to below the caller's, and starts the program there.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn start(
    stack: *const u8,
    to: usize,
    len: usize,
    entry: usize,
    block: *mut ThreadBlock,
) -> ! {
    std::arch::naked_asm!(
        "mov r9, rsi",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rax",
        "mov r10, rcx",
        "mov rcx, rdx",
        "mov rsp, r9",
        "rep movsb",
        "wrgsbase r8",
        "xor eax, eax",
        "wrfsbase rax",
        "mov byte ptr gs:[{selector}], 1",
        "mov byte ptr gs:[{in_host}], 0",
        "mov r11, r10",
        "xor ebx, ebx",
        "xor ecx, ecx",
        "xor edx, edx",
        "xor esi, esi",
        "xor edi, edi",
        "xor ebp, ebp",
        "xor r8d, r8d",
        "xor r9d, r9d",
        "xor r10d, r10d",
        "xor r12d, r12d",
        "xor r13d, r13d",
        "xor r14d, r14d",
        "xor r15d, r15d",
        "jmp r11",
        selector = const offset_of!(ThreadBlock, selector),
        in_host = const offset_of!(ThreadBlock, in_host),
    )
}

/// Runs a thread of the program from its first frame on, until [`finish`].
#[unsafe(naked)]
pub(super) unsafe extern "C" fn run_thread(
    frame: *mut Frame,
    block: *mut ThreadBlock,
    vectors: usize,
) {
    std::arch::naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rsi + {base}], rsp",
        "jmp {leave}",
        base = const offset_of!(ThreadBlock, base),
        leave = sym leave,
    )
}

/// Returns from the thread's [`run_thread`].
#[unsafe(naked)]
pub(super) unsafe extern "C" fn finish(base: usize) -> ! {
    std::arch::naked_asm!(
        "mov rsp, rdi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

/// Executes another program, with all that is the program's, its signals and its stack for them included: ours would go on to the
/// other program. Only a call that fails comes back, for `execve::failed` to see to.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn execute() {
    std::arch::naked_asm!(
        "lea rsp, [rsp - 128]",
        "call [rip + {syscall}]",
        "lea rsp, [rsp + 128]",
        "mov r11, rax",
        "mov eax, {failed}",
        "jmp {enter}",
        syscall = sym SYSCALL,
        failed = const EXECVE_FAILED,
        enter = sym enter,
    )
}

/// Makes a child that borrows the program's memory until it executes another program or ends.
///
/// First the child and then the parent execute the rest, with the same block. What the child left in the block when it
/// ended in our code is put right. The kernel does not watch a child's system calls until prctl(2) asks for that, which
/// takes registers that the program has kept, and none of its stack. What is before the call may be executed again
/// (`signals::begin_again`).
#[unsafe(naked)]
pub(super) unsafe extern "C" fn borrow() {
    std::arch::naked_asm!(
        "mov byte ptr gs:[{borrowed}], 1",
        "mov byte ptr gs:[{selector}], 0",
        "syscall",
        "mov byte ptr gs:[{selector}], 1",
        "mov byte ptr gs:[{in_host}], 0",
        "mov rcx, rax",
        "jrcxz 2f",
        "mov byte ptr gs:[{borrowed}], 0",
        "jmp qword ptr gs:[{borrowed_return}]",
        "2:",
        "mov gs:[{saved}], rdi",
        "mov gs:[{saved} + 8], rsi",
        "mov gs:[{saved} + 16], rdx",
        "mov gs:[{saved} + 24], r10",
        "mov gs:[{saved} + 32], r8",
        "mov edi, {dispatch}",
        "mov esi, 1",
        "mov rdx, gs:[{thunks}]",
        "mov r10, gs:[{thunks} + 8]",
        "mov r8, gs:[{this}]",
        "lea r8, [r8 + {selector}]",
        "mov eax, {prctl}",
        "syscall",
        "mov rdi, gs:[{saved}]",
        "mov rsi, gs:[{saved} + 8]",
        "mov rdx, gs:[{saved} + 16]",
        "mov r10, gs:[{saved} + 24]",
        "mov r8, gs:[{saved} + 32]",
        "mov eax, 0",
        "jmp qword ptr gs:[{borrowed_return}]",
        this = const offset_of!(ThreadBlock, this),
        thunks = const offset_of!(ThreadBlock, thunks),
        saved = const offset_of!(ThreadBlock, saved),
        dispatch = const crate::launcher::PR_SET_SYSCALL_USER_DISPATCH,
        prctl = const libc::SYS_prctl,
        borrowed = const offset_of!(ThreadBlock, borrowed),
        borrowed_return = const offset_of!(ThreadBlock, borrowed_return),
        selector = const offset_of!(ThreadBlock, selector),
        in_host = const offset_of!(ThreadBlock, in_host),
    )
}
