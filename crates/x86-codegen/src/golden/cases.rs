//! The guest code of each file of `tests/codegen`.

use iced_x86::{
    IcedError,
    code_asm::{registers::*, *},
};

use x86_defs::retired::{BRANCHES as OF_BRANCHES, CONDITIONAL_TAKEN, MEMORY, NEAR_RETURNS, bit};

use crate::{ir::mode::Mode, ir::streams::Streams};

/// The mode of user code that is executed at several addresses.
pub(super) const USER: Mode = Mode::FP.with(Mode::SSE).with(Mode::AVX).with(Mode::TSC);
/// The mode of a kernel's code, which is executed at one address.
const KERNEL: Mode = USER.with(Mode::KERNEL).with(Mode::BOUND);
pub(super) const USER32: Mode = USER.with(Mode::BITS32);
/// The mode of code that counts branches besides instructions.
const COUNTED: Mode = USER.with(Mode::counting(Streams::of(bit(OF_BRANCHES), 0)));
const COUNTED_KERNEL: Mode = KERNEL.with(Mode::counting(Streams::of(bit(OF_BRANCHES), 0)));
const COUNTED_TAKEN: Mode = USER.with(Mode::counting(Streams::of(bit(CONDITIONAL_TAKEN), 0)));
const SEVERAL: u16 = bit(OF_BRANCHES) | bit(NEAR_RETURNS);
/// The mode of code that counts several streams besides instructions.
const COUNTED_SEVERAL: Mode = USER.with(Mode::counting(Streams::of(SEVERAL, 0)));
/// The mode of code that may have to be left after some of their events.
const COUNTED_BOUNDED: Mode = USER.with(Mode::counting(Streams::of(SEVERAL, SEVERAL)));
const COUNTED_MEMORY: Mode = USER.with(Mode::counting(Streams::of(bit(MEMORY), 0)));

/// A block to be translated.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) mode: Mode,
    /// Offset of the block in its page.
    pub(super) offset: u32,
    /// True if a branch of the page leads to the block.
    pub(super) is_linked: bool,
    /// True if the block is hot.
    pub(super) is_hot: bool,
    /// True if the host has no extensions beyond x86-64.
    pub(super) is_old_host: bool,
    pub(super) code: fn(&mut CodeAssembler) -> Result<(), IcedError>,
    /// The path that the block is executed along, if it becomes a trace.
    pub(super) trace: Option<Trace>,
}

/// A path through a call.
#[derive(Clone, Copy)]
pub(super) struct Trace {
    /// The code that is called, at [`super::CALLEE`].
    pub(super) callee: fn(&mut CodeAssembler) -> Result<(), IcedError>,
    /// Places of the instructions, relative to the page.
    pub(super) path: &'static [i32],
}

pub(super) const fn case(
    name: &'static str,
    mode: Mode,
    code: fn(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Case {
    Case {
        name,
        mode,
        offset: 0x100,
        is_linked: false,
        is_hot: false,
        is_old_host: false,
        code,
        trace: None,
    }
}

impl Case {
    const fn hot(self) -> Self {
        Self {
            is_hot: true,
            ..self
        }
    }
    const fn linked(self) -> Self {
        Self {
            is_linked: true,
            ..self
        }
    }
    const fn on_old_host(self) -> Self {
        Self {
            is_old_host: true,
            ..self
        }
    }
    pub(super) const fn along(self, trace: Trace) -> Self {
        Self {
            is_hot: true,
            trace: Some(trace),
            ..self
        }
    }
    pub(super) const fn at(self, offset: u32) -> Self {
        Self { offset, ..self }
    }
}

/// The files with their cases, but for those of files of their own.
pub(super) const FILES: &[(&str, &[Case])] = &[
    ("probe.txt", PROBE),
    ("shared_probe.txt", SHARED_PROBE),
    ("site_entry.txt", SITE_ENTRY),
    ("hoisted_loop.txt", HOISTED_LOOP),
    ("flags.txt", FLAGS),
    ("branches.txt", BRANCHES),
    ("calls.txt", CALLS),
    ("strings.txt", STRINGS),
    ("system.txt", SYSTEM),
    ("fp.txt", FP),
    ("bits32.txt", BITS32),
    ("old_host.txt", OLD_HOST),
    ("entries.txt", ENTRIES),
    ("counting.txt", COUNTING),
];

fn load(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, qword_ptr(rbx + 8))?;
    a.jmp(0x40_0200)
}

fn store(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(dword_ptr(rdi + rcx * 4 + 0x10), eax)?;
    a.jmp(0x40_0200)
}

fn fields(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, qword_ptr(rbx))?;
    a.add(rax, qword_ptr(rbx + 8))?;
    a.mov(qword_ptr(rbx + 16), rax)?;
    a.jmp(0x40_0200)
}

