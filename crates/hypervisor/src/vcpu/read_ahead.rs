//! Elements of a repeated INS that the VMM has given at once.
//!
//! They belong to the instruction that asked: all of them are stored to memory before anything
//! else happens to the vCPU, so an interrupt handler never sees a device that has given more
//! than the program got.

/// What is left of a KVM_EXIT_IO with a count.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    bytes: Vec<u8>,
    /// The next element begins here.
    at: usize,
    size: u8,
    /// The instruction in progress has the element at `at`.
    is_taken: bool,
}

impl ReadAhead {
    /// The VMM's answer.
    pub(super) fn fill(&mut self, bytes: &[u8], size: u8) {
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        self.at = 0;
        self.size = size;
        self.is_taken = false;
    }
    /// The next element of that size.
    pub(super) fn next(&mut self, size: u8) -> Option<u32> {
        if self.size != size {
            return None;
        }
        let element = self.bytes.get(self.at..self.at + usize::from(size))?;
        self.is_taken = true;
        let mut word = [0; 4];
        word[..element.len()].copy_from_slice(element);
        Some(u32::from_le_bytes(word))
    }
    /// The instruction's iteration is complete.
    #[inline]
    pub(super) fn commit(&mut self) {
        if self.is_taken {
            self.is_taken = false;
            self.at += usize::from(self.size);
        }
    }
    /// Elements are left.
    pub(super) fn has_more(&self) -> bool {
        self.size != 0 && self.at + usize::from(self.size) <= self.bytes.len()
    }
    /// The instruction that asked for the elements is gone.
    pub(super) fn forget(&mut self) {
        self.bytes.clear();
        self.at = 0;
        self.size = 0;
        self.is_taken = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_once_each_in_order() {
        let mut ahead = ReadAhead::default();
        assert_eq!((ahead.next(2), ahead.has_more()), (None, false));
        ahead.fill(&[1, 2, 3, 4, 5], 2);
        assert_eq!(ahead.next(1), None);
        // Until the iteration is complete it is the same element.
        assert_eq!(ahead.next(2), Some(0x0201));
        assert_eq!(ahead.next(2), Some(0x0201));
        ahead.commit();
        ahead.commit();
        assert_eq!(ahead.next(2), Some(0x0403));
        assert!(ahead.has_more());
        ahead.commit();
        assert_eq!((ahead.next(2), ahead.has_more()), (None, false));
        ahead.fill(&[7], 1);
        ahead.forget();
        assert_eq!(ahead.next(1), None);
    }
}
