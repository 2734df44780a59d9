//! KVM's ioctl numbers, structures and errno over the hypervisor's typed calls.
