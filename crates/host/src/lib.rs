//! The host kernel and CPU wrapped safely: mappings, memfd, futex, eventfd, threads, clocks, CPU features.
//!
//! Nothing here installs a signal handler, prints, or keeps process-wide state, except for the allocator and the number
//! of forks. System calls report [`std::io::Error`]; `EINTR` is never swallowed, because a caller that kicks a thread
//! with a signal relies on seeing it.

pub mod allocator;
pub mod brief_lock;
pub mod clock;
pub mod code_buffer;
pub mod code_views;
pub mod confine;
pub mod cpu;
pub mod event_fd;
pub mod faults;
pub mod fork;
pub mod futex;
pub mod lazy_array;
pub mod mapping;
pub mod memfd;
pub mod poll;
pub mod probe;
pub mod random;
pub mod run_delay;
pub mod service_thread;
pub mod signal;
pub mod system;
pub mod thread;
pub mod vulnerabilities;

pub use brief_lock::{BriefLock, Held};
pub use code_buffer::CodeBuffer;
pub use code_views::CodeViews;
pub use event_fd::EventFd;
pub use lazy_array::LazyArray;
pub use mapping::Mapping;
pub use memfd::{Memfd, SharedMapping};
pub use run_delay::RunDelay;
pub use service_thread::ServiceThread;
pub use vulnerabilities::vulnerability;

/// Bytes in a host page.
pub const PAGE_SIZE: usize = 4096;
/// Bytes that an entry one level above host pages maps.
pub const HUGE_PAGE: usize = 2 << 20;
