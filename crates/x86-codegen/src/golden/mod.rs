//! Golden code: the host code of guest instructions, instruction by instruction.
//!
//! Each file of `tests/codegen` is one kind of translation (see [`cases`]): guest code, the host code that is made of
//! it, its length and its number of instructions. All that translation depends on is an argument here, so the files are
//! the same on every machine. `UPDATE_EXPECT=1 cargo test -p x86-codegen golden` writes them anew, and a reviewer reads the
//! difference.

mod cases;
mod names;
mod segments;
mod traces;

use std::{fmt::Write as _, fs, path::PathBuf};

use iced_x86::{
    CpuidFeature, Decoder, DecoderOptions, Formatter, Instruction, IntelFormatter, SymbolResolver,
    SymbolResult, code_asm::CodeAssembler,
};
use testkit::FlatBus;
use x86_cpu::CpuState;
use x86_native::HostFeatures;

use crate::{
    asm::Isa,
    codegen::trampolines::AllTrampolines,
    codegen::{How, Translator},
    frame::page_guard::PageGuard,
    ir::decoded::Decoded,
    ir::hot::Hot,
    ir::lowering::{Forms, Lowering},
    ir::mode::Mode,
    ir::source::{Source, TracePage},
    ir::streams::Streams,
    plan::groups::Groups,
    region::block,
    region::trace::Tracer,
};
use cases::{Case, Trace};
use names::Names;

/// Addresses that the code buffer is taken to have, and what it refers to outside itself.
const CODE: u64 = 0x7f00_0000_0000;
const GENERATION: u64 = CODE + 0x2000_0000;
const REFILL: u64 = 0x5555_0000_1000;
const HANDLE: u64 = 0x5555_0000_2000;
/// Offsets of a block's two parts.
const HOT: usize = 0x1_0000;
const COLD: usize = 0x2_0000;
/// Addresses of the guest's code, and of what it calls in a trace.
const PAGE: u64 = 0x40_0000;
const CALLEE: u64 = PAGE + 0x5200;

/// Returns a host with all extensions that generated code uses, or with none beyond x86-64.
fn host(is_new: bool) -> (Isa, HostFeatures) {
    let all = CpuidFeature::values();
    let features = HostFeatures::of(all.filter(|f| is_new || !names::is_new(*f)));
    let isa = Isa {
        bmi1: is_new,
        bmi2: is_new,
        xsave: is_new,
        avx: is_new,
        rdtscp: is_new,
        xinuse: is_new,
    };
    (isa, features)
}

/// Shows names in place of addresses and of places in the frame.
struct Symbols(Names);

impl SymbolResolver for Symbols {
    fn symbol(
        &mut self,
        i: &Instruction,
        operand: u32,
        _: Option<u32>,
        address: u64,
        _: u32,
    ) -> Option<SymbolResult<'_>> {
        let name = self.0.of(i, operand, address)?;
        Some(SymbolResult::with_string(address, name))
    }
}

/// Appends the instructions of `code`, which is at offset `base` of the buffer, with labels in front of them. Returns
/// their number. Offsets are shown less `from`.
fn disassemble(out: &mut String, code: &[u8], base: usize, names: &Names, from: usize) -> usize {
    let mut formatter = IntelFormatter::with_options(Some(Box::new(Symbols(names.clone()))), None);
    let options = formatter.options_mut();
    options.set_hex_prefix("0x");
    options.set_hex_suffix("");
    options.set_uppercase_hex(false);
    options.set_branch_leading_zeros(false);
    let mut n = 0;
    let ip = CODE + base as u64;
    for i in &mut Decoder::with_ip(64, code, ip, DecoderOptions::NONE) {
        let offset = (i.ip() - CODE) as usize;
        for label in names.labels(offset) {
            let _ = writeln!(out, "{label}:");
        }
        assert!(!i.is_invalid(), "not an instruction at {offset:#x}");
        let mut text = String::new();
        formatter.format(&i, &mut text);
        let _ = writeln!(out, "  {:5x}  {text}", offset - from);
        n += 1;
    }
    n
}

fn trampolines(isa: Isa) -> (AllTrampolines, Vec<u8>) {
    let mut all = Vec::new();
    let trampolines = AllTrampolines::emit(isa, REFILL, HANDLE, |_, code| all.extend(code));
    (trampolines, all)
}

/// Decodes along a trace's path, to its end.
fn follow(
    trace: &Trace,
    mode: Mode,
    (cpu, bus): (&mut CpuState, &mut FlatBus),
    forms: &mut Forms,
    decoded: &mut Vec<Decoded>,
    pages: &mut Vec<TracePage>,
) {
    bus.map(CALLEE & !0xfff, 0x1000);
    let mut a = CodeAssembler::new(64).expect("a mode of the processor");
    (trace.callee)(&mut a).expect("guest code");
    bus.put(CALLEE, &a.assemble(CALLEE).expect("guest code"));
    let source = Source {
        page_guard: GENERATION + 4,
        generation: 0x22,
    };
    let mut tracer = Tracer {
        cpu,
        bus,
        forms,
        decoded,
        pages,
        find_page: |_: &mut CpuState, _: &mut FlatBus, gva: u64| {
            Some(TracePage {
                distance: 0,
                source,
                bound: mode.bound(gva),
                page_guard: PageGuard::new(3),
                id: gva,
            })
        },
        first_page: PAGE,
        mode,
        stops: &[],
    };
    assert!(tracer.decode(trace.path), "it is no trace");
}

