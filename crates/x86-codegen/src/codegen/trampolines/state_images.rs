//! The XSAVE family, FXSAVE and FXRSTOR (SDM vol. 1, 10.5 and chapter 13): images of FP state in the guest's memory.
//!
//! The host's XSAVE stores the guest's FP state to the vCPU's area, whose contents say which components are in use:
//! processors differ in what they take for the initial state, and the interpreter looks at the contents, too. An image
//! that is loaded goes to the vCPU's area, and to the host's registers once a block uses FP.
//!
//! What kernels do at each switch of tasks is done here. The rest is the interpreter's: faults, images that lie in two
//! pages which are apart in the host's memory, x87 state other than the initial one in an image that is loaded,
//! unmasked exceptions, and a PKRU that changes.

use x86_defs::{control::efer, xsave};

use super::Emitter;
use crate::{
    asm::*,
    codegen::fp_state::{release_fp, store_fp},
    codegen::memory::{host_page, select_entry, tag},
    frame::requests::{image, site},
    frame::state::MXCSR_FREE,
    frame::words::*,
};

/// The instruction as [`image`] describes it, and its operand's gva.
const WHAT: usize = GATHERED;
const GVA: usize = GATHERED + 8;
/// The requested components that are enabled, and those of them that the image has.
const REQUESTED: usize = GATHERED + 16;
const LOADED: usize = GATHERED + 24;
/// The MXCSR to load, or a negative number.
const NEW_MXCSR: usize = GATHERED + 32;
/// Where PKRU is in the image.
const PKRU_AT: usize = GATHERED + 40;
/// The host address of the image.
const HOST: usize = GATHERED + 48;

/// The guest's registers that are used. The call of a block and these align the stack as calls of Rust need.
const USED: [Reg; 5] = [RAX, RCX, RDX, RSI, RDI];

/// Components of requests that are served.
const SERVED: i32 = (xsave::X87 | xsave::SSE | xsave::AVX | xsave::PKRU) as i32;
const X87: i32 = xsave::X87 as i32;
const SSE: i32 = xsave::SSE as i32;
const AVX: i32 = xsave::AVX as i32;
const PROTECTION_KEYS: i32 = xsave::PKRU as i32;
/// The components that the vCPU's area has.
const OWN: i32 = X87 | SSE | AVX;

/// Quadwords of the x87 component behind the first one.
fn x87_words() -> impl Iterator<Item = usize> {
    let header = (8..xsave::MXCSR).step_by(8);
    header.chain((xsave::ST0..xsave::XMM0).step_by(8))
}

/// Returns the vCPU's area at an offset.
const fn own(offset: usize) -> Mem {
    gs(FP_AREA + offset)
}

/// Returns the image at an offset.
const fn image_at(offset: usize) -> Mem {
    at(RSI, offset as i32)
}

/// `test m, bits`
fn test(a: &mut Asm, m: Mem, bits: i32) {
    a.rm(false, &[0xf7], 0, m);
    a.imm32(bits);
}

/// `test r, bits`
fn test_reg(a: &mut Asm, r: Reg, bits: i32) {
    a.rr(false, &[0xf7], 0, r);
    a.imm32(bits);
}

/// Emits a branch that is taken if the instruction is none with this bit.
fn unless(a: &mut Asm, bit: u32) -> usize {
    test(a, gs(WHAT), bit.cast_signed());
    a.jcc(cc::E)
}

/// Makes branches lead to the code that comes next.
fn lead_here(a: &mut Asm, from: impl IntoIterator<Item = usize>) {
    let here = a.here();
    from.into_iter().for_each(|from| a.patch(from, here));
}

/// Emits code that is executed if `r` has one of these bits.
fn when(a: &mut Asm, r: Reg, bits: i32, then: impl FnOnce(&mut Asm)) {
    test_reg(a, r, bits);
    let otherwise = a.jcc(cc::E);
    then(a);
    lead_here(a, [otherwise]);
}

/// Compares the x87 component at `of` with its initial state. Changes rax or rcx, which is `by`.
fn compare_x87(a: &mut Asm, by: Reg, of: impl Fn(usize) -> Mem) {
    a.load(by, of(0));
    a.alu_imm(true, Alu::Xor, by, xsave::FCW_INIT.into());
    x87_words().for_each(|n| a.alu(true, Alu::Or, by, of(n)));
}

