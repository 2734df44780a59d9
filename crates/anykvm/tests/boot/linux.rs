//! `anykvm boot` with Debian's kernel, as a user starts it: the one that it finds or fetches.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::guest::wait;

/// What a run of `anykvm` left: its status and its output.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Returns `anykvm boot` with a Linux guest that runs `command`, not yet started.
pub(crate) fn linux(options: &[&str], command: &[&str]) -> Command {
    let mut anykvm = Command::new(env!("CARGO_BIN_EXE_anykvm"));
    anykvm.args(["boot", "--mem", "256M"]).args(options);
    if !command.is_empty() {
        anykvm.arg("--").args(command);
    }
    anykvm
}

/// Runs `command` with `input` as its standard input and pipes for its output.
pub(crate) fn run(command: &mut Command, input: &[u8]) -> Outcome {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    feed(&mut child, input);
    finish(child)
}

/// Runs `command` with an empty standard input.
pub(crate) fn run_without_input(command: &mut Command) -> Outcome {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    finish(child)
}

fn feed(child: &mut Child, input: &[u8]) {
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A guest that ends early does not read it all.
    thread::spawn(move || _ = stdin.write_all(&input));
}

fn finish(mut child: Child) -> Outcome {
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let status = wait(&mut child);
    Outcome {
        status,
        stdout: stdout.join().unwrap(),
        stderr: String::from_utf8_lossy(&stderr.join().unwrap()).into_owned(),
    }
}

fn collect(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            stream.read_to_end(&mut bytes).unwrap();
        }
        bytes
    })
}
