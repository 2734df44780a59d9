//! Memory operands: effective addresses, and probes of the software TLB.

use iced_x86::{Instruction, Register};
use mmu::l1::{ENTRIES, Half, PAGES_OFFSET, SITE_ENTRIES, STACK_OFFSET, site_entry};

use super::{Emit, Stub, Translator, Unsupported};
use crate::{
    asm::*,
    frame::requests::{RAISES, SITE_ENTRY_SHIFT, site},
    frame::words::*,
    ir::decoded::Decoded,
    ir::member::{Align, Member},
    ir::memory::{is_on_stack, raises_its_fault},
    ir::mode::Mode,
};

/// log2 of the size of a tag, and of a host page's address.
const SCALE: u8 = 3;

/// Returns the tag of the TLB entry that r13 selects.
pub(crate) fn tag(write: bool) -> Mem {
    let half = if write { Half::Write } else { Half::Read };
    Mem {
        disp: half.tags(),
        ..host_page()
    }
}

/// Returns the host page of that entry.
pub(crate) fn host_page() -> Mem {
    at(TLB, PAGES_OFFSET).plus(S1, SCALE)
}

/// Returns the word `m` of the TLB entry that [`select_entry`] has `by` select.
pub(crate) fn selected(m: Mem, by: Reg) -> Mem {
    Mem {
        index: m.index.map(|(_, scale)| (by, scale)),
        ..m
    }
}

/// Returns the tag of the stack's entry.
pub(crate) fn stack_tag() -> Mem {
    at(TLB, STACK_OFFSET)
}

/// Returns the host page of the stack's entry.
pub(crate) fn stack_page() -> Mem {
    at(TLB, STACK_OFFSET + 8)
}

/// Makes `to` select the TLB entry of the gva in `gva`.
pub(crate) fn select_entry(a: &mut Asm, to: Reg, gva: Reg) {
    if a.isa().bmi1 {
        // The low bits of the tables' address tell BEXTR which bits to extract.
        a.bextr(to, gva, TLB);
    } else {
        a.mov(to, gva);
        a.shift(true, 5, to, 12);
        a.alu_imm(false, Alu::And, to, (ENTRIES - 1) as i32);
    }
}

/// The TLB entry that a probe compares with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    Read,
    Write,
    /// The stack's entry, whatever the access does.
    Stack,
    /// A per-site entry.
    SiteEntry(u16),
    /// The entry for reads or for writes, for an address that is known at translation.
    Known {
        gva: i32,
        write: bool,
    },
}

impl Probe {
    /// Probes that there are templates of.
    pub(super) const COMMON: [Self; 3] = [Self::Read, Self::Write, Self::Stack];

    /// Returns the index of the probe among these.
    fn number(self) -> Option<usize> {
        Self::COMMON.iter().position(|p| *p == self)
    }

    pub(super) fn of(is_stack: bool, write: bool) -> Self {
        if is_stack { Self::Stack } else { write.into() }
    }

    /// Returns the entry's tag. Where the entry is one of the tables', r13 selects it.
    pub(super) fn tag(self) -> Mem {
        match self {
            Self::Stack => stack_tag(),
            Self::SiteEntry(n) => at(TLB, site_entry(n.into())),
            Self::Known { gva, write } => Mem {
                index: None,
                disp: tag(write).disp + entry_of(gva),
                ..tag(write)
            },
            _ => tag(self == Self::Write),
        }
    }

    /// Emits the probe for an address that is known: r14 becomes the host page, or the host address. Returns the branch
    /// to take on a miss.
    fn emit_known(self, a: &mut Asm, gva: i32, finds: Finds) -> usize {
        let page = a.cmp_mem_imm32(true, self.tag());
        a.patch32(page, gva & !0xfff);
        let from = a.jcc(cc::NE);
        let host = at(TLB, PAGES_OFFSET + entry_of(gva));
        if gva & 0xfff == 0 || finds == Finds::Parts {
            a.load(S0, host);
        } else {
            a.mov_imm(S0, (gva & 0xfff) as u64);
            a.alu(true, Alu::Add, S0, host);
        }
        from
    }

