//! Small guests and builders for tests.

#![forbid(unsafe_code)]
