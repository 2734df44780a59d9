//! The control port (COM4): how the init of our initramfs talks to us.
//!
//! Lines of text: `ready` when it has opened its input, `exit N` when the command has ended with
//! status N. Anything else is ignored, so that a probe of the port does no harm.

/// A longer line is none of ours.
const LINE_MAX: usize = 64;

/// What the machine must react to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    /// The command's status.
    Exit(u8),
}

pub(crate) struct Control {
    line: Vec<u8>,
    message: Option<ControlMessage>,
    on_ready: Box<dyn Fn() + Send>,
}

impl Control {
    pub(super) fn new(on_ready: Box<dyn Fn() + Send>) -> Self {
        Self {
            line: Vec::new(),
            message: None,
            on_ready,
        }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => self.end_line(),
                _ if self.line.len() < LINE_MAX => self.line.push(*byte),
                _ => {}
            }
        }
    }

    pub(super) fn take(&mut self) -> Option<ControlMessage> {
        self.message.take()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("ready"), None) => (self.on_ready)(),
            (Some("exit"), Some(status)) => {
                self.message = status.parse().ok().map(ControlMessage::Exit);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn lines() {
        let ready = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&ready);
        let mut control = Control::new(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let rows: [(&[u8], Option<u8>); 7] = [
            (b"ready\r\n", None),
            (b"exit 7\n", Some(7)),
            (b"exit 256\n", None),
            (b"exit\n", None),
            (b"\xff\xfe\n", None),
            (&[b'a'; 1000], None),
            (b"\nexit 0\r\n", Some(0)),
        ];
        for (bytes, want) in rows {
            control.push(bytes);
            assert_eq!(control.take(), want.map(ControlMessage::Exit));
        }
        assert_eq!(ready.load(Ordering::Relaxed), 1);
    }
}
