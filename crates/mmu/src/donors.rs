//! Which context gives its tables to one that needs some.

use crate::{Mmu, context::Context, tables::Tables, view::View};

/// Number of contexts that are remembered as having been current last.
const LAST: usize = 8;
/// One in this many contexts that need tables gets those of a context that has not been current for long.
const PATIENCE: u32 = 64;
/// Number of contexts among which the oldest gives way. (If the very oldest of all did, more contexts taking turns than
/// there is room for would never find theirs.)
const SAMPLE: usize = 8;
/// Number of times that contexts whose address space is gone are looked for before that is done seldom.
const FEW_LOOKS: u32 = 64;

/// What is known of contexts that may give their tables.
#[derive(Debug, Default)]
pub(crate) struct Donors {
    /// Number of times that a context has got another's tables.
    taken: u32,
    /// Number of times that a context whose address space is gone was looked for, since one was found.
    looks_for_gone: u32,
    /// The context that was looked at last for that.
    gone_hand: usize,
    /// Contexts with tables that no load led to in the last period.
    idle: Vec<usize>,
    /// Number of times that tables are taken until the period ends.
    left: usize,
}

impl Mmu {
    /// Returns a context that has not been current for long, among those for which `f` is true.
    pub(crate) fn long_unused(&mut self, f: impl Fn(&Context) -> bool) -> usize {
        let n = self.contexts.len();
        let first = self.hand;
        let mut found: Option<usize> = None;
        let mut seen = 0;
        for i in (first..n).chain(0..first.min(n)) {
            let context = &self.contexts[i];
            if i == self.current || !f(context) {
                continue;
            }
            let use_of = |n: usize| (self.switch_epochs.is_used(n), self.contexts[n].used);
            if found.is_none_or(|found| use_of(i) < use_of(found)) {
                found = Some(i);
            }
            seen += 1;
            self.hand = i + 1;
            if seen == SAMPLE {
                break;
            }
        }
        found.unwrap_or(0)
    }

    pub(crate) fn free_tables(&mut self, views: &[(View, usize)]) {
        for (_, tables) in views {
            self.views[*tables].flush();
            self.views[*tables].taken = false;
        }
    }

    /// Returns the context that gives its tables to one that needs some, if no tables are free. Where more contexts take
    /// turns than have tables, a context that was current just now will be current again last, and its tables are in the
    /// processor's caches. (Not the very last contexts: a process may have two roots.)
    fn donor(&mut self) -> Option<usize> {
        self.donors.taken += 1;
        let has_tables = |n: &&usize| **n != self.current && !self.contexts[**n].views.is_empty();
        let mut last = self.last.iter().skip(2);
        let found = match last.find(has_tables) {
            Some(last) if !self.donors.taken.is_multiple_of(PATIENCE) => *last,
            _ => self.long_unused(|c| !c.views.is_empty()),
        };
        (found != self.current && !self.contexts[found].views.is_empty()).then_some(found)
    }

    /// Returns a context with tables that no load has led to for at least as many times that tables were taken as there are
    /// contexts: one of processes that sleep, while others take turns.
    fn idle_context(&mut self) -> Option<usize> {
        if self.donors.left == 0 {
            self.donors.left = self.contexts.len();
            self.donors.idle.clear();
            for n in 0..self.contexts.len() {
                let is_used = self.switch_epochs.take_used(n);
                if !is_used && !self.contexts[n].views.is_empty() {
                    self.donors.idle.push(n);
                }
            }
        }
        self.donors.left -= 1;
        while let Some(n) = self.donors.idle.pop() {
            let context = self.contexts.get(n);
            let has_tables = context.is_some_and(|c| !c.views.is_empty());
            if has_tables && n != self.current && !self.switch_epochs.is_used(n) {
                return Some(n);
            }
        }
        None
    }

    /// Notes that the context is now the one that was current last.
    pub(crate) fn note_last(&mut self, context: usize) {
        if self.last.first() == Some(&context) {
            return;
        }
        if let Some(place) = self.last.iter().position(|n| *n == context) {
            self.last[..=place].rotate_right(1);
        } else {
            self.last.truncate(LAST - 1);
            self.last.insert(0, context);
        }
    }

    /// Returns tables that belong to nobody. `None`: the current context's are all that there may be.
    pub(crate) fn new_tables(&mut self) -> Option<usize> {
        let free = self.views.iter().position(|t| !t.taken);
        if free.is_some() {
            return free;
        }
        if let Some(gone) = self.gone_context() {
            return self.take_tables(gone);
        }
        if core::mem::take(&mut self.contexts[self.current].gave_tables) {
            self.enough_tables += 1;
        }
        let has_room = self.views.len() < self.budget.tables;
        let other = if has_room && self.views.len() < self.enough_tables {
            None
        } else if let Some(idle) = self.idle_context() {
            Some(idle)
        } else if !has_room {
            Some(self.donor()?)
        } else {
            let oldest = self.long_unused(|c| !c.views.is_empty());
            let is_other = oldest != self.current && !self.contexts[oldest].views.is_empty();
            is_other.then_some(oldest)
        };
        let Some(other) = other else {
            let l1 = self.growth.small_tables();
            self.views.push(Tables::new(l1));
            return Some(self.views.len() - 1);
        };
        self.contexts[other].gave_tables = has_room;
        self.take_tables(other)
    }

    /// Takes all tables of a context. Returns some of them.
    fn take_tables(&mut self, from: usize) -> Option<usize> {
        self.forget_switches_to(from);
        let context = &mut self.contexts[from];
        context.recent = [None; 4];
        let views = core::mem::take(&mut context.views);
        self.free_tables(&views);
        views.first().map(|(_, tables)| *tables)
    }

    /// Returns a context with tables whose address space the guest has taken down: one of the next two, but seldom looks
    /// if there was none for long.
    fn gone_context(&mut self) -> Option<usize> {
        self.donors.looks_for_gone += 1;
        let n = self.contexts.len();
        if self.donors.looks_for_gone > FEW_LOOKS
            && !self.donors.looks_for_gone.is_multiple_of(SAMPLE as u32)
        {
            return None;
        }
        let mut left = 2;
        for _ in 0..n {
            self.donors.gone_hand = (self.donors.gone_hand + 1) % n;
            let context = &self.contexts[self.donors.gone_hand];
            if self.donors.gone_hand == self.current || context.views.is_empty() {
                continue;
            }
            // The entries of others may be in memory that is not there any more.
            let is_known = context.left >= self.flushes.everything;
            if let Some(derived) = context.derived.as_ref().filter(|_| is_known)
                && derived.is_gone()
            {
                self.donors.looks_for_gone = 0;
                return Some(self.donors.gone_hand);
            }
            left -= 1;
            if left == 0 {
                break;
            }
        }
        None
    }

    /// Returns the tables of the current context's view that was selected least recently: not `kept`, and not one of the
    /// two in use if there is another.
    pub(crate) fn take_own_tables(&mut self, kept: Option<usize>) -> usize {
        let views = &self.contexts[self.current].views;
        let by_use = |(_, (_, t)): &(usize, &(View, usize))| {
            (*t == self.live || *t == self.system, self.views[*t].used)
        };
        let others = views
            .iter()
            .enumerate()
            .filter(|(_, (_, t))| Some(*t) != kept);
        let victim = others.min_by_key(by_use).map_or(0, |(i, _)| i);
        let (_, tables) = self.contexts[self.current].views.swap_remove(victim);
        self.views[tables].flush();
        tables
    }
}
