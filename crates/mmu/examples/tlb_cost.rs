//! Prints what an access costs: L1 hit, L2 hit, walk, changes of view and context.
//!
//! `cargo run --release -p mmu --example tlb_cost [PART OF A ROW'S NAME]`

#![allow(clippy::print_stdout, reason = "printing is its purpose")]
#![allow(clippy::unwrap_used, reason = "a broken set-up has nothing to measure")]

#[path = "../tests/machine/mod.rs"]
mod machine;

use std::{hint::black_box, time::Instant};

use machine::Machine;
use x86_cpu::{Flush, Privilege::Current};
use x86_defs::control::cr4;

const GVA: u64 = 0x7f00_0000_0000;
const PAGES: u64 = 2048;

fn report(what: &str, n: u64, mut f: impl FnMut(u64)) {
    if !what.contains(&std::env::args().nth(1).unwrap_or_default()) {
        return;
    }
    // The best of several passes: the machine is shared.
    let best = (0..100)
        .map(|_| {
            let n = n / 16;
            let start = Instant::now();
            for i in 0..n {
                f(black_box(i));
            }
            start.elapsed().as_nanos() as f64 / n as f64
        })
        .fold(f64::MAX, f64::min);
    println!("{what:<44} {best:8.2} ns");
}

fn main() {
    let root = 0x10_0000;
    let mut m = Machine::long_mode(root);
    let mut pool = 0x11_0000;
    for page in 0..PAGES {
        let gpa = 0x40_0000 + page * 4096;
        m.map(root, GVA + page * 4096, gpa | 7, &mut pool);
    }
    m.cpu.cr4 |= cr4::PCIDE;
    m.cpu.cpl = 3;
    m.reload();
    let (mmu, cpu) = (&mut m.mmu, &mut m.cpu);

    report("read u64, L1 hit, independent", 10_000_000, |i| {
        black_box(
            mmu.read::<u64>(cpu, GVA + ((i * 8) & 0xf_fff8), Current)
                .ok(),
        );
    });
    let mut at = GVA;
    report("read u64, L1 hit, dependent chain", 10_000_000, |_| {
        at = GVA + mmu.read::<u64>(cpu, at, Current).unwrap_or(0);
    });
    report("write u64, L1 hit", 10_000_000, |i| {
        let _ = mmu.write(cpu, GVA + ((i * 8) & 0xf_fff8), i, Current);
    });
    report("locked add u32, L1 hit", 2_000_000, |_| {
        black_box(
            mmu.rmw(cpu, GVA, Current, true, |v: u32| v.wrapping_add(1))
                .ok(),
        );
    });
    report("read u64 across pages", 1_000_000, |_| {
        black_box(mmu.read::<u64>(cpu, GVA + 0xffc, Current).ok());
    });
    report("code_page + code_generation, hit", 5_000_000, |_| {
        let page = mmu.code_page(cpu, GVA).unwrap();
        black_box(mmu.code_generation(page.id));
    });
    report("select_view, user and back", 2_000_000, |i| {
        cpu.cpl = if i & 1 == 0 { 0 } else { 3 };
        mmu.select_view(cpu);
    });
    cpu.cpl = 3;
    mmu.select_view(cpu);
    report("flush all + read (walk, L1 and L2 refill)", 200_000, |_| {
        mmu.flush(cpu, Flush::All);
        black_box(mmu.read::<u64>(cpu, GVA, Current).ok());
    });
    report("flush all alone, tables empty", 200_000, |_| {
        mmu.flush(cpu, Flush::All);
    });
    report("INVLPG + read (walk)", 200_000, |i| {
        let gva = GVA + (i % 64) * 4096;
        mmu.flush(cpu, Flush::Page(gva));
        black_box(mmu.read::<u64>(cpu, gva, Current).ok());
    });
    // Two pages that share an L1 entry: each access misses L1 and hits L2.
    for entries in [1024, 2048] {
        let before = mmu.stats();
        report(&format!("pages {entries} apart, in turn"), 1_000_000, |i| {
            let gva = GVA + (i & 1) * entries * 4096 % (PAGES * 4096);
            black_box(mmu.read::<u64>(cpu, gva, Current).ok());
        });
        let after = mmu.stats();
        println!(
            "    L1 misses {}, L2 hits {}, walks {}",
            after.l1_misses - before.l1_misses,
            after.l2_hits - before.l2_hits,
            after.walks - before.walks
        );
    }
    report(
        "MOV CR3 that keeps the PCID, two contexts",
        1_000_000,
        |i| {
            cpu.cr3 = root | (1 + (i & 1));
            let _ = mmu.load_root(cpu);
            black_box(mmu.read::<u64>(cpu, GVA, Current).ok());
        },
    );
    report("MOV CR3 that flushes, one page used", 100_000, |_| {
        let _ = mmu.load_root(cpu);
        mmu.flush(cpu, Flush::Pcid((cpu.cr3 & 0xfff) as u16));
        black_box(mmu.read::<u64>(cpu, GVA, Current).ok());
    });
    // After a flush: pages side by side, and one of each eight.
    for stride in [1, 8] {
        for write in [false, true] {
            let what = if write { "written" } else { "read" };
            let name = format!("64 pages {what}, {stride} apart, after MOV CR3");
            report(&name, 400_000, |i| {
                if i % 64 == 0 {
                    let _ = mmu.load_cr3(cpu, true);
                }
                let gva = GVA + (i % 64) * stride * 4096;
                if write {
                    let _ = mmu.write(cpu, gva, i, Current);
                } else {
                    black_box(mmu.read::<u64>(cpu, gva, Current).ok());
                }
            });
        }
    }
    report("copy of 4 KiB (rep movsq)", 500_000, |_| {
        black_box(mmu.bulk_copy(cpu, GVA + 0x8000, GVA + 0x4000, 4096, 8));
    });
    println!("{:?}", mmu.stats());
}
