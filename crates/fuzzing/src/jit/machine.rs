//! [`Machine`]: a vCPU in 64-bit or compatibility mode with paging, run by one engine.
//!
//! All of memory is mapped three times: for the user at [`USER`], for the supervisor at [`KERNEL`] and [`KERNEL32`].
//! Each exception leads to a HLT of its own.

use std::io;

use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use testkit::MmuBus;
use x86_cpu::{CpuState, Feature, Flush, GuestBus, Shadow};
use x86_defs::{
    control::{cr0, cr4, efer},
    reg,
    retired::STREAMS,
    rflags,
    segment::{Attr, DescriptorTable, Segment},
    xsave,
};
use x86_interp::{Interp, RunStop};
use x86_jit::Jit;
use x86_native::oracle::Mode;

use crate::{
    setup, state,
    undefined::{Strictness, Undefined},
};

/// gva of gpa 0 for the user.
pub(crate) const USER: u64 = 0x1040_0000;
/// gva of gpa 0 for the supervisor.
pub(crate) const KERNEL: u64 = 0xffff_8880_0000_0000;
/// gva of gpa 0 for the supervisor in 32-bit code.
pub(crate) const KERNEL32: u64 = 0x2040_0000;

const GDT: u64 = 0x1000;
const IDT: u64 = 0x2000;
const TSS: u64 = 0x3000;
/// The exceptions' handlers, sixteen bytes for each vector.
const HANDLERS: u64 = 0x4000;
/// Top of the stack on which exceptions are delivered.
pub(crate) const FRAMES: u64 = 0x6000;
/// The code that SYSCALL leads to: SWAPGS, XCHG RAX with R10, SWAPGS, SYSRETQ.
const SYSTEM_CALL: u64 = 0x7000;
const SYSTEM_CALL_CODE: [u8; 11] = [
    0x0f, 0x01, 0xf8, 0x49, 0x92, 0x0f, 0x01, 0xf8, 0x48, 0x0f, 0x07,
];
const TABLES: u64 = 0x10000;
/// The code, six pages.
pub(crate) const CODE: u64 = 0x20000;
pub(crate) const CODE_PAGES: u64 = 6;
/// The data pages; see [`entry`].
pub(crate) const DATA: u64 = 0x30000;
pub(crate) const DATA_PAGES: u64 = 9;
/// A read-only page.
pub(crate) const READ_ONLY: u64 = DATA + 0x2000;
/// A page that is not present.
pub(crate) const ABSENT: u64 = DATA + 0x3000;
/// The page of loop counters and branch targets.
pub(crate) const PRIVATE: u64 = 0x3c000;
/// End of the stack, which has two pages.
pub(crate) const STACK_TOP: u64 = 0x3c000;
/// Size of memory in bytes.
pub(crate) const RAM: usize = 0x40000;

/// Returns the gva of gpa 0 for a program.
pub(crate) const fn base(cpl: u8, narrow: bool) -> u64 {
    match (cpl, narrow) {
        (0, false) => KERNEL,
        (0, true) => KERNEL32,
        _ => USER,
    }
}

/// Returns CS and SS of a program.
pub(crate) const fn selectors(cpl: u8, narrow: bool) -> [u16; 2] {
    match (cpl, narrow) {
        (0, false) => [0x08, 0x10],
        (0, true) => [0x38, 0x10],
        (_, false) => [0x23, 0x1b],
        (_, true) => [0x43, 0x1b],
    }
}

/// Returns the leaf entry of a page.
fn entry(gpa: u64, user: bool) -> u64 {
    let (p, w, u) = (1, 2, 4 * u64::from(user));
    let page = gpa.wrapping_sub(DATA) >> 12;
    // Protection keys have an effect if CR4.PKE is set.
    let key = |key: u64| key << 59;
    match page {
        // These two change places, so that accesses to both are to bytes that lie apart.
        0 | 1 => (gpa ^ 0x1000) | p | w | u | key(page + 1),
        4 => gpa | p | w | u | key(page + 1),
        2 => gpa | p | u | key(3),
        3 => 0,
        5 => gpa | p | w,
        // There is no memory, so an access is an exit.
        6 => 1 << 30 | p | w | u,
        7 => gpa | p | w | u | 1 << 63,
        _ if gpa < CODE => gpa | p | w,
        _ => gpa | p | w | u,
    }
}

