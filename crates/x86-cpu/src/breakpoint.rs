//! [`Breakpoint`]: what an enabled breakpoint register says (SDM vol. 3, 18.2.4 and 18.2.5).

use x86_defs::paging::PAGE_SIZE;

use crate::CpuState;

/// What a breakpoint waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakpointKind {
    /// The execution of an instruction that begins at its address.
    Execute,
    /// A write of data.
    Write,
    /// An access to an I/O port; nothing without CR4.DE.
    Io,
    /// A read or write of data.
    Access,
}

/// An enabled breakpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breakpoint {
    /// What it waits for.
    pub kind: BreakpointKind,
    /// The linear address, or the port. That of data is aligned to `size`.
    pub at: u64,
    /// Number of bytes, or of ports, that it covers.
    pub size: u64,
}

impl Breakpoint {
    /// Returns true if `len` bytes at `at` have one of the breakpoint's.
    pub const fn covers(&self, at: u64, len: u64) -> bool {
        at.wrapping_sub(self.at) < self.size || self.at.wrapping_sub(at) < len
    }

    /// Returns the page of data that the breakpoint watches. It is never more than one.
    pub const fn watched_page(&self) -> Option<u64> {
        match self.kind {
            BreakpointKind::Write | BreakpointKind::Access => Some(self.at & !(PAGE_SIZE - 1)),
            BreakpointKind::Execute | BreakpointKind::Io => None,
        }
    }
}

impl CpuState {
    /// Returns the breakpoint of DR`n` that is in force, if it is enabled.
    pub const fn breakpoint(&self, n: usize) -> Option<Breakpoint> {
        let dr7 = self.effective_dr7();
        if dr7 >> (2 * n) & 3 == 0 {
            return None;
        }
        let at = self.effective_dr(n);
        let kind = match dr7 >> (16 + 4 * n) & 3 {
            0 => {
                // Its length has no meaning.
                let kind = BreakpointKind::Execute;
                return Some(Breakpoint { kind, at, size: 1 });
            }
            1 => BreakpointKind::Write,
            2 => BreakpointKind::Io,
            _ => BreakpointKind::Access,
        };
        let size: u64 = match dr7 >> (18 + 4 * n) & 3 {
            0 => 1,
            1 => 2,
            2 => 8,
            _ => 4,
        };
        let at = at & !(size - 1);
        Some(Breakpoint { kind, at, size })
    }

    /// Returns the breakpoints that are in force and enabled.
    pub fn breakpoints(&self) -> impl Iterator<Item = Breakpoint> {
        (0..4).filter_map(|n| self.breakpoint(n))
    }
}
