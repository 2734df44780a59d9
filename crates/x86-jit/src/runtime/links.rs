//! Links and unlinks direct branches.

use crate::{Jit, JitBus, code::cache::TranslatedBlock};

impl<B: JitBus> Jit<B> {
    /// Links the direct branch `number` to the outer entry at `to`, which it goes to while its condition is met.
    pub(crate) fn link_cross_page(&mut self, number: usize, to: usize) {
        let Some(site) = self.builder.translator.cross_page_sites.get_mut(number) else {
            return;
        };
        let from = core::mem::replace(&mut site.to, to);
        self.code.set_branch(site.jump, to);
        self.stats.cross_page_links += 1;
        let all = &mut self.code.cache.remembered;
        if from != to {
            if let Some(sites) = all.get_mut(&from) {
                sites.retain(|n| *n as usize != number);
            }
            all.entry(to).or_default().push(number as u32);
        }
    }

    /// Unlinks all branches of other pages from the outer entry at `code`, whose block is replaced: each execution of
    /// one would find the block outdated.
    pub(crate) fn forget(&mut self, code: usize) {
        for n in self.code.cache.remembered.remove(&code).unwrap_or_default() {
            if let Some(site) = self.builder.translator.cross_page_sites.get_mut(n as usize) {
                site.to = 0;
                let (at, never) = site.condition.never();
                self.code.set_operand(at, never);
            }
        }
    }

    /// Links link site `number` to a block, unless the block was emitted in place of the site's jump.
    pub(crate) fn link(&mut self, number: usize, to: TranslatedBlock) {
        let Some(site) = self.builder.translator.links.get(number) else {
            return;
        };
        let entry = to.entries.of(site);
        if site.patch == 0 || entry == 0 {
            return;
        }
        self.code.set_branch(site.patch, entry);
        self.stats.links += 1;
    }
}
