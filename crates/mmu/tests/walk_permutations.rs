//! Every combination of entry bits, control bits and kinds of access, against a
//! plain restatement of SDM vol. 3, 4.6 and 4.7.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::nonminimal_bool, reason = "the manual's own wording")]

mod machine;

use machine::Machine;
use mmu::{Kept, Miss, Policy};
use x86_cpu::{Access, Exception, Feature, Flush, Privilege};
use x86_defs::{
    control::{cr0, cr4, efer},
    paging::{A, D, NX, P, PS, RW, US},
    rflags, vector,
};

/// The manual, in the order in which it says things.
struct Manual<'a> {
    cpu: &'a x86_cpu::CpuState,
    /// (entry, reserved bits, level) from the root to the leaf.
    entries: &'a [(u64, u64)],
    access: Access,
    who: Privilege,
}

impl Manual<'_> {
    fn expected(&self) -> Result<(), u16> {
        let cpu = self.cpu;
        let user_access = cpu.cpl == 3 && self.who == Privilege::Current;
        let write = self.access == Access::Write;
        let fetch = self.access == Access::Fetch;
        let nxe = cpu.cr4 & cr4::PAE != 0 && cpu.efer & efer::NXE != 0;
        let mut code = 0;
        code |= if write { 2 } else { 0 };
        code |= if user_access { 4 } else { 0 };
        code |= if fetch && (nxe || cpu.cr4 & cr4::SMEP != 0) {
            16
        } else {
            0
        };
        for (entry, reserved) in self.entries {
            if entry & P == 0 {
                return Err(code);
            }
            if entry & reserved != 0 {
                return Err(code | 9);
            }
        }
        let all = |bit: u64| self.entries.iter().all(|(e, _)| e & bit != 0);
        let user_page = all(US);
        let writable = all(RW);
        let xd = nxe && self.entries.iter().any(|(e, _)| e & NX != 0);
        let wp = cpu.cr0 & cr0::WP != 0;
        let mut allowed = if user_access {
            user_page && (!write || writable) && !(fetch && xd)
        } else if fetch {
            !xd && !(user_page && cpu.cr4 & cr4::SMEP != 0)
        } else {
            let smap = cpu.cr4 & cr4::SMAP != 0
                && !(cpu.rflags & rflags::AC != 0 && self.who == Privilege::Current);
            !(user_page && smap) && (!write || writable || !wp)
        };
        let leaf = self.entries.last().unwrap().0;
        let key = leaf >> 59 & 15;
        if cpu.efer & efer::LMA != 0 && !fetch {
            let (on, register) = if user_page {
                (cpu.cr4 & cr4::PKE != 0, cpu.pkru)
            } else {
                (cpu.cr4 & cr4::PKS != 0 && !user_access, cpu.pkrs)
            };
            let ad = register >> (2 * key) & 1 != 0;
            let wd = register >> (2 * key + 1) & 1 != 0;
            if on && (ad || write && wd && (user_access || wp)) {
                allowed = false;
                code |= 32;
            }
        }
        if allowed { Ok(()) } else { Err(code | 1) }
    }
}

#[derive(Clone, Copy)]
enum Tables {
    Bits32,
    Pae,
    Level4,
    Level5,
}

struct Shape {
    tables: Tables,
    /// Level of the leaf.
    leaf: usize,
    /// Level of the one other entry whose bits are varied.
    upper: usize,
}

const GVA: u64 = 0x40_4060_4000 & 0xffff_ffff | 0x80_0000_0000;

/// gpa of the entry of each level for `gva`; tables are at fixed places.
fn entry_gpa(tables: Tables, level: usize, gva: u64) -> u64 {
    let table = 0x1000 * level as u64;
    match tables {
        Tables::Bits32 => table + (gva >> (12 + 10 * (level - 1)) & 1023) * 4,
        _ => table + (gva >> (12 + 9 * (level - 1)) & 511) * 8,
    }
}

