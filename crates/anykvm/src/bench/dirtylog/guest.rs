//! A guest of several vCPUs that write memory, and the ways to harvest the pages that they wrote.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::{DirtyRing, Kvm, VcpuExit, VcpuFd, VmFd};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES,
    kvm_enable_cap, kvm_regs, kvm_segment,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::BootError;
use crate::lock::lock;
use crate::memory::GuestMemory;

/// Size of the first slot, which has the code, the tables and the vCPUs' counts.
const SMALL: u64 = 2 << 20;
const CODE: u64 = 0x1000;
const TABLES: u64 = 0x2000;
const COUNTS: u64 = 0x10000;
/// Address and number of the slot that is logged.
pub(super) const AREA: u64 = 1 << 30;
pub(super) const SLOT: u32 = 1;
const PAGE: u64 = 4096;

/// Code that writes random pages of a share of the area, and counts each write's time in a histogram:
///
/// ```text
/// 1: imul rbx, r9; add rbx, 0x3039; mov r12, rbx; shr r12, 33; and r12, rsi; shl r12, 12; rdtsc; shl rdx, 32; or rax, rdx;
/// mov r11, rax; mov [rdi+r12], rbx; rdtsc; shl rdx, 32; or rax, rdx; sub rax, r11; or rax, 1; bsr rcx, rax;
/// inc [rbp+rcx*8+64]; cmp rax, [rbp+8]; jbe 2f; mov [rbp+8], rax; 2: inc [rbp]; jmp 1b
/// ```
pub(super) const RANDOM: &[u8] = &[
    0x49, 0x0f, 0xaf, 0xd9, 0x48, 0x81, 0xc3, 0x39, 0x30, 0, 0, 0x49, 0x89, 0xdc, 0x49, 0xc1, 0xec,
    0x21, 0x49, 0x21, 0xf4, 0x49, 0xc1, 0xe4, 0x0c, 0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09,
    0xd0, 0x49, 0x89, 0xc3, 0x4a, 0x89, 0x1c, 0x27, 0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09,
    0xd0, 0x4c, 0x29, 0xd8, 0x48, 0x83, 0xc8, 1, 0x48, 0x0f, 0xbd, 0xc8, 0x48, 0xff, 0x44, 0xcd,
    0x40, 0x48, 0x3b, 0x45, 8, 0x76, 4, 0x48, 0x89, 0x45, 8, 0x48, 0xff, 0x45, 0, 0xeb, 0xae,
];

/// Code that writes each page of a share in turn, and then exits:
///
/// ```text
/// 1: xor r12, r12; 2: mov rax, r12; shl rax, 12; mov [rdi+rax], r12; inc r12; cmp r12, rsi; jbe 2b; out 0x80, al; jmp 1b
/// ```
pub(super) const PASS: &[u8] = &[
    0x4d, 0x31, 0xe4, 0x4c, 0x89, 0xe0, 0x48, 0xc1, 0xe0, 0x0c, 0x4c, 0x89, 0x24, 0x07, 0x49, 0xff,
    0xc4, 0x49, 0x39, 0xf4, 0x76, 0xed, 0xe6, 0x80, 0xeb, 0xe6,
];

/// Code that computes, and writes a page now and then:
///
/// ```text
/// 1: mov ecx, 64; 3: imul rbx, r9; add rbx, 0x3039; dec ecx; jnz 3b; inc r12; and r12, rsi; mov rax, r12; shl rax, 12;
/// mov [rdi+rax], rbx; inc [rbp]; jmp 1b
/// ```
pub(super) const COMPUTE: &[u8] = &[
    0xb9, 0x40, 0, 0, 0, 0x49, 0x0f, 0xaf, 0xd9, 0x48, 0x81, 0xc3, 0x39, 0x30, 0, 0, 0xff, 0xc9,
    0x75, 0xf1, 0x49, 0xff, 0xc4, 0x49, 0x21, 0xf4, 0x4c, 0x89, 0xe0, 0x48, 0xc1, 0xe0, 0x0c, 0x48,
    0x89, 0x1c, 0x07, 0x48, 0xff, 0x45, 0, 0xeb, 0xd5,
];

