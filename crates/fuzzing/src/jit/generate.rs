//! Makes [`Program`]s: random instructions, each with code that gives its memory operand an address, among the elements
//! of `elements`; start states and data.

use iced_x86::{Code, FlowControl, Instruction, Mnemonic as M, OpKind, Register as R};
use x86_cpu::{CpuState, Feature};
use x86_defs::{control::cr4, reg, rflags, segment::Attr, xsave};
use x86_native::oracle::{AREA_SIZE, Mode};

use super::{
    machine::{
        ABSENT, CODE, CODE_PAGES, DATA, DATA_PAGES, KERNEL, PRIVATE, READ_ONLY, STACK_TOP, USER,
        Weather, base, cpu,
    },
    narrow,
    program::{Element, Program},
};
use crate::{Family, Random, case::prefixes, forms, operands::Operands, state};

/// Number of a program's functions.
pub(super) const FUNCTIONS: usize = 3;
/// Makes programs.
#[derive(Debug)]
pub(crate) struct Generator {
    integer: [Vec<Code>; 2],
    fp: [Vec<Code>; 2],
    /// True if registers, flags and results are those of the interpreter's model.
    exact: bool,
}

/// A program that is being made.
pub(super) struct Builder<'a> {
    forms: &'a Generator,
    pub(super) r: Random,
    pub(super) cpl: u8,
    /// True for 32-bit code.
    pub(super) narrow: bool,
    /// Number of general registers that the program names.
    pub(super) registers: u64,
    /// True if exceptions are frequent.
    pub(super) wild: bool,
    pub(super) start: CpuState,
    /// True for 64-bit code of CPL 3 that mostly calls functions.
    pub(super) calls: bool,
    fp: u64,
}

impl Generator {
    pub(crate) fn new() -> Self {
        let usable = |c: &Code| {
            c.flow_control() == FlowControl::Next
                && !matches!(c.mnemonic(), M::Clzero | M::Ud0 | M::Ud1 | M::Ud2)
        };
        let family = |f| {
            [Mode::Bits64, Mode::Bits32]
                .map(|mode| -> Vec<Code> { forms(f, mode).into_iter().filter(usable).collect() })
        };
        Self {
            integer: family(Family::Integer),
            fp: family(Family::Fp),
            exact: crate::model::is_modelled(),
        }
    }

    /// Returns the program of a seed. Every fourth program is 32-bit code.
    pub(crate) fn program(&self, seed: u64) -> Program {
        let narrow = seed % 4 == 3;
        let mut r = Random::new(seed);
        let cpl = if r.one_in(2) { 3 } else { 0 };
        let start = start(&mut r, cpl, narrow);
        let wild = r.one_in(4);
        let fp = r.pick(&[0, 0, 1, 4]);
        let calls = !narrow && cpl == 3 && !wild && r.one_in(2);
        let mut b = Builder {
            forms: self,
            narrow,
            registers: if narrow { 8 } else { 16 },
            wild,
            cpl,
            start,
            calls,
            fp,
            r,
        };
        let wanted = 4 + b.r.below(36) as usize;
        let mut elements: Vec<Element> = Vec::with_capacity(wanted + 8);
        elements.push(b.stack());
        let mut patchable = Vec::new();
        for _ in 0..wanted {
            let n = elements.len();
            let e = match b.r.below(32) {
                0..20 if calls => b.control(n),
                20..24 if calls => b.stack(),
                0..5 => b.control(n),
                5..8 => b.stack_use(),
                8 => b.system(),
                9 if b.r.one_in(3) => {
                    patchable.push(n);
                    b.patchable()
                }
                10 if b.r.one_in(2) => b.stack(),
                11..14 => b.neighbours(),
                14 => b.string(),
                15 if b.r.one_in(4) => b.interrupt_return(n),
                16 if b.r.one_in(3) => b.fp_control(),
                17 if b.r.one_in(3) => {
                    let turns = b.turns();
                    elements.push(turns);
                    let body = b.any();
                    elements.push(body);
                    b.next_turn(n + 1)
                }
                _ => b.any(),
            };
            elements.push(e);
        }
        if !patchable.is_empty() {
            for _ in 0..2 {
                let at = b.r.below(elements.len() as u64) as usize;
                let e = b.patch(&patchable);
                let e_at = &mut elements[at];
                // The code is appended to an element, so that numbers stay the same; but not behind a branch's use of
                // flags.
                let shift = e_at.code.len();
                e_at.code.extend(e.code);
                e_at.fixes
                    .extend(e.fixes.into_iter().map(|(k, f)| (k + shift, f)));
            }
        }
        elements.push(b.again());
        let mut end = Element::default();
        end.push(plain(Code::Hlt));
        elements.push(end);
        let mut functions: Vec<_> = (0..FUNCTIONS).map(|n| b.some_function(n)).collect();
        if narrow {
            elements
                .iter_mut()
                .chain(&mut functions)
                .for_each(narrow::element);
        }
        let at = b.places();
        let starts = b.starts();
        let data = b.data();
        let r = &mut b.r;
        let weather = Weather {
            flushes: r.one_in(8),
            poll_every: r.pick(&[128, 128, 7, 3]),
            requested: r.one_in(8),
            waits: r.one_in(8),
        };
        Program {
            seed,
            narrow,
            elements,
            functions,
            at,
            starts,
            data,
            weather,
        }
    }
}

