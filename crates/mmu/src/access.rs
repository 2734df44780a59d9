//! Reads, writes and exchanges at linear addresses.

use std::ops::Range;

use x86_cpu::{Access, CpuState, Privilege, Word};
use x86_defs::paging::PAGE_SIZE;

use crate::{Miss, Mmu, fault::Resolved, l1::Half};

/// The two parts of an access that crosses a page.
struct Split {
    first: Resolved,
    second: Resolved,
    /// Number of bytes in the first page.
    head: usize,
}

impl Mmu {
    /// Returns the index of the tables of `who`'s view.
    #[inline(always)]
    pub(crate) fn tables_for(&self, who: Privilege) -> usize {
        match who {
            Privilege::Current => self.live,
            Privilege::System => self.system,
        }
    }

    /// Reads a word, if L1 has its page: the common case, small enough to be inlined.
    #[inline(always)]
    pub fn read_hit<T: Word>(&self, gva: u64, who: Privilege) -> Option<T> {
        let (host, offset) = self.views[self.tables_for(who)].l1.probe(Half::Read, gva);
        host.load(offset, T::SIZE).map(T::from_u128)
    }

    /// Writes a word, if L1 has its page. Returns false, and has written nothing, if not.
    #[inline(always)]
    pub fn write_hit<T: Word>(&self, gva: u64, value: T, who: Privilege) -> bool {
        let (host, offset) = self.views[self.tables_for(who)].l1.probe(Half::Write, gva);
        host.store(offset, T::SIZE, value.to_u128()).is_some()
    }

