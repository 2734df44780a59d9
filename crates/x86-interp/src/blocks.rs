//! The block cache: decoded runs of instructions.
//!
//! A block is keyed by the page that its code is on ([`x86_cpu::CodePage`]), the offset there, and the code size. It
//! never leaves its page, except that an instruction which straddles two pages is a block of its own. A block is valid
//! while its pages have the generation at which it was decoded. This is checked at each entry and after each of its
//! stores, usually by one comparison: no generation at all has changed.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use iced_x86::FlowControl;
use x86_cpu::{CodePage, CodeSize, Exception, GuestBus};

use crate::{
    Exec, Insn, Selector, Stop,
    decode::{self, Incomplete, MAX_LEN},
};

/// Largest number of instructions in a block, which bounds the time between two polls.
const MAX_INSNS: usize = 64;
/// Number of instructions (48 bytes each) at which the whole cache is dropped.
const CAPACITY: usize = 1 << 19;
/// Entries of the jump cache.
const JUMPS: usize = 1 << 13;

const PAGE_MASK: u64 = 0xfff;

/// A decoded run of instructions.
#[derive(Clone, Copy, Debug)]
struct DecodedBlock {
    page: CodePage,
    /// Second page of an instruction that straddles two pages.
    second: Option<CodePage>,
    start: u32,
    len: u32,
    bytes: u32,
}

impl DecodedBlock {
    fn entry(&self, block: u32) -> Entry {
        Entry {
            block,
            start: self.start,
            len: self.len,
            bytes: self.bytes,
        }
    }
}

/// Jump cache entry: the block that was found at a linear address.
#[derive(Clone, Copy, Debug)]
struct Jump {
    linear: u64,
    /// The [`GuestBus::fetch_epoch`] for which the page is known.
    epoch: u64,
    /// The [`GuestBus::code_changes`] for which the block is known to be valid.
    changes: u64,
    size: CodeSize,
    entry: Entry,
}

/// A block that may be executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Number of the [`DecodedBlock`], which may have been replaced meanwhile.
    block: u32,
    start: u32,
    len: u32,
    /// Length of the code in bytes.
    pub(crate) bytes: u32,
}

const EMPTY: Jump = Jump {
    linear: u64::MAX,
    epoch: u64::MAX,
    changes: 0,
    size: CodeSize::Bits16,
    entry: Entry {
        block: u32::MAX,
        start: 0,
        len: 0,
        bytes: 0,
    },
};

