//! What other threads ask of a vCPU's MMU: slot changes and dirty harvests.

#![allow(clippy::unwrap_used, reason = "tests")]

mod machine;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use host::Mapping;
use machine::{LOG, Machine, RAM, READONLY, fetch, harvest, look, slot, write};
use mmu::{Miss, Mmu, l1::Half};
use x86_cpu::{CpuState, Flush, Privilege::Current};

#[test]
fn dirty_pages_are_seen_again_after_a_harvest() {
    let mut m = Machine::with_flags(LOG);
    write(&mut m, 0x5000, 1).unwrap();
    write(&mut m, 0x46ffc, 1).unwrap();
    assert_eq!(m.memory.write_gpa(0x8_0000, 4, 1), Some(()));
    let bits = harvest(&m.memory, 0).unwrap();
    assert_eq!(bits[..3], [1 << 5, 1 << 6 | 1 << 7, 1]);
    assert_eq!(bits.len(), 64);
    // Until the vCPU synchronises it may write unlogged: to reported pages only.
    let mailbox = m.mmu.mailbox();
    assert!(!mailbox.is_empty());
    write(&mut m, 0x5008, 2).unwrap();
    assert!(m.mmu.needs_sync());
    m.mmu.sync();
    assert!(mailbox.is_empty());
    write(&mut m, 0x5010, 3).unwrap();
    m.mmu
        .rmw(&mut m.cpu, 0x9000, Current, true, |v: u8| v + 1)
        .unwrap();
    let bits = harvest(&m.memory, 0).unwrap();
    assert_eq!(bits[0], 1 << 5 | 1 << 9);
    // Reads make nothing dirty; clearing part keeps the rest.
    m.mmu.sync();
    m.mmu.read::<u64>(&mut m.cpu, 0x7000, Current).unwrap();
    assert_eq!(look(&m.memory, 0), [0; 64]);
    write(&mut m, 0x1000, 1).unwrap();
    write(&mut m, 0x2000, 1).unwrap();
    m.memory.clear_dirty(0, 0, &[1 << 1]).unwrap();
    m.mmu.sync();
    assert_eq!(look(&m.memory, 0)[0], 1 << 2);
    write(&mut m, 0x1000, 1).unwrap();
    assert_eq!(look(&m.memory, 0)[0], 1 << 2 | 1 << 1);
}

#[test]
fn logging_can_be_switched_on_and_off() {
    let mut m = Machine::new();
    write(&mut m, 0x3000, 1).unwrap();
    assert!(harvest(&m.memory, 0).is_err());
    let hva = m.ram.as_ptr() as u64;
    m.memory.set_slot(slot(0, 0, RAM, hva, LOG)).unwrap();
    m.mmu.sync();
    write(&mut m, 0x3000, 2).unwrap();
    assert_eq!(harvest(&m.memory, 0).unwrap()[0], 1 << 3);
    m.memory.set_slot(slot(0, 0, RAM, hva, 0)).unwrap();
    m.mmu.sync();
    write(&mut m, 0x3000, 3).unwrap();
    assert!(harvest(&m.memory, 0).is_err());
    assert_eq!(m.peek(0x3000, 8), 3);
}

