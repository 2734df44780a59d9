//! [`Exec`]: the machine as a handler uses it, and what a handler returns.
//!
//! Memory accesses go through [`Exec::linear`] (segmentation, SDM vol. 3, 5.3; canonical addresses, vol. 1, 3.3.7.1;
//! alignment, vol. 3, 6.15 #AC) and then through the bus. The common case takes one mask test and one comparison:
//! [`Exec::refresh`] says what these stand for.

use core::sync::atomic::{Ordering, fence};

use x86_cpu::{
    Access, BreakpointKind, CpuState, Exception, Fault, Feature, GuestBus, Privilege, Word,
};
use x86_defs::{
    control::{cr0, cr4},
    dr,
    paging::PAGE_SIZE,
    reg, rflags,
    segment::Segment,
    vector,
};

use x86_native::Native;

use crate::{
    Insn, Int, LazyFlags,
    registers::{reg_read, reg_write},
    remainder::Remainder,
};

/// Where execution continues after an instruction that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// At the next instruction in memory.
    Next,
    /// RIP was set; the block ends. Mode, segments or privilege may have changed too.
    Jump,
    /// RIP was set by a near branch, and nothing else changed. Only [`Exec::branch_to`] returns this.
    Near,
    /// At the next instruction in memory; the block ends, because something that decoding or execution relies on may
    /// have changed (mode, mapping, segments, code, shadow, TF, IF, AC, debug registers).
    EndBlock,
    /// One iteration of a `rep` string instruction is complete and more follow: RIP stays. Returned instead of looping
    /// when single-stepping, or when the bus must be polled.
    Again,
}

/// Why an instruction did not complete, or completed and left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Deliver this exception; RIP still points at the instruction. (Traps such as INT n and single step are delivered
    /// by their handlers and the run loop.)
    Exception(Exception),
    /// The bus has recorded an exit for the VMM. The instruction is restarted afterwards.
    Exit,
    /// HLT completed; RIP is after it.
    Halt,
    /// Delivery ended in a triple fault.
    TripleFault,
}

impl From<Exception> for Stop {
    #[inline(always)]
    fn from(e: Exception) -> Self {
        Self::Exception(e)
    }
}

impl From<Fault> for Stop {
    #[inline(always)]
    fn from(f: Fault) -> Self {
        match f {
            Fault::Exception(e) => Self::Exception(e),
            Fault::Exit => Self::Exit,
        }
    }
}

/// A handler's result.
pub type Step = Result<Flow, Stop>;

/// The machine as a handler sees it.
///
/// `cpu.rip()` is the address of the executing instruction throughout.
#[derive(Debug)]
pub struct Exec<'a, B> {
    /// Registers. `cpu.rflags`' arithmetic bits are stale here: use [`Exec::rflags`].
    pub cpu: &'a mut CpuState,
    /// The connection to memory, devices and the VMM.
    pub bus: &'a mut B,
    /// Arithmetic flags.
    pub flags: LazyFlags,
    /// Executes FP and SIMD instructions on the host; owned by [`crate::Interp`].
    pub native: &'a mut Native,
    /// Bit per segment: its base is 0, and comparing the offset with `span` is the only check.
    flat: u8,
    /// Added to a linear address before it is compared with `span`.
    bias: u64,
    /// Limit of flat accesses, after adding `bias`, that need no further check.
    span: u64,
    /// The bits of SP that stack operations use.
    stack_mask: u64,
    /// The bits of RIP that exist in the current mode.
    rip_mask: u64,
    /// Alignment is checked: CR0.AM, RFLAGS.AC and CPL 3.
    alignment_check: bool,
    /// A data or I/O breakpoint is enabled in DR7.
    watch: bool,
    /// DR6 bits of the data breakpoints that the current instruction hit.
    pub(crate) watch_hits: u64,
    /// Execute one iteration of a `rep` instruction, not the whole.
    pub(crate) single_step: bool,
    /// The remainder of the instruction that ended in [`Stop::Exit`], if a register write completes it.
    pub(crate) remainder: Remainder,
}