/// Returns the content of memory before a program is loaded.
pub(crate) fn initial_memory() -> Vec<u8> {
    let mut m = vec![0; RAM];
    let mut put = |at: u64, v: u64| {
        m[at as usize..at as usize + 8].copy_from_slice(&v.to_le_bytes());
    };
    for (n, d) in [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        // The entries of the TSS, which is loaded already.
        0,
        0,
        0x00cf_9b00_0000_ffff,
        0x00cf_fb00_0000_ffff,
    ]
    .into_iter()
    .enumerate()
    {
        put(GDT + 8 * n as u64, d);
    }
    for vector in 0..256u64 {
        let to = KERNEL + HANDLERS + 16 * vector;
        // An interrupt gate: present, stack 1.
        let low = to & 0xffff | 8 << 16 | 1 << 32 | 0x8e << 40 | (to >> 16 & 0xffff) << 48;
        put(IDT + 16 * vector, low);
        put(IDT + 16 * vector + 8, to >> 32);
    }
    put(TSS + 4, KERNEL + STACK_TOP);
    put(TSS + 36, KERNEL + FRAMES);
    // The root, then three levels for each mapping.
    let mut next = TABLES + 0x1000;
    for (base, user) in [(USER, true), (KERNEL, false), (KERNEL32, false)] {
        let mut table = TABLES;
        for level in [3, 2, 1] {
            let slot = (table + 8 * (base >> (12 + 9 * level) & 511)) as usize;
            if m[slot] == 0 {
                m[slot..slot + 8].copy_from_slice(&(next | 7).to_le_bytes());
                next += 0x1000;
            }
            let mut b = [0; 8];
            b.copy_from_slice(&m[slot..slot + 8]);
            table = u64::from_le_bytes(b) & !0xfff;
        }
        let first = base >> 12 & 511;
        for page in 0..RAM as u64 >> 12 {
            let slot = (table + 8 * (first + page)) as usize;
            m[slot..slot + 8].copy_from_slice(&entry(page << 12, user).to_le_bytes());
        }
    }
    m[HANDLERS as usize..HANDLERS as usize + 0x1000].fill(0xf4);
    let call = SYSTEM_CALL as usize;
    m[call..call + SYSTEM_CALL_CODE.len()].copy_from_slice(&SYSTEM_CALL_CODE);
    m
}

/// Returns a vCPU as programs find it. `cpl` is 0 or 3; `narrow`: it executes 32-bit code.
pub(crate) fn cpu(cpl: u8, narrow: bool) -> CpuState {
    let mut cpu = state::cpu(state::host_features(), Mode::Bits64);
    cpu.cpl = cpl;
    cpu.cr0 = cr0::PE | cr0::PG | cr0::NE | cr0::MP | cr0::ET | cr0::WP | cr0::AM;
    cpu.cr4 = cr4::PAE | cr4::PGE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE;
    cpu.efer = efer::LME | efer::LMA | efer::NXE | efer::SCE;
    cpu.cr3 = TABLES;
    cpu.features.maxphyaddr = cpu.features.maxphyaddr.max(36);
    cpu.features.set(Feature::Pku, true);
    cpu.xcr0 |= xsave::PKRU;
    let [code, data] = selectors(cpl, narrow);
    let kind = if narrow { 0xc09b } else { 0xa09b };
    let dpl = u32::from(cpl) << 5;
    for (n, s) in cpu.seg.iter_mut().enumerate() {
        let is_code = n == reg::CS;
        *s = Segment {
            base: 0,
            limit: u32::MAX,
            attr: Attr(dpl | if is_code { kind } else { 0xc093 }),
            selector: if is_code { code } else { data },
        };
    }
    cpu.gdtr = DescriptorTable {
        base: KERNEL + GDT,
        limit: 0x47,
    };
    cpu.idtr = DescriptorTable {
        base: KERNEL + IDT,
        limit: 0xfff,
    };
    cpu.tr = Segment {
        base: KERNEL + TSS,
        limit: 0x67,
        attr: Attr(0x8b),
        selector: 0x28,
    };
    cpu.msr.star = 0x13 << 48 | 0x08 << 32;
    cpu.msr.lstar = KERNEL + SYSTEM_CALL;
    cpu.update_mode();
    cpu
}

/// The engine that executes.
enum Engine {
    Interp,
    Jit(Box<Jit<MmuBus>>),
}

/// Conditions around a program that must not have an effect on it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weather {
    /// True if translated code is dropped at each return to the run loop.
    pub(crate) flushes: bool,
    /// Number of blocks between two returns.
    pub(crate) poll_every: u32,
    /// True if the request word is set all the time.
    pub(crate) requested: bool,
    /// True if an interrupt is said to wait for RFLAGS.IF.
    pub(crate) waits: bool,
}

