//! Event delivery through the IDT (SDM vol. 3, chapter 6).
//!
//! Delivery computes all values, then accesses memory, and changes registers last. So if it faults, or the VMM must act
//! first, the CPU is as it was.

mod long;
mod protected;
mod real;
pub(crate) mod task;
#[cfg(test)]
mod tests;

pub(crate) use long::tss_stack;
pub(crate) use protected::inner_stack;

use x86_cpu::{Event, Exception, GuestBus, Shadow};
use x86_defs::{dr, rflags, vector};

use crate::{Exec, Stop};

/// IDT bit of an error code: the index is that of an IDT entry.
const IDT: u16 = 2;
/// EXT bit of an error code: an event external to the program was being delivered.
const EXT: u16 = 1;

/// An event in the form that the three delivery procedures share.
#[derive(Clone, Copy, Debug)]
struct Delivery {
    vector: u8,
    error_code: Option<u16>,
    /// RIP to push.
    rip: u64,
    /// RFLAGS to push.
    rflags: u64,
    /// INT n, INT3, INTO: the gate's DPL is checked.
    checks_dpl: bool,
}

impl Delivery {
    /// Returns the fault `vector` with an error code that names this entry of the IDT.
    fn idt_fault(&self, vector: u8) -> Stop {
        Exception::with_code(vector, u16::from(self.vector) << 3 | IDT).into()
    }
}

/// Delivers an exception of the instruction at RIP, and escalates to #DF and triple fault as vol. 3, table 6-5 says.
/// The caller has asked [`GuestBus::intercept`].
pub(crate) fn exception<B: GuestBus>(ex: &mut Exec<'_, B>, e: Exception) -> Result<(), Stop> {
    event(ex, Event::Exception(e))
}

/// Delivers any event. `Err` is [`Stop::Exit`] (nothing has changed: deliver
/// again) or [`Stop::TripleFault`].
pub(crate) fn event<B: GuestBus>(ex: &mut Exec<'_, B>, event: Event) -> Result<(), Stop> {
    let saved = (
        ex.cpu.fault_gva,
        ex.cpu.fault_dr6,
        ex.cpu.cr2,
        ex.cpu.dr6,
        ex.cpu.dr7,
    );
    let mut current = event;
    loop {
        match deliver_one(ex, current) {
            Ok(()) => {
                if current == Event::Nmi {
                    ex.cpu.events.nmi_masked = true;
                }
                ex.cpu.shadow = Shadow::None;
                ex.refresh();
                return Ok(());
            }
            Err(Stop::Exception(nested)) => match escalate(current, nested) {
                Some(e) => current = Event::Exception(e),
                None => return Err(Stop::TripleFault),
            },
            Err(stop) => {
                (
                    ex.cpu.fault_gva,
                    ex.cpu.fault_dr6,
                    ex.cpu.cr2,
                    ex.cpu.dr6,
                    ex.cpu.dr7,
                ) = saved;
                // INT n of real mode is an instruction like others, which is executed again with the VMM's answers.
                let is_instruction =
                    matches!(event, Event::Software { .. }) && !ex.cpu.is_protected();
                if matches!(stop, Stop::Exit) && !is_instruction {
                    ex.bus.delivery_stopped(ex.cpu);
                }
                return Err(stop);
            }
        }
    }
}

/// Returns the exception to deliver when `second` occurs during the delivery of `first` (SDM vol. 3, table 6-5); `None`
/// is a triple fault.
fn escalate(first: Event, second: Exception) -> Option<Exception> {
    let contributory = |v: u8| matches!(v, vector::DE | vector::TS..=vector::GP);
    let serious = contributory(second.vector) || second.vector == vector::PF;
    let double = match first {
        Event::Exception(e) if e.vector == vector::DF && serious => return None,
        Event::Exception(e) if e.vector == vector::PF => serious,
        Event::Exception(e) if contributory(e.vector) => contributory(second.vector),
        _ => false,
    };
    if double {
        return Some(Exception::with_code(vector::DF, 0));
    }
    // All events but INT n, INT3 and INTO are external to the program. #PF has an error code of its own format.
    let external = !matches!(
        first,
        Event::Software {
            privileged: false,
            ..
        }
    );
    Some(Exception {
        error_code: second.error_code.map(|c| {
            if external && second.vector != vector::PF {
                c | EXT
            } else {
                c
            }
        }),
        ..second
    })
}

fn deliver_one<B: GuestBus>(ex: &mut Exec<'_, B>, event: Event) -> Result<(), Stop> {
    let mut d = Delivery {
        vector: 0,
        error_code: None,
        rip: ex.cpu.rip(),
        rflags: ex.rflags(),
        checks_dpl: false,
    };
    match event {
        Event::Exception(e) => {
            d.vector = e.vector;
            d.error_code = e.error_code;
            if is_fault(e.vector) || e.vector == vector::DB && ex.cpu.fault_dr6 & dr::DR6_BD != 0 {
                // The handler's IRET must not hit the instruction's breakpoint
                // again (SDM vol. 3, 18.3.1.1).
                d.rflags |= rflags::RF;
            }
            if e.vector == vector::PF {
                ex.cpu.cr2 = ex.cpu.fault_gva;
            }
            if e.vector == vector::DB {
                raise_debug(ex);
            }
        }
        Event::Software {
            vector,
            next_rip,
            privileged,
        } => {
            d.vector = vector;
            d.rip = next_rip;
            d.checks_dpl = !privileged;
        }
        Event::Interrupt(vector) => d.vector = vector,
        Event::Nmi => d.vector = vector::NMI,
    }
    if !ex.cpu.is_protected() {
        real::deliver(ex, &d)
    } else if ex.cpu.is_long_mode() {
        long::deliver(ex, &d)
    } else {
        protected::deliver(ex, &d)
    }
}

/// True for vectors of faults (SDM vol. 3, table 6-1). #DB may be a fault or a trap.
fn is_fault(vector: u8) -> bool {
    matches!(
        vector,
        vector::DE
            | vector::BR..=vector::NM
            | vector::TS..=vector::PF
            | vector::MF
            | vector::AC
            | vector::XM
            | 20..=21
    )
}

/// Sets DR6 and DR7 as a #DB handler finds them (SDM vol. 3, 18.2.3).
fn raise_debug<B: GuestBus>(ex: &mut Exec<'_, B>) {
    let cpu = &mut *ex.cpu;
    cpu.dr6 = cpu.dr6 & !0xf | dr::DR6_FIXED1 | dr::DR6_RTM | cpu.fault_dr6;
    cpu.dr7 &= !dr::DR7_GD;
}
