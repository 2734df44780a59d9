//! How many first-level tables there are, and which contexts share some.

mod machine;

use std::ops::Range;

use machine::Machine;
use mmu::{Policy, l1::Half};
use x86_cpu::{Access, Flush, Privilege};
use x86_defs::control::cr4;
use x86_defs::paging::{A, D, G, P, RW};

const ROOTS: u64 = 60;
const ROOT: u64 = 0x10_0000;
const GVA: u64 = 0x40_0000;

fn guest() -> Machine {
    let mut m = Machine::long_mode(ROOT);
    let mut pool = ROOT + ROOTS * 4096;
    for root in 0..ROOTS {
        m.map(ROOT + root * 4096, GVA, 0x2000 | 7, &mut pool);
    }
    m.mmu.set_policy(&m.cpu, Policy::Auto);
    m
}

fn run(m: &mut Machine, root: u64) {
    m.cpu.cr3 = ROOT + root * 4096;
    assert!(m.mmu.load_cr3(&mut m.cpu, true).is_ok());
    let page = m
        .mmu
        .translate(&mut m.cpu, GVA, Access::Read, Privilege::Current);
    assert!(page.is_ok());
}

/// Processes with these roots take turns.
fn laps(m: &mut Machine, number: usize, roots: Range<u64>) {
    for _ in 0..number {
        roots.clone().for_each(|root| run(m, root));
    }
}

/// Processes that come and go take the tables of those that have gone.
#[test]
fn processes_that_have_ended_keep_no_tables() {
    let mut m = guest();
    for root in 0..ROOTS {
        for _ in 0..5 {
            run(&mut m, root);
        }
    }
    let kept = m.mmu.kept();
    assert!(kept.contexts as u64 > ROOTS / 2);
    assert!(kept.tables <= 16, "{}", kept.tables);
}

/// Those that take turns get tables of their own.
#[test]
fn processes_that_come_back_have_tables() {
    let mut m = guest();
    laps(&mut m, 20, 0..ROOTS);
    let (made, tables) = (m.mmu.stats().views_made, m.mmu.kept().tables as u64);
    assert!(tables >= ROOTS, "{tables}");
    laps(&mut m, 1, 0..ROOTS);
    assert_eq!(m.mmu.stats().views_made, made);
}

/// Where there are no more tables, those of address spaces that the guest has taken down go first.
#[test]
fn address_spaces_that_are_gone_give_their_tables() {
    let mut m = guest();
    let half = ROOTS / 4;
    m.mmu.set_max_tables(&m.cpu, 2 * half as usize + 2);
    laps(&mut m, 10, 0..2 * half);
    for at in (0..half).flat_map(|root| tables_of(&m, root)) {
        m.poke(at, 8, 0);
    }
    laps(&mut m, 10, half..3 * half);
    let made = m.mmu.stats().views_made;
    laps(&mut m, 10, half..3 * half);
    assert_eq!(m.mmu.stats().views_made, made);
}

/// Those of processes that sleep go before those of processes that take turns, which find theirs again.
#[test]
fn processes_that_sleep_give_their_tables() {
    let mut m = guest();
    let half = ROOTS / 4;
    m.mmu.set_max_tables(&m.cpu, 2 * half as usize + 2);
    laps(&mut m, 10, 0..2 * half);
    laps(&mut m, 30, half..3 * half);
    let made = m.mmu.stats().views_made;
    laps(&mut m, 10, half..3 * half);
    assert_eq!(m.mmu.stats().views_made, made);
}

/// Address spaces whose pages have the same addresses come to have places of their own in the second level.
#[test]
fn address_spaces_that_displace_each_other_grow_the_second_level() {
    let mut m = guest();
    m.mmu.set_max_tables(&m.cpu, 2);
    let pages = m.mmu.stats().reach_pages;
    for _ in 0..600 {
        for root in 0..ROOTS {
            run(&mut m, root);
            read(&mut m, GVA);
        }
    }
    assert_eq!(m.mmu.stats().reach_pages, 4 * pages);
}

/// The addresses of the entries that lead to the page.
fn tables_of(m: &Machine, root: u64) -> Vec<u64> {
    let mut table = ROOT + root * 4096;
    let entry = |level: u32| {
        let at = table + (GVA >> (12 + 9 * (level - 1)) & 511) * 8;
        table = m.peek(at, 8) & 0x000f_ffff_ffff_f000;
        at
    };
    (1..=4).rev().map(entry).collect()
}

const KERNEL: u64 = 0xffff_8000_0000_1000;
const PRIVATE: u64 = 0xffff_8000_0000_2000;

/// The kernel has a page that is global, and one that is not.
fn kernel(policy: Policy) -> Machine {
    let mut m = Machine::long_mode(ROOT);
    m.cpu.cr4 |= cr4::SMAP | cr4::PGE;
    let mut pool = ROOT + ROOTS * 4096;
    for root in 0..ROOTS {
        let table = ROOT + root * 4096;
        m.map(table, KERNEL, 0x2000 | P | RW | A | D | G, &mut pool);
        let page = 0x3000 + root % 2 * 0x1000;
        m.map(table, PRIVATE, page | P | RW | A | D, &mut pool);
    }
    m.poke(0x3000, 8, 3);
    m.poke(0x4000, 8, 4);
    m.reload();
    m.mmu.set_policy(&m.cpu, policy);
    m
}

fn load(m: &mut Machine, root: u64) {
    m.cpu.cr3 = ROOT + root * 4096;
    assert!(m.mmu.load_cr3(&mut m.cpu, true).is_ok());
}

fn read(m: &mut Machine, gva: u64) -> u64 {
    let word = m.mmu.read::<u64>(&mut m.cpu, gva, Privilege::Current);
    word.unwrap_or(u64::MAX)
}

fn holds(m: &Machine, gva: u64) -> bool {
    m.mmu.live_tables().find(Half::Read, gva).is_some()
}

#[test]
fn roots_share_what_a_kernel_maps_as_global() {
    for policy in [Policy::Tdp, Policy::Shadow, Policy::Auto] {
        let mut m = kernel(policy);
        read(&mut m, KERNEL);
        for root in 1..8 {
            load(&mut m, root);
            assert!(holds(&m, KERNEL), "{policy:?} {root}");
        }
        m.mmu.flush(&m.cpu, Flush::Page(KERNEL));
        assert!(!holds(&m, KERNEL));
        load(&mut m, 1);
        assert!(!holds(&m, KERNEL));
    }
}

#[test]
fn a_root_keeps_what_is_not_global_for_itself() {
    for policy in [Policy::Tdp, Policy::Shadow, Policy::Auto] {
        let mut m = kernel(policy);
        read(&mut m, KERNEL);
        for turn in 0..6 {
            for root in [2, 5, 8] {
                load(&mut m, root);
                assert_eq!(read(&mut m, PRIVATE), 3 + root % 2, "{policy:?} {root}");
            }
            load(&mut m, 9);
            assert!(!holds(&m, PRIVATE), "{policy:?} {turn}");
            // The others have one context for all roots, or for those that come back seldom.
            assert!(policy != Policy::Shadow || holds(&m, KERNEL), "{turn}");
        }
    }
}
