//! Gathers: most of their elements are near a place that is mapped.

use iced_x86::{Code, IcedError, Instruction, Register as R};

use super::{
    generate::{Builder, mov},
    program::Element,
};

impl Builder<'_> {
    /// Makes the gather's base a place in memory, its indexes small and its mask full, each of them more often than
    /// not.
    pub(super) fn aim_gather(&mut self, e: &mut Element, i: &mut Instruction) {
        let base = i.memory_base();
        if base.is_gpr64() && !self.r.one_in(16) {
            let to = self.target(256);
            e.push(mov(base, to));
        }
        if self.r.one_in(8) {
            i.set_segment_prefix(self.r.pick(&[R::FS, R::GS]));
        }
        let (index, mask) = (i.memory_index(), i.op2_register());
        let small = if i.is_vsib32() {
            shift(
                Code::VEX_Vpsrld_ymm_ymm_imm8,
                Code::VEX_Vpsrld_xmm_xmm_imm8,
                index,
                24,
            )
        } else {
            shift(
                Code::VEX_Vpsrlq_ymm_ymm_imm8,
                Code::VEX_Vpsrlq_xmm_xmm_imm8,
                index,
                56,
            )
        };
        let full = Instruction::with3(
            if mask.is_ymm() {
                Code::VEX_Vpcmpeqd_ymm_ymm_ymmm256
            } else {
                Code::VEX_Vpcmpeqd_xmm_xmm_xmmm128
            },
            mask,
            mask,
            mask,
        );
        for made in [small, full] {
            if !self.r.one_in(6)
                && let Ok(made) = made
            {
                e.push(made);
            }
        }
    }
}

fn shift(ymm: Code, xmm: Code, index: R, by: u32) -> Result<Instruction, IcedError> {
    Instruction::with3(if index.is_ymm() { ymm } else { xmm }, index, index, by)
}
