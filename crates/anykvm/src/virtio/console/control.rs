//! The protocol of the control queues: which ports there are, what they are called, and who has opened them.

use std::collections::VecDeque;

use crate::fields::{Malformed, Reader, Writer};

/// Events (virtio 1.2, 5.3.6.2).
mod spec {
    pub(super) const DEVICE_READY: u16 = 0;
    pub(super) const DEVICE_ADD: u16 = 1;
    pub(super) const PORT_READY: u16 = 3;
    pub(super) const CONSOLE_PORT: u16 = 4;
    pub(super) const PORT_OPEN: u16 = 6;
    pub(super) const PORT_NAME: u16 = 7;
}

/// Maximum number of messages that wait; a driver asks for fewer.
const WAITING_MAX: usize = 256;

/// The device's state of the protocol.
pub(super) struct Control {
    waiting: VecDeque<Vec<u8>>,
    /// By port, true if a program of the guest has it open.
    open: Vec<bool>,
    /// By port, true if the driver was told that nothing comes any more.
    closed: Vec<bool>,
}

impl Control {
    pub(super) fn new(ports: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            open: vec![false; ports],
            closed: vec![false; ports],
        }
    }

    /// Returns true if a program of the guest has the port open.
    pub(super) fn is_open(&self, port: usize) -> bool {
        self.open.get(port).copied().unwrap_or(false)
    }

    /// Returns the next message to the driver.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        self.waiting.pop_front()
    }

    /// Tells the driver once that nothing comes to the port any more. Returns true if that is new.
    pub(super) fn close(&mut self, port: usize) -> bool {
        match self.closed.get_mut(port) {
            Some(closed) if !*closed => {
                *closed = true;
                self.say(port, spec::PORT_OPEN, 0, b"");
                true
            }
            _ => false,
        }
    }

    /// Handles a message of the driver. `name` returns a port's name, which the console does not have.
    pub(super) fn hear(&mut self, message: [u8; 8], name: impl Fn(usize) -> Option<&'static str>) {
        let [p0, p1, p2, p3, e0, e1, v0, v1] = message;
        let port = usize::try_from(u32::from_le_bytes([p0, p1, p2, p3])).unwrap_or(usize::MAX);
        let event = u16::from_le_bytes([e0, e1]);
        let value = u16::from_le_bytes([v0, v1]);
        match event {
            spec::DEVICE_READY if value == 1 => {
                // This is a new driver's first message. What an earlier driver did is over.
                *self = Self::new(self.open.len());
                for port in 0..self.open.len() {
                    self.say(port, spec::DEVICE_ADD, 1, b"");
                }
            }
            spec::PORT_READY if value == 1 && port < self.open.len() => {
                if port == 0 {
                    self.say(port, spec::CONSOLE_PORT, 1, b"");
                }
                self.say(port, spec::PORT_OPEN, 1, b"");
                // The guest's init takes a name as the sign that the port can be used.
                if let Some(name) = name(port) {
                    self.say(port, spec::PORT_NAME, 1, name.as_bytes());
                }
            }
            spec::PORT_OPEN => {
                if let Some(open) = self.open.get_mut(port) {
                    *open = value == 1;
                }
            }
            _ => {}
        }
    }

    /// Saves the messages that wait, and which ports are open.
    pub(super) fn save(&self, w: &mut Writer) {
        w.count(self.waiting.len());
        self.waiting.iter().for_each(|message| w.bytes(message));
        w.count(self.open.len());
        for flag in self.open.iter().chain(&self.closed) {
            w.flag(*flag);
        }
    }

    pub(super) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let count = r.count(WAITING_MAX)?;
        self.waiting = (0..count)
            .map(|_| r.bytes().map(<[u8]>::to_vec))
            .collect::<Result<_, _>>()?;
        r.expect(self.open.len())?;
        for flag in self.open.iter_mut().chain(&mut self.closed) {
            *flag = r.flag()?;
        }
        Ok(())
    }

    fn say(&mut self, port: usize, event: u16, value: u16, more: &[u8]) {
        if self.waiting.len() >= WAITING_MAX {
            return;
        }
        let mut message = u32::try_from(port).unwrap_or(0).to_le_bytes().to_vec();
        message.extend(event.to_le_bytes());
        message.extend(value.to_le_bytes());
        message.extend(more);
        self.waiting.push_back(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(port: u32, event: u16, value: u16) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&port.to_le_bytes());
        bytes[4..6].copy_from_slice(&event.to_le_bytes());
        bytes[6..].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    #[test]
    fn ports_are_added_opened_and_closed_once() {
        let mut control = Control::new(2);
        let name = |port| (port == 1).then_some("x");
        control.hear(message(u32::MAX, spec::DEVICE_READY, 1), name);
        assert_eq!(control.next().unwrap(), message(0, spec::DEVICE_ADD, 1));
        assert_eq!(control.next().unwrap(), message(1, spec::DEVICE_ADD, 1));
        control.hear(message(1, spec::PORT_READY, 1), name);
        assert_eq!(control.next().unwrap(), message(1, spec::PORT_OPEN, 1));
        let named = control.next().unwrap();
        assert_eq!(
            (&named[..8], &named[8..]),
            (&message(1, 7, 1)[..], &b"x"[..])
        );
        assert!(!control.is_open(1));
        control.hear(message(1, spec::PORT_OPEN, 1), name);
        assert!(control.is_open(1));
        assert!(control.close(1));
        assert!(!control.close(1));
        assert_eq!(control.next().unwrap(), message(1, spec::PORT_OPEN, 0));
        // The ports do not exist, and the driver never reads messages.
        for port in [2, 7, u32::MAX] {
            control.hear(message(port, spec::PORT_READY, 1), name);
            control.hear(message(port, spec::PORT_OPEN, 1), name);
        }
        assert_eq!(control.next(), None);
        for _ in 0..1000 {
            control.hear(message(0, spec::PORT_READY, 1), name);
        }
        assert_eq!(control.waiting.len(), WAITING_MAX);
    }
}