/// Logging that starts or stops, and harvests of what was not written, drop nothing but the write permission that they
/// have to: of one slot, or of the pages that were harvested.
#[test]
fn logging_disturbs_nothing_else() {
    let root = 0x10_0000;
    let mut m = Machine::long_mode(root);
    let hva = m.ram.as_ptr() as u64;
    let more = Mapping::anonymous(0x10_0000).unwrap();
    let second = slot(1, RAM, 0x10_0000, more.as_ptr() as u64, 0);
    m.memory.set_slot(second).unwrap();
    m.mmu.sync();
    let mut pool = root + 0x1000;
    let (gvas, other) = ([0x40_0000, 0x40_1000, 0x40_2000], 0x50_0000);
    for gva in gvas {
        m.map(root, gva, ((gva & 0xffff) + 0x30_0000) | 0x63, &mut pool);
    }
    m.map(root, other, (RAM + 0x8000) | 0x63, &mut pool);
    for gva in gvas.into_iter().chain([other]) {
        write(&mut m, gva, 1).unwrap();
    }
    let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, gvas[2] + 0x800);
    let held = |m: &Machine, half, gva| m.mmu.live_tables().find(half, gva).is_some();
    let writes = |m: &Machine| [gvas[0], gvas[1], other].map(|gva| held(m, Half::Write, gva));
    let before = (
        m.mmu.stats().walks,
        m.mmu.fetch_epoch(),
        m.mmu.slots_generation(),
    );
    let set = |m: &mut Machine, flags| {
        m.memory.set_slot(slot(0, 0, RAM, hva, flags)).unwrap();
        assert!(m.mmu.needs_sync());
        m.mmu.sync();
    };
    set(&mut m, LOG);
    assert_eq!(writes(&m), [false, false, true]);
    write(&mut m, gvas[0], 2).unwrap();
    write(&mut m, gvas[1], 2).unwrap();
    // What was not written is nobody's business.
    m.memory.clear_dirty(0, 0x380, &[u64::MAX]).unwrap();
    assert!(!m.mmu.needs_sync());
    m.memory.clear_dirty(0, 0x300, &[1]).unwrap();
    assert!(m.mmu.needs_sync());
    m.mmu.sync();
    assert_eq!(writes(&m), [false, true, true]);
    write(&mut m, gvas[0], 3).unwrap();
    assert_eq!(look(&m.memory, 0)[0x300 / 64], 3);
    assert_eq!(m.mmu.stats().dirty_faults, 3);
    set(&mut m, 0);
    assert_eq!(writes(&m), [true; 3]);
    // With all pages dirty there is nothing to note.
    m.memory.set_starts_dirty(true);
    set(&mut m, LOG);
    assert_eq!(writes(&m), [true; 3]);
    m.memory
        .clear_dirty(0, 0, &vec![u64::MAX; (RAM >> 18) as usize])
        .unwrap();
    m.mmu.sync();
    assert_eq!(writes(&m), [false, false, true]);
    assert!(gvas.iter().all(|gva| held(&m, Half::Read, *gva)));
    let after = (
        m.mmu.stats().walks,
        m.mmu.fetch_epoch(),
        m.mmu.slots_generation(),
    );
    assert_eq!(after, before);
    assert_eq!(m.mmu.code_generation(id), generation);
}

/// Many pages at once, and pages at many addresses, are given up as few are.
#[test]
fn all_ways_of_giving_up_do_the_same() {
    let m = &mut Machine::with_flags(LOG);
    let pages = [3u64, 1500, RAM >> 12];
    for count in pages {
        for page in 0..count {
            write(m, page << 12, page).unwrap();
        }
        let harvested = harvest(&m.memory, 0).unwrap();
        let total: u32 = harvested.iter().map(|w| w.count_ones()).sum();
        assert_eq!(u64::from(total), count);
        m.mmu.sync();
        assert!((0..count).all(|p| m.mmu.live_tables().find(Half::Write, p << 12).is_none()));
        assert!((0..count).all(|p| m.mmu.live_tables().find(Half::Read, p << 12).is_some()));
        assert!(!m.mmu.needs_sync());
        assert!(harvest(&m.memory, 0).unwrap().iter().all(|w| *w == 0));
        assert!(!m.mmu.needs_sync());
    }
    let total = pages.iter().sum();
    assert_eq!(m.mmu.stats().pages_given_up, total);
    assert_eq!(m.mmu.stats().dirty_faults, total);
}

#[test]
fn read_only_slots_and_holes_are_devices() {
    let mut m = Machine::new();
    let hva = m.ram.as_ptr() as u64;
    m.memory
        .set_slot(slot(1, RAM, 0x2000, hva, READONLY))
        .unwrap();
    m.mmu.sync();
    m.poke(8, 8, 99);
    assert_eq!(m.mmu.read(&mut m.cpu, RAM + 8, Current), Ok(99u64));
    let device = |gpa| Err(Miss::Device { gpa });
    assert_eq!(write(&mut m, RAM + 8, 1), device(RAM + 8));
    let locked = m
        .mmu
        .rmw(&mut m.cpu, RAM + 8, Current, true, |v: u64| v + 1);
    assert_eq!(locked, Err(Miss::Device { gpa: RAM + 8 }));
    assert_eq!(m.peek(8, 8), 99);
    let hole = RAM + 0x2000;
    assert_eq!(
        m.mmu.read::<u32>(&mut m.cpu, hole, Current),
        Err(Miss::Device { gpa: hole })
    );
    // Half in RAM, half not: nothing happens.
    assert_eq!(write(&mut m, RAM - 4, u64::MAX), device(RAM));
    assert_eq!(m.peek(RAM - 4, 4), 0);
    m.mmu.set_apic_page(Some(0x4000));
    assert_eq!(write(&mut m, 0x4010, 1), device(0x4010));
    assert!(m.mmu.code_page(&mut m.cpu, 0x4000).is_err());
    m.mmu.set_apic_page(None);
    assert_eq!(write(&mut m, 0x4010, 1), Ok(()));
}

