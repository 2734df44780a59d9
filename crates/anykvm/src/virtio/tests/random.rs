//! Random drivers: register writes, rings and descriptors without sense. The device may refuse anything, but has to
//! work after a reset.

use super::block::Image;
use super::{BUFFER, Driver, MEM, NEXT, QUEUE_LEN, WRITE, rings};
use crate::devices::Output;
use crate::pci::Function;
use crate::virtio::{Backend, Console, Port, PortInput, Rng};
use std::sync::Arc;

const ROUNDS: u32 = 40;
const STEPS: u32 = 300;

/// A SplitMix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns an address: mostly in RAM, sometimes at its end or far outside.
    fn address(&mut self) -> u64 {
        match self.below(8) {
            0 => self.next(),
            1 => MEM - self.below(64),
            _ => self.below(MEM),
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let len = 1usize << self.below(4);
        self.next().to_le_bytes()[..len].to_vec()
    }
}

fn step(driver: &Driver, random: &mut Random, queues: u16) {
    let queue = random.below(u64::from(queues)) as u16;
    let [table, available, _] = rings(queue);
    match random.below(10) {
        0 => driver.write(random.below(64), &random.bytes()),
        1 => driver.write(random.below(0x1_0000), &random.bytes()),
        2 => {
            let (at, data) = (random.below(256) as u16, random.bytes());
            driver.device.write_config(at, &data);
        }
        3 => driver.start(queues),
        4 => driver.put(available + 2, &random.bytes()[..1]),
        5 => driver.put(table + random.below(0x100), &random.bytes()),
        6 => {
            driver.negotiate((1 << 32) | (random.below(4) << 28));
            let addresses = [(); 3].map(|()| random.address() & !0xf);
            driver.set_queue(queue, QUEUE_LEN, addresses);
            driver.set_status(0xf);
        }
        _ => {
            let len = 1 + random.below(5) as u16;
            let chain: Vec<_> = (1..=len)
                .map(|next| {
                    let flags = match random.below(8) {
                        0 => random.below(8) as u16,
                        n => NEXT | if n & 1 == 0 { WRITE } else { 0 },
                    };
                    let size = match random.below(6) {
                        0 => random.next() as u32,
                        1 => 16,
                        2 => 1,
                        _ => random.below(8192) as u32,
                    };
                    (random.address(), size, flags, next % QUEUE_LEN)
                })
                .collect();
            driver.submit(queue, random.below(4) as u16, &chain);
        }
    }
}

fn torture(seed: u64, queues: u16, backend: impl Fn() -> Box<dyn Backend>) {
    let mut random = Random(seed);
    for _ in 0..ROUNDS {
        let driver = Driver::ready(backend(), queues);
        for _ in 0..STEPS {
            step(&driver, &mut random, queues);
        }
        // The last queue of each device gets a buffer that may only be read.
        for at in [0x10, 4] {
            driver.device.write_config(at, &[0; 2]);
        }
        driver.start(queues);
        driver.put(BUFFER, &[0; 16]);
        let status = (BUFFER + 0x800, 1, WRITE, 0);
        driver.submit(queues - 1, 0, &[(BUFFER, 16, NEXT, 1), status]);
        driver.used(queues - 1, 1);
    }
}

#[test]
fn disks_survive_random_drivers() {
    let image = Image::new("random");
    torture(1, 1, || image.backend(false));
}

#[test]
fn random_numbers_survive_random_drivers() {
    torture(2, 1, || Box::new(Rng));
}

#[test]
fn consoles_survive_random_drivers() {
    let output = Output::for_nobody;
    torture(3, 2, || {
        let input = Arc::<PortInput>::default();
        input.feed(&[b'x'; 1000]);
        Box::new(Console::new(vec![Port::Console(input, output())], None))
    });
    // The device has control queues; the last queue is a stream that nobody reads.
    torture(4, 8, || {
        let ports = vec![
            Port::Console(Arc::default(), output()),
            Port::In("in", Arc::default()),
            Port::Out("out", output()),
        ];
        Box::new(Console::new(ports, None))
    });
}
