//! Compares qcow2 images with `qemu-img`, which makes them, checks them and reads them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

/// Length of the disks; not a multiple of a cluster.
const LEN: usize = (5 << 20) + 3 * 512;

/// A folder of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anykvm-qcow2-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    /// Runs `qemu-img` in the folder. Returns what it prints, if it succeeds.
    fn qemu_img(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("qemu-img")
            .current_dir(&self.0)
            .args(arguments)
            .output()
            .expect("qemu-img of the package qemu-utils");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        if output.status.success() {
            Ok(text)
        } else {
            Err(text)
        }
    }

    fn create(&self, name: &str, options: &str, more: &[&str]) {
        let len = LEN.to_string();
        let mut arguments = vec!["create", "-q", "-f", "qcow2"];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        arguments.extend(more);
        arguments.extend([name, &len]);
        self.qemu_img(&arguments).unwrap();
    }

    fn open(&self, option: &str) -> Result<(Disk, DiskHold), String> {
        // Names without a folder are in the test's folder.
        let text = option.replace("backing=", &format!("backing={}/", self.0.display()));
        let option = format!("{}/{text}", self.0.display()).parse().unwrap();
        let disk = Disk::open(&option, 0).map_err(|error| error.to_string())?;
        let hold = disk.hold().unwrap();
        Ok((disk, hold))
    }

    /// Returns the image's content as `qemu-img` reads it. The image has to be without errors.
    fn content(&self, name: &str) -> Vec<u8> {
        self.qemu_img(&["check", "-q", "-f", "qcow2", name])
            .unwrap_or_else(|why| panic!("{name}: {why}"));
        self.raw(&["convert", "-f", "qcow2", "-O", "raw", name, "raw"])
    }

    fn raw(&self, arguments: &[&str]) -> Vec<u8> {
        self.qemu_img(arguments).unwrap();
        fs::read(self.0.join("raw")).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Random numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }

    /// Returns some sectors of a disk: the first byte, and the first behind them.
    fn range(&mut self) -> (usize, usize) {
        let sectors = LEN / 512;
        let most = if self.below(8) == 0 { 400 } else { 20 };
        let first = self.below(sectors);
        let count = 1 + self.below(most.min(sectors - first));
        (first * 512, (first + count) * 512)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let first = self.below(256);
        (0..len)
            .map(|n| (first + n / 512 * 7 + n % 512) as u8)
            .collect()
    }
}

/// Does what a guest may do, on the disk and on bytes in memory.
fn exercise(disk: &Disk, model: &mut [u8], seed: u64, steps: usize) {
    let mut random = Random(seed);
    for step in 0..steps {
        let (from, to) = random.range();
        let (at, len) = (from as u64, (to - from) as u64);
        let part = &mut model[from..to];
        match random.below(10) {
            0..4 => {
                let bytes = random.bytes(to - from);
                disk.write(&bytes, at).unwrap();
                part.copy_from_slice(&bytes);
            }
            4..7 => {
                let mut bytes = vec![0xee; to - from];
                disk.read(&mut bytes, at).unwrap();
                assert!(bytes == part, "step {step}: {from:#x}..{to:#x}");
            }
            7 => {
                disk.write_zeroes(at, len, random.below(2) == 0).unwrap();
                part.fill(0);
            }
            8 => {
                disk.discard(at, len).unwrap();
                // A discarded range may have any content, which stays from now on.
                disk.read(part, at).unwrap();
            }
            _ => disk.flush().unwrap(),
        }
    }
}

#[test]
fn images_of_all_kinds_are_read_and_written() {
    let kinds = [
        "",
        "compat=0.10",
        "compat=v3,cluster_size=512",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=64,cluster_size=4k",
        "lazy_refcounts=on",
        "preallocation=metadata",
        "preallocation=full,cluster_size=4k",
    ];
    for (seed, kind) in (1..).zip(kinds) {
        let folder = Folder::new("kinds");
        folder.create("image", kind, &[]);
        let mut model = vec![0; LEN];
        // The image is released and taken again.
        for round in 0..3 {
            let (disk, hold) = folder.open("image").unwrap();
            assert_eq!(disk.len, LEN as u64);
            exercise(&disk, &mut model, seed << 8 | round, 300);
            hold.end().unwrap();
            drop((disk, hold));
            assert!(folder.content("image") == model, "{kind}");
        }
    }
}

