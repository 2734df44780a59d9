//! Code that is executed at several addresses: it is the same bytes, and what they say about their own
//! address is another thing at each.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use long_mode::{Machine, PML4, start};

const CODE: u64 = 0x1000;
/// Addresses to call: zero ends them.
const LIST: u64 = 0x5000;
const SHARED: u64 = 0x6000;
/// A page table for 2 MiB from [`WINDOW`] on, and the directory that has it from [`HIGH`] on, too.
const TABLE: u64 = 0xa000;
const DIRECTORY: u64 = 0xc000;
const WINDOW: u64 = 0x20_0000;
const HIGH: u64 = 0xc000_0000;

/// Where the shared page is executed, each followed by data of its own and code of its own.
const ALIASES: [(u64, u64, u64); 4] = [
    (WINDOW, 0x7000, 0xd000),
    (WINDOW + 0x1_0000, 0x8000, 0xe000),
    (HIGH, 0x7000, 0xd000),
    (HIGH + 0x1_0000, 0x8000, 0xe000),
];
const VALUES: [u64; 2] = [1 << 40, 1 << 44];
const ADDED: [i32; 2] = [3, 1000];

/// Offsets in the shared page.
const INNER: u32 = 0x100;
const POINTED: u32 = 0x200;

/// Bytes with an operand relative to RIP at the end, which is `target` from the page's start.
fn relative(code: &mut Vec<u8>, opcode: &[u8], target: u32, immediate: &[u8]) {
    code.extend(opcode);
    let end = code.len() + 4 + immediate.len();
    code.extend(target.wrapping_sub(end as u32).to_le_bytes());
    code.extend(immediate);
}

/// The shared page; what it adds to RBX for itself, and the return addresses that it adds.
fn shared(own: i32) -> (Vec<u8>, [u64; 2]) {
    let mut c = Vec::new();
    relative(&mut c, &[0x48, 0x03, 0x1d], 0x1000, &[]); // add rbx, [value]
    relative(&mut c, &[0x48, 0x8d, 0x0d], 0, &[]); // lea rcx, [self]
    c.extend([0x48, 0x01, 0xcb]); // add rbx, rcx
    c.extend([0x48, 0x81, 0xc3]); // add rbx, own
    c.extend(own.to_le_bytes());
    relative(&mut c, &[0xe8], INNER, &[]);
    let first = c.len() as u64;
    relative(&mut c, &[0xff, 0x15], 0x1008, &[]); // call [pointer]
    let second = c.len() as u64;
    relative(&mut c, &[0xe8], 0x2000, &[]);
    relative(&mut c, &[0x48, 0x83, 0x05], 0x1010, &[1]); // add qword [count], 1
    c.push(0xc3);
    for at in [INNER, POINTED] {
        c.resize(at as usize, 0xcc);
        c.extend([0x48, 0x03, 0x1c, 0x24, 0xc3]); // add rbx, [rsp]; ret
    }
    (c, [first, second])
}

/// RFLAGS as a kernel has them, and with NT: translated code of kernels is another one than all other.
const FLAGS: [u64; 2] = [2, 0x4002];

/// About to execute [`CODE`].
fn begin(vcpu: &VcpuFd, flags: u64) {
    start(vcpu, CODE);
    let mut regs = vcpu.get_regs().unwrap();
    regs.rflags = flags;
    vcpu.set_regs(&regs).unwrap();
}

fn calls(m: &Machine, vcpu: &mut VcpuFd, flags: u64, aliases: &[usize]) -> u64 {
    let mut list: Vec<u64> = aliases.iter().map(|n| ALIASES[*n].0).collect();
    list.push(0);
    let list: Vec<u8> = list.iter().flat_map(|a| a.to_le_bytes()).collect();
    m.write(LIST, &list);
    begin(vcpu, flags);
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => vcpu.get_regs().unwrap().rbx,
        other => panic!("{other:?}"),
    }
}

