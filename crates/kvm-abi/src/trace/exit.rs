//! The exit that KVM_RUN returned with.

use std::fmt::{self, Write};
use std::mem::offset_of;

use kvm_bindings::*;

use crate::run_page::PAGE_SIZE;
use crate::user_memory::Arg;

const REASONS: &[(u32, &str)] = &[
    (KVM_EXIT_UNKNOWN, "UNKNOWN"),
    (KVM_EXIT_EXCEPTION, "EXCEPTION"),
    (KVM_EXIT_IO, "IO"),
    (KVM_EXIT_HYPERCALL, "HYPERCALL"),
    (KVM_EXIT_DEBUG, "DEBUG"),
    (KVM_EXIT_HLT, "HLT"),
    (KVM_EXIT_MMIO, "MMIO"),
    (KVM_EXIT_IRQ_WINDOW_OPEN, "IRQ_WINDOW_OPEN"),
    (KVM_EXIT_SHUTDOWN, "SHUTDOWN"),
    (KVM_EXIT_FAIL_ENTRY, "FAIL_ENTRY"),
    (KVM_EXIT_INTR, "INTR"),
    (KVM_EXIT_SET_TPR, "SET_TPR"),
    (KVM_EXIT_TPR_ACCESS, "TPR_ACCESS"),
    (KVM_EXIT_NMI, "NMI"),
    (KVM_EXIT_INTERNAL_ERROR, "INTERNAL_ERROR"),
    (KVM_EXIT_SYSTEM_EVENT, "SYSTEM_EVENT"),
    (KVM_EXIT_IOAPIC_EOI, "IOAPIC_EOI"),
    (KVM_EXIT_HYPERV, "HYPERV"),
    (KVM_EXIT_XEN, "XEN"),
    (KVM_EXIT_X86_RDMSR, "X86_RDMSR"),
    (KVM_EXIT_X86_WRMSR, "X86_WRMSR"),
    (KVM_EXIT_DIRTY_RING_FULL, "DIRTY_RING_FULL"),
    (KVM_EXIT_X86_BUS_LOCK, "X86_BUS_LOCK"),
    (KVM_EXIT_MEMORY_FAULT, "MEMORY_FAULT"),
];

/// `,"exit":{…}` from the kvm_run at this address.
///
/// # Errors
///
/// The writer's.
pub fn write_exit(out: &mut dyn Write, run: u64) -> fmt::Result {
    let at = |offset: usize| Arg(run).offset(offset);
    let word = |offset: usize| at(offset).read::<u32>().unwrap_or(0);
    let long = |offset: usize| at(offset).read::<u64>().unwrap_or(0);
    let byte = |offset: usize| at(offset).read::<u8>().unwrap_or(0);
    let reason = word(offset_of!(kvm_run, exit_reason));
    out.write_str(",\"exit\":{\"reason\":")?;
    match REASONS.iter().find(|(number, _)| *number == reason) {
        Some((_, name)) => write!(out, "\"{name}\"")?,
        None => write!(out, "{reason}")?,
    }
    // The union of exit details; its members are at its start.
    let details = offset_of!(kvm_run, __bindgen_anon_1);
    match reason {
        KVM_EXIT_IO => {
            let (size, port) = (byte(details + 1), word(details) >> 16);
            let (count, data) = (word(details + 4), long(details + 8));
            let is_out = byte(details) == KVM_EXIT_IO_OUT as u8;
            let direction = if is_out { "out" } else { "in" };
            write!(
                out,
                ",\"direction\":\"{direction}\",\"port\":\"{port:#x}\",\"size\":{size},\"count\":{count}"
            )?;
            let len = usize::from(size).saturating_mul(count as usize);
            if is_out && data < PAGE_SIZE as u64 * 16 {
                write_data(out, at(data as usize), len)?;
            }
        }
        KVM_EXIT_MMIO => {
            let (len, is_write) = (word(details + 16), byte(details + 20) != 0);
            write!(
                out,
                ",\"gpa\":\"{:#x}\",\"len\":{len},\"is_write\":{is_write}",
                long(details)
            )?;
            if is_write {
                write_data(out, at(details + 8), (len as usize).min(8))?;
            }
        }
        KVM_EXIT_X86_RDMSR | KVM_EXIT_X86_WRMSR => {
            let (index, data) = (word(details + 12), long(details + 16));
            write!(out, ",\"msr\":\"{index:#x}\",\"data\":\"{data:#x}\"")?;
        }
        KVM_EXIT_DEBUG => {
            let (exception, pc) = (word(details), long(details + 8));
            let dr6 = long(details + 16);
            write!(
                out,
                ",\"exception\":{exception},\"pc\":\"{pc:#x}\",\"dr6\":\"{dr6:#x}\""
            )?;
        }
        KVM_EXIT_INTERNAL_ERROR => write!(out, ",\"suberror\":{}", word(details))?,
        KVM_EXIT_TPR_ACCESS => {
            let (rip, is_write) = (long(details), word(details + 8) != 0);
            write!(out, ",\"rip\":\"{rip:#x}\",\"is_write\":{is_write}")?;
        }
        KVM_EXIT_HYPERV => match word(details) {
            KVM_EXIT_HYPERV_HCALL => {
                let (input, first) = (long(details + 8), long(details + 24));
                write!(
                    out,
                    ",\"type\":\"HCALL\",\"input\":\"{input:#x}\",\"params\":\"{first:#x}\""
                )?;
            }
            kind => {
                let (name, msr) = match kind {
                    KVM_EXIT_HYPERV_SYNIC => ("SYNIC", word(details + 8)),
                    _ => ("SYNDBG", word(details + 8)),
                };
                write!(out, ",\"type\":\"{name}\",\"msr\":\"{msr:#x}\"")?;
            }
        },
        KVM_EXIT_SYSTEM_EVENT => write!(out, ",\"type\":{}", word(details))?,
        KVM_EXIT_IOAPIC_EOI => write!(out, ",\"vector\":{}", byte(details))?,
        KVM_EXIT_MEMORY_FAULT => {
            let (flags, gpa, size) = (long(details), long(details + 8), long(details + 16));
            write!(
                out,
                ",\"flags\":{flags},\"gpa\":\"{gpa:#x}\",\"size\":{size}"
            )?;
        }
        KVM_EXIT_HYPERCALL => write!(out, ",\"nr\":\"{:#x}\"", long(details))?,
        _ => {}
    }
    out.write_char('}')
}

fn write_data(out: &mut dyn Write, at: Arg, len: usize) -> fmt::Result {
    out.write_str(",\"data\":\"")?;
    for i in 0..len.min(super::MOST) {
        write!(out, "{:02x}", at.offset(i).read::<u8>().unwrap_or(0))?;
    }
    out.write_char('"')
}
