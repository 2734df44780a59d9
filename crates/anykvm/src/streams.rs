//! How the guest's shell or command is connected to our standard input, output and error.
//!
//! | standard input, output | shell | command |
//! | --- | --- | --- |
//! | terminal, terminal | a terminal in the guest | a terminal in the guest; a standard error that is none stays apart |
//! | terminal, other | a terminal in the guest, whose output is copied | three streams; the terminal stays as it is, so Ctrl-C ends us |
//! | other, any | a shell that reads commands, three streams | three streams |

use crate::cli::BootArgs;
use crate::terminal;

/// What the guest's shell or command has for standard input, output and error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A terminal in the guest, which is our standard input and output.
    Console {
        /// True if standard error is a stream of its own.
        has_errors: bool,
    },
    /// Three streams that pass bytes unchanged.
    Streams,
}

/// Which of our standard streams are terminals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terminals {
    pub(crate) input: bool,
    pub(crate) output: bool,
    pub(crate) errors: bool,
}

impl Terminals {
    /// Looks at the streams of this process.
    pub(crate) fn of_this_process() -> Self {
        Self {
            input: terminal::is_terminal(rustix::stdio::stdin()),
            output: terminal::is_terminal(rustix::stdio::stdout()),
            errors: terminal::is_terminal(rustix::stdio::stderr()),
        }
    }
}

/// Returns the shape of a guest's streams. An initramfs that is not ours knows only the console.
pub(crate) fn shape(args: &BootArgs, terminals: Terminals) -> Shape {
    let console = Shape::Console { has_errors: false };
    let is_ours = args.initrd.is_none() && !args.no_initrd && args.own_init().is_none();
    match (is_ours, args.command.is_empty()) {
        (false, _) => console,
        (true, true) if terminals.input => console,
        (true, false) if terminals.input && terminals.output => Shape::Console {
            has_errors: !terminals.errors,
        },
        (true, _) => Shape::Streams,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn every_combination() {
        let shape_of = |words: &[&str], tty: [bool; 3]| {
            let words = ["anykvm", "boot"].iter().chain(words);
            let Command::Boot(args) = Cli::parse_from(words).command else {
                panic!("not a boot");
            };
            let [input, output, errors] = tty;
            shape(
                &args,
                Terminals {
                    input,
                    output,
                    errors,
                },
            )
        };
        let console = |has_errors| Shape::Console { has_errors };
        for errors in [true, false] {
            for output in [true, false] {
                assert_eq!(shape_of(&[], [true, output, errors]), console(false));
                assert_eq!(shape_of(&[], [false, output, errors]), Shape::Streams);
                let command = ["--", "true"];
                assert_eq!(shape_of(&command, [false, output, errors]), Shape::Streams);
                let foreign = ["--no-initrd"];
                assert_eq!(shape_of(&foreign, [false, output, errors]), console(false));
            }
            let command = ["--", "true"];
            assert_eq!(shape_of(&command, [true, false, errors]), Shape::Streams);
            assert_eq!(shape_of(&command, [true, true, errors]), console(!errors));
        }
    }
}