#[test]
fn code_knows_where_it_is() {
    let m = Machine::new();
    let entries = [
        (PML4 + 0x1000 + 3 * 8, DIRECTORY + 3),
        (DIRECTORY, TABLE + 3),
        (PML4 + 0x2008, TABLE + 3),
    ];
    for (at, entry) in entries {
        m.write(at, &entry.to_le_bytes());
    }
    for (n, (alias, data, code)) in ALIASES[..2].iter().enumerate() {
        let pages = [SHARED, *data, *code].map(|page| (page + 3).to_le_bytes());
        m.write(TABLE + (alias - WINDOW) / 0x1000 * 8, &pages.concat());
        m.write(*data, &VALUES[n].to_le_bytes());
        // The one goes to the other's.
        let pointer = ALIASES[1 - n].0 + u64::from(POINTED);
        m.write(data + 8, &pointer.to_le_bytes());
        let mut add = vec![0x48, 0x81, 0xc3]; // add rbx, imm32; ret
        add.extend(ADDED[n].to_le_bytes());
        add.push(0xc3);
        m.write(*code, &add);
    }
    m.load(CODE, |a| {
        let (mut next, mut over) = (a.create_label(), a.create_label());
        a.mov(esi, LIST as u32)?;
        a.set_label(&mut next)?;
        a.mov(rax, qword_ptr(rsi))?;
        a.test(rax, rax)?;
        a.jz(over)?;
        a.add(rsi, 8)?;
        a.call(rax)?;
        a.jmp(next)?;
        a.set_label(&mut over)?;
        a.hlt()
    });
    let mut vcpu = m.vcpu(0, CODE);
    let mut counts = [0; 2];
    for (round, own) in [5, 7, 11, 13, 17, 19, 23, 29].into_iter().enumerate() {
        // Other code, and another address that comes first.
        let (code, [first, second]) = shared(own);
        m.write(SHARED, &code);
        let mut order: Vec<usize> = (0..4).collect();
        order.rotate_left(round % 4);
        let list: Vec<usize> = order.iter().copied().cycle().take(60).collect();
        let one = |n: usize| {
            let returns = 2 * ALIASES[n].0 + first + second;
            VALUES[n % 2] + ALIASES[n].0 + own as u64 + returns + ADDED[n % 2] as u64
        };
        let wanted = list.iter().map(|n| one(*n)).sum::<u64>();
        let flags = FLAGS[round % 2];
        assert_eq!(calls(&m, &mut vcpu, flags, &list), wanted, "round {round}");
        list.iter().for_each(|n| counts[n % 2] += 1);
        for n in 0..2 {
            let count: [u8; 8] = m.read(ALIASES[n].1 + 0x10);
            assert_eq!(u64::from_le_bytes(count), counts[n], "round {round}");
        }
    }
}

/// A branch that has led to a page goes where it leads to now.
#[test]
fn branches_follow_the_mapping() {
    const TURNS: u32 = 300;
    /// The second address space, and its page table.
    const OTHER: u64 = PML4 + 0x1_0000;
    const OTHER_TABLE: u64 = 0xb000;
    /// What pages add to RBX that take turns in the first, and what that of the second does.
    const PAGES: [(u64, i32); 3] = [(0x7000, 1), (0x8000, 1 << 10), (0x9000, 1 << 20)];
    for (page, flags) in [WINDOW, HIGH]
        .into_iter()
        .zip(FLAGS)
        .chain([(HIGH, FLAGS[0]), (WINDOW, FLAGS[1])])
    {
        let m = Machine::new();
        let spaces = [
            (PML4, DIRECTORY, TABLE),
            (OTHER, OTHER + 0x3000, OTHER_TABLE),
        ];
        for (n, (root, directory, table)) in spaces.into_iter().enumerate() {
            let entries = [
                (root, root + 0x1003),
                (root + 0x1000, root + 0x2003),
                (root + 0x2000, 0x83),
                (root + 0x1018, directory + 3),
                (directory, table + 3),
                (root + 0x2008, table + 3),
                (table, SHARED + 3),
                (table + 8, PAGES[2 * n].0 + 3),
            ];
            for (at, entry) in entries {
                m.write(at, &u64::to_le_bytes(entry));
            }
        }
        let mut code = Vec::new();
        relative(&mut code, &[0xe8], 0x1000, &[]);
        code.push(0xc3);
        m.write(SHARED, &code);
        for (page, value) in PAGES {
            let mut add = vec![0x48, 0x81, 0xc3]; // add rbx, imm32; ret
            add.extend(value.to_le_bytes());
            add.push(0xc3);
            m.write(page, &add);
        }
        m.load(CODE, |a| {
            let mut turn = a.create_label();
            a.mov(r8d, TURNS)?;
            a.mov(r9, OTHER)?;
            a.mov(r10, PML4)?;
            a.set_label(&mut turn)?;
            a.call(rdi)?;
            a.call(rdi)?;
            a.xor(dword_ptr(TABLE + 8), 0x7000 ^ 0x8000)?;
            a.invlpg(byte_ptr(rdi + 0x1000))?;
            a.call(rdi)?;
            a.mov(cr3, r9)?;
            a.call(rdi)?;
            a.call(rdi)?;
            a.mov(cr3, r10)?;
            a.call(rdi)?;
            a.dec(r8d)?;
            a.jne(turn)?;
            a.hlt()
        });
        let mut vcpu = m.vcpu(0, CODE);
        begin(&vcpu, flags);
        let mut regs = vcpu.get_regs().unwrap();
        regs.rdi = page;
        vcpu.set_regs(&regs).unwrap();
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
        // In each turn two calls lead to the one, then two to the other, which is the one of the next turn.
        let wanted = u64::from(TURNS) * PAGES.map(|p| 2 * p.1 as u64).iter().sum::<u64>();
        assert_eq!(
            vcpu.get_regs().unwrap().rbx,
            wanted,
            "{page:#x}, {flags:#x}"
        );
    }
}
