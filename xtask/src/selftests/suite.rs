//! What a kernel's suite of tests is, and how a test has to end.

/// How a test has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// It passes.
    Pass,
    /// The test passes but takes long, so it needs `--all`.
    Slow,
    /// The test skips itself, as on hardware without what the reason names.
    Skip(&'static str),
    /// The test passes, or skips itself where the reason holds.
    PassOrSkip(&'static str),
    /// The test fails, with these words in its output, because it asks for what the reason says. Any other failure is
    /// none that is known.
    Fails(&'static str, &'static str),
    /// The same, or it skips itself.
    SkipOrFails(&'static str, &'static str),
}
pub(super) use Expect::{Fails, Pass, PassOrSkip, Skip, SkipOrFails, Slow};

pub(super) const NESTED: &str = "no nested virtualization";
pub(super) const INTEL: &str = "for Intel hosts; run on one it needs nested virtualization";
pub(super) const SEV: &str = "no encrypted memory";
pub(super) const PRIVATE: &str = "no private memory";

/// A test's name, which is its place in the folder of programs, and its end.
pub(super) type Test = (&'static str, Expect);

/// The tests of one kernel.
#[derive(Debug)]
pub(super) struct Suite {
    /// The Debian package with the kernel's source.
    pub(super) package: &'static str,
    /// The folder in the cache where the programs are.
    pub(super) programs: &'static str,
    /// True if the tests need the headers of their own kernel, which `make headers` makes.
    pub(super) has_headers: bool,
    /// All tests.
    pub(super) tests: &'static [Test],
}

/// Exit status of a test that skips itself (kselftest's KSFT_SKIP), and of one whose assertion fails.
const SKIPPED: i32 = 4;
const FAILED: i32 = 254;

/// How a test has ended: its exit status, if it has ended in time, and its output.
pub(super) struct Ended {
    pub(super) status: Option<i32>,
    pub(super) output: String,
}

/// Returns how the test has ended, or what is wrong with that.
pub(super) fn check(expect: Expect, ended: &Ended) -> Result<&'static str, String> {
    let last = ended
        .output
        .lines()
        .rev()
        .find(|l| !l.trim().is_empty())
        .unwrap_or("no output");
    match (expect, ended.status) {
        (Pass | Slow | PassOrSkip(_), Some(0)) => Ok("pass"),
        (Skip(_) | PassOrSkip(_) | SkipOrFails(..), Some(SKIPPED)) => Ok("skip"),
        (Fails(words, _) | SkipOrFails(words, _), Some(FAILED)) if ended.output.contains(words) => {
            Ok("known")
        }
        (_, None) => Err(format!("did not end in time; {last}")),
        (_, Some(status)) => Err(format!("status {status}; {last}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_expected_is_no_failure() {
        let ended = |status| Ended {
            status,
            output: "last words\n\n".to_owned(),
        };
        for (expect, status, good) in [
            (Pass, Some(0), true),
            (Slow, Some(0), true),
            (Skip(NESTED), Some(4), true),
            (Pass, Some(4), false),
            (Skip(NESTED), Some(0), false),
            (PassOrSkip(NESTED), Some(0), true),
            (PassOrSkip(NESTED), Some(4), true),
            (PassOrSkip(NESTED), Some(1), false),
            (Pass, Some(254), false),
            (Skip(NESTED), None, false),
            (Pass, None, false),
            (Fails("last", NESTED), Some(254), true),
            (Fails("other", NESTED), Some(254), false),
            (Fails("last", NESTED), Some(0), false),
            (Fails("last", NESTED), None, false),
            (Fails("last", NESTED), Some(4), false),
            (SkipOrFails("last", NESTED), Some(4), true),
            (SkipOrFails("last", NESTED), Some(254), true),
            (SkipOrFails("other", NESTED), Some(254), false),
        ] {
            assert_eq!(check(expect, &ended(status)).is_ok(), good, "{status:?}");
        }
    }
}
