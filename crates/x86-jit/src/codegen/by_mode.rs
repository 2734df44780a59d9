//! Which of the shared pieces a branch goes by.

use super::trampolines::Trampolines;
use crate::ir::mode::Mode;

impl Trampolines {
    /// A return that goes by the table.
    pub(crate) fn ret_in(&self, mode: Mode) -> usize {
        match (mode.is_long(), mode.has(Mode::STACK16)) {
            (true, _) => self.ret,
            (false, false) => self.ret32,
            (false, true) => self.ret16,
        }
    }

    /// A direct branch to another page that goes by the table, and moves the stack pointer by `pop`.
    pub(crate) fn cross_page_in(&self, mode: Mode, pop: i32) -> usize {
        match pop {
            0 => self.cross_page,
            // How much of which part of ESP a call moves, the others do not know.
            _ if mode.has(Mode::SEGMENTED) => self.cross_page_segmented,
            -8 => self.cross_page_call,
            _ => self.cross_page_call32,
        }
    }
}
