//! What other threads ask of a vCPU's MMU: slot changes, dirty harvests, code that is written.

#![allow(clippy::unwrap_used, reason = "tests")]

mod machine;

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use guest_memory::{GuestMemory, MemslotError};
use host::Mapping;
use machine::{Machine, RAM, slot};
use mmu::{Miss, Mmu, l1::Half};
use x86_cpu::{CpuState, Flush, Privilege::Current};

const LOG: u32 = 1;
const READONLY: u32 = 2;

fn write(m: &mut Machine, gpa: u64, v: u64) -> Result<(), Miss> {
    m.mmu.write(&mut m.cpu, gpa, v, Current)
}

/// The bitmap of a slot, which is clean from now on.
fn harvest(memory: &GuestMemory, slot: u32) -> Result<Vec<u64>, MemslotError> {
    let mut bitmap = Vec::new();
    let show = |_, words: &[u64]| {
        bitmap.extend_from_slice(words);
        Ok::<(), ()>(())
    };
    memory.take_dirty(slot, show)?.0.unwrap();
    Ok(bitmap)
}

/// The bitmap, left as it is.
fn look(memory: &GuestMemory, slot: u32) -> Vec<u64> {
    let mut bitmap = Vec::new();
    let show = |_, words: &[u64]| {
        bitmap.extend_from_slice(words);
        Ok::<(), ()>(())
    };
    memory.peek_dirty(slot, show).unwrap().unwrap();
    bitmap
}

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
    m.mmu.sync(&m.cpu);
    assert!(mailbox.is_empty());
    write(&mut m, 0x5010, 3).unwrap();
    m.mmu
        .rmw(&mut m.cpu, 0x9000, Current, true, |v: u8| v + 1)
        .unwrap();
    let bits = harvest(&m.memory, 0).unwrap();
    assert_eq!(bits[0], 1 << 5 | 1 << 9);
    // Reads make nothing dirty; clearing part keeps the rest.
    m.mmu.sync(&m.cpu);
    m.mmu.read::<u64>(&mut m.cpu, 0x7000, Current).unwrap();
    assert_eq!(look(&m.memory, 0), [0; 64]);
    write(&mut m, 0x1000, 1).unwrap();
    write(&mut m, 0x2000, 1).unwrap();
    m.memory.clear_dirty(0, 0, &[1 << 1]).unwrap();
    m.mmu.sync(&m.cpu);
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
    m.mmu.sync(&m.cpu);
    write(&mut m, 0x3000, 2).unwrap();
    assert_eq!(harvest(&m.memory, 0).unwrap()[0], 1 << 3);
    m.memory.set_slot(slot(0, 0, RAM, hva, 0)).unwrap();
    m.mmu.sync(&m.cpu);
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
    m.mmu.sync(&m.cpu);
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
        m.mmu.sync(&m.cpu);
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
    m.mmu.sync(&m.cpu);
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
    m.mmu.sync(&m.cpu);
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
        m.mmu.sync(&m.cpu);
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
    m.mmu.sync(&m.cpu);
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
    m.mmu.sync(&m.cpu);
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

#[test]
fn bulk_operations_change_code() {
    // A run over code at 0x2100, and one beside it on either side.
    type Run = fn(&mut Machine, u64) -> u64;
    let runs: [Run; 3] = [
        |m, at| m.mmu.bulk_fill(&mut m.cpu, at, 1, 64, 4),
        |m, at| m.mmu.bulk_copy(&mut m.cpu, at, 0x5000, 64, 8),
        |m, at| m.mmu.bulk_copy_down(&mut m.cpu, at + 56, 0x5038, 64, 8),
    ];
    for (n, run) in runs.into_iter().enumerate() {
        let mut m = Machine::with_flags(LOG);
        let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2100);
        harvest(&m.memory, 0).unwrap();
        for beside in [0x20c0, 0x2140] {
            assert_eq!(run(&mut m, beside), 64, "{n}");
            assert_eq!(m.mmu.code_generation(id), generation, "{n} {beside:x}");
        }
        assert_eq!(look(&m.memory, 0)[0] & 4, 4, "{n}");
        for over in [0x20c4, 0x213c] {
            let (_, generation, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2100);
            assert_eq!(run(&mut m, over), 64, "{n}");
            assert_ne!(m.mmu.code_generation(id), generation, "{n} {over:x}");
        }
    }
}

fn fetch(mmu: &mut Mmu, cpu: &mut CpuState, gva: u64) -> (u64, u32, [u8; 8]) {
    let page = mmu.code_page(cpu, gva).unwrap();
    let mut bytes = [0; 8];
    assert_eq!(mmu.code_bytes(cpu, gva, &mut bytes), Ok(8));
    (page.id, page.generation, bytes)
}

