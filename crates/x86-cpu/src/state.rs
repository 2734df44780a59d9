//! [`CpuState`]: all architectural state of one vCPU.
//!
//! `repr(C)`: generated code addresses its fields through one base register.
//! `rflags` is exact whenever no instruction is executing; an execution engine
//! may keep the arithmetic flags elsewhere while it runs.

use x86_defs::{
    control::{cr0, cr4, efer},
    dr, reg, rflags,
    segment::{Attr, DescriptorTable, Segment},
};

use crate::{Events, Features, FpState, Msrs, Retired};

/// Interrupt shadow: which events are held off for one instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Shadow {
    /// No events.
    #[default]
    None,
    /// Maskable interrupts, after STI.
    Sti,
    /// Interrupts, NMIs and debug traps, after MOV SS or POP SS.
    MovSs,
}

/// Width of the code that CS selects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum CodeSize {
    /// 16-bit code: real mode, virtual-8086 mode, or CS.D = 0.
    #[default]
    Bits16,
    /// 32-bit code in protected or compatibility mode.
    Bits32,
    /// 64-bit mode.
    Bits64,
}

/// All architectural state of one vCPU.
#[repr(C, align(64))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuState {
    /// General registers in encoding order, then [`reg::ZERO`] and [`reg::RIP`].
    pub gpr: [u64; reg::NR_SLOTS],
    /// RFLAGS.
    pub rflags: u64,
    /// Current privilege level.
    pub cpl: u8,
    /// Width of the code; [`CpuState::update_mode`] maintains it.
    pub code_size: CodeSize,
    /// Interrupt shadow.
    pub shadow: Shadow,
    /// Linear address of the last #PF raised, CR2 once it is delivered.
    pub fault_gva: u64,
    /// DR6 bits of the last #DB raised.
    pub fault_dr6: u64,
    /// DR6 bits of data breakpoints that MOV SS holds off until after the next instruction.
    pub held_dr6: u64,
    /// ES, CS, SS, DS, FS, GS.
    pub seg: [Segment; 6],
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Task register.
    pub tr: Segment,
    /// Global descriptor table.
    pub gdtr: DescriptorTable,
    /// Interrupt descriptor table.
    pub idtr: DescriptorTable,
    /// CR0.
    pub cr0: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3, without the no-flush bit.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// IA32_EFER.
    pub efer: u64,
    /// XCR0.
    pub xcr0: u64,
    /// IA32_XSS.
    pub xss: u64,
    /// PKRU.
    pub pkru: u32,
    /// IA32_PKRS.
    pub pkrs: u32,
    /// PDPTEs of PAE paging.
    pub pdpte: [u64; 4],
    /// DR0 to DR3.
    pub dr: [u64; 4],
    /// DR6.
    pub dr6: u64,
    /// DR7.
    pub dr7: u64,
    /// Debug registers of whoever debugs the machine from outside.
    pub vmm_debug: VmmDebug,
    /// Plain MSRs.
    pub msr: Msrs,
    /// Events that wait for delivery.
    pub events: Events,
    /// The features that the guest's CPUID promises.
    pub features: Features,
    /// x87 and SIMD state.
    pub fp: FpState,
    /// Working memory of an execution engine.
    pub engine: engine_frame::EngineFrame,
    /// Registers that translations depended on when the last SMI was taken: CR0.PG, CR3, CR4, EFER. If RSM restores the
    /// same values, translations are kept. All are zero in a restored state, so that RSM flushes.
    pub smi_controls: [u64; 4],
    /// Events retired while somebody counted them. The field is last, so that the fields before it stay within the
    /// reach of generated code.
    pub retired: Retired,
}

/// Debug registers that a debugger outside the machine has put in place of the guest's
/// (KVM_GUESTDBG_USE_HW_BP). The guest's keep their values and have no effect meanwhile.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmmDebug {
    /// DR0 to DR3.
    pub dr: [u64; 4],
    /// DR7.
    pub dr7: u64,
    /// True if these registers are in force.
    pub active: bool,
}

