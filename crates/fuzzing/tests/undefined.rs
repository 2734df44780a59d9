//! Compares the table of undefined flags with the decoder's, and `docs/undefined.md` with the table.

use fuzzing::{FLAGS, Family, Mode, When, forms};
use iced_x86::{Instruction, RflagsBits};
use x86_defs::rflags;

#[test]
fn the_page_is_in_sync_with_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/undefined.md");
    let page = fuzzing::undefined_page();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == page,
        "docs/undefined.md is stale: UPDATE_EXPECT=1 cargo test -p fuzzing --test undefined"
    );
}

/// The decoder's own table does not know of counts. Flags that are always undefined in one table are so in the other.
#[test]
fn the_table_agrees_with_the_decoders() {
    let bits = [
        (RflagsBits::OF, rflags::OF),
        (RflagsBits::SF, rflags::SF),
        (RflagsBits::ZF, rflags::ZF),
        (RflagsBits::AF, rflags::AF),
        (RflagsBits::CF, rflags::CF),
        (RflagsBits::PF, rflags::PF),
    ];
    let mut wrong = Vec::new();
    let mut codes = forms(Family::Integer, Mode::Bits64);
    codes.extend(forms(Family::Integer, Mode::Bits32));
    for code in codes {
        let mut i = Instruction::default();
        i.set_code(code);
        let theirs = bits
            .iter()
            .filter(|b| i.rflags_undefined() & b.0 != 0)
            .fold(0, |all, b| all | b.1);
        let of = |always: bool| {
            FLAGS
                .iter()
                .filter(|r| r.mnemonics.contains(&code.mnemonic()))
                .filter(|r| !always || r.when == When::Always)
                .fold(0, |all, r| all | r.flags)
        };
        if of(true) & !theirs != 0 || theirs & !of(false) != 0 {
            wrong.push(format!(
                "{code:?}: decoder {theirs:#x}, table {:#x}",
                of(false)
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
