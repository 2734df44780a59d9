//! Differences between the interpreter and the host CPU.

use core::fmt::Write as _;

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic as M, OpKind};
use x86_defs::{
    rflags,
    vector::{self, pf},
    xsave,
};

use crate::{
    Case, Guest, Host, Outcome,
    model::{Model, is_modelled, model},
};

/// The first address that a process cannot map on Linux with four-level paging.
pub(crate) const TASK_SIZE: u64 = 0x7fff_ffff_f000;

/// Both machines, which all cases use.
#[derive(Debug)]
pub struct Differential {
    host: Host,
    guest: Guest,
}

impl Differential {
    /// Maps both machines' memory. A process has one of these.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            host: Host::new()?,
            guest: Guest::new(),
        })
    }
    /// Runs a case on both machines.
    ///
    /// # Errors
    /// A description of what differs.
    pub fn run(&mut self, case: &Case) -> Result<(), String> {
        let host = self.host.run(case);
        let guest = self.guest.run(case);
        compare(
            case,
            (&host, self.host.window()),
            (&guest, self.guest.window()),
        )
    }
}

/// Compares two runs of a case and the memory after them.
///
/// # Errors
/// A description of what differs.
pub fn compare(
    case: &Case,
    (host, host_memory): (&Outcome, &[u8]),
    (guest, guest_memory): (&Outcome, &[u8]),
) -> Result<(), String> {
    let mut d = String::new();
    let (theirs, ours) = (host.trap, guest.trap);
    let what = theirs.map(|_| faulting(case, host)).unwrap_or_default();
    if let (Some(a), Some(b)) = (theirs, ours)
        && (!case.undefined.orders_faults() || has_order_of_zen4(&what))
        && host.regs.rip == guest.regs.rip
        && (a.vector, a.gva) != (b.vector, b.gva)
    {
        return Ok(());
    }
    if !is_modelled()
        && theirs.is_none()
        && ours.is_some()
        && is_read_in_part(&faulting(case, guest))
    {
        return Ok(());
    }
    let vectors = (theirs.map(|t| t.vector), ours.map(|t| t.vector));
    if vectors.0 != vectors.1 {
        let _ = writeln!(d, "  exception: host {theirs:x?}, interpreter {ours:x?}");
    } else if let (Some(a), Some(b)) = (theirs, ours) {
        // Linux reports all of its own addresses as present, so that user code cannot probe them.
        let hidden = if a.gva >= TASK_SIZE {
            u64::from(pf::P)
        } else {
            0
        };
        if (a.error_code ^ b.error_code) & !hidden != 0 {
            let _ = writeln!(d, "  error code: host {a:x?}, interpreter {b:x?}");
        }
        if a.vector == vector::PF && a.gva != b.gva {
            let _ = writeln!(d, "  CR2: host {a:x?}, interpreter {b:x?}");
        }
    }
    if host.regs.rip != guest.regs.rip {
        let (a, b) = (host.regs.rip, guest.regs.rip);
        let _ = writeln!(d, "  rip: host {a:#x}, interpreter {b:#x}");
    }
    for n in 0..16 {
        let (a, b) = (host.regs.gpr[n], guest.regs.gpr[n]);
        if a != b {
            let was = case.start.gpr[n];
            let _ = writeln!(
                d,
                "  gpr{n}: host {a:#x}, interpreter {b:#x} (was {was:#x})"
            );
        }
    }
    let mut defined = case.undefined.defined(theirs.is_some());
    if is_compared_string(&what) && !is_modelled() {
        defined &= !rflags::ARITH;
    }
    let (a, b) = (host.regs.rflags & defined, guest.regs.rflags & defined);
    if a != b {
        let was = case.start.rflags;
        let _ = writeln!(
            d,
            "  rflags: host {a:#x}, interpreter {b:#x} (was {was:#x})"
        );
    }
    vector_difference(case, host, guest, &what, &mut d);
    // A call to an address that is not canonical may have pushed the return address, and a store of ten bytes is made
    // in two pieces.
    let is_partial = what.mnemonic() == M::Call || what.memory_size().size() == 10;
    if host_memory != guest_memory && (is_modelled() || !is_partial) {
        memory_difference(host_memory, guest_memory, &mut d);
    }
    if d.is_empty() {
        return Ok(());
    }
    let (seed, gpr) = (case.seed, &case.start.gpr);
    let listing = case.listing();
    let control = (&case.start.area[24..28], &case.start.area[0..5]);
    Err(format!(
        "{listing}seed {seed:#x} stepped {} gpr {gpr:x?} mxcsr, fcw {control:02x?}\n{d}",
        case.stepped
    ))
}

