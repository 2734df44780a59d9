//! The console device (virtio 1.2, 5.3). Port 0 is the guest's hvc0. The other ports are the three streams of a
//! command, which pass bytes unchanged and much faster than a terminal.

mod control;
mod input;

use std::io::{Read, Write};
use std::sync::Arc;

use anykvm_ioctls::DoorbellQueue;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;
use virtio_queue::Queue;

use super::queue::{Broken, Progress, Step, serve_chains};
use super::{Backend, Profile};
use crate::devices::Output;
use crate::fields::{Malformed, Reader, Writer};
use crate::memory::GuestMemory;
use control::Control;
pub(crate) use input::PortInput;

/// VIRTIO_CONSOLE_F_SIZE: the configuration has columns and rows.
const F_SIZE: u64 = 1;
/// VIRTIO_CONSOLE_F_MULTIPORT: there are control queues and more ports.
const F_MULTIPORT: u64 = 2;
/// Number of bytes that are moved at once.
const CHUNK: usize = 1 << 16;
/// Number of entries of a queue, and of one with little traffic.
const QUEUE_LEN: u16 = 64;
const QUEUE_LEN_SMALL: u16 = 16;
/// The control queues.
const CONTROL_RECEIVE: usize = 2;
const CONTROL_TRANSMIT: usize = 3;
/// Number of queues of port 0 and of control; each other port has two more.
const QUEUES: usize = 4;

/// A port.
#[derive(Clone)]
pub(crate) enum Port {
    /// hvc0, in both directions.
    Console(Arc<PortInput>, Arc<Output>),
    /// A stream of this name to the guest.
    In(&'static str, Arc<PortInput>),
    /// A stream of this name from the guest.
    Out(&'static str, Arc<Output>),
}

impl Port {
    fn input(&self) -> Option<&Arc<PortInput>> {
        match self {
            Self::Console(input, _) | Self::In(_, input) => Some(input),
            Self::Out(..) => None,
        }
    }

    fn output(&self) -> Option<&Arc<Output>> {
        match self {
            Self::Console(_, output) | Self::Out(_, output) => Some(output),
            Self::In(..) => None,
        }
    }

    /// Returns the name that sysfs shows in the guest. Consoles have none.
    fn name(&self) -> Option<&'static str> {
        match self {
            Self::Console(..) => None,
            Self::In(name, _) | Self::Out(name, _) => Some(name),
        }
    }
}

/// The console device.
pub(crate) struct Console {
    /// The ports; the first is the console.
    ports: Vec<Port>,
    control: Control,
    /// Rows and columns.
    size: Option<(u16, u16)>,
    bells: Option<Arc<DoorbellQueue>>,
    chunk: Vec<u8>,
}

/// Returns the receive queue of a port. Its transmit queue is the next one.
fn receive_queue(port: usize) -> usize {
    match port {
        0 => 0,
        _ => QUEUES + 2 * (port - 1),
    }
}

/// Returns the port of a queue, unless it is a control queue.
fn port_of(queue: usize) -> Option<usize> {
    match queue {
        0 | 1 => Some(0),
        CONTROL_RECEIVE | CONTROL_TRANSMIT => None,
        _ => Some((queue - QUEUES) / 2 + 1),
    }
}

impl Console {
    /// Makes a device with these ports, the console first.
    pub(crate) fn new(ports: Vec<Port>, size: Option<(u16, u16)>) -> Self {
        Self {
            control: Control::new(ports.len()),
            ports,
            size,
            bells: None,
            chunk: vec![0; CHUNK],
        }
    }

    fn ring(&self, queue: usize) {
        if let (Some(bells), Ok(queue)) = (&self.bells, u32::try_from(queue)) {
            bells.ring(queue);
        }
    }

