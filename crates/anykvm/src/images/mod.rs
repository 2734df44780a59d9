//! A distribution's kernel and an initramfs made here, for a user who names neither.

mod closure;
mod cpio;
mod debian;
mod init;
mod initramfs;
mod interpreter;
mod modules;
mod root;

pub(crate) use debian::{busybox, kernel};
pub(crate) use init::Init;
pub(crate) use initramfs::{Overlay, build, pack};
pub(crate) use modules::{missing_module, modules};
pub(crate) use root::{Root, root};
