//! Arguments of fuzzed calls.

use kvm_abi::{
    Call, FdKind,
    numbers::{
        KVM_GET_DEVICE_ATTR, KVM_GET_DIRTY_LOG, KVM_GET_ONE_REG, KVM_SET_USER_MEMORY_REGION,
        KVM_SET_USER_MEMORY_REGION2,
    },
};

use super::arena::{Arena, RAM, SLICE};
use crate::Random;

/// Number of bytes of arguments that are filled before a call.
const FILLED: usize = 4096;

/// The third argument of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argument {
    pub(super) value: u64,
    /// True if nothing can be read or written at the address.
    pub(super) is_bad: bool,
}

/// Makes arguments for one thread.
#[derive(Debug)]
pub(super) struct Arguments<'a> {
    pub(super) arena: &'a Arena,
    pub(super) slice: u64,
    /// True if slots may lead to memory that the process does not have.
    pub(super) wild_slots: bool,
}

impl Arguments<'_> {
    /// Returns a pointer for the call, and fills in what it points to.
    pub(super) fn pointer(
        &self,
        random: &mut Random,
        number: u32,
        call: Option<&Call>,
        fds: &[i32],
    ) -> Argument {
        let sets_memory =
            [KVM_SET_USER_MEMORY_REGION, KVM_SET_USER_MEMORY_REGION2].contains(&number);
        let target = target_of(number);
        if random.one_in(10) {
            let value = random.pick(&[
                0,
                1,
                0xfff,
                self.arena.hole(),
                self.arena.hole() + 4096 - 4,
                0x7fff_ffff_f000,
                0xffff_8000_0000_0000,
                1 << 63,
                u64::MAX - 7,
            ]);
            return Argument {
                value,
                is_bad: true,
            };
        }
        let value = match random.below(8) {
            // The pointer is unaligned, or leads to guest RAM.
            0 => self.slice + random.below(64),
            // A guest may change what is there, so it must be nothing that says where to write.
            1 if !sets_memory && target.is_none() => {
                self.arena.ram() + random.below(RAM - (64 << 10))
            }
            _ => self.slice,
        };
        let mut bytes = vec![0; FILLED];
        if random.one_in(4) {
            // The argument stays as the last call left it: what a GET has returned becomes a SET's argument, with few
            // changes.
            self.arena.read(value, &mut bytes);
            for _ in 0..random.below(3) {
                let at = random.below(512) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
        } else {
            self.fill(random, call, fds, &mut bytes);
            if let Some(call) = call.filter(|call| call.name.starts_with("KVM_XEN_"))
                && !random.one_in(4)
            {
                fill_for_xen(call.name, random, fds, &mut bytes);
            }
        }
        if sets_memory {
            self.tame(random, &mut bytes);
        }
        if let Some(at) = target {
            self.aim(random, &mut bytes[at..at + 8]);
        }
        self.arena.write(value, &bytes);
        Argument {
            value,
            is_bad: false,
        }
    }

    /// Makes results go to this thread's arguments, or to no memory at all. Otherwise what two earlier calls have left
    /// could add up to an address of the process itself, to which KVM would write as well.
    fn aim(&self, random: &mut Random, target: &mut [u8]) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(target);
        let address = u64::from_le_bytes(bytes);
        let is_own = (self.slice..self.slice + SLICE / 2).contains(&address);
        if !is_own {
            let aimed = match random.below(4) {
                0 => self.arena.hole() + random.below(4096),
                1 => random.pick(&[0, 8, 0x8000_0000_0000, u64::MAX - 7]),
                _ => self.slice + 512 + random.below(4096),
            };
            target.copy_from_slice(&aimed.to_le_bytes());
        }
    }

    /// Makes a slot memory of the arena, or no memory at all: the guest may write anything there.
    fn tame(&self, random: &mut Random, bytes: &mut [u8]) {
        let mut size = [0; 8];
        size.copy_from_slice(&bytes[16..24]);
        let size = u64::from_le_bytes(size);
        if size > RAM / 2 {
            bytes[16..24].copy_from_slice(&random.pick(&[0u64, 0x800, 0x3000, RAM]).to_le_bytes());
        }
        let from = if self.wild_slots && random.one_in(8) {
            self.arena.hole()
        } else if size <= RAM / 2 {
            self.arena.ram() + random.pick(&[0, 0x1000, 0x1_0000, 4])
        } else {
            self.arena.ram()
        };
        bytes[24..32].copy_from_slice(&from.to_le_bytes());
    }

    /// Fills in fields with values that could be meaningful.
    fn fill(&self, random: &mut Random, call: Option<&Call>, fds: &[i32], bytes: &mut [u8]) {
        let sparse = random.one_in(2);
        for word in bytes.chunks_exact_mut(8).take(64) {
            let value = if sparse && !random.one_in(4) {
                0
            } else {
                self.field(random, fds)
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        match call.map(|call| call.name) {
            Some("KVM_SET_USER_MEMORY_REGION" | "KVM_SET_USER_MEMORY_REGION2")
                if !random.one_in(4) =>
            {
                put(0, &(random.below(4) as u32).to_le_bytes());
                put(4, &(random.below(5) as u32).to_le_bytes());
                let gpa = random.pick(&[0u64, 0, 0, 0x1000, 0x10_0000, 0xfffe_0000]);
                put(8, &gpa.to_le_bytes());
                let size = random.pick(&[0u64, 0x1000, 0x1_0000, 0x10_0000, RAM / 2]);
                put(16, &size.to_le_bytes());
            }
            // These are counts of what follows.
            Some(
                "KVM_GET_MSRS"
                | "KVM_SET_MSRS"
                | "KVM_SET_CPUID2"
                | "KVM_SET_CPUID"
                | "KVM_GET_CPUID2"
                | "KVM_GET_SUPPORTED_CPUID"
                | "KVM_GET_EMULATED_CPUID"
                | "KVM_GET_MSR_INDEX_LIST"
                | "KVM_GET_MSR_FEATURE_INDEX_LIST"
                | "KVM_SET_GSI_ROUTING",
            ) if !random.one_in(8) => {
                let count = random.pick(&[0u32, 1, 2, 8, 60, 255, 256, 300]);
                put(0, &count.to_le_bytes());
                put(4, &[0; 4]);
                for at in (8..1024).step_by(16) {
                    put(at, &random.pick(MSRS).to_le_bytes());
                }
            }
            Some("KVM_SET_REGS") => {
                // RIP and RFLAGS of code that executes.
                put(
                    128,
                    &(random.below(RAM / 2) & 0xffc0 | 0x1000).to_le_bytes(),
                );
                put(136, &(2 | random.below(2) << 9).to_le_bytes());
            }
            Some("KVM_ENABLE_CAP") => {
                // The capability of the synthetic interrupt controller enables many other calls.
                let cap = match random.below(4) {
                    0 => random.pick(&[123, 148]),
                    _ => random.below(240) as u32,
                };
                put(0, &cap.to_le_bytes());
                if !random.one_in(8) {
                    put(4, &[0; 4]);
                    put(
                        8,
                        &random
                            .pick(&[0u64, 1, 2, 3, 24, 4096, 1 << 40])
                            .to_le_bytes(),
                    );
                }
            }
            Some("KVM_SET_SIGNAL_MASK") => {
                put(0, &random.pick(&[8u32, 8, 0, 4, u32::MAX]).to_le_bytes());
            }
            Some("KVM_GET_DIRTY_LOG") => {
                put(0, &random.below(2).to_le_bytes());
                put(8, &(self.slice + 512 + random.below(256)).to_le_bytes());
            }
            Some("KVM_CLEAR_DIRTY_LOG") => {
                // The slot, the number of pages, the first page, and the bitmap.
                put(0, &random.below(2).to_le_bytes()[..4]);
                put(4, &random.pick(&[0u32, 64, 128, 256]).to_le_bytes());
                put(8, &random.pick(&[0u64, 64, 128, 1]).to_le_bytes());
                put(16, &(self.slice + 512).to_le_bytes());
            }
            Some("KVM_IRQFD") if !random.one_in(4) => {
                put(0, &random.pick(fds).to_le_bytes());
                put(4, &(random.below(32) as u32).to_le_bytes());
                put(8, &(random.below(4) as u32).to_le_bytes());
                put(12, &random.pick(fds).to_le_bytes());
            }
            Some("KVM_HYPERV_EVENTFD") if !random.one_in(4) => {
                put(0, &(random.below(3) as u32).to_le_bytes());
                put(4, &random.pick(fds).to_le_bytes());
                put(8, &(random.below(3) as u32).to_le_bytes());
                put(12, &[0; 12]);
            }
            Some("KVM_SET_VAPIC_ADDR") if !random.one_in(4) => {
                put(0, &random.below(RAM / 2).to_le_bytes());
            }
            Some("KVM_TPR_ACCESS_REPORTING") if !random.one_in(4) => {
                put(0, &random.below(2).to_le_bytes());
            }
            Some("KVM_IOEVENTFD") if !random.one_in(4) => {
                put(0, &random.below(4).to_le_bytes());
                put(
                    8,
                    &random
                        .pick(&[0x10u64, 0x11, 0xffff0, 0xfee0_0000, 0])
                        .to_le_bytes(),
                );
                put(16, &random.pick(&[1u32, 2, 4, 8, 0, 3]).to_le_bytes());
                put(20, &random.pick(fds).to_le_bytes());
                put(24, &(random.below(8) as u32).to_le_bytes());
            }
            Some("KVM_REGISTER_COALESCED_MMIO" | "KVM_UNREGISTER_COALESCED_MMIO")
                if !random.one_in(4) =>
            {
                put(
                    0,
                    &random.pick(&[0x10u64, 0xffff0, 0xfee0_0000]).to_le_bytes(),
                );
                put(8, &random.pick(&[1u32, 16, 0x1000]).to_le_bytes());
                put(12, &(random.below(3) as u32).to_le_bytes());
            }
            Some("KVM_CREATE_PIT2") => put(0, &(random.below(3) as u32).to_le_bytes()),
            Some("KVM_SET_MP_STATE") => put(0, &(random.below(11) as u32).to_le_bytes()),
            Some("KVM_CREATE_DEVICE") => {
                put(0, &random.pick(&[4u32, 4, 0, 1, 99]).to_le_bytes());
                put(8, &(random.below(2) as u32).to_le_bytes());
            }
            _ => {}
        }
    }

    fn field(&self, random: &mut Random, fds: &[i32]) -> u64 {
        let two = |low: u64, high: u64| low & 0xffff_ffff | high << 32;
        match random.below(12) {
            0 => self.slice + random.below(4096),
            1 => self.arena.hole(),
            2 => self.arena.ram() + random.below(RAM / 2),
            3 => random.below(RAM) & !0xfff,
            4 | 5 => two(random.below(8), random.below(8)),
            6 => two(random.pick(fds) as u64, random.below(32)),
            7 => two(random.below(32), random.pick(fds) as u64),
            8 => 0xfee0_0000 | random.below(1 << 20),
            9 => 1 << random.below(64),
            _ => random.integer(),
        }
    }

    /// Returns the argument of a call that takes a number.
    pub(super) fn number(&self, random: &mut Random, kind: FdKind, call: Option<&Call>) -> u64 {
        match call.map(|call| call.name) {
            Some("KVM_CREATE_VCPU") => random.below(5),
            Some("KVM_CHECK_EXTENSION") => random.below(260),
            Some("KVM_RUN" | "KVM_CREATE_VM") if !random.one_in(16) => 0,
            Some("KVM_SET_TSC_KHZ") => random.pick(&[0, 1000, 2_400_000, 1 << 32, u64::MAX]),
            _ if kind == FdKind::System => random.below(4),
            _ => random.integer(),
        }
    }
}

/// Fills in an attribute of Xen's, an event or a configuration.
fn fill_for_xen(name: &str, random: &mut Random, fds: &[i32], bytes: &mut [u8]) {
    const PRIORITY: u32 = u32::MAX;
    let mut put = |at: usize, words: &[u32]| {
        for (to, word) in bytes[at..].chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    };
    let port = random.below(8) as u32;
    match name {
        // Port, vCPU and priority.
        "KVM_XEN_HVM_EVTCHN_SEND" => put(0, &[port, random.below(2) as u32, PRIORITY]),
        // Flags, MSR, and no pages.
        "KVM_XEN_HVM_CONFIG" => put(0, &[random.pick(&[0x22, 0xa2, 2]), 0x4000_0000, 0, 0, 0, 0]),
        _ => {
            put(0, &[random.below(10) as u32, 0]);
            let gpa = random.below(RAM / 2) as u32 & !3;
            match random.below(4) {
                // A port that the guest sends by, its kind, flags, another port or none, vCPU or eventfd, priority.
                0 => {
                    let kind = random.pick(&[2, 5]);
                    let flags = random.pick(&[0, 0, 1, 2]);
                    let other = random.pick(&[port, 0]);
                    let fd = random.pick(fds) as u32;
                    put(8, &[port, kind, flags, other, fd, PRIORITY]);
                }
                // The number of a page, or a vector.
                1 => put(8, &[random.below(0x30) as u32, 0]),
                // Port, priority and time of a timer.
                2 => put(8, &[port, PRIORITY, random.below(1 << 30) as u32, 0]),
                _ => put(8, &[gpa, 0]),
            }
        }
    }
}

/// Returns where the argument of a call has the address that its results go to.
fn target_of(number: u32) -> Option<usize> {
    match number {
        KVM_GET_DIRTY_LOG | KVM_GET_ONE_REG => Some(8),
        KVM_GET_DEVICE_ATTR => Some(16),
        _ => None,
    }
}

/// MSRs with effects.
const MSRS: &[u32] = &[
    0x10,
    0x11,
    0x12,
    0x1b,
    0x3a,
    0x3b,
    0x48,
    0x8b,
    0x9e,
    0xc1,
    0xfe,
    0x174,
    0x176,
    0x179,
    0x17a,
    0x186,
    0x19c,
    0x1a0,
    0x1d9,
    0x200,
    0x277,
    0x2ff,
    0x38f,
    0x400,
    0x480,
    0x4b56_4d00,
    0x4b56_4d01,
    0x4b56_4d02,
    0x4b56_4d03,
    0x4b56_4d04,
    0x4b56_4d05,
    0x4b56_4d06,
    0x6e0,
    0x802,
    0x808,
    0x80b,
    0x830,
    0x838,
    0x83f,
    0xda0,
    0xc000_0080,
    0xc000_0081,
    0xc000_0082,
    0xc000_0100,
    0xc000_0102,
    0xc000_0103,
    0xc001_0015,
    0xc001_0010,
    0x4000_0000,
    0x4000_0002,
    0x4000_0073,
    0x4000_0080,
    0x4000_0082,
    0x4000_0083,
    0x4000_0084,
    0x4000_0092,
    0x4000_00b0,
    0x4000_00b1,
    0x4000_00f1,
    0xffff_ffff,
];
