//! Jumps in place of CPUID instructions, and the code that they lead to.

use std::arch::naked_asm;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Instruction, InstructionBlock, MemoryOperand, Register,
};

use super::Vendor;
use super::places::{JUMP, MovedRun, is_cpuid};
use crate::next::system_call;

const PAGE: usize = host::PAGE_SIZE;
/// Bytes for moved instructions. The address of the function that they call is in front.
const ROOM: usize = 4 * PAGE;
const FIRST: usize = 16;

/// The family, model and stepping that programs see.
static SIGNATURE: AtomicU32 = AtomicU32::new(0);
/// The offset at which programs see PKRU in an XSAVE image.
static PKRU_OFFSET: AtomicU32 = AtomicU32::new(0);
/// Size of PKRU's component in bytes.
pub(super) const PKRU_SIZE: u32 = 8;

/// Answers CPUID with VMX (SDM volume 2, CPUID.1:ECX.5), [`SIGNATURE`] and [`PKRU_OFFSET`]. Changes no flags.
#[unsafe(naked)]
extern "C" fn intel() {
    naked_asm!(
        "pushfq",
        "push rcx",
        "push rax",
        "cpuid",
        "cmp dword ptr [rsp], 1",
        "jne 2f",
        "or ecx, 0x20",
        "mov eax, dword ptr [rip + {signature}]",
        "2: cmp dword ptr [rsp], 0xd",
        "jne 3f",
        "cmp dword ptr [rsp + 8], 9",
        "jne 3f",
        "mov eax, {size}",
        "mov ebx, dword ptr [rip + {pkru}]",
        "xor ecx, ecx",
        "xor edx, edx",
        "3: lea rsp, [rsp + 16]",
        "popfq",
        "ret",
        signature = sym SIGNATURE,
        size = const PKRU_SIZE,
        pkru = sym PKRU_OFFSET,
    )
}

/// Answers CPUID with SVM (APM volume 3, Fn8000_0001_ECX.2, Fn8000_000A: 16 address spaces, nested paging, next RIP),
/// and [`SIGNATURE`].
#[unsafe(naked)]
extern "C" fn amd() {
    naked_asm!(
        "pushfq",
        "push rcx",
        "push rax",
        "cpuid",
        "cmp dword ptr [rsp], 1",
        "je 5f",
        "cmp dword ptr [rsp], 0x80000001",
        "jne 2f",
        "or ecx, 4",
        "5: mov eax, dword ptr [rip + {signature}]",
        "2: cmp dword ptr [rsp], 0x80000000",
        "jne 3f",
        "cmp eax, 0x8000000a",
        "jae 3f",
        "mov eax, 0x8000000a",
        "3: cmp dword ptr [rsp], 0x8000000a",
        "jne 4f",
        "mov eax, 1",
        "mov ebx, 16",
        "xor ecx, ecx",
        "mov edx, 9",
        "4: cmp dword ptr [rsp], 0xd",
        "jne 6f",
        "cmp dword ptr [rsp + 8], 9",
        "jne 6f",
        "mov eax, {size}",
        "mov ebx, dword ptr [rip + {pkru}]",
        "xor ecx, ecx",
        "xor edx, edx",
        "6: lea rsp, [rsp + 16]",
        "popfq",
        "ret",
        signature = sym SIGNATURE,
        size = const PKRU_SIZE,
        pkru = sym PKRU_OFFSET,
    )
}