const PROBE: &[Case] = &[
    case("a load", USER, load),
    case("a store", USER, store),
    case("an addition to memory", USER, |a| {
        a.add(dword_ptr(rsi), 5)?;
        a.jmp(0x40_0200)
    }),
    case("a locked addition", USER, |a| {
        a.lock().add(dword_ptr(rsi), eax)?;
        a.jmp(0x40_0200)
    }),
    case("cmpxchg16b", USER, |a| {
        a.lock().cmpxchg16b(xmmword_ptr(rsi))?;
        a.jmp(0x40_0200)
    }),
    case("registers that live in memory", USER, |a| {
        a.mov(r13, qword_ptr(r14 + r15 * 8))?;
        a.add(r10, r11)?;
        a.jmp(0x40_0200)
    }),
    case("relative to RIP", USER, |a| {
        a.mov(eax, dword_ptr(0x40_1234_u64))?;
        a.lea(rcx, qword_ptr(0x40_1238_u64))?;
        a.jmp(0x40_0200)
    }),
    case(
        "relative to RIP, at one address",
        USER.with(Mode::BOUND),
        |a| {
            a.mov(eax, dword_ptr(0x40_1234_u64))?;
            a.lea(rcx, qword_ptr(0x40_1238_u64))?;
            a.jmp(0x40_0200)
        },
    ),
    case("relative to FS", USER, |a| {
        a.mov(rax, qword_ptr(0x28).fs())?;
        a.jmp(0x40_0200)
    }),
    case("a bit of a bit string", USER, |a| {
        a.bts(qword_ptr(rdi), rax)?;
        a.jmp(0x40_0200)
    }),
    case("push and pop", USER, |a| {
        a.push(rbx)?;
        a.push(r12)?;
        a.mov(rax, qword_ptr(rsp + 8))?;
        a.pop(r12)?;
        a.pop(rbx)?;
        a.jmp(0x40_0200)
    }),
    case("leave", USER, |a| {
        a.leave()?;
        a.jmp(0x40_0200)
    }),
];

const SHARED_PROBE: &[Case] = &[
    case("fields of a structure", USER, fields),
    case("the same, each for itself", USER.with(Mode::SPLIT), fields),
    case("two structures", USER, |a| {
        a.mov(rax, qword_ptr(rbx))?;
        a.mov(rcx, qword_ptr(rdx))?;
        a.mov(qword_ptr(rbx + 8), rcx)?;
        a.mov(qword_ptr(rdx + 8), rax)?;
        a.jmp(0x40_0200)
    }),
    case("aligned vectors", USER, |a| {
        a.movaps(xmm0, xmmword_ptr(rsi))?;
        a.movaps(xmm1, xmmword_ptr(rsi + 16))?;
        a.movaps(xmmword_ptr(rsi + 32), xmm0)?;
        a.jmp(0x40_0200)
    }),
];

const SITE_ENTRY: &[Case] = &[
    case("a load", USER, load).hot(),
    case("a store", USER, store).hot(),
    case("fields of a structure", USER, fields).hot(),
];

fn sum(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut top = a.create_label();
    a.set_label(&mut top)?;
    a.add(rax, qword_ptr(rbx))?;
    a.add(rbx, 8)?;
    a.cmp(rbx, rcx)?;
    a.jne(top)
}

const HOISTED_LOOP: &[Case] = &[
    case("a sum, translated first", USER, sum),
    case("a sum, executed much", USER, sum).hot(),
    case("what stays where it is", USER, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top)?;
        a.mov(rax, qword_ptr(rbx + 8))?;
        a.mov(qword_ptr(rdi), rax)?;
        a.add(rdi, 8)?;
        a.dec(rcx)?;
        a.jne(top)
    })
    .hot(),
];

