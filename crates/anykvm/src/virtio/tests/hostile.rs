//! Drivers that break the rules. The device stops until it is reset, and works again after that.

use super::block::Image;
use super::{BUFFER, Driver, INDIRECT, MEM, NEEDS_RESET, NEXT, QUEUE_LEN, WRITE};

const FAR: u64 = 1 << 40;
const HEADER: (u64, u32, u16, u16) = (BUFFER, 16, NEXT, 1);
const STATUS: (u64, u32, u16, u16) = (BUFFER + 0x800, 1, WRITE, 0);

fn assert_alive(driver: &Driver) {
    driver.start(1);
    driver.put(BUFFER, &[0; 16]);
    let data = (BUFFER + 0x1000, 512, NEXT | WRITE, 2);
    driver.submit(0, 0, &[HEADER, data, STATUS]);
    assert_eq!(driver.used(0, 1), 513);
    assert_eq!(driver.get(STATUS.0, 1), [0]);
}

#[test]
fn chains_that_are_no_requests() {
    let image = Image::new("chains");
    let driver = Driver::ready(image.backend(false), 1);
    let table = BUFFER + 0x4000;
    // The only entry of this indirect table is an indirect table.
    driver.put(table, &table.to_le_bytes());
    driver.put(table + 8, &[16, 0, 0, 0, 4, 0, 0, 0]);
    type Row = (&'static str, u16, Vec<(u64, u32, u16, u16)>);
    let rows: Vec<Row> = vec![
        ("header outside of RAM", 0, vec![(FAR, 16, NEXT, 1), STATUS]),
        (
            "data outside of RAM",
            0,
            vec![HEADER, (FAR, 512, NEXT | WRITE, 2), STATUS],
        ),
        (
            "data across the end of RAM",
            0,
            vec![HEADER, (MEM - 8, 512, NEXT | WRITE, 2), STATUS],
        ),
        (
            "address overflow",
            0,
            vec![HEADER, (u64::MAX - 4, 512, NEXT | WRITE, 2), STATUS],
        ),
        ("status outside of RAM", 0, vec![HEADER, (FAR, 1, WRITE, 0)]),
        ("no status", 0, vec![(BUFFER, 16, 0, 0)]),
        ("empty status", 0, vec![HEADER, (BUFFER, 0, WRITE, 0)]),
        ("no header", 0, vec![STATUS]),
        ("short header", 0, vec![(BUFFER, 15, NEXT, 1), STATUS]),
        (
            "a circle",
            0,
            vec![(BUFFER, 16, NEXT, 1), (BUFFER, 16, NEXT, 0)],
        ),
        ("a circle of its own", 0, vec![(BUFFER, 16, NEXT, 0)]),
        ("next beyond the table", 0, vec![(BUFFER, 16, NEXT, 999)]),
        ("head beyond the table", QUEUE_LEN, vec![HEADER, STATUS]),
        ("head 0xffff", 0xffff, vec![HEADER, STATUS]),
        (
            "indirect table outside of RAM",
            0,
            vec![(FAR, 16, INDIRECT, 0)],
        ),
        (
            "indirect table of odd size",
            0,
            vec![(table, 17, INDIRECT, 0)],
        ),
        (
            "indirect table of nothing",
            0,
            vec![(table, 0, INDIRECT, 0)],
        ),
        ("indirect in indirect", 0, vec![(table, 16, INDIRECT, 0)]),
        (
            "4 GiB in pieces",
            0,
            vec![
                HEADER,
                (BUFFER, u32::MAX, NEXT | WRITE, 2),
                (BUFFER, u32::MAX, NEXT | WRITE, 3),
                STATUS,
            ],
        ),
    ];
    for (what, head, chain) in rows {
        driver.put(BUFFER, &[0; 16]);
        driver.submit(0, head, &chain);
        assert!(driver.broken_or_used(0, 1), "{what}");
        assert_ne!(driver.status() & NEEDS_RESET, 0, "{what}");
        // A broken device does nothing until it is reset.
        driver.notify(0);
        assert_alive(&driver);
        driver.start(1);
    }
}

#[test]
fn a_circle_of_written_buffers_ends() {
    let image = Image::new("circle");
    let driver = Driver::ready(image.backend(false), 1);
    driver.put(BUFFER, &[0; 16]);
    // The chain has a header, and then the same data buffer for ever. The device has to answer in some way.
    let data = (BUFFER + 0x1000, 512, NEXT | WRITE, 1);
    driver.submit(0, 0, &[HEADER, data]);
    driver.broken_or_used(0, 1);
    assert_alive(&driver);
}

#[test]
fn impossible_ring_indices() {
    let image = Image::new("indices");
    let driver = Driver::ready(image.backend(false), 1);
    for idx in [QUEUE_LEN + 1, 0x8000, 0xffff] {
        driver.set_available(0, idx);
        driver.notify(0);
        assert!(driver.broken_or_used(0, 1), "{idx}");
        assert_alive(&driver);
        driver.start(1);
    }
}

#[test]
fn queues_outside_of_memory() {
    let image = Image::new("queues");
    let driver = Driver::new(image.backend(false));
    let good = [0x1_0000, 0x1_1000, 0x1_2000];
    let wrong = [FAR, MEM - 16, !0xf, 0x1_0001];
    for part in 0..3 {
        for address in wrong {
            let mut addresses = good;
            addresses[part] = address;
            driver.negotiate(1 << 32);
            driver.set_queue(0, QUEUE_LEN, addresses);
            driver.set_status(0xf);
            assert_ne!(driver.status() & NEEDS_RESET, 0, "{part}: {address:#x}");
            driver.notify(0);
        }
    }
    assert_alive(&driver);
}

#[test]
fn notifications_for_what_is_not_there() {
    let image = Image::new("notify");
    let driver = Driver::new(image.backend(false));
    for queue in [0, 1, 2, 1000] {
        driver.notify(queue);
    }
    // The driver sets DRIVER_OK without any queue.
    driver.negotiate(1 << 32);
    driver.set_status(0xf);
    driver.notify(0);
    assert_eq!(driver.status() & NEEDS_RESET, 0);
    assert_alive(&driver);
}

#[test]
fn a_reset_while_requests_run() {
    let image = Image::new("reset");
    let driver = Driver::new(image.backend(false));
    for _ in 0..50 {
        driver.start(1);
        driver.put(BUFFER, &[0; 16]);
        let data = (BUFFER + 0x1000, 8192, NEXT | WRITE, 2);
        for _ in 0..8 {
            driver.submit(0, 0, &[HEADER, data, STATUS]);
        }
        driver.set_status(0);
        // The device no longer uses the rings.
        let used = driver.used_count(0);
        driver.notify(0);
        std::thread::sleep(std::time::Duration::from_micros(100));
        assert_eq!(driver.used_count(0), used);
    }
    assert_alive(&driver);
}
