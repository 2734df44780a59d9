//! Tests of slots, accesses and page state.

use std::sync::Arc;

use host::Mapping;

use crate::{GuestMemory, Mailbox, MemslotError as E, PageCopy, SlotConfig};

const HVA: u64 = 0x7000_0000_0000;

fn config(slot: u32, gpa: u64, size: u64, hva: u64, flags: u32) -> SlotConfig {
    SlotConfig {
        slot,
        flags,
        gpa,
        size,
        hva,
    }
}

/// KVM's answers, in order, to a sequence of requests. Nothing is accessed.
#[test]
fn slot_rules() {
    let m = GuestMemory::new();
    let rows = [
        (config(0, 0, 0x4000, HVA, 0), Ok(())),
        (config(1, 0x3000, 0x1000, HVA, 0), Err(E::Overlap(0))),
        (config(1, 0x4000, 0x1000, HVA, 2), Ok(())),
        // Other address space: no overlap.
        (config(0x1_0001, 0x3000, 0x4000, HVA, 0), Ok(())),
        (
            config(0x2_0001, 0x3000, 0x1000, HVA, 0),
            Err(E::Number(0x2_0001)),
        ),
        (config(32764, 0, 0x1000, HVA, 0), Err(E::Number(32764))),
        (config(2, 0x8000, 0x1000, HVA, 4), Err(E::Flags(4))),
        (config(2, 0x8001, 0x1000, HVA, 0), Err(E::Unaligned)),
        (config(2, 0x8000, 0x1001, HVA, 0), Err(E::Unaligned)),
        (config(2, 0x8000, 0x1000, HVA + 8, 0), Err(E::Unaligned)),
        (config(2, u64::MAX - 0xfff, 0x2000, HVA, 0), Err(E::Range)),
        (config(2, 1 << 52, 0x1000, HVA, 0), Err(E::Range)),
        (config(2, 0x8000, 1 << 43, 0, 0), Err(E::Range)),
        (config(2, 0x8000, 0x1000, 1 << 47, 0), Err(E::Range)),
        (
            config(2, 0x8000, 0x1000, u64::MAX - 0xfff, 0),
            Err(E::Range),
        ),
        (config(2, 0, 0, 0, 0), Err(E::Nothing(2))),
        // An existing slot: size, hva and the read-only flag are fixed.
        (config(0, 0, 0x3000, HVA, 0), Err(E::Immutable)),
        (config(0, 0, 0x4000, HVA + 0x1000, 0), Err(E::Immutable)),
        (config(0, 0, 0x4000, HVA, 2), Err(E::Immutable)),
        (config(1, 0x4000, 0x1000, HVA, 0), Err(E::Immutable)),
        // A change of flags, no change, and moves.
        (config(0, 0, 0x4000, HVA, 1), Ok(())),
        (config(0, 0, 0x4000, HVA, 1), Ok(())),
        (config(0, 0x1000, 0x4000, HVA, 1), Err(E::Overlap(1))),
        (config(0, 0x5000, 0x4000, HVA, 1), Ok(())),
        (config(3, 0, 0x4000, HVA, 0), Ok(())),
        (config(0, 0, 0, 0, 0), Ok(())),
        (config(0, 0, 0, 0, 0), Err(E::Nothing(0))),
    ];
    for (request, answer) in rows {
        let before = (m.table().generation(), m.table().slots(0).len());
        let got = m.set_slot(request).map(|_| ());
        assert_eq!(got, answer, "{request:x?}");
        if got.is_err() {
            assert_eq!((m.table().generation(), m.table().slots(0).len()), before);
        }
    }
    let table = m.table();
    let gpas: Vec<u64> = table.slots(0).iter().map(|s| s.config().gpa).collect();
    assert_eq!(gpas, [0, 0x4000]);
    assert_eq!(table.lookup(0, 0x3fff).map(|s| s.config().slot), Some(3));
    assert_eq!(table.lookup(0, 0x4fff).map(|s| s.config().slot), Some(1));
    assert!(table.lookup(0, 0x5000).is_none());
    assert!(table.lookup(1, 0x2fff).is_none());
    assert!(table.lookup(7, 0).is_none());
}