/// The way to harvest dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// KVM_GET_DIRTY_LOG, which also protects the pages again.
    Bitmap,
    /// KVM_GET_DIRTY_LOG and KVM_CLEAR_DIRTY_LOG.
    Manual,
    /// KVM_GET_DIRTY_LOG and KVM_CLEAR_DIRTY_LOG, with all pages dirty at first.
    AllSet,
    /// Dirty rings of so many entries.
    Ring(u32),
}

/// The writes of one vCPU.
#[derive(Clone, Debug)]
pub(super) struct Counts {
    pub(super) writes: u64,
    /// TSC cycles of the longest write.
    pub(super) longest: u64,
    /// Number of writes by the logarithm of their cycles.
    pub(super) histogram: [u64; 64],
    /// Number of writes from the start of the threads to their end, and nanoseconds of processor time.
    whole: (u64, u64),
}

impl Counts {
    /// Returns writes per second of processor time, which other load on the machine affects little.
    pub(super) fn rate(&self) -> f64 {
        let (writes, ns) = self.whole;
        writes as f64 / (ns as f64 / 1e9)
    }

    /// Returns the number of writes from the start of the threads to their end, and nanoseconds of processor time.
    pub(super) fn whole(&self) -> (u64, u64) {
        self.whole
    }
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            writes: 0,
            longest: 0,
            histogram: [0; 64],
            whole: (0, 0),
        }
    }
}

/// A guest whose vCPUs are at the start of their code.
pub(super) struct Guest {
    pub(super) vm: VmFd,
    pub(super) vcpus: Vec<VcpuFd>,
    rings: Mutex<Vec<DirtyRing>>,
    method: Method,
    memory: &'static GuestMemory,
    pages: u64,
    is_over: AtomicBool,
    found: AtomicU64,
    harvests: AtomicU64,
    /// Nanoseconds of processor time that vCPUs' threads have spent on full rings.
    making_room_ns: AtomicU64,
    /// Nanoseconds that the last KVM_CLEAR_DIRTY_LOG took.
    clearing_ns: AtomicU64,
    /// The bitmap that was read last.
    bitmap: Mutex<Vec<u64>>,
}

/// The sums of all harvests so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    pub(super) pages: u64,
    pub(super) harvests: u64,
    pub(super) making_room_ns: u64,
}

