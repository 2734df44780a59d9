//! [`GuestBus`]: everything that executing code asks of the outside.
//!
//! Addresses are linear (segment base added); gpas never appear here.
//!
//! **Restart rule.** An access that the VMM has to answer returns
//! [`Fault::Exit`]: the instruction must leave `CpuState` as it was before it,
//! and is executed again from its start once the answer is there. The bus
//! replays the answers of the instruction's earlier device accesses, so each
//! device access happens exactly once. A `rep` instruction commits each
//! iteration and calls [`GuestBus::commit`].

use x86_defs::control::{cr3, cr4};

use crate::{CpuState, Exception, Feature};

/// How VMCALL or VMMCALL behaves. VMCALL is Intel's instruction, VMMCALL AMD's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HypercallForm {
    /// The instruction is the processor's own.
    Native,
    /// The instruction is the other vendor's, and is replaced by the processor's own in the guest's memory.
    Replaced,
    /// The instruction raises #UD.
    Undefined,
}

/// The privilege with which memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// At the current privilege level.
    Current,
    /// An implicit supervisor access: descriptor tables, TSS, frames pushed at
    /// a new CPL 0 (SDM vol. 3, 4.6.1). Never checked as a user access, and
    /// SMAP applies whatever RFLAGS.AC is.
    System,
}

/// What an access does, for permission checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Data read.
    Read,
    /// Data write, or read-modify-write.
    Write,
    /// Instruction fetch.
    Fetch,
}

/// Why an access did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The guest gets an exception.
    Exception(Exception),
    /// The VMM has to act first; the bus holds the reason.
    Exit,
}

impl From<Exception> for Fault {
    fn from(e: Exception) -> Self {
        Self::Exception(e)
    }
}

/// Translations to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// INVLPG: the page in the current PCID, and global ones.
    Page(u64),
    /// INVPCID type 0.
    PcidPage(u16, u64),
    /// INVPCID type 1, and MOV to CR3 without the no-flush bit: non-global of one PCID.
    Pcid(u16),
    /// INVPCID type 3: non-global of every PCID.
    NonGlobal,
    /// INVPCID type 2, a change of CR4.PGE, CR4.PCIDE cleared, a hypercall: everything, global translations included.
    Global,
    /// Everything, because what the tables mean has changed: by CR0.PG, CR4.PAE, CR4.PSE, or the VMM.
    All,
}

/// Identity of the page that code is fetched from.
///
/// `id` names the backing page whatever its virtual address; `generation`
/// changes when bytes of it that were fetched as code have been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodePage {
    /// Opaque identity, page-granular (its low 12 bits are zero).
    pub id: u64,
    /// Generation of the page's code.
    pub generation: u32,
}

/// An integer that moves over the bus in one piece.
pub trait Word: Copy + Default + Eq + Send + Sync + core::fmt::Debug + 'static {
    /// Size in bytes.
    const SIZE: usize;
    /// Makes a word of the low bytes of `v`.
    fn from_u128(v: u128) -> Self;
    /// Returns the word, zero-extended.
    fn to_u128(self) -> u128;
    /// Makes a word of little-endian bytes; `b` has [`Self::SIZE`] bytes.
    fn from_le(b: &[u8]) -> Self;
    /// Returns the word's little-endian bytes in the low part of the result.
    fn to_le(self) -> [u8; 16];
}

macro_rules! word {
    ($($t:ty),*) => { $(impl Word for $t {
        const SIZE: usize = size_of::<$t>();
        #[inline(always)]
        fn from_u128(v: u128) -> Self { v as $t }
        #[inline(always)]
        fn to_u128(self) -> u128 { self as u128 }
        #[inline(always)]
        fn from_le(b: &[u8]) -> Self {
            let mut a = [0; size_of::<$t>()];
            a.copy_from_slice(b);
            <$t>::from_le_bytes(a)
        }
        #[inline(always)]
        fn to_le(self) -> [u8; 16] { (self as u128).to_le_bytes() }
    })* };
}
word!(u8, u16, u32, u64, u128);

