//! What a kernel prints at its end. To the machine, panics and halts look like a reset or like nothing.
//!
//! Only lines of the kernel's own form count, from their begin on, on a port that the kernel prints to.

use std::sync::{Arc, Mutex};

use crate::lock::lock;

/// Maximum length of a line; a longer one is cut off.
const LINE_MAX: usize = 200;
const PANIC: &str = "Kernel panic - not syncing: ";
const HALTED: &str = "reboot: System halted";

/// What the lines of all ports have said.
#[derive(Default)]
pub(crate) struct LastWords {
    panic: Mutex<Option<String>>,
    on_halt: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl LastWords {
    /// Makes a watch without ports. `on_halt` is called when a kernel says that it halts, which may be true.
    pub(crate) fn new(on_halt: impl FnOnce() + Send + 'static) -> Arc<Self> {
        Arc::new(Self {
            panic: Mutex::default(),
            on_halt: Mutex::new(Some(Box::new(on_halt))),
        })
    }

    /// Returns why the kernel has panicked, if it has.
    pub(crate) fn panic(&self) -> Option<String> {
        lock(&self.panic).clone()
    }

    fn hear(&self, line: &str) {
        // The time `[    1.234567] ` comes before, unless the kernel's printk.time is off.
        let text = match line
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("] "))
        {
            Some((time, text)) if time.trim().parse::<f64>().is_ok() => text,
            _ => line,
        };
        if let Some(reason) = text.strip_prefix(PANIC) {
            lock(&self.panic).get_or_insert_with(|| reason.trim_end().to_owned());
        } else if text.trim_end() == HALTED
            && let Some(on_halt) = lock(&self.on_halt).take()
        {
            on_halt();
        }
    }
}

/// The lines of one port.
pub(crate) struct Watch {
    line: Vec<u8>,
    words: Arc<LastWords>,
}

impl Watch {
    pub(crate) fn new(words: Arc<LastWords>) -> Self {
        Self {
            line: Vec::new(),
            words,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' => {
                    let line = std::mem::take(&mut self.line);
                    if line.len() >= HALTED.len() {
                        self.words.hear(&String::from_utf8_lossy(&line));
                    }
                }
                b'\r' => {}
                _ if self.line.len() < LINE_MAX => self.line.push(*byte),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn only_the_kernels_own_lines_count() {
        let halts = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&halts);
        let words = LastWords::new(move || _ = count.fetch_add(1, Ordering::Relaxed));
        let mut watch = Watch::new(Arc::clone(&words));
        watch.push(b"# echo Kernel panic - not syncing: x\r\n  reboot: System halted\n");
        watch.push(b"[today] Kernel panic - not syncing: x\n\n[    1.5] reboot: System halted?\n");
        assert_eq!(words.panic(), None);
        assert_eq!(halts.load(Ordering::Relaxed), 0);
        for byte in b"[    0.900000] Kernel panic - not syncing: no init\r\n" {
            watch.push(&[*byte]);
        }
        watch.push(&[b'y'; 10_000]);
        watch.push(b"\nKernel panic - not syncing: again\nreboot: System halted\r\n");
        assert_eq!(words.panic().as_deref(), Some("no init"));
        assert_eq!(halts.load(Ordering::Relaxed), 1);
    }
}
