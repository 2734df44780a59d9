//! Random register states, and their transfer between the oracle and the interpreter.

use std::sync::OnceLock;

use x86_cpu::{CpuState, Feature, Features};
use x86_defs::{
    control::{cr0, cr4, efer},
    reg, rflags,
    segment::{Attr, Segment},
    xsave,
};
use x86_native::oracle::{AREA_SIZE, Mode, Registers, WINDOW, WINDOW_SIZE, selectors};

use crate::{Random, operands};

/// Returns random registers. Pointers of implicit operands lead to the window or near it. Without `vectors`, x87 and
/// vector state is the initial one.
pub(crate) fn registers(r: &mut Random, mode: Mode, vectors: bool) -> Registers {
    let address = match mode {
        Mode::Bits64 => operands::address,
        Mode::Bits32 => operands::address32,
    };
    let mut gpr = [0; 16];
    for g in &mut gpr {
        *g = r.integer();
    }
    gpr[reg::RBX] = address(r);
    gpr[reg::RBP] = address(r);
    gpr[reg::RSI] = address(r);
    gpr[reg::RDI] = address(r);
    gpr[reg::RSP] = match r.below(32) {
        0 => address(r),
        1 => WINDOW + r.below(24),
        2 => WINDOW + WINDOW_SIZE as u64 - r.below(24),
        _ => WINDOW + 0x1000 + r.below(64) * 8,
    };
    if r.one_in(2) {
        gpr[reg::RCX] = r.below(8);
    }
    let mut area = [0; AREA_SIZE];
    area[..2].copy_from_slice(&xsave::FCW_INIT.to_le_bytes());
    area[xsave::MXCSR..xsave::MXCSR + 4].copy_from_slice(&xsave::MXCSR_DEFAULT.to_le_bytes());
    if vectors {
        fill(&mut area, r);
    }
    let direction = if r.one_in(4) { rflags::DF } else { 0 };
    let aligned = if r.one_in(32) { rflags::AC } else { 0 };
    Registers {
        gpr,
        rflags: r.next() & rflags::ARITH | rflags::FIXED1 | direction | aligned,
        rip: 0,
        area,
    }
}

/// Fills in random x87 and vector state.
pub(crate) fn fill(area: &mut [u8; AREA_SIZE], r: &mut Random) {
    area[..2].copy_from_slice(&fcw(r).to_le_bytes());
    area[3] = (r.below(8) << 3 | r.below(8)) as u8;
    area[4] = match r.below(4) {
        0 => 0,
        1 => 0xff,
        _ => r.next() as u8,
    };
    area[xsave::MXCSR..xsave::MXCSR + 4].copy_from_slice(&mxcsr(r).to_le_bytes());
    for n in 0..8 {
        let st = xsave::ST0 + 16 * n;
        area[st..st + 10].copy_from_slice(&x87(r));
    }
    let parts = vector_parts();
    for at in (0..256).step_by(8) {
        for half in [xsave::XMM0, xsave::YMM_HI] {
            let part = &parts[r.next() as usize >> 8 & (PARTS - 1)];
            area[half + at..half + at + 8].copy_from_slice(part);
        }
    }
}

const PARTS: usize = 1 << 14;

/// Returns parts of vectors to choose from, as making them takes longer than running a case.
fn vector_parts() -> &'static [[u8; 8]] {
    static PARTS_MADE: OnceLock<Vec<[u8; 8]>> = OnceLock::new();
    PARTS_MADE.get_or_init(|| {
        let mut r = Random::new(0x99);
        (0..PARTS).map(|_| vector_part(&mut r)).collect()
    })
}

fn fcw(r: &mut Random) -> u16 {
    let masks = if r.one_in(4) {
        r.below(64) as u16
    } else {
        0x3f
    };
    masks | 0x40 | (r.pick(&[0u16, 2, 3]) << 8) | (r.below(4) as u16) << 10
}

fn mxcsr(r: &mut Random) -> u32 {
    let masks = if r.one_in(4) {
        r.below(64) as u32
    } else {
        0x3f
    };
    let rest = match r.below(2) {
        0 => 0,
        _ => (r.next() as u32) & 0xe07f,
    };
    masks << 7 | rest
}

/// Returns a double-extended value of any class.
fn x87(r: &mut Random) -> [u8; 10] {
    let mut b = [0; 10];
    let exponent: u16 = match r.below(6) {
        0 => 0,
        1 => 0x7fff,
        2 => r.next() as u16 & 0x7fff,
        _ => 0x3fff - 40 + r.below(80) as u16,
    };
    let significand = match r.below(6) {
        0 => 0,
        1 => 1 << 63,
        2 => r.next(),
        _ => r.next() | 1 << 63,
    };
    let sign = (r.below(2) as u16) << 15;
    b[..8].copy_from_slice(&u64::to_le_bytes(significand));
    b[8..].copy_from_slice(&(exponent | sign).to_le_bytes());
    b
}

