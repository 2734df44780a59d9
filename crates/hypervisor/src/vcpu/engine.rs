//! Which engine a vCPU has.

use x86_jit::{CACHE_SIZE, Jit};

use super::bus::Bus;
use crate::{Engine, EngineOptions};

/// Bytes of translated code that a vCPU may have if its guest is small or the process may have little memory.
const LEAST_CODE: usize = 16 << 20;

/// Memory that a vCPU's translated code leaves to the VMM and to other vCPUs, as a multiple of the code's size.
const REST: usize = 4;

/// The translator, if there is to be one and the host allows generated code. `small_memory`: bytes of a small guest's memory.
pub(super) fn translator(
    options: &EngineOptions,
    small_memory: Option<usize>,
) -> Option<Box<Jit<Bus>>> {
    if options.engine == Engine::Interpreter {
        return None;
    }
    let of_small = small_memory.map(|bytes| (bytes / 2).max(LEAST_CODE));
    let mut jit = match options.code_cache {
        Some(bytes) => Jit::with_capacity(bytes)?,
        None => with_at_most(of_small.unwrap_or(CACHE_SIZE))?,
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

/// Makes a translator with room for `bytes` of code, or for less if the process cannot have that.
fn with_at_most(mut bytes: usize) -> Option<Box<Jit<Bus>>> {
    while bytes > LEAST_CODE {
        if let Some(jit) = Jit::with_capacity(bytes)
            && host::allocator::can_have(REST * bytes).is_ok()
        {
            return Some(jit);
        }
        bytes /= 2;
    }
    Jit::with_capacity(bytes)
}