const FLAGS: &[Case] = &[
    case("read by a branch", USER, |a| {
        a.cmp(rax, rbx)?;
        a.jb(0x40_0200)?;
        a.setb(al)?;
        a.jmp(0x40_0300)
    }),
    case("live over a probe", USER, |a| {
        a.cmp(rax, rbx)?;
        a.mov(rcx, qword_ptr(rsi))?;
        a.cmovb(rax, rcx)?;
        a.jmp(0x40_0200)
    }),
    case("live at the end", USER, |a| {
        a.add(rax, rbx)?;
        a.nop()?;
        a.jmp(0x40_0200)
    }),
    case("kept by a shift", USER, |a| {
        a.shl(rax, cl)?;
        a.mov(qword_ptr(rsi), rax)?;
        a.jmp(0x40_0200)
    }),
    case("lahf and sahf", USER, |a| {
        a.lahf()?;
        a.sahf()?;
        a.jmp(0x40_0200)
    }),
    case("a division", USER, |a| {
        a.xor(edx, edx)?;
        a.div(rcx)?;
        a.cdq()?;
        a.idiv(dword_ptr(rsi))?;
        a.jmp(0x40_0200)
    }),
    case("divisions of small operands", USER, |a| {
        a.div(ch)?;
        a.idiv(word_ptr(rsi))?;
        a.jmp(0x40_0200)
    }),
];

const BRANCHES: &[Case] = &[
    case("to another page", USER, |a| a.jmp(0x40_5200)),
    case(
        "to another page, at one address",
        USER.with(Mode::BOUND),
        |a| a.jmp(0x40_5200),
    ),
    case("to another page, of a kernel", KERNEL, |a| a.jmp(0x40_5200)),
    case("on a condition, to another page", KERNEL, |a| {
        a.test(eax, eax)?;
        a.je(0x40_5200)?;
        a.jmp(0x40_0200)
    }),
    case("through a register", USER, |a| a.jmp(rax)),
    case("through memory", USER, |a| a.jmp(qword_ptr(rax + rcx * 8))),
    case("back, many times", USER, |a| {
        let mut top = a.create_label();
        a.set_label(&mut top)?;
        a.dec(rcx)?;
        a.jne(top)
    }),
    case("followed within the page", USER, |a| {
        let mut on = a.create_label();
        a.jmp(on)?;
        a.ud2()?;
        a.set_label(&mut on)?;
        a.inc(eax)?;
        a.jmp(rax)
    }),
];

const CALLS: &[Case] = &[
    case("a call within the page", USER, |a| a.call(0x40_0200)),
    case("a call to another page", USER, |a| a.call(0x40_5200)),
    case("a call to another page, of a kernel", KERNEL, |a| {
        a.call(0x40_5200)
    }),
    case("a call that is not returned from", USER, |a| {
        a.call(0x40_0200)?;
        a.int3()
    }),
    case(
        "a call to another page that is not returned from, of a kernel",
        KERNEL,
        |a| {
            a.call(0x40_5200)?;
            a.ud2()
        },
    ),
    case("a call through a register", USER, |a| a.call(rax)),
    case("a call through memory", KERNEL, |a| {
        a.call(qword_ptr(rax + 8))
    }),
    case("a return", USER, |a| a.ret()),
    case("a return that pops", USER, |a| a.ret_1(16)),
    case("an epilogue", USER, |a| {
        a.add(rsp, 0x18)?;
        a.pop(rbx)?;
        a.pop(rbp)?;
        a.ret()
    }),
];

const STRINGS: &[Case] = &[
    case("rep movsq", USER, |a| {
        a.rep().movsq()?;
        a.jmp(0x40_0200)
    }),
    case("stosb", USER, |a| {
        a.stosb()?;
        a.jmp(0x40_0200)
    }),
    case("repne scasb", USER, |a| {
        a.repne().scasb()?;
        a.jmp(0x40_0200)
    }),
    case("repe cmpsb", USER, |a| {
        a.repe().cmpsb()?;
        a.jmp(0x40_0200)
    }),
];

