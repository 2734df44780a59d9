//! The API of kvm-ioctls without a kernel.