    fn receive(
        &mut self,
        port: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken> {
        let Some(input) = self.ports.get(port).and_then(Port::input) else {
            return Ok(Progress::default());
        };
        // Linux drops what comes before a program has opened the port.
        if port != 0 && !self.control.is_open(port) {
            return Ok(Progress::default());
        }
        let progress = serve_chains(queue, memory, |chain| {
            let mut writer = chain.writer(memory)?;
            if input.backlog() == 0 {
                return Ok(Step::Wait);
            }
            let len = input
                .take(writer.available_bytes(), |bytes| writer.write_all(bytes))
                .map_err(|error| Broken(error.to_string()))?;
            Ok(Step::Done(u32::try_from(len).unwrap_or(0)))
        })?;
        if port != 0 && input.is_at_end() && self.control.close(port) {
            self.ring(CONTROL_RECEIVE);
        }
        Ok(progress)
    }

    fn transmit(
        &mut self,
        port: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken> {
        let output = self.ports.get(port).and_then(Port::output);
        let chunk = &mut self.chunk;
        serve_chains(queue, memory, |chain| {
            let mut reader = chain.reader(memory)?;
            // The output rings when there is room. The other ports go on until then.
            if output.is_some_and(|output| output.is_full()) {
                return Ok(Step::Wait);
            }
            loop {
                let len = reader
                    .read(chunk)
                    .map_err(|error| Broken(error.to_string()))?;
                if len == 0 {
                    return Ok(Step::Done(0));
                }
                if let Some(output) = output {
                    output.push(chunk.get(..len).unwrap_or_default());
                }
            }
        })
    }

    /// Sends messages to the driver.
    fn tell(&mut self, queue: &mut Queue, memory: &GuestMemory) -> Result<Progress, Broken> {
        let control = &mut self.control;
        serve_chains(queue, memory, |chain| {
            let mut writer = chain.writer(memory)?;
            let Some(message) = control.next() else {
                return Ok(Step::Wait);
            };
            // A buffer that is too small gets what fits in it; that is the driver's mistake.
            let len = message.len().min(writer.available_bytes());
            writer
                .write_all(message.get(..len).unwrap_or_default())
                .map_err(|error| Broken(error.to_string()))?;
            Ok(Step::Done(u32::try_from(len).unwrap_or(0)))
        })
    }

    /// Handles messages from the driver.
    fn listen(&mut self, queue: &mut Queue, memory: &GuestMemory) -> Result<Progress, Broken> {
        let control = &mut self.control;
        let ports = &self.ports;
        let progress = serve_chains(queue, memory, |chain| {
            let mut reader = chain.reader(memory)?;
            let mut message = [0; 8];
            let mut len = 0;
            while let Some(rest) = message.get_mut(len..).filter(|rest| !rest.is_empty()) {
                match reader
                    .read(rest)
                    .map_err(|error| Broken(error.to_string()))?
                {
                    0 => break,
                    read => len += read,
                }
            }
            if len == message.len() {
                control.hear(message, |port| ports.get(port).and_then(Port::name));
            }
            Ok(Step::Done(0))
        })?;
        self.ring(CONTROL_RECEIVE);
        // A port that has just been opened may have input.
        for port in 1..self.ports.len() {
            self.ring(receive_queue(port));
        }
        Ok(progress)
    }
}

impl Backend for Console {
    fn profile(&self) -> Profile {
        let (rows, columns) = self.size.unwrap_or((0, 0));
        // The configuration has columns, rows, number of ports, emergency write.
        let mut config = columns.to_le_bytes().to_vec();
        config.extend(rows.to_le_bytes());
        let count = u32::try_from(self.ports.len()).unwrap_or(1);
        config.extend(count.to_le_bytes());
        config.extend([0; 4]);
        let mut queue_sizes = vec![QUEUE_LEN; 2];
        let mut features = if self.size.is_some() { F_SIZE } else { 0 };
        if self.ports.len() > 1 {
            features |= F_MULTIPORT;
            queue_sizes.extend([QUEUE_LEN; 2]);
            for port in self.ports.iter().skip(1) {
                let len = |is_used| if is_used { QUEUE_LEN } else { QUEUE_LEN_SMALL };
                queue_sizes.extend([len(port.input().is_some()), len(port.output().is_some())]);
            }
        }
        Profile {
            name: "virtio-console",
            kind: u16::try_from(VIRTIO_ID_CONSOLE).unwrap_or(0),
            class: 0x07_80_00,
            features,
            queue_sizes,
            config,
        }
    }

    fn serve(
        &mut self,
        index: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken> {
        match (index, port_of(index)) {
            (CONTROL_RECEIVE, _) => self.tell(queue, memory),
            (CONTROL_TRANSMIT, _) => self.listen(queue, memory),
            (_, Some(port)) if index == receive_queue(port) => self.receive(port, queue, memory),
            (_, Some(port)) => self.transmit(port, queue, memory),
            _ => Ok(Progress::default()),
        }
    }

    /// Returns the order of the queues. The driver's messages come last: a port that it closes has given all its bytes
    /// then.
    fn order(&self) -> Vec<usize> {
        let queues = self.profile().queue_sizes.len();
        let is_said = |queue: &usize| *queue == CONTROL_TRANSMIT;
        (0..queues)
            .filter(|queue| !is_said(queue))
            .chain((0..queues).filter(is_said))
            .collect()
    }

    fn save(&self, w: &mut Writer) {
        self.control.save(w);
    }

    fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        self.control.load(r.part("the console"))
    }

    fn connect(&mut self, bells: &Arc<DoorbellQueue>) {
        self.bells = Some(Arc::clone(bells));
        for (index, port) in self.ports.iter().enumerate() {
            let queue = receive_queue(index);
            if let (Some(input), Ok(queue)) = (port.input(), u32::try_from(queue)) {
                let bells = Arc::clone(bells);
                input.connect(Box::new(move || bells.ring(queue)));
            }
            if let (Some(output), Ok(queue)) = (port.output(), u32::try_from(queue + 1)) {
                let bells = Arc::clone(bells);
                output.when_room(Box::new(move || bells.ring(queue)));
            }
        }
    }
}
