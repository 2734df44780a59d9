//! Random programs for segments: forms with operands of both address sizes, branches, the stack, segment registers, strings.

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, EncodingKind, FlowControl, Instruction,
    InstructionBlock, Mnemonic as M, OpKind, Register as R,
};
use x86_cpu::CpuState;
use x86_native::oracle::Mode as Oracle;

use super::state::{RAM, SegmentMode, start};
use crate::{
    Family, Random,
    case::prefixes,
    forms,
    jit::machine::Weather,
    operands::{BASES16, Operands},
};

/// The first of the numbers that stand for addresses of instructions before these are known.
const LABEL: u64 = 0x1000;
/// Maximum number of bytes of an element.
const ROOM: u64 = 32;

/// The forms that programs are made of.
#[derive(Debug)]
pub(super) struct Forms {
    integer: Vec<Code>,
    fp: Vec<Code>,
    /// True if results that manuals leave open are those of the interpreter's model.
    exact: bool,
}

impl Forms {
    pub(super) fn new() -> Self {
        let usable = |c: &Code| {
            c.flow_control() == FlowControl::Next
                && c.op_code().mode16()
                && !matches!(
                    c.mnemonic(),
                    M::Clzero | M::Ud0 | M::Ud1 | M::Ud2 | M::Rdpkru | M::Wrpkru
                )
        };
        Self {
            integer: forms(Family::Integer, Oracle::Bits32)
                .into_iter()
                .filter(usable)
                .collect(),
            fp: forms(Family::Fp, Oracle::Bits32)
                .into_iter()
                .filter(|c| usable(c) && c.encoding() == EncodingKind::Legacy)
                .collect(),
            exact: crate::model::is_modelled(),
        }
    }
}

/// Instructions that belong together, and the element that the last one leads to, if it is a direct branch.
#[derive(Clone, Debug, Default)]
pub(super) struct Element {
    pub(super) code: Vec<Instruction>,
    to: Option<usize>,
    /// True if the element is left out.
    pub(super) off: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) bits: u32,
    pub(super) elements: Vec<Element>,
    pub(super) start: CpuState,
    pub(super) data: Vec<u8>,
    pub(super) weather: Weather,
}

pub(super) struct Builder<'a> {
    forms: &'a Forms,
    pub(super) r: Random,
    pub(super) kind: SegmentMode,
    pub(super) bits: u32,
}

pub(super) fn plain(code: Code) -> Instruction {
    let mut i = Instruction::default();
    i.set_code(code);
    i
}

pub(super) fn mov32(to: R, v: u32) -> Instruction {
    Instruction::with2(Code::Mov_r32_imm32, to, v).unwrap_or_else(|_| plain(Code::Nopd))
}

pub(super) fn with1(code: Code, r: R) -> Instruction {
    Instruction::with1(code, r).unwrap_or_else(|_| plain(Code::Nopd))
}

impl Program {
    pub(super) fn new(forms: &Forms, seed: u64) -> Self {
        let mut r = Random::new(seed ^ 0x5e6_0000_0000);
        let kind = r.pick(&SegmentMode::ALL);
        let start = start(&mut r, kind);
        let bits = if kind == SegmentMode::Protected32 {
            32
        } else {
            16
        };
        let mut b = Builder {
            forms,
            r,
            kind,
            bits,
        };
        let count = 4 + b.r.below(30) as usize;
        let mut elements: Vec<Element> = (0..count).map(|n| b.element(n, count)).collect();
        elements.push(Element {
            code: vec![plain(Code::Hlt)],
            ..Element::default()
        });
        // The function that calls lead to.
        let mut function = b.any();
        let wide = b.r.one_in(2);
        function.code.push(plain(if b.bits == 32 || wide {
            Code::Retnd
        } else {
            Code::Retnw
        }));
        elements.push(function);
        let mut far = b.any();
        far.code.push(plain(if b.bits == 32 {
            Code::Retfd
        } else {
            Code::Retfw
        }));
        elements.push(far);
        let mut data = vec![0; RAM];
        for word in data.chunks_exact_mut(8) {
            word.copy_from_slice(&b.r.next().to_le_bytes());
        }
        let weather = Weather {
            flushes: b.r.one_in(8),
            poll_every: b.r.pick(&[128, 128, 7, 3]),
            requested: b.r.one_in(8),
            waits: b.r.one_in(8),
        };
        Self {
            bits,
            elements,
            start,
            data,
            weather,
        }
    }

