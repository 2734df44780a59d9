//! `anykvm exec`: a small VMM in C, unmodified by anything that this project knows.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Builds the VMM with these options of the compiler.
fn build(name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exec/vmm.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("gcc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .args(options)
        .status()
        .expect("gcc is installed");
    assert!(status.success());
    program
}

fn exec(arguments: &[&str]) -> Output {
    Command::new("timeout")
        .args(["-k", "5", "400", env!("CARGO_BIN_EXE_anykvm"), "exec", "--"])
        .args(arguments)
        .output()
        .expect("timeout is installed")
}

fn passes(name: &str, mode: &[&str]) {
    let program = build(name, &[]);
    let mut arguments = vec![program.to_str().expect("a path in UTF-8")];
    arguments.extend(mode);
    let output = exec(&arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert!(error.contains("in place of /dev/kvm"), "{error}");
}

#[test]
fn a_signal_ends_kvm_run_and_its_handler_runs_once() {
    passes("vmm-spin", &["spin", "5000"]);
    passes("vmm-port", &["port", "2000"]);
}

#[test]
fn a_signal_that_only_kvm_run_lets_through_stays_pending() {
    passes("vmm-mask", &["mask", "3000"]);
}

#[test]
fn immediate_exit_set_by_a_handler_is_never_missed() {
    passes("vmm-immediate", &["immediate", "5000"]);
}

#[test]
fn handlers_are_called_as_the_kernel_would() {
    passes("vmm-handlers", &["handlers"]);
}

#[test]
fn descriptors_live_as_long_as_one_of_their_numbers() {
    passes("vmm-descriptors", &["descriptors"]);
}

#[test]
fn what_would_run_without_anykvm_is_refused() {
    let fixed = build("vmm-static", &["-static"]);
    for (program, reason) in [
        (fixed.to_str().unwrap(), "statically linked"),
        ("/nonexistent", "No such file"),
        ("/etc/passwd", "is not a program"),
    ] {
        let output = exec(&[program, "spin"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn other_programs_are_not_disturbed() {
    let script = "echo out; (exit 7); echo $?; exec cat < /dev/null";
    let output = exec(&["sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, b"out\n7\n");
}
