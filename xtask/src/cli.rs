//! The command line: a task, and each task's own options beside its code.

use clap::{Args, Parser, Subcommand};

use crate::{
    bench, boots, debian_guest, fresh_debian, guests, kvm_unit_tests, lockstep, random_bytes,
    selftests, stress, vmms,
};

/// Developer tasks.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) task: Task,
}

/// What is to be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Every check that a change passes.
    Ci,
    /// What of the rules a machine can check.
    Tidy(Tidy),
    /// Writes the generated documents.
    Docs,
    /// What the engines do on this machine, in one table.
    Bench(bench::Options),
    /// Kernels to a shell.
    Boots(boots::Options),
    /// Real programs in a guest.
    Guests(guests::Options),
    /// Unmodified VMMs.
    Vmms(vmms::Options),
    /// The kernel's KVM selftests.
    Selftests(selftests::Options),
    /// A whole Debian under QEMU.
    DebianGuest(debian_guest::Options),
    /// README's commands on a new machine.
    FreshDebian(fresh_debian::Options),
    /// That crate's own tests.
    KvmIoctls,
    /// The x86 suite of kvm-unit-tests, built elsewhere.
    KvmUnitTests(kvm_unit_tests::Options),
    /// Signals and KVM_RUN.
    Stress(stress::Options),
    /// Programs of random bytes, on the processor and in a guest.
    RandomBytes(random_bytes::Options),
    /// Models of lock-free code, in all orders.
    Loom,
    /// Translated code against the interpreter.
    Lockstep(lockstep::Options),
}

/// Options of `tidy`.
#[derive(Debug, Args)]
pub(crate) struct Tidy {
    /// Takes from the ratchet what is no longer found.
    #[arg(long, conflicts_with = "cycles")]
    pub(crate) shrink: bool,
    /// Prints the imports that make a cycle.
    #[arg(long)]
    pub(crate) cycles: bool,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<Task, clap::Error> {
        let words = ["xtask"].into_iter().chain(words.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.task)
    }

    #[test]
    fn the_definition_holds() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn what_there_is_is_taken_and_nothing_else() {
        for words in [
            "ci",
            "tidy --cycles",
            "boots 1-vcpu paravirt",
            "guests --engine interp --quick zstd",
            "guests --flushes --kernel file",
            "vmms --all --times 3 --tcg",
            "vmms others --crosvm file",
            "selftests x86_64/smm_test",
            "selftests --source 6.12 --all",
            "kvm-unit-tests folder --engine interp access",
            "kvm-unit-tests folder --tcg",
            "stress --times 5 halt",
            "lockstep --quick",
            "loom",
            "random-bytes --bits 32 --count 5",
            "bench io 3",
            "debian-guest --rounds 2",
            "fresh-debian --ci root",
        ] {
            assert!(parse(words).is_ok(), "{words}");
        }
        for words in [
            "",
            "nothing",
            "boots nothing",
            "guests --engine fast",
            "guests --kernel",
            "guests nothing",
            "vmms nothing",
            "vmms --times 0",
            "vmms others",
            "vmms others --qemu file",
            "vmms others --crosvm",
            "selftests nothing",
            "selftests --source 5.10",
            "kvm-unit-tests",
            "stress nothing",
            "bench io 0",
            "random-bytes --bits 16",
            "fresh-debian no-such-case",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
    }
}
