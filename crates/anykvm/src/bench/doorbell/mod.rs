//! `anykvm bench doorbell`: measures what it costs a guest to say "look at the queue", and how long it takes until
//! somebody looks.
//!
//! The guest is a loop that rings. All rows take turns, and the best turn of each counts, as other load on the machine
//! only makes it slower. The experiment is Haskins' of 2009, whose figures are printed beside ours. (KVM's ioeventfd
//! was called iosignalfd then.)

mod bars;
mod interrupt;
mod latency;

mod tcg;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anykvm_ioctls::{
    Doorbell, DoorbellQueue, DoorbellSpec, IoEventAddress, NoDatamatch, Space, VcpuExit,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::bare::{Bare, DEVICE, Mode};
use super::plot;
use super::report::{self, Verdict};
use crate::error::BootError;

/// Number of rings in a turn.
const RINGS: u32 = 10_000;
const TURNS: u32 = 40;
const PORT: u8 = 0x80;
/// The port that ends a turn.
const END_PORT: u8 = 0xf4;
/// The value that is written.
const VALUE: u32 = 0x5a;
/// Number of doorbells besides the one that is rung.
const MANY: u64 = 4095;

/// How the guest rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Port,
    Memory,
    Hypercall,
}

/// Who hears the doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ear {
    /// The VMM, when KVM_RUN returns.
    Vmm,
    /// An ioeventfd for any value.
    Eventfd,
    /// An ioeventfd for this value.
    Datamatch,
    /// An ioeventfd for this value among 4,095 others.
    Crowded,
    /// A function in the VMM's process.
    Subscriber,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
struct DoorbellRow {
    name: &'static str,
    by: By,
    ear: Ear,
    /// Haskins' microseconds for this row, and whether he measured them.
    source: Option<(f64, bool)>,
}

const fn kind(name: &'static str, by: By, ear: Ear) -> DoorbellRow {
    DoorbellRow {
        name,
        by,
        ear,
        source: None,
    }
}

const KINDS: [DoorbellRow; 11] = [
    DoorbellRow {
        source: Some((6.53, false)),
        ..kind("VMM, port", By::Port, Ear::Vmm)
    },
    DoorbellRow {
        source: Some((9.09, true)),
        ..kind("VMM, MMIO", By::Memory, Ear::Vmm)
    },
    DoorbellRow {
        source: Some((2.72, true)),
        ..kind("ioeventfd, port", By::Port, Ear::Eventfd)
    },
    DoorbellRow {
        source: Some((5.0, true)),
        ..kind("ioeventfd, MMIO", By::Memory, Ear::Eventfd)
    },
    kind("ioeventfd, port, datamatch", By::Port, Ear::Datamatch),
    kind("ioeventfd, MMIO, datamatch", By::Memory, Ear::Datamatch),
    kind("ioeventfd, MMIO, one of 4096", By::Memory, Ear::Crowded),
    DoorbellRow {
        source: Some((2.37, false)),
        ..kind("ioeventfd, hypercall", By::Hypercall, Ear::Eventfd)
    },
    kind("subscriber, port", By::Port, Ear::Subscriber),
    kind("subscriber, MMIO", By::Memory, Ear::Subscriber),
    kind("subscriber, hypercall", By::Hypercall, Ear::Subscriber),
];

/// Returns the guest's code, which rings `rings` times, writes to the end port, and begins again.
fn code(by: By, rings: u32) -> Vec<u8> {
    let mut code = vec![0xbf]; // mov edi, rings
    code.extend(rings.to_le_bytes());
    code.push(0xb8); // mov eax, VALUE
    code.extend(VALUE.to_le_bytes());
    let start = code.len();
    match by {
        By::Port => code.extend([0xe7, PORT]), // out PORT, eax
        By::Memory => {
            code.extend([0x89, 0x04, 0x25]); // mov [DEVICE], eax
            code.extend(DEVICE.to_le_bytes());
        }
        By::Hypercall => {
            let registers = [
                (0xb8, 0x616b_0001),
                (0xbb, DEVICE),
                (0xb9, 4 << 8),
                (0xba, VALUE),
            ];
            for (mov, value) in registers {
                code.push(mov); // mov eax, ebx, ecx, edx
                code.extend(value.to_le_bytes());
            }
            code.extend([0x0f, 0x01, 0xc1]); // vmcall
        }
    }
    code.extend([0xff, 0xcf, 0x75]); // dec edi; jnz
    let back = start as i64 - (code.len() as i64 + 1);
    code.push(back as u8);
    code.extend([0xe6, END_PORT, 0xeb]); // out END_PORT, al; jmp
    let back = -(code.len() as i64 + 1);
    code.push(back as u8);
    code
}

/// A guest, and whoever hears it.
struct Setup {
    guest: Bare,
    ear: Ear,
    has_waiter: bool,
    event: EventFd,
    queue: Arc<DoorbellQueue>,
    calls: Arc<AtomicU64>,
    _doorbell: Option<Doorbell>,
}

