//! Which memory accesses of a block share one TLB probe.
//!
//! Accesses whose addresses differ by constants (the same registers, moved by constants or copied in between) and lie
//! close together form a *group*. Its first access probes for all bytes of the group; the others use the host pointer
//! that the probe gave. When the probe fails, because the bytes straddle two pages or the page is not writable, the
//! rest of the block runs as a *split* translation, in which every access probes for itself: so faults, and accessed
//! and dirty flags, are those of single accesses. The same is done when accesses that have to be aligned are not, which
//! is checked once for the whole group.

use iced_x86::{Instruction, OpKind, Register};

use crate::{
    frame::words::MAX_KEPT,
    ir::branch::{is_loop, popped},
    ir::decoded::Decoded,
    ir::lowering::{Effect, Lowering},
    ir::member::{Align, Base, Induction, Member, Moves},
};

/// Maximum length of a group in bytes: a longer one straddles two pages more often.
const MAX_SPAN: i64 = 240;
/// How many groups are considered when an access is placed, newest first.
const MAX_OPEN: usize = 8;

/// A register's value: an unknown number, which `id` names, plus a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    id: u32,
    plus: i64,
}

const UNKNOWN: Value = Value { id: NONE, plus: 0 };

/// The parts of an address that are equal if two addresses differ only by a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressKey {
    base: u32,
    index: u32,
    scale: u32,
    segment: Register,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    key: AddressKey,
    align: Align,
    min: i64,
    max: i64,
    first: usize,
    first_writes: bool,
    writes: bool,
    stack: bool,
    members: u32,
    /// The host pointer is needed after its register has held something else.
    kept: bool,
    /// The frame's slot that the host pointer is kept in.
    slot: Option<u8>,
    /// [`Member::induction`].
    induction: Option<Induction>,
}

/// An access's group, and where the access is.
#[derive(Clone, Copy, Debug)]
struct AccessPlace {
    group: usize,
    offset: i64,
    /// The parts of `offset` that are already in the registers that the key has as base and as index. `None` if the
    /// key's base is the operand's index.
    moved: Option<[i64; 2]>,
}

/// The state of forming groups in one block.
pub struct Groups {
    /// Values of the registers in `known`.
    values: [Value; 16],
    /// Bit per register whose value is known.
    known: u16,
    next: u32,
    /// Ids of the values that registers have when the block begins, and a bit for each register whose value then is
    /// settled or lost.
    first: [u32; 16],
    later: u16,
    groups: Vec<Group>,
    /// The place of each instruction's access.
    places: Vec<Option<AccessPlace>>,
    open: Vec<usize>,
    /// The code is 64-bit code.
    long: bool,
}

/// No register: the index of an address without one, or the id of a value that is all constant.
const NONE: u32 = u32::MAX;
const PAGE: u32 = u32::MAX - 1;

impl core::fmt::Debug for Groups {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Groups")
            .field("groups", &self.groups)
            .finish_non_exhaustive()
    }
}

impl Default for Groups {
    /// Makes an empty plan.
    fn default() -> Self {
        Self {
            values: [UNKNOWN; 16],
            known: 0,
            next: 0,
            first: [NONE; 16],
            later: 0,
            groups: Vec::new(),
            places: Vec::new(),
            open: Vec::new(),
            long: true,
        }
    }
}

