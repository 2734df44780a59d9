//! Tests of the entropy device and of the console.

use super::{BUFFER, Driver, NEXT, WRITE};
use crate::devices::Output;
use crate::virtio::{Console, Port, PortInput, Rng};
use std::sync::Arc;

#[test]
fn random_bytes_fill_what_is_offered() {
    let driver = Driver::ready(Box::new(Rng), 1);
    let chain = [
        (BUFFER, 32, NEXT | WRITE, 1),
        (BUFFER + 0x100, 32, WRITE, 0),
    ];
    driver.submit(0, 0, &chain);
    assert_eq!(driver.used(0, 1), 64);
    let first = driver.get(BUFFER, 32);
    assert_ne!(first, [0; 32]);
    assert_ne!(first, driver.get(BUFFER + 0x100, 32));
    // The first chain has no buffer to write to, the second one more room than is filled at once.
    driver.submit(0, 0, &[(BUFFER, 32, 0, 0)]);
    assert_eq!(driver.used(0, 2), 0);
    driver.submit(0, 0, &[(BUFFER, 1 << 20, WRITE, 0)]);
    assert_eq!(driver.used(0, 3), 4096);
}

#[test]
fn console_input_waits_for_buffers_and_buffers_for_input() {
    let input = Arc::<PortInput>::default();
    let output = Output::for_test();
    let size = Some((24, 80));
    let console = Console::new(vec![Port::Console(input.clone(), output.clone())], size);
    let driver = Driver::ready(Box::new(console), 2);
    assert_eq!(driver.read(0x2000), [80, 0, 24, 0]);
    // The input comes before the buffer.
    input.feed(b"hello");
    driver.submit(0, 0, &[(BUFFER, 4, WRITE, 0)]);
    assert_eq!(driver.used(0, 1), 4);
    assert_eq!(driver.get(BUFFER, 4), b"hell");
    driver.submit(0, 0, &[(BUFFER, 4, WRITE, 0)]);
    assert_eq!(driver.used(0, 2), 1);
    assert_eq!(driver.get(BUFFER, 1), b"o");
    // The buffer comes before the input.
    driver.submit(0, 0, &[(BUFFER, 64, WRITE, 0)]);
    input.feed(b"again");
    assert_eq!(driver.used(0, 3), 5);
    assert_eq!(input.backlog(), 0);
}

#[test]
fn console_output_is_passed_on_whole() {
    let output = Output::for_test();
    let console = Console::new(vec![Port::Console(Arc::default(), output.clone())], None);
    let driver = Driver::ready(Box::new(console), 2);
    let text: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
    driver.put(BUFFER, &text);
    let chain = [(BUFFER, 6000, NEXT, 1), (BUFFER + 6000, 4000, 0, 0)];
    driver.submit(1, 0, &chain);
    assert_eq!(driver.used(1, 1), 0);
    assert_eq!(output.take(), text);
}
