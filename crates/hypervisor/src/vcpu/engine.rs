//! Which engine a vCPU has.

use x86_jit::Jit;

use super::bus::Bus;
use crate::{Engine, EngineOptions};

/// The translator, if there is to be one and the host allows generated code.
pub(super) fn translator(options: &EngineOptions) -> Option<Jit<Bus>> {
    if options.engine == Engine::Interpreter {
        return None;
    }
    let mut jit = match options.code_cache {
        Some(bytes) => Jit::with_capacity(bytes)?,
        None => Jit::new()?,
    };
    if let Some(every) = options.random_flushes {
        jit.set_random_flushes(every);
    }
    if let Engine::Lockstep { is_planted } = options.engine {
        jit.set_lockstep(is_planted, options.messages.0);
    }
    if let Some(profiler) = options.profiler {
        jit.set_profiler(profiler, options.messages.0);
    }
    Some(jit)
}