fn reserved(shape: &Shape, level: usize, nxe: bool) -> u64 {
    let is_leaf = level == shape.leaf;
    match shape.tables {
        // MAXPHYADDR is 40: PSE-36 leaves use all of bits 20:13.
        Tables::Bits32 if is_leaf && level == 2 => 1 << 21,
        Tables::Bits32 => 0,
        _ => {
            let mut r = 0x000f_ff00_0000_0000;
            if !nxe {
                r |= NX;
            }
            if matches!(shape.tables, Tables::Pae) {
                r |= 0x7ff0_0000_0000_0000;
            }
            if is_leaf && level == 2 {
                r |= 0x001f_e000;
            }
            if is_leaf && level == 3 {
                r |= 0x3fff_e000;
            }
            if level >= 4 {
                r |= PS;
            }
            r
        }
    }
}

fn check(shape: &Shape) -> u64 {
    check_with(shape, Policy::Tdp, usize::MAX)
}

/// `policy`: of roots that are kept over loads of CR3 nothing may be kept that has changed. `pages`: the budget for
/// what is kept.
fn check_with(shape: &Shape, policy: Policy, pages: usize) -> u64 {
    let mut m = Machine::new();
    let (top, size) = match shape.tables {
        Tables::Bits32 | Tables::Pae => (
            2,
            if matches!(shape.tables, Tables::Pae) {
                8
            } else {
                4
            },
        ),
        Tables::Level4 => (4, 8),
        Tables::Level5 => (5, 8),
    };
    let long = top > 2;
    let gva = if long { GVA } else { GVA & 0xffff_ffff };
    m.cpu.cr0 |= cr0::PG;
    m.cpu.cr3 = 0x1000 * top as u64;
    m.cpu.cr4 |= cr4::PSE;
    if size == 8 {
        m.cpu.cr4 |= cr4::PAE;
    }
    if long {
        m.cpu.efer |= efer::LMA | efer::LME;
    }
    if matches!(shape.tables, Tables::Level5) {
        m.cpu.cr4 |= cr4::LA57;
    }
    m.cpu.pdpte = [0x2001; 4];
    let key = if long { 5u64 << 59 } else { 0 };
    // One reserved bit to set where there is one.
    let rsvd_bit = |level: usize| match shape.tables {
        Tables::Bits32 if level == 2 && shape.leaf == 2 => 1 << 21,
        Tables::Bits32 => 0,
        _ => 1 << 45,
    };
    m.mmu.set_policy(&m.cpu, policy);
    m.mmu.set_budget(&m.cpu, pages);
    let mut cases = 0;
    let bits = |i: u32, all: [u64; 5]| {
        all.iter()
            .enumerate()
            .filter(|(n, _)| i >> n & 1 != 0)
            .fold(0, |v, (_, b)| v | b)
    };
    let nx = if size == 8 { NX } else { 0 };
    for control in 0..128u32 {
        let on = |n: u32, bit: u64| if control >> n & 1 != 0 { bit } else { 0 };
        m.cpu.cr0 = m.cpu.cr0 & !cr0::WP | on(0, cr0::WP);
        let changing = cr4::SMEP | cr4::SMAP | cr4::PKE | cr4::PKS;
        m.cpu.cr4 = m.cpu.cr4 & !changing
            | on(1, cr4::SMEP)
            | on(2, cr4::SMAP)
            | on(3, cr4::PKE | cr4::PKS);
        m.cpu.efer = m.cpu.efer & !efer::NXE | on(4, efer::NXE);
        m.cpu.rflags = m.cpu.rflags & !rflags::AC | on(5, rflags::AC);
        m.cpu.cpl = if control >> 6 & 1 != 0 { 3 } else { 0 };
        let nxe = m.cpu.efer & efer::NXE != 0;
        for key_bits in 0..if control >> 3 & 1 != 0 && long { 3 } else { 1 } {
            m.cpu.pkru = key_bits << 10;
            m.cpu.pkrs = ((3 - key_bits) % 3) << 10;
            m.reload();
            assert!(m.mmu.kept().pages <= pages.max(Kept::LEAST_PAGES));
            for i in 0..32 * 32 {
                let mut entries = Vec::new();
                for level in (shape.leaf..=top).rev() {
                    let below = if level == shape.leaf {
                        // Large pages at 2 MiB, or at 0 for a gigabyte.
                        (if level == 3 { 0 } else { 0x0080_0000 }) | key
                    } else {
                        0x1000 * (level as u64 - 1)
                    };
                    let variable = if level == shape.leaf {
                        let ps = if level > 1 { PS } else { 0 };
                        ps | bits(i & 31, [P, RW, US, nx, rsvd_bit(level)])
                    } else if level == shape.upper {
                        bits(i >> 5 & 31, [P, RW, US, nx, rsvd_bit(level)])
                    } else {
                        P | RW | US
                    };
                    entries.push((level, below | variable));
                }
                let with_reserved: Vec<_> = entries
                    .iter()
                    .map(|(l, e)| (*e, reserved(shape, *l, nxe)))
                    .collect();
                for access in [Access::Read, Access::Write, Access::Fetch] {
                    for who in [Privilege::Current, Privilege::System] {
                        for (level, entry) in &entries {
                            m.poke(entry_gpa(shape.tables, *level, gva), size, *entry);
                        }
                        match policy {
                            Policy::Tdp => m.mmu.flush(&m.cpu, Flush::All),
                            _ => m.mmu.load_cr3(&mut m.cpu, true).unwrap(),
                        }
                        m.cpu.fault_gva = 0;
                        let got = m.mmu.probe(&mut m.cpu, gva, 1, access, who);
                        let manual = Manual {
                            cpu: &m.cpu,
                            entries: &with_reserved,
                            access,
                            who,
                        };
                        let expected = manual.expected();
                        let expected_miss = expected.map_err(|code| {
                            Miss::Exception(Exception::with_code(vector::PF, code))
                        });
                        assert_eq!(
                            got, expected_miss,
                            "{entries:x?} {access:?} {who:?} control {control:07b} keys {key_bits}"
                        );
                        if got.is_err() {
                            assert_eq!(m.cpu.fault_gva, gva);
                        }
                        for (level, entry) in &entries {
                            let mut after = *entry;
                            if got.is_ok() {
                                after |= A;
                                if *level == shape.leaf && access == Access::Write {
                                    after |= D;
                                }
                            }
                            let at = entry_gpa(shape.tables, *level, gva);
                            assert_eq!(m.peek(at, size), after, "level {level} {access:?}");
                        }
                        cases += 1;
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn four_levels() {
    for (leaf, upper) in [(1, 2), (1, 4), (2, 3), (2, 4), (3, 4)] {
        check(&Shape {
            tables: Tables::Level4,
            leaf,
            upper,
        });
    }
}

/// The same where a root keeps its translations over loads of CR3 and compares them with the tables; and where two
/// tables have to do for all views.
#[test]
fn four_levels_of_kept_roots() {
    let (all, least) = (usize::MAX, 64);
    let ways = [
        (Policy::Shadow, all),
        (Policy::Auto, all),
        (Policy::Tdp, least),
        (Policy::Shadow, least),
    ];
    for (policy, pages) in ways {
        for (leaf, upper) in [(1, 2), (2, 4)] {
            let shape = Shape {
                tables: Tables::Level4,
                leaf,
                upper,
            };
            check_with(&shape, policy, pages);
        }
    }
}

#[test]
fn five_levels() {
    for (leaf, upper) in [(1, 5), (3, 5)] {
        check(&Shape {
            tables: Tables::Level5,
            leaf,
            upper,
        });
    }
}

#[test]
fn pae() {
    for (leaf, upper) in [(1, 2), (2, 0)] {
        check(&Shape {
            tables: Tables::Pae,
            leaf,
            upper,
        });
    }
}

#[test]
fn thirty_two_bits() {
    for (leaf, upper) in [(1, 2), (2, 0)] {
        check(&Shape {
            tables: Tables::Bits32,
            leaf,
            upper,
        });
    }
}

/// Each reserved bit by itself, in each place.
#[test]
fn single_reserved_bits() {
    let mut m = Machine::long_mode(0x4000);
    for (leaf, pdpe1gb, amd) in [
        (1, true, false),
        (2, true, false),
        (3, true, true),
        (3, false, false),
    ] {
        m.cpu.features.set(Feature::Pdpe1gb, pdpe1gb);
        m.cpu.features.set(Feature::Amd, amd);
        m.reload();
        for level in leaf..=4usize {
            for bit in 1..63 {
                let mut bad = false;
                for l in leaf..=4usize {
                    let ps = if l == leaf && l > 1 { PS } else { 0 };
                    let next = if l == leaf {
                        0
                    } else {
                        0x1000 * (l as u64 - 1)
                    };
                    let mut entry = next | ps | P | RW | US;
                    if l == level && (bit >= 12 || bit == 7 || bit == 8) {
                        // Not a table address that leads elsewhere.
                        if bit < 24 && l != leaf && bit >= 12 {
                            continue;
                        }
                        entry |= 1 << bit;
                        bad |= (40..52).contains(&bit);
                        bad |= l == leaf && l == 2 && (13..21).contains(&bit);
                        bad |= l == leaf && l == 3 && (13..30).contains(&bit);
                        bad |= l == 4 && bit == 7;
                        bad |= amd && l >= 4 && bit == 8;
                        bad |= amd && l == 3 && bit == 8 && l != leaf;
                        if bit == 7 && l != leaf && l < 4 {
                            entry &= !(1 << 7);
                        }
                        if l != leaf && (24..40).contains(&bit) {
                            entry &= !(1 << bit);
                        }
                        if bit == 7 && l == 1 {
                            entry &= !(1 << 7);
                        }
                    }
                    bad |= leaf == 3 && !pdpe1gb;
                    m.poke(entry_gpa(Tables::Level4, l, GVA), 8, entry);
                }
                m.mmu.flush(&m.cpu, Flush::All);
                let got = m
                    .mmu
                    .probe(&mut m.cpu, GVA, 1, Access::Read, Privilege::Current);
                let expected = if bad {
                    Err(Miss::Exception(Exception::with_code(vector::PF, 9)))
                } else {
                    Ok(())
                };
                assert_eq!(got, expected, "leaf {leaf} level {level} bit {bit}");
            }
        }
    }
}

/// Where each page size leads.
#[test]
fn addresses() {
    let mut m = Machine::long_mode(0x4000);
    let gpa = |m: &mut Machine, gva: u64| {
        let t = m
            .mmu
            .translate(&mut m.cpu, gva, Access::Read, Privilege::Current);
        assert_eq!(m.mmu.translate_debug(&m.cpu, gva), Some(t.unwrap().gpa));
        t.unwrap().gpa
    };
    for (level, next) in [(4, 0x3000), (3, 0x2000), (2, 0x1000), (1, 0x7_6543_2000)] {
        m.poke(entry_gpa(Tables::Level4, level, GVA), 8, next | P | RW | US);
    }
    assert_eq!(gpa(&mut m, GVA + 0x123), 0x7_6543_2123);
    m.poke(entry_gpa(Tables::Level4, 2, GVA), 8, 0x7_6540_0000 | PS | P);
    m.mmu.flush(&m.cpu, Flush::All);
    assert_eq!(gpa(&mut m, GVA + 0x123), 0x7_6540_0123 + (GVA & 0x1f_ffff));
    m.poke(entry_gpa(Tables::Level4, 3, GVA), 8, 0x7_4000_0000 | PS | P);
    m.mmu.flush(&m.cpu, Flush::All);
    assert_eq!(
        gpa(&mut m, GVA + 0x123),
        0x7_4000_0123 + (GVA & 0x3fff_ffff)
    );

    // 32-bit paging: PSE-36 puts bits 39:32 into bits 20:13; without PSE, PS is ignored.
    let mut m = Machine::new();
    m.cpu.cr0 |= cr0::PG;
    m.cpu.cr3 = 0x2000;
    m.cpu.cr4 |= cr4::PSE;
    m.reload();
    let gva = 0x1234_5678;
    m.poke(
        entry_gpa(Tables::Bits32, 2, gva),
        4,
        0x8040_0000 | 0xab << 13 | PS | P,
    );
    assert_eq!(
        gpa(&mut m, gva),
        0xab_8074_5678 & !0x3f_ffff | gva & 0x3f_ffff
    );
    m.cpu.cr4 &= !cr4::PSE;
    m.reload();
    m.poke(entry_gpa(Tables::Bits32, 2, gva), 4, 0x1000 | PS | P);
    m.poke(entry_gpa(Tables::Bits32, 1, gva), 4, 0x8888_8000 | P);
    assert_eq!(gpa(&mut m, gva), 0x8888_8678);
    // No paging.
    m.cpu.cr0 &= !cr0::PG;
    m.reload();
    assert_eq!(gpa(&mut m, gva), gva);
}

/// A table that is not in RAM counts as not present; in ROM its A bits stay clear.
#[test]
fn tables_outside_ram() {
    let mut m = Machine::long_mode(0xff_0000_0000);
    let got = m
        .mmu
        .probe(&mut m.cpu, GVA, 1, Access::Write, Privilege::Current);
    let not_present = Miss::Exception(Exception::with_code(vector::PF, 2));
    assert_eq!(got, Err(not_present));
    let rom = 1 << 30;
    m.memory
        .set_slot(machine::slot(1, rom, 0x1_0000, m.ram.as_ptr() as u64, 2))
        .unwrap();
    m.mmu.sync();
    for (level, next) in [
        (4, rom + 0x3000),
        (3, rom + 0x2000),
        (2, rom + 0x1000),
        (1, 0x5000),
    ] {
        m.poke(entry_gpa(Tables::Level4, level, GVA), 8, next | P | RW | US);
    }
    m.cpu.cr3 = rom + 0x4000;
    m.reload();
    m.mmu
        .write(&mut m.cpu, GVA, 77u8, Privilege::Current)
        .unwrap();
    assert_eq!(m.peek(0x5000, 1), 77);
    assert_eq!(m.peek(entry_gpa(Tables::Level4, 1, GVA), 8) & (A | D), 0);
}

/// PDPTEs are checked when they are loaded, not when they are used.
#[test]
fn pdptes() {
    let mut m = Machine::new();
    m.cpu.cr0 |= cr0::PG;
    m.cpu.cr4 |= cr4::PAE;
    m.cpu.cr3 = 0x3020;
    m.poke(0x3020, 8, 0x2001);
    m.poke(0x3028, 8, 0xffff_ffff_ffff_fffe);
    assert_eq!(m.mmu.load_root(&mut m.cpu), Ok(()));
    assert_eq!(m.cpu.pdpte[..2], [0x2001, 0xffff_ffff_ffff_fffe]);
    let got = m
        .mmu
        .probe(&mut m.cpu, 0x4000_0000, 1, Access::Read, Privilege::Current);
    assert_eq!(
        got,
        Err(Miss::Exception(Exception::with_code(vector::PF, 0)))
    );
    for bad in [1 << 1, 1 << 2, 1 << 5, 1 << 8, 1 << 40, 1 << 63] {
        m.poke(0x3030, 8, 1 | bad);
        assert_eq!(m.mmu.load_root(&mut m.cpu), Err(Exception::GP0), "{bad:#x}");
        assert_eq!(m.cpu.pdpte[2], 0);
    }
    m.cpu.cr3 = 0xf000_0000;
    assert_eq!(m.mmu.load_root(&mut m.cpu), Err(Exception::GP0));
}
