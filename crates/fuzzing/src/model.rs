//! [`Model`]: which processor this host is, as far as the interpreter follows one to the bit.

use std::sync::OnceLock;

use x86_cpu::Feature;

use crate::state;

/// Processors that the interpreter follows to the bit, also where the manual leaves it undefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// AMD's family 25, Zen 3: its results are the recorded ones.
    Zen3,
    /// AMD's family 25, Zen 4. The interpreter does its flags after BSF and BSR where CPUID shows such a model,
    /// but not which of two faults its REPE CMPSB raises.
    Zen4,
}

/// What this host is; `None` for processors that the interpreter does not follow beyond the manual.
pub fn model() -> Option<Model> {
    static MODEL: OnceLock<Option<Model>> = OnceLock::new();
    *MODEL.get_or_init(|| {
        let [_, (_, _, signature, ..), ..] = state::host_leaves();
        let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
        let model = if state::host_features().has(Feature::Zen4) {
            Model::Zen4
        } else {
            Model::Zen3
        };
        (state::host_is_amd() && family == 25).then_some(model)
    })
}

/// True if the interpreter does what this host does, also where the manual leaves it undefined.
pub fn is_modelled() -> bool {
    model().is_some()
}
