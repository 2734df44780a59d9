//! Which trampoline a branch uses in which mode.

use super::trampolines::Trampolines;
use crate::ir::mode::Mode;

impl Trampolines {
    /// Returns the trampoline for a return that uses the target table.
    pub(crate) fn ret_in(&self, mode: Mode) -> usize {
        match (mode.is_long(), mode.has(Mode::STACK16)) {
            (true, _) => self.ret,
            (false, false) => self.ret32,
            (false, true) => self.ret16,
        }
    }

    /// Returns the trampoline for a direct branch to another page that uses the target table and moves the stack
    /// pointer by `pop`.
    pub(crate) fn cross_page_in(&self, mode: Mode, pop: i32) -> usize {
        match pop {
            0 => self.cross_page,
            // The other trampolines do not know how much of which part of ESP a call moves here.
            _ if mode.has(Mode::SEGMENTED) => self.cross_page_segmented,
            -8 => self.cross_page_call,
            _ => self.cross_page_call32,
        }
    }
}
