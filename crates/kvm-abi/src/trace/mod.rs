//! KVM calls as JSON, for `anykvm trace`: names, arguments before a call and results after it.
//!
//! Everything is written into the caller's buffer and nothing is allocated, because the caller may be a signal handler
//! of the VMM's. The structures may be anykvm's or a kernel's. They are read as [`crate::ioctl`] reads them, so a bad
//! pointer is `null` in the trace.

mod exit;
mod shapes;

use std::fmt::{self, Write};

use crate::dispatch::{FdKind, name_of};
use crate::user_memory::Arg;
use shapes::{Field, Shape, shape_of};

pub use exit::write_exit;

/// Largest number of list elements, or of bytes of one field, that a line shows.
const MOST: usize = 128;

/// When an argument is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Before the call: the VMM's input.
    Before,
    /// After the call: the result.
    After,
}

/// `"kind":"vcpu","ioctl":"KVM_RUN"`.
///
/// # Errors
///
/// The writer's.
pub fn write_call(out: &mut dyn Write, kind: FdKind, number: u32) -> fmt::Result {
    let kind_name = match kind {
        FdKind::System => "system",
        FdKind::Vm => "vm",
        FdKind::Vcpu => "vcpu",
        FdKind::Device => "device",
    };
    write!(out, "\"kind\":\"{kind_name}\",\"ioctl\":")?;
    match name_of(kind, number) {
        Some(name) => write!(out, "\"{name}\""),
        None => write!(out, "\"{number:#x}\""),
    }
}

/// `,"in":…` or `,"out":…`; nothing for a call that has none.
///
/// # Errors
///
/// The writer's.
pub fn write_argument(out: &mut dyn Write, number: u32, argument: u64, when: When) -> fmt::Result {
    let shape = shape_of(number);
    let (writes, reads) = (number >> 30 & 1 != 0, number >> 31 != 0);
    let wanted = match (&shape, when) {
        (Shape::Nothing, _) | (Shape::Number, When::After) => false,
        (Shape::Number, When::Before) => true,
        // KVM's direction bits are not always right, so arguments with both are shown twice.
        (_, When::Before) => writes || shapes::is_input(number),
        (_, When::After) => reads && !shapes::is_input(number),
    };
    if !wanted {
        return Ok(());
    }
    let label = if when == When::Before { "in" } else { "out" };
    write!(out, ",\"{label}\":")?;
    let arg = Arg(argument);
    match shape {
        Shape::Nothing => Ok(()),
        Shape::Number => write!(out, "{argument}"),
        Shape::Word => match arg.read::<u64>() {
            Ok(word) => write!(out, "\"{word:#x}\""),
            Err(_) => out.write_str("null"),
        },
        Shape::Struct(fields) => {
            out.write_char('{')?;
            write_fields(out, arg, fields)?;
            out.write_char('}')
        }
        Shape::List {
            at,
            size,
            entry,
            only_count,
        } => {
            let Ok(count) = arg.read::<u32>() else {
                return out.write_str("null");
            };
            write!(out, "{{\"count\":{count}")?;
            // Before a call that fills it, the list has no input.
            if !(only_count && when == When::Before) {
                out.write_str(",\"entries\":[")?;
                for i in 0..(count as usize).min(MOST) {
                    out.write_str(if i == 0 { "{" } else { ",{" })?;
                    write_fields(out, arg.offset(at + i * size), entry)?;
                    out.write_char('}')?;
                }
                out.write_char(']')?;
            }
            out.write_char('}')
        }
    }
}

fn write_fields(out: &mut dyn Write, at: Arg, fields: &[Field]) -> fmt::Result {
    for (i, field) in fields.iter().enumerate() {
        if i != 0 {
            out.write_char(',')?;
        }
        write!(out, "\"{}\":", field.name)?;
        write_field(out, at.offset(field.offset), field)?;
    }
    Ok(())
}

/// Writes small integers as numbers, and 64-bit ones as hexadecimal strings, which no JSON reader rounds.
fn write_field(out: &mut dyn Write, at: Arg, field: &Field) -> fmt::Result {
    let value = match field.size {
        1 => at.read::<u8>().map(u64::from),
        2 => at
            .read::<u8>()
            .and_then(|low| Ok(u64::from(low) | u64::from(at.offset(1).read::<u8>()?) << 8)),
        4 => at.read::<u32>().map(u64::from),
        8 => at.read::<u64>(),
        size => return write_bytes(out, at, size, field.fields),
    };
    match value {
        Ok(value) if field.size == 8 => write!(out, "\"{value:#x}\""),
        Ok(value) => write!(out, "{value}"),
        Err(_) => out.write_str("null"),
    }
}

/// Writes a nested structure, or bytes in hexadecimal without the zeros at their end.
fn write_bytes(out: &mut dyn Write, at: Arg, size: usize, fields: &[Field]) -> fmt::Result {
    if !fields.is_empty() {
        out.write_char('{')?;
        write_fields(out, at, fields)?;
        return out.write_char('}');
    }
    let mut bytes = [0u8; MOST];
    let shown = size.min(MOST);
    for (i, byte) in bytes.iter_mut().take(shown).enumerate() {
        match at.offset(i).read::<u8>() {
            Ok(value) => *byte = value,
            Err(_) => return out.write_str("null"),
        }
    }
    let used = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1);
    out.write_char('"')?;
    for byte in bytes.iter().take(used) {
        write!(out, "{byte:02x}")?;
    }
    out.write_char('"')
}

#[cfg(test)]
mod tests;