fn memory_difference(host: &[u8], guest: &[u8], d: &mut String) {
    if let Some(at) = (0..host.len()).find(|&n| host[n] != guest[n]) {
        let at = at & !7;
        let _ = writeln!(
            d,
            "  memory at window+{at:#x}: host {:02x?}, interpreter {:02x?}",
            &host[at..at + 8],
            &guest[at..at + 8],
        );
    }
}

fn vector_difference(
    case: &Case,
    host: &Outcome,
    guest: &Outcome,
    what: &Instruction,
    d: &mut String,
) {
    let (a, b) = (&host.regs.area, &guest.regs.area);
    let mut compare = |name: &str, n: usize, at: usize, len: usize| {
        let range = at..at + len;
        if a[range.clone()] != b[range.clone()] {
            let _ = writeln!(
                d,
                "  {name}{n}: host {:02x?}, interpreter {:02x?}, was {:02x?}",
                &a[range.clone()],
                &b[range.clone()],
                &case.start.area[range]
            );
        }
    };
    for n in 0..16 {
        compare("xmm", n, xsave::XMM0 + 16 * n, 16);
        compare("ymmh", n, xsave::YMM_HI + 16 * n, 16);
    }
    if let Some(trap) = host.trap {
        // Known inaccuracies. Beside an unmasked SIMD exception, it is not compared which other flags of MXCSR are set
        // (inexact beside underflow; DPPS, whose steps raise their own). Nor is the x87 state of conversions to MMX and
        // of MASKMOVQ that fault: AMD processors enter MMX state all the same, Intel's do so at any store of an MMX
        // register.
        let is_foreign = !is_modelled() && is_mmx_store(what);
        if trap.vector == vector::XM || what.mnemonic() == M::Maskmovq || is_foreign {
            return;
        }
    }
    let converts = what.mnemonic() == M::Vcvtps2ph && host.trap.is_some();
    compare("fcw", 0, 0, 2);
    compare("fsw", 0, 2, 2);
    compare("ftw", 0, 4, 1);
    // Bytes 6 to 23, the x87 pointers, hold addresses of the host.
    if !converts || is_modelled() {
        compare("mxcsr", 0, xsave::MXCSR, 4);
    }
    for n in 0..8 {
        compare("st", n, xsave::ST0 + 16 * n, 10);
    }
}

/// Returns the instruction that stopped the case.
fn faulting(case: &Case, host: &Outcome) -> Instruction {
    let at = host.regs.rip.wrapping_sub(case.start.rip) as usize;
    let Some(bytes) = case.bytes.get(at..) else {
        return Instruction::default();
    };
    Decoder::with_ip(case.bits(), bytes, 0, DecoderOptions::NONE).decode()
}

/// Returns true if this host is a Zen 4 and the instruction REPE CMPSB: unlike all other processors and the
/// interpreter, it reads DS:rSI before ES:rDI.
fn has_order_of_zen4(i: &Instruction) -> bool {
    model() == Some(Model::Zen4) && i.mnemonic() == M::Cmpsb && i.has_rep_prefix()
}