/// Sets a bit of rax if the vCPU's area has something other than zeroes there. Changes rcx.
fn note_use(a: &mut Asm, from: usize, to: usize, bit: i32) {
    // Most often the first registers tell.
    let mut found = Vec::new();
    for line in (from..to).step_by(64) {
        a.load(RCX, own(line));
        for n in (line + 8..line + 64).step_by(8) {
            a.alu(true, Alu::Or, RCX, own(n));
        }
        found.push(a.jcc(cc::NE));
    }
    let none = a.jmp();
    lead_here(a, found);
    a.alu_imm(false, Alu::Or, RAX, bit);
    lead_here(a, [none]);
}

/// `movups` between XMM `n` and memory.
fn move_vector(a: &mut Asm, n: u8, m: Mem, store: bool) {
    a.rm(false, &[0x0f, 0x10 | u8::from(store)], n, m);
}

/// `vextractf128 [rsi + disp], ymm n, 1`
fn store_upper(a: &mut Asm, n: u8, disp: usize) {
    let r = if n >= 8 { 0 } else { 0x80 };
    let modrm = 0x80 | (n & 7) << 3 | RSI;
    a.bytes(&[0xc4, r | 0x63, 0x7d, 0x19, modrm]);
    a.imm32(disp as i32);
    a.bytes(&[1]);
}

/// Copies 16 registers from the image to the vCPU's area if rcx has the component, and clears them otherwise. Changes
/// xmm0.
fn load_component(a: &mut Asm, bit: i32, offset: usize) {
    let places = || (offset..offset + 256).step_by(16);
    test_reg(a, RCX, bit);
    let initial = a.jcc(cc::E);
    for n in places() {
        move_vector(a, 0, image_at(n), false);
        move_vector(a, 0, own(n), true);
    }
    let done = a.jmp();
    lead_here(a, [initial]);
    a.bytes(&[0x0f, 0x57, 0xc0]); // xorps xmm0, xmm0
    places().for_each(|n| move_vector(a, 0, own(n), true));
    lead_here(a, [done]);
}