const SYSTEM: &[Case] = &[
    case("cli, sti", KERNEL, |a| {
        a.cli()?;
        a.mov(eax, 1)?;
        a.sti()?;
        a.nop()?;
        a.jmp(0x40_0200)
    }),
    case("pushf, popf", KERNEL, |a| {
        a.pushfq()?;
        a.popfq()?;
        a.jmp(0x40_0200)
    }),
    case("a user's popf", USER, |a| {
        a.popfq()?;
        a.jmp(0x40_0200)
    }),
    case("stac, clac", KERNEL, |a| {
        a.stac()?;
        a.mov(eax, dword_ptr(rdi))?;
        a.clac()?;
        a.jmp(0x40_0200)
    }),
    case("wrpkru, rdpkru", USER, |a| {
        a.wrpkru()?;
        a.mov(esi, dword_ptr(rdi))?;
        a.rdpkru()?;
        a.jmp(0x40_0200)
    }),
    case("swapgs", KERNEL, |a| {
        a.swapgs()?;
        a.jmp(0x40_0200)
    }),
    case("syscall", USER, |a| a.syscall()),
    case("sysret", KERNEL, |a| a.sysretq()),
    case("iret", KERNEL, |a| a.iretq()),
    case("rdtsc", USER, |a| {
        a.rdtsc()?;
        a.jmp(0x40_0200)
    }),
    case("control registers", KERNEL, |a| {
        a.mov(rax, cr3)?;
        a.mov(rcx, cr0)?;
        a.jmp(0x40_0200)
    }),
    case("mov to cr0", KERNEL, |a| {
        a.mov(cr0, rcx)?;
        a.jmp(0x40_0200)
    }),
    case("clts", KERNEL, |a| a.clts()),
    case("descriptor tables", KERNEL, |a| {
        a.sidt(ptr(rdi))?;
        a.sgdt(ptr(rsp + 8))?;
        a.jmp(0x40_0200)
    }),
    case("segments", KERNEL, |a| {
        a.mov(eax, ds)?;
        a.rdfsbase(rcx)?;
        a.wrgsbase(rdx)?;
        a.jmp(0x40_0200)
    }),
    case("pause, cld", USER, |a| {
        a.pause()?;
        a.cld()?;
        a.jmp(0x40_0200)
    }),
    case("left to the interpreter", KERNEL, |a| {
        a.inc(eax)?;
        a.wrmsr()
    }),
];

const FP: &[Case] = &[
    case("sse", USER, |a| {
        a.movss(xmm0, dword_ptr(rsi))?;
        a.mulss(xmm0, xmm1)?;
        a.movss(dword_ptr(rdi), xmm0)?;
        a.jmp(0x40_0200)
    }),
    case("avx", USER, |a| {
        a.vmovups(ymm0, ymmword_ptr(rsi))?;
        a.vaddps(ymm0, ymm0, ymm9)?;
        a.vzeroupper()?;
        a.jmp(0x40_0200)
    }),
    case("x87", USER, |a| {
        a.fld(qword_ptr(rsi))?;
        a.fadd_2(st0, st1)?;
        a.fstp(qword_ptr(rdi))?;
        a.jmp(0x40_0200)
    }),
    case("ldmxcsr", USER, |a| {
        a.ldmxcsr(dword_ptr(rsi))?;
        a.jmp(0x40_0200)
    }),
];

const BITS32: &[Case] = &[
    case("a load", USER32, |a| {
        a.mov(eax, dword_ptr(ebx + ecx * 4 + 8))?;
        a.jmp(0x40_0200)
    }),
    case("relative to GS", USER32.with(Mode::GS), |a| {
        a.mov(eax, dword_ptr(0x14).gs())?;
        a.jmp(0x40_0200)
    }),
    case("push and pop", USER32, |a| {
        a.push(ebx)?;
        a.push(ebp)?;
        a.pop(ebp)?;
        a.pop(ebx)?;
        a.jmp(0x40_0200)
    }),
    case("a call", USER32, |a| a.call(0x40_0200)),
    case("a call to another page", USER32, |a| a.call(0x40_5200)),
    case("a return", USER32, |a| a.ret()),
    case("inc of one byte", USER32, |a| {
        a.inc(ecx)?;
        a.jmp(0x40_0200)
    }),
    case("rep stosd", USER32, |a| {
        a.rep().stosd()?;
        a.jmp(0x40_0200)
    }),
    case("a loop that counts", USER32, |a| {
        a.add(eax, ebx)?;
        a.loop_(0x40_0100)?;
        a.jmp(0x40_0200)
    }),
];

