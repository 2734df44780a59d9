//! VMMs that execute CPUID themselves: to learn whether the processor has VMX or SVM, without which they refuse to
//! start, as kvmtool does; to learn its model, as QEMU does for `-cpu host`; or to learn where an XSAVE image has PKRU.
//! Their CPUID instructions show what KVM_GET_SUPPORTED_CPUID does.
//!
//! This needs no signal, no rights and no state of a thread. Where the processor would show something else, CPUID
//! instructions of the program's own file become jumps before the program starts, if [`places`] is certain of them. A
//! program whose file does not name `/dev/kvm` is left as it is.

mod code;
mod displacements;
mod places;
mod program;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use places::CpuidInstructions;
use program::{Layout, Segment};

/// The name of the device in programs that use it.
const DEVICE: &[u8] = b"/dev/kvm";

/// The processor's vendor, by its virtualization extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// VMX.
    Intel,
    /// SVM.
    Amd,
}

/// Returns this processor's vendor.
fn vendor() -> Option<Vendor> {
    let [_, b, c, d] = host::cpu::cpuid(0, 0);
    let mut name = [0; 12];
    for (to, from) in name.chunks_exact_mut(4).zip([b, d, c]) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    match &name {
        b"GenuineIntel" | b"CentaurHauls" | b"  Shanghai  " => Some(Vendor::Intel),
        b"AuthenticAMD" | b"HygonGenuine" => Some(Vendor::Amd),
        _ => None,
    }
}

/// Returns true if the processor shows VMX, or SVM.
fn shows_extension(vendor: Vendor) -> bool {
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    const EXTENDED: u32 = 0x8000_0001;
    match vendor {
        Vendor::Intel => host::cpu::cpuid(1, 0)[2] & VMX != 0,
        Vendor::Amd => {
            let is_known = host::cpu::cpuid(0x8000_0000, 0)[0] >= EXTENDED;
            is_known && host::cpu::cpuid(EXTENDED, 0)[2] & SVM != 0
        }
    }
}

/// Returns this processor's vendor, if it shows neither VMX nor SVM.
pub fn lacking() -> Option<Vendor> {
    vendor().filter(|v| !shows_extension(*v))
}

/// Returns this processor's vendor, if CPUID differs from what programs are to see.
fn differing() -> Option<Vendor> {
    let is_other = || {
        let signature = kvm_abi::system::signature();
        let [size, offset, ..] = host::cpu::cpuid(0xd, 9);
        signature != host::cpu::cpuid(1, 0)[0]
            || [size, offset] != [code::PKRU_SIZE, kvm_abi::system::pkru_offset() as u32]
    };
    vendor().filter(|v| !shows_extension(*v) || is_other())
}

/// A program's CPUID instructions, as `anykvm doctor` reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asking {
    /// How many the program has.
    pub found: usize,
    /// How many show VMX or SVM where the processor does not.
    pub answered: usize,
}

/// Looks at a program's file. `None` if the program has no CPUID instruction, or does not name `/dev/kvm`.
pub fn examine(path: &Path) -> Option<Asking> {
    let file = std::fs::read(path).ok()?;
    let layout = Layout::read(|at, len| {
        let bytes = at.checked_add(len).and_then(|end| file.get(at..end));
        Ok(bytes.ok_or(io::ErrorKind::UnexpectedEof)?.to_vec())
    })?;
    let read = |buffer: &mut [u8], at: usize| {
        let bytes = file.get(at..).unwrap_or_default();
        let len = bytes.len().min(buffer.len());
        buffer[..len].copy_from_slice(&bytes[..len]);
        len
    };
    if !layout.has(DEVICE, read) {
        return None;
    }
    let program = layout.program(|s| file.get(s.offset..s.offset.checked_add(s.len)?))?;
    let places = CpuidInstructions::of(&program);
    (places.found > 0).then_some(Asking {
        found: places.found,
        answered: places.covered,
    })
}

/// Returns the processor's XCR0.
pub fn xcr0() -> u64 {
    host::cpu::xcr0()
}

