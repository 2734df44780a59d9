//! A program that accesses more memory than small tables of the first level reach gets large ones, and nothing but its speed
//! changes by that.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use long_mode::{Machine, PML4, become_user, start};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const CODE: u64 = 0x1000;
const KERNEL: u64 = 0x2000;
/// Where the pages are for the program, in a slot of their own; the slot begins with their page tables.
const WINDOW: u64 = 0x8000_0000;
const GPA: u64 = 0x4000_0000;
const TABLES: u64 = 1 << 20;
const SLOT: u32 = 5;
/// Number of pages: twice what small tables reach.
const PAGES: u64 = 1 << 15;
/// Memory of a guest that counts as small, and of one that does not, most of it unused.
const SMALL: u64 = 8 << 20;
const LARGE: u64 = 512 << 20;
/// Steps of the sequence by which the program chooses pages.
const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const MANY: u64 = 4_000_000;

struct Guest {
    m: Machine,
    vcpu: VcpuFd,
    memory: &'static GuestMemoryMmap<()>,
    /// The page of memory that each page of the program is.
    mapped: Vec<u64>,
    /// What each page of memory should have in its first word.
    expected: Vec<u64>,
}

impl Guest {
    /// Makes a guest of this size whose pages are `pages` pages of memory, again and again.
    fn new(size: u64, pages: u64) -> Self {
        let m = Machine::new();
        let size = size as usize;
        let memory: &'static _ = Box::leak(Box::new(
            GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(GPA), size)]).unwrap(),
        ));
        let region = kvm_userspace_memory_region {
            slot: SLOT,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: GPA,
            memory_size: size as u64,
            userspace_addr: memory.get_host_address(GuestAddress(GPA)).unwrap() as u64,
        };
        // SAFETY: the memory is never unmapped.
        unsafe { m.vm.set_user_memory_region(region) }.unwrap();
        for (at, entry) in [
            (PML4, PML4 + 0x1007),
            (PML4 + 0x1000, PML4 + 0x2007),
            (PML4 + 0x2000, 0x87),
            (PML4 + 0x1000 + 2 * 8, GPA | 7),
        ] {
            m.write(at, &entry.to_le_bytes());
        }
        for n in 0..PAGES >> 9 {
            let table = (GPA + 0x1000 + (n << 12)) | 7;
            memory.write_obj(table, GuestAddress(GPA + n * 8)).unwrap();
        }
        m.load(CODE, |a| {
            let mut turn = a.create_label();
            a.set_label(&mut turn)?;
            a.imul_2(rdi, rsi)?;
            a.add(rdi, 1)?;
            a.mov(rax, rdi)?;
            a.shr(rax, 20)?;
            a.and(eax, PAGES as i32 - 1)?;
            a.shl(rax, 12)?;
            a.inc(qword_ptr(rbx + rax))?;
            a.dec(r8)?;
            a.jne(turn)?;
            a.syscall()
        });
        // Nothing but this flushes: the VMM sets general registers alone.
        m.load(KERNEL, |a| {
            a.invlpg(byte_ptr(r9))?;
            a.hlt()?;
            a.mov(ecx, CODE as i32)?;
            a.mov(r11d, 2)?;
            a.sysretq()
        });
        let vcpu = m.vcpu(0, CODE);
        become_user(&vcpu, KERNEL);
        start(&vcpu, CODE);
        let mut g = Self {
            m,
            vcpu,
            memory,
            mapped: vec![0; PAGES as usize],
            expected: vec![0; pages as usize],
        };
        (0..PAGES).for_each(|page| g.map(page, page % pages));
        g
    }

    fn map(&mut self, page: u64, to: u64) {
        self.mapped[page as usize] = to;
        let entry = (GPA + TABLES + (to << 12)) | 7;
        let at = GuestAddress(GPA + 0x1000 + page * 8);
        self.memory.write_obj(entry, at).unwrap();
    }

    /// Has the program write so many pages, and its kernel flush one. Returns those of memory that were written.
    fn run(&mut self, seed: u64, count: u64, flushed: u64) -> Vec<u64> {
        let mut regs = self.vcpu.get_regs().unwrap();
        (regs.rdi, regs.rsi, regs.r8) = (seed, MULTIPLIER, count);
        (regs.rbx, regs.r9) = (WINDOW, WINDOW + (flushed << 12));
        self.vcpu.set_regs(&regs).unwrap();
        assert!(matches!(self.vcpu.run().unwrap(), VcpuExit::Hlt));
        let mut seed = seed;
        let mut written = Vec::new();
        for _ in 0..count {
            seed = seed.wrapping_mul(MULTIPLIER).wrapping_add(1);
            let page = self.mapped[(seed >> 20) as usize % PAGES as usize];
            self.expected[page as usize] += 1;
            written.push(page);
        }
        written.sort_unstable();
        written.dedup();
        written
    }

    fn check(&self) {
        for (n, expected) in self.expected.iter().enumerate() {
            let at = GuestAddress(GPA + TABLES + ((n as u64) << 12));
            assert_eq!(self.memory.read_obj::<u64>(at).unwrap(), *expected, "{n}");
        }
    }

    /// The pages that were written since the last harvest, without those of tables.
    fn harvest(&self) -> Vec<u64> {
        let words = self.m.vm.get_dirty_log(SLOT, LARGE as usize).unwrap();
        let is_set = |n: &u64| words[(n / 64) as usize] >> (n % 64) & 1 != 0;
        let first = TABLES >> 12;
        let all = first..LARGE >> 12;
        all.filter(is_set).map(|n| n - first).collect()
    }

    fn grown(&self) -> u64 {
        stats_fd::counter(&self.vcpu, "mmu_tables_grown")
    }
}

#[test]
fn tables_grow_and_lose_nothing() {
    let mut g = Guest::new(LARGE, PAGES);
    g.run(1, MANY, 0);
    g.check();
    if std::env::var_os("ANYKVM_ENGINE").is_none() {
        assert_eq!(g.grown(), 1);
    }
    g.harvest();
    // A harvest takes the write permission of each of few pages from large tables, too.
    for round in 0..8 {
        let written = g.run(7 + round / 2, 5, 0);
        assert_eq!(g.harvest(), written, "{round}");
    }
    // INVLPG takes a page from them that has been mapped elsewhere. (The one write before it is to another page.)
    for page in [5, PAGES / 2 + 5, PAGES - 1] {
        g.map(page, 9);
        assert!(!g.run(page, 1, page).contains(&9));
        g.run(page, MANY / 4, 0);
    }
    g.check();
    if std::env::var_os("ANYKVM_ENGINE").is_none() {
        assert_eq!(g.grown(), 1);
    }
}

/// However often a small guest misses, its process stays small.
#[test]
fn tables_of_small_guests_do_not_grow() {
    let mut g = Guest::new(SMALL, PAGES / 64);
    g.run(1, MANY, 0);
    g.check();
    assert_eq!(g.grown(), 0);
}