    /// Emits the probe. Returns where the limit is that it compares with, and the branch to take on a miss.
    pub(super) fn emit(self, a: &mut Asm, finds: Finds) -> [usize; 2] {
        let page = match self {
            Self::Stack => stack_page(),
            Self::SiteEntry(n) => at(TLB, site_entry(n.into()) + 8),
            _ => {
                select_entry(a, S1, S0);
                host_page()
            }
        };
        a.alu(true, Alu::Sub, S0, self.tag());
        // A placeholder for the limit: like all limits, 4096 needs more than an immediate of one byte.
        a.alu_imm(true, Alu::Cmp, S0, 4096);
        let limit = a.here() - 4;
        let from = a.jcc(cc::A);
        match finds {
            Finds::Address => a.alu(true, Alu::Add, S0, page),
            Finds::Parts => a.load(S1, page),
        }
        [limit, from]
    }

    /// Emits what a miss does: r13 becomes the site, and the trampoline is called. Returns the places of the site and
    /// of the call.
    pub(super) fn emit_miss(self, a: &mut Asm) -> [usize; 2] {
        if let Self::Known { gva, .. } = self {
            a.mov_signed(true, S0, gva);
        } else {
            a.alu(true, Alu::Add, S0, self.tag());
        }
        if let Self::SiteEntry(n) = self {
            a.mov_imm64(S1, site_entry_of(n));
            return [a.here() - 8, a.call()];
        }
        a.mov_imm(S1, 0);
        [a.here() - 4, a.call()]
    }
}

/// What a probe finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finds {
    /// The host address in r14.
    Address,
    /// The host page in r13 and the offset in r14, which the instruction adds: that is a cycle faster, and takes a step
    /// less on some processors. For an address that is known: the host page in r14.
    Parts,
}

/// How many per-site entries belong to one place in the code each. The rest are for accesses relative to FS and GS.
const OWN_SITE_ENTRIES: u16 = SITE_ENTRIES as u16 - 32;

/// Returns the per-site entry for reads at a constant distance from FS's or GS's base. All code shares it: threads' and
/// processors' own data is on few pages.
fn site_entry_of_segment(i: &Instruction) -> Option<u16> {
    let segment = i.memory_segment();
    let is_near = matches!(segment, Register::FS | Register::GS)
        && i.memory_base() == Register::None
        && i.memory_index() == Register::None;
    let page = (i.memory_displacement64() >> 12) as u16 % 8;
    is_near.then(|| OWN_SITE_ENTRIES + u16::from(segment == Register::GS) * 16 + page * 2)
}

/// Returns what stands above a [`site`] for a per-site entry: the entry's number.
const fn site_entry_of(n: u16) -> u64 {
    (n as u64) << SITE_ENTRY_SHIFT
}

/// Returns the offset of an address's entry among tags, which is that among host pages.
const fn entry_of(gva: i32) -> i32 {
    ((gva >> 12) & (ENTRIES as i32 - 1)) << SCALE
}

impl From<bool> for Probe {
    fn from(write: bool) -> Self {
        if write { Self::Write } else { Self::Read }
    }
}

impl Translator {
    /// Loads r14 with the linear address of the operand of `size` bytes, less `less`. Changes flags if there is a
    /// segment base to add.
    pub(super) fn address(&mut self, d: &Decoded, less: i32, size: u32) -> Emit {
        let i = &d.i;
        if self.input.mode.has(Mode::SEGMENTED) {
            return self.address_in_segment(d, size);
        }
        let base = i.memory_base();
        if base == Register::RIP {
            let disp = i32::try_from(i.memory_displacement64() as i64).map_err(|_| Unsupported)?;
            let disp = disp.checked_sub(less).ok_or(Unsupported)?;
            let disp = disp.checked_add(self.state.beyond).ok_or(Unsupported)?;
            self.asm.load(S0, SHORT_PAGE);
            self.asm.lea(S0, at(S0, disp));
        } else {
            let (m, wide) = self.effective(i, less, true)?;
            match (m.base, m.index, m.disp) {
                (Some(S0), None, 0) if wide => {}
                (Some(b), None, 0) if wide => self.asm.mov(S0, b),
                _ => self.asm.rm(wide, &[0x8d], S0, m),
            }
        }
        self.add_flat_base(i);
        Ok(())
    }

