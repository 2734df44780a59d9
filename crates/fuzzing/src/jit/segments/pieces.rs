//! Elements that are not random forms: the stack, segment registers, pointers, strings.

use iced_x86::{Code, Instruction, Mnemonic as M, OpKind, Register as R};

use super::{
    generate::{Builder, Element, mov32, plain, with1},
    state::{DATA_SELECTORS, SegmentMode},
};
use crate::case::prefixes;

impl Builder<'_> {
    pub(super) fn stack(&mut self) -> Element {
        use Code as C;
        let n = self.r.below(8) as u32;
        let (r16, r32) = (R::AX + n, R::EAX + n);
        let i = match self.r.below(16) {
            0 | 1 => with1(C::Push_r16, r16),
            2 | 3 => with1(C::Push_r32, r32),
            4 | 5 => with1(C::Pop_r16, r16),
            6 | 7 => with1(C::Pop_r32, r32),
            8 => Instruction::with1(C::Pushw_imm8, self.r.next() as i8 as i32).unwrap_or_default(),
            9 => Instruction::with1(C::Push_imm16, self.r.next() as u16 as u32).unwrap_or_default(),
            10 => Instruction::with1(C::Pushd_imm32, self.r.next() as i32).unwrap_or_default(),
            11 => plain(self.r.pick(&[C::Pushfw, C::Pushfd])),
            12 if self.r.one_in(2) => {
                let code = self.r.pick(&[C::Enterw_imm16_imm8, C::Enterd_imm16_imm8]);
                let level = if self.r.one_in(8) { 2 } else { 0 };
                let locals = self.r.below(0x80) as u32;
                Instruction::with2(code, locals, level).unwrap_or_default()
            }
            12 => plain(self.r.pick(&[C::Leavew, C::Leaved])),
            13 => plain(self.r.pick(&[C::Pushaw, C::Popaw, C::Pushad, C::Popad])),
            14 => plain(self.r.pick(&[C::Popfw, C::Popfd])),
            _ => mov32(
                R::ESP,
                (self
                    .r
                    .pick(&[0u64, 1, 2, 3, 0xffff, 0xfffe, 0x1000, 0x1001, 0x800])
                    as u32)
                    | if self.r.one_in(4) { 0x1_0000 } else { 0 },
            ),
        };
        let mut e = self.one(i);
        if matches!(i.mnemonic(), M::Popf | M::Popfd) {
            // Only flags that may be set are set.
            let flags = (self.r.next() & 0xcd5) as u32 | if self.r.one_in(2) { 0x200 } else { 0 };
            let word = if i.mnemonic() == M::Popf {
                C::Push_imm16
            } else {
                C::Pushd_imm32
            };
            let push = match word {
                C::Push_imm16 => Instruction::with1(word, flags),
                _ => Instruction::with1(word, flags as i32),
            };
            e.code.insert(0, push.unwrap_or_default());
        }
        if i.mnemonic() == M::Leave {
            e.code
                .insert(0, mov32(R::EBP, 0x800 + self.r.below(0x100) as u32));
        }
        e
    }

    /// Returns MOV, PUSH or POP of a segment register.
    pub(super) fn segment(&mut self) -> Element {
        use Code as C;
        let s = self
            .r
            .pick(&[R::ES, R::DS, R::FS, R::GS, R::ES, R::DS, R::SS]);
        let mut e = Element::default();
        let selector = match self.kind {
            SegmentMode::Real | SegmentMode::V86 => 0x800 + self.r.below(0x2800) as u32,
            _ => self.r.pick(&DATA_SELECTORS).into(),
        };
        let push = |s| match s {
            R::ES => C::Pushw_ES,
            R::DS => C::Pushw_DS,
            R::FS => C::Pushw_FS,
            R::GS => C::Pushw_GS,
            _ => C::Pushw_SS,
        };
        let pop = |s| match s {
            R::ES => C::Popw_ES,
            R::DS => C::Popw_DS,
            R::FS => C::Popw_FS,
            R::GS => C::Popw_GS,
            _ => C::Popw_SS,
        };
        match self.r.below(5) {
            0 => {
                e.code.push(with1(push(s), s));
                e.code.push(with1(C::Pop_r16, R::AX));
            }
            1 => {
                e.code
                    .push(Instruction::with1(C::Push_imm16, selector).unwrap_or_default());
                e.code.push(with1(pop(s), s));
            }
            2 => {
                let n = self.r.below(8) as u32;
                e.code.push(
                    Instruction::with2(C::Mov_r32m16_Sreg, R::EAX + n, s).unwrap_or_default(),
                );
                if n == 4 {
                    e.code.push(mov32(R::ESP, 0x900));
                }
            }
            _ => {
                let n = self.r.pick(&[0, 1, 2, 3, 5, 6, 7]);
                e.code.push(mov32(R::EAX + n, selector));
                e.code
                    .push(Instruction::with2(C::Mov_Sreg_rm16, s, R::AX + n).unwrap_or_default());
            }
        }
        e
    }

    /// Returns LDS, or another of its kind.
    pub(super) fn pointer(&mut self) -> Element {
        let mut i = plain(self.r.pick(&[
            Code::Lds_r16_m1616,
            Code::Les_r16_m1616,
            Code::Les_r32_m1632,
            Code::Lfs_r16_m1616,
            Code::Lgs_r16_m1616,
            Code::Lss_r16_m1616,
            Code::Lds_r32_m1632,
            Code::Xlat_m8,
        ]));
        let mut e = Element::default();
        if i.code() == Code::Xlat_m8 {
            let base = self.r.pick(&[R::BX, R::EBX]);
            i.set_memory_base(base);
            i.set_memory_index(R::AL);
            i.set_memory_index_scale(1);
            i.set_op0_kind(OpKind::Memory);
            let at = self.offset(256);
            e.code.push(mov32(R::EBX, at));
            e.code.push(i);
            return e;
        }
        let n = self.r.pick(&[0, 1, 2, 3, 5, 6, 7]);
        i.set_op0_register(if i.memory_size().size() == 6 {
            R::EAX + n
        } else {
            R::AX + n
        });
        i.set_op1_kind(OpKind::Memory);
        self.aim(&mut e, &mut i, 6);
        e.code.push(i);
        if i.mnemonic() == M::Lss {
            e.code.push(mov32(R::ESP, 0x900));
        }
        e
    }

    pub(super) fn string(&mut self) -> Element {
        use Code as C;
        let code = self.r.pick(&[
            C::Movsb_m8_m8,
            C::Movsw_m16_m16,
            C::Movsd_m32_m32,
            C::Stosb_m8_AL,
            C::Stosw_m16_AX,
            C::Stosd_m32_EAX,
            C::Lodsb_AL_m8,
            C::Lodsw_AX_m16,
            C::Scasb_AL_m8,
            C::Cmpsb_m8_m8,
            C::Cmpsw_m16_m16,
        ]);
        let wide = if self.bits == 32 {
            !self.r.one_in(4)
        } else {
            self.r.one_in(4)
        };
        let (si, di) = match wide {
            true => (OpKind::MemorySegESI, OpKind::MemoryESEDI),
            false => (OpKind::MemorySegSI, OpKind::MemoryESDI),
        };
        let mut i = plain(code);
        let kinds = match i.mnemonic() {
            M::Movsb | M::Movsw | M::Movsd => [di, si],
            M::Cmpsb | M::Cmpsw => [si, di],
            M::Stosb | M::Stosw | M::Stosd => [di, OpKind::Register],
            M::Scasb => [OpKind::Register, di],
            _ => [OpKind::Register, si],
        };
        for (n, kind) in kinds.into_iter().enumerate() {
            i.set_op_kind(n as u32, kind);
            if kind == OpKind::Register {
                let r = match code {
                    C::Stosb_m8_AL | C::Lodsb_AL_m8 | C::Scasb_AL_m8 => R::AL,
                    C::Stosd_m32_EAX => R::EAX,
                    _ => R::AX,
                };
                i.set_op_register(n as u32, r);
            }
        }
        if kinds.contains(&si) && self.r.one_in(4) {
            i.set_segment_prefix(self.r.pick(&[R::ES, R::CS, R::SS, R::DS, R::FS]));
        }
        prefixes(&mut i, &mut self.r);
        let mut e = Element::default();
        for r in [R::ESI, R::EDI] {
            let at = self.offset(64);
            e.code.push(mov32(r, at));
        }
        e.code.push(mov32(R::ECX, self.r.below(24) as u32));
        e.code.push(i);
        e
    }
}
