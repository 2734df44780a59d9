//! What is booted when the user names nothing: a distribution kernel and an initramfs made here.

mod closure;
mod cpio;
mod debian;
mod initramfs;
mod modules;
mod root;

pub(crate) use debian::{busybox, kernel};
pub(crate) use initramfs::{Init, Overlay, build, pack};
pub(crate) use modules::modules;
pub(crate) use root::{Root, root};
