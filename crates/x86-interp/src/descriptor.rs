//! Segment and gate descriptors in memory (SDM vol. 3, 3.4.5, 3.5 and 5.8).

use x86_cpu::{CpuState, Exception, GuestBus, Privilege};
use x86_defs::segment::{Attr, Segment};

use crate::{Exec, Stop};

/// TI bit of a selector: the descriptor is in the LDT.
const TI: u16 = 4;

/// Returns the selector's part of an error code: index and TI.
pub(crate) const fn selector_code(selector: u16) -> u16 {
    selector & !3
}

/// True if the selector is null whatever its RPL.
pub(crate) const fn is_null(selector: u16) -> bool {
    selector & !3 == 0
}

/// Requested privilege level.
pub(crate) const fn rpl(selector: u16) -> u8 {
    (selector & 3) as u8
}

/// A descriptor as fetched, with the linear address it came from.
///
/// ```text
/// lo  63      56 55  52 51   48 47      40 39            16 15          0
///    [base 31-24|G D L A|lim19-16|P DPL S T|base 23-0      |limit 15-0  ]
/// hi: base 63-32 (gates: offset 63-32) of 16-byte system descriptors
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// First eight bytes.
    pub(crate) lo: u64,
    /// Second eight bytes of a long-mode system descriptor, else zero.
    pub(crate) hi: u64,
    /// Linear address of `lo`.
    pub(crate) gva: u64,
}

impl Descriptor {
    /// Access rights.
    pub(crate) const fn attr(&self) -> Attr {
        Attr((self.lo >> 40) as u32 & 0xf0ff)
    }
    /// Limit in bytes.
    pub(crate) const fn limit(&self) -> u32 {
        let raw = (self.lo & 0xffff | self.lo >> 32 & 0xf_0000) as u32;
        if self.attr().0 & Attr::G != 0 {
            raw << 12 | 0xfff
        } else {
            raw
        }
    }
    /// Base address.
    pub(crate) const fn base(&self) -> u64 {
        self.lo >> 16 & 0xff_ffff | self.lo >> 32 & 0xff00_0000 | self.hi << 32
    }
    /// Returns the segment register that `selector` loads: with the accessed bit set.
    pub(crate) const fn segment(&self, selector: u16) -> Segment {
        let attr = self.attr();
        Segment {
            base: self.base(),
            limit: self.limit(),
            // Only code and data segments (S) have an accessed bit.
            attr: Attr(attr.0 | (attr.0 & Attr::S) >> 4),
            selector,
        }
    }
    /// True if the accessed bit of a code or data segment is set.
    pub(crate) const fn is_accessed(&self) -> bool {
        self.lo >> 40 & 1 != 0
    }
    /// A gate's target selector.
    pub(crate) const fn gate_selector(&self) -> u16 {
        (self.lo >> 16) as u16
    }
    /// A gate's target offset: 64, 32 or (as its type says) 16 bits.
    pub(crate) const fn gate_offset(&self) -> u64 {
        let low = self.lo & 0xffff;
        // Bit 3 of the type distinguishes 32-bit and 64-bit gates from 16-bit ones.
        if self.attr().kind() & 8 != 0 {
            low | self.lo >> 32 & 0xffff_0000 | self.hi << 32
        } else {
            low
        }
    }
    /// A call gate's parameter count.
    pub(crate) const fn gate_parameters(&self) -> u32 {
        (self.lo >> 32) as u32 & 0x1f
    }
    /// A long-mode interrupt gate's IST index.
    pub(crate) const fn gate_ist(&self) -> u64 {
        self.lo >> 32 & 7
    }
}

/// Returns the linear address of a descriptor, if all its `len` bytes are within the table.
pub(crate) fn locate(cpu: &CpuState, selector: u16, len: u32) -> Option<u64> {
    let (base, limit) = if selector & TI != 0 {
        if cpu.ldtr.attr.is_unusable() {
            return None;
        }
        (cpu.ldtr.base, cpu.ldtr.limit)
    } else {
        (cpu.gdtr.base, u32::from(cpu.gdtr.limit))
    };
    let offset = u32::from(selector & !7);
    (offset + (len - 1) <= limit).then(|| base.wrapping_add(u64::from(offset)))
}

impl<B: GuestBus> Exec<'_, B> {
    /// Fetches a descriptor; `vector`(selector) if it is outside its table.
    pub(crate) fn descriptor(&mut self, selector: u16, vector: u8) -> Result<Descriptor, Stop> {
        let Some(gva) = locate(self.cpu, selector, 8) else {
            return Err(Exception::with_code(vector, selector_code(selector)).into());
        };
        let gva = self.system_gva(gva);
        let lo = self.bus.read::<u64>(self.cpu, gva, Privilege::System)?;
        Ok(Descriptor { lo, hi: 0, gva })
    }

    /// Adds the second half of a system descriptor in long mode.
    pub(crate) fn widen(
        &mut self,
        d: Descriptor,
        selector: u16,
        vector: u8,
    ) -> Result<Descriptor, Stop> {
        if !self.cpu.is_long_mode() {
            return Ok(d);
        }
        let fault = Exception::with_code(vector, selector_code(selector));
        if locate(self.cpu, selector, 16).is_none() {
            return Err(fault.into());
        }
        let hi = self
            .bus
            .read::<u64>(self.cpu, d.gva.wrapping_add(8), Privilege::System)?;
        // The second half's type field must be zero (SDM vol. 3, 5.8.3.1).
        if hi >> 40 & 0x1f != 0 {
            return Err(fault.into());
        }
        Ok(Descriptor {
            hi: hi & 0xffff_ffff,
            ..d
        })
    }

    /// Sets a code or data descriptor's accessed bit in memory.
    pub(crate) fn set_accessed(&mut self, d: &Descriptor) -> Result<(), Stop> {
        if !d.is_accessed() {
            self.bus.rmw::<u8>(
                self.cpu,
                d.gva.wrapping_add(5),
                Privilege::System,
                true,
                |b| b | 1,
            )?;
        }
        Ok(())
    }

    /// Sets or clears the busy bit of a TSS descriptor (bit 1 of its type).
    pub(crate) fn set_busy(&mut self, gva: u64, busy: bool) -> Result<(), Stop> {
        self.bus.rmw::<u8>(
            self.cpu,
            gva.wrapping_add(5),
            Privilege::System,
            true,
            |b| if busy { b | 2 } else { b & !2 },
        )?;
        Ok(())
    }

    /// Cuts a linear address of a system structure to 32 bits outside of long mode.
    pub(crate) fn system_gva(&self, gva: u64) -> u64 {
        if self.cpu.is_long_mode() {
            gva
        } else {
            gva & 0xffff_ffff
        }
    }
}
