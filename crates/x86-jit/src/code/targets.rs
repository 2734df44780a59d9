//! The memory of the table of targets.

use x86_codegen::frame::targets::{TARGETS_LEN, Target, empty};

/// Makes an empty table. It takes memory only for what is entered.
pub(crate) fn no_targets() -> Box<[Target]> {
    // SAFETY: a `Target` is four integers, for which zero is a value.
    let mut all = unsafe { Box::<[Target]>::new_zeroed_slice(TARGETS_LEN).assume_init() };
    all[0] = empty(0);
    all
}