fn with_ram() -> (Arc<GuestMemory>, Mapping) {
    let m = GuestMemory::new();
    let ram = Mapping::anonymous(0x6000).unwrap();
    let hva = ram.as_ptr() as u64;
    // Adjacent in the guest; in the opposite order in the host.
    m.set_slot(config(0, 0, 0x3000, hva + 0x3000, 1)).unwrap();
    m.set_slot(config(1, 0x3000, 0x3000, hva, 0)).unwrap();
    (m, ram)
}

#[test]
fn pages_that_are_known_to_be_readable() {
    let (m, _ram) = with_ram();
    let table = m.table();
    let slot = &table.slots(0)[1];
    let known = |first| {
        let mut bits = [0; 2];
        slot.readable_pages(first, &mut bits);
        bits
    };
    assert_eq!(known(0), [0, 0]);
    assert!(slot.page(1).is_some() && slot.page(2).is_some());
    assert_eq!(known(0), [6, 0]);
    assert_eq!(known(2), [1, 0]);
    assert_eq!([known(3), known(200)], [[0, 0]; 2]);
    // Pages before the slot.
    assert_eq!(known(-61), [1 << 62 | 1 << 63, 0]);
    assert_eq!(known(-62), [1 << 63, 1]);
    assert_eq!(known(-126), [0, 1 << 63]);
    assert_eq!(known(-200), [0, 0]);
    slot.set_mapped();
    assert_eq!([known(0), known(1)], [[7, 0], [3, 0]]);
    assert_eq!(known(-63), [1 << 63, 3]);
}

#[test]
fn accesses_cross_pages_and_slots() {
    let (m, _ram) = with_ram();
    let data: Vec<u8> = (0..0x4321u32).map(|i| (i * 7) as u8).collect();
    assert!(m.write_bytes(0x123, &data));
    let mut back = vec![0; data.len()];
    assert!(m.read_bytes(0x123, &mut back));
    assert_eq!(back, data);
    assert_eq!(dirty(&m, 0, true).unwrap(), [7]);
    for size in [1, 2, 4, 8, 16usize] {
        for gpa in 0x2ff0..0x3004u64 {
            let v = 0x0102_0304_0506_0708_1112_1314_1516_1718u128 & (u128::MAX >> (128 - 8 * size));
            assert_eq!(m.write_gpa(gpa, size, v), Some(()));
            assert_eq!(m.read_gpa(gpa, size), Some(v));
        }
    }
    // Not all RAM: nothing happens.
    assert!(!m.write_bytes(0x5ffe, &[1, 2, 3]));
    assert!(!m.read_bytes(u64::MAX - 1, &mut [0; 4]));
    assert_eq!(m.read_gpa(0x5ffe, 2), Some(0));
    assert_eq!(m.read_gpa(0x5fff, 2), None);
    assert_eq!(m.write_gpa(0x6000, 1, 0), None);
}

/// A page and its copy, which differ in one byte or in none: the difference shows in its chunk alone.
#[test]
fn chunks_are_compared_with_a_copy() {
    let (m, _ram) = with_ram();
    let page = m.table().host_page(0, 0x1000, true).unwrap();
    let mut copy = Box::new(PageCopy::ZERO);
    for word in 0..512 {
        page.store(word * 8, 8, u128::from(word).wrapping_mul(0x1_0001_0001))
            .unwrap();
    }
    for n in 0..64 {
        copy.set_chunk(n, page.chunk(n));
    }
    for chunks in [0, 1, 1 << 63, 0x8000_0001_0000_0102, u64::MAX] {
        assert!(page.has_chunks(chunks, &copy));
    }
    for offset in 0..4096_u64 {
        let byte = page.load(offset, 1).unwrap();
        page.store(offset, 1, byte ^ 0x80).unwrap();
        let chunk = 1 << (offset / 64);
        for (chunks, is_same) in [
            (chunk, false),
            (u64::MAX, false),
            (chunk | 0x8000_0000_0000_0101, false),
            (!chunk, true),
            (0, true),
        ] {
            assert_eq!(page.has_chunks(chunks, &copy), is_same, "{offset}");
            assert_eq!(page.has_chunks_by_words(chunks, &copy), is_same, "{offset}");
        }
        page.store(offset, 1, byte).unwrap();
    }
}