impl Guest {
    /// Makes a guest with `bytes` of logged memory, of which each vCPU writes a share of `share` pages (a power of
    /// two).
    pub(super) fn new(
        method: Method,
        code: &[u8],
        vcpus: u64,
        bytes: u64,
        share: u64,
    ) -> Result<Self, BootError> {
        let kvm = Kvm::new().map_err(BootError::kvm("opening KVM"))?;
        let vm = kvm.create_vm().map_err(BootError::kvm("KVM_CREATE_VM"))?;
        let ask = |cap, value| {
            let mut cap = kvm_enable_cap {
                cap,
                ..Default::default()
            };
            cap.args[0] = value;
            vm.enable_cap(&cap)
                .map_err(BootError::kvm("KVM_ENABLE_CAP"))
        };
        let manual = u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE);
        match method {
            Method::Bitmap => {}
            Method::Manual => ask(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, manual)?,
            Method::AllSet => {
                let set = u64::from(KVM_DIRTY_LOG_INITIALLY_SET);
                ask(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, manual | set)?;
            }
            Method::Ring(entries) => ask(KVM_CAP_DIRTY_LOG_RING, u64::from(entries) * 16)?,
        }
        let len = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let ranges = [
            (GuestAddress(0), len(SMALL)),
            (GuestAddress(AREA), len(bytes)),
        ];
        let memory = GuestMemoryMmap::from_ranges(&ranges).map_err(|e| BootError::Allocate {
            mib: bytes >> 20,
            reason: e.to_string(),
        })?;
        // A slot's memory is never unmapped, as only a few guests are made.
        let memory: &'static GuestMemory = Box::leak(Box::new(memory));
        write_tables(memory, code)?;
        vm.set_static_memory(memory)
            .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
        // The host's first fault in a huge page may take milliseconds, which are not to be measured. Huge pages have
        // been asked for before, as VMMs do.
        for page in 0..vcpus * share {
            memory
                .write_obj(0u8, GuestAddress(AREA + page * PAGE))
                .map_err(BootError::guest("memory"))?;
        }
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(BootError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
        let mut guest = Self {
            vm,
            vcpus: Vec::new(),
            rings: Mutex::default(),
            method,
            memory,
            pages: bytes / PAGE,
            is_over: AtomicBool::new(false),
            found: AtomicU64::new(0),
            harvests: AtomicU64::new(0),
            making_room_ns: AtomicU64::new(0),
            clearing_ns: AtomicU64::new(0),
            bitmap: Mutex::new(vec![0; len(bytes / PAGE).div_ceil(64)]),
        };
        for id in 0..vcpus {
            let vcpu = guest
                .vm
                .create_vcpu(id)
                .map_err(BootError::kvm("KVM_CREATE_VCPU"))?;
            vcpu.set_cpuid2(&cpuid)
                .map_err(BootError::kvm("KVM_SET_CPUID2"))?;
            start(&vcpu, id, share)?;
            if let Method::Ring(entries) = method {
                let ring = vcpu
                    .dirty_ring(entries)
                    .map_err(BootError::kvm("a dirty ring"))?;
                lock(&guest.rings).push(ring);
            }
            guest.vcpus.push(vcpu);
        }
        Ok(guest)
    }

    /// Begins or ends dirty logging.
    pub(super) fn log(&self, is_on: bool) -> Result<(), BootError> {
        self.vm
            .log_static_memory(self.memory, SLOT, is_on)
            .map_err(BootError::kvm("KVM_SET_USER_MEMORY_REGION"))
    }

    /// Clears the pages of `mask`, and notes how long that takes.
    fn clear(&self, mask: &[u64]) -> Result<(), BootError> {
        let begin = Instant::now();
        self.vm
            .clear_dirty_log(SLOT, 0, self.pages, mask)
            .map_err(BootError::kvm("KVM_CLEAR_DIRTY_LOG"))?;
        let ns = begin.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
        self.clearing_ns.store(ns, Ordering::Relaxed);
        Ok(())
    }

    /// Harvests once, after which all pages are clean. Returns how many were dirty.
    pub(super) fn harvest(&self) -> Result<u64, BootError> {
        let count = self.harvest_once()?;
        self.found.fetch_add(count, Ordering::Relaxed);
        self.harvests.fetch_add(1, Ordering::Relaxed);
        Ok(count)
    }

    /// Returns the sums of all harvests since the guest was made.
    pub(super) fn found(&self) -> Found {
        Found {
            pages: self.found.load(Ordering::Relaxed),
            harvests: self.harvests.load(Ordering::Relaxed),
            making_room_ns: self.making_room_ns.load(Ordering::Relaxed),
        }
    }

    fn harvest_once(&self) -> Result<u64, BootError> {
        if let Method::Ring(_) = self.method {
            let mut rings = lock(&self.rings);
            for ring in rings.iter_mut() {
                ring.collect(|_, _| {});
            }
            let count = self.vm.reset_dirty_rings();
            return Ok(count.map_err(BootError::kvm("KVM_RESET_DIRTY_RINGS"))? as u64);
        }
        let mut bitmap = lock(&self.bitmap);
        self.vm
            .read_dirty_log(SLOT, &mut bitmap)
            .map_err(BootError::kvm("KVM_GET_DIRTY_LOG"))?;
        let count = bitmap.iter().map(|w| u64::from(w.count_ones())).sum();
        if self.method != Method::Bitmap {
            self.clear(&bitmap)?;
        }
        Ok(count)
    }

