//! [`Case`]: a block of code with its start state, made from a seed.

use core::fmt::Write as _;

use iced_x86::{
    Code, Decoder, DecoderOptions, Encoder, FastFormatter, FlowControl, Instruction, Mnemonic,
    OpKind, Register,
};
use x86_defs::{reg, rflags};
use x86_native::oracle::{CODE, Mode, Registers, WINDOW, WINDOW_SIZE};

use crate::{
    Random, Strictness,
    model::is_modelled,
    operands::{Operands, POINTERS, interior},
    setup, state,
    undefined::Undefined,
};

/// Address of most blocks.
const BLOCK: u64 = CODE + 0x400;
/// Maximum number of instructions of a block.
const MAX_BLOCK: u64 = 8;

/// Bytes that a case has in its window in place of the usual ones.
#[derive(Clone, Debug)]
pub(crate) struct Patch {
    pub(crate) offset: usize,
    pub(crate) bytes: Vec<u8>,
}

/// Code with its start state.
#[derive(Clone, Debug)]
pub struct Case {
    /// The seed that the case was made from.
    pub seed: u64,
    /// Width of the code.
    pub mode: Mode,
    /// The code's bytes, which are placed at `start.rip`.
    pub bytes: Vec<u8>,
    /// Registers before the block.
    pub(crate) start: Registers,
    pub(crate) patches: Vec<Patch>,
    /// True if the interpreter executes single steps.
    pub(crate) stepped: bool,
    /// The flags that are undefined, and so differ between processors.
    pub(crate) undefined: Undefined,
}

impl Case {
    /// Returns the address behind the block.
    pub(crate) fn end(&self) -> u64 {
        self.start.rip + self.bytes.len() as u64
    }

    /// Returns the width of the code in bits.
    pub(crate) fn bits(&self) -> u32 {
        bits(self.mode)
    }

    /// Returns the instructions, one a line.
    pub fn listing(&self) -> String {
        let options = decoder_options();
        let mut d = Decoder::with_ip(bits(self.mode), &self.bytes, self.start.rip, options);
        let mut formatter = FastFormatter::new();
        let mut text = String::new();
        while d.can_decode() {
            let i = d.decode();
            let _ = write!(text, "{:x} ", i.ip());
            formatter.format(&i, &mut text);
            let _ = writeln!(text, "  [{:?}]", i.code());
        }
        text
    }

    /// Stores bytes to the window, as far as they are in it.
    pub(crate) fn patch(&mut self, at: u64, bytes: &[u8]) {
        let offset = at.wrapping_sub(WINDOW);
        if let Some(room) = (WINDOW_SIZE as u64).checked_sub(offset) {
            let len = bytes.len().min(room as usize);
            self.patches.push(Patch {
                offset: offset as usize,
                bytes: bytes[..len].to_vec(),
            });
        }
    }
}

/// Returns the decoder's options: AMD processors honour an operand-size prefix on near branches.
fn decoder_options() -> u32 {
    if state::host_is_amd() {
        DecoderOptions::AMD
    } else {
        DecoderOptions::NONE
    }
}

/// Returns the decoder's bitness for a mode.
fn bits(mode: Mode) -> u32 {
    match mode {
        Mode::Bits64 => 64,
        Mode::Bits32 => 32,
    }
}

/// Makes cases.
pub struct Generator {
    mode: Mode,
    encoder: Encoder,
    strictness: Strictness,
}

impl core::fmt::Debug for Generator {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Generator").finish_non_exhaustive()
    }
}

impl Generator {
    /// Makes a generator whose cases are compared as `strictness` says.
    pub fn new(mode: Mode, strictness: Strictness) -> Self {
        Self {
            mode,
            encoder: Encoder::new(bits(mode)),
            strictness,
        }
    }

    /// Returns true if the form can be encoded with operands from this seed, and is decoded as itself.
    pub(crate) fn is_encodable(&mut self, code: Code, seed: u64) -> bool {
        let mut r = Random::new(seed);
        let mut gpr = [0; 16];
        let Some(i) = operands(&mut r, &mut gpr, self.mode, false).fill(code) else {
            return false;
        };
        let Ok(_) = self.encoder.encode(&i, BLOCK) else {
            return false;
        };
        let bytes = self.encoder.take_buffer();
        let decoded = Decoder::with_ip(bits(self.mode), &bytes, BLOCK, decoder_options()).decode();
        decoded.code() == code && decoded.len() == bytes.len()
    }