impl<'a, B: GuestBus> Exec<'a, B> {
    /// Makes the machine, with the flags of `cpu.rflags`. The caller still has to call [`Self::refresh`]; so the object
    /// is constructed in place.
    /// so it is made in its place.
    #[inline(always)]
    pub(crate) fn new(cpu: &'a mut CpuState, bus: &'a mut B, native: &'a mut Native) -> Self {
        let mut flags = LazyFlags::default();
        flags.set(cpu.rflags);
        Self {
            cpu,
            bus,
            flags,
            native,
            flat: 0,
            bias: 0,
            span: 0,
            stack_mask: 0,
            rip_mask: 0,
            alignment_check: false,
            watch: false,
            watch_hits: 0,
            single_step: false,
            remainder: Remainder::NOTHING,
        }
    }

    /// Recomputes what is cached of mode, segments, privilege, CR0, CR4, RFLAGS.AC and DR7. The run loop calls this
    /// after every instruction that returns [`Flow::Jump`] or [`Flow::EndBlock`], and after event delivery. A handler
    /// that changes one of these and then accesses memory through [`Exec::linear`] calls this itself.
    pub fn refresh(&mut self) {
        let cpu = &*self.cpu;
        self.alignment_check =
            cpu.cpl == 3 && cpu.cr0 & cr0::AM != 0 && cpu.rflags & rflags::AC != 0;
        self.watch = cpu.effective_dr7() & dr::DR7_ENABLES != 0;
        if cpu.is_64bit() {
            self.flat = 1 << reg::ES | 1 << reg::CS | 1 << reg::SS | 1 << reg::DS;
            self.bias = 1 << 47;
            self.span = (1 << 48) - 64;
            self.stack_mask = u64::MAX;
            self.rip_mask = u64::MAX;
        } else {
            self.flat = 0;
            for (i, s) in cpu.seg.iter().enumerate() {
                // A present, writable, expand-up data segment.
                let plain = s.attr.0 & 0x1009e == 0x92;
                if plain && s.base == 0 && s.limit == u32::MAX {
                    self.flat |= 1 << i;
                }
            }
            self.bias = 0;
            self.span = (1 << 32) - 64;
            self.stack_mask = if cpu.seg[reg::SS].attr.is_big() {
                0xffff_ffff
            } else {
                0xffff
            };
            self.rip_mask = 0xffff_ffff;
        }
        if self.alignment_check || self.watch || cpu.cr4 & cr4::LA57 != 0 {
            self.span = 0;
        }
    }

    /// Returns RFLAGS with exact arithmetic flags.
    #[inline]
    pub fn rflags(&self) -> u64 {
        self.cpu.rflags & !rflags::ARITH | self.flags.get()
    }
    /// Sets RFLAGS; the caller has applied masks and privilege rules, and
    /// returns [`Flow::EndBlock`] or [`Flow::Jump`] if TF, IF, AC or VM changed.
    #[inline]
    pub fn set_rflags(&mut self, v: u64) {
        self.cpu.rflags = v | rflags::FIXED1;
        self.flags.set(v);
    }
    /// Stores the exact arithmetic flags in `cpu.rflags`.
    #[inline]
    pub fn sync_flags(&mut self) {
        self.cpu.rflags = self.rflags();
    }

    /// Ends a serialising instruction: it is a barrier (SDM vol. 3, 9.3). Instructions are executed in order, so nothing
    /// else is left to do.
    #[inline]
    pub(crate) fn serialize(&self) {
        fence(Ordering::SeqCst);
    }

    /// Reads a general register as `T`; with `u8`, numbers from 32 are AH, CH, DH, BH.
    #[inline(always)]
    pub fn reg_read<T: Int>(&self, r: u8) -> T {
        reg_read(self.cpu, r)
    }
    /// Writes a general register: 32 bits clear the upper half, 8 and 16 keep the rest.
    #[inline(always)]
    pub fn reg_write<T: Int>(&mut self, r: u8, v: T) {
        reg_write(self.cpu, r, v);
    }

    /// Returns the offset of the memory operand, cut to the address size.
    #[inline(always)]
    pub fn effective_address(&self, insn: &Insn<B>) -> u64 {
        let base = self.cpu.gpr[usize::from(insn.base) & 31];
        let index = self.cpu.gpr[usize::from(insn.index) & 31];
        let ea = base
            .wrapping_add(index << (insn.scale & 3))
            .wrapping_add(insn.disp);
        ea & u64::MAX >> (insn.addr_shift & 63)
    }

