//! The host kernel and CPU wrapped safely: mappings, memfd, futex, eventfd, threads, clocks, CPU features.
