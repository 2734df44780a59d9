//! [`LapicIrq`]: a message on the APIC bus, from an IOAPIC pin, an MSI or an ICR (SDM vol. 3, 11.6).

/// Destination that means "all" to a LAPIC in xAPIC mode.
pub const BROADCAST: u32 = 0xff;
/// Destination that means "all" to a LAPIC in x2APIC mode.
pub const X2APIC_BROADCAST: u32 = 0xffff_ffff;

/// Delivery mode of a message or an LVT entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DeliveryMode {
    /// To all destinations, with the vector.
    Fixed = 0,
    /// To one of the destinations.
    LowestPriority = 1,
    /// System-management interrupt.
    Smi = 2,
    /// Reserved by the SDM; KVM uses it to wake a halted vCPU (KVM_HC_KICK_CPU).
    RemoteRead = 3,
    /// Non-maskable interrupt; the vector is ignored.
    Nmi = 4,
    /// INIT.
    Init = 5,
    /// Start-up IPI; the vector is the page number.
    Sipi = 6,
    /// The vector comes from the PIC.
    ExtInt = 7,
}

impl DeliveryMode {
    /// Decodes the low three bits.
    pub const fn from_bits(bits: u32) -> Self {
        match bits & 7 {
            0 => Self::Fixed,
            1 => Self::LowestPriority,
            2 => Self::Smi,
            3 => Self::RemoteRead,
            4 => Self::Nmi,
            5 => Self::Init,
            6 => Self::Sipi,
            _ => Self::ExtInt,
        }
    }
}

/// Destination shorthand of an IPI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shorthand {
    /// No shorthand: the destination field is used.
    #[default]
    None,
    /// The sender.
    ToSelf,
    /// All, the sender included.
    All,
    /// All but the sender.
    Others,
}

/// A message on the APIC bus: from an IOAPIC pin, an MSI or an ICR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapicIrq {
    /// Destination: an APIC id or a logical destination.
    pub dest: u32,
    /// The destination is logical.
    pub logical: bool,
    /// Shorthand; only IPIs have one.
    pub shorthand: Shorthand,
    /// Delivery mode.
    pub mode: DeliveryMode,
    /// Vector.
    pub vector: u8,
    /// Level of a level-triggered message; false is a de-assert.
    pub assert: bool,
    /// Level-triggered: the LAPIC sets the TMR bit and broadcasts the EOI.
    pub level_triggered: bool,
    /// MSI redirection hint: treated as lowest priority.
    pub redirection_hint: bool,
}

impl LapicIrq {
    /// An edge-triggered message to one APIC id.
    pub const fn edge(dest: u32, mode: DeliveryMode, vector: u8) -> Self {
        Self {
            dest,
            logical: false,
            shorthand: Shorthand::None,
            mode,
            vector,
            assert: true,
            level_triggered: false,
            redirection_hint: false,
        }
    }
    /// True if only one of the matching LAPICs gets the message.
    pub const fn is_lowest_priority(&self) -> bool {
        matches!(self.mode, DeliveryMode::LowestPriority) || self.redirection_hint
    }
}
