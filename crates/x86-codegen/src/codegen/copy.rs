//! Instructions that are executed as they are, but with host registers and host addresses in place of the guest's.

use iced_x86::{Instruction, OpKind, Register};

use super::{
    Emit, Stub, Translator, Unsupported,
    memory::{Finds, Probe},
    recode::{self, Rm, recode},
};
use crate::{
    asm::*,
    frame::words::*,
    ir::decoded::Decoded,
    ir::lowering::{Form, Shape, is_short},
    ir::mode::Mode,
    ir::narrow,
};

/// Host registers that an instruction borrows for guest registers that live in the frame.
struct Temps {
    /// Host registers by the numbers of guest registers.
    map: [Reg; 16],
    /// The first `used` are in use: guest register, host register, and whether it is to be written back.
    all: [(u8, Reg, bool); 3],
    used: usize,
    /// Borrowed host registers that hold other guest registers, which [`SPILL`] keeps.
    spilled: [Option<Reg>; 2],
}

impl Translator {
    pub(super) fn copy(&mut self, d: &Decoded, form: &Form, aligned: bool) -> Emit {
        let shape = self.shape_of(d, form);
        if d.registers & IN_FRAME != 0
            && d.memory.is_none()
            && let Some(shape) = shape
            && self.copy_in_memory(d, form, shape)
        {
            return Ok(());
        }
        let i = &d.i;
        let memory = d.memory;
        let mut operand = None;
        let mut probed = None;
        if let Some(write) = memory {
            let size = u32::from(form.size);
            if size == 0 || size > 32 {
                return Err(Unsupported);
            }
            let aligned = aligned || form.is_locked(i) && size > 1;
            // The operand may take r13 only where nothing else needs it.
            let uses_scratch = d.registers & IN_FRAME != 0 || form.touches_flags && d.live_in != 0;
            let finds = if uses_scratch || d.high {
                Finds::Address
            } else {
                Finds::Parts
            };
            operand = Some(match self.anchored(d) {
                Some(place) => place,
                None => {
                    let before = self.stubs.len();
                    let place = self.operand(d, size, write, aligned, finds)?;
                    if write && size > 1 && !aligned && self.stubs.len() > before {
                        probed = Some(self.stubs.len() - 1);
                    }
                    place
                }
            });
        }
        self.flags_before(d, form);
        let temps = self.take_temps(d, form)?;
        if let Some(m) = operand.filter(|_| d.high) {
            self.copy_with_high_byte(i, m)?;
            self.flags_after(d, form);
            return Ok(());
        }
        let rm = operand.map_or(Rm::Register, |m| match m.index {
            None if m.base == Some(S0) => Rm::Host(m.disp),
            _ => Rm::At(m),
        });
        match shape.and_then(|s| recode((&d.raw, i.len()), s, &temps.map, rm, d.high)) {
            Some(made) => {
                let len = made.write(self.asm.window());
                self.asm.advance(len);
            }
            None => self.encode(&rewritten(i, &temps.map, operand))?,
        }
        self.give_temps_back(&temps);
        self.flags_after(d, form);
        let here = self.asm.here();
        if let Some(Stub::Refill { ends, probe, .. }) = probed.and_then(|n| self.stubs.get_mut(n))
            && *probe != Probe::Stack
        {
            *ends = Some(here);
        }
        Ok(())
    }