    /// Returns the linear address of the code.
    pub(super) fn linear(&self) -> u64 {
        self.start.seg[x86_defs::reg::CS].base + self.start.rip()
    }

    fn kept(&self, n: usize) -> usize {
        let kept = (n..self.elements.len()).find(|&n| !self.elements[n].off);
        kept.unwrap_or(self.elements.len() - 3)
    }

    /// Returns the program's bytes. `None` if something cannot be encoded, or there is no room.
    pub(super) fn assemble(&self) -> Option<Vec<u8>> {
        let mut list = Vec::new();
        for (n, e) in self.elements.iter().enumerate().filter(|(_, e)| !e.off) {
            for (k, i) in e.code.iter().enumerate() {
                let mut i = *i;
                i.set_ip(LABEL + ROOM * n as u64 + k as u64);
                if let Some(to) = e.to
                    && k + 1 == e.code.len()
                {
                    let label = LABEL + ROOM * self.kept(to) as u64;
                    match i.op0_kind() {
                        OpKind::NearBranch16 => i.set_near_branch16(label as u16),
                        _ => i.set_near_branch32(label as u32),
                    }
                }
                list.push(i);
            }
        }
        let block = InstructionBlock::new(&list, self.start.rip());
        let code = BlockEncoder::encode(self.bits, block, BlockEncoderOptions::NONE)
            .ok()?
            .code_buffer;
        let end = self.linear() as usize + code.len();
        (end <= RAM && (self.bits == 32 || self.start.rip() as usize + code.len() <= 0xffff))
            .then_some(code)
    }
}