    /// Adds the base of FS or GS to the address in r14, if the memory operand is in one of these. Where segments are
    /// flat, no other has a base.
    pub(super) fn add_flat_base(&mut self, i: &Instruction) {
        if matches!(i.memory_segment(), Register::FS | Register::GS) {
            let n = i.memory_segment().number();
            self.asm.alu(self.input.long, Alu::Add, S0, segment_base(n));
        }
    }

    /// Returns the effective address less `less`, without RIP, as the operand of a LEA, and whether it has 64 bits. A
    /// register that lives in memory is loaded to r13, and a second one to r14; with `address`, r14 may be overwritten
    /// by the result.
    pub(super) fn effective(
        &mut self,
        i: &Instruction,
        less: i32,
        address: bool,
    ) -> Result<(Mem, bool), Unsupported> {
        let (base, index) = (i.memory_base(), i.memory_index());
        let wide = match (base, index) {
            (Register::EIP, _) => return Err(Unsupported),
            (Register::None, Register::None) => i.memory_displ_size() == 8,
            (Register::None, r) | (r, _) => r.is_gpr64(),
        };
        let disp = if wide {
            i32::try_from(i.memory_displacement64() as i64).map_err(|_| Unsupported)?
        } else {
            i.memory_displacement32() as i32
        };
        let disp = disp.checked_sub(less).ok_or(Unsupported)?;
        let number = |r: Register| (r != Register::None).then(|| r.number() as u8);
        let in_frame = |n: &u8| host_reg(*n).is_none();
        let (base, index) = (number(base), number(index));
        let mut scratch = S1;
        if self.state.cached.is_some()
            && index.filter(in_frame) == self.state.cached
            && base.is_some_and(|n| in_frame(&n))
        {
            // The index is in r13.
            scratch = S0;
        }
        if address && index.is_none() && disp == 0 && base != self.state.cached {
            // A register that is the whole address is loaded to r14 at once.
            scratch = S0;
        }
        let mut reg = |n: u8| {
            host_reg(n).unwrap_or_else(|| {
                let to = scratch;
                self.load_slot(to, n);
                scratch = if to == S1 { S0 } else { S1 };
                to
            })
        };
        let base = base.map(&mut reg);
        let index = index.map(|n| (reg(n), i.memory_index_scale().trailing_zeros() as u8));
        let operand = Mem {
            base,
            index,
            disp,
            gs: false,
        };
        Ok((operand, wide))
    }

    /// Turns the gva in r14 into a host address in r14, by the software TLB.
    pub(super) fn probe(&mut self, offset: u32, size: u32, write: bool) {
        self.probe_for(
            site(offset, size, write),
            size,
            write.into(),
            Finds::Address,
        );
    }

    /// Does the same for the word that RSP points to.
    pub(super) fn probe_stack(&mut self, offset: u32, write: bool) {
        let word = self.word() as u32;
        self.probe_for(
            site(offset, word, write),
            word,
            Probe::Stack,
            Finds::Address,
        );
    }

    /// Emits the probe for the only, or the first, access of the instruction.
    fn probe_first(
        &mut self,
        d: &Decoded,
        size: u32,
        write: bool,
        probe: Probe,
        finds: Finds,
    ) -> Mem {
        let raises = if raises_its_fault(d.kind, &d.i) {
            RAISES
        } else {
            0
        };
        self.probe_for(site(d.offset, size, write) | raises, size, probe, finds)
    }

    /// Emits a probe and its stub. Returns where the bytes are.
    pub(super) fn probe_for(&mut self, site: u32, size: u32, probe: Probe, finds: Finds) -> Mem {
        let (from, resume) = self.look_up(size, probe, finds);
        self.stubs.push(Stub::Refill {
            from,
            resume,
            site,
            probe,
            finds,
            cached: self.state.cached,
            ends: None,
        });
        match (finds, probe) {
            (Finds::Address, _) => at(S0, 0),
            (Finds::Parts, Probe::Known { gva, .. }) => at(S0, gva & 0xfff),
            (Finds::Parts, _) => at(S0, 0).plus(S1, 0),
        }
    }

