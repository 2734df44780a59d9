//! A pseudo terminal, and `anykvm` on it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};

use crate::guest::LIMIT;

/// A terminal with a process as the leader of its session.
pub(crate) struct Terminal {
    master: Option<File>,
    /// Kept, so that the terminal's modes can be read.
    slave: File,
    /// What was shown on it, or came through the pipe that stands for standard output.
    shown: Receiver<Vec<u8>>,
    pub(crate) child: Child,
    pub(crate) stdout: Option<ChildStdout>,
    pub(crate) stderr: Option<ChildStderr>,
}

impl Terminal {
    /// Starts `command` on a new terminal. `is_terminal` says which of standard input, output and error are that
    /// terminal; the others are empty, or pipes.
    pub(crate) fn start(command: &Command, is_terminal: [bool; 3]) -> Self {
        let others: [fn() -> Stdio; 3] = [Stdio::null, Stdio::piped, Stdio::piped];
        Self::start_with(
            command,
            [0, 1, 2].map(|n| (!is_terminal[n]).then(others[n])),
        )
    }

    /// Standard input, output and error: what is none is the terminal.
    pub(crate) fn start_with(command: &Command, streams: [Option<Stdio>; 3]) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        // O_NOCTTY: it must not become the terminal of the test's own session.
        let slave = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(i32::try_from(rustix::fs::OFlags::NOCTTY.bits()).unwrap())
            .open(name.to_str().unwrap())
            .unwrap();
        // `setsid --ctty` takes its standard input for the terminal.
        let mut child = if streams[0].is_none() {
            let mut child = Command::new("setsid");
            child.arg("--ctty").arg(command.get_program());
            child
        } else {
            Command::new(command.get_program())
        };
        let [input, output, errors] =
            streams.map(|stream| stream.unwrap_or_else(|| Stdio::from(slave.try_clone().unwrap())));
        let mut child = child
            .args(command.get_args())
            .stdin(input)
            .stdout(output)
            .stderr(errors)
            .spawn()
            .unwrap();
        let master = File::from(master);
        let shown = read_on(master.try_clone().unwrap());
        Self {
            master: Some(master),
            slave,
            shown,
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            child,
        }
    }

    /// What has been shown since the last look.
    pub(crate) fn look(&mut self) -> Vec<u8> {
        self.shown.try_iter().flatten().collect()
    }

    /// Returns what is shown, up to the bytes that complete `what`.
    pub(crate) fn read_until(&mut self, what: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        let mut text = String::new();
        while !text.contains(what) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => text.push_str(&String::from_utf8_lossy(&bytes)),
                Err(error) => panic!("no {what:?} ({error}) in {text:?}"),
            }
        }
        text
    }

    pub(crate) fn type_keys(&mut self, keys: &[u8]) {
        self.master.as_mut().unwrap().write_all(keys).unwrap();
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(self.master.as_ref().unwrap(), size).unwrap();
    }

    /// Returns true if the terminal has lines, echo and keys that are signals, as it had before anybody used it.
    pub(crate) fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Takes keys one by one and without echo, as a pager does.
    pub(crate) fn take_keys(&self) {
        let mut modes = tcgetattr(&self.slave).unwrap();
        modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(&self.slave, OptionalActions::Now, &modes).unwrap();
    }

    /// Reads a key as the pager does.
    pub(crate) fn read_key(&self) -> u8 {
        let mut key = [0];
        (&self.slave).read_exact(&mut key).unwrap();
        key[0]
    }

    /// Closes the terminal's window.
    pub(crate) fn hang_up(&mut self) {
        // The reading thread has another descriptor of the master, so dropping this one sends no signal.
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
        drop(self.master.take());
    }
}

fn read_on(mut master: File) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        // A master without slaves gives an error.
        while let Ok(len @ 1..) = master.read(&mut buffer) {
            if sender.send(buffer[..len].to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}
