//! What KVM_GET_STATS_FD gives.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(dead_code, reason = "each test file uses its part")]

use std::os::{
    fd::{AsRawFd, FromRawFd},
    unix::fs::FileExt,
};

use kvm_abi::numbers::KVM_GET_STATS_FD;

/// The counter with this name of a VM's or a vCPU's.
pub(crate) fn counter(of: &impl AsRawFd, name: &str) -> u64 {
    let fd = kvm_abi::ioctl(of.as_raw_fd(), KVM_GET_STATS_FD, 0).unwrap();
    let (_, stats) = read_stats(fd);
    stats.iter().find(|(n, _)| n == name).unwrap().1
}

/// Reads a statistics file as its header says: identity, and names with values.
pub(crate) fn read_stats(fd: i32) -> (String, Vec<(String, u64)>) {
    // SAFETY: the descriptor was just given to us.
    let file = unsafe { std::fs::File::from_raw_fd(fd) };
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(file.write_at(b"x", 0).is_err(), "read-only");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let text = |at: usize| {
        let name = &bytes[at..at + 48];
        let end = name.iter().position(|b| *b == 0).unwrap();
        String::from_utf8(name[..end].to_vec()).unwrap()
    };
    let [name_size, count, id, descriptors, data] = [4, 8, 12, 16, 20].map(word);
    assert_eq!(name_size, 48);
    let stats = (0..count)
        .map(|i| {
            let at = descriptors + i * (16 + name_size);
            let value = data + word(at + 8);
            let value = u64::from_le_bytes(bytes[value..value + 8].try_into().unwrap());
            (text(at + 16), value)
        })
        .collect();
    (text(id), stats)
}
