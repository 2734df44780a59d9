//! Each of standard input, output and error as a terminal, a pipe and a file: all 27 combinations, for a command and for
//! the shell.

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::{File, LIMIT, wait};
use crate::linux::linux;
use crate::terminal::Terminal;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Terminal,
    Pipe,
    File,
}

const KINDS: [Kind; 3] = [Kind::Terminal, Kind::Pipe, Kind::File];

fn combinations() -> impl Iterator<Item = [Kind; 3]> {
    (0..27).map(|n| [KINDS[n / 9], KINDS[n / 3 % 3], KINDS[n % 3]])
}

/// Where what is written can be looked at.
enum Sink {
    Terminal,
    Pipe(Arc<Mutex<Vec<u8>>>),
    File(PathBuf),
}

/// A process with three streams.
struct Streams {
    terminal: Terminal,
    /// What the terminal has shown.
    shown: Vec<u8>,
    /// Standard output and error.
    sinks: [Sink; 2],
    stdin: Option<ChildStdin>,
    kinds: [Kind; 3],
    _files: [File; 3],
}

impl Streams {
    /// A file has the input from the beginning.
    fn start(command: &[&str], input: &[u8], kinds: [Kind; 3]) -> Self {
        let files = [input, b"", b""].map(|content| File::new("stream", content));
        let streams = [0, 1, 2].map(|n| match kinds[n] {
            Kind::Terminal => None,
            Kind::Pipe => Some(Stdio::piped()),
            Kind::File if n == 0 => Some(fs::File::open(files[n].path()).unwrap().into()),
            Kind::File => Some(fs::File::create(files[n].path()).unwrap().into()),
        });
        let mut terminal = Terminal::start_with(&linux(&[], command), streams);
        let output = terminal.stdout.take().map(collect);
        let errors = terminal.stderr.take().map(collect);
        let sink = |n: usize, pipe: Option<_>| match kinds[n] {
            Kind::Terminal => Sink::Terminal,
            Kind::Pipe => Sink::Pipe(pipe.unwrap()),
            Kind::File => Sink::File(files[n].path().into()),
        };
        Self {
            sinks: [sink(1, output), sink(2, errors)],
            shown: Vec::new(),
            stdin: terminal.child.stdin.take(),
            terminal,
            kinds,
            _files: files,
        }
    }

    fn feed(&mut self, input: &[u8], keys: &[u8]) {
        match self.kinds[0] {
            Kind::Terminal => self.terminal.type_keys(keys),
            Kind::Pipe => self.stdin.take().unwrap().write_all(input).unwrap(),
            Kind::File => {}
        }
    }

    /// What has come to standard output (0) or error (1).
    fn text(&mut self, which: usize) -> String {
        self.shown.extend(self.terminal.look());
        let bytes = match &self.sinks[which] {
            Sink::Terminal => self.shown.clone(),
            Sink::Pipe(bytes) => bytes.lock().unwrap().clone(),
            Sink::File(path) => fs::read(path).unwrap(),
        };
        String::from_utf8_lossy(&bytes).replace("\r\n", "\n")
    }

    fn wait_for(&mut self, which: usize, what: &str) {
        let deadline = Instant::now() + LIMIT;
        while !self.text(which).contains(what) {
            let (text, kinds) = (self.text(which), self.kinds);
            assert!(
                Instant::now() < deadline,
                "no {what:?} in {text:?}: {kinds:?}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> Arc<Mutex<Vec<u8>>> {
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&bytes);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = pipe.read(&mut buffer) {
            all.lock().unwrap().extend(&buffer[..len]);
        }
    });
    bytes
}

#[test]
fn a_command_reads_and_writes_them() {
    let script = "echo ready >&2; while read x; do echo got-$x; done; echo aside >&2; exit 7";
    let input = b"one\ntwo\n";
    for kinds in combinations() {
        let mut streams = Streams::start(&["sh", "-c", script], input, kinds);
        streams.wait_for(1, "ready\n");
        streams.feed(input, b"one\rtwo\r\x04");
        assert_eq!(wait(&mut streams.terminal.child), Some(7), "{kinds:?}");
        streams.wait_for(0, "got-two\n");
        streams.wait_for(1, "aside\n");
        let (out, err) = (streams.text(0), streams.text(1));
        if kinds[1] == Kind::Terminal {
            assert_eq!(out.matches("got-").count(), 2, "{kinds:?}: {out:?}");
        } else {
            assert_eq!(out, "got-one\ngot-two\n", "{kinds:?}");
        }
        let is_shown = kinds[1] == Kind::Terminal && kinds[2] == Kind::Terminal;
        assert!(is_shown || !err.contains("got-"), "{kinds:?}: {err:?}");
        assert!(streams.terminal.is_cooked(), "{kinds:?}");
    }
}

#[test]
fn the_shell_executes_what_comes_by_them() {
    let line = b"echo six-$((2 * 3)); exit 5\n";
    for kinds in combinations() {
        let mut streams = Streams::start(&[], line, kinds);
        streams.feed(line, b"echo six-$((2 * 3)); exit 5\r");
        assert_eq!(wait(&mut streams.terminal.child), Some(5), "{kinds:?}");
        streams.wait_for(0, "six-6\n");
        // Escape sequences and an echo are for terminals.
        if kinds[0] != Kind::Terminal && kinds[1] != Kind::Terminal {
            assert_eq!(streams.text(0), "six-6\n", "{kinds:?}");
        }
        assert!(streams.terminal.is_cooked(), "{kinds:?}");
    }
}