impl Setup {
    /// Makes a guest. With a waiter, who takes the eventfd's counter, the eventfd blocks.
    fn new(kind: &DoorbellRow, rings: u32, has_waiter: bool) -> Result<Self, BootError> {
        let guest = Bare::new(Mode::Long, false, &code(kind.by, rings))?;
        let flags = if has_waiter { 0 } else { EFD_NONBLOCK };
        let event = EventFd::new(flags).map_err(BootError::host("cannot make an eventfd"))?;
        let (address, space, at) = match kind.by {
            By::Port => (
                IoEventAddress::Pio(PORT.into()),
                Space::Pio,
                u64::from(PORT),
            ),
            By::Memory | By::Hypercall => {
                let at = u64::from(DEVICE);
                (IoEventAddress::Mmio(at), Space::Mmio, at)
            }
        };
        let (queue, calls) = (Arc::new(DoorbellQueue::new()), Arc::new(AtomicU64::new(0)));
        let failed = BootError::kvm("KVM_IOEVENTFD");
        let mut doorbell = None;
        match kind.ear {
            Ear::Vmm => {}
            Ear::Eventfd => guest
                .vm
                .register_ioevent(&event, &address, NoDatamatch)
                .map_err(failed)?,
            Ear::Datamatch => guest
                .vm
                .register_ioevent(&event, &address, VALUE)
                .map_err(failed)?,
            Ear::Crowded => {
                let error = |e| BootError::kvm("KVM_IOEVENTFD")(e);
                guest
                    .vm
                    .register_ioevent(&event, &address, VALUE)
                    .map_err(error)?;
                // Half of them are at the same address.
                for n in 1..=MANY {
                    let other = match n % 2 {
                        0 => (IoEventAddress::Mmio(at + 8 * n), VALUE),
                        _ => (IoEventAddress::Mmio(at), VALUE + n as u32),
                    };
                    guest
                        .vm
                        .register_ioevent(&event, &other.0, other.1)
                        .map_err(error)?;
                }
            }
            Ear::Subscriber => {
                let place = DoorbellSpec {
                    space,
                    address: at,
                    len: 0,
                    datamatch: None,
                };
                let (ring, count) = (queue.ringer(0), Arc::clone(&calls));
                let hear = move |value| {
                    ring(value);
                    // Only one thread writes the counter.
                    let n = count.load(Ordering::Relaxed);
                    count.store(n + 1, Ordering::Relaxed);
                };
                doorbell = Some(
                    guest
                        .vm
                        .subscribe(place, hear)
                        .map_err(BootError::kvm("a subscription"))?,
                );
            }
        }
        Ok(Self {
            guest,
            ear: kind.ear,
            has_waiter,
            event,
            queue,
            calls,
            _doorbell: doorbell,
        })
    }

    /// Runs to the end port, and calls `hear` for each exit before it. Returns how many rings were heard.
    fn turn(&mut self, mut hear: impl FnMut()) -> Result<u64, BootError> {
        let mut exits = 0;
        let before = self.calls.load(Ordering::Relaxed);
        loop {
            match self.guest.vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::IoOut(port, _) if port == u16::from(END_PORT) => break,
                VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {
                    exits += 1;
                    hear();
                }
                exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
            }
        }
        Ok(match self.ear {
            Ear::Vmm => exits,
            Ear::Subscriber => self.calls.load(Ordering::Relaxed) - before,
            _ if self.has_waiter => 0,
            _ => self.event.read().unwrap_or(0),
        })
    }
}

/// Measures all rows. Draws them if `svg` names a file.
pub(super) fn run(
    verdict: &mut Verdict,
    qemu: Option<&Path>,
    svg: Option<&Path>,
) -> Result<String, BootError> {
    let mut setups = KINDS
        .iter()
        .map(|kind| Setup::new(kind, RINGS, false))
        .collect::<Result<Vec<_>, _>>()?;
    let mut best = [f64::INFINITY; KINDS.len()];
    let mut bare = f64::INFINITY;
    for _ in 0..TURNS {
        bare = bare.min(bare_write()?);
        for ((setup, best), kind) in setups.iter_mut().zip(&mut best).zip(&KINDS) {
            let begin = Instant::now();
            let heard = setup.turn(|| {})?;
            *best = best.min(begin.elapsed().as_secs_f64() / f64::from(RINGS));
            if heard != u64::from(RINGS) {
                return Err(BootError::NoImage(format!(
                    "{}: {RINGS} rings, {heard} heard",
                    kind.name
                )));
            }
        }
    }
    let ns = best.map(|seconds| seconds * 1e9);
    let seen = KINDS
        .iter()
        .map(latency::measure)
        .collect::<Result<Vec<_>, _>>()?;
    let tcg = match qemu {
        Some(qemu) => tcg::measure(qemu)?,
        None => Vec::new(),
    };
    judge(&ns, bare * 1e9, verdict);
    let mut text = table(&ns, &seen, bare * 1e9, &tcg);
    text.push('\n');
    text += &interrupt::table()?;
    if let Some(file) = svg {
        let bars = bars::bars(&ns, bare * 1e9, &tcg);
        std::fs::write(file, plot::draw(&bars, bars::SCALE))
            .map_err(BootError::host("cannot write the plot"))?;
    }
    Ok(text)
}

