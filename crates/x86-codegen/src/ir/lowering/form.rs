//! [`Form`]: what the translator has to know of an instruction's form, whatever its operands. It is looked up once per
//! form, as asking the decoder's library again and again would be most of what a translation costs.

use iced_x86::{
    Code, ConditionCode, EncodingKind, Instruction, InstructionInfoFactory, InstructionInfoOptions,
    MandatoryPrefix, Mnemonic, OpAccess, OpCodeOperandKind as K, OpKind, Register,
};
use x86_cpu::{Feature, Features};
use x86_interp::gating;
use x86_native::HostFeatures;

use super::{Lowering, form, in_mode, in_segments};
use crate::{
    ir::cause::Cause,
    ir::flags::{self, ALL, is_shift},
    ir::mode::Mode,
};

/// Facts of a form.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// The form's lowering. [`Lowering::Unknown`]: the form has not been classified yet.
    pub(crate) kind: Lowering,
    /// The form's lowering in code with segments.
    pub(crate) in_segments: Lowering,
    /// The guest's CPUID promises the instruction.
    pub(crate) available: bool,
    /// Size of the memory operand in bytes; 0 if there is none, or it has more than 255.
    pub(crate) size: u8,
    /// Bit per operand that may be written.
    pub(crate) writes: u8,
    /// Bit per operand that is written and not read.
    pub(crate) replaces: u8,
    /// Bit per general register that may be written without being an operand.
    pub(crate) implied: u16,
    /// Arithmetic flags that may be read, and that are always set; `None` if that depends on operands.
    flags: Option<(u16, u16)>,
    /// The instruction may change arithmetic flags.
    pub(crate) changes_flags: bool,
    /// The instruction may read or change arithmetic flags.
    pub(crate) touches_flags: bool,
    /// Why the instruction is left to the interpreter, if it is.
    pub cause: Cause,
    /// The lowering may depend on operands: [`super::of`] has to be called.
    pub(crate) checked: bool,
    /// Mode bits that the lowering needs: [`super::in_mode::needs`].
    pub(crate) needs: Mode,
    /// WAIT.
    pub(crate) waits: bool,
    /// The instruction locks its access without a prefix.
    pub(crate) locks: bool,
    /// Number of the operand that may be a memory operand, or [`NO_OPERAND`].
    memory: u8,
    /// Bit per operand that may be a general register.
    pub(crate) general: u8,
    /// What the instruction does to a register, as far as addresses are concerned.
    pub(crate) effect: Effect,
    /// Number of the operand in ModRM.rm, if a register there may as well be accessed where it lives in memory.
    rm: Option<u8>,
    /// Where operands are encoded, if `crate::codegen::recode` can re-encode the form.
    pub(crate) shape: Option<Shape>,
}

/// What an instruction does to its first operand, if that is a general register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// ADD.
    Add,
    /// SUB.
    Sub,
    /// INC.
    Inc,
    /// DEC.
    Dec,
    /// MOV.
    Mov,
    /// XOR.
    Xor,
    /// LEA.
    Lea,
    /// The operand stays.
    Compare,
    /// Anything else.
    Other,
}

/// How a legacy or VEX encoding names its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The encoding has a ModR/M byte.
    pub(crate) modrm: bool,
    /// ModRM.reg is a general register.
    pub(crate) reg: bool,
    /// ModRM.rm, if not memory, is a general register.
    pub(crate) rm: bool,
    /// The opcode's low bits are a general register.
    pub(crate) opcode: bool,
    /// F2 or F3, if the prefix belongs to the opcode.
    pub(crate) prefix: Option<u8>,
}

const UNKNOWN: Form = Form {
    kind: Lowering::Unknown,
    in_segments: Lowering::Interpret,
    available: false,
    size: 0,
    writes: 0,
    replaces: 0,
    implied: 0,
    flags: None,
    changes_flags: false,
    touches_flags: false,
    cause: Cause::Other,
    checked: false,
    needs: Mode::NONE,
    waits: false,
    locks: false,
    memory: NO_OPERAND,
    general: 0,
    effect: Effect::Other,
    rm: None,
    shape: None,
};

/// The number of no memory operand: instructions have at most five operands, and the fifth is an immediate.
const NO_OPERAND: u8 = 4;

impl Form {
    /// Returns the arithmetic flags that an instruction of the form may read, and those that it always sets.
    #[inline]
    pub(crate) fn flags(&self, i: &Instruction) -> (u16, u16) {
        self.flags.unwrap_or_else(|| flags(i))
    }

    /// Returns true if the access is locked. The host may stall or kill a process for a locked access that crosses a
    /// cache line, so the interpreter executes misaligned ones.
    #[inline]
    pub(crate) fn is_locked(&self, i: &Instruction) -> bool {
        self.locks || i.has_lock_prefix()
    }

