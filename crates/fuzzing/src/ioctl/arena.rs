//! [`Arena`]: the memory that fuzzed calls point to.

use std::{fs::File, io, os::unix::fs::FileExt};

use host::{Mapping, Memfd, SharedMapping};

use crate::Random;

/// Bytes of guest RAM, at the arena's beginning.
pub(super) const RAM: u64 = 2 << 20;
/// Bytes for each thread's arguments, behind the RAM.
pub(super) const SLICE: u64 = 256 << 10;
/// Maximum number of threads that have such bytes.
pub(super) const SLICES: u64 = 4;

/// Memory that the calls may read and write as they please, and addresses without memory.
///
/// Its contents are written through its file, so that no reference to it ever exists.
#[derive(Debug)]
pub struct Arena {
    file: File,
    mapping: SharedMapping,
    /// Pages that nobody can access.
    hole: Mapping,
}

impl Arena {
    /// Maps the arena.
    ///
    /// # Errors
    /// Those of `memfd_create` and `mmap`.
    pub fn new() -> io::Result<Self> {
        let memfd = Memfd::new(c"ioctl-arena", (RAM + SLICE * SLICES) as usize)?;
        let mapping = memfd.map()?;
        Ok(Self {
            file: File::from(memfd.into_fd()),
            mapping,
            hole: Mapping::reserve(RAM as usize)?,
        })
    }

    /// Returns the address of guest RAM.
    pub(super) fn ram(&self) -> u64 {
        self.mapping.as_ptr() as u64
    }

    /// Returns the address of pages that nobody can read or write, as many as there are of RAM.
    pub(super) fn hole(&self) -> u64 {
        self.hole.as_ptr() as u64
    }

    /// Returns the address of a thread's arguments.
    pub(super) fn slice(&self, thread: u64) -> u64 {
        self.ram() + RAM + thread % SLICES * SLICE
    }

    /// Stores bytes at an address of the arena.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        let offset = address.wrapping_sub(self.ram());
        if offset <= RAM + SLICE * SLICES - bytes.len() as u64 {
            // A failed write leaves what was there, which is just as random.
            let _ = self.file.write_at(bytes, offset);
        }
    }

    /// Reads bytes at an address of the arena.
    pub(super) fn read(&self, address: u64, bytes: &mut [u8]) {
        // A failed read leaves what was there, which is just as random.
        let _ = self.file.read_at(bytes, address.wrapping_sub(self.ram()));
    }

    /// Fills the RAM with guests of a few instructions: loops, ports, accesses without memory, HLT, interrupts, writes
    /// to themselves, and noise.
    pub(super) fn fill(&self, random: &mut Random) {
        const GUESTS: &[&[u8]] = &[
            &[0xeb, 0xfe],
            &[0xf4, 0xeb, 0xfd],
            &[0xfb, 0xf4, 0xeb, 0xfc],
            &[0xe6, 0x10, 0xeb, 0xfc],
            // MSR_KVM_WALL_CLOCK_NEW, with the clock at 0x1000, again and again.
            &[
                0x66, 0xb9, 0x00, 0x4d, 0x56, 0x4b, 0x66, 0xb8, 0x00, 0x10, 0x00, 0x00, 0x66, 0x31,
                0xd2, 0x0f, 0x30, 0xeb, 0xed,
            ],
            &[0xe4, 0x10, 0xe6, 0x11, 0xeb, 0xfa],
            // rep outsb and rep insb
            &[0xb9, 0x40, 0x00, 0xf3, 0x6e, 0xf3, 0x6c, 0xeb, 0xf7],
            // mov ax, [0xfff0], in a segment beyond RAM
            &[
                0xb8, 0x00, 0xf0, 0x8e, 0xd8, 0xa1, 0xf0, 0xff, 0xa3, 0xf0, 0xff, 0xeb, 0xf3,
            ],
            &[0x0f, 0xa2, 0x0f, 0x32, 0x0f, 0x30, 0xeb, 0xf8],
            &[0xcc],
            &[0xfa, 0xf4],
            &[0x0f, 0x0b],
            // inc byte [bx]; inc bx; jmp
            &[0xfe, 0x07, 0x43, 0xeb, 0xfb],
            &[0x0f, 0x01, 0xc1, 0xeb, 0xfb],
        ];
        let mut page = vec![0; 4096];
        for at in (0..RAM / 2).step_by(4096) {
            for chunk in page.chunks_mut(64) {
                chunk.fill(0x90);
                let code = random.pick(GUESTS);
                if random.one_in(4) {
                    chunk.fill_with(|| random.next() as u8);
                } else if let Some(place) = chunk.get_mut(..code.len()) {
                    place.copy_from_slice(code);
                }
            }
            self.write(self.ram() + at, &page);
        }
    }
}
