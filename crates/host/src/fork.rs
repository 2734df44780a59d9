//! Counts the forks between the first process that asked and this one.

use std::sync::{
    Once,
    atomic::{AtomicU32, Ordering},
};

use crate::allocator;

/// Number of forks; each child increments its copy.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// Called before a fork that the C library does not know of.
pub extern "C" fn before() {
    allocator::hold();
}

/// Called after such a fork, in the parent.
pub extern "C" fn in_parent() {
    allocator::let_go();
}

/// Called after such a fork, in the child.
pub extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    allocator::let_go();
}

/// Returns the number of forks. Children are counted from the first call on; from then on, the allocator is also
/// consistent in children of a process with several threads.
pub fn generation() -> u32 {
    WATCH.call_once(|| {
        // SAFETY: the handlers touch only atomics and the allocator's lock. If the call fails for lack of memory, forks
        // are not counted.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_another_generation_and_can_allocate() {
        let generation_here = generation();
        // SAFETY: the child calls nothing but the allocator, which a fork leaves whole, and _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let layout = std::alloc::Layout::new::<[u64; 100]>();
            // SAFETY: a layout of some size.
            let memory = unsafe { std::alloc::GlobalAlloc::alloc(&allocator::Allocator, layout) };
            let good = generation() == generation_here + 1 && !memory.is_null();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = 0;
        // SAFETY: waits for our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(generation(), generation_here);
    }
}