    /// Makes a case of one instruction of a form. A branch is followed by an instruction that shows whether it was
    /// taken.
    pub fn single(&mut self, code: Code, seed: u64) -> Option<Case> {
        let mut r = Random::new(seed);
        let mut case = self.blank(seed, &mut r, uses_vectors(code));
        let mut o = operands(&mut r, &mut case.start.gpr, self.mode, false);
        let mut i = o.fill(code)?;
        let (target, index) = (o.target, o.vector_index);
        prefixes(&mut i, &mut r);
        setup::adjust(&mut case, &mut i, target, index, &mut r)?;
        case.undefined.add(&i, Some(&case.start.gpr));
        if self.strictness == Strictness::Manual && setup::result_is_undefined(&i, &case.start.gpr)
        {
            return None;
        }
        let mut list = vec![i];
        if i.flow_control() != FlowControl::Next {
            // LEA changes no flags.
            let (code, register) = match self.mode {
                Mode::Bits64 => (Code::Lea_r64_m, Register::R9),
                Mode::Bits32 => (Code::Lea_r32_m, Register::EBP),
            };
            let mut marker = Instruction::default();
            marker.set_code(code);
            marker.set_op0_register(register);
            marker.set_op1_kind(OpKind::Memory);
            marker.set_memory_base(register);
            marker.set_memory_displ_size(1);
            marker.set_memory_displacement64(1);
            list.push(marker);
        }
        self.encode(&mut case, &mut list, &mut r, None)
            .then_some(case)
    }

    /// Makes a case of two to eight instructions of these forms, with jumps inside the block.
    pub fn block(&mut self, forms: &[Code], seed: u64) -> Option<Case> {
        let mut r = Random::new(seed);
        let mut case = self.blank(seed, &mut r, false);
        for pointer in POINTERS {
            case.start.gpr[pointer.number()] = interior(&mut r);
        }
        case.start.gpr[reg::RSP] = interior(&mut r) & !7;
        let wanted = 2 + r.below(MAX_BLOCK - 1) as usize;
        let mut list: Vec<Instruction> = Vec::with_capacity(MAX_BLOCK as usize + 2);
        let mut targets: Vec<Option<usize>> = Vec::with_capacity(MAX_BLOCK as usize + 2);
        // The last instruction that a branch may skip.
        let mut skipped = 0;
        for _ in 0..wanted * 4 {
            if list.len() >= wanted {
                break;
            }
            let code = r.pick(forms);
            let Some(i) = operands(&mut r, &mut case.start.gpr, self.mode, true).fill(code) else {
                continue;
            };
            if !setup::is_safe_in_block(&i, &mut r) {
                continue;
            }
            let mut i = i;
            prefixes(&mut i, &mut r);
            if self.strictness == Strictness::Manual
                && (setup::result_depends_on_processor(&i) || case.undefined.is_read_by(&i))
            {
                continue;
            }
            if let Some(before) = setup::prelude(&i, self.mode, &mut r) {
                // No branch leads to between the two.
                let at = list.len();
                for t in targets.iter_mut().flatten() {
                    *t += usize::from(*t > at);
                }
                skipped += usize::from(skipped > at);
                list.push(before);
                targets.push(None);
                case.undefined.add(&before, None);
            }
            let is_branch = i.flow_control() != FlowControl::Next;
            let target = is_branch.then(|| list.len() + 1 + r.below(3) as usize);
            if let Some(t) = target {
                skipped = skipped.max(t);
            }
            if list.len() >= skipped {
                case.undefined.defines(&i);
            }
            case.undefined.add(&i, None);
            list.push(i);
            targets.push(target);
        }
        if list.is_empty() {
            return None;
        }
        if list.iter().any(|i| uses_vectors(i.code())) {
            state::fill(&mut case.start.area, &mut r);
            for i in &list {
                setup::mask_underflow(&mut case, i);
            }
        }
        self.encode(&mut case, &mut list, &mut r, Some(&targets))
            .then_some(case)
    }

