//! The kernel's random numbers.

use std::io;

/// Fills `buf` from getrandom(2).
///
/// # Errors
/// Those of `getrandom`, `EINTR` included.
pub fn fill(buf: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let rest = &mut buf[done..];
        // SAFETY: `rest` is writable for its length.
        let r = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(r) {
            Ok(n) => done += n,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_differ() {
        let mut a = [0; 64];
        super::fill(&mut a).unwrap();
        assert!(a.windows(2).any(|w| w[0] != w[1]));
        super::fill(&mut []).unwrap();
    }
}
