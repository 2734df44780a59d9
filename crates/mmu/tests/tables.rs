//! How many first-level tables there are.

mod machine;

use machine::Machine;
use mmu::Policy;
use x86_cpu::{Access, Privilege};

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
    for _ in 0..20 {
        for root in 0..ROOTS {
            run(&mut m, root);
        }
    }
    let (made, tables) = (m.mmu.stats().views_made, m.mmu.kept().tables as u64);
    assert!(tables >= ROOTS, "{tables}");
    (0..ROOTS).for_each(|root| run(&mut m, root));
    assert_eq!(m.mmu.stats().views_made, made);
}
