//! Segment registers and descriptors (SDM vol. 3, 3.4).

/// A segment register: the visible selector and the cached descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, already scaled by G, inclusive.
    pub limit: u32,
    /// Descriptor bits as in [`Attr`].
    pub attr: Attr,
    /// Visible selector.
    pub selector: u16,
}

/// Access rights: descriptor bits 40–47 in bits 0–7 and 52–55 in bits 12–15,
/// as in the VMCS (SDM vol. 3, 25.4.1), with bit 16 = unusable.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr(pub u32);

impl Attr {
    /// Type field, four bits.
    pub const TYPE: u32 = 0xf;
    /// Code or data (not system).
    pub const S: u32 = 1 << 4;
    /// Descriptor privilege level.
    pub const DPL: u32 = 3 << 5;
    /// Present.
    pub const P: u32 = 1 << 7;
    /// Available to software.
    pub const AVL: u32 = 1 << 12;
    /// 64-bit code.
    pub const L: u32 = 1 << 13;
    /// Default size 32.
    pub const DB: u32 = 1 << 14;
    /// Limit in pages.
    pub const G: u32 = 1 << 15;
    /// Null selector was loaded: the segment may not be used.
    pub const UNUSABLE: u32 = 1 << 16;

    /// A flat segment of 64-bit code at privilege level 0, accessed.
    pub const FLAT_CODE64: u32 = 0xa09b;
    /// A flat segment of data at privilege level 0, writable and accessed.
    pub const FLAT_DATA: u32 = 0xc093;

    /// Type field.
    pub const fn kind(self) -> u32 {
        self.0 & Self::TYPE
    }
    /// DPL.
    pub const fn dpl(self) -> u8 {
        ((self.0 & Self::DPL) >> 5) as u8
    }
    /// Code or data, not system.
    pub const fn is_s(self) -> bool {
        self.0 & Self::S != 0
    }
    /// Present.
    pub const fn is_present(self) -> bool {
        self.0 & Self::P != 0
    }
    /// Code segment (given S).
    pub const fn is_code(self) -> bool {
        self.0 & 0x18 == 0x18
    }
    /// Conforming code, or expand-down data.
    pub const fn is_conforming_or_expand_down(self) -> bool {
        self.0 & 4 != 0
    }
    /// Readable code, or writable data.
    pub const fn is_readable_or_writable(self) -> bool {
        self.0 & 2 != 0
    }
    /// 64-bit code segment.
    pub const fn is_long(self) -> bool {
        self.0 & Self::L != 0
    }
    /// Default operand size 32, or big stack.
    pub const fn is_big(self) -> bool {
        self.0 & Self::DB != 0
    }
    /// A null selector is loaded.
    pub const fn is_unusable(self) -> bool {
        self.0 & Self::UNUSABLE != 0
    }
}

/// System descriptor types (SDM vol. 3, table 3-2).
pub mod system {
    /// 16-bit TSS, available.
    pub const TSS16_AVAILABLE: u32 = 1;
    /// LDT.
    pub const LDT: u32 = 2;
    /// 16-bit TSS, busy.
    pub const TSS16_BUSY: u32 = 3;
    /// 16-bit call gate.
    pub const CALL_GATE16: u32 = 4;
    /// Task gate.
    pub const TASK_GATE: u32 = 5;
    /// 16-bit interrupt gate.
    pub const INTERRUPT_GATE16: u32 = 6;
    /// 16-bit trap gate.
    pub const TRAP_GATE16: u32 = 7;
    /// 32-bit (64-bit in long mode) TSS, available.
    pub const TSS32_AVAILABLE: u32 = 9;
    /// 32-bit (64-bit in long mode) TSS, busy.
    pub const TSS32_BUSY: u32 = 11;
    /// 32/64-bit call gate.
    pub const CALL_GATE32: u32 = 12;
    /// 32/64-bit interrupt gate.
    pub const INTERRUPT_GATE32: u32 = 14;
    /// 32/64-bit trap gate.
    pub const TRAP_GATE32: u32 = 15;
}

/// GDTR or IDTR.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorTable {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, inclusive.
    pub limit: u16,
}
