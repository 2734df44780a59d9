//! Device accesses of the instruction in progress.
//!
//! An access that the VMM must answer stops the instruction. Once the answer is there, the instruction is executed
//! again from its start, and the device accesses that it had already made are answered from this log. So each access
//! happens exactly once (the restart rule of `x86_cpu::bus`).

/// A device access, compared when the instruction runs again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// A narrower tag would be copied together with its neighbouring fields, which is slow if they were just written.
#[repr(u64)]
pub(super) enum DeviceAccess {
    /// IN.
    PortIn { port: u16, size: u8 },
    /// Repeated INS, with several elements in one access.
    PortInString { port: u16, size: u8 },
    /// OUT.
    PortOut { port: u16, size: u8 },
    /// Load of 1 to 8 bytes.
    Load { gpa: u64, len: u8 },
    /// Store of 1 to 8 bytes.
    Store { gpa: u64, len: u8 },
    /// RDMSR that the VMM answers.
    MsrRead { index: u32 },
    /// WRMSR that the VMM answers.
    MsrWrite { index: u32 },
    /// A hypercall that the VMM answers.
    Hypercall { nr: u64 },
}

/// The answers so far. Most instructions make no such access; the vector keeps its capacity.
#[derive(Debug, Default)]
pub(super) struct Replay {
    done: Vec<(DeviceAccess, Answered)>,
    cursor: usize,
    pending: Option<DeviceAccess>,
    /// Linear address of the instruction that the log belongs to.
    gva: u64,
}

/// The answer to an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answered {
    /// The value; zero for writes.
    pub(super) value: u64,
    /// The access failed: #GP for an MSR.
    pub(super) error: bool,
}

impl Replay {
    /// Returns the answer of the next access in order, if the instruction made that access before.
    #[inline]
    pub(super) fn next(&mut self, access: DeviceAccess) -> Option<Answered> {
        let (made, answered) = *self.done.get(self.cursor)?;
        if made != access {
            // The instruction took another path, because the guest changed its memory meanwhile. The rest of the log is
            // void.
            self.done.truncate(self.cursor);
            return None;
        }
        self.cursor += 1;
        Some(answered)
    }
    /// True if the instruction has not made this access yet, so that it may be made now.
    #[inline]
    pub(super) fn is_new(&self, access: DeviceAccess) -> bool {
        self.done
            .get(self.cursor)
            .is_none_or(|(made, _)| *made != access)
    }
    /// True if the instruction has made no access yet and is not being repeated.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.done.is_empty()
    }
    /// Notes an access that was answered at once.
    #[inline]
    pub(super) fn made(&mut self, access: DeviceAccess, value: u64) {
        self.done.truncate(self.cursor);
        self.done.push((
            access,
            Answered {
                value,
                error: false,
            },
        ));
        self.cursor = self.done.len();
    }
    /// Notes an access that waits for the VMM.
    pub(super) fn wait(&mut self, access: DeviceAccess, gva: u64) {
        self.pending = Some(access);
        self.gva = gva;
    }
    /// Records the VMM's answer. Ignored if no access waits.
    pub(super) fn answer(&mut self, value: u64, error: bool) {
        if let Some(access) = self.pending.take() {
            self.done.push((access, Answered { value, error }));
        }
        self.cursor = 0;
    }
    /// Returns size and answer of the instruction's only access, if it made exactly one, to a port or a device.
    pub(super) fn sole(&self) -> Option<(u8, u64)> {
        let [(access, answered)] = self.done.as_slice() else {
            return None;
        };
        match access {
            DeviceAccess::PortIn { size: len, .. }
            | DeviceAccess::PortOut { size: len, .. }
            | DeviceAccess::Load { len, .. }
            | DeviceAccess::Store { len, .. } => Some((*len, answered.value)),
            _ => None,
        }
    }
    /// Returns the access that waits for the VMM.
    pub(super) const fn pending(&self) -> Option<DeviceAccess> {
        self.pending
    }
    /// True if an instruction at `gva` must be completed before anything else happens. Drops the log of another
    /// instruction, which means that the VMM moved RIP.
    pub(super) fn is_mid_instruction(&mut self, gva: u64) -> bool {
        if self.done.is_empty() {
            return false;
        }
        if self.gva != gva {
            self.forget();
        }
        !self.done.is_empty()
    }
    /// Drops the log, because the instruction is complete.
    #[inline]
    pub(super) fn forget(&mut self) {
        if !self.done.is_empty() || self.pending.is_some() {
            self.done.clear();
            self.pending = None;
            self.cursor = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: DeviceAccess = DeviceAccess::Load {
        gpa: 0x1000,
        len: 4,
    };
    const B: DeviceAccess = DeviceAccess::Store {
        gpa: 0x2000,
        len: 4,
    };

    #[test]
    fn answers_are_replayed_in_order() {
        let mut r = Replay::default();
        assert_eq!(r.next(A), None);
        r.wait(A, 0x10);
        r.answer(7, false);
        assert!(r.is_mid_instruction(0x10));
        assert_eq!(
            r.next(A),
            Some(Answered {
                value: 7,
                error: false
            })
        );
        assert_eq!(r.next(B), None);
        r.wait(B, 0x10);
        r.answer(0, false);
        assert_eq!(r.next(A).map(|a| a.value), Some(7));
        assert!(r.next(B).is_some());
        r.forget();
        assert!(!r.is_mid_instruction(0x10));
    }

    #[test]
    fn a_log_of_another_instruction_is_dropped() {
        let mut r = Replay::default();
        r.wait(A, 0x10);
        r.answer(7, false);
        assert!(!r.is_mid_instruction(0x20));
        assert_eq!(r.next(A), None);
    }
}