#[test]
fn own_writes_to_code_are_seen_at_once() {
    let mut m = Machine::new();
    let gva = 0x2040;
    // A write tag from before the page was code must not survive.
    write(&mut m, gva, 1).unwrap();
    let (id, generation, bytes) = fetch(&mut m.mmu, &mut m.cpu, gva);
    assert_eq!(bytes, 1u64.to_le_bytes());
    // Elsewhere in the page: no change.
    write(&mut m, gva + 64, 5).unwrap();
    write(&mut m, gva - 8, 5).unwrap();
    assert_eq!(m.mmu.code_generation(id), generation);
    // From the neighbouring chunk into the tracked one.
    write(&mut m, gva - 4, 5).unwrap();
    assert_ne!(m.mmu.code_generation(id), generation);
    let writers: [fn(&mut Machine, u64); 5] = [
        |m, a| write(m, a, 9).unwrap(),
        |m, a| {
            m.mmu
                .rmw(&mut m.cpu, a, Current, true, |v: u8| v + 1)
                .map(|_| ())
                .unwrap();
        },
        |m, a| {
            m.mmu
                .write_bytes(&mut m.cpu, a, &[1; 100], Current)
                .unwrap();
        },
        |m, a| assert!(m.mmu.write_gpa(a, &[3])),
        |m, a| assert!(m.memory.write_bytes(a, &[4])),
    ];
    for (i, writer) in writers.iter().enumerate() {
        let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, gva);
        assert_eq!(m.mmu.code_generation(id), generation);
        writer(&mut m, gva);
        assert_ne!(m.mmu.code_generation(id), generation, "writer {i}");
        // Afterwards the page is data again and may be written fast.
        write(&mut m, gva, 7).unwrap();
    }
}

#[test]
fn another_vcpus_writes_are_seen_when_it_synchronises() {
    for evict in [false, true] {
        let mut m = Machine::new();
        let (mut other, mut other_cpu) = m.second();
        other.sync(&other_cpu);
        let gva = 0x2040;
        other.write(&mut other_cpu, gva, 1u64, Current).unwrap();
        let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, gva);
        assert!(other.needs_sync());
        // Through the tag that it still has.
        other.write(&mut other_cpu, gva, 2u64, Current).unwrap();
        if evict {
            // A conflicting page takes the tag's place before the request is seen.
            let gva = gva + 0x1000 * 1024;
            other.write(&mut other_cpu, gva, 2u64, Current).unwrap();
        }
        other.sync(&other_cpu);
        assert_ne!(m.mmu.code_generation(id), generation);
        let (_, generation, bytes) = fetch(&mut m.mmu, &mut m.cpu, gva);
        assert_eq!(bytes, 2u64.to_le_bytes());
        other.sync(&other_cpu);
        assert_eq!(m.mmu.code_generation(id), generation);
        other.write(&mut other_cpu, gva, 3u64, Current).unwrap();
        assert_ne!(m.mmu.code_generation(id), generation);
    }
}

/// The chunks of the page of `gva` that translated code must not write, if it may write the others.
fn spared(m: &mut Machine, gva: u64) -> Option<u64> {
    let tables = m.mmu.live_tables().base();
    let front = m.mmu.front();
    let mut mixed = front.mixed_pages().iter();
    let found = mixed.find(|e| e.page == gva & !0xfff && e.tables == tables);
    found.map(|e| e.code)
}

#[test]
fn data_beside_code_is_written_without_a_note() {
    let mut m = Machine::with_flags(LOG);
    let (gva, data) = (0x2040, 0x2100);
    let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, gva);
    assert_eq!(spared(&mut m, gva), None);
    write(&mut m, data, 1).unwrap();
    assert_eq!(spared(&mut m, gva), Some(1 << 1));
    assert_eq!(m.mmu.live_tables().find(Half::Write, gva), None);
    // Own code elsewhere in the page.
    assert_eq!(fetch(&mut m.mmu, &mut m.cpu, 0x2180).1, generation);
    assert_eq!(spared(&mut m, gva), None);
    write(&mut m, data, 2).unwrap();
    assert_eq!(spared(&mut m, gva), Some(1 << 1 | 1 << 6));
    // What becomes clean has to be noted again.
    harvest(&m.memory, 0).unwrap();
    m.mmu.sync(&m.cpu);
    assert_eq!(spared(&mut m, gva), None);
    assert_eq!(look(&m.memory, 0)[0], 0);
    write(&mut m, data, 3).unwrap();
    assert_eq!(spared(&mut m, gva), Some(1 << 1 | 1 << 6));
    assert_eq!(look(&m.memory, 0)[0], 1 << 2);
    m.memory.request_write_flush();
    m.mmu.sync(&m.cpu);
    assert_eq!(spared(&mut m, gva), None);
    // So does what is flushed.
    write(&mut m, data, 3).unwrap();
    m.mmu.flush(&m.cpu, Flush::Page(gva));
    assert_eq!(spared(&mut m, gva), None);
    write(&mut m, data, 3).unwrap();
    assert!(spared(&mut m, gva).is_some());
    assert_eq!(m.mmu.code_generation(id), generation);
    // A write to code leaves a page of data.
    write(&mut m, gva, 4).unwrap();
    assert_ne!(m.mmu.code_generation(id), generation);
    write(&mut m, data, 4).unwrap();
    assert_eq!(spared(&mut m, gva), None);
    assert!(m.mmu.live_tables().find(Half::Write, gva).is_some());
}