    /// Returns how many microseconds the last KVM_CLEAR_DIRTY_LOG took.
    pub(super) fn clearing_us(&self) -> f64 {
        self.clearing_ns.load(Ordering::Relaxed) as f64 / 1e3
    }

    /// Returns the counts of a vCPU.
    pub(super) fn counts(&self, vcpu: u64) -> Result<Counts, BootError> {
        let read = |at: u64| {
            self.memory
                .read_obj::<u64>(GuestAddress(COUNTS + vcpu * PAGE + at))
                .map_err(BootError::guest("counts"))
        };
        let mut counts = Counts {
            writes: read(0)?,
            longest: read(8)?,
            ..Counts::default()
        };
        for (n, cell) in (0u64..).zip(&mut counts.histogram) {
            *cell = read(64 + n * 8)?;
        }
        Ok(counts)
    }

    /// Forgets the longest writes and the histograms.
    fn forget(&self) -> Result<(), BootError> {
        for vcpu in 0..self.vcpus.len() as u64 {
            let at = GuestAddress(COUNTS + vcpu * PAGE + 8);
            self.memory
                .write_slice(&[0; 8 + 48 + 512], at)
                .map_err(BootError::guest("counts"))?;
        }
        Ok(())
    }

    /// Lets the vCPUs run for a while, and calls `meanwhile` until it is over. Returns the sum of their counts.
    pub(super) fn run(
        &mut self,
        time: Duration,
        meanwhile: impl FnOnce(&Self) -> Result<(), BootError>,
    ) -> Result<Counts, BootError> {
        let mut vcpus = std::mem::take(&mut self.vcpus);
        let stoppers = vcpus
            .iter()
            .map(VcpuFd::stopper)
            .collect::<Result<Vec<_>, _>>()
            .map_err(BootError::kvm("a vCPU"))?;
        let this = &*self;
        let at_start = this.sum(stoppers.len())?.writes;
        let (result, ended) = thread::scope(|scope| {
            let threads: Vec<_> = vcpus
                .iter_mut()
                .map(|vcpu| scope.spawn(move || this.vcpu(vcpu)))
                .collect();
            // This waits until all of them run.
            thread::sleep(time / 4);
            let before = this.sum(stoppers.len()).map(|counts| counts.writes);
            let result = this.forget().and_then(|()| meanwhile(this));
            let after = this.sum(stoppers.len());
            this.is_over.store(true, Ordering::Relaxed);
            for stopper in &stoppers {
                stopper.stop();
            }
            let ended: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
            let counts = before.and_then(|before| {
                let mut counts = after?;
                counts.writes = counts.writes.saturating_sub(before);
                Ok(counts)
            });
            (result.and(counts), ended)
        });
        self.is_over.store(false, Ordering::Relaxed);
        for vcpu in &mut vcpus {
            vcpu.set_kvm_immediate_exit(0);
        }
        self.vcpus = vcpus;
        let mut ns = 0;
        for one in ended {
            ns +=
                one.map_err(|_| BootError::NoImage("a vCPU's thread has panicked".to_owned()))??;
        }
        let writes = self.sum(self.vcpus.len())?.writes - at_start;
        let mut counts = result?;
        counts.whole = (writes, ns);
        Ok(counts)
    }

    fn sum(&self, vcpus: usize) -> Result<Counts, BootError> {
        let mut sum = Counts::default();
        for vcpu in 0..vcpus as u64 {
            let counts = self.counts(vcpu)?;
            sum.writes += counts.writes;
            sum.longest = sum.longest.max(counts.longest);
            for (to, from) in sum.histogram.iter_mut().zip(counts.histogram) {
                *to += from;
            }
        }
        Ok(sum)
    }