impl Groups {
    /// Fills in [`Decoded::member`]. `long`: the code is 64-bit code. `hoists`: also [`Member::induction`] and
    /// [`Member::stays`].
    pub fn form(&mut self, insns: &mut [Decoded], long: bool, hoists: bool) {
        self.long = long;
        let is_loop = hoists && is_loop(insns);
        let least = if is_loop { 1 } else { 2 };
        if insns.iter().filter(|d| d.access != 0).take(2).count() < least {
            return;
        }
        self.known = 0;
        self.next = 0;
        self.first = [NONE; 16];
        self.later = 0;
        self.groups.clear();
        self.places.clear();
        self.open.clear();
        let mut in_register = None;
        for (n, d) in insns.iter().enumerate() {
            if is_barrier(d) {
                self.open.clear();
            }
            let place = self.place(n, d);
            if d.kind == Lowering::CallIndirect {
                // The target is read before the call writes its return address.
                in_register = None;
            }
            self.places.push(place);
            match place {
                Some(AccessPlace { group: g, .. }) => {
                    let group = &mut self.groups[g];
                    group.kept |= group.first != n && in_register != Some(g);
                    in_register = Some(g);
                }
                None if d.takes_pointer => in_register = None,
                None => {}
            }
            self.track(d);
            self.later |= d.writes;
        }
        if hoists {
            for n in 0..self.groups.len() {
                self.groups[n].induction = self.induction_of(&self.groups[n]);
            }
        }
        // An instruction that may change mappings ends all groups.
        let may_stay = is_loop && !insns.iter().any(is_barrier);
        let stays = |g: &Group| may_stay && g.induction.is_some_and(|w| w.stride == 0);
        let mut slots = 0..MAX_KEPT as u8;
        for g in self.groups.iter_mut().filter(|g| g.kept) {
            g.slot = slots.next();
        }
        for g in self.groups.iter_mut().filter(|g| !g.kept && stays(g)) {
            g.slot = slots.next();
        }
        for (n, d) in insns.iter_mut().enumerate() {
            let Some(place) = self.places[n] else {
                continue;
            };
            let (g, offset) = (place.group, place.offset);
            let group = &self.groups[g];
            let stays = stays(group) && group.slot.is_some();
            if group.members < 2 && !stays || group.kept && group.slot.is_none() {
                continue;
            }
            let from_anchor = group.induction.and_then(|w| match w.moves {
                Moves::Nothing => Some(offset),
                Moves::Base => Some(offset - place.moved?[0]),
                Moves::Index => Some(offset - place.moved?[1]),
            });
            // A group whose access is too far from the anchor has no induction.
            let from_anchor = from_anchor.and_then(|n| i32::try_from(n).ok());
            d.member = Some(Member {
                group: g as u16,
                first: group.first == n,
                write: group.writes,
                stack: group.stack,
                refill: group.first_writes == group.writes,
                align: group.align.from(group.min),
                span: (group.max - group.min) as u32,
                offset: (offset - group.min) as i32,
                slot: group.slot,
                stays,
                alone: group.members < 2,
                induction: from_anchor.and(group.induction),
                from_anchor: from_anchor.unwrap_or(0),
            });
        }
    }

    /// Returns the group and place of an instruction's access, opening a group if none fits.
    fn place(&mut self, n: usize, d: &Decoded) -> Option<AccessPlace> {
        let size = i64::from(d.access);
        if size == 0 {
            return None;
        }
        let (key, offset, moved) = self.address(d)?;
        let end = offset.checked_add(size)?;
        let write = writes(d);
        let align = align_of(d, offset);
        let found = self.open.iter().rev().take(MAX_OPEN).copied().find(|g| {
            let g = &self.groups[*g];
            g.key == key
                && end.max(g.max) - offset.min(g.min) <= MAX_SPAN
                && g.align.and(align).is_some()
        });
        let g = found.unwrap_or_else(|| {
            let stack = key.base == self.value(Register::RSP).id
                && key.index == NONE
                && key.segment == Register::None;
            self.groups.push(Group {
                key,
                align,
                min: offset,
                max: end,
                first: n,
                first_writes: write,
                writes: write,
                stack,
                members: 0,
                kept: false,
                slot: None,
                induction: None,
            });
            self.open.push(self.groups.len() - 1);
            self.groups.len() - 1
        });
        let group = &mut self.groups[g];
        group.align = group.align.and(align).unwrap_or(align);
        group.min = group.min.min(offset);
        group.max = group.max.max(end);
        group.writes |= write;
        group.members += 1;
        Some(AccessPlace {
            group: g,
            offset,
            moved,
        })
    }

    /// Returns the induction of a group. To be called when all instructions have been tracked.
    fn induction_of(&self, group: &Group) -> Option<Induction> {
        let key = group.key;
        if key.segment != Register::None {
            return None;
        }
        let (base, by) = match key.base {
            NONE => (Base::None, 0),
            PAGE => (Base::Page, 0),
            id => {
                let (n, by) = self.stride(id)?;
                (Base::Register(n), by)
            }
        };
        let (mut index, mut index_by) = (None, 0);
        if key.index != NONE {
            let (n, by) = self.stride(key.index)?;
            index = Some((n, key.scale.trailing_zeros() as u8));
            index_by = by.checked_mul(key.scale.into())?;
        }
        let moves = match (by, index_by) {
            (0, 0) => Moves::Nothing,
            (_, 0) => Moves::Base,
            (0, _) => Moves::Index,
            _ => return None,
        };
        Some(Induction {
            base,
            index,
            from: i32::try_from(group.min).ok()?,
            stride: i32::try_from(by + index_by).ok()?,
            moves,
        })
    }