/// What is counted while a program runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counting {
    /// As [`x86_cpu::Retired::levels`].
    pub(crate) levels: u8,
    /// As [`x86_cpu::Retired::streams`].
    pub(crate) streams: u16,
    /// For each stream, the number of its events after which a counter overflows, again and again; 0: never.
    pub(crate) periods: [u64; STREAMS],
}

/// Where a counter has overflowed, or a breakpoint was hit: RIP and the general registers.
type Landing = (u64, [u64; 16]);

/// Number of overflows after which a program is given up.
const MAX_LANDINGS: usize = 5_000;

/// A vCPU with its engine and memory.
pub(crate) struct Machine {
    engine: Engine,
    interp: Interp<MmuBus>,
    pub(crate) bus: MmuBus,
    pub(crate) cpu: CpuState,
    memory: Vec<u8>,
    counting: Counting,
    pub(crate) landings: Vec<Landing>,
}

impl Machine {
    /// Makes a machine that is run by the interpreter, or by translation with a cache of the given size.
    pub(crate) fn new(cache: Option<usize>) -> io::Result<Self> {
        let engine = match cache {
            None => Engine::Interp,
            Some(size) => {
                let mut jit = Jit::with_capacity(size).ok_or(io::ErrorKind::Unsupported)?;
                jit.mix_tiers();
                Engine::Jit(jit)
            }
        };
        Ok(Self {
            engine,
            interp: Interp::new(),
            bus: MmuBus::new(RAM)?,
            cpu: cpu(0, false),
            memory: vec![0; RAM],
            counting: Counting::default(),
            landings: Vec::new(),
        })
    }

    /// RDTSC reads the same number always.
    pub(super) fn stop_tsc(&mut self) {
        self.bus.stopped_tsc = Some(0x1234_5678_9abc);
    }

    /// Compares all that translated code does with the interpreter as it runs.
    pub(crate) fn set_lockstep(&mut self, planted: bool) {
        if let Engine::Jit(jit) = &mut self.engine {
            jit.set_lockstep(planted, |_| {});
        }
    }

    /// Takes the difference that lock-step has found.
    pub(crate) fn take_difference(&mut self) -> Option<String> {
        match &mut self.engine {
            Engine::Interp => None,
            Engine::Jit(jit) => jit.take_difference(),
        }
    }

    /// Returns the number of stretches compared.
    pub(crate) fn stretches(&self) -> u64 {
        match &self.engine {
            Engine::Interp => 0,
            Engine::Jit(jit) => jit.lockstep_stats().map_or(0, |s| s.stretches),
        }
    }

    /// Returns counters of what was translated.
    pub(crate) fn stats(&self) -> x86_jit::Stats {
        match &self.engine {
            Engine::Interp => x86_jit::Stats::default(),
            Engine::Jit(jit) => jit.stats(),
        }
    }

    /// Sets how translations are kept when programs write CR3.
    pub(crate) fn set_policy(&mut self, policy: mmu::Policy) {
        self.bus.mmu.set_policy(&self.cpu, policy);
    }

    /// Loads memory and registers. Translations of addresses are forgotten, translated code is not.
    pub(crate) fn load(&mut self, memory: &[u8], cpu: &CpuState) {
        self.memory();
        for (n, (new, old)) in memory
            .chunks_exact(0x1000)
            .zip(self.memory.chunks_exact(0x1000))
            .enumerate()
        {
            // The write is tracked like one of the vCPU, so that a change of code is noticed.
            if new != old {
                let at = changed(new, old);
                let gpa = (n * 0x1000 + at.start) as u64;
                assert!(self.bus.mmu.write_gpa(gpa, &new[at]), "no memory");
            }
        }
        self.cpu = cpu.clone();
        self.bus.hits = None;
        // A and D bits of the tables are new, so everything is flushed.
        self.bus.mmu.set_root(&self.cpu);
        self.bus.mmu.flush(&self.cpu, Flush::All);
        self.bus.select_view(&mut self.cpu);
    }

    /// Sets what is counted from now on.
    pub(crate) fn count(&mut self, counting: Counting) {
        self.counting = counting;
        self.landings.clear();
        let r = &mut self.cpu.retired;
        (r.levels, r.streams) = (counting.levels, counting.streams);
        self.begin_periods();
    }
    /// Makes all counters overflow after their periods.
    fn begin_periods(&mut self) {
        let left = self.counting.periods.map(|period| match period {
            0 => u64::MAX,
            period => period,
        });
        self.cpu.retired.bound(&left);
    }

