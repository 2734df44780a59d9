//! Decoding a block, and which arithmetic flags are live where.

use iced_x86::{Decoder, DecoderError, Instruction, Mnemonic, OpKind, Register};
use x86_cpu::{CpuState, GuestBus};
use x86_interp::gating;
/// The six arithmetic flags.
pub(crate) use x86_native::DECODED_ARITH as ALL;

use crate::{
    groups::Member,
    kind::{self, Forms, Kind},
    translate::{branch::target, narrow, string},
};

/// Mode bits: what a block was translated for, besides its bytes.
pub(crate) mod mode {
    /// FP and SIMD instructions are enabled and raise no exceptions.
    pub(crate) const FP: u8 = 1;
    /// The operating system has enabled AVX.
    pub(crate) const AVX: u8 = 8;
    /// CPL 0, and IOPL, NT and DF are clear.
    pub(crate) const KERNEL: u8 = 2;
    /// RDTSC is allowed, and an addition.
    pub(crate) const TSC: u8 = 4;
    /// 32-bit code: compatibility or protected mode, with flat segments but FS and GS.
    pub(crate) const BITS32: u8 = 0x10;
    /// 32-bit code whose FS, or GS, has any base and no limit.
    pub(crate) const FS: u8 = 0x20;
    pub(crate) const GS: u8 = 0x80;
    /// Every access probes for itself: see `groups`.
    pub(crate) const SPLIT: u8 = 0x40;
}

/// Instructions of a block at most.
const MAX_INSNS: usize = 48;
/// A block with as many ends where another one begins.
const ENOUGH: usize = 8;
/// Conditional branches of a block at most: what follows them is executed less and less likely,
/// and translated again for whoever goes there from elsewhere.
const MAX_BRANCHES: usize = 5;
/// Jumps within the page that a block follows.
const MAX_FOLLOWED: usize = 2;
/// Instructions of an unrolled loop at most, and turns of one.
const MAX_UNROLLED: usize = 40;
const MAX_TURNS: usize = 4;
/// Bytes of an instruction at most.
const MAX_LEN: usize = 15;

/// An instruction of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoded {
    pub(crate) i: Instruction,
    /// The guest's bytes, as many as `i` is long.
    pub(crate) raw: [u8; MAX_LEN],
    pub(crate) kind: Kind,
    /// Offset in the page; so are branch targets and RIP-relative addresses.
    pub(crate) offset: u32,
    /// Flags that something may read before they are written, this instruction included.
    pub(crate) live_in: u32,
    /// Its access shares a probe with others.
    pub(crate) member: Option<Member>,
}