/// Returns the registers at the start.
fn start(r: &mut Random, cpl: u8, narrow: bool) -> CpuState {
    let mut cpu = cpu(cpl, narrow);
    if r.one_in(24) {
        // Without these features, F3 before BSF and BSR has no meaning.
        for f in [
            Feature::Bmi1,
            Feature::Bmi2,
            Feature::Lzcnt,
            Feature::Abm,
            Feature::Popcnt,
            Feature::Movbe,
            Feature::Avx,
        ] {
            cpu.features.set(f, false);
        }
    }
    for bit in [cr4::SMAP, cr4::SMEP] {
        if r.one_in(3) {
            cpu.cr4 |= bit;
        }
    }
    if !r.one_in(4) {
        cpu.cr4 |= cr4::FSGSBASE;
    }
    if r.one_in(4) {
        cpu.cr4 |= cr4::PKE;
        cpu.pkru = rights(r);
    }
    cpu.cr4 &= !(u64::from(r.one_in(8)) * cr4::OSFXSR);
    if r.one_in(16) {
        cpu.cr0 &= !x86_defs::control::cr0::WP;
    }
    if r.one_in(16) {
        cpu.cr0 |= x86_defs::control::cr0::TS;
    }
    for n in [reg::FS, reg::GS] {
        cpu.seg[n].base = match r.below(3) {
            0 => 0,
            1 => r.below(1 << 30),
            _ => (1 << 47) - 1 - r.below(1 << 30),
        };
        if narrow {
            cpu.seg[n].base &= 0xffff_ffff;
            match r.below(8) {
                0 => cpu.seg[n].limit = 0xfff,
                1 => cpu.seg[n].attr.0 |= Attr::UNUSABLE,
                _ => {}
            }
        }
    }
    cpu.msr.fmask = match r.below(4) {
        0 => r.next() & 0xffff_ffff,
        _ => {
            rflags::IF
                | rflags::DF
                | rflags::AC
                | rflags::NT
                | rflags::IOPL
                | r.next() & rflags::ARITH
        }
    };
    cpu.msr.kernel_gs_base = r.below(1 << 40);
    cpu
}

pub(super) fn plain(code: Code) -> Instruction {
    let mut i = Instruction::default();
    i.set_code(code);
    i
}

pub(super) fn made(i: Result<Instruction, iced_x86::IcedError>) -> Instruction {
    i.unwrap_or_else(|_| plain(Code::Nopd))
}

/// Returns rights of protection keys: most allow everything, and key 0 does.
pub(super) fn rights(r: &mut Random) -> u32 {
    (r.next() & r.next() & 0xffff_fffc) as u32
}

pub(super) fn mov(to: R, v: u64) -> Instruction {
    made(Instruction::with2(Code::Mov_r64_imm64, to, v))
}

/// Returns one of the first `registers` general registers, but not RSP.
pub(super) fn general(r: &mut Random, registers: u64) -> R {
    loop {
        let n = r.below(registers) as u32;
        if n != 4 {
            return R::RAX + n;
        }
    }
}

