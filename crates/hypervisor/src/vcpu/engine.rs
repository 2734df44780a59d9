//! Which engine a vCPU has.

use x86_jit::Jit;

use super::bus::Bus;
use crate::{Engine, EngineOptions};

/// Bytes of translated code that a vCPU of a small guest may have.
const LEAST_CODE: usize = 16 << 20;

/// The translator, if there is to be one and the host allows generated code. `small_memory`: bytes of a small guest's memory.
pub(super) fn translator(options: &EngineOptions, small_memory: Option<usize>) -> Option<Jit<Bus>> {
    if options.engine == Engine::Interpreter {
        return None;
    }
    let of_small = small_memory.map(|bytes| (bytes / 2).max(LEAST_CODE));
    let mut jit = match options.code_cache.or(of_small) {
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