    /// Takes host registers for those operands of a copied instruction that live in the frame, and loads them where the
    /// instruction reads them.
    fn take_temps(&mut self, d: &Decoded, form: &Form) -> Result<Temps, Unsupported> {
        let i = &d.i;
        let mut t = Temps {
            map: HOST,
            all: [(0, 0, false); 3],
            used: 0,
            spilled: [None; 2],
        };
        let in_frame = if d.registers & IN_FRAME == 0 {
            0
        } else {
            i.op_count()
        };
        for n in 0..in_frame {
            if i.op_kind(n) != OpKind::Register {
                continue;
            }
            let r = i.op_register(n);
            if !r.is_gpr() {
                continue;
            }
            let number = r.full_register().number() as u8;
            if host_reg(number).is_some() {
                continue;
            }
            let write = form.writes & 1 << n != 0;
            if let Some(known) = t.all[..t.used].iter_mut().find(|t| t.0 == number) {
                known.2 |= write;
                continue;
            }
            let host = self.scratch(i, t.used, d.memory.is_some(), &mut t.spilled)?;
            let whole = form.replaces & 1 << n != 0
                && r.size() >= 4
                && !keeps_destination(i)
                && (0..i.op_count()).all(|m| {
                    m == n
                        || i.op_kind(m) != OpKind::Register
                        || i.op_register(m).full_register() != r.full_register()
                });
            if !whole {
                self.load_slot(host, number);
            } else if host == S1 {
                self.state.cached = None;
            }
            let slot = t.all.get_mut(t.used).ok_or(Unsupported)?;
            *slot = (number, host, write);
            t.used += 1;
            t.map[usize::from(number)] = host;
        }
        Ok(t)
    }

    /// Stores results to the frame, and restores the host registers.
    fn give_temps_back(&mut self, t: &Temps) {
        for (number, host, write) in &t.all[..t.used] {
            if *write {
                self.asm.store(gpr_slot(*number), *host);
            }
        }
        for (n, r) in t.spilled.iter().enumerate() {
            if let Some(r) = r {
                self.asm.load(*r, gs(SPILL + 8 * n));
            }
        }
        if t.used != 0 {
            // The first register taken is r13.
            self.state.cached = Some(t.all[0].0);
        }
    }

    /// Returns how the instruction's bytes name operands, if it has the same bytes in 64-bit code, except for
    /// addresses.
    fn shape_of(&self, d: &Decoded, form: &Form) -> Option<Shape> {
        // In 16-bit code the prefix 66 stands for the other size, and addresses of 16 bits are encoded in another way.
        let is_alike = || {
            !self.input.mode.has(Mode::BITS16)
                && !is_short(&d.i)
                && narrow::is_encoded_alike(&d.raw)
        };
        form.shape.filter(|_| self.input.long || is_alike())
    }

    /// Copies an instruction on `[r14 + disp]` and AH, CH, DH or BH. RBP takes the place of r14, because an instruction
    /// that names one of these bytes cannot name r14.
    fn copy_with_high_byte(&mut self, i: &Instruction, operand: Mem) -> Emit {
        let mut out = rewritten(i, &HOST, Some(operand));
        out.set_memory_base(Register::RBP);
        // xchg r14, rbp
        self.asm.bytes(&[0x49, 0x87, 0xee]);
        self.encode(&out)?;
        self.asm.bytes(&[0x49, 0x87, 0xee]);
        Ok(())
    }

    /// Copies an instruction without a memory operand, one of whose registers is accessed where it lives in memory.
    /// Returns false if that is not possible, or a scratch register has the guest's register already.
    fn copy_in_memory(&mut self, d: &Decoded, form: &Form, shape: Shape) -> bool {
        let Some((number, reads)) = form.in_memory(&d.i) else {
            return false;
        };
        let is_other = |r: u16| r & IN_FRAME & !(1 << number) != 0;
        if host_reg(number).is_some()
            || d.high
            || is_other(d.writes)
            || reads && self.state.cached == Some(number)
        {
            return false;
        }
        let Ok(disp) = i8::try_from(gpr_slot(number).disp) else {
            return false;
        };
        let others = d.registers & IN_FRAME & !(1 << number);
        let mut map = HOST;
        if others != 0 {
            map[others.trailing_zeros() as usize] = S1;
        }
        let Some(made) = recode((&d.raw, d.i.len()), shape, &map, Rm::Slot(disp), false) else {
            return false;
        };
        self.flags_before(d, form);
        if others != 0 {
            self.load_slot(S1, others.trailing_zeros() as u8);
        }
        let len = made.write(self.asm.window());
        self.asm.advance(len);
        if d.writes >> number & 1 != 0 && self.state.cached == Some(number) {
            self.state.cached = None;
        }
        self.flags_after(d, form);
        true
    }

