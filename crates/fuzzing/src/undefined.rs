//! The table of what the manual leaves undefined, by name and section.
//!
//! The interpreter does what Zen 3 processors do (or, if CPUID shows one, what a Zen 4 or a processor of Intel does).
//! Other hosts may differ from it in these places and in no others. `docs/undefined.md` is this table.

use iced_x86::{Instruction, Mnemonic as M, OpKind};
use x86_defs::{reg, rflags};
use x86_native::decoded_flags;

use crate::model::is_modelled;

/// How a case is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// Undefined flags are not compared, and no later instruction reads them.
    Manual,
    /// Everything is compared: for hosts of the interpreter's model.
    Exact,
}

const CF: u64 = rflags::CF;
const PF: u64 = rflags::PF;
const AF: u64 = rflags::AF;
const ZF: u64 = rflags::ZF;
const SF: u64 = rflags::SF;
const OF: u64 = rflags::OF;

/// When a row applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Always.
    Always,
    /// The masked count is not 0.
    Counted,
    /// The masked count is neither 0 nor 1.
    CountAboveOne,
    /// The masked count is not below the operand's width.
    CountFromWidth,
    /// The masked count is above the operand's width.
    CountAboveWidth,
}

/// Flags that instructions leave undefined.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Instructions.
    pub mnemonics: &'static [M],
    /// The condition under which the flags are undefined.
    pub when: When,
    /// RFLAGS bits.
    pub flags: u64,
    /// Where the manual says so: section "Flags Affected" of this entry in SDM volume 2.
    pub section: &'static str,
}

/// Undefined flags.
pub const FLAGS: &[Row] = &[
    row(&[M::And], When::Always, AF, "AND"),
    row(&[M::Or], When::Always, AF, "OR"),
    row(&[M::Xor], When::Always, AF, "XOR"),
    row(&[M::Test], When::Always, AF, "TEST"),
    row(&[M::Mul], When::Always, SF | ZF | AF | PF, "MUL"),
    row(&[M::Imul], When::Always, SF | ZF | AF | PF, "IMUL"),
    row(&[M::Div], When::Always, rflags::ARITH, "DIV"),
    row(&[M::Idiv], When::Always, rflags::ARITH, "IDIV"),
    row(SHIFTS, When::Counted, AF, "SAL/SAR/SHL/SHR"),
    row(SHIFTS, When::CountAboveOne, OF, "SAL/SAR/SHL/SHR"),
    row(
        &[M::Shl, M::Sal, M::Shr],
        When::CountFromWidth,
        CF,
        "SAL/SAR/SHL/SHR",
    ),
    row(
        &[M::Rol, M::Ror, M::Rcl, M::Rcr],
        When::CountAboveOne,
        OF,
        "RCL/RCR/ROL/ROR",
    ),
    row(&[M::Shld], When::Counted, AF, "SHLD"),
    row(&[M::Shld], When::CountAboveOne, OF, "SHLD"),
    row(&[M::Shld], When::CountAboveWidth, rflags::ARITH, "SHLD"),
    row(&[M::Shrd], When::Counted, AF, "SHRD"),
    row(&[M::Shrd], When::CountAboveOne, OF, "SHRD"),
    row(&[M::Shrd], When::CountAboveWidth, rflags::ARITH, "SHRD"),
    row(&[M::Bsf], When::Always, CF | OF | SF | AF | PF, "BSF"),
    row(&[M::Bsr], When::Always, CF | OF | SF | AF | PF, "BSR"),
    row(&[M::Bt], When::Always, OF | SF | AF | PF, "BT"),
    row(&[M::Bts], When::Always, OF | SF | AF | PF, "BTS"),
    row(&[M::Btr], When::Always, OF | SF | AF | PF, "BTR"),
    row(&[M::Btc], When::Always, OF | SF | AF | PF, "BTC"),
    row(&[M::Tzcnt], When::Always, OF | SF | AF | PF, "TZCNT"),
    row(&[M::Lzcnt], When::Always, OF | SF | AF | PF, "LZCNT"),
    row(&[M::Aaa], When::Always, OF | SF | ZF | PF, "AAA"),
    row(&[M::Aas], When::Always, OF | SF | ZF | PF, "AAS"),
    row(&[M::Aad], When::Always, OF | AF | CF, "AAD"),
    row(&[M::Aam], When::Always, OF | AF | CF, "AAM"),
    row(&[M::Daa], When::Always, OF, "DAA"),
    row(&[M::Das], When::Always, OF, "DAS"),
    row(&[M::Andn], When::Always, AF | PF, "ANDN"),
    row(&[M::Bextr], When::Always, AF | SF | PF, "BEXTR"),
    row(&[M::Blsi], When::Always, AF | PF, "BLSI"),
    row(&[M::Blsmsk], When::Always, AF | PF, "BLSMSK"),
    row(&[M::Blsr], When::Always, AF | PF, "BLSR"),
    row(&[M::Bzhi], When::Always, AF | PF, "BZHI"),
];