    /// Returns a per-site entry in place of a probe with an index, if the instruction may have one.
    fn choose(&mut self, probe: Probe, i: &Instruction) -> Probe {
        // Reads and writes have different per-site entries, because an entry may allow only reads.
        let write = match probe {
            Probe::Read => 0,
            Probe::Write => 1,
            _ => return probe,
        };
        if let Some(n) = site_entry_of_segment(i) {
            return Probe::SiteEntry(n + write);
        }
        let Some(hot) = &mut self.input.hot else {
            return probe;
        };
        if self.state.position >= u128::BITS as usize || hot.without >> self.state.position & 1 != 0
        {
            return probe;
        }
        let next = &mut self.next.site_entry[usize::from(write)];
        let n = *next;
        *next = (n + 2) % OWN_SITE_ENTRIES;
        hot.site_entries.push((n, self.state.position as u8));
        Probe::SiteEntry(n)
    }

    /// Emits the probe of a group. r14 has the address of the group's first byte, unless that is known at translation.
    fn probe_group(&mut self, offset: u32, member: Member, probe: Probe) {
        if !matches!(probe, Probe::Known { .. })
            && let Some(from) = self.branch_if_misaligned(member.align)
        {
            self.state
                .tally
                .mark_left(self.stubs.len(), self.state.position);
            self.link(from, offset, false, true);
        }
        let (from, resume) = self.look_up(member.span, probe, Finds::Address);
        self.stubs.push(Stub::RefillGroup {
            from,
            resume,
            offset,
            member,
            probe,
            cached: self.state.cached,
        });
        if let Some(slot) = member.slot {
            self.asm.store(kept(slot), S0);
        }
        self.state.current = Some(member.group);
    }

    /// Emits a branch that is taken if the group whose address is in r14 is not aligned as its members have to be.
    /// `None` if none has to be aligned. May change r13.
    pub(super) fn branch_if_misaligned(&mut self, align: Align) -> Option<usize> {
        if align.to == 1 {
            return None;
        }
        let address = if align.at == 0 {
            S0
        } else {
            self.asm.lea(S1, at(S0, align.at.into()));
            self.state.cached = None;
            S1
        };
        self.test_alignment(address, align.to.into());
        Some(self.asm.jcc(cc::NE))
    }

    /// Emits the inline part of a probe. Returns the branch to take on a miss, and where to come back to.
    fn look_up(&mut self, size: u32, probe: Probe, finds: Finds) -> (usize, usize) {
        if let Probe::Known { gva, .. } = probe {
            let from = probe.emit_known(&mut self.asm, gva, finds);
            return (from, self.asm.here());
        }
        if finds == Finds::Parts || matches!(probe, Probe::Read | Probe::Write) {
            self.state.cached = None;
        }
        let [limit, from] = match probe.number() {
            Some(n) => self.asm.stamp(&self.templates.probe[finds as usize][n]),
            None => probe.emit(&mut self.asm, finds),
        };
        self.asm.patch32(limit, 4096 - size as i32);
        (from, self.asm.here())
    }

    /// Returns the address of `size` bytes at the memory operand less `less`, if it is known at translation, aligned as
    /// `align` says, and in one page.
    fn known(&self, i: &Instruction, less: i32, size: u32, align: Align) -> Option<i32> {
        let is_based = matches!(i.memory_segment(), Register::FS | Register::GS);
        if is_based || self.input.mode.has(Mode::SEGMENTED) {
            return None;
        }
        let less = i64::from(less);
        let disp = (i.memory_displacement64() as i64).checked_sub(less)?;
        let gva = match (i.memory_base(), i.memory_index()) {
            (Register::RIP, _) => self.constant(disp)?,
            (Register::None, Register::None) if i.memory_displ_size() == 8 => {
                i32::try_from(disp).ok()?
            }
            (Register::None, Register::None) => {
                let gva = i64::from(i.memory_displacement32()) - less;
                i32::try_from(gva).ok().filter(|gva| *gva >= 0)?
            }
            _ => return None,
        };
        let offset = gva as u32 & 0xfff;
        let is_aligned = (offset + u32::from(align.at)).is_multiple_of(align.to.into());
        (offset + size <= 4096 && is_aligned).then_some(gva)
    }

    /// Makes r14 the host address of the memory operand, which is read.
    pub(super) fn read_operand(&mut self, d: &Decoded, size: u32) -> Emit {
        let (offset, write) = (d.offset, false);
        let probe = match self.known(&d.i, 0, size, Align::NONE) {
            Some(gva) => Probe::Known { gva, write },
            None => {
                self.address(d, 0, size)?;
                self.choose(Probe::Read, &d.i)
            }
        };
        self.probe_for(site(offset, size, write), size, probe, Finds::Address);
        Ok(())
    }

