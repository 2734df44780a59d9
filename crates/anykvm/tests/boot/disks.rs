//! qcow2 images as disks, made and checked by `qemu-img`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::linux::{linux, run_without_input};

const LEN: usize = 48 << 20;

/// A folder with an image whose backing file is a raw disk of text.
struct Images(PathBuf);

impl Images {
    fn new(name: &str, options: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anykvm-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("base"), base()).unwrap();
        let images = Self(path);
        let create = ["create", "-q", "-f", "qcow2", "-o", options];
        let on = ["-b", "base", "-F", "raw", "image"];
        assert_eq!(images.qemu_img(&[&create[..], &on].concat()).0, Some(0));
        images
    }

    fn qemu_img(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = Command::new("qemu-img")
            .current_dir(&self.0)
            .args(arguments)
            .output()
            .expect("qemu-img of the package qemu-utils");
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.code(), text)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn option(&self) -> String {
        format!("{},backing={}", self.path("image"), self.path("base"))
    }

    /// Returns the image's content, as `qemu-img` reads it.
    fn content(&self) -> Vec<u8> {
        let (status, text) = self.qemu_img(&["convert", "-O", "raw", "image", "raw"]);
        assert_eq!(status, Some(0), "{text}");
        fs::read(self.0.join("raw")).unwrap()
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn base() -> Vec<u8> {
    let line = |n: usize| format!("line {n:10}\n").into_bytes();
    (0..LEN / 16).flat_map(line).collect()
}

/// What a guest wrote is there when it has ended, whatever it synchronised.
#[test]
fn a_guest_reads_and_writes_an_image() {
    let images = Images::new("image", "cluster_size=64k");
    let script = "grep -c '^line' /dev/vda
         dd if=/dev/vda of=/dev/vda bs=4k skip=1 seek=5000 count=3000 conv=notrunc 2>/dev/null
         dd if=/dev/zero of=/dev/vda bs=512 seek=7 count=9 conv=notrunc 2>/dev/null
         printf here | dd of=/dev/vda bs=1 seek=30000000 conv=notrunc 2>/dev/null";
    let mut want = base();
    want.copy_within(4096..4096 * 3001, 4096 * 5000);
    want[7 * 512..16 * 512].fill(0);
    want[30_000_000..30_000_004].copy_from_slice(b"here");
    let before = fs::read(images.path("image")).unwrap();
    // Without `format=qcow2` the image may be another's: the backing file that it names is not opened.
    let refused = run_without_input(&mut linux(&["--disk", &images.path("image")], &["true"]));
    assert_eq!(refused.status, Some(2));
    assert!(refused.stderr.contains("rests on 'base'"), "{refused:?}");
    assert!(fs::read(images.path("image")).unwrap() == before);

    let outcome = run_without_input(&mut linux(
        &["--disk", &images.option()],
        &["sh", "-c", script],
    ));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert_eq!(outcome.text(), format!("{}\n", LEN / 16));
    assert_eq!(
        images.qemu_img(&["check", "-q", "image"]),
        (Some(0), String::new())
    );
    assert!(images.content() == want);
    assert!(fs::read(images.path("base")).unwrap() == base());

    // A file system on an image, as the guest's root.
    let (status, text) = images.qemu_img(&["create", "-q", "-f", "qcow2", "root", "64M"]);
    assert_eq!(status, Some(0), "{text}");
    let script = "mke2fs -q /dev/vda && mkdir /m && mount -t ext2 /dev/vda /m && mkdir /m/bin \
                  && cp /bin/busybox /m/bin/sh && echo mine >/m/file && umount /m";
    let make = run_without_input(&mut linux(
        &["--disk", &images.path("root")],
        &["sh", "-c", script],
    ));
    assert_eq!(make.status, Some(0), "{make:?}");
    let own = run_without_input(&mut linux(
        &["--root", &images.path("root")],
        &["sh", "-c", "echo $(cat /file); echo more >>/file"],
    ));
    assert_eq!(
        (own.status, own.text().as_str()),
        (Some(0), "mine\n"),
        "{own:?}"
    );
    assert_eq!(
        images.qemu_img(&["check", "-q", "root"]),
        (Some(0), String::new())
    );
}

/// What the guest has synchronised is there whenever the process is killed, and the image is whole.
#[test]
fn an_image_outlives_the_process() {
    let images = Images::new("killed", "cluster_size=4k");
    let script = "i=0; while :; do
             printf 'mark %5d' $i | dd of=/dev/vda bs=4096 seek=$((i * 7)) conv=notrunc,fsync 2>/dev/null
             dd if=/dev/vda of=/dev/vda bs=4096 skip=1 seek=$((3000 + i * 9)) count=9 conv=notrunc 2>/dev/null
             echo $i; i=$((i + 1)); done";
    let out = fs::File::create(images.path("out")).unwrap();
    let mut child = linux(&["--disk", &images.option()], &["sh", "-c", script])
        .stdin(Stdio::null())
        .stdout(out)
        .spawn()
        .unwrap();
    let said = || fs::read_to_string(images.path("out")).unwrap();
    let begin = Instant::now();
    while said().lines().count() < 40 {
        assert!(begin.elapsed() < Duration::from_secs(60), "{}", said());
        thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // The only fault that may be left is clusters that nothing uses any more.
    let (status, text) = images.qemu_img(&["check", "image"]);
    assert!(matches!(status, Some(0 | 3)), "{status:?} {text}");
    let content = images.content();
    for n in 0..said().lines().count() {
        let mark = &content[n * 7 * 4096..][..10];
        assert_eq!(String::from_utf8_lossy(mark), format!("mark {n:5}"));
    }
    // The image can be used again as it is.
    let outcome = run_without_input(&mut linux(
        &["--disk", &images.option()],
        &["head", "-c", "10", "/dev/vda"],
    ));
    assert_eq!(
        (outcome.status, outcome.text().as_str()),
        (Some(0), "mark     0"),
        "{outcome:?}"
    );
}