/// A multiplicative hash for keys that are addresses.
#[derive(Debug, Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(b.into());
        }
    }
    fn write_u8(&mut self, v: u8) {
        self.write_u64(v.into());
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0.rotate_left(5) ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

/// Decoded code of one vCPU.
#[derive(Debug)]
pub(crate) struct DecodedBlocks<B> {
    insns: Vec<Insn<B>>,
    blocks: Vec<DecodedBlock>,
    index: HashMap<(u64, u8), u32, BuildHasherDefault<Fold>>,
    /// Jump cache: entries for blocks, then entries for single instructions. Empty before the first use, because a VM
    /// may have a thousand vCPUs that do nothing.
    jumps: Box<[Jump]>,
    /// Blocks of one instruction are being searched for.
    single: bool,
    /// Number of times that the native stubs of instructions were dropped.
    pub(crate) resets: u64,
}

impl<B: GuestBus> DecodedBlocks<B> {
    pub(crate) fn new() -> Self {
        Self {
            insns: Vec::new(),
            blocks: Vec::new(),
            index: HashMap::default(),
            jumps: Box::default(),
            single: false,
            resets: 0,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.insns.clear();
        self.blocks.clear();
        self.index.clear();
        self.jumps.fill(EMPTY);
    }

    /// Returns the instructions of a block.
    #[inline(always)]
    pub(crate) fn insns(&self, e: &Entry) -> &[Insn<B>] {
        let start = e.start as usize;
        self.insns
            .get(start..start.wrapping_add(e.len as usize))
            .unwrap_or(&[])
    }

    /// Returns the block at RIP, which is decoded if it is not cached.
    #[inline(always)]
    pub(crate) fn find(&mut self, ex: &mut Exec<'_, B>) -> Result<Entry, Stop> {
        let linear = ex.code_linear(ex.cpu.rip());
        let epoch = ex.bus.fetch_epoch();
        let changes = ex.bus.code_changes();
        let slot = (linear ^ linear >> 13) as usize & (JUMPS - 1);
        if let Some(j) = self.jumps.get(slot)
            && j.linear == linear
            && j.epoch == epoch
            && j.changes == changes
            && j.size == ex.cpu.code_size
        {
            return Ok(j.entry);
        }
        self.find_known(ex, linear, slot)
    }

    /// Like [`Self::find`], for when code has changed somewhere or the jump cache has no entry.
    #[inline(never)]
    fn find_known(
        &mut self,
        ex: &mut Exec<'_, B>,
        linear: u64,
        slot: usize,
    ) -> Result<Entry, Stop> {
        let changes = ex.bus.code_changes();
        if let Some(j) = self.jumps.get_mut(slot)
            && j.linear == linear
            && j.epoch == ex.bus.fetch_epoch()
            && j.size == ex.cpu.code_size
            && let Some(b) = self.blocks.get(j.entry.block as usize)
            && b.start == j.entry.start
            && is_current(ex.bus, b)
        {
            j.changes = changes;
            return Ok(j.entry);
        }
        self.find_slow(ex, linear, slot)
    }

    /// Like [`Self::find`], but decodes only the first instruction of the block.
    pub(crate) fn find_single(&mut self, ex: &mut Exec<'_, B>) -> Result<Entry, Stop> {
        self.single = true;
        let linear = ex.code_linear(ex.cpu.rip());
        let slot = JUMPS + ((linear ^ linear >> 13) as usize & (JUMPS - 1));
        if let Some(j) = self.jumps.get(slot)
            && j.linear == linear
            && j.epoch == ex.bus.fetch_epoch()
            && j.changes == ex.bus.code_changes()
            && j.size == ex.cpu.code_size
        {
            self.single = false;
            return Ok(j.entry);
        }
        let result = self.find_known(ex, linear, slot);
        self.single = false;
        result
    }

    /// True if no byte of the block's code was written since it was decoded.
    #[inline(never)]
    pub(crate) fn is_current(&self, bus: &mut B, e: &Entry) -> bool {
        self.blocks
            .get(e.block as usize)
            .is_some_and(|b| b.start == e.start && is_current(bus, b))
    }

    fn find_slow(&mut self, ex: &mut Exec<'_, B>, linear: u64, slot: usize) -> Result<Entry, Stop> {
        // Read before any generation, so that a change in between is noticed.
        let changes = ex.bus.code_changes();
        ex.check_fetch(ex.cpu.rip(), 1)?;
        let page = ex.bus.code_page(ex.cpu, linear)?;
        let key = (
            page.id | linear & PAGE_MASK,
            ex.cpu.code_size as u8 | u8::from(self.single) << 7,
        );
        let known = self.index.get(&key).copied();
        let valid = match known.and_then(|n| self.blocks.get(n as usize)) {
            Some(b) if b.page == page => match b.second {
                None => true,
                // The second page may be mapped elsewhere, or not at all, by now.
                Some(second) => ex.bus.code_page(ex.cpu, next_page(linear))? == second,
            },
            _ => false,
        };
        let number = match known {
            Some(n) if valid => n,
            _ => {
                if self.insns.len() >= CAPACITY {
                    self.clear();
                }
                let mut block = self.decode(ex, linear, page)?;
                if ex.native.take_reset() {
                    self.clear();
                    self.resets += 1;
                    block = self.decode(ex, linear, page)?;
                }
                self.insert(key, block)
            }
        };
        let entry = self
            .blocks
            .get(number as usize)
            .map(|b| b.entry(number))
            .ok_or(Stop::Exception(Exception::UD))?;
        // Fetching may have filled a TLB, so the epoch is read after it.
        if self.jumps.is_empty() {
            self.jumps = vec![EMPTY; 2 * JUMPS].into_boxed_slice();
        }
        if let Some(j) = self.jumps.get_mut(slot) {
            *j = Jump {
                linear,
                epoch: ex.bus.fetch_epoch(),
                changes,
                size: ex.cpu.code_size,
                entry,
            };
        }
        Ok(entry)
    }

    /// Stores a block, replacing an outdated one with the same key.
    fn insert(&mut self, key: (u64, u8), block: DecodedBlock) -> u32 {
        if let Some(&n) = self.index.get(&key)
            && let Some(old) = self.blocks.get_mut(n as usize)
        {
            *old = block;
            return n;
        }
        let n = self.blocks.len() as u32;
        self.blocks.push(block);
        self.index.insert(key, n);
        n
    }

    /// Decodes from `linear` up to a control transfer, the page's end, or an instruction that cannot be fetched or
    /// decoded, which gets a block of its own.
    fn decode(
        &mut self,
        ex: &mut Exec<'_, B>,
        linear: u64,
        page: CodePage,
    ) -> Result<DecodedBlock, Stop> {
        let start = self.insns.len();
        let mut block = DecodedBlock {
            page,
            second: None,
            start: start as u32,
            len: 0,
            bytes: 0,
        };
        let mut at = linear;
        while self.insns.len() - start < MAX_INSNS && (at ^ linear) & !PAGE_MASK == 0 {
            let mut bytes = [0; MAX_LEN];
            let first = at == linear;
            let have = match ex.bus.peek_code(ex.cpu, at, &mut bytes) {
                Ok(n) => n.min(MAX_LEN),
                Err(fault) if first => return Err(fault.into()),
                Err(_) => break,
            };
            let decoded = match decode_one(ex, bytes.get(..have).unwrap_or(&bytes)) {
                Err(Incomplete::NeedsMore) if first => {
                    let next = next_page(linear);
                    ex.bus
                        .code_bytes(ex.cpu, at, bytes.get_mut(..have).unwrap_or(&mut []))?;
                    block.second = Some(ex.bus.code_page(ex.cpu, next)?);
                    let rest = bytes.get_mut(have..).unwrap_or(&mut []);
                    ex.bus.code_bytes(ex.cpu, next, rest)?;
                    decode_one(ex, &bytes)
                }
                other => other,
            };
            let (insn, ends) = match decoded {
                Ok(done) => done,
                // Longer than 15 bytes: #GP(0), raised when the instruction is reached.
                Err(_) if first => return Err(Exception::GP0.into()),
                Err(_) => break,
            };
            if block.second.is_none() {
                // The instruction's own bytes are tracked as code, and no others.
                let len = usize::from(insn.len);
                let mut tracked = [0; MAX_LEN];
                let tracked = tracked.get_mut(..len).unwrap_or(&mut []);
                match ex.bus.code_bytes(ex.cpu, at, tracked) {
                    Ok(_) => {}
                    Err(fault) if first => return Err(fault.into()),
                    Err(_) => break,
                }
                if bytes.get(..len) != Some(tracked) {
                    // Another vCPU has written it meanwhile.
                    continue;
                }
            }
            at = at.wrapping_add(insn.len.into());
            block.bytes += u32::from(insn.len);
            self.insns.push(insn);
            if ends || self.single || block.second.is_some() {
                break;
            }
        }
        block.len = (self.insns.len() - start) as u32;
        Ok(block)
    }
}

/// Returns the instruction, and whether it always leaves its block.
fn decode_one<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    bytes: &[u8],
) -> Result<(Insn<B>, bool), Incomplete> {
    let mut selector = Selector {
        native: ex.native,
        bytes: &[],
        features: &ex.cpu.features,
        code_size: ex.cpu.code_size,
    };
    let insn = decode::decode::<B>(bytes, &mut selector)?;
    let ends = !matches!(
        insn.code.flow_control(),
        FlowControl::Next | FlowControl::ConditionalBranch
    );
    Ok((insn, ends))
}

fn next_page(linear: u64) -> u64 {
    (linear | PAGE_MASK).wrapping_add(1)
}

/// True if no byte of the block's code was written since it was decoded.
fn is_current<B: GuestBus>(bus: &mut B, b: &DecodedBlock) -> bool {
    bus.code_generation(b.page.id) == b.page.generation
        && match b.second {
            None => true,
            Some(p) => bus.code_generation(p.id) == p.generation,
        }
}
