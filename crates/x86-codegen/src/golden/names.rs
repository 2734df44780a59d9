//! Names of what generated code refers to: trampolines, words of the frame, and what is outside the buffer.

use std::collections::BTreeMap;

use iced_x86::{CpuidFeature, Instruction, OpKind, Register};
use x86_cpu::Feature;

use super::{CODE, COLD, GENERATION, HANDLE, HOT, REFILL};
use crate::{asm::Mem, codegen::trampolines::Trampolines, frame::words::*};

/// Returns true for a feature that not every x86-64 processor has.
pub(super) fn is_new(f: CpuidFeature) -> bool {
    use CpuidFeature as F;
    matches!(
        f,
        F::BMI1 | F::BMI2 | F::AVX | F::AVX2 | F::FMA | F::LZCNT | F::POPCNT | F::ADX | F::MOVBE
    )
}

/// The features that the guest's CPUID promises.
pub(super) const GUEST_FEATURES: &[Feature] = {
    use Feature as F;
    &[
        F::Fpu,
        F::Tsc,
        F::Msr,
        F::Cx8,
        F::Cmov,
        F::Mmx,
        F::Fxsr,
        F::Sse,
        F::Sse2,
        F::Sse3,
        F::Ssse3,
        F::Sse41,
        F::Sse42,
        F::Fma,
        F::Cx16,
        F::Movbe,
        F::Popcnt,
        F::Xsave,
        F::Avx,
        F::Avx2,
        F::Fsgsbase,
        F::Bmi1,
        F::Bmi2,
        F::Adx,
        F::Smap,
        F::Pku,
        F::LahfLm,
        F::Rdtscp,
        F::Lm,
        F::Syscall,
        F::Lzcnt,
    ]
};

/// Names of offsets in the buffer, in the vCPU's state, and from the software TLB's base.
#[derive(Clone, Debug)]
pub(super) struct Names {
    labels: BTreeMap<usize, Vec<String>>,
    state: BTreeMap<u64, String>,
    short: BTreeMap<u64, String>,
}

macro_rules! named {
    ($($name:ident)*) => { [$((stringify!($name), $name)),*] };
}

macro_rules! fields {
    ($of:expr; $($name:ident)*) => { [$((stringify!($name), $of.$name)),*] };
}

impl Names {
    pub(super) fn new(t: &Trampolines) -> Self {
        let mut names = Self {
            labels: BTreeMap::new(),
            state: BTreeMap::new(),
            short: BTreeMap::new(),
        };
        names.name_trampolines(t);
        names.name_state();
        names.name_short();
        names
    }

    fn name_trampolines(&mut self, t: &Trampolines) {
        for (name, at) in fields![t;
            enter bail bail_integer stale moved poll link link_live branch fill_inline_cache inline_cache ret ret32
            cross_page cross_page_call cross_page_call32 switch call miss miss_group split refused stack stack_group stack_split site_entry
            site_entry_group site_entry_split load_fp save_image restore_image key_rights to_cr0 root ret16 cross_page_segmented
        ] {
            self.label(at, name);
        }
        // Only code that counts has this trampoline.
        if t.too_long != 0 {
            self.label(t.too_long, "too_long");
        }
        self.label(t.access[0], "access.clac");
        self.label(t.access[1], "access.stac");
        self.label(t.levels[0], "levels.syscall");
        self.label(t.levels[1], "levels.sysret");
        let ops = ["movs", "stos", "lods", "scas", "cmps"];
        for (op, sizes) in ops.iter().zip(t.strings) {
            for (size, forms) in "bwdq".chars().zip(sizes) {
                for (repeat, at) in ["", ".rep", ".repne"].iter().zip(forms) {
                    if at != 0 {
                        self.label(at, &format!("{op}{size}{repeat}"));
                    }
                }
            }
        }
    }