/// Another vCPU fetches from a chunk that this one may write.
#[test]
fn data_that_becomes_code_elsewhere_counts_as_changed() {
    let far = 0x2000 + 0x1000 * mmu::mixed::MIXED_PAGES as u64;
    for (n, leave) in [
        |_: &mut Machine, _| (),
        // By a page that takes its place.
        |m: &mut Machine, far| write(m, far + 0x100, 1).unwrap(),
        // By own code.
        |m: &mut Machine, _| assert_eq!(fetch(&mut m.mmu, &mut m.cpu, 0x2700).2, [0; 8]),
    ]
    .into_iter()
    .enumerate()
    {
        let mut m = Machine::new();
        let (mut other, mut other_cpu) = m.second();
        other.sync(&other_cpu);
        fetch(&mut m.mmu, &mut m.cpu, far);
        let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2040);
        write(&mut m, 0x2100, 1).unwrap();
        fetch(&mut other, &mut other_cpu, 0x2100);
        assert!(m.mmu.needs_sync());
        assert_eq!(spared(&mut m, 0x2040), Some(1 << 1));
        // As translated code does.
        // SAFETY: inside the mapping; no other thread is here.
        unsafe { m.ram.as_ptr().add(0x2100).write_volatile(2) };
        leave(&mut m, far);
        m.mmu.sync(&m.cpu);
        let changed = m.mmu.code_generation(id);
        assert_ne!(changed, generation, "{n}");
        let (_, seen, bytes) = fetch(&mut other, &mut other_cpu, 0x2100);
        assert_eq!((seen, bytes), (changed, 2_u64.to_le_bytes()));
        // What both have fetched is spared, and nobody is asked.
        write(&mut m, 0x2200, 1).unwrap();
        let code = spared(&mut m, 0x2040).unwrap();
        assert_eq!(code & (1 << 1 | 1 << 4), 1 << 1 | 1 << 4);
        fetch(&mut other, &mut other_cpu, 0x2040);
        assert!(!m.mmu.needs_sync());
        // The slot goes while the page may be written.
        m.memory.set_slot(slot(0, 0, 0, 0, 0)).unwrap();
        m.mmu.sync(&m.cpu);
        assert_eq!(spared(&mut m, 0x2040), None);
    }
}

/// By one address, by several, by some that have the same place in the tables.
#[test]
fn pages_are_written_by_any_address_before_they_are_code() {
    const PAGE: u64 = 0x5000;
    let a = 0x40_1000;
    let gvas = [a, a + 0x1000, a + 0x1000 * mmu::l1::ENTRIES as u64];
    for subset in 0..8 {
        let root = 0x10_0000;
        let mut m = Machine::long_mode(root);
        let mut pool = root + 0x1000;
        for gva in gvas {
            m.map(root, gva, PAGE | 0x63, &mut pool);
        }
        for round in 0..2 {
            for (n, gva) in gvas.into_iter().enumerate() {
                if subset >> n & 1 != 0 {
                    m.mmu.write(&mut m.cpu, gva, 1u64, Current).unwrap();
                    assert!(m.mmu.live_tables().find(Half::Write, gva).is_some() || round > 0);
                }
            }
            let (id, mut generation, _) = fetch(&mut m.mmu, &mut m.cpu, a);
            for gva in gvas {
                let tag = m.mmu.live_tables().find(Half::Write, gva);
                assert_eq!(tag, None, "{subset} {round} {gva:x}");
                m.mmu.write(&mut m.cpu, gva, 2u64, Current).unwrap();
                let now = fetch(&mut m.mmu, &mut m.cpu, a).1;
                assert_ne!(now, generation, "{subset} {round} {gva:x}");
                generation = now;
                assert_eq!(m.mmu.code_generation(id), generation);
            }
        }
    }
}