#[test]
fn words_cross_pages() {
    let mut m = Machine::new();
    let value = 0x1122_3344_5566_7788_99aa_bbcc_ddee_ff00u128;
    for offset in 0xff0..0x1000u64 {
        let gva = 0x7000 + offset;
        m.mmu.write(&mut m.cpu, gva, value, Current).unwrap();
        assert_eq!(m.mmu.read(&mut m.cpu, gva, Current), Ok(value));
        let old = m
            .mmu
            .rmw(&mut m.cpu, gva, Current, true, |v: u64| v.rotate_left(8));
        assert_eq!(old, Ok(value as u64));
        let now = (value as u64).rotate_left(8);
        assert_eq!(m.mmu.read(&mut m.cpu, gva, Current), Ok(now));
    }
    // Linear addresses wrap at 4 GiB outside 64-bit mode.
    let hva = m.ram.as_ptr() as u64;
    let top = 0xffff_f000;
    m.memory
        .set_slot(slot(1, top, 0x1000, hva + 0x9000, 0))
        .unwrap();
    m.mmu.sync();
    write(&mut m, 0xffff_fffc, 0xaaaa_aaaa_bbbb_bbbb).unwrap();
    assert_eq!(m.peek(0, 4), 0xaaaa_aaaa);
    assert_eq!(m.peek(0x9ffc, 4), 0xbbbb_bbbb);
}

#[test]
fn bulk_operations_behave_like_single_ones() {
    let mut m = Machine::new();
    for (dst, src, len, unit) in [
        (0x1000u64, 0x3000u64, 64u64, 8u64),
        (0x1001, 0x1000, 100, 1),
        (0x1004, 0x1000, 100, 8),
        (0x1000, 0x1003, 100, 4),
        (0x1ff0, 0x5004, 100, 4),
        (0x1ffd, 0x5000, 100, 4),
    ] {
        for gpa in 0..0x2000 {
            m.poke(0x1000 + gpa, 1, (gpa * 7) & 0xff);
            m.poke(0x5000 + gpa, 1, (gpa * 11) & 0xff);
        }
        let mut model: Vec<u8> = (0..0x8000).map(|a| m.peek(a, 1) as u8).collect();
        let done = m.mmu.bulk_copy(&mut m.cpu, dst, src, len, unit);
        let room = 0x1000 - (dst & 0xfff).max(src & 0xfff);
        assert_eq!(done, len.min(room) / unit * unit);
        for at in (0..done).step_by(unit as usize) {
            let element = model[(src + at) as usize..(src + at + unit) as usize].to_vec();
            model[(dst + at) as usize..(dst + at + unit) as usize].copy_from_slice(&element);
        }
        let after: Vec<u8> = (0..0x8000).map(|a| m.peek(a, 1) as u8).collect();
        assert!(after == model, "{dst:x} {src:x} {unit}");
    }
    let done = m.mmu.bulk_fill(&mut m.cpu, 0x6ff0, 0x1234_5678, 1000, 2);
    assert_eq!(
        (done, m.peek(0x6ffe, 2), m.peek(0x7000, 2)),
        (16, 0x5678, 0)
    );
    assert_eq!(m.mmu.bulk_fill(&mut m.cpu, RAM, 0, 64, 8), 0);
    assert_eq!(m.mmu.bulk_fill(&mut m.cpu, 0x1000, 0, 3, 4), 0);
}

