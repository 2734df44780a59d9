//! [`Native`]: the stub cache and the calls into stubs.
//!
//! Host safety rests on three things: only forms that `allow` lists become
//! stubs; every stub touches only the FP area, the general registers and the
//! [`Context`] it is given; and no exception can be unmasked while an SSE
//! instruction runs, nor pending when an x87 one starts.

use core::arch::asm;
use std::collections::HashMap;

use iced_x86::{Encoder, Instruction, InstructionInfoFactory};
use x86_cpu::FpState;
use x86_defs::{reg, rflags, xsave};

use crate::{
    allow::{self, Class, Form},
    buffer::CodeBuffer,
    mxcsr, stub,
};

/// Size of the buffer for generated code per vCPU. When it is full, all code is dropped.
const BUFFER_SIZE: usize = 4 << 20;

/// Room for the memory operand.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Operand(pub [u8; 64]);

/// What a stub sees besides registers.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Context {
    /// The memory operand.
    pub(crate) mem: Operand,
    /// The MXCSR that the instruction runs with, and its value afterwards.
    pub(crate) mxcsr: u32,
    /// MXCSR of the host.
    pub(crate) host_mxcsr: u32,
    /// x87 control word of the host.
    pub(crate) host_fcw: u16,
    /// Arithmetic flags in and out.
    pub(crate) rflags: u64,
}

/// A prepared instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StubId(pub u32);

/// What running a stub led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The instruction completed.
    Done,
    /// An unmasked SIMD floating-point exception: nothing but MXCSR's flags changed.
    SimdException,
    /// An unmasked x87 exception is pending from before: nothing was executed.
    X87Pending,
    /// There is no such stub.
    Missing,
}

#[derive(Clone, Copy, Debug)]
struct Stub {
    offset: u32,
    form: Form,
    results: Option<mxcsr::Results>,
}

/// A stub's code.
#[derive(Clone, Copy, Debug)]
struct Code {
    /// Start, in the buffer.
    entry: *const u8,
    of: Stub,
}

/// The guest's registers that a stub works on.
#[derive(Debug)]
struct State<'a> {
    gpr: &'a mut [u64; reg::NR_SLOTS],
    fp: &'a mut FpState,
}

/// Stubs that execute one instruction each; one set per vCPU.
pub struct Native {
    context: Context,
    buffer: Option<CodeBuffer>,
    stubs: Vec<Stub>,
    by_encoding: HashMap<Vec<u8>, u32>,
    encoder: Encoder,
    info: InstructionInfoFactory,
    reset: bool,
}

impl core::fmt::Debug for Native {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Native")
            .field("stubs", &self.stubs.len())
            .finish_non_exhaustive()
    }
}

impl Default for Native {
    fn default() -> Self {
        Self::new()
    }
}

impl Native {
    /// Maps the code buffer. If the host does not allow that, no instruction can be prepared.
    pub fn new() -> Self {
        Self {
            context: Context {
                mem: Operand([0; 64]),
                mxcsr: xsave::MXCSR_DEFAULT,
                host_mxcsr: xsave::MXCSR_DEFAULT,
                host_fcw: xsave::FCW_INIT,
                rflags: 0,
            },
            buffer: CodeBuffer::new(BUFFER_SIZE).ok(),
            stubs: Vec::new(),
            by_encoding: HashMap::new(),
            encoder: Encoder::new(64),
            info: InstructionInfoFactory::new(),
            reset: false,
        }
    }

    /// Returns true if the host allowed a code buffer.
    pub fn is_available(&self) -> bool {
        self.buffer.is_some()
    }

    /// Returns true once after all stubs were dropped because the buffer was full. Decoded instructions that refer to a
    /// stub must be dropped then too.
    pub fn take_reset(&mut self) -> bool {
        core::mem::take(&mut self.reset)
    }

    /// Returns the buffer of the memory operand, which is filled before [`Self::run`] and read after it.
    #[inline(always)]
    pub fn operand(&mut self) -> &mut [u8; 64] {
        &mut self.context.mem.0
    }

    /// Prepares an instruction. `None` if it is not on the allow-list.
    pub fn prepare(&mut self, guest: &Instruction) -> Option<(StubId, Form)> {
        let form = allow::form(guest)?;
        let mut rewritten = stub::rewrite(guest)?;
        let mut key = stub::encode(&mut self.encoder, &rewritten)?;
        let bytes = key.len();
        rewritten.push_key(&mut key);
        if let Some(&id) = self.by_encoding.get(&key) {
            return Some((StubId(id), form));
        }
        let code = stub::generate(&mut rewritten, &key[..bytes], form, &mut self.info).ok()?;
        let buffer = self.buffer.as_mut()?;
        let offset = match buffer.append(&code) {
            Some(offset) => offset,
            None => {
                buffer.clear();
                self.stubs.clear();
                self.by_encoding.clear();
                self.reset = true;
                buffer.append(&code)?
            }
        };
        let id = u32::try_from(self.stubs.len()).ok()?;
        self.stubs.push(Stub {
            offset,
            form,
            results: form.uses_mxcsr.then(|| mxcsr::Results::of(guest)).flatten(),
        });
        self.by_encoding.insert(key, id);
        Some((StubId(id), form))
    }