/// Where SMM is, all RAM is in a second slot, that of SMM's address space. A page that becomes code is searched for there no
/// more than elsewhere.
#[test]
fn ram_in_two_slots_disturbs_nothing() {
    const SMM: u32 = 1 << 16;
    let root = 0x10_0000;
    let mut m = Machine::long_mode(root);
    let hva = m.ram.as_ptr() as u64;
    m.memory.set_slot(slot(SMM, 0, RAM, hva, 0)).unwrap();
    m.mmu.sync(&m.cpu);
    let mut pool = root + 0x1000;
    let (code, data) = (0x40_1000, 0x40_2000);
    for gva in [code, data] {
        m.map(root, gva, (gva & 0xffff) | 0x63, &mut pool);
        write(&mut m, gva, 1).unwrap();
    }
    let rounds = m.mmu.stats().rounds;
    for n in 2..100 {
        write(&mut m, code, n).unwrap();
        let (id, generation, bytes) = fetch(&mut m.mmu, &mut m.cpu, code);
        assert_eq!(bytes, n.to_le_bytes());
        assert_eq!(m.mmu.live_tables().find(Half::Write, code), None);
        write(&mut m, code, n + 1).unwrap();
        assert_ne!(m.mmu.code_generation(id), generation);
    }
    assert!(m.mmu.live_tables().find(Half::Write, data).is_some());
    assert_eq!(m.mmu.stats().rounds, rounds);
}

#[test]
fn writes_of_the_vmm_are_found_at_refill() {
    let mut m = Machine::new();
    let gva = 0x2040;
    m.poke(gva, 8, 1);
    let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, gva);
    // SAFETY: inside the mapping; the vCPU does not run.
    unsafe { m.ram.as_ptr().add(gva as usize).write_volatile(2) };
    m.mmu.flush(&m.cpu, Flush::Page(gva));
    let (_, now, bytes) = fetch(&mut m.mmu, &mut m.cpu, gva);
    assert_ne!(now, generation);
    assert_eq!(m.mmu.code_generation(id), now);
    assert_eq!(bytes, 2u64.to_le_bytes());
    // Nothing changed, nothing invalidated.
    m.mmu.flush(&m.cpu, Flush::All);
    assert_eq!(fetch(&mut m.mmu, &mut m.cpu, gva).1, now);
    assert_eq!(m.mmu.stats().code_changed_by_vmm, 1);
}

/// A user's instruction that serialises has what users execute compared, a supervisor's all.
#[test]
fn serialising_instructions_compare_code() {
    const ROOT: u64 = 0x10_0000;
    let mut m = Machine::long_mode(ROOT);
    let mut pool = ROOT + 0x1000;
    // (CPL, gva, gpa, flags)
    let pages = [(3, 0x40_0000, 0x2000, 7), (0, 0x50_0000, 0x3000, 0x103)];
    for (_, gva, gpa, flags) in pages {
        m.map(ROOT, gva, gpa | flags, &mut pool);
    }
    let look = |m: &mut Machine, n: usize| {
        let (cpl, gva, ..) = pages[n];
        m.cpu.cpl = cpl;
        m.mmu.select_view(&m.cpu);
        let generation = fetch(&mut m.mmu, &mut m.cpu, gva).1;
        (m.mmu.front().target_epoch(&m.cpu), generation)
    };
    let before = [0, 1].map(|n| look(&mut m, n));
    for (n, (_, _, gpa, _)) in pages.iter().enumerate() {
        // SAFETY: inside the mapping; the vCPU does not run.
        unsafe { m.ram.as_ptr().add(*gpa as usize).write_volatile(9) };
        let is_user = n == 0;
        look(&mut m, n);
        m.mmu.serialize();
        let after = [0, 1].map(|n| look(&mut m, n));
        assert_ne!(after[n].1, before[n].1, "{n}");
        // The user's leaves the supervisor's branch targets alone, changed or not.
        assert_eq!(after[1] == before[1], is_user, "{n}");
    }
}

