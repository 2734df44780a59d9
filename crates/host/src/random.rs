//! Random numbers without a system call for each of them.

use std::io;

use crate::system;

/// Bytes of a block of ChaCha20.
const BLOCK: usize = 64;

/// Fills `buf` from the kernel's generator.
///
/// # Errors
/// Those of `getrandom`, which happen only on hosts that have not finished booting.
pub fn fill(buf: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let rest = &mut buf[done..];
        // SAFETY: the pointer and length describe `rest`.
        done += unsafe {
            let (at, len) = (rest.as_mut_ptr() as usize, rest.len());
            system::call(libc::SYS_getrandom, [at, len, 0])?
        };
    }
    Ok(())
}

/// A generator of random numbers, seeded by the kernel: ChaCha20 (RFC 8439) that replaces its key by a part of its
/// output after each block, so that earlier numbers cannot be computed from its state.
///
/// It serves a vCPU's RDRAND, because some system call filters do not allow getrandom(2).
#[derive(Debug)]
pub struct Generator {
    key: [u32; 8],
    blocks: u64,
    /// Numbers of the last block that are left.
    numbers: [u64; 4],
    left: usize,
}

impl Generator {
    /// Seeds a generator.
    ///
    /// # Errors
    /// Those of [`fill`].
    pub fn new() -> io::Result<Self> {
        let mut seed = [0; 32];
        fill(&mut seed)?;
        let mut key = [0; 8];
        for (word, bytes) in key.iter_mut().zip(seed.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Ok(Self {
            key,
            blocks: 0,
            numbers: [0; 4],
            left: 0,
        })
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        if self.left == 0 {
            let block = chacha20(&self.key, self.blocks);
            self.blocks = self.blocks.wrapping_add(1);
            let (key, rest) = block.split_at(8);
            self.key.copy_from_slice(key);
            for (number, pair) in self.numbers.iter_mut().zip(rest.as_chunks::<2>().0) {
                *number = u64::from(pair[0]) | u64::from(pair[1]) << 32;
            }
            self.left = self.numbers.len();
        }
        self.left -= 1;
        core::mem::take(&mut self.numbers[self.left])
    }
}

/// The block function, RFC 8439 section 2.3, with a counter of 64 bits and no nonce.
fn chacha20(key: &[u32; 8], counter: u64) -> [u32; BLOCK / 4] {
    let mut start = [0; BLOCK / 4];
    start[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
    start[4..12].copy_from_slice(key);
    start[12] = counter as u32;
    start[13] = (counter >> 32) as u32;
    rounds(start)
}

fn rounds(start: [u32; BLOCK / 4]) -> [u32; BLOCK / 4] {
    const QUARTERS: [[usize; 4]; 8] = [
        [0, 4, 8, 12],
        [1, 5, 9, 13],
        [2, 6, 10, 14],
        [3, 7, 11, 15],
        [0, 5, 10, 15],
        [1, 6, 11, 12],
        [2, 7, 8, 13],
        [3, 4, 9, 14],
    ];
    let mut state = start;
    for _ in 0..10 {
        for [a, b, c, d] in QUARTERS {
            for (x, y, z, turn) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
                state[x] = state[x].wrapping_add(state[y]);
                state[z] = (state[z] ^ state[x]).rotate_left(turn);
            }
        }
    }
    for (word, first) in state.iter_mut().zip(start) {
        *word = word.wrapping_add(first);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_differ() {
        let mut a = [0; 64];
        fill(&mut a).unwrap();
        assert!(a.windows(2).any(|w| w[0] != w[1]));
        fill(&mut []).unwrap();
    }

    /// RFC 8439, section 2.3.2.
    #[test]
    fn the_block_function_is_that_of_the_standard() {
        let mut start = [0u32; 16];
        start[..4].copy_from_slice(&[0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574]);
        for (n, word) in start[4..12].iter_mut().enumerate() {
            let byte = 4 * n as u32;
            *word = byte | (byte + 1) << 8 | (byte + 2) << 16 | (byte + 3) << 24;
        }
        start[12..].copy_from_slice(&[1, 0x0900_0000, 0x4a00_0000, 0]);
        let block = rounds(start);
        assert_eq!(
            block[..4],
            [0xe4e7_f110, 0x1559_3bd1, 0x1fdd_0f50, 0xc471_20a3]
        );
        assert_eq!(
            block[12..],
            [0xd19c_12b5, 0xb94e_16de, 0xe883_d0cb, 0x4e3c_50a2]
        );
    }

    #[test]
    fn generators_differ_and_do_not_repeat() {
        let (mut a, mut b) = (Generator::new().unwrap(), Generator::new().unwrap());
        let mut all: Vec<u64> = (0..1000)
            .flat_map(|_| [a.next_u64(), b.next_u64()])
            .collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2000);
    }
}