/// Appends the operands of 64 bits that are behind the code, at an offset.
fn list(out: &mut String, literals: &[u8], at: usize) {
    let padding = literals.len() % 8;
    for (n, literal) in literals[padding..].chunks(8).enumerate() {
        let place = at + padding + 8 * n;
        let value = u64::from_le_bytes(literal.try_into().expect("eight bytes"));
        let _ = writeln!(out, "  {place:5x}  dq {value:#x}");
    }
}

/// Returns a case's guest code and its translation.
fn translated(case: &Case) -> String {
    let (isa, host) = host(!case.is_old_host);
    let all = trampolines(isa).0;
    let mut forms = Forms::new(host);
    let mut translator = Translator::new(isa, all, CODE);
    let long = case.mode.is_long();
    let mut a = CodeAssembler::new(case.mode.bits()).expect("a mode of the processor");
    (case.code)(&mut a).expect("guest code");
    let start = PAGE + u64::from(case.offset);
    let bytes = a.assemble(start).expect("guest code");
    let mut bus = FlatBus::new();
    bus.map(PAGE, 0x2000);
    bus.put(start, &bytes);
    for target in [0x200, 0x300] {
        // The targets of the cases' jumps are jumps to themselves.
        bus.put(PAGE + target, &[0xeb, 0xfe]);
    }
    let mut cpu = CpuState::default();
    for f in names::GUEST_FEATURES {
        cpu.features.set(*f, true);
    }
    let hot = case.is_hot.then(Hot::default);
    let source = Source {
        page_guard: GENERATION,
        generation: 0x11,
    };
    let bound = case.mode.bound(start);
    translator.input.pages = vec![TracePage::own(source, bound, PAGE)];
    let mut insns = Vec::new();
    if let Some(trace) = &case.trace {
        let pages = &mut translator.input.pages;
        follow(
            trace,
            case.mode,
            (&mut cpu, &mut bus),
            &mut forms,
            &mut insns,
            pages,
        );
    }
    let straddles = case.trace.is_none()
        && block::decode(
            &mut insns,
            &mut forms,
            (&mut cpu, &mut bus),
            start,
            (case.mode, case.is_hot, false),
            &[],
            hot.as_ref().map(|h| &h.turns[..]),
        );
    if case.mode.has_groups() {
        Groups::default().form(&mut insns, long, case.is_hot);
    }
    translator.input.hot = hot;
    let is_interpreted = insns.last().is_some_and(|d| d.kind == Lowering::Interpret);
    let entries = translator.block(
        (&insns, &forms),
        (HOT, COLD),
        &[source; 2][..1 + usize::from(straddles)],
        is_interpreted.into(),
        How {
            mode: case.mode,
            is_linked: case.is_linked,
            polls: false,
            is_split: case.mode.has(Mode::SPLIT),
            falls: false,
            bound,
            by_guard: case.mode.has_page_guards(),
            counts: case.mode.streams(),
        },
        |_, _, _| None,
    );
    let (executed, apart) = translator.asm.parts().expect("a block is short");
    let mut names = Names::new(all.of(case.mode.streams()));
    for (name, at) in [
        ("outer", entries.outer),
        ("polled", entries.polled),
        ("saved", entries.saved),
        ("inner", entries.inner),
    ] {
        if at != 0 {
            names.label(at as usize, name);
        }
    }
    let mut out = format!("== {}\n", case.name);
    for d in &insns {
        let mut text = String::new();
        IntelFormatter::new().format(&d.i, &mut text);
        let _ = writeln!(out, "; {:03x}  {text}", d.distance as u32 + d.offset);
    }
    let (apart, literals) = apart.split_at(translator.asm.instructions());
    for (what, code, base) in [("executed", executed, HOT), ("apart", apart, COLD)] {
        let mut text = String::new();
        let n = disassemble(&mut text, code, base, &names, HOT);
        let _ = writeln!(out, "-- {what}: {} bytes, {n} instructions", code.len());
        out += &text;
    }
    list(&mut out, literals, COLD - HOT + apart.len());
    out
}

/// Compares what was found with the file, or writes the file.
fn check(file: &str, found: &str) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/codegen");
    let path = folder.join(file);
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&path, found).expect("the file can be written");
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    let lines = expected.lines().chain([""]).zip(found.lines().chain([""]));
    if let Some((n, (e, f))) = lines.enumerate().find(|(_, (e, f))| e != f) {
        panic!(
            "{file}:{}: expected\n{e}\nfound\n{f}\n(UPDATE_EXPECT=1 writes the file anew)",
            n + 1
        );
    }
    assert_eq!(expected.len(), found.len(), "{file}");
}

#[test]
fn golden_blocks() {
    let others = [
        ("segments.txt", segments::SEGMENTS),
        ("traces.txt", traces::TRACES),
    ];
    for (file, cases) in cases::FILES.iter().chain(&others) {
        let blocks: Vec<_> = cases.iter().map(translated).collect();
        check(file, &blocks.join("\n"));
    }
}

/// Only some string instructions are in the file, as others differ in nothing but their sizes.
#[test]
fn golden_trampolines() {
    let (all, code) = trampolines(host(true).0);
    let trampolines = all.plain;
    let mut text = String::new();
    let [[_, second, ..], ..] = trampolines.strings;
    let shown = &code[..second[0]];
    let names = Names::new(&trampolines);
    let n = disassemble(&mut text, shown, 0, &names, 0);
    let end = all.of(Some(Streams::of(0, 0))).enter;
    let n = n + disassemble(
        &mut text,
        &code[trampolines.root..end],
        trampolines.root,
        &names,
        0,
    );
    let head = format!("-- {} bytes, {n} instructions\n", shown.len());
    check("trampolines.txt", &(head + &text));
}