impl Builder<'_> {
    pub(super) fn base(&self) -> u64 {
        base(self.cpl, self.narrow)
    }

    /// Returns a gva for an access of `size` bytes.
    pub(super) fn target(&mut self, size: u64) -> u64 {
        let here = self.base();
        let r = &mut self.r;
        let rare = if self.wild { 12 } else { 200 };
        let odd = r.one_in(rare);
        let page = if odd {
            r.pick(&[
                READ_ONLY,
                READ_ONLY,
                ABSENT,
                DATA + 0x5000,
                DATA + 0x6000,
                DATA + 0x7000,
            ])
        } else {
            DATA + 0x1000 * r.pick(&[0, 0, 1, 4, 8])
        };
        let offset = match r.below(if odd || self.wild { 8 } else { 16 }) {
            0 => 0x1000 - r.below(size + 4).min(0x1000),
            1 | 2 => r.below(0xfc0),
            _ => r.below(0x7e) * 32,
        };
        let mut gpa = page + offset;
        if self.wild && r.one_in(40) {
            gpa = CODE + r.below(CODE_PAGES * 0x1000);
        }
        let base = match r.below(4) {
            0 if self.cpl == 0 && (self.start.cr4 & cr4::SMAP == 0 || odd || r.one_in(8)) => USER,
            0 if self.cpl == 3 && odd => KERNEL,
            _ => here,
        };
        if self.wild && r.one_in(60) {
            return match r.below(3) {
                0 => (1 << 47) - r.below(20),
                1 => u64::MAX - r.below(20),
                _ => r.next(),
            };
        }
        base + gpa
    }

    /// Gives the instruction's memory operand the address `gva`. Code that has to come before is appended to `e`.
    pub(super) fn aim(&mut self, e: &mut Element, i: &mut Instruction, gva: u64) {
        let (here, registers) = (self.base(), self.registers);
        let r = &mut self.r;
        i.set_segment_prefix(R::None);
        let mut at = gva;
        if r.one_in(8) {
            let n = r.pick(&[reg::FS, reg::GS]);
            i.set_segment_prefix(if n == reg::FS { R::FS } else { R::GS });
            at = at.wrapping_sub(self.start.seg[n].base);
        } else if r.one_in(12) {
            i.set_segment_prefix(r.pick(&[R::ES, R::CS, R::SS, R::DS]));
        }
        i.set_memory_index(R::None);
        i.set_memory_index_scale(1);
        let absolute = i
            .code()
            .op_code()
            .op_kinds()
            .contains(&iced_x86::OpCodeOperandKind::mem_offs);
        let near = at.wrapping_sub(here + CODE).wrapping_add(1 << 30) < 1 << 31;
        if absolute || at >> 31 == 0 && r.one_in(12) {
            i.set_memory_base(R::None);
            i.set_memory_displ_size(8);
            i.set_memory_displacement64(at);
            return;
        }
        if near && r.one_in(6) {
            i.set_memory_base(R::RIP);
            i.set_memory_displ_size(8);
            i.set_memory_displacement64(at);
            return;
        }
        let narrow = at >> 32 == 0 && r.one_in(10);
        let d = match r.below(3) {
            0 => 0,
            1 => r.next() as i8 as i64 as u64,
            _ => r.next() as i32 as i64 as u64,
        };
        let size = match (d, narrow) {
            (0, _) => 0,
            _ if d as i64 == i64::from(d as i8) => 1,
            (_, true) => 4,
            (_, false) => 8,
        };
        i.set_memory_displ_size(size);
        i.set_memory_displacement64(if narrow && size == 4 {
            d & 0xffff_ffff
        } else {
            d
        });
        let base = match r.below(24) {
            0 => R::RSP,
            _ => general(r, registers),
        };
        let index = general(r, registers);
        let mut from_index = 0;
        let indexed = r.one_in(3) && index != base;
        let without_base = indexed && !narrow && r.one_in(8);
        let scale = r.below(4) as u32;
        if indexed {
            let v = match r.below(3) {
                0 => r.below(64),
                1 => r.below(64).wrapping_neg(),
                _ => r.next(),
            };
            from_index = v << scale;
            let n = index.number() as u32;
            i.set_memory_index(if narrow { R::EAX + n } else { R::RAX + n });
            i.set_memory_index_scale(1 << scale);
            e.push(mov(index, v));
        }
        if without_base {
            // The address consists of index and displacement.
            let d = (r.below(0x1000) as u32) as u64;
            i.set_memory_base(R::None);
            i.set_memory_displ_size(8);
            i.set_memory_displacement64(d);
            let v = at.wrapping_sub(d);
            let scale = (v.trailing_zeros()).min(scale);
            i.set_memory_index_scale(1 << scale);
            let last = e.code.len() - 1;
            e.code[last] = mov(index, v >> scale);
            return;
        }
        let mut v = at.wrapping_sub(d).wrapping_sub(from_index);
        let n = base.number() as u32;
        if narrow {
            v = v & 0xffff_ffff | r.next() << 32;
        }
        i.set_memory_base(if narrow { R::EAX + n } else { R::RAX + n });
        e.push(mov(base, v));
    }

    /// Returns an instruction of a random form.
    pub(super) fn any(&mut self) -> Element {
        for _ in 0..20 {
            let code = if self.fp > 0 && self.r.below(8) < self.fp {
                self.r.pick(&self.forms.fp[usize::from(self.narrow)])
            } else {
                self.r.pick(&self.forms.integer[usize::from(self.narrow)])
            };
            if let Some(e) = self.form(code) {
                return e;
            }
        }
        Element::default()
    }

    fn form(&mut self, code: Code) -> Option<Element> {
        let mut e = Element::default();
        let mut gpr = [0; 16];
        let mut operands = Operands {
            r: &mut self.r,
            gpr: &mut gpr,
            mode: if self.narrow {
                Mode::Bits32
            } else {
                Mode::Bits64
            },
            block: false,
            narrow: false,
            target: None,
            vector_index: None,
        };
        let mut i = operands.fill(code)?;
        let gathers = operands.vector_index.is_some();
        if !self.forms.exact && crate::undefined::is_model_specific(&i) {
            return None;
        }
        // Other tests are for undefined results.
        if crate::setup::result_depends_on_processor(&i) && !self.forms.exact {
            return None;
        }
        prefixes(&mut i, &mut self.r);
        let memory = (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory);
        if gathers {
            self.aim_gather(&mut e, &mut i);
        }
        let r = &mut self.r;
        match i.mnemonic() {
            M::Div | M::Idiv => self.dividend(&mut e, &i),
            M::Popf | M::Popfd | M::Popfq => return Some(self.popf(i)),
            M::Enter | M::Leave => e.push(mov(R::RBP, self.base() + STACK_TOP - 0x800)),
            M::Bt | M::Bts | M::Btr | M::Btc if memory && i.op1_kind() == OpKind::Register => {
                let span = if r.one_in(4) { 0x4000 } else { 0x200 };
                let bit = r.below(span);
                let bit = if r.one_in(3) { bit.wrapping_neg() } else { bit };
                e.push(mov(i.op1_register().full_register(), bit));
            }
            M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu | M::Xlatb => {
                let to = self.target(16);
                e.push(mov(R::RDI, to));
                e.push(mov(R::RBX, to));
            }
            _ => {}
        }
        if i.is_string_instruction() {
            if !self.r.one_in(6) {
                return None;
            }
            for register in [R::RSI, R::RDI] {
                let to = self.target(64);
                e.push(mov(register, to));
            }
            e.push(mov(R::RCX, self.r.below(24)));
        }
        if memory && i.mnemonic() != M::Xlatb && !gathers {
            let size = i.memory_size().size() as u64;
            let mut to = self.target(size);
            if size >= 8 && !self.r.one_in(8) {
                to &= !(size.next_power_of_two() - 1);
            }
            if i.mnemonic() == M::Cmpxchg && self.r.one_in(2) {
                let mut load = plain(Code::Mov_r64_rm64);
                load.set_op0_register(R::RAX);
                load.set_op1_kind(OpKind::Memory);
                self.aim(&mut e, &mut load, to);
                e.push(load);
            }
            self.aim(&mut e, &mut i, to);
            if let OpKind::Register = i.op1_kind()
                && matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc)
            {
                let full = i.op1_register().full_register();
                if full == i.memory_base().full_register()
                    || full == i.memory_index().full_register()
                {
                    return None;
                }
            }
        }
        let named = |full: R| {
            (0..i.op_count()).any(|n| {
                i.op_kind(n) == OpKind::Register && i.op_register(n).full_register() == full
            })
        };
        if named(R::RSP) && !self.r.one_in(3) {
            return None;
        }
        e.push(i);
        let moved = named(R::RSP) || i.memory_base() == R::RSP || i.memory_base() == R::ESP;
        if moved || i.is_stack_instruction() {
            let e2 = self.stack();
            e.code.extend(e2.code);
        }
        Some(e)
    }

    fn dividend(&mut self, e: &mut Element, i: &Instruction) {
        let size = match i.op0_kind() {
            OpKind::Memory => i.memory_size().size(),
            _ => i.op0_register().size(),
        };
        let signed = i.mnemonic() == M::Idiv;
        let r = &mut self.r;
        match (r.below(6), size) {
            (0, _) => {}
            (_, 1) => e.push(mov(R::RAX, r.below(128))),
            (_, _) if !signed => e.push(mov(R::RDX, r.below(3) / 2)),
            (_, 2) => e.push(plain(Code::Cwd)),
            (_, 4) => e.push(plain(Code::Cdq)),
            _ => e.push(plain(Code::Cqo)),
        }
    }

    /// Returns gpas for code, which often straddles pages.
    fn places(&mut self) -> [u64; 2] {
        let r = &mut self.r;
        let main = CODE
            + match r.below(4) {
                0 => r.below(0x1000),
                1 => 0x1000 - r.below(0x100),
                2 => 0x1000 - r.below(0x20),
                _ => 0x400,
            };
        let functions = CODE
            + match r.below(4) {
                0 => 0x4000 - r.below(64),
                1 => 0x3000 + r.below(0x1000),
                _ => 0x3400,
            };
        [main, functions]
    }

    /// Returns several start states. Code is translated once, and executed with all of them.
    fn starts(&mut self) -> Vec<CpuState> {
        let r = &mut self.r;
        (0..1 + r.below(3))
            .map(|_| {
                let mut cpu = self.start.clone();
                for g in &mut cpu.gpr[..16] {
                    *g = r.integer();
                    if self.narrow {
                        *g &= 0xffff_ffff;
                    }
                }
                let direction = if r.one_in(8) { rflags::DF } else { 0 };
                let enabled = if self.cpl == 3 || r.one_in(2) {
                    rflags::IF
                } else {
                    0
                };
                cpu.rflags = r.next() & rflags::ARITH | rflags::FIXED1 | direction | enabled;
                if self.cpl == 0 && r.one_in(2) {
                    cpu.rflags |= rflags::AC;
                }
                let mut area = [0; AREA_SIZE];
                state::fill(&mut area, r);
                if r.one_in(4) {
                    area[xsave::FSW] = r.next() as u8;
                }
                if !r.one_in(4) {
                    // All exceptions are masked.
                    area[xsave::FCW] |= 0x3f;
                    area[xsave::MXCSR] |= 0x80;
                    area[xsave::MXCSR + 1] |= 0x1f;
                }
                cpu.fp.area[..AREA_SIZE].copy_from_slice(&area);
                cpu
            })
            .collect()
    }

    fn data(&mut self) -> Vec<(u64, Vec<u8>)> {
        let r = &mut self.r;
        let mut data = Vec::new();
        let mut bytes = Vec::with_capacity((DATA_PAGES * 0x1000) as usize);
        let seed = r.next();
        let mut fast = Random::new(seed);
        for _ in 0..DATA_PAGES * 0x200 {
            bytes.extend_from_slice(&fast.next().to_le_bytes());
        }
        data.push((DATA, bytes));
        let turns = 1 + r.below(4) as u32;
        data.push((PRIVATE, turns.to_le_bytes().to_vec()));
        data
    }
}
