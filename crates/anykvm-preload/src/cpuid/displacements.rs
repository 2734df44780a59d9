//! Finds bytes of a program's code that look like the displacement of a branch, or of an operand relative to RIP.
//!
//! All of a program's code is searched before the program starts, sixteen bytes at once.

use core::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_or_si128, _mm_set_epi64x,
    _mm_set1_epi8,
};

/// Number of bytes that are compared at once.
const STEP: usize = 16;
/// Size of a displacement in bytes.
const SIZE: usize = 4;

/// Returns true if these two bytes may come just before the displacement of a branch, or of an operand relative to RIP.
const fn precede(first: u8, last: u8) -> bool {
    let is_relative = last & 0xc7 == 0x05;
    let is_condition = first == 0x0f && last & 0xf0 == 0x80;
    let is_transaction = first == 0xc7 && last == 0xf8;
    is_relative || is_condition || is_transaction || last & 0xfe == 0xe8
}

/// Returns a bit for each of sixteen pairs of bytes that may come before a displacement whose highest byte is all zeros
/// or all ones.
#[target_feature(enable = "sse2")]
fn candidates(first: &[u8; STEP], last: &[u8; STEP], highest: &[u8; STEP]) -> u32 {
    let [first, last, highest] = [first, last, highest].map(|bytes| {
        let value = u128::from_le_bytes(*bytes);
        _mm_set_epi64x((value >> 64) as i64, value as i64)
    });
    let are = |bytes, byte: u8| _mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8));
    let masked = |mask: u8, byte| are(_mm_and_si128(last, _mm_set1_epi8(mask as i8)), byte);
    let any = |these: [__m128i; 2]| _mm_or_si128(these[0], these[1]);
    let is_condition = _mm_and_si128(are(first, 0x0f), masked(0xf0, 0x80));
    let is_transaction = _mm_and_si128(are(first, 0xc7), are(last, 0xf8));
    let is_plain = any([masked(0xc7, 0x05), masked(0xfe, 0xe8)]);
    let precede = any([is_plain, any([is_condition, is_transaction])]);
    let is_near = any([are(highest, 0), are(highest, 0xff)]);
    _mm_movemask_epi8(_mm_and_si128(is_near, precede)) as u32
}

/// Calls `found`, in order, with the place and value of each four bytes that may be a displacement of at most
/// `distance`, and perhaps with some of more.
pub(super) fn for_each_displacement(
    bytes: &[u8],
    distance: usize,
    mut found: impl FnMut(usize, i32),
) {
    /// A displacement below this has a highest byte of all zeros or all ones.
    const NEAR: usize = 1 << 24;
    let mut tell = |at: usize| {
        let displacement = bytes.get(at..).and_then(<[u8]>::first_chunk::<SIZE>);
        if let Some(displacement) = displacement {
            found(at, i32::from_le_bytes(*displacement));
        }
    };
    // The displacement begins there, behind one byte or more.
    let piece = |at: usize| bytes.get(at..).and_then(<[u8]>::first_chunk::<STEP>);
    if bytes.first().is_some_and(|last| precede(0, *last)) {
        tell(1);
    }
    let mut at = 2;
    while distance < NEAR
        && let (Some(first), Some(last)) = (piece(at - 2), piece(at - 1))
        && let Some(highest) = piece(at + SIZE - 1)
    {
        // SAFETY: every x86-64 processor has SSE2.
        let mut hits = unsafe { candidates(first, last, highest) };
        while hits != 0 {
            tell(at + hits.trailing_zeros() as usize);
            hits &= hits - 1;
        }
        at += STEP;
    }
    for (n, pair) in bytes
        .get(at - 2..)
        .unwrap_or_default()
        .windows(2)
        .enumerate()
    {
        if precede(pair[0], pair[1]) {
            tell(at + n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns bytes that are displacements, near and far, more often than by chance.
    fn code(len: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        (0..len)
            .map(|_| match next() % 5 {
                0 => 0,
                1 => 0xff,
                2 => [0xe8, 0x0f, 0x8b, 0xc7, 0xf8, 0x05][next() as usize % 6],
                _ => next() as u8,
            })
            .collect()
    }

    #[test]
    fn none_is_missed() {
        let bytes = code(1 << 13);
        let mut all = Vec::new();
        for (at, four) in bytes.windows(4).enumerate().skip(1) {
            let first = at.checked_sub(2).map_or(0, |at| bytes[at]);
            if precede(first, bytes[at - 1]) {
                let four = [four[0], four[1], four[2], four[3]];
                all.push((at, i32::from_le_bytes(four)));
            }
        }
        for distance in [0x1000, (1 << 24) - 1, 1 << 24, 1 << 40] {
            let mut found = Vec::new();
            for_each_displacement(&bytes, distance, |at, value| found.push((at, value)));
            assert!(found.iter().all(|one| all.contains(one)));
            let is_far = |value: i32| value.unsigned_abs() as usize > distance;
            let missed = all.iter().filter(|one| !found.contains(one));
            assert!(
                missed.copied().all(|(_, value)| is_far(value)),
                "{distance:#x}"
            );
        }
    }
}