    fn name_state(&mut self) {
        for n in 0..16 {
            self.state.insert(8 * n, format!("gpr{n}"));
        }
        for (n, s) in ["es", "cs", "ss", "ds", "fs", "gs"].iter().enumerate() {
            for size in (0..BOUND_SIZES).map(|n| 1 << n) {
                let at = bound(n, size).disp as u64;
                self.state.insert(at, format!("{s}.bound{size}"));
            }
            for (m, what) in [
                (selector(n), "selector"),
                (segment_base(n), "base"),
                (segment_attr(n), "attributes"),
            ] {
                self.state.insert(m.disp as u64, format!("{s}.{what}"));
            }
        }
        for (name, at) in named![
            TABLES DEVICES MIXED TARGETS KEY SALT NUMBER PAGE FLAGS SPILL ENTRY REQUESTS POLLS_LEFT REASON ARGUMENT
            FP_LIVE CONTEXT HOST_MXCSR IRQ_WAITING TSC_OFFSET COST COUNT PAUSES UNTIL STOP SLOT LOG SITE_ENTRIES_MISSED
            COUNTED_BESIDE IS_OTHER_VIEW IS_OTHER_ROOT WANTED_ROOT FLUSHING_LOADS SWITCHES SWITCH_EPOCHS KEYS LEVELS LEVEL_FACTS STACK CROSS_PAGE_LEFT HOST_RSP OVERFLOW_AT LOOKED ELAPSED PACE POLL_WINDOW OWED ANCHORS REST BEGAN CREDIT_LEFT RELUCTANCES RANDOM
            COUNTED_FROM COUNTED_TO REFUND COUNTED_ENTRY UPPERS_IN_USE FP_AREA RIP RFLAGS CR0 CR2 CR3 CR4 XCR0 XSS EFER PKRU PKRU_OFFSET TSC_AUX STAR LSTAR FMASK CPL KERNEL_GS_BASE
        ] {
            self.state.insert(at as u64, name.to_owned());
        }
        for n in 1..ANCHORS_LEN {
            self.state
                .insert((ANCHORS + 8 * n) as u64, format!("ANCHORS+{n}"));
        }
        for n in 0..16 {
            self.state
                .insert((VECTORS + 32 * n) as u64, format!("VECTORS+{n}"));
        }
        for (n, view) in VIEWS.into_iter().enumerate() {
            self.state.insert(view as u64, format!("VIEWS+{n}"));
        }
    }

    fn name_short(&mut self) {
        let mut put = |m: Mem, name: String| self.short.insert(i64::from(m.disp) as u64, name);
        for (name, m) in
            named![SHORT_PAGE SHORT_FLAGS SHORT_SALT SHORT_TARGETS SHORT_FP_LIVE SHORT_NUMBER]
        {
            put(m, name.to_owned());
        }
        for n in (0..16).filter(|n| host_reg(*n).is_none()) {
            put(gpr_slot(n), format!("gpr{n}"));
        }
        for n in 0..MAX_KEPT as u8 {
            put(kept(n), format!("KEPT+{n}"));
        }
    }

    pub(super) fn label(&mut self, offset: usize, name: &str) {
        self.labels.entry(offset).or_default().push(name.to_owned());
    }

    pub(super) fn labels(&self, offset: usize) -> &[String] {
        self.labels.get(&offset).map_or(&[], |l| l)
    }

    /// Returns the name of an operand's address.
    pub(super) fn of(&self, i: &Instruction, operand: u32, address: u64) -> Option<String> {
        match i.op_kind(operand) {
            OpKind::NearBranch64 => {
                let offset = address.checked_sub(CODE)? as usize;
                let place = || match offset {
                    ..HOT => format!("{offset:x}"),
                    HOT..COLD => format!("{:x}", offset - HOT),
                    _ => format!("apart+{:x}", offset - COLD),
                };
                Some(match self.labels(offset) {
                    [name, ..] => format!("@{name}"),
                    [] => place(),
                })
            }
            OpKind::Memory if i.is_ip_rel_memory_operand() => Some(match address {
                GENERATION => "generation".to_owned(),
                _ if address == GENERATION + 4 => "generation of the callee".to_owned(),
                _ => match address.wrapping_sub(CODE + HOT as u64) {
                    offset @ ..0x1000_0000 => format!("{offset:x}"),
                    _ => format!("+{:x}", address.wrapping_sub(CODE)),
                },
            }),
            OpKind::Memory if i.memory_segment() == Register::GS => {
                self.state.get(&address).cloned()
            }
            OpKind::Memory if i.memory_base() == Register::R11 => self.short.get(&address).cloned(),
            OpKind::Immediate64 if address == REFILL => Some("&refill".to_owned()),
            OpKind::Immediate64 if address == HANDLE => Some("&handle".to_owned()),
            _ => None,
        }
    }
}
