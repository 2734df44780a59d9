//! The case of processor models: QEMU starts models that any host with AVX2 and ADX can have, with `enforce` and
//! without a warning.

use std::process::Command;

use testkit::boot::run_limited;

use super::{LIMIT, Setup};

const MODELS: &[&str] = &[
    "486",
    "pentium",
    "pentium3",
    "qemu32",
    "qemu64",
    "kvm32",
    "kvm64",
    "Conroe",
    "Penryn",
    "Nehalem",
    "Westmere",
    "SandyBridge",
    "IvyBridge",
    "Haswell-noTSX",
    "Broadwell-noTSX",
    "host",
    "max",
];

pub(super) fn enforced(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    for model in MODELS {
        let model = format!("{model},enforce");
        let mut command = setup.command(arguments);
        command.args(["-cpu", &model, "-S", "-monitor", "stdio"]);
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo quit | \"$0\" \"$@\""]);
        shell.arg(command.get_program()).args(command.get_args());
        shell.envs(command.get_envs().filter_map(|(k, v)| Some((k, v?))));
        let outcome = run_limited(&mut shell, LIMIT).map_err(|e| e.to_string())?;
        let words = outcome.last_words(5);
        if outcome.status != Some(0) || words.contains("warning:") {
            return Err(format!("-cpu {model}: {words}"));
        }
    }
    Ok(())
}