    /// Runs a vCPU until it is stopped, and makes room in full rings. Returns nanoseconds of processor time.
    fn vcpu(&self, vcpu: &mut VcpuFd) -> Result<u64, BootError> {
        let begin = host::clock::thread_cpu_ns();
        loop {
            match vcpu.run() {
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    let full = host::clock::thread_cpu_ns();
                    self.harvest()?;
                    let ns = host::clock::thread_cpu_ns() - full;
                    self.making_room_ns.fetch_add(ns, Ordering::Relaxed);
                }
                Ok(exit) => {
                    return Err(BootError::NoImage(format!("unexpected exit: {exit:?}")));
                }
                Err(error) if error.errno() == rustix::io::Errno::INTR.raw_os_error() => {
                    // Otherwise the exit is left over from the last time.
                    if self.is_over.load(Ordering::Relaxed) {
                        return Ok(host::clock::thread_cpu_ns() - begin);
                    }
                }
                Err(error) => return Err(BootError::kvm("KVM_RUN")(error)),
            }
        }
    }

    /// Runs the first vCPU to its next exit by a port.
    pub(super) fn pass(&mut self) -> Result<(), BootError> {
        let Some(mut vcpu) = self.vcpus.pop() else {
            return Err(BootError::NoImage("no vCPU".to_owned()));
        };
        loop {
            match vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL) => {
                    self.harvest()?;
                }
                VcpuExit::IoOut(..) => break,
                exit => {
                    return Err(BootError::NoImage(format!("unexpected exit: {exit:?}")));
                }
            }
        }
        self.vcpus.push(vcpu);
        Ok(())
    }
}

/// Writes page tables, which map the small slot to itself and the area by pages of 1 GiB; and the code.
fn write_tables(memory: &GuestMemory, code: &[u8]) -> Result<(), BootError> {
    let write = |at: u64, value: u64| {
        memory
            .write_obj(value, GuestAddress(at))
            .map_err(BootError::guest("tables"))
    };
    let (present, large) = (3u64, 0x80);
    write(TABLES, (TABLES + 0x1000) | present)?;
    write(TABLES + 0x1000, (TABLES + 0x2000) | present)?;
    for gib in 1..512 {
        write(TABLES + 0x1000 + 8 * gib, gib << 30 | present | large)?;
    }
    write(TABLES + 0x2000, present | large)?;
    memory
        .write_slice(code, GuestAddress(CODE))
        .map_err(BootError::guest("code"))
}

/// Sets a vCPU to long mode, at the begin of the code.
fn start(vcpu: &VcpuFd, id: u64, share: u64) -> Result<(), BootError> {
    let mut s = vcpu.get_sregs().map_err(BootError::kvm("KVM_GET_SREGS"))?;
    let flat = |segment: &mut kvm_segment| {
        segment.base = 0;
        segment.limit = u32::MAX;
        (segment.g, segment.db) = (1, 1);
    };
    for segment in [&mut s.cs, &mut s.ds, &mut s.es, &mut s.ss] {
        flat(segment);
    }
    (s.cs.db, s.cs.l) = (0, 1);
    s.cr0 |= 1 | 1 << 31;
    s.cr3 = TABLES;
    s.cr4 |= 1 << 5 | 1 << 9;
    s.efer |= 1 << 8 | 1 << 10;
    vcpu.set_sregs(&s)
        .map_err(BootError::kvm("KVM_SET_SREGS"))?;
    let start = kvm_regs {
        rip: CODE,
        rflags: 2,
        rsp: SMALL,
        rdi: AREA + id * share * PAGE,
        rsi: share - 1,
        rbp: COUNTS + id * PAGE,
        rbx: 88_172_645_463_325_252 + id,
        // The multiplier of Knuth's MMIX generator.
        r9: 6_364_136_223_846_793_005,
        ..Default::default()
    };
    vcpu.set_regs(&start)
        .map_err(BootError::kvm("KVM_SET_REGS"))
}