/// Decodes the block at `gva`; IP 0 is the page's start.
/// Empty if nothing can be fetched. An instruction that straddles two pages is
/// a block of its own: true is returned for one. `is_known` tells at which offsets
/// blocks begin already.
pub(crate) fn decode<B: GuestBus>(
    out: &mut Vec<Decoded>,
    forms: &mut Forms,
    (cpu, bus): (&mut CpuState, &mut B),
    gva: u64,
    mode: u8,
    is_known: impl Fn(u32) -> bool,
) -> bool {
    out.clear();
    forms.select(&cpu.features);
    let options = gating::decoder_options(&cpu.features);
    let long = mode & mode::BITS32 == 0;
    let bits = if long { 64 } else { 32 };
    let mut offset = (gva & 0xfff) as u32;
    let first = offset;
    let mut followed = 0;
    let mut branches = 0;
    let page = gva & !0xfff;
    let mut bytes = [0; 64];
    let (mut start, mut have) = (0, 0);
    let mut i = Instruction::default();
    let mut straddles = false;
    while out.len() < MAX_INSNS && offset < 0x1000 && !straddles {
        // The bytes are tracked as code, so no more than may be needed.
        let used = offset.wrapping_sub(start) as usize;
        if used + MAX_LEN > have || have == 0 {
            start = offset;
            let room = (0x1000 - offset as usize).min(bytes.len());
            have = match bus.code_bytes(cpu, page + u64::from(offset), &mut bytes[..room]) {
                Ok(n) => n,
                Err(_) => return false,
            };
        }
        let from = (offset - start) as usize;
        let mut decoder = Decoder::with_ip(bits, &bytes[from..have], offset.into(), options);
        decoder.decode_out(&mut i);
        let mut error = decoder.last_error();
        if error == DecoderError::NoMoreBytes && have - from < MAX_LEN {
            if !out.is_empty() {
                break;
            }
            // A page that cannot be fetched is the interpreter's business.
            let next = &mut bytes[have..from + MAX_LEN];
            if (long || page != 0xffff_f000)
                && let Ok(n) = bus.code_bytes(cpu, page.wrapping_add(0x1000), next)
            {
                straddles = true;
                let end = (have + n).min(bytes.len());
                let mut decoder = Decoder::with_ip(bits, &bytes[from..end], offset.into(), options);
                decoder.decode_out(&mut i);
                error = decoder.last_error();
            }
        }
        if error != DecoderError::None {
            out.push(Decoded {
                i: Instruction::default(),
                raw: [0; MAX_LEN],
                kind: Kind::Interpret,
                offset,
                live_in: 0,
                member: None,
            });
            break;
        }
        if !long {
            narrow::lift(&mut i);
        }
        let form = forms.learn(&i);
        let mut kind = if form.available {
            kind::of(form.kind, &i, long)
        } else {
            Kind::Interpret
        };
        let needs = match kind {
            Kind::CopyFp | Kind::CopyFpAligned | Kind::LoadFpControl if form.vex => {
                mode::FP | mode::AVX
            }
            Kind::CopyFp | Kind::CopyFpAligned | Kind::LoadFpControl => mode::FP,
            Kind::Rdtsc => mode::TSC,
            Kind::Pushf
            | Kind::Popf
            | Kind::Cli
            | Kind::Sti
            | Kind::Swapgs
            | Kind::Sysret
            | Kind::FromControl
            | Kind::Ac => mode::KERNEL,
            _ => 0,
        };
        let segment = match i.memory_segment() {
            _ if long => 0,
            Register::FS => mode::FS,
            Register::GS => mode::GS,
            _ => 0,
        };
        if (needs | segment) & !mode != 0 {
            kind = Kind::Interpret;
        }
        // DF is clear, and no x87 exception can be pending.
        if kind == Kind::Cld && mode & mode::KERNEL != 0
            || i.mnemonic() == Mnemonic::Wait && mode & mode::FP != 0
        {
            kind = Kind::Nop;
        }
        if i.has_lock_prefix() && !is_lockable(&i) {
            kind = Kind::Interpret;
        }
        let mut raw = [0; MAX_LEN];
        for (to, b) in raw.iter_mut().zip(&bytes[from..]) {
            *to = *b;
        }
        let mut d = Decoded {
            i,
            raw,
            kind,
            offset,
            live_in: 0,
            member: None,
        };
        let next = offset + i.len() as u32;
        let target = match kind {
            Kind::Jcc | Kind::Jmp => target(&i) as u64,
            _ => u64::MAX,
        };
        if target == u64::from(first) && mode & mode::SPLIT == 0 && !straddles {
            unroll(out, d, next);
            break;
        }
        if kind == Kind::Jmp && target < 0x1000 && followed < MAX_FOLLOWED && !straddles {
            followed += 1;
            d.kind = Kind::Followed;
            out.push(d);
            offset = target as u32;
            // The bytes there are to be read.
            have = 0;
            continue;
        }
        out.push(d);
        offset = next;
        if kind == Kind::Jcc {
            branches += 1;
            // What comes next has its code, and this block is long enough for it to be no loss.
            if branches == MAX_BRANCHES || out.len() >= ENOUGH && is_known(offset) {
                break;
            }
        }
        if matches!(
            kind,
            Kind::Interpret
                | Kind::Jmp
                | Kind::JmpIndirect
                | Kind::Call
                | Kind::CallIndirect
                | Kind::Ret
                | Kind::Syscall
                | Kind::Sysret
        ) {
            break;
        }
    }
    // Nothing may be injected between STI and the next instruction, so both are in one block.
    if let Some(d) = out.last_mut()
        && d.kind == Kind::Sti
    {
        d.kind = Kind::Interpret;
    }
    let mut live = ALL;
    for d in out.iter_mut().rev() {
        live = match d.kind {
            Kind::Interpret | Kind::Jcc | Kind::Syscall | Kind::Sysret => ALL,
            Kind::Pushf => ALL,
            Kind::Popf => 0,
            Kind::Nop | Kind::Followed => live,
            Kind::String if string::may_keep_flags(&d.i) => live,
            _ => {
                let (reads, sets) = forms.of(&d.i).flags(&d.i);
                live & !sets | reads
            }
        };
        d.live_in = live;
    }
    straddles
}

/// A loop whose body is `out`, and whose end is the branch back `d`: repeats the
/// body; the branches in between leave the loop.
fn unroll(out: &mut Vec<Decoded>, d: Decoded, next: u32) {
    let body = out.len();
    let turns = (MAX_UNROLLED / (body + 1)).clamp(1, MAX_TURNS);
    for _ in 1..turns {
        let mut leave = d;
        if d.kind == Kind::Jcc {
            leave.i.negate_condition_code();
            narrow::set_target(&mut leave.i, next);
        } else {
            leave.kind = Kind::Followed;
        }
        out.push(leave);
        out.extend_from_within(..body);
    }
    out.push(d);
}

/// LOCK is allowed with a memory destination only (#UD otherwise).
fn is_lockable(i: &Instruction) -> bool {
    i.op0_kind() == OpKind::Memory
}

/// Flags that the instruction always sets. Undefined ones are among them where
/// processors set them: others keep what they were, after a multiplication for example.
pub(crate) fn overwritten(i: &Instruction) -> u32 {
    let set = (i.rflags_written() | i.rflags_cleared() | i.rflags_set()) & ALL;
    let m = i.mnemonic();
    if !kind::is_shift(m) {
        return match m {
            // AF.
            Mnemonic::And | Mnemonic::Or | Mnemonic::Xor | Mnemonic::Test => ALL,
            _ => set,
        };
    }
    let last = i.op_count() - 1;
    let is_zero = i.op_kind(last) != OpKind::Immediate8 || i.immediate8() & 31 == 0;
    match m {
        // A count of zero, which CL may be, changes no flag.
        _ if is_zero => 0,
        // AF, and OF for other counts than one.
        Mnemonic::Shl | Mnemonic::Sal | Mnemonic::Shr | Mnemonic::Sar => ALL,
        _ => set,
    }
}
