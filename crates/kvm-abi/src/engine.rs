//! The environment variables by which a user chooses how VMs execute.
//!
//! `ANYKVM_ENGINE`: `interp` is the interpreter alone, `lockstep` compares translated code with it,
//! `lockstep-planted` does so with an error put into translated code. `ANYKVM_CODE_CACHE`: bytes of
//! translated code, with K or M. `ANYKVM_CODE_FLUSH`: all of it is dropped at random, once in so
//! many blocks looked for. `ANYKVM_MMU`: `tdp`, `shadow` or `auto` (docs/mmu.md).
//! `ANYKVM_DIRTY`: `locked` or `everything`, how dirty pages were harvested once, for comparison (docs/decisions/dirty-logging.md).
//! `ANYKVM_PERF`: `map` or `jitdump` names translated code for `perf` (docs/testing.md).
//! `ANYKVM_MMU_PAGES`: KVM_SET_NR_MMU_PAGES where the VMM does not ask for it. Anything else is as if it were not there.

use std::io::Write;

use hypervisor::{Engine, EngineOptions, Harvest, Messages, Policy, Profiler};

/// What the process's environment says.
pub(crate) fn options() -> EngineOptions {
    read(|name| std::env::var(name).ok())
}

fn read(variable: impl Fn(&str) -> Option<String>) -> EngineOptions {
    let engine = variable("ANYKVM_ENGINE").unwrap_or_default();
    EngineOptions {
        engine: match engine.strip_prefix("lockstep") {
            Some(rest) => Engine::Lockstep {
                is_planted: rest == "-planted",
            },
            None if engine == "interp" => Engine::Interpreter,
            None => Engine::Translator,
        },
        code_cache: variable("ANYKVM_CODE_CACHE").and_then(|v| bytes(&v)),
        random_flushes: variable("ANYKVM_CODE_FLUSH").and_then(|v| v.parse().ok()),
        translations: match variable("ANYKVM_MMU").as_deref() {
            Some("tdp") => Policy::Tdp,
            Some("shadow") => Policy::Shadow,
            _ => Policy::Auto,
        },
        harvest: match variable("ANYKVM_DIRTY").as_deref() {
            Some("locked") => Harvest::Locked,
            Some("everything") => Harvest::Everything,
            _ => Harvest::Lockless,
        },
        profiler: match variable("ANYKVM_PERF").as_deref() {
            Some("map") => Some(Profiler::Map),
            Some("jitdump") => Some(Profiler::Dump),
            _ => None,
        },
        messages: Messages(tell),
        mmu_pages: variable("ANYKVM_MMU_PAGES").and_then(|v| v.parse().ok()),
    }
}

/// For the user, who has asked by one of the variables. A closed standard error must not end the VMM.
fn tell(message: &str) {
    let _ = writeln!(std::io::stderr(), "anykvm: {message}");
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

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(value: &str) -> Engine {
        read(|name| (name == "ANYKVM_ENGINE").then(|| value.to_owned())).engine
    }

    #[test]
    fn the_engine_is_what_the_variable_names() {
        assert_eq!(engine("interp"), Engine::Interpreter);
        assert_eq!(engine("lockstep"), Engine::Lockstep { is_planted: false });
        let planted = Engine::Lockstep { is_planted: true };
        assert_eq!(engine("lockstep-planted"), planted);
        assert_eq!(engine("jit"), Engine::Translator);
        assert_eq!(read(|_| None), EngineOptions::default());
    }

    #[test]
    fn sizes_have_units_and_stay_within_a_word() {
        assert_eq!(bytes("2M"), Some(2 << 20));
        assert_eq!(bytes("512K"), Some(512 << 10));
        assert_eq!(bytes("1048576"), Some(1 << 20));
        assert_eq!(bytes("18446744073709551615M"), None);
        assert_eq!(bytes("2G"), None);
    }

    #[test]
    fn address_spaces_survive_unless_asked_otherwise() {
        let policy = |value: &str| {
            read(|name| (name == "ANYKVM_MMU").then(|| value.to_owned())).translations
        };
        assert_eq!(policy("shadow"), Policy::Shadow);
        assert_eq!(policy("auto"), Policy::Auto);
        assert_eq!(policy("tdp"), Policy::Tdp);
        assert_eq!(policy(""), Policy::Auto);
    }

    #[test]
    fn baselines_and_profilers_are_asked_for_by_name() {
        let of = |name: &'static str, value: &'static str| {
            read(move |n| (n == name).then(|| value.to_owned()))
        };
        assert_eq!(of("ANYKVM_DIRTY", "locked").harvest, Harvest::Locked);
        assert_eq!(
            of("ANYKVM_DIRTY", "everything").harvest,
            Harvest::Everything
        );
        assert_eq!(of("ANYKVM_DIRTY", "x").harvest, Harvest::Lockless);
        assert_eq!(of("ANYKVM_PERF", "map").profiler, Some(Profiler::Map));
        assert_eq!(of("ANYKVM_PERF", "jitdump").profiler, Some(Profiler::Dump));
        assert_eq!(of("ANYKVM_PERF", "x").profiler, None);
    }
}