const SHIFTS: &[M] = &[M::Shl, M::Sal, M::Shr, M::Sar];

const fn row(mnemonics: &'static [M], when: When, flags: u64, section: &'static str) -> Row {
    Row {
        mnemonics,
        when,
        flags,
        section,
    }
}

/// Other results that differ between processors, or are known to be inexact, with the reason. They are not compared.
pub const OTHERS: &[(&str, &str)] = &[
    ("BSWAP r16", "the result (SDM vol. 2, BSWAP)"),
    (
        "SHLD and SHRD r/m16 by more than 16",
        "the result (SDM vol. 2, SHLD and SHRD)",
    ),
    (
        "BSF and BSR of 0",
        "the destination (SDM vol. 2, BSF and BSR; AMD's manual: unchanged)",
    ),
    (
        "POPA that faults",
        "which registers are already loaded (RSP is not: it is restarted)",
    ),
    (
        "MASKMOVQ, MASKMOVDQU",
        "whether bytes that the mask leaves out fault (SDM vol. 2, MASKMOVDQU); and, when MASKMOVQ faults, the x87 state",
    ),
    (
        "VMOVDDUP of 32 bytes",
        "on other hosts: whether the last 8, which are not used, fault (Zen 1: no)",
    ),
    (
        "several faults of one instruction (CMPS, CALL to a non-canonical target, misaligned and non-canonical operands)",
        "on other hosts: which one is raised (SDM vol. 3, 6.9: implementation-dependent within a class)",
    ),
    (
        "REPE CMPSB both of whose operands fault",
        "on Zen 4, which reads DS:rSI first: which one is reported (others read ES:rDI first)",
    ),
    (
        "CALL to a non-canonical target",
        "on other hosts: whether the return address has been written (SDM vol. 2, CALL: no; Intel's processors: yes)",
    ),
    (
        "stores of 10 bytes that fault",
        "on other hosts: whether those in the first of two pages have been written",
    ),
    (
        "CMPS and SCAS with a repeat prefix that fault",
        "on other hosts: flags, which may be those from before the instruction (SDM vol. 2, REP)",
    ),
    (
        "stores of MMX registers that fault",
        "on other hosts: the x87 state, in which TOP may be 0 (errata of Intel's processors)",
    ),
    ("VCVTPS2PH that faults", "on other hosts: MXCSR's flags"),
    (
        "CVTPI2PS from memory with an x87 exception pending",
        "whether that is raised (SDM vol. 2, CVTPI2PS: yes; AMD's processors and Intel's: no)",
    ),
    (
        "RFLAGS.AC with x87 and vector operands",
        "on other hosts: which sizes are checked (SDM vol. 3, 6.15, #AC: implementation-specific)",
    ),
    (
        "10-byte operands and MASKMOV at the end of the canonical range",
        "which of two faults comes first (as above): such cases are not made",
    ),
    (
        "an unmasked SIMD exception",
        "known inaccuracy, not the manual's: inexact beside an unmasked underflow, MXCSR's flags after DPPS and DPPD, and the x87 state of a conversion to MMX",
    ),
    (
        "DPPS and DPPD with underflow unmasked",
        "known inaccuracy, not the manual's: a product that underflows goes unnoticed if the sum does not",
    ),
    (
        "the last x87 instruction's opcode and addresses",
        "they would be the test's own",
    ),
];

