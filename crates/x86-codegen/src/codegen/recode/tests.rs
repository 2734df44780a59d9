//! Compares re-encoding with the encoder of the decoder's library, for whatever random bytes decode to.

use iced_x86::{Decoder, DecoderOptions, Encoder, EncodingKind, OpKind, Register};
use x86_native::HostFeatures;

use super::{Rm, recode};
use crate::{
    asm::{self, RSP, WINDOW},
    codegen::copy::{HOST, register, rewritten},
    frame::words::{S0, TLB, host_reg},
    ir::lowering::{self, Forms, Lowering},
    ir::narrow,
};

#[test]
fn means_what_the_encoder_makes() {
    let mut forms = Forms::new(HostFeatures::detected());
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let (mut seen, mut known, mut memory_known, mut vex_known) = (0, 0, 0, 0);
    let mut in_memory = 0;
    for _ in 0..3_000_000 {
        let mut bytes = [0; 16];
        bytes[..15].fill_with(|| next() as u8);
        // Prefixes and escapes come in their places more often than by chance.
        let mut at = 0;
        for prefix in [0xf0, 0x66, 0xf2, 0xf3, 0x65, 0x67] {
            if next() % 8 == 0 {
                bytes[at] = prefix;
                at += 1;
            }
        }
        match next() % 8 {
            0..=3 => {
                bytes[at] = 0x40 | next() as u8 & 15;
                at += 1;
            }
            4 => {
                bytes[at] = 0xc4 | next() as u8 & 1;
                bytes[at + 1] = bytes[at + 1] & 0xe0 | [1, 2, 3][next() as usize % 3];
                at = 9;
            }
            _ => {}
        }
        if next() % 2 == 0 && at < 8 {
            bytes[at] = 0x0f;
            if next() % 4 == 0 {
                bytes[at + 1] = 0x38 | next() as u8 & 2;
            }
        }
        // Encodings that only 32-bit code has never come here.
        let long = next() % 4 != 0;
        if !long && !narrow::is_encoded_alike(&bytes) {
            continue;
        }
        let bits = if long { 64 } else { 32 };
        let mut i = Decoder::new(bits, &bytes[..15], DecoderOptions::NONE).decode();
        if i.is_invalid() {
            continue;
        }
        if !long {
            narrow::lift(&mut i);
        }
        let form = *forms.learn(&i);
        let kind = lowering::of(form.kind, &i, long);
        if !matches!(
            kind,
            Lowering::Copy | Lowering::CopyFp | Lowering::CopyAligned | Lowering::CopyFpAligned
        ) {
            continue;
        }
        let Some(shape) = form.shape else { continue };
        let (mut map, mut high, mut free) = (HOST, false, vec![14, 13]);
        let memory = form.memory(&i).is_some();
        if memory {
            free.remove(0);
        }
        for n in (0..i.op_count()).filter(|n| i.op_kind(*n) == OpKind::Register) {
            let r = i.op_register(n);
            high |= matches!(r, Register::AH | Register::BH | Register::CH | Register::DH);
            let number = r.full_register().number();
            if r.is_gpr() && host_reg(number as u8).is_none() {
                map[number] = free.pop().unwrap_or(10);
            }
        }
        let disp = [0, 8, -8, 127, 128, -129, 4096][next() as usize % 7];
        let mut operand = asm::at(S0, disp);
        if next() % 2 == 0 {
            operand.base = Some(next() as u8 % 16);
            if next() % 2 == 0 {
                operand.index = Some((next() as u8 % 16, next() as u8 % 4));
                // RSP is none.
                operand.index = operand.index.filter(|(r, _)| *r != RSP);
            }
        }
        let operand = memory.then_some(operand);
        let mut encoder = Encoder::new(64);
        let mut wanted_form = rewritten(&i, &map, operand);
        let mut rm = operand.map_or(Rm::Register, |m| match m {
            _ if m == asm::at(S0, disp) => Rm::Host(disp),
            m => Rm::At(m),
        });
        if let Some((number, _)) = form.in_memory(&i)
            && host_reg(number).is_none()
            && !high
        {
            rm = Rm::Slot(-100);
            in_memory += 1;
            let n = (0..i.op_count()).find(|n| {
                let r = i.op_register(*n);
                r.is_gpr() && r.full_register().number() == usize::from(number)
            });
            wanted_form.set_op_kind(n.unwrap(), OpKind::Memory);
            wanted_form.set_memory_base(register(TLB, 8));
            wanted_form.set_memory_index(Register::None);
            wanted_form.set_memory_displacement64(-100_i64 as u64);
            wanted_form.set_memory_displ_size(1);
        }
        let wanted = encoder.encode(&wanted_form, 0);
        let Some(made) = recode((&bytes, i.len()), shape, &map, rm, high) else {
            seen += 1;
            continue;
        };
        let mut window = [0; WINDOW];
        let len = made.write(&mut window);
        let made = &window[..len];
        wanted.unwrap_or_else(|e| panic!("{bytes:x?} {i:?}: {made:x?}, not {e}"));
        let wanted = encoder.take_buffer();
        let of = |bytes: &[u8]| {
            let mut decoder = Decoder::new(64, bytes, DecoderOptions::NONE);
            let i = decoder.decode();
            (i, i.len() == bytes.len())
        };
        assert_eq!(
            of(made),
            of(&wanted),
            "{bytes:x?} {i:?}: {made:x?} {wanted:x?}"
        );
        assert!(of(made).1, "{bytes:x?}: {made:x?}");
        seen += 1;
        known += 1;
        memory_known += u32::from(memory);
        vex_known += u32::from(i.code().encoding() == EncodingKind::VEX);
    }
    assert!(
        known > 100_000 && known > seen * 8 / 10,
        "{known} of {seen}"
    );
    assert!(
        memory_known > 10_000 && vex_known > 1000 && in_memory > 10_000,
        "{memory_known} {vex_known}"
    );
}
