//! [`Model`]: which processor this host is, among those that the interpreter follows to the bit.

use std::sync::OnceLock;

use x86_cpu::Feature;

use crate::state;

/// Processors that the interpreter follows to the bit, even where the manual leaves results undefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// AMD's family 25, Zen 3, on which the recordings were made.
    Zen3,
    /// AMD's family 25, Zen 4. The interpreter computes its flags after BSF and BSR if CPUID shows such a model, but
    /// does not follow it in which of two faults REPE CMPSB raises.
    Zen4,
}

/// Returns the model of this host. `None` for processors that the interpreter follows only as far as the manual says.
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

/// Returns true if the interpreter does what this host does, even where the manual leaves results undefined.
pub fn is_modelled() -> bool {
    model().is_some()
}
