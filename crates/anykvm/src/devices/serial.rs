//! One 16550 serial port: the registers of `vm-superio`, and an input queue with flow control.
//!
//! A wire is slow, but this device is not. A FIFO that is full again as soon as it was read would keep the guest in its
//! interrupt handler until its buffers overflow. So the FIFO stays empty for as long as the guest took to read it, and
//! the guest has half of its time for what it has read.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};

use super::control::{Connection, Control, ControlMessage};
use super::output::Output;
use super::watch::Watch;
use crate::ending::Ending;
use crate::fields::{Malformed, Reader, Writer};

/// Registers and bits of a 16550.
mod spec {
    pub(super) const DATA: u8 = 0;
    pub(super) const IER_RECEIVED: u8 = 1;
    pub(super) const IIR: u8 = 2;
    /// The interrupt's number, and two of its values: none, received data.
    pub(super) const IIR_ID: u8 = 0xf;
    pub(super) const IIR_NONE: u8 = 1;
    pub(super) const IIR_RECEIVED: u8 = 4;
    pub(super) const MCR: u8 = 4;
    /// Request to send.
    pub(super) const MCR_RTS: u8 = 2;
    pub(super) const FIFO_LEN: usize = 64;
}
use spec::{MCR, MCR_RTS};

/// Maximum time for which the FIFO stays empty: a guest that was held up is not punished for it.
const REST_MAX: Duration = Duration::from_millis(10);

/// Where the bytes go that the guest sends.
pub(crate) enum Sink {
    /// Our standard output or error. The watch looks for a kernel's last words.
    Output(Arc<Output>, Watch),
    /// The line protocol of the guest's init.
    Control(Control),
    /// Nowhere.
    Discard,
}

impl Sink {
    /// Makes the sink of the control port. `on_ready` is called when the guest's init reads its input.
    pub(crate) fn control(on_ready: Box<dyn Fn(Connection) + Send>) -> Self {
        Self::Control(Control::new(on_ready))
    }
}

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Output(output, watch) => {
                watch.push(bytes);
                output.push(bytes);
            }
            Self::Control(control) => control.push(bytes),
            Self::Discard => {}
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A function that sends one edge of the port's ISA interrupt.
pub(crate) type Edge = Arc<dyn Fn() + Send + Sync>;

#[derive(Clone)]
struct Interrupt(Edge);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        (self.0)();
        Ok(())
    }
}

pub(super) struct Uart {
    serial: Serial<Interrupt, NoEvents, Sink>,
    pending: VecDeque<u8>,
    mcr: u8,
    /// When the FIFO was last filled, and how long the guest took to read it.
    filled: Instant,
    took: Duration,
    /// True if [`Self::refill`] was asked for.
    is_resting: bool,
    /// The machine stands still: what is received waits, and interrupts nobody.
    is_held: bool,
    ask_refill: Box<dyn Fn() + Send>,
}

impl Uart {
    /// Makes a port. `ask_refill` has [`Self::refill`] called after [`Self::rest`].
    pub(super) fn new(sink: Sink, irq: Edge, ask_refill: Box<dyn Fn() + Send>) -> Self {
        Self {
            serial: Serial::new(Interrupt(irq), sink),
            pending: VecDeque::new(),
            mcr: 0,
            filled: Instant::now(),
            took: Duration::ZERO,
            is_resting: false,
            is_held: false,
            ask_refill,
        }
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.pending.extend(bytes);
        self.pump();
    }

