//! [`Stats`]: counters of a vCPU's translator.

use x86_codegen::ir::cause::Cause;

/// Counters of a vCPU's translator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks translated.
    pub blocks: u64,
    /// Instructions in these blocks.
    pub insns: u64,
    /// Bytes of host code in these blocks.
    pub bytes: u64,
    /// Nanoseconds that translation took.
    pub translate_ns: u64,
    /// Blocks that were to be translated again because they are hot.
    pub hot: u64,
    /// Per-site entries given to blocks: see `hot`.
    pub site_entries: u64,
    /// Per-site entries dropped because they missed too often.
    pub site_entries_dropped: u64,
    /// Misses of per-site entries, as far as Rust was told of them.
    pub site_entry_misses: u64,
    /// Loops within hot blocks that were found to make always the same number of iterations.
    pub loops_known: u64,
    /// Calls, returns and jumps that traces follow to their targets.
    pub inlined: u64,
    /// Times that all code was dropped.
    pub flushes: u64,
    /// Entries into translated code.
    pub entries: u64,
    /// Branches whose target was not in the target table.
    pub branches: u64,
    /// Direct branches linked.
    pub links: u64,
    /// Links of direct branches to other pages.
    pub cross_page_links: u64,
    /// Entries to blocks whose guest code had changed.
    pub stale: u64,
    /// Instructions left to the interpreter.
    pub interpreted: u64,
    /// Instructions left to the interpreter, by [`Cause`].
    pub causes: [u64; Cause::NAMES.len()],
}

impl Stats {
    /// Counts a translated block.
    pub(crate) const fn count_block(&mut self, site_entries: usize, insns: usize, bytes: usize) {
        self.blocks += 1;
        self.site_entries += site_entries as u64;
        self.insns += insns as u64;
        self.bytes += bytes as u64;
    }
}