    /// Returns the register that has the value `id` when the block begins, and what one pass of the block adds to it.
    fn stride(&self, id: u32) -> Option<(u8, i64)> {
        let n = self.first.iter().position(|first| *first == id)?;
        let last = self.values[n];
        let is_known = self.known >> n & 1 != 0 && last.id == id;
        is_known.then_some((n as u8, last.plus))
    }

    fn value(&mut self, r: Register) -> Value {
        let n = r.number() & 15;
        if self.known >> n & 1 == 0 {
            self.next += 1;
            let id = self.next;
            if self.later >> n & 1 == 0 {
                self.first[n] = id;
                self.later |= 1 << n;
            }
            self.set(r, Value { id, plus: 0 });
        }
        self.values[n]
    }

    fn set(&mut self, r: Register, v: Value) {
        let n = r.number() & 15;
        self.known |= 1 << n;
        self.values[n] = v;
    }

    /// Returns the key of the instruction's address, the constant that remains, and [`AccessPlace::moved`].
    fn address(&mut self, d: &Decoded) -> Option<(AddressKey, i64, Option<[i64; 2]>)> {
        let Some(base) = d.kind.stack_base() else {
            return self.operand(d);
        };
        let plus = match d.kind {
            Lowering::Push | Lowering::Call | Lowering::CallIndirect => -self.word(),
            _ => 0,
        };
        let base = self.value(base);
        let key = AddressKey {
            base: base.id,
            index: NONE,
            scale: 0,
            segment: Register::None,
        };
        let offset = base.plus.checked_add(plus)?;
        Some((key, offset, Some([base.plus, 0])))
    }

    fn operand(&mut self, d: &Decoded) -> Option<(AddressKey, i64, Option<[i64; 2]>)> {
        let i = &d.i;
        let (base, index) = (i.memory_base(), i.memory_index());
        let disp = self.displacement(i)?;
        let segment = match i.memory_segment() {
            s @ (Register::FS | Register::GS) => s,
            _ => Register::None,
        };
        if !(base == Register::None || base == Register::RIP || self.is_full(base))
            || !(index == Register::None || self.is_full(index))
            || base == Register::None
                && index == Register::None
                && i.memory_displ_size() != self.word() as u32
        {
            return None;
        }
        let base = match base {
            Register::None => UNKNOWN,
            Register::RIP => Value {
                id: PAGE,
                plus: d.distance.into(),
            },
            r => self.value(r),
        };
        let scale = i.memory_index_scale();
        let index = match index {
            Register::None => UNKNOWN,
            r => self.value(r),
        };
        let plus = index.plus.checked_mul(i64::from(scale))?;
        let offset = disp.checked_add(base.plus)?.checked_add(plus)?;
        // An index without scale serves as the base if the base is known or absent.
        let is_base = base.id == NONE && scale == 1 && index.id != NONE;
        let (base_id, index_id) = if is_base {
            (index.id, NONE)
        } else {
            (base.id, index.id)
        };
        let key = AddressKey {
            base: base_id,
            index: index_id,
            scale: if index_id == NONE { 0 } else { scale },
            segment,
        };
        let moved = (!is_base).then_some([base.plus, plus]);
        // Keeps sums far from overflow, whatever is added.
        (offset.abs() < 1 << 40).then_some((key, offset, moved))
    }