    /// Returns the general register that may be accessed where it lives in memory, and whether it is read. A write of
    /// 32 bits is none of these, as it changes 64 of a register.
    #[inline]
    pub(crate) fn in_memory(&self, i: &Instruction) -> Option<(u8, bool)> {
        let n = self.rm?;
        let r = i.op_register(n.into());
        let (bit, only) = (1 << n, i.op_kind(n.into()) == OpKind::Register);
        let alone = (0..i.op_count())
            .all(|m| m == n.into() || i.op_register(m).full_register() != r.full_register());
        (only && alone && (self.writes & bit == 0 || r.size() != 4))
            .then(|| (r.full_register().number() as u8, self.replaces & bit == 0))
    }

    /// Returns whether the memory operand needs permission to write; `None` if there is no memory operand.
    #[inline]
    pub(crate) fn memory(&self, i: &Instruction) -> Option<bool> {
        let n = self.memory;
        (i.op_kind(n.into()) == OpKind::Memory).then_some(self.writes & 1 << n != 0)
    }
}

/// Forms by code.
pub struct Forms {
    /// Empty before the first form is learned.
    forms: Vec<Form>,
    /// The host's features.
    host: HostFeatures,
    /// The features that the guest's CPUID promises.
    features: Features,
    info: InstructionInfoFactory,
}

impl core::fmt::Debug for Forms {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Forms").finish_non_exhaustive()
    }
}

impl Forms {
    /// Makes an empty table for translation to code of this host.
    pub fn new(host: HostFeatures) -> Self {
        Self {
            host,
            forms: Vec::new(),
            features: Features::default(),
            info: InstructionInfoFactory::new(),
        }
    }

    /// Has [`Self::learn`] find forms for a guest with these features from now on.
    pub(crate) fn select(&mut self, features: &Features) {
        if self.features != *features {
            self.features = *features;
            self.forms.fill(UNKNOWN);
        }
    }

    /// Returns the facts of the instruction's form, which is classified if it has not been.
    #[inline]
    pub(crate) fn learn(&mut self, i: &Instruction) -> &Form {
        let n = i.code() as usize;
        let known = self.forms.get(n);
        if known.is_none_or(|form| form.kind == Lowering::Unknown) {
            self.classify(i);
        }
        &self.forms[n]
    }

    #[cold]
    fn classify(&mut self, i: &Instruction) {
        self.forms.resize(Code::values().len(), UNKNOWN);
        self.forms[i.code() as usize] = classify(i, &self.host, &self.features, &mut self.info);
    }

    /// Returns the facts of a form that [`Self::learn`] has seen. Of others, such as that of no instruction, nothing is
    /// known.
    #[inline]
    pub fn of(&self, i: &Instruction) -> &Form {
        self.forms.get(i.code() as usize).unwrap_or(&UNKNOWN)
    }
}

fn flags(i: &Instruction) -> (u16, u16) {
    ((i.rflags_read() & ALL) as u16, flags::overwritten(i) as u16)
}

/// Returns true for an access that needs permission to write.
fn is_write(a: OpAccess) -> bool {
    !matches!(
        a,
        OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess | OpAccess::None
    )
}

fn classify(
    i: &Instruction,
    host: &HostFeatures,
    features: &Features,
    info: &mut InstructionInfoFactory,
) -> Form {
    // The sample's registers are none that instructions use implicitly, and all different: what equal operands do to
    // accesses (XOR of a register with itself) is no fact of the form.
    let mut sample = *i;
    for n in 0..i.op_count() {
        let r = i.op_register(n);
        if i.op_kind(n) == OpKind::Register && r.is_gpr() {
            sample.set_op_register(n, stand_in(r, n));
        }
    }
    if (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory) {
        sample.set_memory_base(Register::None);
        sample.set_memory_index(Register::None);
    }
    let used = info.info_options(&sample, InstructionInfoOptions::NO_MEMORY_USAGE);
    let changes_flags = is_shift(i.mnemonic()) || sample.rflags_modified() & ALL != 0;
    let op = i.code().op_code();
    let kinds = || (0..op.op_count()).map(|n| format!("{:?}", op.op_kind(n)));
    let general = |name: &str| {
        let mut letters = name.chars();
        letters.next() == Some('r') && letters.next().is_some_and(|c| c.is_ascii_digit())
            || matches!(name, "al" | "cl" | "ax" | "dx" | "eax" | "rax")
    };
    let kind = match form(i, host) {
        Lowering::PushSegment if op.mode64() || features.has(Feature::Amd) => Lowering::PushSegment,
        Lowering::PushSegment => Lowering::PushSelector,
        Lowering::RestoreState if !features.has(Feature::Xsavec) => Lowering::RestoreStandard,
        kind => kind,
    };
    let mut form = Form {
        kind,
        in_segments: in_segments::form(kind, i.code()),
        available: gating::is_available(i, features),
        size: u8::try_from(i.memory_size().size()).unwrap_or(0),
        flags: (!is_shift(i.mnemonic())).then(|| flags(&sample)),
        changes_flags,
        touches_flags: changes_flags || sample.rflags_read() & ALL != 0,
        cause: Cause::of(i.code()),
        checked: super::is_checked(kind, i, kinds),
        needs: in_mode::needs(kind, i.code()),
        waits: i.mnemonic() == Mnemonic::Wait,
        locks: i.mnemonic() == Mnemonic::Xchg,
        memory: kinds()
            .position(|name| name.contains("mem"))
            .map_or(NO_OPERAND, |n| n as u8),
        general: kinds()
            .enumerate()
            .filter(|(_, name)| general(name))
            .fold(0, |bits, (n, _)| bits | 1 << n),
        effect: effect(i.mnemonic()),
        rm: rm(i.code()),
        shape: shape(i.code()),
        ..UNKNOWN
    };
    for n in 0..i.op_count() {
        let access = used.op_access(n);
        if is_write(access) {
            form.writes |= 1 << n;
            if access == OpAccess::Write {
                form.replaces |= 1 << n;
            }
        }
    }
    for r in used.used_registers() {
        let full = r.register().full_register();
        let is_operand = (0..i.op_count()).any(|n| full == stand_in(Register::RAX, n));
        if full.is_gpr() && is_write(r.access()) && !is_operand {
            form.implied |= 1 << full.number();
        }
    }
    form
}

