//! Pages with code: when what was fetched from them counts as changed, and who may write what is beside it.

#![allow(clippy::unwrap_used, reason = "tests")]

mod machine;

use machine::{LOG, Machine, RAM, fetch, harvest, look, slot, write};
use mmu::{Miss, l1::Half};
use x86_cpu::{Flush, Privilege::Current};

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
        other.sync();
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
        other.sync();
        assert_ne!(m.mmu.code_generation(id), generation);
        let (_, generation, bytes) = fetch(&mut m.mmu, &mut m.cpu, gva);
        assert_eq!(bytes, 2u64.to_le_bytes());
        other.sync();
        assert_eq!(m.mmu.code_generation(id), generation);
        other.write(&mut other_cpu, gva, 3u64, Current).unwrap();
        assert_ne!(m.mmu.code_generation(id), generation);
    }
}

/// The chunks of the page of `gva` that translated code must not write, if it may write the others.
fn spared(m: &mut Machine, gva: u64) -> Option<u64> {
    let chunks = *m.mmu.front().code_at(gva)?.words();
    assert!(chunks.iter().all(|c| [0, u64::MAX].contains(c)));
    let bits = chunks.iter().enumerate();
    Some(bits.map(|(n, c)| (c & 1) << n).sum())
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
    m.mmu.sync();
    assert_eq!(spared(&mut m, gva), None);
    assert_eq!(look(&m.memory, 0)[0], 0);
    write(&mut m, data, 3).unwrap();
    assert_eq!(spared(&mut m, gva), Some(1 << 1 | 1 << 6));
    assert_eq!(look(&m.memory, 0)[0], 1 << 2);
    m.memory.request_write_flush();
    m.mmu.sync();
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
        other.sync();
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
        m.mmu.sync();
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
        m.mmu.sync();
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
    m.mmu.sync();
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
        m.mmu.sync();
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
    m.mmu.sync();
    assert_ne!(m.mmu.fetch_epoch(), epoch);
    assert_ne!(m.mmu.code_generation(id), generation);
    assert_eq!(
        m.mmu.code_page(&mut m.cpu, 0x2000),
        Err(Miss::Device { gpa: 0x2000 })
    );
    m.memory
        .set_slot(slot(0, 0, RAM / 2, hva + RAM / 2, 0))
        .unwrap();
    m.mmu.sync();
    let (same, other, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2000);
    assert_eq!(same, id);
    assert_ne!(other, generation);
}

/// A variable among instructions: its writes change nothing once the page's code has changed several times.
#[test]
fn data_among_code_is_told_from_code() {
    let mut m = Machine::new();
    let (mut other, mut other_cpu) = m.second();
    other.sync();
    // Code at 0x2040 and 0x2050, and data between them.
    let (code, data, more) = (0x2040, 0x204c, 0x2050);
    for n in 0.. {
        let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, code);
        fetch(&mut m.mmu, &mut m.cpu, more);
        write(&mut m, data - 4, n).unwrap();
        if m.mmu.code_generation(id) == generation {
            break;
        }
        assert!(n < 20, "never");
    }
    let (id, generation, _) = fetch(&mut m.mmu, &mut m.cpu, code);
    // Translated code writes it without a note, and no byte of code.
    let map = *m.mmu.front().code_at(code).unwrap().words();
    assert_eq!((map[0], map[1]), (0, 0xff << 16 | 0xff));
    // Neither does what comparisons find.
    for n in 0..20 {
        write(&mut m, data - 4, n).unwrap();
        m.mmu.recheck_code();
        // SAFETY: inside the mapping; no other thread is here.
        unsafe { m.ram.as_ptr().add(data as usize).write_volatile(n as u8) };
        m.mmu.recheck_code();
        assert_eq!(fetch(&mut m.mmu, &mut m.cpu, code).1, generation, "{n}");
        m.mmu.flush(&m.cpu, Flush::All);
        assert_eq!(fetch(&mut m.mmu, &mut m.cpu, more).1, generation, "{n}");
    }
    assert_eq!(m.mmu.stats().code_changed_by_vmm, 0);
    // What another vCPU fetches is code for both, and counts as changed as this one could write it.
    write(&mut m, data - 4, 5).unwrap();
    let (_, _, bytes) = fetch(&mut other, &mut other_cpu, data - 4);
    assert_eq!(bytes[..4], [5, 0, 0, 0]);
    assert!(m.mmu.needs_sync());
    assert!(m.mmu.front().code_at(code).is_some());
    m.mmu.sync();
    assert_eq!(m.mmu.front().code_at(code), None);
    let changed = m.mmu.code_generation(id);
    assert_ne!(changed, generation);
    // It fetches the same before it gives the page up: its own writes count at once.
    fetch(&mut m.mmu, &mut m.cpu, code);
    write(&mut m, 0x2100, 5).unwrap();
    fetch(&mut other, &mut other_cpu, 0x2060);
    assert!(m.mmu.needs_sync() && m.mmu.front().code_at(code).is_some());
    let (_, generation, _) = fetch(&mut m.mmu, &mut m.cpu, 0x2060);
    assert_eq!(m.mmu.front().code_at(code), None);
    write(&mut m, 0x2060, 5).unwrap();
    assert_ne!(m.mmu.code_generation(id), generation);
    // Each byte of code is code, written by the guest or by the VMM.
    for at in (code..code + 8).chain(more..more + 8) {
        let (_, generation, _) = fetch(&mut m.mmu, &mut m.cpu, code);
        fetch(&mut m.mmu, &mut m.cpu, more);
        m.mmu.write(&mut m.cpu, at, 1u8, Current).unwrap();
        assert_ne!(m.mmu.code_generation(id), generation, "{at:x}");
        let (_, generation, _) = fetch(&mut m.mmu, &mut m.cpu, code);
        fetch(&mut m.mmu, &mut m.cpu, more);
        // SAFETY: inside the mapping; no other thread is here.
        unsafe { m.ram.as_ptr().add(at as usize).write_volatile(2) };
        m.mmu.recheck_code();
        fetch(&mut m.mmu, &mut m.cpu, code);
        assert_ne!(m.mmu.code_generation(id), generation, "{at:x}");
    }
}
