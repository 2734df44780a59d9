//! Checksums of code, by which a change is noticed.

use guest_memory::HostPage;

/// Odd factors without a pattern, one for each word of a chunk.
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

/// Returns a checksum of the page's chunks. The checksum of a union of disjoint sets is the XOR of their checksums.
///
/// Each word is multiplied by a factor of its own, so a change of a single word always shows. The checksum takes few
/// instructions, because it is computed anew for each page that is mapped for fetching.
pub(crate) fn sum_of(host: HostPage, chunks: u64) -> u64 {
    sum_of_chunks(chunks, |chunk| host.chunk(chunk))
}

/// Like [`sum_of`], of chunks whose words `words_of` returns.
pub(crate) fn sum_of_chunks(mut chunks: u64, words_of: impl Fn(usize) -> [u64; 8]) -> u64 {
    let mut sum = 0;
    while chunks != 0 {
        let chunk = u64::from(chunks.trailing_zeros());
        chunks &= chunks - 1;
        let words = words_of(chunk as usize);
        let products = words.iter().zip(FACTORS).map(|(w, f)| w.wrapping_mul(f));
        let mut h = products.fold(chunk + 1, u64::wrapping_add);
        // Mixes the bits, so that changes of one bit in two chunks do not cancel out.
        h = (h ^ h >> 32).wrapping_mul(FACTORS[0]);
        h = (h ^ h >> 29).wrapping_mul(FACTORS[1]);
        sum ^= h ^ h >> 32;
    }
    sum
}