    /// Returns all of memory.
    pub(crate) fn memory(&mut self) -> &[u8] {
        let read = self.bus.mmu.memory().read_bytes(0, &mut self.memory);
        assert!(read, "no memory");
        &self.memory
    }

    /// Runs until HLT, a triple fault or an exit. `None` if that takes too long.
    pub(crate) fn run(&mut self, weather: Weather, patience: u32) -> Option<RunStop> {
        self.bus.poll_every = weather.poll_every;
        self.bus.waits = weather.waits;
        self.bus.request(weather.requested);
        self.bus.mmu.sync();
        let mut left = patience;
        while left > 0 && self.landings.len() < MAX_LANDINGS {
            let stop = match &mut self.engine {
                Engine::Interp => self.interp.run(&mut self.cpu, &mut self.bus),
                Engine::Jit(jit) => {
                    if weather.flushes {
                        jit.flush_all();
                    }
                    jit.run(&mut self.interp, &mut self.cpu, &mut self.bus, None)
                }
            };
            let is_due = self.cpu.retired.is_due();
            let hits = self.bus.hits.take();
            if is_due || hits.is_some() {
                self.note_landing(hits.unwrap_or(0));
            }
            if is_due {
                self.begin_periods();
            } else {
                left -= 1;
            }
            if hits.is_some() {
                // A debugger goes on behind the breakpoint.
                self.cpu.rflags |= rflags::RF;
            } else if stop != RunStop::Poll {
                // HLT ends the shadow of STI, whichever way the engine came to it.
                self.cpu.shadow = Shadow::None;
                return Some(stop);
            }
            if self.bus.mmu.needs_sync() {
                self.bus.mmu.sync();
            }
        }
        None
    }

    /// Interprets up to so many instructions without paging. Returns true if the engines may differ after one of them:
    /// if it stores the last x87 instruction, or if it depends on what the manual leaves undefined or leaves such flags
    /// at the end, and the host is another one than the interpreter's model.
    pub(crate) fn may_differ(&mut self, steps: u32) -> bool {
        let is_modelled = crate::model::is_modelled();
        let mut undefined = Undefined::new(Strictness::Manual);
        for _ in 0..steps {
            let code = self.cpu.seg[reg::CS];
            let at = code.base.wrapping_add(self.cpu.rip()) & 0xffff_ffff;
            let bits = if code.attr.is_big() { 32 } else { 16 };
            let mut bytes = [0; 15];
            if !self.bus.mmu.memory().read_bytes(at, &mut bytes) {
                return false;
            }
            let options = DecoderOptions::AMD;
            let i = Decoder::with_ip(bits, &bytes, self.cpu.rip(), options).decode();
            let mut gpr = [0; 16];
            gpr.copy_from_slice(&self.cpu.gpr[..16]);
            if stores_last_x87(i.mnemonic()) {
                return true;
            }
            let is_undefined =
                undefined.is_read_in_step(&i, &gpr) || setup::result_is_undefined(&i, &gpr);
            if is_undefined && !is_modelled {
                return true;
            }
            let stop = self.interp.step(&mut self.cpu, &mut self.bus);
            if stop != RunStop::Poll {
                break;
            }
            if self.bus.mmu.needs_sync() {
                self.bus.mmu.sync();
            }
        }
        !is_modelled && undefined.is_any_left()
    }

    /// Notes where the vCPU is. `hits`: the breakpoints that have stopped it.
    fn note_landing(&mut self, hits: u64) {
        let mut registers = [0; 16];
        registers.copy_from_slice(&self.cpu.gpr[..16]);
        // After RDTSC and RDTSCP nothing else depends on these registers.
        for n in [reg::RAX, reg::RCX, reg::RDX] {
            registers[n] = 0;
        }
        registers[reg::RAX] = hits;
        self.landings.push((self.cpu.rip(), registers));
    }

    /// Drops decoded and translated code.
    pub(crate) fn forget_code(&mut self) {
        self.interp.flush_all();
    }
}

/// True if the instruction stores opcode and addresses of the last x87 instruction.
fn stores_last_x87(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        mnemonic,
        M::Fnstenv | M::Fnsave | M::Fxsave | M::Xsave | M::Xsaveopt | M::Xsavec
    )
}

impl core::fmt::Debug for Machine {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Machine").finish_non_exhaustive()
    }
}

/// Returns the range from the first to the last byte that differ.
fn changed(new: &[u8], old: &[u8]) -> core::ops::Range<usize> {
    let differs = |n: &usize| new[*n] != old[*n];
    let start = (0..new.len()).find(differs).unwrap_or(0);
    let end = (0..new.len()).rfind(differs).map_or(start, |n| n + 1);
    start..end
}