#[test]
fn what_an_image_rests_on_stays_as_it_is() {
    let rows = [("raw", 1 << 20), ("raw", LEN), ("qcow2", LEN)];
    for (format, len) in rows {
        let folder = Folder::new("below");
        let base: Vec<u8> = Random(77).bytes(len);
        fs::write(folder.path("bytes"), &base).unwrap();
        // The image also gets compressed clusters.
        folder
            .qemu_img(&[
                "convert",
                "-q",
                "-f",
                "raw",
                "-O",
                "qcow2",
                "-c",
                "bytes",
                "compressed",
            ])
            .unwrap();
        let below = if format == "raw" {
            "bytes"
        } else {
            "compressed"
        };
        folder.create("middle", "", &["-b", below, "-F", format]);
        folder.create("image", "cluster_size=4k", &["-b", "middle", "-F", "qcow2"]);
        let before = fs::read(folder.path("middle")).unwrap();
        let mut model = base.clone();
        model.resize(LEN, 0);
        let all = format!("image,backing=middle,backing={below}");
        for round in 0..2 {
            let (disk, hold) = folder.open(&all).unwrap();
            exercise(&disk, &mut model, 99 + round, 300);
            hold.end().unwrap();
            drop((disk, hold));
            assert!(folder.content("image") == model, "{format} {len}");
        }
        assert!(fs::read(folder.path("bytes")).unwrap() == base);
        assert!(fs::read(folder.path("middle")).unwrap() == before);
    }
}

#[test]
fn snapshots_and_compressed_clusters_stay_readable() {
    let folder = Folder::new("snapshots");
    let mut model = Random(5).bytes(LEN);
    fs::write(folder.path("bytes"), &model).unwrap();
    folder
        .qemu_img(&[
            "convert", "-q", "-f", "raw", "-O", "qcow2", "-c", "bytes", "image",
        ])
        .unwrap();
    for round in 0..3 {
        let name = format!("s{round}");
        folder
            .qemu_img(&["snapshot", "-c", &name, "image"])
            .unwrap();
        fs::write(folder.path(&name), &model).unwrap();
        let (disk, hold) = folder.open("image").unwrap();
        exercise(&disk, &mut model, 31 + round, 300);
        hold.end().unwrap();
        drop((disk, hold));
        assert!(folder.content("image") == model);
        for earlier in 0..=round {
            let name = format!("s{earlier}");
            let arguments = [
                "convert", "-f", "qcow2", "-O", "raw", "-l", &name, "image", "raw",
            ];
            let is_same = folder.raw(&arguments) == fs::read(folder.path(&name)).unwrap();
            assert!(is_same, "snapshot {earlier} after round {round}");
        }
    }
}

#[test]
fn an_image_is_only_read_if_that_is_said() {
    let folder = Folder::new("read-only");
    folder.create("image", "", &[]);
    let before = fs::read(folder.path("image")).unwrap();
    let (disk, hold) = folder.open("image,ro").unwrap();
    let mut bytes = vec![1; 4096];
    disk.read(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 4096]);
    assert!(disk.write(&bytes, 0).is_err());
    assert!(disk.discard(0, 4096).is_err());
    hold.end().unwrap();
    assert!(fs::read(folder.path("image")).unwrap() == before);
}

