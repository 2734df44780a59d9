//! [`Boot`]: runs `anykvm boot` as a user would, and collects its output.
//!
//! Standard input is empty, so the guest's command has three separate streams and no terminal. A guest that does not
//! end in time is killed, which is an outcome of its own and does not make the test hang.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How often a running guest is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// A boot with its options.
#[derive(Clone, Debug)]
pub struct Boot {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(String, String)>,
    limit: Duration,
}

/// The outcome of a boot.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Exit status. `None` if the process was killed, by its limit or by a signal.
    pub status: Option<i32>,
    /// Standard output of the guest's command.
    pub stdout: Vec<u8>,
    /// Standard error of the command, the kernel's messages and anykvm's own.
    pub stderr: Vec<u8>,
    /// Time from the start to the end of the process.
    pub time: Duration,
    /// True if the process was killed because it took longer than the limit.
    pub timed_out: bool,
}

impl Outcome {
    /// Returns standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns the last `lines` lines of standard error, for a failure's report.
    pub fn last_words(&self, lines: usize) -> String {
        let text = String::from_utf8_lossy(&self.stderr);
        let all: Vec<&str> = text.lines().collect();
        let tail = all.len().saturating_sub(lines);
        all.get(tail..).unwrap_or_default().join("\n")
    }
}

impl Boot {
    /// Makes a boot by the given `anykvm`, with its defaults.
    pub fn new(anykvm: &Path) -> Self {
        Self {
            program: anykvm.into(),
            arguments: vec!["boot".into()],
            environment: Vec::new(),
            limit: Duration::from_secs(300),
        }
    }

    /// Sets the number of vCPUs.
    #[must_use]
    pub fn cpus(self, n: u32) -> Self {
        self.option("--cpus", n.to_string())
    }

    /// Sets the size of guest memory, as `--mem` does.
    #[must_use]
    pub fn mem(self, size: &str) -> Self {
        self.option("--mem", size)
    }

    /// Sets another kernel than the one that anykvm finds.
    #[must_use]
    pub fn kernel(self, path: &Path) -> Self {
        self.option("--kernel", path)
    }

    /// Adds a host path to the guest, as `--overlay` does.
    #[must_use]
    pub fn overlay(self, text: &str) -> Self {
        self.option("--overlay", text)
    }

    /// Adds an option with a value.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.arguments.push(name.into());
        self.arguments.push(value.as_ref().into());
        self
    }

    /// Adds an option without a value.
    #[must_use]
    pub fn flag(mut self, name: &str) -> Self {
        self.arguments.push(name.into());
        self
    }

    /// Sets the engine that executes the guest: `jit`, `interp` or `lockstep`.
    #[must_use]
    pub fn engine(self, name: &str) -> Self {
        self.variable("ANYKVM_ENGINE", name)
    }

    /// Sets an environment variable of anykvm.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets how long the boot may take.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Boots, runs the command in the guest, and waits for the end.
    ///
    /// # Errors
    /// The process cannot be started or waited for.
    pub fn run(&self, command: &[&str]) -> io::Result<Outcome> {
        let mut process = Command::new(&self.program);
        process.args(&self.arguments);
        process.envs(self.environment.iter().map(|(k, v)| (k, v)));
        if !command.is_empty() {
            process.arg("--").args(command);
        }
        run_limited(&mut process, self.limit)
    }
}

/// Runs any process to its end or to its time limit, with empty standard input.
///
/// # Errors
/// The process cannot be started or waited for.
pub fn run_limited(command: &mut Command, limit: Duration) -> io::Result<Outcome> {
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let mut timed_out = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > limit {
            timed_out = true;
            child.kill()?;
            break child.wait()?;
        }
        thread::sleep(LOOK);
    };
    Ok(Outcome {
        status: status.code(),
        time: start.elapsed(),
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
        timed_out,
    })
}

/// Reads a stream on a thread of its own, so that the process never waits for a full pipe.
fn collect(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            // Bytes before an error are kept.
            let _ = stream.read_to_end(&mut bytes);
        }
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_streams_are_kept_apart() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 7"]);
        let outcome = run_limited(&mut command, Duration::from_secs(10)).unwrap();
        assert_eq!(outcome.status, Some(7));
        assert_eq!(outcome.text(), "out\n");
        assert_eq!(outcome.stderr, b"err\n");
        assert!(!outcome.timed_out);
    }

    #[test]
    fn what_takes_too_long_is_killed() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let outcome = run_limited(&mut command, Duration::from_millis(50)).unwrap();
        assert!(outcome.timed_out);
        assert_eq!(outcome.status, None);
        assert!(outcome.time < Duration::from_secs(30));
    }

    #[test]
    fn the_arguments_are_those_of_the_command_line() {
        let boot = Boot::new(Path::new("/bin/echo"))
            .cpus(2)
            .mem("256M")
            .overlay("/x:/y");
        let outcome = boot.run(&["sh", "-c", "exit 7"]).unwrap();
        assert_eq!(
            outcome.text(),
            "boot --cpus 2 --mem 256M --overlay /x:/y -- sh -c exit 7\n"
        );
        assert_eq!(outcome.last_words(3), "");
    }
}
