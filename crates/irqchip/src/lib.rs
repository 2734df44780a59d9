//! PIC, IOAPIC, LAPIC, PIT and interrupt routing as pure state machines.

#![forbid(unsafe_code)]