/// Replaces the CPUID instructions at these places in a program that is mapped at `program`, `base` bytes above the
/// addresses it was linked for. Those that cannot be replaced stay as they are.
pub(super) fn replace(places: &[MovedRun], base: usize, program: &Range<usize>, vendor: Vendor) {
    let Some(room) = reserve(program) else { return };
    note_values();
    let routine = match vendor {
        Vendor::Intel => intel as *const () as usize,
        Vendor::Amd => amd as *const () as usize,
    };
    let mut bytes = routine.to_le_bytes().to_vec();
    bytes.resize(FIRST, 0xcc);
    let mut jumps = Vec::new();
    for place in places {
        let at = room + bytes.len();
        if let Some(code) = moved(place, base, at, room)
            && bytes.len() + code.len() <= ROOM
        {
            bytes.extend_from_slice(&code);
            jumps.push((place, at));
        }
    }
    // SAFETY: the mapping was made for this code, and has that many bytes.
    unsafe { (room as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    if !protect(room, ROOM, libc::PROT_READ | libc::PROT_EXEC) {
        return;
    }
    for (place, to) in jumps {
        jump(base.wrapping_add(place.range.start), place.range.len(), to);
    }
}

fn note_values() {
    SIGNATURE.store(kvm_abi::system::signature(), Ordering::Relaxed);
    PKRU_OFFSET.store(kvm_abi::system::pkru_offset() as u32, Ordering::Relaxed);
}

/// Reserves memory near the program: below it, where its heap does not grow, or far above.
fn reserve(program: &Range<usize>) -> Option<usize> {
    const STEP: usize = 1 << 16;
    const FAR: usize = 1 << 30;
    let first = program.start & !(STEP - 1);
    let below = (1..16).filter_map(|step| first.checked_sub(step * STEP));
    let above = (0..16).map(|step| ((program.end + FAR) & !(STEP - 1)) + step * STEP);
    below.chain(above).find(|&at| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let arguments = [at, ROOM, protection as usize, flags as usize, usize::MAX, 0];
        // SAFETY: a new mapping, which replaces none.
        let got = unsafe { system_call(libc::SYS_mmap, arguments) };
        if got > 0 && got as usize != at {
            // Kernels before 4.17 take the address as a hint.
            // SAFETY: just made, and not used.
            unsafe { system_call(libc::SYS_munmap, [got as usize, ROOM, 0, 0, 0, 0]) };
        }
        got as usize == at
    })
}

/// Returns the instructions of a place as they are at `at`: each CPUID is a call of the routine whose address is in
/// `slot`, and a jump leads back. The stack pointer is moved out of the program's red zone for the call.
fn moved(place: &MovedRun, base: usize, at: usize, slot: usize) -> Option<Vec<u8>> {
    const RED_ZONE: i64 = 128;
    let stack = |by| {
        let to = MemoryOperand::with_base_displ(Register::RSP, by);
        Instruction::with2(Code::Lea_r64_m, Register::RSP, to).ok()
    };
    let mut code = Vec::new();
    for instruction in &place.instructions {
        if is_cpuid(instruction) {
            code.push(stack(-RED_ZONE)?);
            let routine = MemoryOperand::with_base_displ(Register::RIP, slot as i64);
            code.push(Instruction::with1(Code::Call_rm64, routine).ok()?);
            code.push(stack(RED_ZONE)?);
        } else {
            code.push(relocated(instruction, base));
        }
    }
    let end = base.wrapping_add(place.range.end) as u64;
    code.push(Instruction::with_branch(Code::Jmp_rel32_64, end).ok()?);
    let block = InstructionBlock::new(&code, at as u64);
    let result = BlockEncoder::encode(64, block, BlockEncoderOptions::NONE).ok()?;
    Some(result.code_buffer)
}

/// Returns the instruction as it is in a program that is loaded `base` bytes higher.
fn relocated(instruction: &Instruction, base: usize) -> Instruction {
    let mut moved = *instruction;
    let there = |at: u64| at.wrapping_add(base as u64);
    moved.set_ip(0);
    if moved.op_count() > 0 && moved.op0_kind() == iced_x86::OpKind::NearBranch64 {
        moved.set_near_branch64(there(instruction.near_branch_target()));
    } else if moved.is_ip_rel_memory_operand() {
        moved.set_memory_displacement64(there(instruction.memory_displacement64()));
    }
    moved
}

/// Writes `jmp rel32` over `len` bytes at `site`.
fn jump(site: usize, len: usize, to: usize) {
    let Ok(distance) = i32::try_from(to.wrapping_sub(site + JUMP).cast_signed()) else {
        return;
    };
    let first = site & !(PAGE - 1);
    let pages = (site + len).next_multiple_of(PAGE) - first;
    let rwx = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    if !protect(first, pages, rwx) {
        return;
    }
    // SAFETY: instructions of the program's that nobody executes yet, and that are writable now.
    unsafe {
        std::ptr::write_bytes(site as *mut u8, 0xcc, len);
        (site as *mut u8).write(0xe9);
        ((site + 1) as *mut [u8; 4]).write_unaligned(distance.to_le_bytes());
    }
    protect(first, pages, libc::PROT_READ | libc::PROT_EXEC);
}

fn protect(at: usize, len: usize, protection: i32) -> bool {
    // SAFETY: pages of the program's own code, or of ours, which stay readable.
    unsafe { system_call(libc::SYS_mprotect, [at, len, protection as usize, 0, 0, 0]) == 0 }
}

#[cfg(test)]
mod tests {
    use super::super::places::CpuidInstructions;
    use super::super::program::{Part, Program};
    use super::super::{Vendor, places};
    use super::*;

    fn cpuid_by(routine: extern "C" fn(), leaf: u32, subleaf: u32) -> [u32; 4] {
        let (a, b, c, d): (u32, u64, u32, u32);
        let (before, after): (u64, u64);
        // SAFETY: the routine changes what CPUID changes; RBX is kept.
        unsafe {
            std::arch::asm!(
                "push rbx",
                "xor esi, esi",
                "stc",
                "pushfq",
                "pop r8",
                "call r10",
                "pushfq",
                "pop r9",
                "mov rsi, rbx",
                "pop rbx",
                in("r10") routine,
                inout("eax") leaf => a,
                inout("ecx") subleaf => c,
                out("rsi") b,
                out("edx") d,
                out("r8") before,
                out("r9") after,
            );
        }
        assert_eq!(before, after, "flags");
        [a, b as u32, c, d]
    }

    #[test]
    fn the_extension_is_shown_and_all_else_is_the_processor_s() {
        note_values();
        let signature = kvm_abi::system::signature();
        let pkru = [8, kvm_abi::system::pkru_offset() as u32, 0, 0];
        for (leaf, subleaf) in [
            (0, 0),
            (1, 0),
            (1, 9),
            (0xd, 0),
            (0xd, 1),
            (0xd, 9),
            (0x8000_0000, 0),
            (0x8000_0001, 0),
            (0x8000_0002, 0),
            (0x8000_000a, 0),
        ] {
            let host = host::cpu::cpuid(leaf, subleaf);
            let [a, b, c, d] = host;
            // The initial APIC id depends on the processor that executes the instruction.
            let same = |mut values: [u32; 4]| {
                values[1] &= if leaf == 1 { 0xff_ffff } else { u32::MAX };
                values
            };
            let want = match (leaf, subleaf) {
                (1, _) => [signature, b, c | 0x20, d],
                (0xd, 9) => pkru,
                _ => host,
            };
            let got = cpuid_by(intel, leaf, subleaf);
            assert_eq!(same(got), same(want), "{leaf:#x}");
            let want = match (leaf, subleaf) {
                (1, _) => [signature, b, c, d],
                (0xd, 9) => pkru,
                (0x8000_0000, _) => [a.max(0x8000_000a), b, c, d],
                (0x8000_0001, _) => [signature, b, c | 4, d],
                (0x8000_000a, _) => [1, 16, 0, 9],
                _ => host,
            };
            let got = cpuid_by(amd, leaf, subleaf);
            assert_eq!(same(got), same(want), "{leaf:#x}");
        }
    }

    #[test]
    fn a_replaced_instruction_does_what_it_did() {
        // push rbx; mov eax, edi; xor ecx, ecx; cpuid; cmp eax, [rip + zero]; je out; mov eax, ecx;
        // out: pop rbx; ret; zero: 0
        let code =
            b"\x53\x89\xf8\x31\xc9\x0f\xa2\x3b\x05\x06\0\0\0\x74\x02\x89\xc8\x5b\xc3\0\0\0\0";
        const LINKED: usize = 0x1000;
        let memory = host::Mapping::anonymous(PAGE).unwrap();
        let at = memory.as_ptr() as usize;
        // SAFETY: the mapping is a page.
        unsafe { (at as *mut u8).copy_from_nonoverlapping(code.as_ptr(), code.len()) };
        let frames_at = 0x50_0000;
        let frames = places::tests::frames(LINKED..LINKED + 19);
        let found = CpuidInstructions::of(&Program {
            parts: vec![
                Part {
                    address: LINKED,
                    bytes: code,
                    is_code: true,
                },
                Part {
                    address: frames_at,
                    bytes: &frames,
                    is_code: false,
                },
            ],
            frames: frames_at..frames_at + frames.len(),
        });
        assert_eq!(found.covered, 1);
        replace(&found.places, at - LINKED, &(at..at + PAGE), Vendor::Intel);
        assert_eq!(memory_at(at + 5), 0xe9);
        // SAFETY: the function was written above, and the page is executable since it was changed.
        let function: extern "C" fn(u32) -> u32 = unsafe { std::mem::transmute(at) };
        assert_eq!(function(1), host::cpu::cpuid(1, 0)[2] | 0x20);
        assert_eq!(function(0), host::cpu::cpuid(0, 0)[2]);
    }

    fn memory_at(at: usize) -> u8 {
        // SAFETY: this is called only for the test's own page.
        unsafe { (at as *const u8).read() }
    }
}