#[test]
fn page_accessors_stay_in_the_page() {
    let (m, _ram) = with_ram();
    let page = m.table().host_page(0, 0x1000, true).unwrap();
    for size in [1, 2, 4, 8, 16usize] {
        let last = 4096 - size as u64;
        assert!(page.store(last, size, 1).is_some());
        assert!(page.load(last, size).is_some());
        for offset in [last + 1, 4096, u64::MAX, u64::MAX - 15] {
            assert!(page.load(offset, size).is_none());
            assert!(page.store(offset, size, 0).is_none());
            assert!(
                page.rmw(offset, size, Some(m.split_lock()), |v| v)
                    .is_none()
            );
            assert!(!page.compare_exchange(offset, size, 0, 0));
        }
    }
    for n in 0..=200u64 {
        let data: Vec<u8> = (0..n).map(|i| i as u8 + 1).collect();
        assert!(page.write_bytes(4096 - n, &data));
        assert!(!page.write_bytes(4097 - n, &data));
        let mut back = vec![0; n as usize];
        assert!(page.read_bytes(4096 - n, &mut back));
        assert!(!page.read_bytes(4097 - n, &mut back));
        assert_eq!(back, data);
    }
    assert!(!page.copy_elements(4090, page, 0, 1, 8));
    assert!(!page.copy_elements(0, page, 4090, 1, 8));
    assert!(!page.copy_elements(0, page, 0, u64::MAX, 8));
    assert!(!page.copy_elements(0, page, 0, 1, 3));
    assert!(!page.copy_elements_down(4090, page, 0, 1, 8));
    assert!(!page.copy_elements_down(8, page, 4, 2, 8));
    assert!(!page.copy_elements_down(0, page, 0, u64::MAX, 8));
    assert!(!page.copy_elements_down(0, page, 0, 1, 3));
    assert!(!page.fill_elements(4090, 0, 1, 8));
    assert!(!page.compare_exchange(2, 4, 0, 0));
}

/// Copies downwards are those of one element after another, whatever overlaps.
#[test]
fn copies_downwards() {
    let (m, _ram) = with_ram();
    let page = m.table().host_page(0, 0x1000, true).unwrap();
    for unit in [1, 2, 4, 8_u64] {
        for distance in -20..=20_i64 {
            let (from, count) = (400_u64, 40);
            let to = from.wrapping_add_signed(distance);
            let mut expected: Vec<u8> = (0..1024).map(|n| (n * 7 + n / 256) as u8).collect();
            assert!(page.write_bytes(0, &expected));
            for n in 0..count {
                let at = |start: u64| (start - n * unit) as usize;
                let element = expected[at(from)..at(from) + unit as usize].to_vec();
                expected[at(to)..at(to) + unit as usize].copy_from_slice(&element);
            }
            assert!(page.copy_elements_down(to, page, from, count, unit));
            let mut bytes = vec![0; expected.len()];
            assert!(page.read_bytes(0, &mut bytes));
            assert_eq!(bytes, expected, "{unit} bytes, {distance} away");
        }
    }
}

