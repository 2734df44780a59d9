//! What is executed much, and what is known about it.

pub(crate) mod hot;