/// Overwrites bytes of a file.
fn patch(path: &Path, at: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

#[test]
fn what_cannot_be_used_is_refused_and_stays() {
    let folder = Folder::new("refused");
    fs::write(folder.path("base"), vec![7; LEN]).unwrap();
    folder.create("plain", "", &[]);
    folder.create("on", "", &["-b", "base", "-F", "raw"]);
    let secret = ["--object", "secret,id=s,data=x"];
    folder.create("aes", "encrypt.format=aes,encrypt.key-secret=s", &secret);
    folder.create("zstd", "compression_type=zstd", &[]);
    folder.create("extended", "extended_l2=on", &[]);
    folder.create("data", "data_file=other", &[]);
    folder
        .qemu_img(&["create", "-q", "-f", "vdi", "vdi", "1M"])
        .unwrap();
    folder.create("on-vdi", "", &["-b", "vdi", "-F", "vdi"]);
    let patched = [
        ("dirty", 72, 1u64.to_be_bytes().to_vec()),
        ("damaged", 72, 2u64.to_be_bytes().to_vec()),
        ("unknown", 72, (1u64 << 40).to_be_bytes().to_vec()),
        ("luks", 32, 2u32.to_be_bytes().to_vec()),
        ("version", 4, 4u32.to_be_bytes().to_vec()),
        ("clusters", 20, 30u32.to_be_bytes().to_vec()),
        ("short", 36, 0u32.to_be_bytes().to_vec()),
        ("big", 24, (1u64 << 60).to_be_bytes().to_vec()),
        ("odd", 24, 1000u64.to_be_bytes().to_vec()),
        ("empty", 24, 0u64.to_be_bytes().to_vec()),
        ("unaligned", 40, 77u64.to_be_bytes().to_vec()),
        // The last name in this table would be cut off.
        ("names", 116, 385u32.to_be_bytes().to_vec()),
    ];
    for (name, at, bytes) in &patched {
        fs::copy(folder.path("plain"), folder.path(name)).unwrap();
        patch(&folder.path(name), *at, bytes);
    }
    let rows = [
        ("on", "rests on 'base'"),
        ("on", "add ,backing=base"),
        ("plain,backing=base", "a ,backing= too many"),
        ("on,backing=base,backing=base", "a ,backing= too many"),
        ("on,backing=none", "No such file"),
        ("on,backing=.", "not a file"),
        ("on-vdi,backing=vdi", "the format 'vdi'"),
        ("base,backing=plain", "a raw disk rests on no other"),
        ("base,format=qcow2", "this is no qcow2 image"),
        ("luks", "encrypted"),
        ("aes", "encrypted"),
        ("zstd", "something else than zlib"),
        ("extended", "extended L2"),
        ("data", "a file of its own"),
        ("dirty", "not closed properly"),
        ("damaged", "is damaged"),
        ("unknown", "not known (40)"),
        ("version", "version 4"),
        ("clusters", "2^30"),
        ("short", "too short"),
        ("big", "too short"),
        ("odd", "1000 bytes is not a multiple"),
        ("empty", "is empty"),
        ("unaligned", "Unaligned"),
        ("names", "features' names"),
    ];
    for (option, want) in rows {
        let path = folder.path(option.split(',').next().unwrap());
        let before = fs::read(&path).unwrap();
        let why = folder.open(option).map(drop).expect_err(option);
        assert!(why.contains(want), "{option}: {why}");
        assert!(fs::read(&path).unwrap() == before, "{option}");
    }
}

#[test]
fn an_image_has_one_writer_and_what_it_rests_on_none() {
    let folder = Folder::new("locks");
    fs::write(folder.path("base"), vec![7; LEN]).unwrap();
    folder.create("one", "", &["-b", "base", "-F", "raw"]);
    folder.create("two", "", &["-b", "base", "-F", "raw"]);
    let one = folder.open("one,backing=base").unwrap();
    let two = folder.open("two,backing=base").unwrap();
    for option in ["one,backing=base", "one,ro,backing=base", "base"] {
        let why = folder.open(option).map(drop).expect_err(option);
        assert!(why.contains("in use"), "{option}: {why}");
    }
    folder.open("base,ro").unwrap();
    drop((one, two));
    // The guest moves: the other side reads what was written, and this one has nothing of it any more. A process that
    // another test starts has this one's files, and with them their locks, until it executes its program.
    let until = Instant::now() + Duration::from_secs(10);
    let (disk, here) = loop {
        match folder.open("one,backing=base") {
            Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            opened => break opened.unwrap(),
        }
    };
    let option = format!("{0}/one,backing={0}/base", folder.0.display());
    let there = Disk::open_unlocked(&option.parse().unwrap(), 0).unwrap();
    let hold = there.hold().unwrap();
    assert!(!hold.take().unwrap());
    disk.write(&[9; 512], 1 << 20).unwrap();
    here.give().unwrap();
    assert!(hold.take().unwrap());
    assert!(disk.write(&[8; 512], 1 << 20).is_err());
    let mut bytes = [0; 1024];
    there.read(&mut bytes, 1 << 20).unwrap();
    assert_eq!((bytes[0], bytes[511], bytes[512]), (9, 9, 7));
}

/// An image that is damaged anywhere causes errors, or is read as something else, and has no other effect.
#[test]
fn damaged_images_are_errors() {
    let folder = Folder::new("damaged");
    fs::write(folder.path("base"), Random(3).bytes(LEN)).unwrap();
    let convert = ["convert", "-q", "-f", "raw", "-O", "qcow2"];
    for options in ["cluster_size=512", "cluster_size=4k", "cluster_size=64k"] {
        folder
            .qemu_img(&[&convert[..], &["-o", options, "base", "image"]].concat())
            .unwrap();
        folder
            .qemu_img(&[&convert[..], &["-c", "-o", options, "base", "small"]].concat())
            .unwrap();
        folder.qemu_img(&["snapshot", "-c", "x", "image"]).unwrap();
        for (name, image) in
            ["image", "small"].map(|name| (name, fs::read(folder.path(name)).unwrap()))
        {
            let seeds = std::env::var("ANYKVM_SEEDS")
                .ok()
                .and_then(|text| text.parse().ok());
            for seed in 1..seeds.unwrap_or(150) {
                let label = format!("{options} {name} {seed}");
                attempt(&folder, &label, &image, seed);
            }
        }
    }
}

fn attempt(folder: &Folder, name: &str, image: &[u8], seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut bytes = image.to_vec();
    for _ in 0..=random.below(6) {
        // The header, the tables or anything else is damaged. Tables are at the image's begin and end.
        let from = [0, 0, bytes.len().saturating_sub(4096), 512][random.below(4)];
        let within = [112, 512, 4096, 1 << 18, bytes.len()][random.below(5)];
        let at = (from + random.below(within)).min(bytes.len() - 8);
        match random.below(4) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes[at & !7..][..8].fill(0),
            _ => {
                // The entry leads to somewhere in the file.
                let to = random.below(image.len()) as u64 & !511 | (random.below(4) as u64) << 62;
                bytes[at & !7..][..8].copy_from_slice(&to.to_be_bytes());
            }
        }
    }
    if random.below(8) == 0 {
        bytes.truncate(random.below(image.len()));
    }
    let path = folder.path("broken");
    fs::write(&path, &bytes).unwrap();
    let is_whole = |error: &dyn ToString| {
        let text = error.to_string();
        assert!(!text.contains(qcow2::PANIC), "{name}: {text}");
    };
    let opened = folder.open("broken,format=qcow2").or_else(|error| {
        is_whole(&error);
        folder.open("broken,format=qcow2,ro")
    });
    let (disk, hold) = match opened {
        Ok(opened) => opened,
        Err(error) => return is_whole(&error),
    };
    for _ in 0..40 {
        let (from, to) = random.range();
        let (at, len) = (from as u64, (to - from) as u64);
        if at + len > disk.len {
            continue;
        }
        let done = match random.below(6) {
            0 => disk.write(&random.bytes(to - from), at),
            1 => disk.write_zeroes(at, len, true),
            2 => disk.discard(at, len),
            3 => disk.flush(),
            _ => disk.read(&mut vec![0; to - from], at),
        };
        let _ = done.inspect_err(|error| is_whole(error));
    }
    let _ = hold.end().inspect_err(|error| is_whole(error));
}