    /// Reads a word.
    ///
    /// # Errors
    /// [`Miss`]; nothing was read.
    #[inline(always)]
    pub fn read<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
    ) -> Result<T, Miss> {
        if let Some(v) = self.read_hit(gva, who) {
            return Ok(v);
        }
        self.read_slow(cpu, gva, who)
    }

    #[inline(never)]
    fn read_slow<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
    ) -> Result<T, Miss> {
        let offset = gva % PAGE_SIZE;
        if offset + T::SIZE as u64 <= PAGE_SIZE {
            let page = self.resolve(cpu, gva, Access::Read, who)?;
            let v = page.host.load(offset, T::SIZE).unwrap_or_default();
            return Ok(T::from_u128(v));
        }
        let mut bytes = [0; 16];
        let bytes = &mut bytes[..T::SIZE];
        self.read_bytes(cpu, gva, bytes, who)?;
        Ok(T::from_le(bytes))
    }

    /// Writes a word.
    ///
    /// # Errors
    /// [`Miss`]; nothing was written.
    #[inline(always)]
    pub fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Miss> {
        if self.write_hit(gva, value, who) {
            return Ok(());
        }
        self.write_slow(cpu, gva, value, who)
    }

    #[inline(never)]
    fn write_slow<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Miss> {
        let offset = gva % PAGE_SIZE;
        if offset + T::SIZE as u64 > PAGE_SIZE {
            return self.write_bytes(cpu, gva, &value.to_le()[..T::SIZE], who);
        }
        let page = self.resolve(cpu, gva, Access::Write, who)?;
        let _ = page.host.store(offset, T::SIZE, value.to_u128());
        self.written(&page, offset, T::SIZE as u64);
        Ok(())
    }

    /// Replaces a word by `f` of it and returns the old one; with `lock`
    /// atomically against other vCPUs (`f` may run more than once).
    ///
    /// # Errors
    /// [`Miss`]; nothing was written and `f` was not called.
    #[inline(always)]
    pub fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Miss> {
        let (host, offset) = self.views[self.tables_for(who)].l1.probe(Half::Write, gva);
        let split_lock = lock.then(|| self.memory.split_lock());
        let old = host.rmw(offset, T::SIZE, split_lock, |v| {
            f(T::from_u128(v)).to_u128()
        });
        if let Some(old) = old {
            return Ok(T::from_u128(old));
        }
        self.rmw_slow(cpu, gva, who, lock, &mut |v| f(T::from_u128(v)).to_u128())
    }

    #[inline(never)]
    fn rmw_slow<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        f: &mut dyn FnMut(u128) -> u128,
    ) -> Result<T, Miss> {
        let offset = gva % PAGE_SIZE;
        if offset + T::SIZE as u64 <= PAGE_SIZE {
            let page = self.resolve(cpu, gva, Access::Write, who)?;
            let split_lock = lock.then(|| self.memory.split_lock());
            let old = page.host.rmw(offset, T::SIZE, split_lock, f);
            self.written(&page, offset, T::SIZE as u64);
            return Ok(T::from_u128(old.unwrap_or_default()));
        }
        let split = self.resolve_split(cpu, gva, Access::Write, who)?;
        let memory = std::sync::Arc::clone(&self.memory);
        let _guard = lock.then(|| {
            let lock = memory.split_lock().lock();
            lock.unwrap_or_else(std::sync::PoisonError::into_inner)
        });
        let mut bytes = [0; 16];
        let (head, tail) = bytes[..T::SIZE].split_at_mut(split.head);
        split.first.host.read_bytes(offset, head);
        split.second.host.read_bytes(0, tail);
        let old = u128::from_le_bytes(bytes);
        let new = f(old).to_le_bytes();
        self.write_split(&split, offset, &new[..T::SIZE]);
        Ok(T::from_u128(old))
    }

    /// Resolves both pages of an access that crosses. Exceptions come first, in the order of addresses, then devices.
    fn resolve_split(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Split, Miss> {
        let first = self.resolve(cpu, gva, access, who);
        if let Err(e @ Miss::Exception(_)) = first {
            return Err(e);
        }
        let next = self.next_page(cpu, gva, who);
        let second = self.resolve(cpu, next, access, who);
        if let Err(e @ Miss::Exception(_)) = second {
            return Err(e);
        }
        Ok(Split {
            first: first?,
            second: second?,
            head: (PAGE_SIZE - gva % PAGE_SIZE) as usize,
        })
    }

    fn write_split(&self, split: &Split, offset: u64, bytes: &[u8]) {
        let (head, tail) = bytes.split_at(split.head);
        split.first.host.write_bytes(offset, head);
        split.second.host.write_bytes(0, tail);
        self.written(&split.first, offset, head.len() as u64);
        self.written(&split.second, 0, tail.len() as u64);
    }

    /// Reads any number of bytes.
    ///
    /// # Errors
    /// [`Miss`]; `buf` may have been filled in part.
    pub fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Miss> {
        let offset = gva % PAGE_SIZE;
        let room = (PAGE_SIZE - offset) as usize;
        if buf.len() <= room {
            let host = self.views[self.tables_for(who)].l1.find(Half::Read, gva);
            if host.is_some_and(|h| h.read_bytes(offset, buf)) {
                return Ok(());
            }
            let page = self.resolve(cpu, gva, Access::Read, who)?;
            page.host.read_bytes(offset, buf);
            return Ok(());
        }
        if buf.len() - room <= PAGE_SIZE as usize {
            let split = self.resolve_split(cpu, gva, Access::Read, who)?;
            let (head, tail) = buf.split_at_mut(room);
            split.first.host.read_bytes(offset, head);
            split.second.host.read_bytes(0, tail);
            return Ok(());
        }
        let len = buf.len();
        self.each_page(cpu, gva, len, Access::Read, who, |_, page, offset, part| {
            page.host.read_bytes(offset, &mut buf[part]);
        })
    }

    /// Resolves the pages of an access in address order; `f` gets each with the
    /// offset in it and the part of the access that it has.
    fn each_page(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: usize,
        access: Access,
        who: Privilege,
        mut f: impl FnMut(&Self, &Resolved, u64, Range<usize>),
    ) -> Result<(), Miss> {
        let mut at = gva;
        let mut done = 0;
        while done < len {
            let offset = at % PAGE_SIZE;
            let end = len.min(done + (PAGE_SIZE - offset) as usize);
            let page = self.resolve(cpu, at, access, who)?;
            f(self, &page, offset, done..end);
            at = self.next_page(cpu, at, who);
            done = end;
        }
        Ok(())
    }

    /// Writes any number of bytes, after all pages have been checked.
    ///
    /// # Errors
    /// [`Miss`]; nothing was written. (If an access of more than two pages loses
    /// a race with a change of the tables, part may have been.)
    pub fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Miss> {
        let offset = gva % PAGE_SIZE;
        let room = (PAGE_SIZE - offset) as usize;
        if buf.len() <= room {
            let host = self.views[self.tables_for(who)].l1.find(Half::Write, gva);
            if host.is_some_and(|h| h.write_bytes(offset, buf)) {
                return Ok(());
            }
            let page = self.resolve(cpu, gva, Access::Write, who)?;
            page.host.write_bytes(offset, buf);
            self.written(&page, offset, buf.len() as u64);
            return Ok(());
        }
        if buf.len() - room <= PAGE_SIZE as usize {
            let split = self.resolve_split(cpu, gva, Access::Write, who)?;
            self.write_split(&split, offset, buf);
            return Ok(());
        }
        let len = buf.len();
        self.each_page(cpu, gva, len, Access::Write, who, |_, _, _, _| {})?;
        self.each_page(
            cpu,
            gva,
            len,
            Access::Write,
            who,
            |mmu, page, offset, part| {
                page.host.write_bytes(offset, &buf[part.clone()]);
                mmu.written(page, offset, part.len() as u64);
            },
        )
    }

    /// Checks that an access would raise no exception, setting A and D bits as
    /// it would. Device pages are fine.
    ///
    /// # Errors
    /// The exception, or [`Miss::Host`]. Never [`Miss::Device`].
    pub fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Miss> {
        if len == 0 {
            return Ok(());
        }
        let pages = (gva % PAGE_SIZE).saturating_add(len - 1) / PAGE_SIZE;
        let mut at = gva;
        let half = match access {
            Access::Read => Some(Half::Read),
            Access::Write => Some(Half::Write),
            Access::Fetch => None,
        };
        for _ in 0..=pages {
            let l1 = &self.views[self.tables_for(who)].l1;
            if half.is_none_or(|half| l1.find(half, at).is_none()) {
                self.translation(cpu, at, access, who)?;
            }
            at = self.next_page(cpu, at, who);
        }
        Ok(())
    }
}
