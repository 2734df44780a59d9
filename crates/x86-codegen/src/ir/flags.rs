//! Which arithmetic flags an instruction overwrites.

use iced_x86::{Instruction, Mnemonic, OpKind};
/// The six arithmetic flags.
pub(crate) use x86_native::DECODED_ARITH as ALL;

/// Returns the flags that the instruction always sets. Undefined flags are among them where processors set them; others
/// keep their value, after a multiplication for example.
pub fn overwritten(i: &Instruction) -> u32 {
    let set = (i.rflags_written() | i.rflags_cleared() | i.rflags_set()) & ALL;
    let m = i.mnemonic();
    if !is_shift(m) {
        return match m {
            // These leave AF undefined.
            Mnemonic::And | Mnemonic::Or | Mnemonic::Xor | Mnemonic::Test => ALL,
            _ => set,
        };
    }
    let last = i.op_count() - 1;
    let is_zero = i.op_kind(last) != OpKind::Immediate8 || i.immediate8() & 31 == 0;
    match m {
        // A count of zero, which CL may be, changes no flag.
        _ if is_zero => 0,
        // These leave AF undefined, and OF for other counts than one.
        Mnemonic::Shl | Mnemonic::Sal | Mnemonic::Shr | Mnemonic::Sar => ALL,
        _ => set,
    }
}

/// Returns true for instructions whose count decides which flags they set.
pub(crate) fn is_shift(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Shl | M::Sal | M::Shr | M::Sar | M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shld | M::Shrd
    )
}