/// Every size at every misalignment, from two threads at once.
#[test]
fn locked_exchanges_are_atomic() {
    const N: u64 = 20_000;
    let (m, _ram) = with_ram();
    let page = m.table().host_page(0, 0x1000, true).unwrap();
    for size in [1, 2, 4, 8, 16usize] {
        for offset in [0x40, 0x41, 0x43, 0x47, 0x4d, 0x3f, 0x4f] {
            page.fill_elements(0, 0, 512, 8);
            std::thread::scope(|s| {
                for _ in 0..2 {
                    s.spawn(|| {
                        for _ in 0..N / 20 {
                            page.rmw(offset, size, Some(m.split_lock()), |v| v.wrapping_add(1));
                        }
                    });
                }
            });
            let mask = u128::MAX >> (128 - 8 * size);
            let total = u128::from(N / 10) & mask;
            assert_eq!(page.load(offset, size).unwrap(), total, "{size} {offset:x}");
            // The neighbours are untouched.
            assert_eq!(page.load(offset - 1, 1).unwrap(), 0);
            assert_eq!(page.load(offset + size as u64, 1).unwrap(), 0);
        }
    }
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                for _ in 0..N {
                    m.rmw_gpa(0x2000, 8, |v| v + 1).unwrap();
                }
            });
        }
    });
    assert_eq!(m.read_gpa(0x2000, 8), Some(u128::from(2 * N)));
}

#[test]
fn dirty_log_errors() {
    let (m, _ram) = with_ram();
    assert_eq!(dirty(&m, 1, true).unwrap_err(), E::NotLogging(1));
    assert_eq!(dirty(&m, 9, true).unwrap_err(), E::NotFound(9));
    assert_eq!(dirty(&m, 0x2_0000, true).unwrap_err(), E::Number(0x2_0000));
    assert_eq!(m.clear_dirty(0, 1, &[0]).unwrap_err(), E::Unaligned);
    assert_eq!(m.clear_dirty(0, 64, &[0]).unwrap_err(), E::Range);
    assert_eq!(m.clear_dirty(0, 0, &[0, 0]).unwrap_err(), E::Range);
    m.mark_dirty(2);
    m.mark_dirty(5);
    m.mark_dirty(u64::MAX);
    assert_eq!(dirty(&m, 0, false).unwrap(), [4]);
}

/// Returns the slot's bitmap; `take` clears it.
fn dirty(m: &GuestMemory, slot: u32, take: bool) -> Result<Vec<u64>, E> {
    let mut bitmap = Vec::new();
    let show = |_, words: &[u64]| {
        bitmap.extend_from_slice(words);
        Ok::<(), ()>(())
    };
    if take {
        m.take_dirty(slot, show)?.0.unwrap();
    } else {
        m.peek_dirty(slot, show)?.unwrap();
    }
    Ok(bitmap)
}

#[test]
fn who_may_write_is_asked_for_what_was_harvested_and_for_nothing_else() {
    let (m, _ram) = with_ram();
    let table = m.table();
    let own = Arc::new(Mailbox::default());
    let logs = table.by_number(0).unwrap().writer(&own).unwrap();
    let other = table.by_number(1).unwrap().writer(&own).unwrap();
    assert!(logs.add(0) && logs.add(1) && other.add(0));
    m.mark_dirty(2);
    assert_eq!(dirty(&m, 0, false).unwrap(), [1 << 2]);
    // A harvest of a page that the vCPU does not write, and then an empty one.
    assert_eq!(dirty(&m, 0, true).unwrap(), [1 << 2]);
    assert_eq!(dirty(&m, 0, true).unwrap(), [0]);
    assert_eq!((own.posted(), m.pages_asked()), (0, 0));
    let epoch = m.epoch();
    m.mark_dirty(1);
    m.clear_dirty(0, 0, &[1 << 1]).unwrap();
    assert_eq!((own.posted(), m.pages_asked()), (1, 1));
    let mut asked = Vec::new();
    logs.take_asked(|n, pages| asked.push((n, pages)));
    assert_eq!(asked, [(0, 1 << 1)]);
    other.take_asked(|_, _| panic!("another slot"));
    // A page that becomes code is asked for at each gpa that it has.
    m.ask_for_code(table.host_page(0, 0, false).unwrap());
    assert_eq!(own.posted(), 2);
    assert_eq!(m.epoch(), epoch);
}

