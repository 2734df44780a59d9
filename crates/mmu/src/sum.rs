//! Whether code is what it was.

use guest_memory::HostPage;

/// Odd numbers without a pattern, one for each word of a chunk.
const FACTORS: [u64; 8] = {
    let mut factors = [0; 8];
    let mut n = 0;
    while n < 8 {
        let mut z = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(n as u64 + 1);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        factors[n] = (z ^ z >> 31) | 1;
        n += 1;
    }
    factors
};

/// A hash of the chunks, such that sums of disjoint sets add by exclusive or.
///
/// Each word by a factor of its own, so that one word that is another always shows: few
/// instructions, as this is done again for each page that is mapped for fetching.
pub(crate) fn sum_of(host: HostPage, chunks: u64) -> u64 {
    sum_of_chunks(chunks, |chunk| host.chunk(chunk))
}

/// The same of chunks that are somewhere else.
pub(crate) fn sum_of_chunks(mut chunks: u64, words_of: impl Fn(usize) -> [u64; 8]) -> u64 {
    let mut sum = 0;
    while chunks != 0 {
        let chunk = u64::from(chunks.trailing_zeros());
        chunks &= chunks - 1;
        let words = words_of(chunk as usize);
        let products = words.iter().zip(FACTORS).map(|(w, f)| w.wrapping_mul(f));
        let mut h = products.fold(chunk + 1, u64::wrapping_add);
        // Chunks that differ in one bit alone must not cancel out.
        h = (h ^ h >> 32).wrapping_mul(FACTORS[0]);
        h = (h ^ h >> 29).wrapping_mul(FACTORS[1]);
        sum ^= h ^ h >> 32;
    }
    sum
}
