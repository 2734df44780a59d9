//! What an ELF file says of its program: which segments are mapped, and where functions are (.eh_frame, "DWARF
//! Debugging Information Format" 6.4.1 with the pointers of the Linux Standard Base).

use std::io;
use std::ops::Range;

/// The parts of a program that are mapped and never written, at the addresses they were linked for.
#[derive(Debug, Default)]
pub(super) struct Program<'a> {
    pub(super) parts: Vec<Part<'a>>,
    /// The range of .eh_frame; empty if there is none.
    pub(super) frames: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) address: usize,
    pub(super) bytes: &'a [u8],
    pub(super) is_code: bool,
}

/// A segment that is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) address: usize,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) is_code: bool,
}

/// The tables of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) entry: usize,
    /// Offset and end of the table of segments in the file.
    pub(super) table: Range<usize>,
    pub(super) segments: Vec<Segment>,
    frames: Range<usize>,
    /// Ranges of the file that are constants.
    constants: Vec<Range<usize>>,
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(8)?)?.try_into().ok()?;
    Some(u64::from_le_bytes(bytes) as usize)
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    Some(u32::from_le_bytes(bytes))
}

fn quarter(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(2)?)?.try_into().ok()?;
    Some(u16::from_le_bytes(bytes).into())
}

fn range(begin: usize, len: usize) -> Option<Range<usize>> {
    Some(begin..begin.checked_add(len).filter(|end| end >> 47 == 0)?)
}

impl Layout {
    /// Reads a file's tables by `read`, which returns bytes from an offset on. `None` if no linker would make them.
    pub(super) fn read(read: impl Fn(usize, usize) -> io::Result<Vec<u8>>) -> Option<Self> {
        const HEADER: usize = 64;
        const SEGMENT: usize = 56;
        const SECTION: usize = 64;
        const MANY: usize = 4096;
        let head = read(0, HEADER).ok()?;
        if !head.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let (segments, sections) = (quarter(&head, 56)?, quarter(&head, 60)?);
        if quarter(&head, 54)? != SEGMENT || segments > MANY || sections > MANY {
            return None;
        }
        let table = range(word(&head, 32)?, segments * SEGMENT)?;
        let mut layout = Self {
            entry: word(&head, 24)?,
            segments: read_segments(&read(table.start, table.len()).ok()?)?,
            table,
            ..Self::default()
        };
        if sections > 0 && quarter(&head, 58)? == SECTION {
            let table = read(word(&head, 40)?, sections * SECTION).ok()?;
            let row = |index: usize| table.get(index * SECTION..(index + 1) * SECTION);
            let strings = row(quarter(&head, 62)?)?;
            let len = word(strings, 32)?.min(1 << 20);
            let strings = read(word(strings, 24)?, len).ok()?;
            for index in 0..sections {
                let row = row(index)?;
                let name = strings.get(half(row, 0)? as usize..)?;
                let len = word(row, 32)?;
                if name.starts_with(b".eh_frame\0") {
                    layout.frames = range(word(row, 16)?, len)?;
                } else if name.starts_with(b".rodata") {
                    layout.constants.push(range(word(row, 24)?, len)?);
                }
            }
        }
        Some(layout)
    }

    /// Returns the program. `bytes` returns the bytes of each segment.
    pub(super) fn program<'a>(
        &self,
        bytes: impl Fn(&Segment) -> Option<&'a [u8]>,
    ) -> Option<Program<'a>> {
        let part = |segment: &Segment| {
            Some(Part {
                address: segment.address,
                bytes: bytes(segment)?,
                is_code: segment.is_code,
            })
        };
        Some(Program {
            parts: self.segments.iter().map(part).collect::<Option<_>>()?,
            frames: self.frames.clone(),
        })
    }

    /// Returns true if these bytes, fewer than a page, are among the file's constants. `read` reads the file into a
    /// buffer, from an offset on, as far as it goes. (Mapped pages would stay in the program's memory.)
    pub(super) fn has(&self, wanted: &[u8], read: impl Fn(&mut [u8], usize) -> usize) -> bool {
        let mut buffer = vec![0; 1 << 16];
        let step = buffer.len() - wanted.len();
        let mut places = self.constants.iter().flat_map(|range| {
            let pieces = range.clone().step_by(step);
            pieces.map(|at| (at, range.end - at))
        });
        places.any(|(at, left)| {
            let len = left.min(buffer.len());
            let read = read(&mut buffer[..len], at).min(len);
            find(&buffer[..read], wanted)
        })
    }
}