    /// Notes what the instruction does to registers.
    fn track(&mut self, d: &Decoded) {
        let i = &d.i;
        let add = |g: &mut Self, r: Register, by: i64| {
            let v = g.value(r);
            let plus = v.plus.wrapping_add(by);
            g.set(r, Value { id: v.id, plus });
        };
        match d.kind {
            Lowering::Nop | Lowering::Jcc | Lowering::Jmp | Lowering::Followed => return,
            Lowering::Push => return add(self, Register::RSP, -self.word()),
            Lowering::Call | Lowering::CallIndirect if d.onto.is_some() => {
                return add(self, Register::RSP, -self.word());
            }
            Lowering::Ret if d.onto.is_some() => {
                return add(self, Register::RSP, self.word() + i64::from(popped(i)));
            }
            Lowering::JmpIndirect if d.onto.is_some() => return,
            Lowering::Pop => {
                add(self, Register::RSP, self.word());
                self.known &= !(1 << (i.op0_register().number() & 15));
                return;
            }
            Lowering::Leave => {
                let v = self.value(Register::RBP);
                self.set(Register::RSP, v);
                add(self, Register::RSP, self.word());
                self.known &= !(1 << Register::RBP.number());
                return;
            }
            _ => {}
        }
        let to = i.op0_register();
        let effect = d.effect;
        if let Some(plus) = self.constant(d) {
            return self.set(to, Value { id: NONE, plus });
        }
        if effect != Effect::Other && i.op0_kind() == OpKind::Register && self.is_full(to) {
            let immediate = |i: &Instruction| match i.op1_kind() {
                OpKind::Immediate8to64 | OpKind::Immediate32to64 => Some(i.immediate(1) as i64),
                OpKind::Immediate8to32 | OpKind::Immediate32 => {
                    Some(i64::from(i.immediate(1) as i32))
                }
                _ => None,
            };
            match (effect, immediate(i)) {
                (Effect::Add, Some(v)) => return add(self, to, v),
                (Effect::Sub, Some(v)) => return add(self, to, v.wrapping_neg()),
                (Effect::Inc, _) => return add(self, to, 1),
                (Effect::Dec, _) => return add(self, to, -1),
                (Effect::Mov, _)
                    if i.op1_kind() == OpKind::Register && self.is_full(i.op1_register()) =>
                {
                    let v = self.value(i.op1_register());
                    self.set(to, v);
                    return;
                }
                (Effect::Lea, _)
                    if self.is_full(i.memory_base())
                        && i.memory_index() == Register::None
                        && let Some(by) = self.displacement(i) =>
                {
                    let v = self.value(i.memory_base());
                    self.set(to, v);
                    return add(self, to, by);
                }
                (Effect::Compare, _) => return,
                _ => {}
            }
        }
        self.known &= !d.writes;
        if is_barrier(d) {
            self.known = 0;
        }
    }

    /// Returns the constant that the instruction writes to the register of its first operand, if it does.
    fn constant(&self, d: &Decoded) -> Option<i64> {
        let i = &d.i;
        let to = i.op0_register();
        // A write of a 32-bit register clears the upper half.
        let is_whole = i.op0_kind() == OpKind::Register && (self.is_full(to) || to.is_gpr32());
        match (d.effect, i.op1_kind()) {
            _ if !is_whole => None,
            (Effect::Xor, OpKind::Register) if i.op1_register() == to => Some(0),
            (Effect::Mov, OpKind::Immediate32to64) => Some(i.immediate(1) as i64),
            (Effect::Mov, OpKind::Immediate32) if self.long => Some(i64::from(i.immediate32())),
            (Effect::Mov, OpKind::Immediate32) => Some(i64::from(i.immediate32() as i32)),
            _ => None,
        }
    }

    /// Returns the bytes of a word on the stack.
    const fn word(&self) -> i64 {
        if self.long { 8 } else { 4 }
    }

    /// Returns true for a register of the size of addresses.
    fn is_full(&self, r: Register) -> bool {
        if self.long {
            r.is_gpr64()
        } else {
            r.is_gpr32()
        }
    }

    /// Returns the displacement, sign-extended; in 64-bit code only if it fits 32 bits.
    fn displacement(&self, i: &Instruction) -> Option<i64> {
        if self.long {
            return i32::try_from(i.memory_displacement64() as i64)
                .ok()
                .map(i64::from);
        }
        Some(i64::from(i.memory_displacement32() as i32))
    }
}

fn writes(d: &Decoded) -> bool {
    match d.kind {
        Lowering::Push | Lowering::Call | Lowering::CallIndirect => true,
        Lowering::Pop | Lowering::Ret | Lowering::Leave => false,
        _ => d.memory == Some(true),
    }
}

/// Returns true if the instruction may change mappings, permissions or segment bases, or leaves the block.
fn is_barrier(d: &Decoded) -> bool {
    !matches!(
        d.kind,
        Lowering::Nop
            | Lowering::Copy
            | Lowering::CopyFp
            | Lowering::CopyAligned
            | Lowering::CopyFpAligned
            | Lowering::Lea
            | Lowering::Push
            | Lowering::Pop
            | Lowering::Leave
            | Lowering::Div
            | Lowering::Idiv
            | Lowering::BitString
            | Lowering::Gather
            | Lowering::MaskedMove
            | Lowering::FromSegment
            | Lowering::Rdtsc
            | Lowering::Rdpmc
            | Lowering::Jcc
            | Lowering::Jmp
            | Lowering::Followed
            | Lowering::Call
            | Lowering::Ret
    ) && d.onto.is_none()
}

/// Returns what an access at an offset in its group has to be aligned to.
fn align_of(d: &Decoded, offset: i64) -> Align {
    let to = match d.kind {
        Lowering::CopyFpAligned => d.access,
        _ => 1,
    };
    Align {
        to,
        at: offset.rem_euclid(to.into()) as u8,
    }
}
