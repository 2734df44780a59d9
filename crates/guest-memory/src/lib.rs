//! Guest-physical memory: memslots, their dirty state and code tracking. The only crate that touches guest RAM.