#[test]
fn pages_that_have_had_code_are_known() {
    let (m, _ram) = with_ram();
    let table = m.table();
    let slot = table.by_number(0).unwrap();
    assert_eq!((slot.pages_with_code(0), slot.code_chunks(2)), (0, 0));
    assert!(slot.track_code(2, 0x40, 8) && !slot.track_code(2, 0x48, 8));
    assert_eq!((slot.pages_with_code(0), slot.code_chunks(2)), (1 << 2, 2));
    // Code that was written over is none any more, but the page stays known.
    slot.note_code_write(2, 0x44, 1);
    assert_eq!((slot.pages_with_code(0), slot.code_chunks(2)), (1 << 2, 0));
    assert_eq!(slot.pages_with_code(usize::MAX), 0);
}

/// A sparse slot of 64 GiB takes as many steps as it has pages in use.
#[test]
fn a_large_slot_begins_dirty_and_is_cleared_without_a_walk() {
    const SIZE: u64 = 64 << 30;
    let m = GuestMemory::new();
    m.set_starts_dirty(true);
    let start = std::time::Instant::now();
    m.set_slot(config(3, 0, SIZE, HVA, 1)).unwrap();
    let own = Arc::new(Mailbox::default());
    let writer = m.table().by_number(3).unwrap().writer(&own).unwrap();
    writer.add(1 << 23);
    let mask = vec![u64::MAX; 1 << 18];
    m.clear_dirty(3, 0, &mask).unwrap();
    assert_eq!(m.pages_asked(), 1);
    m.mark_dirty(77);
    let bitmap = dirty(&m, 3, true).unwrap();
    assert_eq!(bitmap.iter().map(|w| w.count_ones()).sum::<u32>(), 1);
    assert_eq!(bitmap[1], 1 << 13);
    // A generous limit: loops over all pages would take a hundred times as long.
    assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
}

/// Compares random requests with a list that is searched linearly.
#[test]
fn slots_stay_sorted_and_apart() {
    let m = GuestMemory::new();
    let mut model: Vec<SlotConfig> = Vec::new();
    let mut state = 1u64;
    let mut random = |n: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) % n
    };
    let mut snapshot = m.table();
    let mut good = 0;
    for round in 0..20_000 {
        let number = (random(40) + (random(2) << 16)) as u32;
        let old = model.iter().position(|c| c.slot == number);
        let size = old.map_or(0x1000 << random(4), |at| model[at].size);
        let size = if random(4) == 0 { 0 } else { size };
        let wanted = config(number, random(64) << 12, size, HVA, 0);
        let same_space = |c: &&SlotConfig| c.slot >> 16 == number >> 16 && c.slot != number;
        let hit = model
            .iter()
            .filter(same_space)
            .any(|c| c.gpa < wanted.gpa + size && wanted.gpa < c.gpa + c.size);
        let expected = match (size, old) {
            (0, None) => Err(E::Nothing(number)),
            (0, Some(_)) => Ok(()),
            _ if hit => Err(E::Overlap(0)),
            _ => Ok(()),
        };
        let got = m.set_slot(wanted).map(|_| ());
        match (got, expected) {
            (Err(E::Overlap(_)), Err(E::Overlap(_))) => {}
            (got, expected) => assert_eq!(got, expected, "{wanted:x?} on {model:x?}"),
        }
        if got.is_ok() {
            good += 1;
            model.retain(|c| c.slot != number);
            if size != 0 {
                model.push(wanted);
            }
        }
        for space in 0..2 {
            let mut sorted: Vec<_> = model.iter().filter(|c| c.slot >> 16 == space).collect();
            sorted.sort_by_key(|c| c.gpa);
            let table = m.table();
            let slots = table.slots(space as usize);
            assert_eq!(slots.iter().map(|s| s.config()).collect::<Vec<_>>(), sorted);
        }
        for c in &model {
            assert_eq!(m.table().by_number(c.slot).map(|s| *s.config()), Some(*c));
        }
        // Every hundred rounds the test keeps a snapshot, which must not change.
        if round % 100 == 0 {
            snapshot = m.table();
        }
        let kept: Vec<_> = snapshot.slots(0).iter().map(|s| *s.config()).collect();
        if round % 100 == 50 {
            assert!(kept.is_sorted_by_key(|c| c.gpa));
        }
    }
    assert!(good > 2000, "{good}");
}