/// Returns true for CMPS and SCAS with a repeat prefix. If they fault, flags may be what they were before.
fn is_compared_string(i: &Instruction) -> bool {
    let scans = matches!(
        i.mnemonic(),
        M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq | M::Scasb | M::Scasw | M::Scasd | M::Scasq
    );
    scans && (i.has_rep_prefix() || i.has_repne_prefix())
}

/// Returns true if Zen 1, which reads 32 bytes in halves, does not read all of what the instruction's operand has.
fn is_read_in_part(i: &Instruction) -> bool {
    i.code() == Code::VEX_Vmovddup_ymm_ymmm256
}

/// Returns true if the instruction that stopped the case is MASKMOVQ.
pub(crate) fn faults_in_mmx(case: &Case, host: &Outcome) -> bool {
    faulting(case, host).mnemonic() == M::Maskmovq
}

/// Returns true for a store of an MMX register.
fn is_mmx_store(i: &Instruction) -> bool {
    let kinds = [i.op0_kind(), i.op1_kind()];
    kinds == [OpKind::Memory, OpKind::Register] && i.op1_register().is_mm()
}

#[cfg(test)]
mod tests {
    use iced_x86::Code;
    use x86_native::oracle::Trap;

    use super::*;
    use crate::{Generator, Mode, Strictness};

    fn same_but(
        strictness: Strictness,
        code: Code,
        change: impl Fn(&mut Outcome, &mut Vec<u8>),
    ) -> Result<(), String> {
        let mut generator = Generator::new(Mode::Bits64, strictness);
        let mut guest = Guest::new();
        let mut made = (0..100).filter_map(|seed| generator.single(code, seed));
        let (case, outcome) = made
            .find_map(|c| {
                let outcome = guest.run(&c);
                outcome.trap.is_none().then_some((c, outcome))
            })
            .expect("a case that completes");
        let memory = guest.window().to_vec();
        let (mut other, mut other_memory) = (outcome.clone(), memory.clone());
        change(&mut other, &mut other_memory);
        compare(&case, (&outcome, &memory), (&other, &other_memory))
    }

    #[test]
    fn every_kind_of_difference_is_reported() {
        type Change = (&'static str, fn(&mut Outcome, &mut Vec<u8>));
        let changes: [Change; 9] = [
            ("gpr15", |o, _| o.regs.gpr[15] ^= 1 << 63),
            ("rflags", |o, _| o.regs.rflags ^= rflags::CF),
            ("rflags", |o, _| o.regs.rflags ^= rflags::DF),
            ("rip", |o, _| o.regs.rip += 1),
            ("memory", |_, m| m[0x1fff] ^= 1),
            ("xmm15", |o, _| o.regs.area[xsave::XMM0 + 255] ^= 1),
            ("ymmh0", |o, _| o.regs.area[xsave::YMM_HI] ^= 1),
            ("st7", |o, _| o.regs.area[xsave::ST0 + 16 * 7 + 9] ^= 1),
            ("exception", |o, _| {
                o.trap = Some(Trap {
                    vector: vector::PF,
                    error_code: 4,
                    gva: 0,
                });
            }),
        ];
        for (what, change) in changes {
            let report = same_but(Strictness::Manual, Code::Add_r64_rm64, change);
            assert!(report.is_err_and(|r| r.contains(what)), "{what}");
        }
        assert_eq!(
            same_but(Strictness::Exact, Code::Add_r64_rm64, |_, _| ()),
            Ok(())
        );
    }

    #[test]
    fn undefined_flags_are_compared_on_request_only() {
        let change = |o: &mut Outcome, _: &mut Vec<u8>| o.regs.rflags ^= rflags::AF;
        assert_eq!(
            same_but(Strictness::Manual, Code::And_r32_rm32, change),
            Ok(())
        );
        assert!(same_but(Strictness::Exact, Code::And_r32_rm32, change).is_err());
        assert!(same_but(Strictness::Manual, Code::Add_r32_rm32, change).is_err());
    }
}
