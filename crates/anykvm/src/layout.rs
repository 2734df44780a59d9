//! The guest-physical map of the machine that `anykvm boot` builds.
//!
//! ```text
//! 0x0000_0000  RAM: boot structures in the first 640 KiB (below)
//! 0x0009_fc00  reserved: MP table (where a BIOS has its EBDA), ACPI tables from 0xe_0000
//! 0x0010_0000  RAM: kernel at 1 MiB (bzImage), initrd as high as the kernel accepts
//! 0xc000_0000  hole: PCI memory window, from 0xe000_0000 PCI configuration space,
//!              then IOAPIC, LAPIC, KVM's own pages
//! 0x1_0000_0000  the rest of the RAM
//! ```

/// The GDT that the boot protocol's selectors refer to.
pub(crate) const GDT: u64 = 0x500;
/// PVH's `hvm_start_info`. Its module list and memory map follow in the same page.
pub(crate) const PVH_INFO: u64 = 0x6000;
/// `struct boot_params`, the "zero page".
pub(crate) const ZERO_PAGE: u64 = 0x7000;
/// PML4, then one PDPT, then four page directories: identity map of the first 4 GiB.
pub(crate) const PML4: u64 = 0x9000;
/// The kernel command line.
pub(crate) const CMDLINE: u64 = 0x2_0000;
/// Room for the command line and its NUL.
pub(crate) const CMDLINE_MAX: usize = 0x1_0000;
/// End of conventional memory. Kernels look for the MP floating pointer in the last KiB before 640 KiB, which begins
/// here.
pub(crate) const EBDA: u64 = 0x9_fc00;
/// The RSDP. A kernel that is not told its address finds it here, on a 16-byte boundary.
pub(crate) const RSDP: u64 = 0xe_0000;
/// Start of extended memory, where a bzImage goes.
pub(crate) const HIGH_RAM: u64 = 0x10_0000;

/// End of the low RAM. The rest of the RAM begins at 4 GiB.
pub(crate) const HOLE_START: u64 = 0xc000_0000;
/// End of the hole.
pub(crate) const HOLE_END: u64 = 0x1_0000_0000;
/// PCI's memory window, which has the BARs.
pub(crate) const PCI_WINDOW: u32 = 0xc000_0000;
/// Last byte of the window.
pub(crate) const PCI_WINDOW_LAST: u32 = 0xdfff_ffff;
/// PCI Express' view of the configuration space (ECAM) of the only bus.
pub(crate) const PCI_ECAM: u32 = 0xe000_0000;
/// Size of one bus: 32 devices × 8 functions × 4 KiB.
pub(crate) const PCI_ECAM_LEN: u32 = 1 << 20;
/// IOAPIC registers.
pub(crate) const IOAPIC: u32 = 0xfec0_0000;
/// LAPIC registers.
pub(crate) const LAPIC: u32 = 0xfee0_0000;
/// One page for the identity map that KVM may need (KVM_SET_IDENTITY_MAP_ADDR).
pub(crate) const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages for KVM (KVM_SET_TSS_ADDR).
pub(crate) const KVM_TSS: usize = 0xfffb_d000;

/// PM1a event block (4 bytes), PM1a control (2 bytes at +4), PM timer (4 bytes at +8).
pub(crate) const PM_BASE: u16 = 0x600;
/// ACPI's System Control Interrupt.
pub(crate) const SCI_GSI: u8 = 9;
/// GSIs of PCI's INTx lines. They are ISA numbers, so that they work with the PIC alone too.
pub(crate) const PCI_GSIS: [u8; 3] = [5, 10, 11];

/// Returns the IOAPIC's APIC id: the first id that no CPU has. The register has only four bits; kernels for more CPUs
/// take the id from the tables.
pub(crate) fn ioapic_id(cpus: u8) -> u8 {
    cpus
}
