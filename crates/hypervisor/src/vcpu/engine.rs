//! Which engine a vCPU has.

use x86_jit::Jit;

use super::bus::Bus;

/// The translator that the environment asks for.
///
/// `ANYKVM_ENGINE`: `interp` is the interpreter alone, `lockstep` compares translated code with it,
/// `lockstep-planted` does so with an error put into translated code. `ANYKVM_CODE_CACHE`: bytes of
/// translated code, with K or M. `ANYKVM_CODE_FLUSH`: all of it is dropped at random, once in so
/// many blocks looked for.
pub(super) fn translator() -> Option<Jit<Bus>> {
    let variable = |name: &str| std::env::var(name).ok();
    let engine = variable("ANYKVM_ENGINE").unwrap_or_default();
    if engine == "interp" {
        return None;
    }
    let mut jit = match variable("ANYKVM_CODE_CACHE").and_then(|v| bytes(&v)) {
        Some(n) => Jit::with_capacity(n)?,
        None => Jit::new()?,
    };
    if let Some(every) = variable("ANYKVM_CODE_FLUSH").and_then(|v| v.parse().ok()) {
        jit.set_random_flushes(every);
    }
    if let Some(rest) = engine.strip_prefix("lockstep") {
        jit.set_lockstep(rest == "-planted");
    }
    Some(jit)
}

/// "2M", "512K", "1048576".
fn bytes(text: &str) -> Option<usize> {
    let (digits, shift) = match text.strip_suffix('M') {
        Some(digits) => (digits, 20),
        None => text
            .strip_suffix('K')
            .map_or((text, 0), |digits| (digits, 10)),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}
