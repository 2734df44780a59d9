//! Programs that are executed by translated code and by the interpreter, on a bus of their own each, with the same
//! result.
//!
//! Nothing of the hypervisor is in between, so a difference is the translator's or the MMU's.

use iced_x86::{Code as C, IcedError, Instruction, MemoryOperand, Register as R, code_asm::*};
use testkit::MmuBus;
use x86_cpu::{CpuState, Feature, Flush, GuestBus};
use x86_defs::{
    control::{cr0, cr4, efer},
    reg, rflags,
    segment::{Attr, Segment},
    xsave,
};
use x86_interp::{Interp, RunStop};
use x86_jit::Jit;

const RAM: usize = 0x10_0000;
const TABLES: u64 = 0x1000;
const CODE: u64 = 0x1_0000;
const STACK: u64 = 0x3_0000;
const DATA: u64 = 0x4_0000;
/// Where the pages from [`DATA`] on are mapped in reverse order, sixteen of them.
const REVERSED: u64 = 0x20_0000;
/// How often a program returns to the run loop before it is given up.
const PATIENCE: usize = 100_000;

/// Returns a vCPU at CPL 0 in 64-bit mode, with 2 MiB mapped to themselves.
fn cpu() -> CpuState {
    let mut cpu = CpuState {
        cpl: 0,
        cr0: cr0::PE | cr0::PG | cr0::NE | cr0::MP | cr0::ET | cr0::WP,
        cr3: TABLES,
        cr4: cr4::PAE | cr4::OSFXSR | cr4::OSXSAVE,
        xcr0: xsave::X87 | xsave::SSE | xsave::AVX,
        efer: efer::LME | efer::LMA,
        rflags: 2,
        ..CpuState::default()
    };
    cpu.features.maxphyaddr = 40;
    for feature in [
        Feature::Clfsh,
        Feature::Cmov,
        Feature::Fxsr,
        Feature::Sse,
        Feature::Sse2,
        Feature::Xsave,
        Feature::Xsavec,
        Feature::Xsaveopt,
        Feature::Avx,
        Feature::Avx2,
    ] {
        cpu.features.set(feature, true);
    }
    for (n, s) in cpu.seg.iter_mut().enumerate() {
        *s = Segment {
            base: 0,
            limit: u32::MAX,
            attr: Attr(if n == reg::CS { 0xa09b } else { 0xc093 }),
            selector: if n == reg::CS { 8 } else { 16 },
        };
    }
    cpu.gpr[reg::RSP] = STACK;
    cpu.update_mode();
    cpu.set_rip(CODE);
    cpu
}

/// Makes memory with the program at [`CODE`].
fn load(bus: &mut MmuBus, code: &[u8]) {
    let word = |at: u64, v: u64| (at, v.to_le_bytes().to_vec());
    for (at, bytes) in [
        word(TABLES, 0x2003),
        word(0x2000, 0x3003),
        // The entry is that of a large page.
        word(0x3000, 0x83),
        word(0x3008, 0x5003),
        (CODE, code.to_vec()),
    ] {
        assert!(bus.mmu.write_gpa(at, &bytes));
    }
    for n in 0..16 {
        let entry = DATA + (15 - n) * 0x1000 + 3;
        assert!(bus.mmu.write_gpa(0x5000 + 8 * n, &entry.to_le_bytes()));
    }
}

/// What a program leaves: registers, RIP, flags, and memory from [`DATA`] on.
type Outcome = ([u64; 16], u64, u64, Vec<u8>);

/// Runs a program until HLT; with `jit`, by translated code.
fn run(code: &[u8], jit: Option<&mut Jit<MmuBus>>, flushes: bool) -> Outcome {
    let mut bus = MmuBus::new(RAM).expect("memory");
    load(&mut bus, code);
    let (mut cpu, mut interp) = (cpu(), Interp::new());
    bus.mmu.set_root(&cpu);
    bus.mmu.flush(&cpu, Flush::All);
    bus.select_view(&mut cpu);
    let mut jit = jit;
    for _ in 0..PATIENCE {
        let stop = match &mut jit {
            None => interp.run(&mut cpu, &mut bus),
            Some(jit) => {
                if flushes {
                    jit.flush_all();
                }
                jit.run(&mut interp, &mut cpu, &mut bus, None)
            }
        };
        if bus.mmu.needs_sync() {
            bus.mmu.sync();
        }
        if stop == RunStop::Poll {
            continue;
        }
        assert_eq!(stop, RunStop::Halt);
        let mut gpr = [0; 16];
        gpr.copy_from_slice(&cpu.gpr[..16]);
        let mut data = vec![0; 0x2000];
        assert!(bus.mmu.memory().read_bytes(DATA, &mut data));
        return (gpr, cpu.rip(), cpu.rflags, data);
    }
    panic!("it does not end");
}

