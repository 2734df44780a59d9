//! What a signal has to clean up before the guest starts.
//!
//! Programs that we have started are killed, and folders that we have not finished are removed. Then the signal ends
//! this process as if nobody had caught it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

use rustix::process::{Pid, Signal, kill_process};

use crate::lock::lock;

#[derive(Debug)]
struct State {
    /// True if the guest has started, which ends in other ways.
    is_over: bool,
    children: Vec<u32>,
    folders: Vec<PathBuf>,
}

/// The state is static, so that the signals' thread finds it.
static STATE: Mutex<State> = Mutex::new(State {
    is_over: false,
    children: Vec::new(),
    folders: Vec::new(),
});

/// Notes that the guest starts.
pub(crate) fn finish() {
    lock(&STATE).is_over = true;
}

/// Ends this process by `signal`, unless the guest has started.
pub(crate) fn interrupt(signal: i32) {
    let state = lock(&STATE);
    if state.is_over {
        return;
    }
    for child in &state.children {
        if let Some(pid) = i32::try_from(*child).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    for folder in &state.folders {
        let _ = fs::remove_dir_all(folder);
    }
    let _ = signal_hook::low_level::emulate_default_handler(signal);
}

/// A folder that is removed when this is dropped, or when a signal ends us.
#[derive(Debug)]
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    /// Registers a folder, which the caller makes and fills.
    pub(crate) fn new(path: PathBuf) -> Self {
        lock(&STATE).folders.push(path.clone());
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // If something is left, that takes space and nothing else.
        let _ = fs::remove_dir_all(&self.0);
        lock(&STATE).folders.retain(|folder| *folder != self.0);
    }
}

/// A program that a signal ends together with us.
#[derive(Debug)]
pub(crate) struct Running(Option<Child>);

/// Starts a program without input.
pub(crate) fn start(command: &mut Command) -> io::Result<Running> {
    let mut state = lock(&STATE);
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    state.children.push(child.id());
    Ok(Running(Some(child)))
}

impl Running {
    /// Returns true if the program still runs. It must print little, as a full pipe would hold it up.
    pub(crate) fn is_running(&mut self) -> bool {
        match &mut self.0 {
            Some(child) => matches!(child.try_wait(), Ok(None)),
            None => false,
        }
    }

    /// Waits for the program's end. Returns its output.
    pub(crate) fn output(mut self) -> io::Result<Output> {
        let child = self.0.take();
        let child = child.ok_or_else(|| io::Error::other("a program without a process"))?;
        let id = child.id();
        let output = child.wait_with_output();
        lock(&STATE).children.retain(|child| *child != id);
        output
    }
}

/// Runs a program without input to its end.
pub(crate) fn run(command: &mut Command) -> io::Result<Output> {
    start(command)?.output()
}