    /// Executes a prepared instruction. `flags` are the arithmetic flags before and after it.
    #[inline]
    pub fn run(
        &mut self,
        id: StubId,
        gpr: &mut [u64; reg::NR_SLOTS],
        fp: &mut FpState,
        flags: &mut u64,
    ) -> Outcome {
        let (Some(&stub), Some(buffer)) = (self.stubs.get(id.0 as usize), &self.buffer) else {
            return Outcome::Missing;
        };
        let entry = buffer.entry(stub.offset);
        let form = stub.form;
        if form.reads_flags {
            self.context.rflags = *flags & rflags::ARITH | rflags::FIXED1;
        }
        let code = Code { entry, of: stub };
        let outcome = match form.class {
            Class::X87 | Class::Mmx => self.run_fxsave(code, State { gpr, fp }),
            _ if form.uses_mxcsr => self.run_mxcsr(code, State { gpr, fp }),
            _ => {
                // SAFETY: `entry` is a stub of this buffer; it does not use MXCSR.
                unsafe { call(entry, gpr, fp, &mut self.context) };
                Outcome::Done
            }
        };
        if form.writes_flags && outcome == Outcome::Done {
            *flags = self.context.rflags & rflags::ARITH;
        }
        outcome
    }

    /// Executes an SSE or AVX instruction that depends on MXCSR.
    #[inline]
    fn run_mxcsr(&mut self, stub: Code, state: State<'_>) -> Outcome {
        let State { gpr, fp } = state;
        let guest = fp.mxcsr();
        if guest & mxcsr::MASKS != mxcsr::MASKS {
            return self.run_unmasked(stub, State { gpr, fp });
        }
        let host = read_mxcsr();
        let wanted = guest & mxcsr::host_mask();
        if host != wanted {
            write_mxcsr(wanted);
        }
        // SAFETY: `stub` is one of this buffer; all exceptions are masked.
        unsafe { call(stub.entry, gpr, fp, &mut self.context) };
        let after = read_mxcsr();
        if after != guest {
            fp.set_mxcsr(guest | after & mxcsr::FLAGS);
        }
        // Flags need not be preserved for the host (they are volatile in the
        // System V ABI); leaving the guest's spares a load next time.
        if (after ^ host) & !mxcsr::FLAGS != 0 {
            write_mxcsr(host);
        }
        Outcome::Done
    }

    /// Executes what [`Self::run_mxcsr`] or [`Self::run_fxsave`] executes if the guest has not masked all exceptions:
    /// with all masked, and then a look at which were raised.
    #[cold]
    fn run_unmasked(&mut self, stub: Code, state: State<'_>) -> Outcome {
        let State { gpr, fp } = state;
        let guest = fp.mxcsr();
        let saved_fp = fp.clone();
        let saved_gpr = *gpr;
        let unmasked = !guest >> mxcsr::MASK_SHIFT & mxcsr::FLAGS;
        let mut control = guest & mxcsr::host_mask() & !mxcsr::FLAGS | mxcsr::MASKS;
        if unmasked & mxcsr::UE != 0 {
            // Flush-to-zero applies only to masked underflow (SDM vol. 1, 10.2.3.3).
            control &= !mxcsr::FZ;
        }
        let host = read_mxcsr();
        let raised = if matches!(stub.of.form.class, Class::Mmx) {
            self.context.mxcsr = control;
            self.context.host_mxcsr = host;
            // SAFETY: `stub` is one of this buffer and loads the masked
            // `context.mxcsr`; `run_fxsave` checked the x87 state.
            unsafe { call(stub.entry, gpr, fp, &mut self.context) };
            self.context.mxcsr & mxcsr::FLAGS
        } else {
            write_mxcsr(control);
            // SAFETY: `stub` is one of this buffer; all exceptions are masked.
            unsafe { call(stub.entry, gpr, fp, &mut self.context) };
            let after = read_mxcsr();
            write_mxcsr(host);
            after & mxcsr::FLAGS
        };
        let tiny = match stub.of.results {
            Some(results) if unmasked & mxcsr::UE != 0 => results.tiny(fp),
            _ => 0,
        };
        let raised = raised | tiny;
        // If any element raises a pre-computation exception, nothing is computed and no other exception is detected
        // (SDM vol. 1, 11.5.2).
        let before = raised & unmasked & mxcsr::BEFORE;
        let reported = if before != 0 {
            raised & mxcsr::BEFORE
        } else {
            raised
        };
        if reported & unmasked != 0 {
            *fp = saved_fp;
            *gpr = saved_gpr;
            fp.set_mxcsr(guest | reported);
            return Outcome::SimdException;
        }
        fp.set_mxcsr(guest | reported);
        Outcome::Done
    }

