//! The stream from source to target: frames, each with its kind, its length and a checksum.
//!
//! ```text
//! "anykvm\r\n" version 1      then frames: kind (1), 0 0 0, length (4), checksum (8), bytes
//! source → target  CONFIG, then PAGES and ZEROS, STATE, END;  GO, or ABORT with a reason
//! target → source  READY after END, RUNNING after GO;  FAILED with a reason, at any time
//! ```
//!
//! A file contains what goes from source to target, up to END.

use std::io::{self, Read, Write};

use crate::fields::Malformed;

/// The begin of a stream: a line end that text tools change, and the version.
const MAGIC: [u8; 12] = *b"anykvm\r\n\x01\0\0\0";
/// Maximum length of a frame.
pub(super) const FRAME_MAX: usize = 16 << 20;
const HEADER: usize = 16;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    Config = 1,
    Pages = 2,
    Zeros = 3,
    State = 4,
    End = 5,
    Go = 6,
    Abort = 7,
    Ready = 16,
    Running = 17,
    Failed = 18,
}

impl MessageKind {
    fn of(number: u8) -> Option<Self> {
        let all = [
            Self::Config,
            Self::Pages,
            Self::Zeros,
            Self::State,
            Self::End,
            Self::Go,
            Self::Abort,
            Self::Ready,
            Self::Running,
            Self::Failed,
        ];
        all.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// What can fail in a stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// The connection or the file has failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The bytes are not those of a machine.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// The other side gives up.
    #[error("{0}")]
    Refused(String),
}

/// Returns a checksum that detects damage, not forgery. It takes eight bytes at a time, each of which changes all that
/// follows.
fn checksum(kind: u8, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    let mut sum = u64::from(kind) ^ (bytes.len() as u64) << 8;
    for word in words.iter().chain([&last]) {
        sum = (sum ^ u64::from_le_bytes(*word))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }
    sum
}

/// Begins a stream.
pub(super) fn begin(to: &mut dyn Write) -> io::Result<()> {
    to.write_all(&MAGIC)
}

/// Checks the begin of a stream.
pub(super) fn expect_begin(from: &mut dyn Read) -> Result<(), StreamError> {
    let mut magic = [0; MAGIC.len()];
    read(from, &mut magic)?;
    let (name, version) = (magic.get(..8), magic.get(8..));
    if name != MAGIC.get(..8) {
        return Err(Malformed::new("this is no saved guest of anykvm's").into());
    }
    if version != MAGIC.get(8..) {
        return Err(Malformed::new("a guest of another version of anykvm").into());
    }
    Ok(())
}

fn read(from: &mut dyn Read, bytes: &mut [u8]) -> Result<(), StreamError> {
    from.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Malformed::new("it ends in the middle").into(),
        _ => error.into(),
    })
}

/// Writes a frame.
pub(super) fn send(to: &mut dyn Write, kind: MessageKind, bytes: &[u8]) -> io::Result<()> {
    let mut header = [0; HEADER];
    header[0] = kind as u8;
    let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    for (at, from) in header.iter_mut().skip(4).zip(
        len.to_le_bytes()
            .into_iter()
            .chain(checksum(kind as u8, bytes).to_le_bytes()),
    ) {
        *at = from;
    }
    to.write_all(&header)?;
    to.write_all(bytes)
}

/// Reads a frame into the buffer.
pub(super) fn receive(
    from: &mut dyn Read,
    buffer: &mut Vec<u8>,
) -> Result<MessageKind, StreamError> {
    let mut header = [0; HEADER];
    read(from, &mut header)?;
    let [number, _, _, _, a, b, c, d, sum @ ..] = header;
    let kind = MessageKind::of(number)
        .ok_or_else(|| Malformed::new(format!("a part of kind {number}")))?;
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    if len > FRAME_MAX {
        return Err(Malformed::new(format!("a part of {len} bytes")).into());
    }
    buffer.resize(len, 0);
    read(from, buffer)?;
    if checksum(number, buffer) != u64::from_le_bytes(sum) {
        return Err(Malformed::new("it is damaged: a checksum is wrong").into());
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_noticed() {
        let mut stream = Vec::new();
        begin(&mut stream).unwrap();
        send(&mut stream, MessageKind::State, b"0123456789").unwrap();
        let open = |bytes: &[u8]| {
            let (mut from, mut buffer) = (bytes, Vec::new());
            expect_begin(&mut from)?;
            let kind = receive(&mut from, &mut buffer)?;
            Ok::<_, StreamError>((kind, buffer))
        };
        assert_eq!(
            open(&stream).unwrap(),
            (MessageKind::State, b"0123456789".to_vec())
        );
        for at in 0..stream.len() {
            assert!(open(&stream[..at]).is_err(), "cut at {at}");
            // The other three bytes of the header are reserved.
            for bit in (0..8).filter(|_| !(13..16).contains(&at)) {
                let mut spoilt = stream.clone();
                spoilt[at] ^= 1 << bit;
                assert!(open(&spoilt).is_err(), "bit {bit} of byte {at}");
            }
        }
    }
}
