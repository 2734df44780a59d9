//! Measures how long a device's interrupt takes to a vCPU that sleeps in HLT.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anykvm_ioctls::VcpuExit;
use kvm_bindings::{
    KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_dtable, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_msi, kvm_irq_routing_msi__bindgen_ty_1,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::bare::{Bare, Mode};
use super::super::report;
use crate::error::BootError;

const SAMPLES: usize = 300;
/// A pause in which the vCPU falls asleep.
const PAUSE: Duration = Duration::from_micros(300);
/// The port that the guest's handler writes to.
const PORT: u8 = 0x80;
const VECTOR: u8 = 0x31;
const GSI: u32 = 24;
/// Addresses of the descriptor tables, behind the code at 0x1000.
const GDT: u64 = 0x1800;
const IDT: u64 = 0x1900;
const CODE_SELECTOR: u16 = 8;

/// Who injects the interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    /// The thread that writes to the irqfd.
    Writer,
    /// The thread of ours that waits for irqfds.
    Waiter,
    /// A KVM call, without an eventfd.
    Call,
}

const ROWS: [(&str, Who); 3] = [
    ("irqfd, written in this process", Who::Writer),
    ("irqfd, by a duplicate or from elsewhere", Who::Waiter),
    ("call without an eventfd", Who::Call),
];

/// Returns a handler that tells the VMM, and a program that sleeps, with their tables.
fn code() -> Vec<u8> {
    let handler = 0x1010u32;
    let mut code = vec![0xfb, 0xf4, 0xeb, 0xfd]; // sti; 1: hlt; jmp 1b
    code.resize(0x10, 0x90);
    code.extend([0xe6, PORT]); // out PORT, al
    code.extend([0xc7, 0x05, 0xb0, 0x00, 0xe0, 0xfe, 0, 0, 0, 0]); // EOI
    code.push(0xcf); // iretd
    code.resize((GDT - 0x1000) as usize + 8, 0);
    code.extend(0x00cf_9b00_0000_ffffu64.to_le_bytes());
    code.resize((IDT - 0x1000) as usize + usize::from(VECTOR) * 8, 0);
    let gate = u64::from(handler & 0xffff)
        | u64::from(CODE_SELECTOR) << 16
        | 0x8e00 << 32
        | u64::from(handler >> 16) << 48;
    code.extend(gate.to_le_bytes());
    code
}

fn guest() -> Result<Bare, BootError> {
    let guest = Bare::new(Mode::Flat32, true, &code())?;
    let failed = BootError::kvm("KVM_SET_SREGS");
    let mut s = guest.vcpu.get_sregs().map_err(failed)?;
    s.cs.selector = CODE_SELECTOR;
    let table = |base| kvm_dtable {
        base,
        limit: 0x7ff,
        ..Default::default()
    };
    (s.gdt, s.idt) = (table(GDT), table(IDT));
    let failed = BootError::kvm("KVM_SET_SREGS");
    guest.vcpu.set_sregs(&s).map_err(failed)?;
    let failed = BootError::kvm("KVM_GET_LAPIC");
    let mut lapic = guest.vcpu.get_lapic().map_err(failed)?;
    // The bit of the spurious vector register that enables the LAPIC.
    lapic.regs[0xf1] = 1;
    guest
        .vcpu
        .set_lapic(&lapic)
        .map_err(BootError::kvm("KVM_SET_LAPIC"))?;
    let route = kvm_irq_routing_entry {
        gsi: GSI,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            msi: kvm_irq_routing_msi {
                address_lo: 0xfee0_0000,
                address_hi: 0,
                data: VECTOR.into(),
                __bindgen_anon_1: kvm_irq_routing_msi__bindgen_ty_1::default(),
            },
        },
        ..Default::default()
    };
    let routes = KvmIrqRouting::from_entries(&[route])
        .map_err(|_| BootError::NoImage("too many routes".into()))?;
    guest
        .vm
        .set_gsi_routing(&routes)
        .map_err(BootError::kvm("KVM_SET_GSI_ROUTING"))?;
    Ok(guest)
}

/// Returns the microseconds of each sample.
fn measure(by: Who) -> Result<Vec<f64>, BootError> {
    let mut guest = guest()?;
    let event = EventFd::new(EFD_NONBLOCK).map_err(BootError::host("cannot make an eventfd"))?;
    let other = event
        .try_clone()
        .map_err(BootError::host("cannot duplicate an eventfd"))?;
    if by != Who::Call {
        guest
            .vm
            .register_irqfd(&event, GSI)
            .map_err(BootError::kvm("KVM_IRQFD"))?;
    }
    let trigger = guest
        .vm
        .irq_trigger(GSI)
        .map_err(BootError::kvm("an interrupt's trigger"))?;
    let begin = Instant::now();
    let seen_ns = Arc::new(AtomicU64::new(0));
    let now = move || u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let theirs = Arc::clone(&seen_ns);
    let vcpu = thread::spawn(move || {
        for _ in 0..SAMPLES {
            match guest.vcpu.run().map_err(BootError::kvm("KVM_RUN"))? {
                VcpuExit::IoOut(port, _) if port == u16::from(PORT) => {
                    theirs.store(now(), Ordering::Release);
                }
                exit => return Err(BootError::NoImage(format!("unexpected exit: {exit:?}"))),
            }
        }
        Ok(())
    });
    let mut samples = Vec::with_capacity(SAMPLES);
    'all: for _ in 0..SAMPLES {
        thread::sleep(PAUSE);
        seen_ns.store(0, Ordering::Release);
        let start = now();
        match by {
            Who::Call => trigger.trigger(),
            Who::Writer | Who::Waiter => {
                let event = if by == Who::Writer { &event } else { &other };
                event
                    .write(1)
                    .map_err(BootError::host("cannot write to an eventfd"))?;
            }
        }
        loop {
            let is_over = vcpu.is_finished();
            match seen_ns.load(Ordering::Acquire) {
                0 if is_over => break 'all,
                0 => thread::yield_now(),
                ns => {
                    samples.push(ns.saturating_sub(start) as f64 / 1e3);
                    break;
                }
            }
        }
    }
    match vcpu.join() {
        Ok(result) => result.map(|()| samples),
        // The panic has been printed.
        Err(_) => Err(BootError::NoImage("the vCPU's thread panicked".into())),
    }
}

/// Returns the table of medians, and of the times within which 90 % of the interrupts came.
pub(super) fn table() -> Result<String, BootError> {
    let head = ["interrupt to a vCPU in HLT", "µs", "90 % within"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (name, by) in ROWS {
        let mut samples = measure(by)?;
        samples.sort_by(f64::total_cmp);
        let tenth = samples.get(samples.len() * 9 / 10).copied();
        lines.push(vec![
            name.to_owned(),
            report::cell(report::median(&samples)),
            report::cell(tenth),
        ]);
    }
    Ok(report::aligned(&lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interrupt_reaches_the_guest() {
        for (name, by) in ROWS {
            assert_eq!(measure(by).unwrap().len(), SAMPLES, "{name}");
        }
    }
}
