//! The host's results as text, one line per case. Any host can check the interpreter against those of the host that
//! recorded them.
//!
//! A line is the form (`block` for several instructions), the seed, the code's
//! bytes, and what changed: `!vector.error[@cr2]`, `rip` relative to the
//! block, `f` (RFLAGS), general registers `r0` to `r15`, vector registers `x`
//! and `y` (upper halves), x87 registers `s` and their control words, and
//! memory `m<offset>`. Everything is hexadecimal but register numbers.

use core::fmt::Write as _;

use iced_x86::{Code, Mnemonic as M};
use x86_cpu::Features;
use x86_defs::{
    vector::{self, pf},
    xsave,
};

use crate::{
    Case, Generator, Mode, Outcome, Strictness,
    difference::{TASK_SIZE, faults_in_mmx},
    machine::case_window,
    state,
};

pub use crate::model::{Model, is_modelled, model};

/// The name of a line whose case is a block.
const BLOCK: &str = "block";

/// Returns what a case changed.
pub fn describe(case: &Case, outcome: &Outcome, memory: &[u8]) -> String {
    let mut d = String::new();
    let (start, end) = (&case.start, &outcome.regs);
    if let Some(t) = outcome.trap {
        // Linux reports its own addresses as present.
        let hidden = if t.gva >= TASK_SIZE {
            u64::from(pf::P)
        } else {
            0
        };
        let _ = write!(d, " !{:x}.{:x}", t.vector, t.error_code & !hidden);
        if t.vector == vector::PF {
            let _ = write!(d, "@{:x}", t.gva);
        }
    }
    if outcome.trap.is_none() || end.rip != start.rip {
        let _ = write!(d, " rip={:x}", end.rip.wrapping_sub(start.rip));
    }
    let flags = case.undefined.defined(false);
    if (start.rflags ^ end.rflags) & flags != 0 {
        let _ = write!(d, " f={:x}", end.rflags & flags);
    }
    for (n, (a, b)) in start.gpr.iter().zip(end.gpr).enumerate() {
        if *a != b {
            let _ = write!(d, " r{n}={b:x}");
        }
    }
    let mut area = |name: &str, at: usize, len: usize| {
        let range = at..at + len;
        if start.area[range.clone()] != end.area[range.clone()] {
            let _ = write!(d, " {name}=");
            for b in end.area[range].iter().rev() {
                let _ = write!(d, "{b:02x}");
            }
        }
    };
    for n in 0..16 {
        area(&format!("x{n}"), xsave::XMM0 + 16 * n, 16);
        area(&format!("y{n}"), xsave::YMM_HI + 16 * n, 16);
    }
    let inexact = outcome
        .trap
        .is_some_and(|t| t.vector == vector::XM || faults_in_mmx(case, outcome));
    if !inexact {
        for (name, at, len) in [
            ("fcw", 0, 2),
            ("fsw", 2, 2),
            ("ftw", 4, 1),
            ("mxcsr", xsave::MXCSR, 4),
        ] {
            area(name, at, len);
        }
        for n in 0..8 {
            area(&format!("s{n}"), xsave::ST0 + 16 * n, 10);
        }
    }
    let before = case_window(case);
    let mut at = 0;
    while at < memory.len() {
        if memory[at] == before[at] {
            at += 1;
            continue;
        }
        let len = (at..memory.len())
            .take_while(|&n| memory[n] != before[n])
            .count();
        let _ = write!(d, " m{at:x}=");
        for b in &memory[at..at + len] {
            let _ = write!(d, "{b:02x}");
        }
        at += len;
    }
    d
}

/// Returns a line of a recording.
pub fn line(case: &Case, code: Option<Code>, outcome: &Outcome, memory: &[u8]) -> String {
    let name = code.map_or_else(|| BLOCK.to_owned(), |c| format!("{c:?}"));
    let mut bytes = String::new();
    for b in &case.bytes {
        let _ = write!(bytes, "{b:02x}");
    }
    let changes = describe(case, outcome, memory);
    format!("{name} {:x} {bytes}{changes}", case.seed)
}

