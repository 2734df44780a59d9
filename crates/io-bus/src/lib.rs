//! Who answers a port or MMIO access: a chip, an ioeventfd, a coalesced ring, or nobody.

#![forbid(unsafe_code)]
