//! Why the machine has stopped, and the exit status that follows from it.

use rustix::io::Errno as Closed;

use crate::error::BootError;

/// Exit status for wrong usage, and for all failures before the guest runs.
pub(crate) const STATUS_SETUP: u8 = 2;
/// Exit status when the guest crashed or did not report its command's status.
pub(crate) const STATUS_GUEST: u8 = 125;

/// Why the machine has stopped. The first reason ends the run.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The guest's init has reported a status on the control port.
    Reported(u8),
    /// The guest has entered ACPI's S5.
    PowerOff,
    /// The guest has reset the machine, by port 0xcf9 or the keyboard controller.
    Reset,
    /// A vCPU is in the SHUTDOWN state.
    TripleFault {
        /// The vCPU's number.
        vcpu: u8,
    },
    /// The user has typed Ctrl-A X.
    Quit,
    /// A signal has asked this process to end.
    Signal(i32),
    /// The guest's CPUs have halted with interrupts off.
    Halted,
    /// The guest goes on in another process or in a file.
    Left(String),
    /// Standard output cannot be written to any more.
    OutputClosed(Closed),
    /// The hypervisor or the host has failed.
    Failed(BootError),
}

impl Ending {
    /// Returns the exit status and the line to print. They depend on whether a command's status was awaited. `panic`:
    /// what the guest's kernel has said about a panic.
    pub(crate) fn verdict(
        &self,
        awaits_status: bool,
        panic: Option<String>,
    ) -> (u8, Option<String>) {
        let unreported = |how: &str| {
            let line = format!("the guest {how} before the command's status was reported");
            if awaits_status {
                (STATUS_GUEST, Some(line))
            } else {
                (0, None)
            }
        };
        match self {
            Self::Reported(status) => (*status, None),
            Self::PowerOff => unreported("powered off"),
            // A kernel that panics resets the machine (panic=-1) or causes a triple fault.
            Self::Reset | Self::Halted | Self::TripleFault { .. } if panic.is_some() => (
                STATUS_GUEST,
                panic.map(|reason| format!("the guest's kernel panicked: {reason}")),
            ),
            Self::Reset => unreported("rebooted"),
            Self::Halted => unreported("halted"),
            Self::TripleFault { vcpu } => (
                STATUS_GUEST,
                Some(format!("the guest crashed: triple fault on vCPU {vcpu}")),
            ),
            Self::Quit => (0, None),
            Self::Left(place) => (0, Some(format!("the guest has gone to {place}"))),
            Self::Signal(signal) => (signal_status(*signal), None),
            Self::OutputClosed(Closed::PIPE) => (signal_status(signal_hook::consts::SIGPIPE), None),
            // The terminal was hung up, and this comes before its signal.
            Self::OutputClosed(Closed::IO) => (signal_status(signal_hook::consts::SIGHUP), None),
            Self::OutputClosed(errno) => {
                let error = std::io::Error::from(*errno);
                (
                    STATUS_SETUP,
                    Some(format!("cannot write standard output: {error}")),
                )
            }
            Self::Failed(error) => (STATUS_GUEST, Some(error.to_string())),
        }
    }
}

/// Returns the exit status by which shells report a signal.
fn signal_status(signal: i32) -> u8 {
    u8::try_from(signal.saturating_add(128)).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        let rows = [
            (Ending::Reported(7), true, 7),
            (Ending::PowerOff, false, 0),
            (Ending::PowerOff, true, 125),
            (Ending::Reset, false, 0),
            (Ending::Reset, true, 125),
            (Ending::TripleFault { vcpu: 1 }, false, 125),
            (Ending::Quit, true, 0),
            (Ending::Signal(15), true, 143),
            (Ending::Halted, false, 0),
            (Ending::Halted, true, 125),
            (Ending::OutputClosed(Closed::PIPE), false, 141),
            (Ending::OutputClosed(Closed::NOSPC), true, 2),
        ];
        for (ending, awaits, want) in rows {
            assert_eq!(ending.verdict(awaits, None).0, want, "{ending:?}");
        }
        for awaits in [true, false] {
            let (status, line) = Ending::Reset.verdict(awaits, Some("x".into()));
            assert_eq!(status, 125);
            assert_eq!(line.unwrap(), "the guest's kernel panicked: x");
            assert_eq!(Ending::PowerOff.verdict(false, Some("x".into())).0, 0);
        }
    }
}