/// A recording: the recorder's CPUID, and lines.
#[derive(Debug)]
pub struct Recording<'a> {
    /// Features that the interpreter is given.
    pub features: Features,
    lines: Vec<&'a str>,
}

impl<'a> Recording<'a> {
    /// Reads a recording. `None` if it is malformed.
    pub fn parse(text: &'a str) -> Option<Self> {
        let (head, lines): (Vec<_>, Vec<_>) = text.lines().partition(|l| l.starts_with('#'));
        let mut leaves = Vec::new();
        for h in head.iter().filter_map(|h| h.strip_prefix("#cpuid ")) {
            let mut n = h.split(' ').map(|v| u32::from_str_radix(v, 16).ok());
            let mut next = || n.next().flatten();
            leaves.push((next()?, next()?, next()?, next()?, next()?, next()?));
        }
        Some(Self {
            features: Features::from_cpuid(leaves.into_iter()),
            lines,
        })
    }

    /// Returns the cases of the recording, each with its form and line. For blocks, `forms` are the forms that they are
    /// made of.
    ///
    /// # Panics
    /// If a line cannot be read or its case is made differently now.
    pub fn cases(&self, mode: Mode, forms: &[Code]) -> Vec<(Option<Code>, Case, &'a str)> {
        let by_name: std::collections::HashMap<String, Code> =
            Code::values().map(|c| (format!("{c:?}"), c)).collect();
        let mut generator = Generator::new(mode, Strictness::Exact);
        let mut cases = Vec::new();
        for &line in &self.lines {
            let mut words = line.split(' ');
            let mut word = || words.next().unwrap_or_default();
            let (name, seed, bytes) = (word(), word(), word());
            let seed = u64::from_str_radix(seed, 16).unwrap_or_default();
            let code = by_name.get(name).copied();
            let case = match code {
                Some(code) => generator.single(code, seed),
                None => generator.block(forms, seed),
            };
            let same = case.filter(|c| {
                let made: String = c.bytes.iter().map(|b| format!("{b:02x}")).collect();
                made == bytes
            });
            let Some(case) = same else {
                panic!("cases are made differently now, record again: {line}");
            };
            cases.push((code, case, line));
        }
        cases
    }

    /// Returns the forms of the recording, in its order.
    pub fn forms(&self) -> Vec<Code> {
        let by_name: std::collections::HashMap<String, Code> =
            Code::values().map(|c| (format!("{c:?}"), c)).collect();
        let mut forms: Vec<Code> = self
            .lines
            .iter()
            .filter_map(|l| by_name.get(l.split(' ').next()?).copied())
            .collect();
        forms.dedup();
        forms
    }
}

/// Returns the head of a recording made on this host.
pub fn head() -> String {
    let mut text = String::from(
        "# Results of a Zen 3 processor (AMD's family 25), by `UPDATE_EXPECT=1 cargo test -p fuzzing --test golden`.\n# form seed code changes: see `crates/fuzzing/src/golden.rs`.\n",
    );
    for (leaf, sub, a, b, c, d) in state::host_leaves() {
        let _ = writeln!(text, "#cpuid {leaf:x} {sub:x} {a:x} {b:x} {c:x} {d:x}");
    }
    text
}

/// Returns true for approximations and transcendental functions, whose last bits depend on the vendor.
pub fn is_vendors(code: Code) -> bool {
    matches!(
        code.mnemonic(),
        M::Rcpps
            | M::Rcpss
            | M::Rsqrtps
            | M::Rsqrtss
            | M::Vrcpps
            | M::Vrcpss
            | M::Vrsqrtps
            | M::Vrsqrtss
            | M::Fsin
            | M::Fcos
            | M::Fsincos
            | M::Fptan
            | M::Fpatan
            | M::F2xm1
            | M::Fyl2x
            | M::Fyl2xp1
            | M::Cvtpi2ps
            | M::Maskmovq
    )
}