/// Compares the interpreter's outcome with those of translated code: with blocks that stay, with blocks that become
/// hot, in a cache that is soon full, and with code that is dropped again and again.
fn compare(build: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Outcome {
    let assemble = || {
        let mut a = CodeAssembler::new(64)?;
        build(&mut a)?;
        a.hlt()?;
        a.assemble(CODE)
    };
    let code = assemble().expect("a program");
    let expected = run(&code, None, false);
    let mut plain = Jit::new().expect("a buffer");
    assert_eq!(run(&code, Some(&mut plain), false), expected);
    assert!(plain.stats().insns > 0, "nothing was translated");
    let mut mixed = Jit::with_capacity(0).expect("a buffer");
    mixed.mix_tiers();
    assert_eq!(run(&code, Some(&mut mixed), false), expected);
    let mut flushed = Jit::new().expect("a buffer");
    flushed.set_random_flushes(3);
    assert_eq!(run(&code, Some(&mut flushed), true), expected);
    expected
}

#[test]
fn a_loop_over_memory() {
    let (gpr, _, _, data) = compare(|a| {
        let mut again = a.create_label();
        a.mov(rdi, DATA)?;
        a.mov(ecx, 500)?;
        a.set_label(&mut again)?;
        a.add(qword_ptr(rdi), rcx)?;
        a.add(rax, qword_ptr(rdi))?;
        a.add(rdi, 8)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        Ok(())
    });
    assert_eq!(gpr[reg::RAX], 500 * 501 / 2);
    assert_eq!(data[..4], [0xf4, 1, 0, 0]);
}

#[test]
fn calls_by_registers_and_returns() {
    let (gpr, ..) = compare(|a| {
        let (mut one, mut two, mut again, mut end) = (
            a.create_label(),
            a.create_label(),
            a.create_label(),
            a.create_label(),
        );
        a.mov(ecx, 300)?;
        a.set_label(&mut again)?;
        a.lea(rdx, ptr(one))?;
        a.lea(rbx, ptr(two))?;
        a.test(ecx, 3)?;
        a.cmovz(rdx, rbx)?;
        a.call(rdx)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.jmp(end)?;
        a.set_label(&mut one)?;
        a.inc(rax)?;
        a.ret()?;
        a.set_label(&mut two)?;
        a.add(rax, 100)?;
        a.call(one)?;
        a.ret()?;
        a.set_label(&mut end)?;
        Ok(())
    });
    assert_eq!(gpr[reg::RAX], 225 + 75 * 101);
}

#[test]
fn calls_that_seem_not_to_come_back() {
    let (gpr, ..) = compare(|a| {
        let mut labels = || a.create_label();
        let (mut again, mut one, mut two, mut comes_back) =
            (labels(), labels(), labels(), labels());
        let (mut thunk, mut safe, mut by_rdx, mut go, mut end) =
            (labels(), labels(), labels(), labels(), labels());
        a.mov(ecx, 300)?;
        a.set_label(&mut again)?;
        a.call(two)?;
        // A call that comes back to PAUSE.
        a.call(comes_back)?;
        a.pause()?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.jmp(end)?;
        // Functions that end with a safe return, and a retpoline.
        a.set_label(&mut one)?;
        a.inc(rax)?;
        a.jmp(thunk)?;
        a.set_label(&mut two)?;
        a.call(one)?;
        a.lea(rdx, ptr(one))?;
        a.call(by_rdx)?;
        a.add(rax, 100)?;
        a.jmp(thunk)?;
        a.set_label(&mut comes_back)?;
        a.inc(rbx)?;
        a.ret()?;
        a.set_label(&mut by_rdx)?;
        a.call(go)?;
        a.int3()?;
        a.set_label(&mut go)?;
        a.mov(qword_ptr(rsp), rdx)?;
        a.jmp(thunk)?;
        a.set_label(&mut thunk)?;
        a.call(safe)?;
        a.ud2()?;
        // The rest is in another page.
        for _ in 0..0x1000 {
            a.nop()?;
        }
        a.set_label(&mut safe)?;
        a.lea(rsp, qword_ptr(rsp + 8))?;
        a.ret()?;
        a.set_label(&mut end)?;
        Ok(())
    });
    assert_eq!((gpr[reg::RAX], gpr[reg::RBX]), (300 * 102, 300));
    assert_eq!(gpr[reg::RSP], STACK);
}

#[test]
fn code_that_changes_itself() {
    let (gpr, ..) = compare(|a| {
        let (mut again, mut place) = (a.create_label(), a.create_label());
        a.mov(ecx, 100)?;
        a.set_label(&mut again)?;
        // The address of the immediate of the instruction at `place`, one page on.
        a.lea(rdx, ptr(place))?;
        a.mov(dword_ptr(rdx + 1), ecx)?;
        a.jmp(place)?;
        for _ in 0..0x1000 {
            a.nop()?;
        }
        a.set_label(&mut place)?;
        a.mov(eax, 0x1234_5678)?;
        a.add(rbx, rax)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        Ok(())
    });
    assert_eq!(gpr[reg::RBX], 100 * 101 / 2);
}

#[test]
fn an_instruction_on_two_pages_and_accesses_of_two() {
    let (gpr, _, _, data) = compare(|a| {
        let mut again = a.create_label();
        a.mov(ecx, 50)?;
        a.mov(rdi, DATA + 0xffd)?;
        a.set_label(&mut again)?;
        // The instruction behind these has 10 bytes and begins fewer than 10 before the page ends.
        for _ in 0..0x1000 - 15 - 5 {
            a.nop()?;
        }
        a.mov(rdx, 0x0123_4567_89ab_cdef_u64)?;
        a.mov(qword_ptr(rdi), rdx)?;
        a.add(rax, qword_ptr(rdi))?;
        a.dec(ecx)?;
        a.jnz(again)?;
        Ok(())
    });
    assert_eq!(gpr[reg::RAX], 0x0123_4567_89ab_cdef_u64.wrapping_mul(50));
    assert_eq!(data[0xffd..0x1005], 0x0123_4567_89ab_cdef_u64.to_le_bytes());
}

/// Writes to two pages whose bytes lie apart, at each border and by each number of bytes in the first page: exactly the
/// bytes of the operand change, and flags and registers are as they would be elsewhere.
#[test]
fn writes_to_pages_that_lie_apart() {
    type Write = fn(&mut CodeAssembler) -> Result<(), IcedError>;
    let writes: [Write; 14] = [
        |a| a.mov(word_ptr(rdi), ax),
        |a| a.mov(dword_ptr(rdi), 0x1234_5678),
        |a| a.mov(qword_ptr(rdi), r8),
        |a| a.mov(qword_ptr(rdi + r9), rsp),
        |a| a.add(dword_ptr(rdi), eax),
        |a| a.adc(qword_ptr(rdi), r8),
        |a| a.sbb(qword_ptr(rdi + r9), r12),
        |a| a.shl(qword_ptr(rdi), 3),
        |a| a.rol(word_ptr(rdi), 5),
        |a| a.bts(qword_ptr(rdi), 61),
        |a| a.vmovups(xmmword_ptr(rdi), xmm1),
        |a| a.vmovdqu(ymmword_ptr(rdi), ymm2),
        |a| a.vmovhps(qword_ptr(rdi), xmm1),
        |a| a.vextracti128(xmmword_ptr(rdi + r9), ymm2, 1),
    ];
    for write in writes {
        let (_, _, _, data) = compare(|a| {
            let mut again = a.create_label();
            a.mov(r8, 0x0123_4567_89ab_cdef_u64)?;
            a.mov(r12, 0xfedc_ba98_7654_3210_u64)?;
            a.mov(rax, r12)?;
            a.vmovq(xmm1, r8)?;
            a.vpbroadcastq(ymm2, xmm1)?;
            a.xor(r9d, r9d)?;
            a.mov(rdi, DATA)?;
            a.mov(ecx, 0x2000)?;
            a.rep().stosb()?;
            a.mov(ecx, 32)?;
            a.set_label(&mut again)?;
            // Twice at each place: pages that have not been written yet are the interpreter's.
            for _ in 0..2 {
                for page in 14..16 {
                    a.mov(rdi, REVERSED + page * 0x1000)?;
                    a.sub(rdi, rcx)?;
                    a.add(rax, rcx)?;
                    write(a)?;
                    a.adc(rax, r12)?;
                }
            }
            a.dec(ecx)?;
            a.jnz(again)?;
            Ok(())
        });
        let is_as_before = |b: &u8| *b == 0x10;
        for untouched in [32..0xfe0, 0x1020..0x1fe0] {
            assert!(data[untouched].iter().all(is_as_before));
        }
    }
}

#[test]
fn flags_that_are_read_late() {
    compare(|a| {
        let mut again = a.create_label();
        a.mov(ecx, 200)?;
        a.mov(rdi, DATA)?;
        a.set_label(&mut again)?;
        a.add(eax, 0x1234_5679)?;
        a.mov(rdx, qword_ptr(rdi))?;
        a.adc(ebx, 0)?;
        a.pushfq()?;
        a.pop(rsi)?;
        a.xor(qword_ptr(rdi + 8), rsi)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        Ok(())
    });
}

/// Divisions of 8 and 16 bits by registers, high bytes and memory, with dividends of both widths.
#[test]
fn small_divisions() {
    let (gpr, ..) = compare(|a| {
        let mut again = a.create_label();
        a.mov(ecx, 255)?;
        a.mov(rdi, DATA)?;
        a.set_label(&mut again)?;
        // The upper half is one less than the divisor, which is the most that it may be.
        a.mov(eax, ecx)?;
        a.shl(eax, 8)?;
        a.dec(eax)?;
        a.div(cl)?;
        a.add(rsi, rax)?;
        a.mov(bh, cl)?;
        a.mov(eax, 250)?;
        a.div(bh)?;
        a.add(rsi, rax)?;
        a.mov(edx, ecx)?;
        a.dec(edx)?;
        a.mov(eax, 54_321)?;
        a.div(cx)?;
        a.lea(rsi, qword_ptr(rsi + rax * 4))?;
        a.add(rsi, rdx)?;
        // Signed ones, of which those by -1 are the interpreter's.
        a.mov(ebx, ecx)?;
        a.or(bl, 1)?;
        a.mov(byte_ptr(rdi), bl)?;
        a.lea(eax, dword_ptr(rcx - 100))?;
        a.movsx(eax, al)?;
        a.idiv(byte_ptr(rdi))?;
        a.xor(rsi, rax)?;
        a.movsx(r8d, bl)?;
        a.lea(eax, dword_ptr(rcx - 100))?;
        a.cwd()?;
        a.idiv(r8w)?;
        a.lea(rsi, qword_ptr(rsi + rax * 2))?;
        a.add(rsi, rdx)?;
        // A dividend that is more than its lower half.
        a.and(bl, 0x7f)?;
        a.or(bl, 0x10)?;
        a.mov(eax, 1000)?;
        a.idiv(bl)?;
        a.rol(rsi, 3)?;
        a.add(rsi, rax)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.mov(eax, 0xfff8)?;
        a.mov(ecx, 3)?;
        a.idiv(cl)?;
        // A division leaves the flags undefined, and processors differ.
        a.test(eax, eax)?;
        Ok(())
    });
    // -8 / 3 is -2, and -2 is left.
    assert_eq!(gpr[reg::RAX], 0xfefe);
}

/// FP state goes to memory and comes back, with exceptions masked and unmasked in turn, which is another mode.
#[test]
fn state_is_saved_and_restored() {
    if !std::arch::is_x86_feature_detected!("avx2") {
        return;
    }
    let (gpr, ..) = compare(|a| {
        let mut again = a.create_label();
        a.mov(ecx, 3000)?;
        a.mov(rdi, DATA)?;
        a.set_label(&mut again)?;
        a.movq(xmm1, rcx)?;
        a.vpbroadcastq(ymm9, xmm1)?;
        a.mov(eax, 7)?;
        a.xor(edx, edx)?;
        a.xsave64(ptr(rdi))?;
        a.xsavec64(ptr(rdi + 0x400))?;
        a.xsaveopt64(ptr(rdi + 0x1400))?;
        a.fxsave64(ptr(rdi + 0x800))?;
        a.vpxor(ymm1, ymm1, ymm1)?;
        a.vpxor(ymm9, ymm9, ymm9)?;
        // MXCSR's mask of invalid operations.
        a.mov(ebx, ecx)?;
        a.and(ebx, 1)?;
        a.shl(ebx, 7)?;
        a.xor(dword_ptr(rdi + 24), ebx)?;
        a.xrstor64(ptr(rdi))?;
        a.movq(rbx, xmm1)?;
        a.add(rsi, rbx)?;
        a.addss(xmm2, xmm1)?;
        a.vextracti128(xmm3, ymm9, 1)?;
        a.movq(rbx, xmm3)?;
        a.add(rsi, rbx)?;
        a.fxrstor64(ptr(rdi + 0x800))?;
        a.addss(xmm4, xmm1)?;
        a.mov(eax, 6)?;
        a.xrstor64(ptr(rdi + 0x400))?;
        a.movq(rbx, xmm1)?;
        a.add(rsi, rbx)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.vzeroupper()
    });
    assert_eq!(gpr[reg::RSI], 3 * 3000 * 3001 / 2);
}

/// Eight elements from eight pages, four of them, and two of which one is left out.
#[test]
fn gathers() {
    if !std::arch::is_x86_feature_detected!("avx2") {
        return;
    }
    let (gpr, _, _, data) = compare(|a| {
        let mut again = a.create_label();
        a.mov(rdi, DATA)?;
        a.xor(ecx, ecx)?;
        a.set_label(&mut again)?;
        // 0, 1, 2, … each in a page of its own.
        a.mov(eax, ecx)?;
        a.shl(eax, 12)?;
        a.mov(dword_ptr(rdi + rax + 0x400), ecx)?;
        a.mov(dword_ptr(rdi + rcx * 4), eax)?;
        a.inc(ecx)?;
        a.cmp(ecx, 8)?;
        a.jb(again)?;
        a.mov(r14, rdi)?;
        a.mov(ebx, 100)?;
        let mut more = a.create_label();
        a.set_label(&mut more)?;
        a.vmovdqu(ymm9, ymmword_ptr(rdi))?;
        a.vpcmpeqd(ymm2, ymm2, ymm2)?;
        // CF stays.
        a.stc()?;
        let from = MemoryOperand::new(R::R14, R::YMM9, 1, 0x400, 8, false, R::None);
        a.add_instruction(Instruction::with3(
            C::VEX_Vpgatherdd_ymm_vm32y_ymm,
            R::YMM11,
            from,
            R::YMM2,
        )?)?;
        a.adc(r8d, 0)?;
        a.vmovdqu(ymmword_ptr(rdi + 0x100), ymm11)?;
        a.vmovdqu(ymmword_ptr(rdi + 0x120), ymm2)?;
        a.vpmovzxdq(ymm1, xmmword_ptr(rdi + 16))?;
        a.vpcmpeqd(xmm2, xmm2, xmm2)?;
        let from = MemoryOperand::new(R::RDI, R::YMM1, 1, 0x400, 8, false, R::None);
        a.add_instruction(Instruction::with3(
            C::VEX_Vpgatherqd_xmm_vm64y_xmm,
            R::XMM3,
            from,
            R::XMM2,
        )?)?;
        a.vmovdqu(ymmword_ptr(rdi + 0x140), ymm3)?;
        a.mov(eax, 1)?;
        a.vmovd(xmm1, eax)?;
        a.vpsllq(xmm2, xmm1, 63)?;
        a.vpcmpeqd(ymm4, ymm4, ymm4)?;
        let from = MemoryOperand::new(R::RDI, R::XMM1, 8, 0, 8, false, R::None);
        a.add_instruction(Instruction::with3(
            C::VEX_Vgatherqpd_xmm_vm64x_xmm,
            R::XMM4,
            from,
            R::XMM2,
        )?)?;
        a.vmovdqu(ymmword_ptr(rdi + 0x160), ymm4)?;
        a.dec(ebx)?;
        a.jnz(more)?;
        Ok(())
    });
    assert_eq!(gpr[8], 100);
    let words = |at: usize| -> Vec<u32> {
        let (words, _) = data[at..at + 32].as_chunks();
        words.iter().copied().map(u32::from_le_bytes).collect()
    };
    assert_eq!(words(0x100), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(words(0x120), [0; 8]);
    assert_eq!(words(0x140), [4, 5, 6, 7, 0, 0, 0, 0]);
    assert_eq!(
        words(0x160),
        [0x2000, 0x3000, u32::MAX, u32::MAX, 0, 0, 0, 0]
    );
}

/// Masked moves within a page, over two pages, and of nothing.
#[test]
fn masked_moves() {
    if !std::arch::is_x86_feature_detected!("avx2") {
        return;
    }
    let (_, _, _, data) = compare(|a| {
        let mut again = a.create_label();
        a.mov(rdi, DATA)?;
        a.mov(ebx, 100)?;
        a.mov(eax, 0x1111_1111)?;
        a.vmovd(xmm9, eax)?;
        a.vpbroadcastd(ymm9, xmm9)?;
        // Elements 1, 3, 5 and 7.
        a.vpcmpeqd(ymm10, ymm10, ymm10)?;
        a.vpsllq(ymm10, ymm10, 32)?;
        a.vpxor(xmm2, xmm2, xmm2)?;
        a.set_label(&mut again)?;
        a.vpmaskmovd(ymmword_ptr(rdi + 8), ymm10, ymm9)?;
        a.vmaskmovpd(ymmword_ptr(rdi + 0xff0), ymm10, ymm9)?;
        a.vmaskmovps(ymmword_ptr(rdi + 0x40), ymm2, ymm9)?;
        a.vpmaskmovq(ymm12, ymm10, ymmword_ptr(rdi + 0xff0))?;
        a.vmovdqu(ymmword_ptr(rdi + 0x80), ymm12)?;
        a.vmaskmovps(xmm13, xmm10, xmmword_ptr(rdi + 8))?;
        a.vmovdqu(ymmword_ptr(rdi + 0xa0), ymm13)?;
        a.dec(ebx)?;
        a.jnz(again)?;
        Ok(())
    });
    let stored = [[0; 4], [0x11; 4]].as_flattened().repeat(4);
    assert_eq!(data[8..0x28], stored);
    assert_eq!(data[0x40..0x60], [0; 32]);
    assert_eq!(data[0x80..0xa0], [0x11; 32]);
    assert_eq!(data[0xa0..0xb0], stored[..16]);
    assert_eq!(data[0xb0..0xc0], [0; 16]);
    assert_eq!(data[0xff0..0x1010], [0x11; 32]);
}

/// A kernel with IOPL 3, as some run with. The flags that CLI and STI leave alone stay.
#[test]
fn interrupts_are_enabled_with_an_iopl() {
    let (gpr, _, flags, _) = compare(|a| {
        let mut again = a.create_label();
        a.push(0x3003)?;
        a.popfq()?;
        a.mov(ecx, 200)?;
        a.set_label(&mut again)?;
        a.stc()?;
        a.cli()?;
        a.adc(esi, 0)?;
        a.pushfq()?;
        a.pop(rax)?;
        a.stc()?;
        a.sti()?;
        a.adc(esi, 0)?;
        a.pushfq()?;
        a.pop(rbx)?;
        a.push(rax)?;
        a.popfq()?;
        a.dec(ecx)?;
        a.jnz(again)?;
        Ok(())
    });
    let kept = rflags::IOPL | rflags::IF;
    assert_eq!(gpr[reg::RSI], 400);
    assert_eq!(gpr[reg::RAX] & kept, rflags::IOPL);
    assert_eq!(gpr[reg::RBX] & kept, kept);
    assert_eq!(flags & kept, rflags::IOPL);
}

/// POP to memory: an address by RSP is that behind the word, and flags stay.
#[test]
fn words_are_popped_to_memory() {
    let (gpr, _, _, data) = compare(|a| {
        let mut again = a.create_label();
        a.mov(rdi, DATA)?;
        a.mov(r14, rsp)?;
        a.mov(ecx, 200)?;
        a.set_label(&mut again)?;
        a.stc()?;
        a.push(0x1234)?;
        a.push(rcx)?;
        a.pop(qword_ptr(rdi + rcx * 8))?;
        a.pop(qword_ptr(rsp - 0x100))?;
        a.adc(rsi, qword_ptr(rsp - 0x100))?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.sub(r14, rsp)?;
        Ok(())
    });
    assert_eq!(gpr[reg::RSI], 200 * 0x1235);
    assert_eq!(gpr[14], 0);
    assert_eq!(data[0x100..0x108], 32u64.to_le_bytes());
}

/// String instructions with DF set, one by one and repeated, within pages and over their borders.
#[test]
fn strings_that_go_down() {
    let (gpr, _, _, data) = compare(|a| {
        let mut again = a.create_label();
        a.mov(rbx, 0x0102_0304_0506_0708_u64)?;
        a.mov(rdi, DATA)?;
        a.mov(ecx, 0x400)?;
        a.set_label(&mut again)?;
        a.mov(qword_ptr(rdi), rbx)?;
        a.imul_3(rbx, rbx, 0x1234_5671)?;
        a.add(rdi, 8)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        let mut turns = a.create_label();
        a.mov(edx, 60)?;
        a.set_label(&mut turns)?;
        a.std()?;
        a.mov(rsi, DATA + 0x900)?;
        a.mov(rdi, DATA + 0x1020)?;
        a.lodsb()?;
        a.stosw()?;
        a.movsd()?;
        a.mov(ecx, 24)?;
        a.rep().movsd()?;
        a.mov(ecx, 9)?;
        a.rep().stosb()?;
        a.mov(ecx, 50)?;
        a.repne().scasb()?;
        a.pushfq()?;
        a.pop(r8)?;
        a.add(r9, r8)?;
        a.add(r10, rdi)?;
        a.mov(ecx, 30)?;
        a.mov(rdi, rsi)?;
        a.repe().cmpsq()?;
        a.cld()?;
        a.lodsq()?;
        a.add(r11, rax)?;
        a.dec(edx)?;
        a.jnz(turns)
    });
    assert_ne!(gpr[11], 0);
    assert!(data.iter().any(|b| *b != 0));
}

/// Instructions that few programs execute, with results that do not depend on the engine.
#[test]
fn rare_instructions() {
    let (gpr, ..) = compare(|a| {
        let mut again = a.create_label();
        a.mov(ebx, DATA as u32)?;
        a.mov(ecx, 40)?;
        a.set_label(&mut again)?;
        a.mov(byte_ptr(rbx + 0x33), cl)?;
        a.mov(eax, 0x1233)?;
        a.xlatb()?;
        a.add(r8, rax)?;
        a.enter(0x40, 0)?;
        a.mov(qword_ptr(rbp - 8), rcx)?;
        a.enter(0, 0)?;
        a.leave()?;
        a.leave()?;
        a.clflush(byte_ptr(rbx + 0x33))?;
        a.push(rcx)?;
        a.xor(ecx, ecx)?;
        a.xgetbv()?;
        a.add(r9, rax)?;
        a.pop(rcx)?;
        a.vpxor(xmm1, xmm1, xmm1)?;
        a.vpcmpeqd(ymm2, ymm2, ymm2)?;
        // No element is selected, so nothing is accessed.
        a.vpmaskmovd(ymm2, ymm1, ymmword_ptr(0x7fff_0000))?;
        a.vpmaskmovd(ymmword_ptr(0x7fff_0000), ymm1, ymm2)?;
        a.vextracti128(xmm3, ymm2, 1)?;
        a.vmovq(rdx, xmm3)?;
        a.add(r10, rdx)?;
        a.dec(ecx)?;
        a.jnz(again)
    });
    assert_eq!([gpr[9], gpr[10]], [7 * 40, 0]);
}