impl Emitter<'_> {
    /// Emits [`super::Trampolines::save_image`] and [`super::Trampolines::restore_image`]. `refill` is the trampoline for
    /// pages that the TLB does not have.
    pub(super) fn state_images(&mut self, refill: usize) {
        self.t.save_image = self.a.here();
        self.served(|e, fails| e.save(refill, fails));
        self.t.restore_image = self.a.here();
        self.served(|e, fails| e.restore(refill, fails));
    }

    /// Emits a trampoline. `serve` emits what it does, and the branches to take if the interpreter has to do it.
    fn served(&mut self, serve: impl FnOnce(&mut Self, &mut Vec<usize>)) {
        USED.iter().for_each(|r| push(self.a, *r));
        self.a.store32(gs(WHAT), S1);
        self.a.store(gs(GVA), S0);
        let mut fails = Vec::new();
        serve(self, &mut fails);
        let a = &mut *self.a;
        a.mov_imm(S0, 1);
        let done = a.jmp();
        lead_here(a, fails);
        a.alu_rr(false, Alu::Xor, S0, S0);
        lead_here(a, [done]);
        USED.iter().rev().for_each(|r| pop(a, *r));
        a.ret();
    }

    /// Emits the checks of the operand and the request, which becomes known.
    fn request(&mut self, fails: &mut Vec<usize>) {
        let a = &mut *self.a;
        let extended = unless(a, image::LEGACY);
        test(a, gs(EFER), efer::FFXSR as i32);
        fails.push(a.jcc(cc::NE));
        a.mov_imm(RAX, xsave::X87 | xsave::SSE);
        a.mov_imm(RCX, 15);
        let legacy = a.jmp();
        lead_here(a, [extended]);
        let user = unless(a, image::SUPERVISOR);
        a.alu_mem_imm8(true, Alu::Cmp, gs(XSS), 0);
        fails.push(a.jcc(cc::NE));
        lead_here(a, [user]);
        a.mov32(RAX, RAX);
        a.shift(true, 4, RDX, 32);
        a.alu_rr(true, Alu::Or, RAX, RDX);
        a.alu(true, Alu::And, RAX, gs(XCR0));
        a.rr(true, &[0xf7], 0, RAX); // test
        a.imm32(!SERVED);
        fails.push(a.jcc(cc::NE));
        a.mov_imm(RCX, 63);
        lead_here(a, [legacy]);
        a.store(gs(REQUESTED), RAX);
        a.rr(false, &[0x85], RCX, S0); // test
        fails.push(a.jcc(cc::NE));
    }

    /// Makes rsi the host address of the image, which ends rdi bytes behind its first. Changes rcx and rdx.
    fn find_image(&mut self, write: bool, refill: usize, fails: &mut Vec<usize>) {
        let a = &mut *self.a;
        let retry = a.here();
        a.load(S0, gs(GVA));
        let find = |a: &mut Asm, gva: Reg| {
            select_entry(a, S1, gva);
            a.mov(RCX, gva);
            a.alu(true, Alu::Sub, RCX, tag(write));
            a.alu_imm(true, Alu::Cmp, RCX, 4095);
            let misses = a.jcc(cc::A);
            a.alu(true, Alu::Add, RCX, host_page());
            misses
        };
        let first_misses = find(a, S0);
        a.mov(RSI, RCX);
        // The last byte may be in the next page.
        a.mov(RDX, S0);
        a.alu_rr(true, Alu::Add, RDX, RDI);
        fails.push(a.jcc(cc::B));
        let last_misses = find(a, RDX);
        a.alu_rr(true, Alu::Sub, RCX, RDI);
        a.alu_rr(true, Alu::Cmp, RCX, RSI);
        fails.push(a.jcc(cc::NE));
        let found = a.jmp();
        lead_here(a, [last_misses]);
        a.mov(S0, RDX);
        lead_here(a, [first_misses]);
        a.load32(S1, gs(WHAT));
        a.alu_imm(false, Alu::And, S1, 0xfff);
        a.alu_imm(false, Alu::Or, S1, site(0, 1, write).cast_signed());
        a.call_to(refill);
        a.rr(true, &[0x85], S0, S0); // test
        fails.push(a.jcc(cc::E));
        a.jmp_to(retry);
        lead_here(a, [found]);
    }

    fn save(&mut self, refill: usize, fails: &mut Vec<usize>) {
        self.request(fails);
        let a = &mut *self.a;
        a.alu_mem_imm8(false, Alu::Cmp, gs(FP_LIVE), 0);
        let live = a.jcc(cc::NE);
        a.call_to(self.t.load_fp);
        lead_here(a, [live]);
        store_fp(a);
        // The offset of the last byte.
        a.load(RAX, gs(REQUESTED));
        a.mov_imm(RDI, xsave::XMM0 as u64 + 255);
        test(a, gs(WHAT), image::LEGACY.cast_signed());
        let legacy = a.jcc(cc::NE);
        a.mov32(RDI, RAX);
        a.alu_imm(false, Alu::And, RDI, AVX);
        a.shift(false, 4, RDI, 6);
        a.alu_imm(false, Alu::Add, RDI, xsave::HEADER_END as i32 - 1);
        when(a, RAX, PROTECTION_KEYS, |a| {
            let standard = unless(a, image::COMPACT);
            a.alu_imm(false, Alu::Add, RDI, 8);
            let done = a.jmp();
            lead_here(a, [standard]);
            a.rm(false, &[0x0f, 0xb7], RDI, gs(PKRU_OFFSET)); // movzx
            a.alu_imm(false, Alu::Add, RDI, 7);
            lead_here(a, [done]);
        });
        lead_here(a, [legacy]);
        self.find_image(true, refill, fails);
        self.find_use(fails);
        self.write_components();
        self.write_header();
    }

    /// Makes rdx the requested components, rax those of them that are in use, and rcx those to write.
    fn find_use(&mut self, fails: &mut Vec<usize>) {
        let a = &mut *self.a;
        compare_x87(a, RCX, own);
        let initial = a.jcc(cc::E);
        // In lock-step the image would differ from the interpreter's in the last x87 instruction's addresses.
        a.alu_mem_imm8(true, Alu::Cmp, gs(LOG), 0);
        fails.push(a.jcc(cc::NE));
        lead_here(a, [initial]);
        a.mov_imm(RAX, 0);
        a.rr(true, &[0x85], RCX, RCX); // test
        a.rr(false, &[0x0f, 0x95], 0, RAX); // setne
        note_use(a, xsave::XMM0, xsave::XMM0 + 256, SSE);
        if a.isa().avx {
            note_use(a, xsave::YMM_HI, xsave::YMM_HI + 256, AVX);
        }
        a.alu_mem_imm8(false, Alu::Cmp, gs(PKRU), 0);
        let is_zero = a.jcc(cc::E);
        a.alu_imm(false, Alu::Or, RAX, PROTECTION_KEYS);
        lead_here(a, [is_zero]);
        a.load(RDX, gs(REQUESTED));
        a.mov(RCX, RDX);
        test(a, gs(WHAT), image::ALL.cast_signed());
        let all = a.jcc(cc::NE);
        a.rm(false, &[0x81], 7, own(xsave::MXCSR)); // cmp
        a.imm32(xsave::MXCSR_DEFAULT.cast_signed());
        let is_default = a.jcc(cc::E);
        a.alu_imm(false, Alu::Or, RAX, SSE);
        lead_here(a, [is_default]);
        a.alu_rr(false, Alu::And, RCX, RAX);
        lead_here(a, [all]);
        a.alu_rr(false, Alu::And, RAX, RDX);
    }

    /// Writes the components in rcx.
    fn write_components(&mut self) {
        let a = &mut *self.a;
        let copy = |a: &mut Asm, n: usize| {
            a.load(S0, own(n));
            a.store(image_at(n), S0);
        };
        when(a, RCX, X87, |a| {
            copy(a, 0);
            x87_words().for_each(|n| copy(a, n));
        });
        // MXCSR: the compacted format has it with SSE, the standard one with AVX, too.
        let standard = unless(a, image::COMPACT);
        a.mov32(S0, RCX);
        a.alu_imm(false, Alu::And, S0, SSE);
        let compact = a.jmp();
        lead_here(a, [standard]);
        a.mov32(S0, RDX);
        a.alu_imm(false, Alu::And, S0, SSE | AVX);
        lead_here(a, [compact]);
        let without = a.jcc(cc::E);
        copy(a, xsave::MXCSR);
        lead_here(a, [without]);
        when(a, RCX, SSE, |a| {
            for n in 0..16 {
                move_vector(a, n, image_at(xsave::XMM0 + 16 * usize::from(n)), true);
            }
        });
        if a.isa().avx {
            when(a, RCX, AVX, |a| {
                (0..16).for_each(|n| store_upper(a, n, xsave::YMM_HI + 16 * usize::from(n)));
            });
        }
        when(a, RCX, PROTECTION_KEYS, |a| {
            a.load32(S0, gs(PKRU));
            a.store(at(RSI, -7).plus(RDI, 0), S0);
        });
    }

    /// Writes the header: rdx are the requested components, rax those of them that are in use.
    fn write_header(&mut self) {
        let a = &mut *self.a;
        test(a, gs(WHAT), image::LEGACY.cast_signed());
        let legacy = a.jcc(cc::NE);
        let standard = unless(a, image::COMPACT);
        a.store(image_at(xsave::XSTATE_BV), RAX);
        set_compact(a, RDX);
        a.store(image_at(xsave::XCOMP_BV), RDX);
        let compact = a.jmp();
        lead_here(a, [standard]);
        a.rr(true, &[0xf7], 2, RDX); // not
        a.alu(true, Alu::And, RDX, image_at(xsave::XSTATE_BV));
        a.alu_rr(true, Alu::Or, RDX, RAX);
        a.store(image_at(xsave::XSTATE_BV), RDX);
        lead_here(a, [compact, legacy]);
    }

    fn restore(&mut self, refill: usize, fails: &mut Vec<usize>) {
        self.request(fails);
        let a = &mut *self.a;
        let extended = unless(a, image::LEGACY);
        a.mov_imm(RDI, xsave::LEGACY_SIZE as u64 - 1);
        let legacy = a.jmp();
        lead_here(a, [extended]);
        a.mov_imm(RDI, xsave::HEADER_END as u64 - 1);
        lead_here(a, [legacy]);
        self.find_image(false, refill, fails);
        self.check_header(fails);
        self.check_mxcsr(fails);
        self.find_rest(refill, fails);
        self.load_components();
    }

    /// Makes rdx the requested components and rcx those of them that the image has.
    fn check_header(&mut self, fails: &mut Vec<usize>) {
        let a = &mut *self.a;
        let extended = unless(a, image::LEGACY);
        compare_x87(a, RAX, image_at);
        fails.push(a.jcc(cc::NE));
        a.mov_imm(RCX, xsave::SSE);
        let legacy = a.jmp();
        lead_here(a, [extended]);
        a.load(RCX, image_at(xsave::XSTATE_BV));
        a.load(RDX, image_at(xsave::XCOMP_BV));
        a.load(RAX, gs(XCR0));
        a.rr(true, &[0xf7], 2, RAX); // not
        a.rr(true, &[0x85], RDX, RDX); // test
        let compact = a.jcc(cc::S);
        fails.push(unless(a, image::STANDARD));
        a.alu(true, Alu::Or, RDX, image_at(xsave::XCOMP_BV + 8));
        fails.push(a.jcc(cc::NE));
        a.rm(false, &[0x0f, 0xb7], S1, gs(PKRU_OFFSET)); // movzx
        let standard = a.jmp();
        lead_here(a, [compact]);
        fails.push(unless(a, image::COMPACT));
        clear_compact(a, RDX);
        a.rr(true, &[0x85], RAX, RDX); // test
        fails.push(a.jcc(cc::NE));
        // Where PKRU is depends on the components before it.
        a.rr(true, &[0xf7], 0, RDX); // test
        a.imm32(!SERVED);
        fails.push(a.jcc(cc::NE));
        a.mov(RAX, RDX);
        a.rr(true, &[0xf7], 2, RAX); // not
        a.alu_imm(false, Alu::And, RDX, AVX);
        a.shift(false, 4, RDX, 6);
        a.lea(S1, at(RDX, xsave::HEADER_END as i32));
        a.load(RDX, image_at(xsave::XCOMP_BV + 8));
        for n in (xsave::XCOMP_BV + 16..xsave::HEADER_END).step_by(8) {
            a.alu(true, Alu::Or, RDX, image_at(n));
        }
        a.rr(true, &[0x85], RDX, RDX); // test
        fails.push(a.jcc(cc::NE));
        lead_here(a, [standard]);
        a.store(gs(PKRU_AT), S1);
        // No other components than these may be in use.
        a.rr(true, &[0x85], RAX, RCX); // test
        fails.push(a.jcc(cc::NE));
        lead_here(a, [legacy]);
        a.load(RDX, gs(REQUESTED));
        a.alu_rr(true, Alu::And, RCX, RDX);
        a.store(gs(LOADED), RCX);
        test_reg(a, RCX, X87);
        fails.push(a.jcc(cc::NE));
    }

    /// Finds the MXCSR to load. The registers are those of [`Self::check_header`].
    fn check_mxcsr(&mut self, fails: &mut Vec<usize>) {
        let a = &mut *self.a;
        let mut none = Vec::new();
        // The format is in the image; XRSTOR takes both.
        test(a, gs(WHAT), image::LEGACY.cast_signed());
        let legacy = a.jcc(cc::NE);
        a.alu_mem_imm8(true, Alu::Cmp, image_at(xsave::XCOMP_BV), 0);
        let standard = a.jcc(cc::NS);
        test_reg(a, RDX, SSE);
        none.push(a.jcc(cc::E));
        a.mov_imm(S0, xsave::MXCSR_DEFAULT.into());
        test_reg(a, RCX, SSE);
        let initial = a.jcc(cc::E);
        let loaded = a.jmp();
        lead_here(a, [standard]);
        test_reg(a, RDX, SSE | AVX);
        none.push(a.jcc(cc::E));
        lead_here(a, [loaded, legacy]);
        a.load32(S0, image_at(xsave::MXCSR));
        lead_here(a, [initial]);
        a.mov32(RAX, S0);
        a.alu_imm(false, Alu::And, RAX, !MXCSR_FREE.cast_signed());
        a.alu_imm(false, Alu::Cmp, RAX, xsave::MXCSR_DEFAULT.cast_signed());
        fails.push(a.jcc(cc::NE));
        let found = a.jmp();
        lead_here(a, none);
        a.mov_signed(true, S0, -1);
        lead_here(a, [found]);
        a.store(gs(NEW_MXCSR), S0);
    }

    /// Makes rsi the host address of all that is loaded. PKRU has to be what it is.
    fn find_rest(&mut self, refill: usize, fails: &mut Vec<usize>) {
        let a = &mut *self.a;
        test_reg(a, RDX, AVX | PROTECTION_KEYS);
        let nothing_else = a.jcc(cc::E);
        when(a, RCX, AVX, |a| {
            a.mov_imm(RDI, xsave::YMM_HI as u64 + 255);
        });
        when(a, RCX, PROTECTION_KEYS, |a| {
            a.load(RAX, gs(PKRU_AT));
            a.alu_imm(false, Alu::Add, RAX, 7);
            a.alu_rr(false, Alu::Cmp, RDI, RAX);
            a.rr(false, &[0x0f, 0x42], RDI, RAX); // cmovb
        });
        self.find_image(false, refill, fails);
        let a = &mut *self.a;
        a.load(RDX, gs(REQUESTED));
        a.load(RCX, gs(LOADED));
        when(a, RDX, PROTECTION_KEYS, |a| {
            a.mov_imm(RAX, 0);
            when(a, RCX, PROTECTION_KEYS, |a| {
                a.load(RAX, gs(PKRU_AT));
                a.load32(RAX, at(RSI, 0).plus(RAX, 0));
            });
            a.alu(false, Alu::Cmp, RAX, gs(PKRU));
            fails.push(a.jcc(cc::NE));
        });
        lead_here(a, [nothing_else]);
    }

    /// Loads the requested components to the vCPU's area.
    fn load_components(&mut self) {
        let a = &mut *self.a;
        a.alu_mem_imm8(false, Alu::Cmp, gs(FP_LIVE), 0);
        let idle = a.jcc(cc::E);
        // Components that are not requested stay what they are.
        a.alu_imm(false, Alu::And, RDX, OWN);
        a.alu_imm(false, Alu::Cmp, RDX, OWN);
        let all = a.jcc(cc::E);
        a.store(gs(HOST), RSI);
        store_fp(a);
        a.load(RSI, gs(HOST));
        a.load(RCX, gs(LOADED));
        lead_here(a, [all]);
        release_fp(a);
        a.store32_imm(SHORT_FP_LIVE, 0);
        a.load(RDX, gs(REQUESTED));
        lead_here(a, [idle]);
        when(a, RDX, X87, |a| {
            a.mov_imm(S0, xsave::FCW_INIT.into());
            a.store(own(0), S0);
            a.mov_imm(S0, 0);
            x87_words().for_each(|n| a.store(own(n), S0));
        });
        when(a, RDX, SSE, |a| load_component(a, SSE, xsave::XMM0));
        if a.isa().avx {
            when(a, RDX, AVX, |a| load_component(a, AVX, xsave::YMM_HI));
        }
        a.load(S0, gs(NEW_MXCSR));
        a.rr(true, &[0x85], S0, S0); // test
        let kept = a.jcc(cc::S);
        a.store32(own(xsave::MXCSR), S0);
        lead_here(a, [kept]);
    }
}

/// `bts r, 63`
fn set_compact(a: &mut Asm, r: Reg) {
    a.rr(true, &[0x0f, 0xba], 5, r);
    a.bytes(&[63]);
}

/// `btr r, 63`
fn clear_compact(a: &mut Asm, r: Reg) {
    a.rr(true, &[0x0f, 0xba], 6, r);
    a.bytes(&[63]);
}