/// Returns the segments that are mapped and readable but not writable.
fn read_segments(table: &[u8]) -> Option<Vec<Segment>> {
    const PT_LOAD: u32 = 1;
    const EXECUTE: u32 = 1;
    const WRITE: u32 = 2;
    const READ: u32 = 4;
    let mut segments = Vec::new();
    for row in table.chunks_exact(56) {
        let flags = half(row, 4)?;
        if half(row, 0)? != PT_LOAD || flags & (READ | WRITE) != READ {
            continue;
        }
        let address = range(word(row, 16)?, word(row, 32)?)?;
        segments.push(Segment {
            offset: word(row, 8)?,
            len: address.len(),
            address: address.start,
            is_code: flags & EXECUTE != 0,
        });
    }
    Some(segments)
}

impl Program<'_> {
    /// Returns the part's bytes from `begin` to `end`.
    pub(super) fn bytes(&self, begin: usize, end: usize) -> Option<&[u8]> {
        self.parts.iter().find_map(|part| {
            let first = begin.checked_sub(part.address)?;
            part.bytes.get(first..end.checked_sub(part.address)?)
        })
    }

    /// Returns the functions that contain one of these addresses, which are in ascending order.
    pub(super) fn functions(&self, addresses: &[usize]) -> Vec<Range<usize>> {
        let frames = self.bytes(self.frames.start, self.frames.end);
        let mut found = Vec::new();
        // The list ends at what cannot be read.
        let _ = each_function(frames.unwrap_or_default(), self.frames.start, |function| {
            let first = addresses.partition_point(|at| *at < function.start);
            if addresses.get(first).is_some_and(|at| *at < function.end) {
                found.push(function);
            }
        });
        found
    }
}

/// Returns true if `wanted` is in `bytes`.
fn find(bytes: &[u8], wanted: &[u8]) -> bool {
    // SAFETY: two arrays with their lengths.
    let found = unsafe {
        libc::memmem(
            bytes.as_ptr().cast(),
            bytes.len(),
            wanted.as_ptr().cast(),
            wanted.len(),
        )
    };
    !found.is_null()
}

/// Calls `tell` for each function that .eh_frame, which is at `address`, has an entry for.
fn each_function(frames: &[u8], address: usize, mut tell: impl FnMut(Range<usize>)) -> Option<()> {
    /// The length that says that a length of 64 bits follows.
    const LONG: u32 = u32::MAX;
    let mut known = (usize::MAX, None);
    let mut at = 0;
    loop {
        let len = half(frames, at)?;
        if len == 0 || len == LONG {
            return None;
        }
        let body = at + 4;
        let end = body.checked_add(len as usize)?;
        let back = half(frames, body)? as usize;
        if back != 0 {
            let common = body.checked_sub(back)?;
            if known.0 != common {
                known = (common, encoding(frames, common));
            }
            if let Some(encoding) = known.1
                && let Some(function) = function(frames, address, body + 4, encoding)
            {
                tell(function);
            }
        }
        at = end;
    }
}

/// Returns how addresses of functions are encoded in the entries that share this common entry.
fn encoding(frames: &[u8], at: usize) -> Option<u8> {
    let version = *frames.get(at + 8)?;
    let mut cursor = at + 9;
    let begin = cursor;
    while *frames.get(cursor)? != 0 {
        cursor += 1;
    }
    let kinds = frames.get(begin..cursor)?;
    cursor += 1;
    let skip = |cursor: &mut usize| {
        while *frames.get(*cursor)? & 0x80 != 0 {
            *cursor += 1;
        }
        *cursor += 1;
        Some(())
    };
    skip(&mut cursor)?;
    skip(&mut cursor)?;
    // The register of the return address.
    if version == 1 {
        cursor += 1;
    } else {
        skip(&mut cursor)?;
    }
    let Some(kinds) = kinds.strip_prefix(b"z") else {
        return kinds.is_empty().then_some(0);
    };
    skip(&mut cursor)?;
    for kind in kinds {
        match kind {
            b'R' => return frames.get(cursor).copied(),
            b'L' => cursor += 1,
            b'P' => {
                cursor += match frames.get(cursor)? & 0xf {
                    0 | 4 | 12 => 9,
                    2 | 10 => 3,
                    3 | 11 => 5,
                    _ => return None,
                }
            }
            b'S' | b'B' => {}
            _ => return None,
        }
    }
    Some(0)
}

fn function(frames: &[u8], address: usize, at: usize, encoding: u8) -> Option<Range<usize>> {
    const RELATIVE: u8 = 0x10;
    let (begin, len) = match encoding & 0xf {
        0 | 4 | 12 => (word(frames, at)?, word(frames, at + 8)?),
        3 => (half(frames, at)? as usize, half(frames, at + 4)? as usize),
        11 => (
            half(frames, at)?.cast_signed() as usize,
            half(frames, at + 4)? as usize,
        ),
        _ => return None,
    };
    match encoding & 0x70 {
        0 => range(begin, len),
        RELATIVE => range(begin.wrapping_add(address + at), len),
        _ => None,
    }
}
