//! [`Ram`]: accesses to memory alone.

use x86_cpu::{Access, CodePage, CpuState, Fault, Privilege, Word};

use crate::{Miss, Mmu, Translation};

/// Accesses of instructions where there are no devices. One that leads elsewhere than to memory is [`Fault::Exit`], with
/// no effect.
///
/// The second run of a comparison of engines, which must not touch a device, and tests have such memory.
#[derive(Debug)]
pub struct Ram<'a>(&'a mut Mmu);

impl Mmu {
    /// Accesses to memory alone.
    pub fn ram(&mut self) -> Ram<'_> {
        Ram(self)
    }
}

fn fault<T>(result: Result<T, Miss>) -> Result<T, Fault> {
    result.map_err(|miss| match miss {
        Miss::Exception(e) => e.into(),
        Miss::Device { .. } | Miss::Host { .. } => Fault::Exit,
    })
}

/// As the methods of the same names of [`x86_cpu::GuestBus`].
#[expect(clippy::missing_errors_doc, reason = "the trait says them")]
impl Ram<'_> {
    /// Reads a word.
    pub fn read<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
    ) -> Result<T, Fault> {
        fault(self.0.read(cpu, gva, who))
    }

    /// Writes a word.
    pub fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        fault(self.0.write(cpu, gva, value, who))
    }

    /// Replaces a word by `f` of it.
    pub fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        fault(self.0.rmw(cpu, gva, who, lock, f))
    }

    /// Reads any number of bytes.
    pub fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        fault(self.0.read_bytes(cpu, gva, buf, who))
    }

    /// Writes any number of bytes.
    pub fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        fault(self.0.write_bytes(cpu, gva, buf, who))
    }

    /// Checks that an access would raise no exception.
    pub fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Fault> {
        fault(self.0.probe(cpu, gva, len, access, who))
    }

    /// The page that code at `gva` is fetched from.
    pub fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        fault(self.0.code_page(cpu, gva))
    }

    /// Reads code bytes.
    pub fn code_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
    ) -> Result<usize, Fault> {
        fault(self.0.code_bytes(cpu, gva, buf))
    }

    /// Reads code bytes that need not be tracked.
    pub fn peek_code(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
    ) -> Result<usize, Fault> {
        fault(self.0.peek_code(cpu, gva, buf))
    }

    /// See [`Mmu::translate`].
    pub fn translate(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Translation, Fault> {
        fault(self.0.translate(cpu, gva, access, who))
    }

    /// Reads up to `buf.len()` bytes from `gva` on, without permission check and side effect, and returns how many there
    /// are before the first that is not in memory.
    pub fn peek(&self, cpu: &CpuState, gva: u64, buf: &mut [u8]) -> usize {
        let mut n = 0;
        while n < buf.len() {
            let at = gva.wrapping_add(n as u64);
            let room = (buf.len() - n).min(0x1000 - (at & 0xfff) as usize);
            let gpa = self.0.translate_debug(cpu, at);
            if !gpa.is_some_and(|gpa| self.0.read_gpa(gpa, &mut buf[n..n + room])) {
                break;
            }
            n += room;
        }
        n
    }

    /// See [`Mmu::recheck_code`].
    pub fn recheck_code(&mut self) {
        self.0.recheck_code();
    }
}