/// Returns the seconds of one write to an eventfd.
fn bare_write() -> Result<f64, BootError> {
    let event = EventFd::new(EFD_NONBLOCK).map_err(BootError::host("cannot make an eventfd"))?;
    let begin = Instant::now();
    for _ in 0..RINGS {
        event
            .write(1)
            .map_err(BootError::host("cannot write to an eventfd"))?;
    }
    Ok(begin.elapsed().as_secs_f64() / f64::from(RINGS))
}

fn judge(ns: &[f64; KINDS.len()], bare: f64, verdict: &mut Verdict) {
    let [
        vmm_port,
        vmm_mmio,
        port,
        mmio,
        port_match,
        mmio_match,
        crowded,
        hypercall,
        sub_port,
        sub_mmio,
        sub_hypercall,
    ] = *ns;
    verdict.at_most("VMM, port, ns", vmm_port, 150.0);
    verdict.at_most("VMM, MMIO, ns", vmm_mmio, 200.0);
    for (name, value) in [
        ("port", port),
        ("MMIO", mmio),
        ("port, datamatch", port_match),
        ("MMIO, datamatch", mmio_match),
        ("hypercall", hypercall),
    ] {
        verdict.at_most(
            &format!("ioeventfd, {name}, over a write"),
            value / bare,
            1.5,
        );
    }
    for (name, mmio, port) in [
        ("VMM", vmm_mmio, vmm_port),
        ("ioeventfd", mmio, port),
        ("ioeventfd, datamatch", mmio_match, port_match),
        ("subscriber", sub_mmio, sub_port),
    ] {
        verdict.at_most(&format!("{name}, MMIO over port"), mmio / port, 1.2);
    }
    verdict.at_most("one of 4096 over one", crowded / mmio_match, 1.1);
    for (name, value) in [
        ("port", sub_port),
        ("MMIO", sub_mmio),
        ("hypercall", sub_hypercall),
    ] {
        verdict.at_most(&format!("subscriber, {name}, ns"), value, 100.0);
    }
}

fn table(ns: &[f64; KINDS.len()], seen: &[f64], bare: f64, tcg: &[(&'static str, f64)]) -> String {
    let head = [
        "doorbell",
        "per second",
        "µs",
        "µs until seen",
        "over a write",
        "2009, µs",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let mut row = |name: &str, ns: f64, seen: Option<f64>, source: Option<(f64, bool)>| {
        lines.push(vec![
            name.to_owned(),
            format!("{:.0}", 1e9 / ns),
            format!("{:.3}", ns / 1e3),
            report::cell(seen),
            format!("{:.2}", ns / bare),
            source.map_or("-".into(), |(us, is_measured)| {
                format!(
                    "{us:.2}{}",
                    if is_measured { "" } else { " (extrapolated)" }
                )
            }),
        ]);
    };
    row("write to an eventfd", bare, None, None);
    for ((kind, ns), seen) in KINDS.iter().zip(ns).zip(seen) {
        row(kind.name, *ns, Some(*seen), kind.source);
    }
    for (name, ns) in tcg {
        row(name, *ns, None, None);
    }
    report::aligned(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_is_heard_once_for_each_ring() {
        for kind in &KINDS {
            let mut setup = Setup::new(kind, 7, false).unwrap();
            for _ in 0..3 {
                assert_eq!(setup.turn(|| {}).unwrap(), 7, "{}", kind.name);
            }
        }
    }

    #[test]
    fn bars() {
        let mut verdict = Verdict::default();
        let good = [
            140.0, 160.0, 400.0, 440.0, 410.0, 450.0, 460.0, 400.0, 60.0, 70.0, 50.0,
        ];
        judge(&good, 300.0, &mut verdict);
        assert_eq!(verdict.missed.len(), 0, "{:?}", verdict.missed);
        judge(&good.map(|ns| ns * 2.0), 300.0, &mut verdict);
        assert_eq!(verdict.missed.len(), 9, "{:?}", verdict.missed);
        let mut verdict = Verdict::default();
        let mut apart = good;
        for (mmio, port) in [(1, 0), (3, 2), (5, 4), (9, 8)] {
            apart[mmio] = 1.21 * apart[port];
        }
        judge(&apart, 400.0, &mut verdict);
        assert_eq!(verdict.missed.len(), 4, "{:?}", verdict.missed);
    }
}