/// What executing code asks of the outside.
pub trait GuestBus {
    /// Reads a word at a linear address.
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, who: Privilege) -> Result<T, Fault>;
    /// Writes a word. Nothing is written if any byte may not be.
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault>;
    /// Does what [`Self::read`] does, for 1, 2, 4 or 8 bytes that are known to be a device's before a translation is
    /// looked for. Returns `None`, with nothing done, if the bus does not know that.
    #[inline]
    fn read_device(
        &mut self,
        _cpu: &mut CpuState,
        _gva: u64,
        _size: u8,
        _who: Privilege,
    ) -> Option<Result<u64, Fault>> {
        None
    }
    /// Does the same for a write of the low bytes of `value`.
    #[inline]
    fn write_device(
        &mut self,
        _cpu: &mut CpuState,
        _gva: u64,
        _size: u8,
        _value: u64,
        _who: Privilege,
    ) -> Option<Result<(), Fault>> {
        None
    }
    /// Replaces a word by `f` of it and returns the old one. The page is
    /// checked for writing first. With `lock` the exchange is atomic against
    /// other vCPUs (`f` may be called again); without, only the translation is shared.
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        f: impl FnMut(T) -> T,
    ) -> Result<T, Fault>;
    /// Reads any number of bytes (16- to 64-byte vectors, descriptors, XSAVE areas).
    fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault>;
    /// Writes any number of bytes; all pages are checked before the first byte is written.
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault>;
    /// Checks that an access would not fault, setting A and D bits as it would.
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Fault>;
    /// Fast path of ascending `rep movs`: copies up to `len` bytes of plain
    /// memory as if byte by byte in ascending order in units of `unit` bytes,
    /// and returns the bytes done, a multiple of `unit`; 0 means "do one
    /// iteration the slow way". Never faults.
    fn bulk_copy(
        &mut self,
        _cpu: &mut CpuState,
        _dst: u64,
        _src: u64,
        _len: u64,
        _unit: u64,
    ) -> u64 {
        0
    }
    /// As [`Self::bulk_copy`], in descending order from the elements at `dst` and `src` on: the fast path of descending
    /// `rep movs`.
    fn bulk_copy_down(
        &mut self,
        _cpu: &mut CpuState,
        _dst: u64,
        _src: u64,
        _len: u64,
        _unit: u64,
    ) -> u64 {
        0
    }
    /// Fills memory with the low `unit` bytes of `value`: the fast path of ascending `rep stos`, with the rules of
    /// [`Self::bulk_copy`].
    fn bulk_fill(
        &mut self,
        _cpu: &mut CpuState,
        _dst: u64,
        _value: u64,
        _len: u64,
        _unit: u64,
    ) -> u64 {
        0
    }
    /// Reads plain memory, not beyond the end of the page: the fast path of `rep scas`, `rep cmps` and `rep lods`.
    /// Returns the number of bytes read, with the rules of [`Self::bulk_copy`].
    fn bulk_read(&mut self, _cpu: &mut CpuState, _src: u64, _buf: &mut [u8]) -> usize {
        0
    }

    /// Returns the page that code at `gva` is fetched from. Checks fetch permission at the current CPL.
    fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault>;
    /// Fetches up to `buf.len()` (at most 15) code bytes without crossing the
    /// page, and tracks them as code: a later write to them changes the page's
    /// generation. Returns how many bytes there are before the page's end.
    fn code_bytes(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault>;
    /// As [`Self::code_bytes`], but need not track the bytes as code: for who does not know yet how many of them are.
    fn peek_code(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        self.code_bytes(cpu, gva, buf)
    }
    /// Returns the current generation of a page that [`Self::code_page`] returned.
    fn code_generation(&mut self, id: u64) -> u32;
    /// Returns a number that changes whenever any page's generation does. While it stays the same,
    /// [`Self::code_generation`] need not be called.
    fn code_changes(&self) -> u64;
    /// Returns a number that changes whenever a translation used for fetching may have changed (flush, context or view
    /// change). A cache of `code_page` keyed by it is exact.
    fn fetch_epoch(&self) -> u64;

    /// Selects the context after CR0, CR3, CR4 or EFER changed how addresses are translated; `cpu` has the new values.
    /// Loads and checks PDPTEs in PAE mode (`#GP(0)` on reserved bits). Flushes nothing by itself: the caller calls
    /// [`Self::flush`] as the manual says.
    fn load_root(&mut self, cpu: &mut CpuState) -> Result<(), Fault>;
    /// Carries out MOV to CR3, whose value `cpu` has already: [`Self::load_root`] and, if `flushes`, [`Flush::Pcid`] of
    /// its PCID, in one call.
    fn load_cr3(&mut self, cpu: &mut CpuState, flushes: bool) -> Result<(), Fault> {
        self.load_root(cpu)?;
        if flushes {
            let has_pcids = cpu.cr4 & cr4::PCIDE != 0;
            let pcid = if has_pcids { cpu.cr3 & cr3::PCID } else { 0 };
            self.flush(cpu, Flush::Pcid(pcid as u16));
        }
        Ok(())
    }
    /// Returns true if bit 63 of a value loaded to CR3 keeps the root's translations even without PCIDs.
    fn keeps_roots(&self) -> bool {
        false
    }
    /// Selects a view after CPL, RFLAGS.AC, CR0.WP, CR4.SMEP, CR4.SMAP, CR4.PKE or PKRU changed. Cheap.
    fn select_view(&mut self, cpu: &mut CpuState);
    /// Forgets translations.
    fn flush(&mut self, cpu: &mut CpuState, what: Flush);

    /// Executes IN; `size` is 1, 2 or 4.
    fn port_in(&mut self, cpu: &mut CpuState, port: u16, size: u8) -> Result<u32, Fault>;
    /// Reads one element of a repeated INS that wants `count` elements from here on, including this one. A bus may
    /// fetch several at once and keep the rest for the calls that follow.
    fn port_in_repeated(
        &mut self,
        cpu: &mut CpuState,
        port: u16,
        size: u8,
        _count: u32,
    ) -> Result<u32, Fault> {
        self.port_in(cpu, port, size)
    }
    /// Executes OUT.
    fn port_out(
        &mut self,
        cpu: &mut CpuState,
        port: u16,
        size: u8,
        value: u32,
    ) -> Result<(), Fault>;
    /// Executes RDMSR after the CPL check.
    fn read_msr(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault>;
    /// Executes WRMSR after the CPL check.
    fn write_msr(&mut self, cpu: &mut CpuState, index: u32, value: u64) -> Result<(), Fault>;
    /// Executes CPUID. Returns EAX, EBX, ECX, EDX.
    fn cpuid(&mut self, cpu: &mut CpuState, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Returns the guest's time-stamp counter.
    fn tsc(&mut self, cpu: &mut CpuState) -> u64;
    /// Executes RDPMC after the CPL check.
    fn read_pmc(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault>;
    /// Executes MOV from CR8. Returns the task priority, 0 to 15.
    fn task_priority(&mut self, cpu: &mut CpuState) -> u8;
    /// Executes MOV to CR8.
    fn set_task_priority(&mut self, cpu: &mut CpuState, priority: u8);
    /// Returns true if MONITOR and MWAIT do nothing; otherwise they raise #UD.
    fn has_monitor(&mut self, cpu: &CpuState) -> bool {
        cpu.features.has(Feature::Monitor)
    }
    /// Returns how VMCALL, or VMMCALL, behaves on this processor.
    fn hypercall_form(&mut self, _is_vmcall: bool) -> HypercallForm {
        HypercallForm::Native
    }
    /// Executes VMCALL or VMMCALL. The bus writes the result to RAX.
    fn hypercall(&mut self, cpu: &mut CpuState) -> Result<(), Fault>;
    /// Returns a random number, for RDRAND and RDSEED.
    fn random(&mut self) -> u64;
    /// Returns true if the VMM wants the exception that is about to be delivered (KVM_SET_GUEST_DEBUG). The bus has
    /// recorded the exit then.
    fn intercept(&mut self, _cpu: &mut CpuState, _exception: Exception) -> bool {
        false
    }
    /// Notes that the delivery of an event stops for the exit that the bus has recorded.
    fn delivery_stopped(&mut self, _cpu: &CpuState) {}
    /// Notes a PAUSE, by which code waits for another vCPU.
    #[inline]
    fn pause(&mut self) {}
    /// Notes that IRET has completed, which unmasks NMIs. (`cpu.events` is already updated.)
    fn nmi_unmasked(&mut self) {}
    /// Notes that the instruction or iteration is complete: answers of its device accesses are forgotten.
    fn commit(&mut self);
    /// Returns true if the run loop has to be returned to before the next block. RFLAGS.IF in `cpu` says whether a
    /// waiting interrupt can be taken now.
    fn poll(&mut self, cpu: &CpuState) -> bool;
    /// Returns true if a store to a device's register has made an event due that comes before the next instruction.
    fn is_event_due(&self) -> bool {
        false
    }
}