impl Default for CpuState {
    /// Returns the state after reset (SDM vol. 3, table 10-1), with no CPUID features.
    fn default() -> Self {
        let data = Segment {
            base: 0,
            limit: 0xffff,
            attr: Attr(0x93),
            selector: 0,
        };
        let mut seg = [data; 6];
        seg[reg::CS] = Segment {
            base: 0xffff_0000,
            limit: 0xffff,
            attr: Attr(0x9b),
            selector: 0xf000,
        };
        let mut gpr = [0; reg::NR_SLOTS];
        gpr[reg::RIP] = 0xfff0;
        gpr[reg::RDX] = 0x600;
        Self {
            gpr,
            rflags: rflags::FIXED1,
            cpl: 0,
            code_size: CodeSize::Bits16,
            shadow: Shadow::None,
            fault_gva: 0,
            fault_dr6: 0,
            held_dr6: 0,
            seg,
            ldtr: Segment {
                limit: 0xffff,
                attr: Attr(0x82),
                ..Segment::default()
            },
            tr: Segment {
                limit: 0xffff,
                attr: Attr(0x8b),
                ..Segment::default()
            },
            gdtr: DescriptorTable {
                base: 0,
                limit: 0xffff,
            },
            idtr: DescriptorTable {
                base: 0,
                limit: 0xffff,
            },
            cr0: cr0::RESET,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            efer: 0,
            xcr0: 1,
            xss: 0,
            pkru: 0,
            pkrs: 0,
            pdpte: [0; 4],
            dr: [0; 4],
            dr6: dr::DR6_FIXED1,
            dr7: dr::DR7_FIXED1,
            vmm_debug: VmmDebug::default(),
            msr: Msrs {
                pat: 0x0007_0406_0007_0406,
                smbase: 0x30000,
                // Neither branch traces nor precise event sampling. A VMM enables fast strings.
                misc_enable: 1 << 11 | 1 << 12,
                // Maximum turbo ratio 1 and CPUID faulting, as KVM reports it by default.
                platform_info: crate::msrs::PLATFORM_INFO_CPUID_FAULT,
                ..Msrs::default()
            },
            events: Events::default(),
            features: Features::default(),
            fp: FpState::default(),
            engine: engine_frame::EngineFrame::default(),
            smi_controls: [0; 4],
            retired: Retired::default(),
        }
    }
}

impl CpuState {
    /// Returns the DR7 that is in force.
    #[inline(always)]
    pub const fn effective_dr7(&self) -> u64 {
        if self.vmm_debug.active {
            self.vmm_debug.dr7
        } else {
            self.dr7
        }
    }
    /// Returns the one of DR0 to DR3 that is in force; `n` is below 4.
    #[inline]
    pub const fn effective_dr(&self, n: usize) -> u64 {
        if self.vmm_debug.active {
            self.vmm_debug.dr[n & 3]
        } else {
            self.dr[n & 3]
        }
    }
    /// Returns RIP of the current instruction.
    #[inline(always)]
    pub const fn rip(&self) -> u64 {
        self.gpr[reg::RIP]
    }
    /// Sets RIP.
    #[inline(always)]
    pub const fn set_rip(&mut self, rip: u64) {
        self.gpr[reg::RIP] = rip;
    }
    /// Returns CR0.PE.
    #[inline(always)]
    pub const fn is_protected(&self) -> bool {
        self.cr0 & cr0::PE != 0
    }
    /// Returns true in virtual-8086 mode.
    #[inline(always)]
    pub const fn is_v86(&self) -> bool {
        self.rflags & rflags::VM != 0
    }
    /// Returns true in real mode and virtual-8086 mode, where a segment's base is its selector × 16.
    #[inline(always)]
    pub const fn is_real_or_v86(&self) -> bool {
        !self.is_protected() || self.is_v86()
    }
    /// Returns EFER.LMA: true in 64-bit and compatibility mode.
    #[inline(always)]
    pub const fn is_long_mode(&self) -> bool {
        self.efer & efer::LMA != 0
    }
    /// Returns true in 64-bit mode, but not in compatibility mode.
    #[inline(always)]
    pub fn is_64bit(&self) -> bool {
        self.code_size == CodeSize::Bits64
    }
    /// Returns CR0.PG.
    #[inline(always)]
    pub const fn is_paging(&self) -> bool {
        self.cr0 & cr0::PG != 0
    }
    /// Returns RFLAGS.IOPL.
    #[inline(always)]
    pub const fn iopl(&self) -> u8 {
        ((self.rflags & rflags::IOPL) >> rflags::IOPL_SHIFT) as u8
    }
    /// Restores an earlier state of the same vCPU. The engine's frame stays as it is, because the engine may be at
    /// work, in the middle of the instruction that has failed.
    pub fn put_back(&mut self, saved: Self) {
        let engine = core::mem::take(&mut self.engine);
        *self = Self { engine, ..saved };
    }
    /// Returns true if a program that may not change IF changes VIF in its place: virtual-8086 mode with CR4.VME, or
    /// CPL 3 with CR4.PVI, and IOPL below 3 (SDM vol. 3, 21.3 and 21.4).
    pub const fn has_virtual_interrupts(&self) -> bool {
        let enable = if self.is_v86() { cr4::VME } else { cr4::PVI };
        self.cpl == 3 && self.cr4 & enable != 0 && self.iopl() < 3 && self.is_protected()
    }
    /// Returns true if the linear address is canonical in the current paging mode.
    #[inline(always)]
    pub const fn is_canonical(&self, gva: u64) -> bool {
        let shift = if self.cr4 & cr4::LA57 != 0 { 7 } else { 16 };
        ((gva << shift) as i64 >> shift) as u64 == gva
    }
    /// Recomputes [`Self::code_size`] after CR0.PE, EFER.LMA, RFLAGS.VM or CS changed.
    pub fn update_mode(&mut self) {
        let cs = self.seg[reg::CS].attr;
        self.code_size = if self.is_long_mode() && cs.is_long() && !self.is_v86() {
            CodeSize::Bits64
        } else if cs.is_big() && !self.is_v86() {
            CodeSize::Bits32
        } else {
            CodeSize::Bits16
        };
    }
}
