//! [`Stats`]: counters of a vCPU's translator.

use crate::ir::cause::Cause;

/// Counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks translated.
    pub blocks: u64,
    /// Instructions in them.
    pub insns: u64,
    /// Bytes of code made.
    pub bytes: u64,
    /// Nanoseconds that this took.
    pub translate_ns: u64,
    /// Blocks translated again because they are executed much.
    pub hot: u64,
    /// Per-site entries that blocks have got: see `hot`.
    pub site_entries: u64,
    /// Those that had too many misses.
    pub site_entries_dropped: u64,
    /// Misses of per-site entries, as far as Rust was told.
    pub site_entry_misses: u64,
    /// Loops within such blocks that have always made as many turns.
    pub loops_known: u64,
    /// Branches of traces to other functions, and back.
    pub inlined: u64,
    /// Times everything was dropped.
    pub flushes: u64,
    /// Entries into translated code.
    pub entries: u64,
    /// Branches whose target was not in the table.
    pub branches: u64,
    /// Direct branches linked.
    pub links: u64,
    /// Targets that direct branches to other pages have remembered.
    pub cross_page_links: u64,
    /// Entries to blocks whose guest code had changed.
    pub stale: u64,
    /// Instructions left to the interpreter.
    pub interpreted: u64,
    /// Of these, by [`Cause`].
    pub causes: [u64; Cause::NAMES.len()],
}

impl Stats {
    /// A block has been translated.
    pub(crate) const fn count_block(&mut self, site_entries: usize, insns: usize, bytes: usize) {
        self.blocks += 1;
        self.site_entries += site_entries as u64;
        self.insns += insns as u64;
        self.bytes += bytes as u64;
    }
}