/// Returns R15 for the first operand, R14 for the next, and so on, of the size of `r`.
fn stand_in(r: Register, n: u32) -> Register {
    let first = match r.size() {
        1 => Register::R15L,
        2 => Register::R15W,
        4 => Register::R15D,
        _ => Register::R15,
    };
    first - n
}

fn effect(m: Mnemonic) -> Effect {
    use Mnemonic as M;
    match m {
        M::Add => Effect::Add,
        M::Sub => Effect::Sub,
        M::Inc => Effect::Inc,
        M::Dec => Effect::Dec,
        M::Mov => Effect::Mov,
        M::Xor => Effect::Xor,
        M::Lea => Effect::Lea,
        M::Cmp | M::Test => Effect::Compare,
        _ => Effect::Other,
    }
}

/// Returns the number of the operand that ModRM.rm names, if a memory operand has the same effect as a register except
/// for the upper half of what is written. (Bit strings, PEXTRB, MOVD to a register and others are different.)
fn rm(code: Code) -> Option<u8> {
    use Mnemonic as M;
    let plain = matches!(
        code.mnemonic(),
        M::Mov
            | M::Movzx
            | M::Movsx
            | M::Movsxd
            | M::Imul
            | M::Mul
            | M::Cvtsi2sd
            | M::Cvtsi2ss
            | M::Add
            | M::Sub
            | M::Adc
            | M::Sbb
            | M::And
            | M::Or
            | M::Xor
            | M::Cmp
            | M::Test
            | M::Inc
            | M::Dec
            | M::Neg
            | M::Not
            | M::Shl
            | M::Shr
            | M::Sar
            | M::Popcnt
            | M::Tzcnt
            | M::Lzcnt
            | M::Bsf
            | M::Bsr
    );
    let op = code.op_code();
    let is_rm = |n: &u32| {
        matches!(
            op.op_kind(*n),
            K::r8_or_mem | K::r16_or_mem | K::r32_or_mem | K::r64_or_mem
        )
    };
    // CMOVcc and SETcc.
    let plain = plain || code.condition_code() != ConditionCode::None;
    let n = (0..op.op_count()).find(is_rm).filter(|_| plain)?;
    Some(n as u8)
}

fn shape(code: Code) -> Option<Shape> {
    let op = code.op_code();
    if !matches!(op.encoding(), EncodingKind::Legacy | EncodingKind::VEX) {
        return None;
    }
    let mut shape = Shape {
        modrm: op.group_index() >= 0,
        reg: false,
        rm: false,
        opcode: false,
        prefix: match op.mandatory_prefix() {
            MandatoryPrefix::PF2 => Some(0xf2),
            MandatoryPrefix::PF3 => Some(0xf3),
            _ => None,
        },
    };
    for n in 0..op.op_count() {
        match op.op_kind(n) {
            K::r8_reg | K::r16_reg | K::r32_reg | K::r64_reg => {
                (shape.modrm, shape.reg) = (true, true);
            }
            K::r8_or_mem
            | K::r16_or_mem
            | K::r32_or_mem
            | K::r64_or_mem
            | K::r16_rm
            | K::r32_rm
            | K::r64_rm => (shape.modrm, shape.rm) = (true, true),
            K::r8_opcode | K::r16_opcode | K::r32_opcode | K::r64_opcode => shape.opcode = true,
            K::mem
            | K::mm_reg
            | K::mm_rm
            | K::mm_or_mem
            | K::xmm_reg
            | K::xmm_rm
            | K::xmm_or_mem
            | K::ymm_reg
            | K::ymm_rm
            | K::ymm_or_mem => shape.modrm = true,
            K::xmm_vvvv | K::ymm_vvvv | K::xmm_is4 | K::ymm_is4 => {}
            K::al | K::ax | K::eax | K::rax | K::cl | K::st0 | K::sti_opcode => {}
            K::imm4_m2z
            | K::imm8
            | K::imm8_const_1
            | K::imm8sex16
            | K::imm8sex32
            | K::imm8sex64
            | K::imm16
            | K::imm32
            | K::imm32sex64
            | K::imm64 => {}
            _ => return None,
        }
    }
    // In x87 forms without memory, the byte after the opcode names no operand that matters.
    Some(shape)
}