/// vCPUs count, in their own pages and under a lock, while slots are logged,
/// harvested and moved about: no write is lost, and after an acknowledged change
/// nobody touches the old mapping.
#[test]
fn slots_change_while_vcpus_run() {
    const SIZE: u64 = 1 << 20;
    let m = Machine::new();
    let base = 1u64 << 32;
    let hva = m.ram.as_ptr() as u64;
    m.memory.set_slot(slot(5, base, SIZE, hva, LOG)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let total = Arc::new(AtomicU64::new(0));
    let mut acks = Vec::new();
    let threads: Vec<_> = (0..2)
        .map(|n| {
            let mut mmu = Mmu::new(Arc::clone(&m.memory));
            acks.push(mmu.mailbox());
            let (stop, total) = (Arc::clone(&stop), Arc::clone(&total));
            std::thread::spawn(move || {
                let mut cpu = CpuState::default();
                let mut done = 0;
                while !stop.load(Ordering::Relaxed) {
                    if mmu.needs_sync() {
                        mmu.sync();
                    }
                    // Misaligned across 8, 16 and a page: all kinds of locked access.
                    let at = base + [0x100, 0x206, 0x30c, 0xffe][done as usize % 4];
                    let lock = mmu.rmw(&mut cpu, at, Current, true, |v: u32| v.wrapping_add(1));
                    let own = base + 0x4000 + n * 0x1000;
                    match lock {
                        Ok(_) => {
                            done += 1;
                            // The slot may go between the two, not the count.
                            let _ = mmu.rmw(&mut cpu, own, Current, false, |v: u64| v + 1);
                        }
                        Err(Miss::Device { .. }) => std::hint::spin_loop(),
                        Err(e) => panic!("{e:?}"),
                    }
                }
                // A vCPU that does not run has nothing to acknowledge.
                mmu.mailbox().set_epoch(u64::MAX);
                mmu.mailbox().set_done(u64::MAX);
                total.fetch_add(done, Ordering::Relaxed);
            })
        })
        .collect();
    let wait = |epoch| {
        while acks.iter().any(|a| a.epoch() < epoch) {
            std::thread::yield_now();
        }
    };
    for round in 0..300 {
        match round % 3 {
            0 => {
                let bits = harvest(&m.memory, 5).unwrap();
                for ack in &acks {
                    let posted = ack.posted();
                    while ack.done() < posted {
                        std::thread::yield_now();
                    }
                }
                assert_eq!(bits[0] & !(1 | 2 | 1 << 4 | 1 << 5), 0);
            }
            1 => {
                wait(m.memory.set_slot(slot(5, 0, 0, 0, 0)).unwrap());
                let before = m.peek(0x100, 4);
                std::thread::yield_now();
                assert_eq!(m.peek(0x100, 4), before, "written through a deleted slot");
                wait(m.memory.set_slot(slot(5, base, SIZE, hva, LOG)).unwrap());
            }
            _ => {
                wait(m.memory.set_slot(slot(5, base, SIZE, hva, 0)).unwrap());
                wait(m.memory.set_slot(slot(5, base, SIZE, hva, LOG)).unwrap());
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    for t in threads {
        t.join().unwrap();
    }
    let counted: u64 = [0x100, 0x206, 0x30c, 0xffe]
        .iter()
        .map(|at| m.peek(*at, 4))
        .sum();
    assert_eq!(counted, total.load(Ordering::Relaxed));
    assert!(counted > 0);
}

/// Two vCPUs write and walk the same tables: A and D bits are never lost, and an
/// entry that changes under the walk is never overwritten with an old value.
#[test]
fn accessed_and_dirty_race() {
    let root = 0x10_0000;
    let m = Machine::long_mode(root);
    let mut pool = 0x20_0000;
    let gva = 0x5000;
    m.map(root, gva, 0x40_0003, &mut pool);
    let leaf = (0x20_0000..pool)
        .step_by(4096)
        .map(|t| t + 5 * 8)
        .find(|at| m.peek(*at, 8) & !0xfff == 0x40_0000)
        .unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let walker = {
        let (mut mmu, mut cpu) = m.second();
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                mmu.sync();
                mmu.flush(&cpu, Flush::All);
                let _ = mmu.write(&mut cpu, gva, 1u8, Current);
            }
        })
    };
    for i in 0..20_000u64 {
        let page = 0x40_0000 + (i % 16) * 0x1000;
        let old = m.memory.rmw_gpa(leaf, 8, |_| u128::from(page | 3)).unwrap() as u64;
        let expected = 0x40_0000 + (i.wrapping_sub(1) % 16) * 0x1000;
        if i != 0 {
            assert_eq!(old & !0x60, expected | 3);
        }
    }
    stop.store(true, Ordering::Relaxed);
    walker.join().unwrap();
}
