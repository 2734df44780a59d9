//! Elements of a repeated INS that the VMM has given at once.
//!
//! They belong to the instruction that asked for them. All of them are stored to memory before anything else happens to
//! the vCPU, so an interrupt handler never sees a device that has given more than the program got.

/// The remaining elements of a KVM_EXIT_IO with a count.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    bytes: Vec<u8>,
    /// Position of the next element.
    at: usize,
    size: u8,
    /// The instruction in progress uses the element at `at`.
    is_taken: bool,
}

impl ReadAhead {
    /// Takes over the elements of the VMM's answer.
    pub(super) fn fill(&mut self, bytes: &[u8], size: u8) {
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        self.at = 0;
        self.size = size;
        self.is_taken = false;
    }
    /// Returns the next element if elements have that size.
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
    /// Advances to the next element, because an iteration of the instruction is complete.
    #[inline]
    pub(super) fn commit(&mut self) {
        if self.is_taken {
            self.is_taken = false;
            self.at += usize::from(self.size);
        }
    }
    /// True if elements are left.
    pub(super) fn has_more(&self) -> bool {
        self.size != 0 && self.at + usize::from(self.size) <= self.bytes.len()
    }
    /// Drops the elements, because the instruction that asked for them is gone.
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
        // Until the iteration is complete, the same element is returned.
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
