//! `cargo xtask selftests [--source 6.1|6.12] [--all] [NAME…]`: a kernel's KVM selftests, from Debian's package of its
//! source, through `anykvm exec`.
//!
//! A list for each kernel says how each test has to end; any other end is a failure, and so is a test that the package
//! has and the list does not. `--all` adds tests that take long.

mod build;
mod linux_6_1;
mod linux_6_12;
mod suite;

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum, builder::PossibleValuesParser};

use suite::{Ended, Expect, Slow, Suite, check};

/// The kernel whose tests are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Source {
    /// Debian 12's.
    #[value(name = "6.1")]
    Linux6_1,
    /// The later one that Debian 12 has beside it, and Debian 13's.
    #[value(name = "6.12")]
    Linux6_12,
}

impl Source {
    const fn suite(self) -> &'static Suite {
        match self {
            Self::Linux6_1 => &linux_6_1::SUITE,
            Self::Linux6_12 => &linux_6_12::SUITE,
        }
    }

    /// Returns the first kernel whose source this release of Debian's has.
    fn available() -> Self {
        let mut sources = Self::value_variants().iter().copied();
        let first = sources.find(|source| crate::debian::is_known(source.suite().package));
        first.unwrap_or(Self::Linux6_1)
    }
}

/// Options of `selftests`.
#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// The kernel whose tests are run: by default the first one that there is a package of.
    #[arg(long, value_enum)]
    pub(crate) source: Option<Source>,
    /// The slow ones too.
    #[arg(long)]
    pub(crate) all: bool,
    /// These alone.
    #[arg(value_parser = PossibleValuesParser::new(names()))]
    pub(crate) names: Vec<String>,
}

/// Returns the names of all tests, of whichever kernel.
fn names() -> Vec<&'static str> {
    let all = Source::value_variants().iter().map(|s| s.suite().tests);
    let mut names: Vec<_> = all.flatten().map(|(name, _)| *name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Time limit of a test, for a busy host.
const LIMIT: Duration = Duration::from_secs(120);
/// Time limit of a slow test. hardware_disable_test makes 512 processes with four vCPUs that compute, each of which
/// takes a second of processor time.
const SLOW_LIMIT: Duration = Duration::from_secs(1500);
/// Tests that may fail for a reason of their own, and how often they are tried.
const REPEATED: &[(&str, u32, &str)] = &[(
    "dirty_log_test",
    3,
    "it looks at pages while the guest writes them, and takes a preempted vCPU for a lost page",
)];

/// Runs the quick tests, all tests, or those that are named.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let suite = options.source.unwrap_or_else(Source::available).suite();
    let tests = wanted(suite, options)?;
    let folder = build::build(suite)?;
    let anykvm = crate::build::anykvm()?;
    let mut failed = Vec::new();
    for (name, expect) in tests {
        let start = Instant::now();
        let attempts = REPEATED.iter().find(|(test, ..)| *test == name);
        let attempts = attempts.map_or(1, |(_, attempts, _)| *attempts);
        let result = attempt(&anykvm, &folder.join(name), expect, attempts);
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(what) => eprintln!("{name:40} {what:5} {seconds:6.1} s"),
            Err(why) => {
                eprintln!("{name:40} FAILED {seconds:5.1} s: {why}");
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("selftests failed: {}", failed.join(" ")))
    }
}

/// Returns the tests that the options ask for.
fn wanted(suite: &'static Suite, options: &Options) -> Result<Vec<suite::Test>, String> {
    let names = &options.names;
    let lacks = |name: &&String| suite.tests.iter().all(|(test, _)| test != name);
    if let Some(name) = names.iter().find(lacks) {
        return Err(format!("{} has no {name}", suite.package));
    }
    let is_wanted = |(test, expect): &suite::Test| {
        if names.is_empty() {
            options.all || *expect != Slow
        } else {
            names.iter().any(|name| name == test)
        }
    };
    Ok(suite.tests.iter().copied().filter(is_wanted).collect())
}

/// Runs a test until it ends as expected, a few times at most.
fn attempt(
    anykvm: &Path,
    test: &Path,
    expect: Expect,
    attempts: u32,
) -> Result<&'static str, String> {
    let limit = if expect == Slow { SLOW_LIMIT } else { LIMIT };
    let mut result = Err("not run".to_owned());
    for _ in 0..attempts {
        result = check(expect, &run_one(anykvm, test, limit)?);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn run_one(anykvm: &Path, test: &Path, limit: Duration) -> Result<Ended, String> {
    let cannot = |e: std::io::Error| format!("{}: {e}", test.display());
    let log = test.with_extension("log");
    let output = fs::File::create(&log).map_err(cannot)?;
    let errors = output.try_clone().map_err(cannot)?;
    // timeout(1) also ends a test's children, which are in its process group.
    let status = Command::new("timeout")
        .args(["--kill-after=5", &limit.as_secs().to_string()])
        .arg(anykvm)
        .args(["exec", "--quiet", "--"])
        .arg(test)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .status()
        .map_err(cannot)?;
    // These are the statuses of timeout when the time is over, or when it had to kill.
    let status = status.code().filter(|s| ![124, 137].contains(s));
    let output = fs::read(&log).map_err(cannot)?;
    Ok(Ended {
        status,
        output: String::from_utf8_lossy(&output).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::{suite::*, *};

    #[test]
    fn names_are_unique_and_reasons_are_given() {
        for source in Source::value_variants() {
            let tests = source.suite().tests;
            for (i, (name, expect)) in tests.iter().enumerate() {
                assert!(tests.iter().skip(i + 1).all(|(n, _)| n != name), "{name}");
                let is_bare = matches!(
                    expect,
                    Skip("") | PassOrSkip("") | Fails(_, "") | SkipOrFails(_, "")
                );
                assert!(!is_bare, "{name}");
            }
            for (name, attempts, why) in REPEATED {
                assert!(tests.iter().any(|(n, _)| n == name));
                assert!(*attempts > 1 && !why.is_empty());
            }
        }
    }

    #[test]
    fn a_test_of_another_kernel_is_not_run() {
        let of = |source| Options {
            source,
            names: vec!["x86_64/pmu_counters_test".to_owned()],
            ..Options::default()
        };
        let wanted = |source: Source| wanted(source.suite(), &of(Some(source)));
        assert!(wanted(Source::Linux6_1).is_err());
        assert_eq!(wanted(Source::Linux6_12).unwrap().len(), 1);
    }
}
