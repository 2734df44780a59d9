//! [`Paging`]: how addresses are translated, as CR0, CR3, CR4, EFER and CPUID say.

use x86_cpu::{CpuState, Feature, Features};
use x86_defs::{
    control::{cr0, cr3, cr4, efer},
    paging::{ADDR_MASK, G, NX, PS},
};

/// Paging mode (SDM vol. 3, 4.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mode {
    /// CR0.PG is clear: gva = gpa.
    #[default]
    None,
    /// 32-bit paging.
    Bits32,
    /// PAE paging.
    Pae,
    /// 4-level paging.
    Level4,
    /// 5-level paging.
    Level5,
}

/// Everything that a page walk needs except the permission inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paging {
    /// The paging mode.
    pub mode: Mode,
    /// Physical address of the top table; in PAE mode that of the PDPTEs.
    pub root: u64,
    /// PDPTE registers of PAE paging.
    pub pdpte: [u64; 4],
    /// PCID; 0 if CR4.PCIDE is clear.
    pub pcid: u16,
    /// Address space of memslots: 0, or 1 in SMM.
    pub space: u8,
    /// PS is honoured in 32-bit page-directory entries.
    pub pse: bool,
    /// G bits of leaf entries are honoured (CR4.PGE).
    pub global_pages: bool,
    /// XD is enabled.
    pub nxe: bool,
    /// Reserved bits of entries that name a table, by level (1 to 5).
    pub reserved_table: [u64; 6],
    /// Reserved bits of entries that map a page, by level.
    pub reserved_leaf: [u64; 6],
}

/// Everything that [`Paging`] depends on besides CR3 and the PDPTEs. While it is unchanged, a change of address space
/// changes only [`Paging::root`] and [`Paging::pcid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Controls {
    cr0: u64,
    cr4: u64,
    efer: u64,
    in_smm: bool,
    features: Features,
}

impl Controls {
    pub(crate) fn of(cpu: &CpuState) -> Self {
        Self {
            // WP selects a view, and TS has nothing to do with paging.
            cr0: cpu.cr0 & cr0::PG,
            cr4: cpu.cr4,
            efer: cpu.efer,
            in_smm: cpu.events.in_smm,
            features: cpu.features,
        }
    }
}

impl Mode {
    /// Returns the mode that the CPU's registers select.
    pub(crate) fn of(cpu: &CpuState) -> Self {
        if cpu.cr0 & cr0::PG == 0 {
            Self::None
        } else if cpu.cr4 & cr4::PAE == 0 {
            Self::Bits32
        } else if cpu.efer & efer::LMA == 0 {
            Self::Pae
        } else if cpu.cr4 & cr4::LA57 == 0 {
            Self::Level4
        } else {
            Self::Level5
        }
    }
}

/// Returns the number of physical address bits.
fn address_width(cpu: &CpuState) -> u32 {
    u32::from(cpu.features.maxphyaddr).clamp(32, 52)
}

/// Returns the address bits of an entry that the CPU does not implement.
fn no_address(cpu: &CpuState) -> u64 {
    ADDR_MASK & u64::MAX.checked_shl(address_width(cpu)).unwrap_or(0)
}

impl Paging {
    /// Takes over CR3 in 4-level or 5-level mode.
    pub(crate) fn set_long_root(&mut self, cpu: &CpuState) {
        self.root = cpu.cr3 & ADDR_MASK & !no_address(cpu);
        self.pcid = if cpu.cr4 & cr4::PCIDE != 0 {
            (cpu.cr3 & cr3::PCID) as u16
        } else {
            0
        };
    }

    /// Derives the paging state from the CPU's registers.
    pub fn of(cpu: &CpuState) -> Self {
        let mode = Mode::of(cpu);
        let nxe = cpu.efer & efer::NXE != 0 && !matches!(mode, Mode::None | Mode::Bits32);
        let width = address_width(cpu);
        let mut p = Self {
            mode,
            pdpte: cpu.pdpte,
            space: cpu.events.in_smm.into(),
            pse: cpu.cr4 & cr4::PSE != 0,
            global_pages: cpu.cr4 & cr4::PGE != 0,
            nxe,
            ..Self::default()
        };
        // Bits 62:52 are ignored in long mode and reserved in PAE mode.
        let no_address = no_address(cpu);
        match mode {
            Mode::None => {}
            Mode::Bits32 => {
                p.root = cpu.cr3 & 0xffff_f000;
                p.reserved_leaf[2] = if cpu.features.has(Feature::Pse36) {
                    // Bits 20:13 are address bits 39:32; bit 21 is reserved.
                    let kept = width.min(40) - 32;
                    0x003f_e000 & !(((1 << kept) - 1) << 13)
                } else {
                    0x003f_e000
                };
            }
            Mode::Pae => {
                p.root = cpu.cr3 & 0xffff_ffe0;
                let reserved = no_address | bits(62, 52) | if nxe { 0 } else { NX };
                p.reserved_table = [reserved; 6];
                p.reserved_leaf = [reserved; 6];
                p.reserved_leaf[2] |= bits(20, 13);
            }
            Mode::Level4 | Mode::Level5 => {
                p.set_long_root(cpu);
                let reserved = no_address | if nxe { 0 } else { NX };
                p.reserved_table = [reserved; 6];
                p.reserved_leaf = [reserved; 6];
                p.reserved_leaf[2] |= bits(20, 13);
                p.reserved_leaf[3] |= bits(29, 13);
                if !cpu.features.has(Feature::Pdpe1gb) {
                    p.reserved_leaf[3] |= PS;
                }
                for level in [4, 5] {
                    p.reserved_table[level] |= PS;
                }
                if cpu.features.has(Feature::Amd) {
                    // AMD APM vol. 2, 5.3: bit 8 must be zero above the page directory.
                    for level in [3, 4, 5] {
                        p.reserved_table[level] |= G;
                    }
                }
            }
        }
        p
    }

    /// Returns the reserved bits of a PDPTE register (SDM vol. 3, table 4-8).
    pub fn reserved_pdpte(cpu: &CpuState) -> u64 {
        let width = address_width(cpu);
        (u64::MAX << width) | bits(8, 5) | bits(2, 1)
    }

    /// Returns the level of the top table; 2 in PAE mode, whose PDPTEs are registers.
    pub fn top_level(&self) -> usize {
        match self.mode {
            Mode::None => 0,
            Mode::Bits32 | Mode::Pae => 2,
            Mode::Level4 => 4,
            Mode::Level5 => 5,
        }
    }

    /// True if the mode can translate the address, which means that it is canonical.
    #[inline]
    pub fn is_canonical(&self, gva: u64) -> bool {
        let shift = match self.mode {
            Mode::Level4 => 16,
            Mode::Level5 => 7,
            _ => return true,
        };
        ((gva << shift) as i64 >> shift) as u64 == gva
    }
}

/// Returns a mask of the bits `high` to `low`, inclusive.
const fn bits(high: u32, low: u32) -> u64 {
    (u64::MAX >> (63 - high)) & (u64::MAX << low)
}