    /// Emits what a miss of the probe does first. Returns the call, whose target is to be filled in.
    pub(super) fn miss(&mut self, probe: Probe, site: u32) -> usize {
        let [number, call] = match probe.number() {
            Some(n) => self.asm.stamp(&self.templates.miss[n]),
            None => probe.emit_miss(&mut self.asm),
        };
        self.asm.patch32(number, site as i32);
        call
    }

    /// Returns true if the group's pointer is known, so that the access needs no probe.
    fn is_found(&self, m: &Member) -> bool {
        let hoisted = self.state.hoisted.as_ref();
        let is_in_register = hoisted.is_some_and(|w| w.borrows_for(m.group));
        !m.first || self.state.holds && m.stays && !is_in_register
    }

    /// Loads the pointer of a group to r14 if it is not there. Returns how far from it the group's further access is.
    pub(super) fn follow(&mut self, member: Member) -> i32 {
        if self.state.current != Some(member.group) {
            let Some(slot) = member.slot else {
                unreachable!("the pointer of a group without a slot was lost");
            };
            self.asm.load(S0, kept(slot));
            self.state.current = Some(member.group);
        }
        member.offset
    }

    /// Returns where the memory operand is on the host: at r14 plus a constant, or, if `finds` is [`Finds::Parts`],
    /// plus r13.
    pub(super) fn operand(
        &mut self,
        d: &Decoded,
        size: u32,
        write: bool,
        aligned: bool,
        finds: Finds,
    ) -> Result<Mem, Unsupported> {
        if let Some(m) = d.member.filter(|m| self.is_found(m)) {
            return Ok(at(S0, self.follow(m)));
        }
        let disp = d.member.map_or(0, |m| m.offset);
        if self.access_hoisted(d) {
            return Ok(at(S0, disp));
        }
        self.spill_flags(d);
        let alone = Align {
            to: if aligned { size as u8 } else { 1 },
            at: 0,
        };
        let (bytes, writes, align, stack) = match d.member {
            Some(m) => (m.span, m.write, m.align, m.stack),
            None => (size, write, alone, is_on_stack(&d.i)),
        };
        let probe = match self.known(&d.i, disp, bytes, align) {
            Some(gva) => Probe::Known { gva, write: writes },
            None => {
                self.address(d, disp, bytes)?;
                if aligned && d.member.is_none() {
                    self.bail_if_misaligned(d.offset, size);
                }
                self.choose(Probe::of(stack, writes), &d.i)
            }
        };
        Ok(match d.member {
            Some(m) => {
                self.probe_group(d.offset, m, probe);
                at(S0, disp)
            }
            None => self.probe_first(d, size, write, probe, finds),
        })
    }

    /// Leaves for the interpreter if the address in r14 is not aligned. To be emitted before the probe, which may set
    /// the dirty flag of a page.
    pub(super) fn bail_if_misaligned(&mut self, offset: u32, size: u32) {
        self.test_alignment(S0, size);
        self.bail_if(cc::NE, offset);
    }

    /// Tests the low bits of an address in r13 or r14.
    fn test_alignment(&mut self, address: Reg, size: u32) {
        // test r13b or r14b, size - 1
        let modrm = 0xc0 | address & 7;
        self.asm.bytes(&[0x41, 0xf6, modrm, size as u8 - 1]);
    }

    /// Does what [`Self::operand`] does, for the word of the stack at `r + disp`. Returns how far from r14 the word is.
    pub(super) fn stack_slot(&mut self, d: &Decoded, r: Reg, disp: i32, write: bool) -> i32 {
        if let Some(m) = d.member.filter(|m| self.is_found(m)) {
            return self.follow(m);
        }
        let offset = d.member.map_or(0, |m| m.offset);
        if self.access_hoisted(d) {
            return offset;
        }
        self.spill_flags(d);
        self.stack_address(d.offset, r, disp - offset);
        match d.member {
            Some(m) => {
                let probe = self.choose(Probe::of(m.stack, m.write), &d.i);
                self.probe_group(d.offset, m, probe);
            }
            None => {
                let word = self.word() as u32;
                self.probe_first(d, word, write, Probe::Stack, Finds::Address);
            }
        }
        offset
    }
}
