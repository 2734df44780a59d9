//! What a user sees who got something wrong: one line on standard error, status 2, no panic.

use std::process::{Command, Stdio};

fn boot(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_anykvm"))
        .arg("boot")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the command runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.stdout.is_empty(), "{args:?}");
    (output.status.code(), stderr)
}

#[test]
fn each_mistake_is_one_line_and_status_2() {
    let junk = std::env::temp_dir().join(format!("anykvm-junk-{}", std::process::id()));
    std::fs::write(&junk, vec![0u8; 8192]).unwrap();
    let junk = junk.to_str().unwrap();
    let rows: [(&[&str], &str); 6] = [
        (
            &["--kernel", "/nonexistent"],
            "cannot read kernel /nonexistent",
        ),
        (&["--kernel", junk], "not an x86 kernel"),
        (&["--kernel", "/"], "cannot read kernel /"),
        (&["--mem", "100"], "multiple of 4096"),
        (&["--cpus", "0"], "must be 1 to 254"),
        (&["--cpus", "1000"], "must be 1 to 254"),
    ];
    for (args, want) in rows {
        let (status, stderr) = boot(args);
        assert_eq!(status, Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(want), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
    std::fs::remove_file(junk).unwrap();
}

#[test]
fn wrong_options_are_refused_with_status_2() {
    let rows: [&[&str]; 3] = [
        &["--mem", "lots"],
        &["--no-such-option"],
        &["--initrd", "x", "--", "true"],
    ];
    for args in rows {
        let (status, stderr) = boot(args);
        assert_eq!(status, Some(2), "{args:?}");
        assert!(stderr.starts_with("error:"), "{args:?}: {stderr}");
    }
}