    /// Returns the linear address of `len` bytes at an offset in a segment (ES 0 … GS 5), after all checks of
    /// segmentation, canonicality and alignment.
    #[inline(always)]
    pub fn linear(&mut self, seg: u8, offset: u64, len: u64, access: Access) -> Result<u64, Stop> {
        if self.flat >> (seg & 7) & 1 != 0
            && offset.wrapping_add(self.bias) < self.span
            && len <= 64
        {
            return Ok(offset);
        }
        self.linear_checked(seg, offset, len, access)
    }

    /// Like [`Self::linear`], without the alignment check: for elements that a mask selects.
    pub(crate) fn linear_unaligned(
        &mut self,
        seg: u8,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<u64, Stop> {
        let checks = core::mem::take(&mut self.alignment_check);
        let gva = self.linear(seg, offset, len, access);
        self.alignment_check = checks;
        gva
    }

    #[inline(never)]
    fn linear_checked(
        &mut self,
        seg: u8,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<u64, Stop> {
        let fault = if usize::from(seg) == reg::SS {
            Exception::SS0
        } else {
            Exception::GP0
        };
        let segment = &self.cpu.seg[usize::from(seg).min(5)];
        let extent = len.max(1) - 1;
        let gva = if self.cpu.is_64bit() {
            let base = if usize::from(seg) >= reg::FS {
                segment.base
            } else {
                0
            };
            let gva = base.wrapping_add(offset);
            if !self.cpu.is_canonical(gva) || !self.cpu.is_canonical(gva.wrapping_add(extent)) {
                return Err(fault.into());
            }
            gva
        } else {
            let typed = self.cpu.is_protected() && !self.cpu.is_v86();
            if !segment_allows(segment, offset, extent, access, typed) {
                return Err(fault.into());
            }
            segment.base.wrapping_add(offset) & 0xffff_ffff
        };
        // SDM vol. 3, table 6-7. Vectors of 16 and 32 bytes that need not be aligned are left to the processor: AMD's
        // check them, Intel's do not.
        let alignment = match len {
            2 | 4 | 8 => extent,
            16 | 32 if self.cpu.features.has(Feature::Amd) => 15,
            10 => 7,
            // The x87 environment, and the state that begins with it.
            14 | 94 => 1,
            28 | 108 => 3,
            _ => 0,
        };
        if self.alignment_check && gva & alignment != 0 {
            return Err(Exception::with_code(vector::AC, 0).into());
        }
        self.note_access(gva, len, access);
        Ok(gva)
    }

    /// Records which data breakpoints an access of the program's hits; the run loop raises #DB
    /// after the instruction (SDM vol. 3, 18.2.4).
    #[inline(always)]
    pub(crate) fn note_access(&mut self, gva: u64, len: u64, access: Access) {
        if self.watch {
            self.note_watchpoints(gva, len, access);
        }
    }

    fn note_watchpoints(&mut self, gva: u64, len: u64, access: Access) {
        self.note_hits(gva, len, |kind| match access {
            Access::Write => matches!(kind, BreakpointKind::Write | BreakpointKind::Access),
            Access::Read => kind == BreakpointKind::Access,
            Access::Fetch => false,
        });
    }

    /// Records the I/O breakpoints that a port access hits (CR4.DE).
    pub fn note_io_watchpoints(&mut self, port: u16, len: u64) {
        if self.watch && self.cpu.cr4 & cr4::DE != 0 {
            self.note_hits(port.into(), len, |kind| kind == BreakpointKind::Io);
        }
    }

    fn note_hits(&mut self, at: u64, len: u64, is_wanted: impl Fn(BreakpointKind) -> bool) {
        for n in 0..4 {
            if let Some(b) = self.cpu.breakpoint(n)
                && is_wanted(b.kind)
                && b.covers(at, len)
            {
                self.watch_hits |= 1 << n;
            }
        }
    }

    /// Returns true if a data breakpoint is in the page of `gva`.
    pub(crate) fn watches_page_of(&self, gva: u64) -> bool {
        let page = Some(gva & !(PAGE_SIZE - 1));
        self.watch && self.cpu.breakpoints().any(|b| b.watched_page() == page)
    }

    /// Returns the linear address of the memory operand.
    #[inline(always)]
    pub fn mem_linear(&mut self, insn: &Insn<B>, len: u64, access: Access) -> Result<u64, Stop> {
        let offset = self.effective_address(insn);
        self.linear(insn.seg, offset, len, access)
    }
    /// Reads the memory operand.
    #[inline(always)]
    pub fn mem_read<T: Word>(&mut self, insn: &Insn<B>) -> Result<T, Stop> {
        let gva = self.mem_linear(insn, T::SIZE as u64, Access::Read)?;
        Ok(self.bus.read(self.cpu, gva, Privilege::Current)?)
    }
    /// Writes the memory operand.
    #[inline(always)]
    pub fn mem_write<T: Word>(&mut self, insn: &Insn<B>, value: T) -> Result<(), Stop> {
        let gva = self.mem_linear(insn, T::SIZE as u64, Access::Write)?;
        Ok(self.bus.write(self.cpu, gva, value, Privilege::Current)?)
    }
    /// Replaces the memory operand by `f` of it, atomically with a LOCK prefix;
    /// returns the old value. `f` may be called more than once.
    #[inline(always)]
    pub fn mem_rmw<T: Word>(&mut self, insn: &Insn<B>, f: impl FnMut(T) -> T) -> Result<T, Stop> {
        let gva = self.mem_linear(insn, T::SIZE as u64, Access::Write)?;
        let lock = insn.prefix & Insn::<B>::LOCK != 0;
        Ok(self.bus.rmw(self.cpu, gva, Privilege::Current, lock, f)?)
    }
    /// Reads `T` at an offset in a segment.
    #[inline(always)]
    pub fn read_at<T: Word>(&mut self, seg: u8, offset: u64) -> Result<T, Stop> {
        let gva = self.linear(seg, offset, T::SIZE as u64, Access::Read)?;
        Ok(self.bus.read(self.cpu, gva, Privilege::Current)?)
    }
    /// Writes `T` at an offset in a segment.
    #[inline(always)]
    pub fn write_at<T: Word>(&mut self, seg: u8, offset: u64, value: T) -> Result<(), Stop> {
        let gva = self.linear(seg, offset, T::SIZE as u64, Access::Write)?;
        Ok(self.bus.write(self.cpu, gva, value, Privilege::Current)?)
    }

    /// Returns the stack pointer, cut to the stack's size.
    #[inline(always)]
    pub fn sp(&self) -> u64 {
        self.cpu.gpr[reg::RSP] & self.stack_mask
    }
    /// Returns the offset `delta` bytes from the top of the stack, wrapped to the stack's size.
    #[inline(always)]
    pub fn sp_plus(&self, delta: u64) -> u64 {
        self.cpu.gpr[reg::RSP].wrapping_add(delta) & self.stack_mask
    }
    /// Sets SP, ESP or RSP, depending on the stack's size.
    #[inline(always)]
    pub fn set_sp(&mut self, sp: u64) {
        self.cpu.gpr[reg::RSP] = if self.stack_mask == 0xffff {
            self.cpu.gpr[reg::RSP] & !0xffff | sp & 0xffff
        } else {
            sp & self.stack_mask
        };
    }
    /// Pushes `value`; `T` is the operand size. RSP is unchanged on failure.
    #[inline(always)]
    pub fn push<T: Word>(&mut self, value: T) -> Result<(), Stop> {
        let sp = self.sp_plus((T::SIZE as u64).wrapping_neg());
        self.write_at(reg::SS as u8, sp, value)?;
        self.set_sp(sp);
        Ok(())
    }
    /// Pops; `T` is the operand size. RSP is unchanged on failure.
    #[inline(always)]
    pub fn pop<T: Word>(&mut self) -> Result<T, Stop> {
        let value = self.read_at(reg::SS as u8, self.sp())?;
        self.set_sp(self.sp_plus(T::SIZE as u64));
        Ok(value)
    }

    /// True if RIP has 64 bits.
    pub(crate) fn has_wide_rip(&self) -> bool {
        self.rip_mask == u64::MAX
    }
    /// Address of the following instruction.
    #[inline(always)]
    pub fn next_rip(&self, insn: &Insn<B>) -> u64 {
        self.cpu.rip().wrapping_add(u64::from(insn.len)) & self.rip_mask
    }
    /// Near branch: checks the target (canonical, or within CS's limit) and sets RIP.
    /// The caller has cut the target to the operand size.
    #[inline(always)]
    pub fn branch_to(&mut self, rip: u64) -> Step {
        self.check_branch(rip)?;
        self.cpu.set_rip(rip);
        Ok(Flow::Near)
    }
    /// Makes the checks of [`Self::branch_to`] alone.
    #[inline(always)]
    pub fn check_branch(&self, rip: u64) -> Result<(), Stop> {
        let ok = if self.rip_mask == u64::MAX {
            rip.wrapping_add(1 << 47) < 1 << 48 || self.cpu.is_canonical(rip)
        } else {
            rip <= u64::from(self.cpu.seg[reg::CS].limit)
        };
        if ok {
            Ok(())
        } else {
            Err(Exception::GP0.into())
        }
    }
    /// True if TF, RF, VIP, breakpoints or a shadow require execution of one instruction at a time.
    pub(crate) fn needs_stepping(&self) -> bool {
        self.watch || self.needs_iterations()
    }
    /// True if TF, RF, VIP or a shadow require execution of one instruction, or one iteration, at a time.
    pub(crate) fn needs_iterations(&self) -> bool {
        self.cpu.rflags & (rflags::TF | rflags::RF | rflags::VIP) != 0
            || self.cpu.shadow != x86_cpu::Shadow::None
    }
    /// True if a `rep` instruction may do many iterations in one bus call, in pages that are not watched, because nothing
    /// must be checked at each.
    pub(crate) fn may_bulk(&self) -> bool {
        !(self.single_step || self.alignment_check)
    }
    /// True if a debugger, or the guest's own debugging, sees every iteration.
    pub(crate) fn is_stepped(&self) -> bool {
        self.watch || self.cpu.rflags & rflags::TF != 0
    }
    /// True if the segment has no offsets but those up to its limit.
    pub(crate) fn is_expand_up(&self, seg: u8) -> bool {
        let attr = self.cpu.seg[usize::from(seg).min(5)].attr;
        self.cpu.is_64bit() || attr.is_code() || !attr.is_conforming_or_expand_down()
    }
    /// The segment's largest offset.
    pub(crate) fn limit(&self, seg: u8) -> u64 {
        if self.cpu.is_64bit() {
            u64::MAX
        } else {
            self.cpu.seg[usize::from(seg).min(5)].limit.into()
        }
    }
    /// Returns the DR6 bits of the instruction breakpoints at a linear address (SDM vol. 3, 18.2.4).
    pub(crate) fn code_breakpoints(&self, gva: u64) -> u64 {
        let is_hit = |n: &usize| {
            let breakpoint = self.cpu.breakpoint(*n);
            breakpoint.is_some_and(|b| b.kind == BreakpointKind::Execute && b.at == gva)
        };
        (0..4).filter(is_hit).fold(0, |hits, n| hits | 1 << n)
    }
    /// Linear address of an offset in CS.
    pub(crate) fn code_linear(&self, rip: u64) -> u64 {
        if self.rip_mask == u64::MAX {
            rip
        } else {
            self.cpu.seg[reg::CS].base.wrapping_add(rip) & 0xffff_ffff
        }
    }
    /// Checks that `len` code bytes at `rip` are canonical, or within CS's limit.
    pub(crate) fn check_fetch(&self, rip: u64, len: u64) -> Result<(), Stop> {
        let last = rip.wrapping_add(len.max(1) - 1);
        if self.rip_mask == u64::MAX && !self.cpu.is_canonical(last) {
            return Err(Exception::GP0.into());
        }
        self.check_branch(rip)?;
        if self.rip_mask != u64::MAX && last > u64::from(self.cpu.seg[reg::CS].limit) {
            return Err(Exception::GP0.into());
        }
        Ok(())
    }
}

/// Segment type and limit checks outside 64-bit mode (SDM vol. 3, 5.3, 5.5).
/// `extent` is the length less one; real and v8086 mode have no type check.
fn segment_allows(s: &Segment, offset: u64, extent: u64, access: Access, typed: bool) -> bool {
    let attr = s.attr;
    if typed {
        let allowed = !attr.is_unusable()
            && match access {
                Access::Write => !attr.is_code() && attr.is_readable_or_writable(),
                Access::Read => !attr.is_code() || attr.is_readable_or_writable(),
                Access::Fetch => true,
            };
        if !allowed {
            return false;
        }
    }
    let last = offset.wrapping_add(extent);
    if !attr.is_code() && attr.is_conforming_or_expand_down() {
        let top = if attr.is_big() { 0xffff_ffff } else { 0xffff };
        offset > u64::from(s.limit) && last <= top && offset <= last
    } else {
        last <= u64::from(s.limit) && offset <= last
    }
}