    pub(super) fn backlog(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn read(&mut self, register: u8) -> u8 {
        let mut value = self.serial.read(register);
        // `vm-superio` forgets the interrupt when one byte of several is read. Linux reads at most 256 bytes before it
        // asks here whether there are more.
        if register == spec::IIR && value & spec::IIR_ID == spec::IIR_NONE && self.has_received() {
            value = (value & !spec::IIR_ID) | spec::IIR_RECEIVED;
        }
        let is_drained = self.is_fifo_empty() && !self.pending.is_empty();
        if register == spec::DATA && is_drained && !self.is_resting {
            self.is_resting = true;
            self.took = self.filled.elapsed();
            (self.ask_refill)();
        }
        value
    }

    /// Saves the registers, and the bytes that wait.
    pub(super) fn save(&self, w: &mut Writer) {
        let s = self.serial.state();
        let [a, b] = [s.baud_divisor_low, s.baud_divisor_high];
        let [c, d] = [s.interrupt_enable, s.interrupt_identification];
        w.put(&[a, b, c, d, s.line_control, s.line_status, s.modem_control]);
        w.put(&[s.modem_status, s.scratch, self.mcr]);
        w.bytes(&s.in_buffer);
        let (first, second) = self.pending.as_slices();
        w.bytes(&[first, second].concat());
        if let Sink::Control(control) = self.serial.writer() {
            control.save(w);
        }
    }

    /// Loads a saved state; output and interrupt stay this port's.
    pub(super) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let [
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
        ] = r.get()?;
        let [modem_status, scratch, mcr] = r.get()?;
        let state = SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: r.bytes()?.to_vec(),
        };
        let irq = self.serial.interrupt_evt().clone();
        let idle = Serial::new(irq.clone(), Sink::Discard);
        let sink = std::mem::replace(&mut self.serial, idle).into_writer();
        self.serial = Serial::from_state(&state, irq, NoEvents, sink)
            .map_err(|error| r.wrong(&format!("{error:?}")))?;
        self.mcr = mcr;
        self.pending = r.bytes()?.to_vec().into();
        if let Sink::Control(control) = self.serial.writer_mut() {
            control.load(r)?;
        }
        Ok(())
    }

    /// Returns how long the FIFO has to stay empty.
    pub(super) fn rest(&self) -> Duration {
        self.took.min(REST_MAX)
    }

    /// Nothing goes into the FIFO until [`Self::release`].
    pub(super) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Sends on what waits.
    pub(super) fn release(&mut self) {
        self.is_held = false;
        self.refill();
    }

    /// Ends the rest.
    pub(super) fn refill(&mut self) {
        self.is_resting = false;
        self.pump();
    }

    fn is_fifo_empty(&self) -> bool {
        self.serial.fifo_capacity() == spec::FIFO_LEN
    }

    /// Returns true if there is data in the FIFO and its interrupt is enabled.
    fn has_received(&self) -> bool {
        let is_enabled = self.serial.state().interrupt_enable & spec::IER_RECEIVED != 0;
        is_enabled && !self.is_fifo_empty()
    }

    pub(super) fn write(&mut self, register: u8, value: u8) -> Option<Ending> {
        if register == MCR {
            self.mcr = value;
        }
        // The only error is a full FIFO in loop-back mode: a byte is lost, as on hardware.
        let _ = self.serial.write(register, value);
        if register == MCR {
            self.pump();
        }
        match self.serial.writer_mut() {
            Sink::Control(control) => match control.take()? {
                ControlMessage::Exit(status) => Some(Ending::Reported(status)),
            },
            _ => None,
        }
    }

    /// Fills the FIFO if it is empty and the guest lets us send. That causes one interrupt for all of it.
    fn pump(&mut self) {
        let is_waiting = self.is_held || self.is_resting;
        if is_waiting || self.mcr & MCR_RTS == 0 || !self.is_fifo_empty() {
            return;
        }
        self.filled = Instant::now();
        while !self.pending.is_empty() {
            let room = self.serial.fifo_capacity();
            let chunk: Vec<u8> = self.pending.iter().take(room).copied().collect();
            if chunk.is_empty() {
                return;
            }
            match self.serial.enqueue_raw_bytes(&chunk) {
                Ok(taken) if taken > 0 => {
                    self.pending.drain(..taken.min(self.pending.len()));
                }
                // A port in loop-back mode takes nothing.
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    fn uart_with(irq: &Arc<AtomicU32>) -> Uart {
        let irq = Arc::clone(irq);
        let edge = move || _ = irq.fetch_add(1, Ordering::Relaxed);
        Uart::new(Sink::Discard, Arc::new(edge), Box::new(|| {}))
    }

    fn uart() -> Uart {
        uart_with(&Arc::default())
    }

    #[test]
    fn input_waits_for_request_to_send_and_arrives_whole() {
        let mut uart = uart();
        let sent: Vec<u8> = (0..=255).cycle().take(1000).collect();
        uart.feed(&sent);
        assert_eq!(uart.read(5) & 1, 0, "nothing before RTS");
        uart.write(MCR, 0xb);
        let mut got = Vec::new();
        while uart.read(5) & 1 != 0 {
            got.push(uart.read(0));
            if got.len() % 64 == 0 {
                assert_eq!(uart.read(5) & 1, 0, "rests when it was read");
                uart.refill();
            }
        }
        assert_eq!(got, sent);
    }

    /// Does what Linux's interrupt handler does: asks ports until none has an interrupt, and reads at most 256 bytes
    /// each time.
    fn handle(uart: &mut Uart, got: &mut Vec<u8>) {
        while uart.read(spec::IIR) & spec::IIR_ID != spec::IIR_NONE {
            let mut left = 256;
            while left > 0 && uart.read(5) & 1 != 0 {
                got.push(uart.read(0));
                left -= 1;
            }
        }
    }

    #[test]
    fn a_driver_that_reads_in_pieces_misses_nothing() {
        let irq = Arc::default();
        let mut uart = uart_with(&irq);
        uart.write(MCR, 0xb);
        uart.write(1, 1);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for len in [1usize, 28, 64, 65, 255, 256, 257, 1000, 4095, 10_000] {
            let bytes: Vec<u8> = (0..len).map(|n| (n * 31) as u8).collect();
            sent.extend(&bytes);
            uart.feed(&bytes);
            while irq.swap(0, Ordering::Relaxed) != 0 {
                handle(&mut uart, &mut got);
                // Flow control stops the port in the middle.
                uart.write(MCR, 0x9);
                handle(&mut uart, &mut got);
                uart.write(MCR, 0xb);
                uart.refill();
            }
            assert_eq!(got, sent, "{len}");
        }
        assert_eq!(uart.read(spec::IIR) & spec::IIR_ID, spec::IIR_NONE);
    }

    /// Whoever saves the state of interrupt controllers first, and the port's then, misses no interrupt between.
    #[test]
    fn a_held_port_interrupts_nobody() {
        let irq = Arc::default();
        let mut uart = uart_with(&irq);
        uart.write(MCR, 0xb);
        uart.write(1, 1);
        uart.hold();
        uart.feed(b"x");
        uart.refill();
        assert_eq!((irq.load(Ordering::Relaxed), uart.read(5) & 1), (0, 0));
        uart.release();
        assert_eq!((irq.load(Ordering::Relaxed), uart.read(0)), (1, b'x'));
    }

    #[test]
    fn input_interrupts_when_enabled() {
        let irq = Arc::default();
        let mut uart = uart_with(&irq);
        uart.write(MCR, 0xb);
        uart.write(1, 1);
        uart.feed(b"x");
        assert_eq!(irq.load(Ordering::Relaxed), 1);
        assert_eq!(uart.read(2) & 0xf, 4, "received data available");
    }
}
