//! [`Stack`]: a stack that frames are pushed to and popped from.
//!
//! Its pointer is its own: RSP changes when the caller commits it, after the
//! last access that can fault.

use x86_cpu::{Access, CpuState, Exception, GuestBus, Privilege};
use x86_defs::{reg, segment::Segment};

use crate::{Exec, Stop, segment::contains};

/// A stack segment and pointer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stack {
    /// SS. Ignored for addressing if `long`.
    pub(crate) ss: Segment,
    /// Stack pointer; only its low 16 or 32 bits matter outside 64-bit mode.
    pub(crate) rsp: u64,
    /// On whose behalf memory is accessed.
    pub(crate) who: Privilege,
    /// Flat 64-bit stack.
    pub(crate) long: bool,
    /// Raised when an access is outside the segment.
    pub(crate) fault: Exception,
}

impl Stack {
    /// The stack that PUSH and POP use now.
    pub(crate) fn current(cpu: &CpuState) -> Self {
        Self {
            ss: cpu.seg[reg::SS],
            rsp: cpu.gpr[reg::RSP],
            who: Privilege::Current,
            long: cpu.is_64bit(),
            fault: Exception::SS0,
        }
    }

    /// Bits of RSP that count: stack-address size (SDM vol. 1, 6.2.3).
    fn mask(&self) -> u64 {
        if self.long {
            u64::MAX
        } else if self.ss.attr.is_big() {
            0xffff_ffff
        } else {
            0xffff
        }
    }

    /// Moves the pointer.
    pub(crate) fn adjust(&mut self, by: u64) {
        let mask = self.mask();
        self.rsp = self.rsp & !mask | self.rsp.wrapping_add(by) & mask;
    }

    /// Linear address of `size` bytes at `above` bytes from the pointer.
    fn gva<B: GuestBus>(&self, ex: &Exec<'_, B>, above: u64, size: u8) -> Result<u64, Stop> {
        let size = u64::from(size);
        let offset = self.rsp.wrapping_add(above) & self.mask();
        if self.long {
            if !ex.cpu.is_canonical(offset) || !ex.cpu.is_canonical(offset.wrapping_add(size - 1)) {
                return Err(self.fault.into());
            }
            return Ok(offset);
        }
        if self.ss.attr.is_unusable() || !contains(&self.ss, offset, size) {
            return Err(self.fault.into());
        }
        Ok(self.ss.base.wrapping_add(offset) & 0xffff_ffff)
    }

    /// Pushes the low `size` (2, 4 or 8) bytes of `value`.
    pub(crate) fn push<B: GuestBus>(
        &mut self,
        ex: &mut Exec<'_, B>,
        size: u8,
        value: u64,
    ) -> Result<(), Stop> {
        let below = 0u64.wrapping_sub(u64::from(size));
        let gva = self.gva(ex, below, size)?;
        if self.who == Privilege::Current {
            ex.note_access(gva, size.into(), Access::Write);
        }
        match size {
            2 => ex.bus.write(ex.cpu, gva, value as u16, self.who)?,
            4 => ex.bus.write(ex.cpu, gva, value as u32, self.who)?,
            _ => ex.bus.write(ex.cpu, gva, value, self.who)?,
        }
        self.adjust(below);
        Ok(())
    }

    /// Reads `size` bytes at `above` bytes from the pointer, without popping.
    pub(crate) fn peek<B: GuestBus>(
        &self,
        ex: &mut Exec<'_, B>,
        above: u64,
        size: u8,
    ) -> Result<u64, Stop> {
        let gva = self.gva(ex, above, size)?;
        if self.who == Privilege::Current {
            ex.note_access(gva, size.into(), Access::Read);
        }
        Ok(match size {
            2 => u64::from(ex.bus.read::<u16>(ex.cpu, gva, self.who)?),
            4 => u64::from(ex.bus.read::<u32>(ex.cpu, gva, self.who)?),
            _ => ex.bus.read::<u64>(ex.cpu, gva, self.who)?,
        })
    }

    /// Pops `size` bytes, zero-extended.
    pub(crate) fn pop<B: GuestBus>(&mut self, ex: &mut Exec<'_, B>, size: u8) -> Result<u64, Stop> {
        let value = self.peek(ex, 0, size)?;
        self.adjust(u64::from(size));
        Ok(value)
    }

    /// Makes this the current stack pointer. With a stack-address size of 32 the
    /// upper half becomes zero, with 16 the rest of RSP stays.
    pub(crate) fn commit(&self, cpu: &mut CpuState) {
        let mask = self.mask();
        let rest = if mask == 0xffff {
            cpu.gpr[reg::RSP] & 0xffff_0000
        } else {
            0
        };
        cpu.gpr[reg::RSP] = self.rsp & mask | rest;
    }
}