    /// Makes a case without code.
    fn blank(&self, seed: u64, r: &mut Random, vectors: bool) -> Case {
        let mut start = state::registers(r, self.mode, vectors);
        start.rip = if r.one_in(16) {
            CODE + 0x1000 - r.below(16)
        } else {
            BLOCK
        };
        Case {
            seed,
            mode: self.mode,
            bytes: Vec::new(),
            start,
            patches: Vec::new(),
            stepped: r.one_in(8),
            undefined: Undefined::new(self.strictness),
        }
    }

    /// Encodes the list at the case's address. A near branch goes to the instruction that `targets` names or, without
    /// one, to the block's end.
    fn encode(
        &mut self,
        case: &mut Case,
        list: &mut [Instruction],
        r: &mut Random,
        targets: Option<&[Option<usize>]>,
    ) -> bool {
        let branches = list.iter().any(|i| near_branch(i).is_some());
        let mut at = [0u64; MAX_BLOCK as usize * 2 + 4];
        if branches {
            // Lengths do not depend on targets, as short and near branches are different forms.
            let mut ip = case.start.rip;
            for (n, i) in list.iter_mut().enumerate() {
                if near_branch(i).is_some() {
                    set_branch(i, ip);
                }
                let Ok(len) = self.encoder.encode(i, ip) else {
                    drop(self.encoder.take_buffer());
                    return false;
                };
                ip += len as u64;
                at[n + 1] = ip;
            }
            at[0] = case.start.rip;
            drop(self.encoder.take_buffer());
            let end = list.len();
            for (n, i) in list.iter_mut().enumerate() {
                if near_branch(i).is_some() {
                    let wanted = targets.and_then(|t| t.get(n).copied().flatten());
                    set_branch(i, at[wanted.unwrap_or(end).min(end)]);
                }
            }
        }
        let mut ip = case.start.rip;
        for i in list.iter_mut() {
            let Ok(len) = self.encoder.encode(i, ip) else {
                drop(self.encoder.take_buffer());
                return false;
            };
            ip += len as u64;
        }
        case.bytes = self.encoder.take_buffer();
        if targets.is_none() && list.len() > 1 {
            setup::aim(case, &list[0], r);
        }
        let foreign = self.strictness == Strictness::Manual && !is_modelled();
        if foreign && list.iter().any(|i| uses_vectors(i.code())) {
            case.start.rflags &= !rflags::AC;
        }
        if self.mode == Mode::Bits32 {
            for v in &mut case.start.gpr {
                *v &= 0xffff_ffff;
            }
        }
        true
    }
}

fn operands<'a>(
    r: &'a mut Random,
    gpr: &'a mut [u64; 16],
    mode: Mode,
    block: bool,
) -> Operands<'a> {
    Operands {
        r,
        gpr,
        mode,
        block,
        narrow: false,
        target: None,
        vector_index: None,
    }
}

fn uses_vectors(code: Code) -> bool {
    code.cpuid_features().iter().any(|&f| x86_native::is_fp(f))
}

fn near_branch(i: &Instruction) -> Option<OpKind> {
    let kind = i.op0_kind();
    let near = matches!(
        kind,
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
    );
    (i.op_count() == 1 && near).then_some(kind)
}

fn set_branch(i: &mut Instruction, to: u64) {
    match i.op0_kind() {
        OpKind::NearBranch16 => i.set_near_branch16(to as u16),
        OpKind::NearBranch32 => i.set_near_branch32(to as u32),
        _ => i.set_near_branch64(to),
    }
}

/// Adds LOCK where it is allowed, and repeat prefixes to string instructions.
pub(crate) fn prefixes(i: &mut Instruction, r: &mut Random) {
    let op = i.op_code();
    let memory = i.op_count() > 0 && i.op0_kind() == OpKind::Memory;
    if op.can_use_lock_prefix() && memory && r.one_in(3) {
        i.set_has_lock_prefix(true);
    }
    if i.is_string_instruction() {
        match r.below(3) {
            0 => i.set_has_rep_prefix(true),
            1 if matches!(
                i.mnemonic(),
                Mnemonic::Cmpsb
                    | Mnemonic::Cmpsw
                    | Mnemonic::Cmpsd
                    | Mnemonic::Cmpsq
                    | Mnemonic::Scasb
                    | Mnemonic::Scasw
                    | Mnemonic::Scasd
                    | Mnemonic::Scasq
            ) =>
            {
                i.set_has_repne_prefix(true);
            }
            _ => {}
        }
    }
}
