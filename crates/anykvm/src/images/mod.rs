//! What is booted when the user names nothing: a distribution kernel and an initramfs made here.

mod closure;
mod cpio;
mod debian;
mod initramfs;

pub(crate) use debian::{busybox, kernel};
pub(crate) use initramfs::{Init, Overlay, build};
