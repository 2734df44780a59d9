//! A machine's state as bytes: fields in order, little-endian, lists with their length in front.
//!
//! The bytes may come from anybody. A field that is missing or impossible is an error, never a panic.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Writes fields.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    /// Writes a number, or a structure of KVM's, as it is in memory.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.0.extend(value.as_bytes());
    }

    /// Writes a truth value.
    pub(crate) fn flag(&mut self, flag: bool) {
        self.put(&u8::from(flag));
    }

    /// Writes the number of elements that follow.
    pub(crate) fn count(&mut self, count: usize) {
        self.put(&u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Writes bytes, with their number in front.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.extend(bytes);
    }

    /// Writes a list of numbers or structures.
    pub(crate) fn list<T: IntoBytes + Immutable>(&mut self, list: &[T]) {
        self.count(list.len());
        list.iter().for_each(|value| self.put(value));
    }

    /// Returns all bytes.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The error of a state that is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub(crate) String);

impl Malformed {
    /// Makes an error, for `ok_or_else`.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// Reads fields.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

type Result<T> = core::result::Result<T, Malformed>;

impl<'a> Reader<'a> {
    /// Reads the state of `what`, which errors name.
    pub(crate) fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    /// Begins another part of the state, which errors name.
    pub(crate) fn part(&mut self, what: &'static str) -> &mut Self {
        self.what = what;
        self
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let cut = || Malformed(format!("the state of {} is cut short", self.what));
        let (taken, rest) = self.rest.split_at_checked(len).ok_or_else(cut)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Makes an error of a field that makes no sense.
    pub(crate) fn wrong(&self, why: &str) -> Malformed {
        Malformed(format!("the state of {}: {why}", self.what))
    }

    /// Reads a number or a structure.
    pub(crate) fn get<T: FromBytes>(&mut self) -> Result<T> {
        let bytes = self.take(size_of::<T>())?;
        T::read_from_bytes(bytes).map_err(|_| self.wrong("a field of another size"))
    }

    /// Reads a truth value.
    pub(crate) fn flag(&mut self) -> Result<bool> {
        match self.get::<u8>()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.wrong("neither yes nor no")),
        }
    }

    /// Reads a number of elements, which is at most `max`.
    pub(crate) fn count(&mut self, max: usize) -> Result<usize> {
        let count = usize::try_from(self.get::<u32>()?).unwrap_or(usize::MAX);
        if count > max {
            return Err(self.wrong("more than there can be"));
        }
        Ok(count)
    }

    /// Reads a number of elements, which has to be `count`.
    pub(crate) fn expect(&mut self, count: usize) -> Result<()> {
        match self.count(usize::MAX)? {
            got if got == count => Ok(()),
            got => Err(self.wrong(&format!("{got} parts, where {count} are"))),
        }
    }

    /// Reads bytes.
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.count(self.rest.len())?;
        self.take(len)
    }

    /// Reads a list.
    pub(crate) fn list<T: FromBytes>(&mut self, max: usize) -> Result<Vec<T>> {
        let count = self.count(max)?;
        (0..count).map(|_| self.get()).collect()
    }

    /// Checks that nothing is left.
    pub(crate) fn end(&self) -> Result<()> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.wrong("longer than it is"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut w = Writer::default();
        w.put(&7u16);
        w.flag(true);
        w.bytes(b"abc");
        w.list(&[1u64, 2]);
        let bytes = w.into_bytes();
        let mut r = Reader::new(&bytes, "x");
        assert_eq!(r.get::<u16>().unwrap(), 7);
        assert!(r.flag().unwrap());
        assert_eq!(r.bytes().unwrap(), b"abc");
        assert_eq!(r.list::<u64>(2).unwrap(), [1, 2]);
        r.end().unwrap();
        for len in 0..bytes.len() {
            let mut r = Reader::new(&bytes[..len], "x");
            let read = (|| {
                r.get::<u16>()?;
                r.flag()?;
                r.bytes()?;
                r.list::<u64>(2)
            })();
            assert!(read.is_err(), "{len}");
        }
        assert!(Reader::new(&[9], "x").flag().is_err());
        assert!(Reader::new(&[0xff; 8], "x").bytes().is_err());
        assert!(Reader::new(&[0xff; 8], "x").list::<u64>(5).is_err());
        assert!(Reader::new(&[0], "x").end().is_err());
    }
}
