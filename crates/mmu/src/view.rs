//! [`View`]: the inputs of the permission check that are outside of the page tables (SDM vol. 3, 4.6).

use x86_cpu::{Access, CpuState, Privilege};
use x86_defs::{
    control::{cr0, cr4, efer},
    rflags,
};

/// Rights that all levels of the tables give to a page together, and its protection key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// R/W is set at every level.
    pub write: bool,
    /// U/S is set at every level: the page is a user page.
    pub user: bool,
    /// XD is set at some level and EFER.NXE enables it.
    pub no_execute: bool,
    /// Protection key.
    pub pkey: u8,
}

impl Rights {
    /// Rights of any page without paging: everything is allowed.
    pub const ALL: Self = Self {
        write: true,
        user: true,
        no_execute: false,
        pkey: 0,
    };

    /// Returns all that a data access depends on, as a number below 64.
    pub(crate) fn class(self) -> u64 {
        u64::from(self.write) | u64::from(self.user) << 1 | u64::from(self.pkey & 15) << 2
    }

    /// The inverse of [`Self::class`], as far as data accesses depend on it.
    fn of_class(class: u64) -> Self {
        Self {
            write: class & 1 != 0,
            user: class & 2 != 0,
            no_execute: false,
            pkey: (class >> 2) as u8,
        }
    }
}

/// An access that is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied {
    /// A protection key denies the access, whether or not the tables do, too.
    pub by_key: bool,
}

/// A setting of the permission inputs. Two settings that allow the same accesses are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    bits: u8,
    pkru: u32,
    pkrs: u32,
}

/// Assigns numbers to views, such that no two views have the same number. A view's number may change when too many
/// views are known.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    known: Vec<View>,
    /// Number of the first view in `known`.
    first: u64,
}

impl Numbers {
    /// Largest number of views that are remembered.
    const MAX: usize = 1024;

    pub(crate) fn of(&mut self, view: View) -> u64 {
        if let Some(n) = self.known.iter().position(|known| *known == view) {
            return self.first + n as u64;
        }
        if self.known.len() == Self::MAX {
            self.first += Self::MAX as u64;
            self.known.clear();
        }
        self.known.push(view);
        self.first + self.known.len() as u64 - 1
    }
}

/// A cached selection of tables, found by comparing registers: entries to the kernel, exits, and the kernel's accesses
/// to user memory alternate between a few views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recent {
    /// The registers that [`View::of`] depends on, besides those that the place in `Context::recent` encodes.
    pub registers: [u64; 4],
    pub live: usize,
    pub system: usize,
}

impl Recent {
    /// Returns the place in `Context::recent` and the registers to compare.
    #[inline(always)]
    pub(crate) fn key(cpu: &CpuState) -> (usize, [u64; 4]) {
        let ac = cpu.rflags & rflags::AC != 0;
        let place = usize::from(cpu.cpl == 3) << 1 | usize::from(ac);
        let keys = u64::from(cpu.pkru) | u64::from(cpu.pkrs) << 32;
        (
            place,
            [cpu.cr0 & (cr0::PG | cr0::WP), cpu.cr4, cpu.efer, keys],
        )
    }

    /// Compares word by word: a comparison of whole arrays would store them and load them back in other widths, which
    /// takes longer.
    #[inline(always)]
    pub(crate) fn is_of(&self, [cr0, cr4, efer, keys]: [u64; 4]) -> bool {
        let known = &self.registers;
        (known[0] ^ cr0) | (known[1] ^ cr4) | (known[2] ^ efer) | (known[3] ^ keys) == 0
    }
}

const USER: u8 = 1 << 0;
const WP: u8 = 1 << 1;
/// CR4.SMAP applies: supervisor data accesses to user pages are denied.
const SMAP: u8 = 1 << 2;
const SMEP: u8 = 1 << 3;
const PKE: u8 = 1 << 4;
const PKS: u8 = 1 << 5;
/// Distinguishes views only: page walks treat XD as the paging mode says.
const NXE: u8 = 1 << 6;
const PAGING: u8 = 1 << 7;

impl View {
    /// Returns the view of an access by `who`.
    #[inline]
    pub fn of(cpu: &CpuState, who: Privilege) -> Self {
        if !cpu.is_paging() {
            return Self::default();
        }
        let mut bits = PAGING;
        let mut set = |on: bool, bit: u8| bits |= if on { bit } else { 0 };
        let user = cpu.cpl == 3 && who == Privilege::Current;
        set(user, USER);
        set(cpu.efer & efer::NXE != 0, NXE);
        if !user {
            set(cpu.cr0 & cr0::WP != 0, WP);
            let ac = cpu.rflags & rflags::AC != 0 && who == Privilege::Current;
            set(cpu.cr4 & cr4::SMAP != 0 && !ac, SMAP);
            set(cpu.cr4 & cr4::SMEP != 0, SMEP);
        }
        let keys = cpu.is_long_mode();
        let pke = keys && cpu.cr4 & cr4::PKE != 0;
        let pks = keys && cpu.cr4 & cr4::PKS != 0 && !user;
        set(pke, PKE);
        set(pks, PKS);
        Self {
            bits,
            pkru: if pke { cpu.pkru } else { 0 },
            pkrs: if pks { cpu.pkrs } else { 0 },
        }
    }

    /// True if no access to a user page is allowed: the view is a supervisor's with CR4.SMAP and without RFLAGS.AC.
    pub(crate) const fn keeps_off_users(self) -> bool {
        self.has(SMAP)
    }

    /// True if the view is for accesses at CPL 3.
    pub(crate) const fn is_user(self) -> bool {
        self.has(USER)
    }

    const fn has(self, bit: u8) -> bool {
        self.bits & bit != 0
    }

    /// Checks an access to a page with these rights (SDM vol. 3, 4.6.1 and 4.6.2).
    ///
    /// # Errors
    /// [`Denied`] if the access is a page-protection violation.
    #[inline]
    pub fn check(self, rights: Rights, access: Access) -> Result<(), Denied> {
        if !self.has(PAGING) {
            return Ok(());
        }
        let by_key = access != Access::Fetch && self.key_denies(rights, access);
        let denied = if self.has(USER) {
            !rights.user
                || match access {
                    Access::Read => false,
                    Access::Write => !rights.write,
                    Access::Fetch => rights.no_execute,
                }
        } else {
            match access {
                Access::Read => rights.user && self.has(SMAP),
                Access::Write => rights.user && self.has(SMAP) || !rights.write && self.has(WP),
                Access::Fetch => rights.no_execute || rights.user && self.has(SMEP),
            }
        };
        if denied || by_key {
            Err(Denied { by_key })
        } else {
            Ok(())
        }
    }

    /// Returns a bit for each class of pages ([`Rights::class`]): the classes that may be read, and those that may be
    /// written.
    pub(crate) fn classes(self) -> [u64; 2] {
        [Access::Read, Access::Write].map(|access| {
            let allowed = |class: &u64| self.check(Rights::of_class(*class), access).is_ok();
            (0..64)
                .filter(allowed)
                .fold(0, |bits, class| bits | 1 << class)
        })
    }

    fn key_denies(self, rights: Rights, access: Access) -> bool {
        let (enabled, register) = if rights.user {
            (self.has(PKE), self.pkru)
        } else {
            (self.has(PKS), self.pkrs)
        };
        if !enabled {
            return false;
        }
        let bits = register >> (2 * u32::from(rights.pkey & 15));
        let (access_disable, write_disable) = (bits & 1 != 0, bits & 2 != 0);
        access_disable
            || write_disable && access == Access::Write && (self.has(USER) || self.has(WP))
    }
}