/// Returns the text of `docs/undefined.md`.
pub fn undefined_page() -> String {
    let mut page = String::from(
        "# What the comparisons with processors leave out

Made from the tables in `crates/fuzzing/src/undefined.rs` by `UPDATE_EXPECT=1 cargo test -p fuzzing --test undefined`.

The interpreter does what AMD's Zen 3 processors (family 25) do, also where the manual does not say what
happens; where CPUID shows a Zen 4, BSF and BSR clear all flags but ZF and have PF of the index, where Zen 3 keeps them. The recorded results in `crates/fuzzing/golden` hold it to that everywhere. Comparisons with the host CPU leave out
what is listed here, because the host may be another processor. `--exact` compares undefined flags and results too.
They have been run on both and on Intel's of family 6, models 85 (Cascade Lake) and 207 (Emerald Rapids).

Where the vendors differ in what is defined, or in what software might see every day, the guest's CPUID decides: gathers that
fault (Intel's have made the mask all ones or zeros), repeated string instructions with 32-bit addresses in 64-bit code
(Intel's clear the upper halves of registers before the first iteration), x87 stores that an unmasked exception
prevents (Intel's do not look at their address).

## Flags

The section is \"Flags Affected\" of the entry in SDM volume 2.

| instructions | when | flags | section |
| --- | --- | --- | --- |
",
    );
    for row in FLAGS {
        let names: Vec<String> = row
            .mnemonics
            .iter()
            .map(|m| format!("{m:?}").to_uppercase())
            .collect();
        let when = match row.when {
            When::Always => "always",
            When::Counted => "count not 0",
            When::CountAboveOne => "count above 1",
            When::CountFromWidth => "count at least the width",
            When::CountAboveWidth => "count above the width",
        };
        let flags: Vec<&str> = [
            (CF, "CF"),
            (PF, "PF"),
            (AF, "AF"),
            (ZF, "ZF"),
            (SF, "SF"),
            (OF, "OF"),
        ]
        .into_iter()
        .filter(|(bit, _)| row.flags & bit != 0)
        .map(|(_, name)| name)
        .collect();
        let (names, flags) = (names.join(", "), flags.join(", "));
        page += &format!("| {names} | {when} | {flags} | {} |\n", row.section);
    }
    page += "\n## Everything else\n\n| what | not compared |\n| --- | --- |\n";
    for (what, not) in OTHERS {
        page += &format!("| {what} | {not} |\n");
    }
    page
}

/// Returns the flags that one instruction leaves undefined. Without registers, counts in CL may have any value.
fn flags(i: &Instruction, gpr: Option<&[u64; 16]>) -> u64 {
    FLAGS
        .iter()
        .filter(|row| row.mnemonics.contains(&i.mnemonic()) && applies(row.when, i, gpr))
        .fold(0, |all, row| all | row.flags)
}

/// Returns true if the instruction leaves a flag undefined in which processors differ, and which another instruction is
/// likely to read.
pub(crate) fn is_model_specific(i: &Instruction) -> bool {
    flags(i, None) & !AF != 0
}

fn applies(when: When, i: &Instruction, gpr: Option<&[u64; 16]>) -> bool {
    if when == When::Always {
        return true;
    }
    let size = if i.op0_kind() == OpKind::Register {
        i.op0_register().size()
    } else {
        i.memory_size().size()
    };
    let last = i.op_count() - 1;
    let count = match (i.op_kind(last), gpr) {
        (OpKind::Register, None) => return true,
        (OpKind::Register, Some(gpr)) => gpr[reg::RCX],
        _ => i.immediate(last),
    };
    let count = count & if size == 8 { 63 } else { 31 };
    let width = 8 * size as u64;
    match when {
        When::Always => true,
        When::Counted => count != 0,
        When::CountAboveOne => count > 1,
        When::CountFromWidth => count >= width,
        When::CountAboveWidth => count > width,
    }
}

/// The flags of a case that are not compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Undefined {
    strictness: Strictness,
    /// Undefined flags at the end of the block.
    at_end: u64,
    /// Undefined flags wherever the block stops.
    anywhere: u64,
}

impl Undefined {
    pub(crate) fn new(strictness: Strictness) -> Self {
        Self {
            strictness,
            at_end: 0,
            anywhere: 0,
        }
    }
    /// Takes the next instruction of the case into account.
    pub(crate) fn add(&mut self, i: &Instruction, gpr: Option<&[u64; 16]>) {
        if self.strictness == Strictness::Manual {
            let flags = flags(i, gpr);
            self.at_end |= flags;
            self.anywhere |= flags;
        }
    }
    /// Notes that the instruction is always executed, so that flags it writes are defined again.
    pub(crate) fn defines(&mut self, i: &Instruction) {
        // With a count of zero, flags stay as they are.
        let counted = FLAGS
            .iter()
            .any(|r| r.when == When::Counted && r.mnemonics.contains(&i.mnemonic()));
        let rotates = matches!(i.mnemonic(), M::Rol | M::Ror | M::Rcl | M::Rcr);
        let repeated = i.has_rep_prefix() || i.has_repne_prefix();
        if !counted && !rotates && !repeated {
            let written = i.rflags_written() | i.rflags_cleared() | i.rflags_set();
            self.at_end &= !decoded_flags(written);
        }
    }
    /// Returns true if the instruction would make registers or memory depend on undefined flags.
    pub(crate) fn is_read_by(&self, i: &Instruction) -> bool {
        let pushes = matches!(i.mnemonic(), M::Pushf | M::Pushfd | M::Pushfq);
        self.at_end != 0 && (pushes || decoded_flags(i.rflags_read()) & self.at_end != 0)
    }
    /// Takes the next instruction that is executed into account. Returns true if it reads an undefined flag in which
    /// processors differ.
    pub(crate) fn is_read_in_step(&mut self, i: &Instruction, gpr: &[u64; 16]) -> bool {
        let is_read = self.is_read_by(i);
        self.defines(i);
        let left = flags(i, Some(gpr));
        // Where AF alone is undefined, processors agree.
        if left != AF {
            self.at_end |= left;
        }
        is_read
    }
    /// Returns true if flags are undefined after the last instruction that was taken into account.
    pub(crate) fn is_any_left(&self) -> bool {
        self.at_end != 0
    }
    /// Returns true if it is compared which of several faults an instruction raises.
    pub(crate) fn orders_faults(&self) -> bool {
        self.strictness == Strictness::Exact || is_modelled()
    }
    /// Returns the flags to compare.
    pub(crate) fn defined(&self, stopped: bool) -> u64 {
        let undefined = if stopped { self.anywhere } else { self.at_end };
        (rflags::ARITH | rflags::DF | rflags::NT | rflags::AC | rflags::ID) & !undefined
    }
}