impl Builder<'_> {
    fn element(&mut self, n: usize, count: usize) -> Element {
        match self.r.below(20) {
            0..4 => self.branch(n, count),
            4..7 => self.stack(),
            7 | 8 => self.segment(),
            9 => self.string(),
            10 => self.pointer(),
            11 if self.r.one_in(3) => self.system(),
            12 if self.r.one_in(4) => self.far(count),
            _ => self.any(),
        }
    }

    pub(super) fn one(&mut self, i: Instruction) -> Element {
        Element {
            code: vec![i],
            ..Element::default()
        }
    }

    fn branch(&mut self, n: usize, count: usize) -> Element {
        use Code as C;
        if self.r.one_in(16) {
            // The branch leads to before the program, and to before CS's begin where that is near.
            let back = 0x80 + self.r.below(0x7e) as u8;
            let opcode = self.r.pick(&[0xeb, 0x74, 0x75, 0x72, 0x7d]);
            return self.one(Instruction::with_declare_byte_2(opcode, back));
        }
        let wide = self.bits == 32 || self.r.one_in(3);
        // Most branches lead forward, as loops need counters.
        let mut to = n + 1 + self.r.below(4) as usize;
        let code = match self.r.below(8) {
            0 => {
                to = count + 1;
                [C::Call_rel16, C::Call_rel32_32][usize::from(wide)]
            }
            1 => [C::Jmp_rel16, C::Jmp_rel32_32][usize::from(wide)],
            2 => {
                to = n.saturating_sub(self.r.below(4) as usize);
                match self.bits {
                    32 => self.r.pick(&[
                        C::Loop_rel8_32_ECX,
                        C::Loop_rel8_32_CX,
                        C::Loope_rel8_32_ECX,
                        C::Loope_rel8_32_CX,
                        C::Loopne_rel8_32_ECX,
                        C::Loopne_rel8_32_CX,
                    ]),
                    _ => self.r.pick(&[
                        C::Loop_rel8_16_CX,
                        C::Loop_rel8_16_ECX,
                        C::Loope_rel8_16_CX,
                        C::Loope_rel8_16_ECX,
                        C::Loopne_rel8_16_CX,
                        C::Loopne_rel8_16_ECX,
                    ]),
                }
            }
            3 => match self.bits {
                32 => C::Jecxz_rel8_32,
                _ => C::Jcxz_rel8_16,
            },
            _ if wide => self.r.pick(&[
                C::Je_rel32_32,
                C::Jb_rel32_32,
                C::Jl_rel32_32,
                C::Jp_rel32_32,
                C::Jo_rel32_32,
                C::Jbe_rel32_32,
            ]),
            _ => self.r.pick(&[
                C::Jne_rel16,
                C::Jae_rel16,
                C::Jge_rel16,
                C::Js_rel16,
                C::Jno_rel16,
                C::Ja_rel16,
            ]),
        };
        let mut i = plain(code);
        i.set_op0_kind(if wide && code != C::Jcxz_rel8_16 || self.bits == 32 {
            OpKind::NearBranch32
        } else {
            OpKind::NearBranch16
        });
        let is_16 = format!("{code:?}").contains("_16") || format!("{code:?}").ends_with("rel16");
        i.set_op0_kind(if is_16 {
            OpKind::NearBranch16
        } else {
            OpKind::NearBranch32
        });
        let mut e = Element {
            to: Some(to),
            ..Element::default()
        };
        if matches!(i.mnemonic(), M::Loop | M::Loope | M::Loopne) {
            e.code.push(mov32(R::ECX, 1 + self.r.below(3) as u32));
            // The counter is set before this element, which is a loop of one element.
            e.to = Some(n + 1);
        }
        e.code.push(i);
        e
    }

    fn system(&mut self) -> Element {
        use Code as C;
        let code = self.r.pick(&[
            C::Cli,
            C::Sti,
            C::Cld,
            C::Std,
            C::Pause,
            C::Nopw,
            C::Cpuid,
            C::Into,
        ]);
        self.one(plain(code))
    }

    /// Returns INT, or a call that RETF returns from.
    fn far(&mut self, count: usize) -> Element {
        if self.r.one_in(4) {
            let i = Instruction::with1(Code::Int_imm8, self.r.below(256) as u32);
            return self.one(i.unwrap_or_default());
        }
        let wide = self.bits == 32;
        if self.forms.exact && self.r.one_in(3) {
            return self.far_away(wide);
        }
        let mut call = plain(if wide {
            Code::Call_rel32_32
        } else {
            Code::Call_rel16
        });
        call.set_op0_kind(if wide {
            OpKind::NearBranch32
        } else {
            OpKind::NearBranch16
        });
        let push = if wide { Code::Pushd_CS } else { Code::Pushw_CS };
        Element {
            code: vec![with1(push, R::CS), call],
            to: Some(count + 2),
            off: false,
        }
    }

    /// Returns a RETF to anywhere. The code there may have results that manuals leave open.
    fn far_away(&mut self, wide: bool) -> Element {
        let mut e = self.one(plain(if wide { Code::Retfd } else { Code::Retfw }));
        let selector: u32 = match self.kind {
            SegmentMode::Real | SegmentMode::V86 => 0x1000 + self.r.below(0x800) as u32,
            _ => 8,
        };
        let push = |v: u32| match wide {
            true => Instruction::with1(Code::Pushd_imm32, v as i32),
            false => Instruction::with1(Code::Push_imm16, v),
        };
        let to = self.r.below(0x3000) as u32;
        e.code.insert(0, push(selector).unwrap_or_default());
        e.code.insert(1, push(to).unwrap_or_default());
        e
    }

    /// Returns an offset for an access of `size` bytes. Now and then it is near the limit.
    pub(super) fn offset(&mut self, size: u64) -> u32 {
        let r = &mut self.r;
        let edge = |r: &mut Random, at: u64| at.wrapping_sub(r.below(size + 2)) as u32;
        match r.below(40) {
            0 => edge(r, 0x1_0000),
            1 => edge(r, 0x1000),
            2 => edge(r, 0x2800),
            3 => edge(r, 0x10),
            4 if r.one_in(4) => edge(r, 0x1_0000_0000),
            5 => 0x1_0000 + r.below(0x1000) as u32,
            _ => r.below(0xf00) as u32,
        }
    }

    /// Gives the instruction's memory operand an address.
    pub(super) fn aim(&mut self, e: &mut Element, i: &mut Instruction, size: u64) {
        let at = self.offset(size);
        let r = &mut self.r;
        i.set_segment_prefix(R::None);
        if r.one_in(3) {
            i.set_segment_prefix(r.pick(&[R::ES, R::CS, R::SS, R::DS, R::FS, R::GS]));
        }
        i.set_memory_index(R::None);
        i.set_memory_index_scale(1);
        let absolute = i
            .code()
            .op_code()
            .op_kinds()
            .contains(&iced_x86::OpCodeOperandKind::mem_offs);
        let wide = if self.bits == 32 {
            !r.one_in(6)
        } else {
            r.one_in(3)
        };
        let d = match r.below(3) {
            0 => 0,
            1 => i64::from(r.next() as i8),
            _ => i64::from(r.next() as i16),
        };
        if absolute || r.one_in(6) {
            i.set_memory_base(R::None);
            i.set_memory_displ_size(if wide { 4 } else { 2 });
            i.set_memory_displacement64(if wide {
                at.into()
            } else {
                u64::from(at & 0xffff)
            });
            return;
        }
        let size = match d {
            0 => 0,
            -128..=127 => 1,
            _ if wide => 4,
            _ => 2,
        };
        i.set_memory_displ_size(size);
        i.set_memory_displacement64(if wide {
            d as u64 & 0xffff_ffff
        } else {
            d as u64 & 0xffff
        });
        let junk = if r.one_in(2) {
            r.next() as u32 & 0xffff_0000
        } else {
            0
        };
        if wide {
            let base = R::EAX + r.pick(&[0, 1, 2, 3, 5, 6, 7]);
            let index = R::EAX + r.pick(&[0, 1, 2, 3, 5, 6, 7]);
            let mut from_index = 0;
            if r.one_in(3) && index != base {
                let (v, scale) = (r.below(64) as u32, r.below(4) as u32);
                from_index = v << scale;
                i.set_memory_index(index);
                i.set_memory_index_scale(1 << scale);
                e.code.push(mov32(index, v));
            }
            i.set_memory_base(base);
            let v = at.wrapping_sub(d as u32).wrapping_sub(from_index);
            e.code.push(mov32(base, v));
            return;
        }
        let (base, index) = r.pick(&BASES16);
        if base == R::BP && index == R::None && size == 0 {
            i.set_memory_displ_size(1);
        }
        i.set_memory_base(base);
        let full = |r: R| R::EAX + r.number() as u32;
        let mut v = at.wrapping_sub(d as u32);
        if index != R::None {
            let part = r.next() as u16;
            i.set_memory_index(index);
            e.code.push(mov32(full(index), u32::from(part) | junk));
            v = v.wrapping_sub(part.into());
        }
        e.code.push(mov32(full(base), v & 0xffff | junk));
    }

    fn any(&mut self) -> Element {
        for _ in 0..20 {
            let code = if self.r.one_in(8) {
                self.r.pick(&self.forms.fp)
            } else {
                self.r.pick(&self.forms.integer)
            };
            if let Some(e) = self.form(code) {
                return e;
            }
        }
        Element::default()
    }

    fn form(&mut self, code: Code) -> Option<Element> {
        let mut operands = Operands {
            r: &mut self.r,
            gpr: &mut [0; 16],
            mode: Oracle::Bits32,
            block: false,
            narrow: false,
            target: None,
            vector_index: None,
        };
        let mut i = operands.fill(code)?;
        if i.is_string_instruction() || i.is_stack_instruction() {
            return None;
        }
        if !self.forms.exact
            && (crate::undefined::is_model_specific(&i)
                || crate::setup::result_depends_on_processor(&i))
        {
            return None;
        }
        prefixes(&mut i, &mut self.r);
        let mut e = Element::default();
        if matches!(i.mnemonic(), M::Div | M::Idiv) {
            e.code.push(mov32(R::EDX, 0));
            e.code.push(mov32(R::EAX, self.r.below(128) as u32));
        }
        if (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory) {
            if i.mnemonic() == M::Xlatb {
                return None;
            }
            let size = i.memory_size().size() as u64;
            self.aim(&mut e, &mut i, size);
        }
        let is_stack = (0..i.op_count()).any(|n| {
            i.op_kind(n) == OpKind::Register && i.op_register(n).full_register() == R::RSP
        });
        e.code.push(i);
        if is_stack {
            e.code.push(mov32(R::ESP, 0x900));
        }
        Some(e)
    }
}
