//! The machine code around a block.

use iced_x86::{IcedError, code_asm::*};

use super::{AREA, CODE, CODE_SIZE, COMPONENTS, FRAME, GPR, HOST_MXCSR, HOST_RSP, PAGE, RFLAGS};

/// The page of the sequences, after the code pages.
pub(super) const SEQUENCES: u64 = CODE + CODE_SIZE as u64;
/// Where a block is called. The bytes before it leave room for the jump that ends a block.
pub(super) const ENTRY: u64 = SEQUENCES + 0x40;
/// Where a block ends: stores all registers.
pub(super) const TAIL: u64 = SEQUENCES + 0x400;
/// Where the signal handler returns to after an exception. It has stored the registers.
pub(super) const FINISH: u64 = SEQUENCES + 0x800;

const REGISTERS: [AsmRegister64; 16] = [
    rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15,
];
/// Index of RSP, which the frame loads.
const SP: usize = 4;

/// Returns the page's bytes.
pub(super) fn sequences() -> Result<Vec<u8>, IcedError> {
    let saved = [rbx, rbp, r12, r13, r14, r15];
    let mut entry = CodeAssembler::new(64)?;
    let a = &mut entry;
    for r in saved {
        a.push(r)?;
    }
    a.mov(qword_ptr(HOST_RSP), rsp)?;
    a.stmxcsr(dword_ptr(HOST_MXCSR))?;
    a.mov(eax, u32::from(COMPONENTS))?;
    a.xor(edx, edx)?;
    a.xrstor64(ptr(AREA))?;
    // 32-bit code needs data segments, which 64-bit code does not.
    a.mov(ax, ss)?;
    a.mov(ds, ax)?;
    a.mov(es, ax)?;
    for (i, r) in REGISTERS.iter().enumerate().filter(|(i, _)| *i != SP) {
        a.mov(*r, qword_ptr(GPR + 8 * i as u64))?;
    }
    // IRETQ loads flags, RSP and RIP at once. It also serializes, which is needed because the code was written through
    // another linear address (SDM vol. 3, 9.1.3).
    a.mov(rsp, FRAME)?;
    a.iretq()?;

    let mut tail = CodeAssembler::new(64)?;
    let a = &mut tail;
    for (i, r) in REGISTERS.iter().enumerate() {
        a.mov(qword_ptr(GPR + 8 * i as u64), *r)?;
    }
    a.mov(rsp, qword_ptr(HOST_RSP))?;
    a.pushfq()?;
    a.pop(qword_ptr(RFLAGS))?;
    a.mov(eax, u32::from(COMPONENTS))?;
    a.xor(edx, edx)?;
    a.xsave64(ptr(AREA))?;
    a.jmp(FINISH)?;

    let mut finish = CodeAssembler::new(64)?;
    let a = &mut finish;
    a.mov(rsp, qword_ptr(HOST_RSP))?;
    // The block may have left any flags.
    a.push(2)?;
    a.popfq()?;
    a.ldmxcsr(dword_ptr(HOST_MXCSR))?;
    a.fninit()?;
    a.vzeroupper()?;
    for r in saved.iter().rev() {
        a.pop(*r)?;
    }
    a.ret()?;

    let mut page = vec![0xcc; PAGE];
    for (at, mut code) in [(ENTRY, entry), (TAIL, tail), (FINISH, finish)] {
        let bytes = code.assemble(at)?;
        let at = (at - SEQUENCES) as usize;
        page[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(page)
}
