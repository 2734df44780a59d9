//! Which arithmetic flags of a state can matter.

use std::collections::HashMap;

use iced_x86::{Decoder, FlowControl, Instruction, Mnemonic};
use x86_cpu::CpuState;
use x86_interp::gating;
use x86_native::decoded_flags;

use super::shadow::Shadow;
use crate::JitBus;
use x86_codegen::{
    ir::flags::overwritten,
    ir::segment::{code_bits, linear},
};

/// Maximum number of instructions considered after a stretch.
const FAR: u32 = 96;

/// What an instruction does to flags, in RFLAGS' bits.
#[derive(Clone, Copy, Debug, Default)]
struct Effect {
    read: u64,
    /// Flags that are always set to something that the manual defines.
    defined: u64,
    undefined: u64,
}

/// Decoded instructions by address. They serve reports of differences only, so outdated ones may stay until all are
/// cleared.
#[derive(Debug, Default)]
pub(super) struct Flags {
    known: HashMap<u64, Option<(Instruction, Effect)>>,
}

impl Flags {
    pub(super) fn clear(&mut self) {
        self.known.clear();
    }

    /// Returns those of the differing flags that the manual defines after the instructions of `path`.
    pub(super) fn defined<B: JitBus>(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut Shadow<B>,
        path: &[u64],
        differing: u64,
    ) -> u64 {
        let mut open = differing;
        let mut defined = 0;
        for rip in path.iter().rev() {
            let Some((_, effect)) = self.at(cpu, bus, *rip) else {
                break;
            };
            defined |= open & effect.defined & !effect.undefined;
            open &= !(effect.defined | effect.undefined);
        }
        // Flags that nothing has written were equal when the stretch began, so a difference in them counts.
        defined | open
    }

    /// Returns those of the differing flags that may be read before they are written, from RIP on.
    pub(super) fn live<B: JitBus>(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut Shadow<B>,
        differing: u64,
    ) -> u64 {
        self.known.clear();
        let mut patience = FAR;
        let rip = cpu.rip();
        self.live_at(cpu, bus, rip, differing, &mut patience)
    }

    /// Returns the flags of `wanted` that may be read from `rip` on.
    fn live_at<B: JitBus>(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut Shadow<B>,
        mut rip: u64,
        mut wanted: u64,
        patience: &mut u32,
    ) -> u64 {
        let mut live = 0;
        while wanted != 0 {
            let Some((i, effect)) = self.at(cpu, bus, rip) else {
                return live | wanted;
            };
            if *patience == 0 {
                return live | wanted;
            }
            *patience -= 1;
            live |= wanted & effect.read;
            wanted &= !(effect.read | effect.defined);
            match i.flow_control() {
                // The interrupt that ends HLT pushes all flags.
                _ if i.mnemonic() == Mnemonic::Hlt => return live | wanted,
                FlowControl::Next => rip = i.next_ip(),
                FlowControl::UnconditionalBranch if i.is_jmp_short_or_near() => {
                    rip = i.near_branch_target();
                }
                FlowControl::Call if i.is_call_near() => rip = i.near_branch_target(),
                FlowControl::ConditionalBranch if i.is_jcc_short_or_near() => {
                    live |= self.live_at(cpu, bus, i.near_branch_target(), wanted, patience);
                    wanted &= !live;
                    rip = i.next_ip();
                }
                _ => return live | wanted,
            }
        }
        live
    }

    fn at<B: JitBus>(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut Shadow<B>,
        rip: u64,
    ) -> Option<(Instruction, Effect)> {
        if let Some(known) = self.known.get(&rip) {
            return *known;
        }
        let mut bytes = [0; 15];
        let n = bus.ram().peek(cpu, linear(cpu, rip), &mut bytes);
        let options = gating::decoder_options(&cpu.features);
        let i = Decoder::with_ip(code_bits(cpu), &bytes[..n], rip, options).decode();
        let decoded = (!i.is_invalid()).then(|| (i, effect(&i)));
        self.known.insert(rip, decoded);
        decoded
    }
}

fn effect(i: &Instruction) -> Effect {
    Effect {
        read: decoded_flags(i.rflags_read()),
        defined: decoded_flags(overwritten(i)),
        undefined: decoded_flags(i.rflags_undefined()),
    }
}