const OLD_HOST: &[Case] = &[
    case("a load", USER, load).on_old_host(),
    case("fields of a structure", USER, fields).on_old_host(),
    case("through a register", USER, |a| a.jmp(rax)).on_old_host(),
    case("a sum, executed much", USER, sum).hot().on_old_host(),
    case("an instruction that it has not", USER, |a| {
        a.andn(rax, rbx, rcx)?;
        a.jmp(0x40_0200)
    })
    .on_old_host(),
];

const ENTRIES: &[Case] = &[
    case("entered from elsewhere", USER, |a| {
        a.adc(eax, 1)?;
        a.jmp(0x40_0200)
    }),
    case("entered by a branch of the page", USER, |a| {
        a.adc(eax, 1)?;
        a.jmp(0x40_0200)
    })
    .linked(),
    case("falls through the page's end", USER, |a| {
        a.inc(eax)?;
        a.inc(ecx)
    })
    .at(0xffc),
    case("straddles two pages", USER, |a| a.add(rax, 0x1234_5678)).at(0xffe),
    case("nothing but an undefined instruction", USER, |a| a.ud2()),
];

fn two_ways(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, qword_ptr(rbx + 8))?;
    a.test(rax, rax)?;
    a.je(0x40_0200)?;
    a.mov(qword_ptr(rcx), rax)?;
    a.jmp(0x40_0300)
}

const COUNTING: &[Case] = &[
    case("a branch in its middle", COUNTED, two_ways),
    case("the same, those that are taken", COUNTED_TAKEN, two_ways),
    case("a loop", COUNTED, sum),
    case("a loop whose taken branches count", COUNTED_TAKEN, sum),
    case("fields of a structure", COUNTED, fields),
    case("a call", COUNTED, |a| a.call(0x40_0200)),
    case("a return", COUNTED, |a| a.ret()),
    case("rep movsq", COUNTED, |a| {
        a.rep().movsq()?;
        a.jmp(0x40_0200)
    }),
    case("stac, clac", COUNTED_KERNEL, |a| {
        a.stac()?;
        a.clac()?;
        a.jmp(0x40_0200)
    }),
    case("pause", COUNTED, |a| {
        a.pause()?;
        a.jmp(0x40_0200)
    }),
    case("syscall", COUNTED, |a| {
        a.inc(rax)?;
        a.syscall()
    }),
    case("several streams", COUNTED_SEVERAL, two_ways),
    case(
        "several streams, some of which are of what is taken",
        USER.with(Mode::counting(Streams::of(
            SEVERAL | bit(CONDITIONAL_TAKEN),
            0,
        ))),
        two_ways,
    ),
    case("several streams of a loop", COUNTED_SEVERAL, sum),
    case("several streams of a return", COUNTED_SEVERAL, |a| {
        a.mov(rax, qword_ptr(rdx))?;
        a.ret()
    }),
    case("several bounded streams", COUNTED_BOUNDED, two_ways),
    case("several bounded streams of a loop", COUNTED_BOUNDED, sum),
    case(
        "several bounded streams of a return",
        COUNTED_BOUNDED,
        |a| {
            a.mov(rax, qword_ptr(rdx))?;
            a.ret()
        },
    ),
    case("several streams of rep movsq", COUNTED_SEVERAL, |a| {
        a.rep().movsq()?;
        a.jmp(0x40_0200)
    }),
    case("accesses to memory", COUNTED_MEMORY, two_ways),
    case("accesses to memory in a loop", COUNTED_MEMORY, sum),
    case("several streams of pause", COUNTED_SEVERAL, |a| {
        a.pause()?;
        a.jmp(0x40_0200)
    }),
];