/// Pages are compared at once, and what is known of them stays, as long as they are few beside those of the beginning.
/// Then they are compared one by one, when they are executed next. Either way a change is noticed.
#[test]
fn pages_are_compared_at_once_while_that_is_worthwhile() {
    const ROOT: u64 = 0x10_0000;
    let at = |n: u64| (0x40_0000 + 0x1000 * n, 0x2000 + 0x1000 * n);
    let look = |m: &mut Machine, n: u64| fetch(&mut m.mmu, &mut m.cpu, at(n).0).1;
    type Compare = fn(&mut Machine);
    let by_user: Compare = |m| m.mmu.serialize();
    let by_vmm: Compare = |m| m.mmu.recheck_code();
    let by_device: Compare = |m| m.mmu.recheck_exposed();
    // Pages before the first comparison, number of comparisons, pages before the last one, and whether the epoch stays.
    let cases = [
        (3, 1, 3, true),
        (3, 1, 20, true),
        (3, 1, 40, false),
        (3, 500, 3, true),
        (20, 1, 100, true),
        (20, 63, 20, true),
        (20, 64, 20, false),
    ];
    for (compare, offset) in [(by_user, 0), (by_vmm, 0x800), (by_device, 0)] {
        for (few, comparisons, many, keeps) in cases {
            let mut m = Machine::long_mode(ROOT);
            let mut pool = ROOT + 0x1000;
            for (gva, gpa) in (0..many).map(at) {
                m.map(ROOT, gva, gpa | 7, &mut pool);
            }
            m.cpu.cpl = 3;
            m.mmu.select_view(&m.cpu);
            (0..few).for_each(|n| _ = look(&mut m, n));
            (0..comparisons).for_each(|_| compare(&mut m));
            let before: Vec<u32> = (0..many).map(|n| look(&mut m, n)).collect();
            let changed = many - 1;
            // More of the page, perhaps, than was compared before.
            fetch(&mut m.mmu, &mut m.cpu, at(changed).0 + offset);
            // SAFETY: inside the mapping; the vCPU does not run.
            unsafe {
                let byte = m.ram.as_ptr().add((at(changed).1 + offset) as usize);
                byte.write_volatile(byte.read_volatile() + 1);
            }
            let epoch = m.mmu.fetch_epoch();
            compare(&mut m);
            assert_eq!(m.mmu.fetch_epoch() == epoch, keeps, "{few} {many}");
            for n in 0..many {
                let same = look(&mut m, n) == before[n as usize];
                assert_eq!(same, n != changed, "page {n} of {many}");
            }
        }
    }
}

/// A page is compared as what it is in its own address space, whether or not the vCPU is in SMM meanwhile.
#[test]
fn pages_of_the_other_address_space_are_compared() {
    const SMM: u32 = 1 << 16;
    let gpa = 0x5000;
    for fetches_in_smm in [false, true] {
        let mut m = Machine::new();
        let hva = m.ram.as_ptr() as u64;
        // The page is in the first slot of one space, and in the second of the other.
        m.memory.set_slot(slot(SMM, 0, 0x1000, hva, 0)).unwrap();
        let rest = slot(SMM | 1, 0x1000, RAM - 0x1000, hva + 0x1000, 0);
        m.memory.set_slot(rest).unwrap();
        m.mmu.sync(&m.cpu);
        let go = |m: &mut Machine, in_smm| {
            m.cpu.events.in_smm = in_smm;
            m.mmu.set_root(&m.cpu);
        };
        go(&mut m, fetches_in_smm);
        let before = fetch(&mut m.mmu, &mut m.cpu, gpa).1;
        go(&mut m, !fetches_in_smm);
        // SAFETY: inside the mapping; the vCPU does not run.
        unsafe { m.ram.as_ptr().add(gpa as usize).write_volatile(9) };
        for _ in 0..2 {
            m.mmu.recheck_code();
        }
        go(&mut m, fetches_in_smm);
        let after = fetch(&mut m.mmu, &mut m.cpu, gpa).1;
        assert_ne!(after, before, "{fetches_in_smm}");
    }
}

#[test]
fn another_slot_has_other_code() {
    let mut m = Machine::new();
    let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2000);
    let epoch = m.mmu.fetch_epoch();
    let hva = m.ram.as_ptr() as u64;
    m.memory.set_slot(slot(0, 0, 0, 0, 0)).unwrap();
    m.mmu.sync(&m.cpu);
    assert_ne!(m.mmu.fetch_epoch(), epoch);
    assert_ne!(m.mmu.code_generation(id), generation);
    assert_eq!(
        m.mmu.code_page(&mut m.cpu, 0x2000),
        Err(Miss::Device { gpa: 0x2000 })
    );
    m.memory
        .set_slot(slot(0, 0, RAM / 2, hva + RAM / 2, 0))
        .unwrap();
    m.mmu.sync(&m.cpu);
    let (same, other, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2000);
    assert_eq!(same, id);
    assert_ne!(other, generation);
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
                        mmu.sync(&cpu);
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
                mmu.sync(&cpu);
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