    /// Executes an x87 or MMX instruction. The whole legacy region is loaded and saved.
    fn run_fxsave(&mut self, stub: Code, state: State<'_>) -> Outcome {
        let State { gpr, fp } = state;
        let fsw = fp.u16_at(xsave::FSW);
        if fsw & !fp.u16_at(xsave::FCW) & 0x3f != 0 {
            return Outcome::X87Pending;
        }
        let guest_mxcsr = fp.mxcsr();
        // The pointers to opcode, instruction and operand would be the stub's, so they are kept; the caller sets the
        // guest's. MXCSR may have a value that cannot be loaded.
        let mut kept = [0; 26];
        kept.copy_from_slice(&fp.area[6..32]);
        // ES and B are cleared, because no unmasked exception is pending here.
        fp.area[xsave::FSW + 1] &= 0x7f;
        fp.area[xsave::FSW] &= 0x7f;
        fp.set_mxcsr(xsave::MXCSR_DEFAULT);
        // SAFETY: stores two bytes; no exception can result (FNSTCW is non-waiting).
        unsafe {
            asm!("fnstcw [{}]", in(reg) &raw mut self.context.host_fcw, options(nostack, preserves_flags));
        }
        let mut outcome = Outcome::Done;
        let mut mxcsr_after = guest_mxcsr;
        if stub.of.form.uses_mxcsr && guest_mxcsr & mxcsr::MASKS != mxcsr::MASKS {
            fp.set_mxcsr(guest_mxcsr);
            let mut trial = fp.clone();
            outcome = self.run_unmasked_mmx(
                stub,
                State {
                    gpr,
                    fp: &mut trial,
                },
            );
            mxcsr_after = trial.mxcsr();
            *fp = trial;
        } else {
            let host = read_mxcsr();
            self.context.host_mxcsr = host;
            self.context.mxcsr = guest_mxcsr & mxcsr::host_mask() | mxcsr::MASKS;
            // SAFETY: `stub` is one of this buffer. No x87 exception is
            // pending (checked above), and those that the instruction raises
            // stay pending until FNINIT in the stub; MXCSR is masked.
            unsafe { call(stub.entry, gpr, fp, &mut self.context) };
            if stub.of.form.uses_mxcsr {
                mxcsr_after |= self.context.mxcsr & mxcsr::FLAGS;
            }
        }
        fp.area[6..32].copy_from_slice(&kept);
        fp.set_mxcsr(mxcsr_after);
        outcome
    }

    /// Does what [`Self::run_unmasked`] does for a stub that loads the legacy region.
    #[cold]
    fn run_unmasked_mmx(&mut self, stub: Code, state: State<'_>) -> Outcome {
        let State { gpr, fp } = state;
        // FXRSTOR in the stub may load any MXCSR without reserved bits:
        // LDMXCSR with the masked one follows before anything is computed.
        let guest = fp.mxcsr() & mxcsr::host_mask();
        fp.set_mxcsr(guest);
        self.run_unmasked(stub, State { gpr, fp })
    }
}

#[inline(always)]
fn read_mxcsr() -> u32 {
    let mut v = 0u32;
    // SAFETY: stores four bytes to `v`.
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut v, options(nostack, preserves_flags));
    }
    v
}

/// Loads MXCSR. `v` has no reserved bits and masks every exception, or is the host's own.
#[inline(always)]
fn write_mxcsr(v: u32) {
    // SAFETY: loads four bytes from `v`; the caller's promise excludes #GP.
    unsafe {
        asm!("ldmxcsr [{}]", in(reg) &raw const v, options(nostack, readonly, preserves_flags));
    }
}

/// Calls a stub.
///
/// # Safety
/// 1. `entry` is the start of a stub made by `stub::generate`, still in its buffer.
/// 2. If it computes with SSE/AVX, MXCSR masks all exceptions; if it loads the
///    legacy region, MXCSR there has no reserved bits and no x87 exception is pending.
#[inline(always)]
unsafe fn call(
    entry: *const u8,
    gpr: &mut [u64; reg::NR_SLOTS],
    fp: &mut FpState,
    context: &mut Context,
) {
    // SAFETY: by 1. the stub reads and writes only these three objects, which
    // are borrowed mutably, and volatile registers; by 2. it raises no fault.
    unsafe {
        asm!(
            "call {entry}",
            entry = in(reg) entry,
            inlateout("r8") fp.area.as_mut_ptr() => _,
            inlateout("r9") gpr.as_mut_ptr() => _,
            inlateout("r10") context as *mut Context => _,
            clobber_abi("sysv64"),
        );
    }
}