/// Returns true for a program that names `/dev/kvm` and executes XGETBV.
pub fn reads_state(path: &Path) -> bool {
    const XGETBV: &[u8] = &[0x0f, 0x01, 0xd0];
    let Ok(file) = std::fs::read(path) else {
        return false;
    };
    let has = |bytes: &[u8]| file.windows(bytes.len()).any(|window| window == bytes);
    file.starts_with(b"\x7fELF") && has(DEVICE) && has(XGETBV)
}

fn layout_of(file: &File) -> Option<Layout> {
    Layout::read(|at, len| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at as u64)?;
        Ok(bytes)
    })
}

/// DEVIATION: CPUID instructions of libraries, and those that are not certain, show the processor.
///
/// Replaces CPUID instructions in a program that was loaded `base` bytes above the addresses it was linked for, and
/// does not run yet.
fn answer(file: &File, layout: &Layout, base: usize, vendor: Vendor) {
    let mapped = |s: &Segment| {
        let at = base.wrapping_add(s.address) as *const u8;
        // SAFETY: the segment is mapped as its file says, and readable. Nobody writes to it while this slice is in use:
        // `code` does so afterwards.
        Some(unsafe { std::slice::from_raw_parts(at, s.len) })
    };
    let read = |buffer: &mut [u8], at: usize| file.read_at(buffer, at as u64).unwrap_or(0);
    if !layout.has(DEVICE, read) {
        return;
    }
    let Some(places) = layout.program(mapped).as_ref().map(CpuidInstructions::of) else {
        return;
    };
    if !places.places.is_empty() {
        let ends = layout.segments.iter().map(|s| s.address + s.len);
        let begin = layout.segments.iter().map(|s| s.address).min();
        let (begin, end) = (begin.unwrap_or(0), ends.max().unwrap_or(0));
        let range: Range<usize> = base.wrapping_add(begin)..base.wrapping_add(end);
        code::replace(&places.places, base, &range, vendor);
    }
}

/// Replaces CPUID instructions in a launched program that was loaded from this file.
pub(crate) fn answer_launched(path: &Path, base: usize) {
    if !crate::trace::is_real()
        && let Some(vendor) = differing()
        && let Ok(file) = File::open(path)
        && let Some(layout) = layout_of(&file)
    {
        answer(&file, &layout, base, vendor);
    }
}

/// Runs before the program starts that the library is preloaded into.
extern "C" fn constructor() {
    if !crate::is_preloaded() || crate::trace::is_real() {
        return;
    }
    // The measurement is made while the program starts, before its first vCPU asks for the result.
    host::cpu::begin_to_measure_tsc();
    let Some(vendor) = differing() else { return };
    // A panic in our code must not unwind into C.
    let _ = std::panic::catch_unwind(|| answer_preloaded(vendor));
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

fn answer_preloaded(vendor: Vendor) -> Option<()> {
    /// Size of an ELF file's header, which contains offsets.
    const HEADER: usize = 64;
    let file = File::open("/proc/self/exe").ok()?;
    let layout = layout_of(&file)?;
    // SAFETY: integer arguments.
    let [table, entry] =
        [libc::AT_PHDR, libc::AT_ENTRY].map(|what| unsafe { libc::getauxval(what) });
    let base = (entry as usize).wrapping_sub(layout.entry);
    // The file is not the program's if the dynamic loader was started as a program.
    let first = layout.segments.first()?;
    let is_first = first.offset == 0 && layout.table.end <= first.len;
    let begin = base.wrapping_add(first.address);
    if !is_first || begin.wrapping_add(layout.table.start) != table as usize {
        return None;
    }
    // `anykvm` itself, into which the library is preloaded as well, is to see the processor.
    // SAFETY: the files of the program and of this library begin there, with a header of that length.
    let [program, own] = [begin as *const u8, crate::header()]
        .map(|at| unsafe { std::slice::from_raw_parts(at, HEADER) });
    if program == own {
        return None;
    }
    let mut known = vec![0; layout.table.len()];
    file.read_exact_at(&mut known, layout.table.start as u64)
        .ok()?;
    // SAFETY: this is the program's own table of segments, which has that many bytes.
    let mapped = unsafe { std::slice::from_raw_parts(table as *const u8, known.len()) };
    if mapped == known {
        answer(&file, &layout, base, vendor);
    }
    Some(())
}