/// Returns eight bytes of a vector: integers, singles or doubles of any class.
pub(crate) fn vector_part(r: &mut Random) -> [u8; 8] {
    match r.below(4) {
        0 => r.next().to_le_bytes(),
        1 => r.integer().to_le_bytes(),
        2 => {
            let a = single(r);
            let b = single(r);
            (u64::from(a) | u64::from(b) << 32).to_le_bytes()
        }
        _ => double(r).to_le_bytes(),
    }
}

fn single(r: &mut Random) -> u32 {
    let sign = (r.next() as u32) & 1 << 31;
    let fraction = (r.next() as u32) & 0x007f_ffff;
    sign | match r.below(8) {
        0 => 0,
        1 => fraction,
        2 => 0x7f80_0000,
        3 => 0x7f80_0000 | fraction,
        4 => fraction | (r.next() as u32 & 0x7f80_0000),
        _ => (127 - 20 + r.below(40) as u32) << 23 | fraction,
    }
}

fn double(r: &mut Random) -> u64 {
    let sign = r.next() & 1 << 63;
    let fraction = r.next() & 0x000f_ffff_ffff_ffff;
    sign | match r.below(8) {
        0 => 0,
        1 => fraction,
        2 => 0x7ff << 52,
        3 => 0x7ff << 52 | fraction,
        4 => fraction | (r.next() & 0x7ff << 52),
        _ => (1023 - 40 + r.below(80)) << 52 | fraction,
    }
}

/// CPUID leaves that say which instructions exist: (leaf, subleaf).
const LEAVES: [(u32, u32); 7] = [
    (0, 0),
    (1, 0),
    (7, 0),
    (7, 1),
    (0xd, 0),
    (0xd, 1),
    (0x8000_0001, 0),
];

/// A CPUID entry: leaf, subleaf, EAX, EBX, ECX, EDX.
pub(crate) type Leaf = (u32, u32, u32, u32, u32, u32);

/// Returns this host's [`LEAVES`].
pub(crate) fn host_leaves() -> [Leaf; 7] {
    LEAVES.map(|(leaf, sub)| {
        let c = core::arch::x86_64::__cpuid_count(leaf, sub);
        (leaf, sub, c.eax, c.ebx, c.ecx, c.edx)
    })
}

/// Returns the features that this host's CPUID promises.
pub(crate) fn host_features() -> Features {
    Features::from_cpuid(host_leaves().into_iter())
}

/// Returns true for a host of AMD. The vendor decides what operand-size prefixes of branches mean.
pub(crate) fn host_is_amd() -> bool {
    static AMD: OnceLock<bool> = OnceLock::new();
    *AMD.get_or_init(|| host_features().has(Feature::Amd))
}

/// Returns a user-mode CPU as Linux sets it up.
pub(crate) fn cpu(features: Features, mode: Mode) -> CpuState {
    let mut cpu = CpuState {
        features,
        ..CpuState::default()
    };
    cpu.cr0 = cr0::PE | cr0::PG | cr0::NE | cr0::MP | cr0::ET | cr0::WP | cr0::AM;
    cpu.cr4 = cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE;
    cpu.efer = efer::LME | efer::LMA | efer::SCE | efer::NXE;
    // A host without AVX keeps no upper halves.
    cpu.xcr0 = host::cpu::xcr0() & 7 | 3;
    cpu.cpl = 3;
    let selectors = selectors(mode);
    let code = match mode {
        Mode::Bits64 => 0xa0fb,
        Mode::Bits32 => 0xc0fb,
    };
    for (n, s) in cpu.seg.iter_mut().enumerate() {
        let attr = if n == reg::CS { code } else { 0xc0f3 };
        *s = Segment {
            base: 0,
            limit: u32::MAX,
            attr: Attr(attr),
            selector: selectors[n],
        };
    }
    cpu.update_mode();
    cpu
}

/// Loads `regs` into the interpreter's state.
pub(crate) fn load(cpu: &mut CpuState, regs: &Registers) {
    cpu.gpr[..16].copy_from_slice(&regs.gpr);
    cpu.set_rip(regs.rip);
    cpu.rflags = regs.rflags | rflags::FIXED1 | rflags::IF;
    cpu.fp.area[..AREA_SIZE].copy_from_slice(&regs.area);
}