    /// Returns a host register for the `n`th register that lives in memory.
    fn scratch(
        &mut self,
        i: &Instruction,
        n: usize,
        memory: bool,
        spilled: &mut [Option<Reg>; 2],
    ) -> Result<Reg, Unsupported> {
        if n == 0 {
            return Ok(S1);
        }
        if n == 1 && !memory {
            return Ok(S0);
        }
        // No instruction uses these registers implicitly.
        let free = (8..TLB).rev().find(|r| {
            !spilled.contains(&Some(*r))
                && !self.is_borrowed(*r)
                && (0..i.op_count()).all(|n| {
                    i.op_kind(n) != OpKind::Register
                        || !i.op_register(n).is_gpr()
                        || host_reg(i.op_register(n).full_register().number() as u8) != Some(*r)
                })
        });
        let r = free.ok_or(Unsupported)?;
        let place = spilled
            .iter()
            .position(Option::is_none)
            .ok_or(Unsupported)?;
        spilled[place] = Some(r);
        self.asm.store(gs(SPILL + 8 * place), r);
        Ok(r)
    }

    pub(super) fn encode(&mut self, i: &Instruction) -> Emit {
        self.encoder.encode(i, 0).map_err(|_| {
            let _ = self.encoder.take_buffer();
            Unsupported
        })?;
        let mut bytes = self.encoder.take_buffer();
        self.asm.slice(&bytes);
        bytes.clear();
        self.encoder.set_buffer(bytes);
        Ok(())
    }
}

/// Host registers of the guest registers that do not live in memory.
pub(super) const HOST: recode::Map = {
    let mut map = [0; 16];
    let mut n = 0;
    while n < 16 {
        if let Some(r) = host_reg(n) {
            map[n as usize] = r;
        }
        n += 1;
    }
    map
};

/// Returns for the encoder the instruction that [`recode()`] makes.
pub(super) fn rewritten(i: &Instruction, map: &recode::Map, operand: Option<Mem>) -> Instruction {
    let mut out = *i;
    if let Some(m) = operand {
        set_operand(&mut out, m);
    }
    drop_hints(&mut out);
    for n in 0..out.op_count() {
        let r = out.op_register(n);
        let high = matches!(r, Register::AH | Register::CH | Register::DH | Register::BH);
        if out.op_kind(n) == OpKind::Register && r.is_gpr() && !high {
            let host = map[r.full_register().number() & 15];
            out.set_op_register(n, register(host, r.size()));
        }
    }
    out
}

/// Replaces the memory operand by `m`.
pub(super) fn set_operand(out: &mut Instruction, m: Mem) {
    let name = |r: Option<Reg>| r.map_or(Register::None, |r| register(r, 8));
    out.set_memory_base(name(m.base));
    out.set_memory_index(name(m.index.map(|(r, _)| r)));
    out.set_memory_index_scale(1 << m.index.map_or(0, |(_, scale)| scale));
    out.set_memory_displacement64(i64::from(m.disp) as u64);
    out.set_memory_displ_size(u32::from(m.disp != 0));
}

/// Drops prefixes that have no effect on the guest but may have one on the host: F3 makes TZCNT of BSF and LZCNT of
/// BSR, XACQUIRE begins a transaction.
pub(super) fn drop_hints(out: &mut Instruction) {
    out.set_segment_prefix(Register::None);
    out.set_has_rep_prefix(false);
    out.set_has_repne_prefix(false);
    out.set_has_xacquire_prefix(false);
    out.set_has_xrelease_prefix(false);
}

/// BSF and BSR leave the destination alone for a source of zero; a conditional
/// move may not write, and CMPXCHG writes either operand.
fn keeps_destination(i: &Instruction) -> bool {
    use iced_x86::Mnemonic as M;
    matches!(
        i.mnemonic(),
        M::Bsf | M::Bsr | M::Cmpxchg | M::Xadd | M::Xchg
    )
}

/// Returns the general register `n` of the given size in bytes.
pub(super) fn register(n: Reg, size: usize) -> Register {
    let n = u32::from(n);
    match size {
        1 if n < 4 => Register::AL + n,
        1 => Register::SPL + (n - 4),
        2 => Register::AX + n,
        4 => Register::EAX + n,
        _ => Register::RAX + n,
    }
}
