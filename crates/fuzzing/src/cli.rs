//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use fuzzing::{Family, Mode};

/// Random tests whose oracle is another implementation.
#[derive(Debug, Parser)]
#[command(name = "fuzzing")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What is compared.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Single instructions on the interpreter and on the host CPU, each form in turn.
    Insn(Instructions),
    /// The same with blocks of two to eight instructions.
    Random(Instructions),
    /// Programs on the translator and on the interpreter.
    Jit(Programs),
    /// Sequences of random KVM calls.
    Ioctl(Calls),
}

/// Options of `insn` and `random`.
#[derive(Debug, Args)]
pub(crate) struct Instructions {
    /// How many.
    #[arg(long, default_value_t = 1_000_000)]
    pub(crate) cases: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Only forms of this family.
    #[arg(long)]
    pub(crate) family: Option<FamilyName>,
    /// The code's mode.
    #[arg(long, default_value = "64")]
    pub(crate) bits: Bits,
    /// Only this form, by iced-x86's name.
    #[arg(long)]
    pub(crate) form: Option<String>,
    /// Do not stop at the first difference: report the first of each form.
    #[arg(long)]
    pub(crate) all: bool,
    /// Compare undefined flags too: for hosts of the interpreter's model.
    #[arg(long)]
    pub(crate) exact: bool,
}

/// [`Family`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FamilyName {
    /// x87, MMX, SSE and AVX.
    Fp,
    /// Everything else.
    Integer,
}

impl From<FamilyName> for Family {
    fn from(name: FamilyName) -> Self {
        match name {
            FamilyName::Fp => Self::Fp,
            FamilyName::Integer => Self::Integer,
        }
    }
}

/// [`Mode`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Bits {
    /// 64-bit code.
    #[value(name = "64")]
    Long,
    /// 32-bit code.
    #[value(name = "32")]
    Compatibility,
}

impl From<Bits> for Mode {
    fn from(bits: Bits) -> Self {
        match bits {
            Bits::Long => Self::Bits64,
            Bits::Compatibility => Self::Bits32,
        }
    }
}

/// Options of `jit`.
#[derive(Debug, Args)]
pub(crate) struct Programs {
    /// How many.
    #[arg(long, default_value_t = 100_000)]
    pub(crate) cases: u64,
    /// The first program's seed.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Bytes of translated code: few have it overflow.
    #[arg(long, default_value_t = 64 << 20)]
    pub(crate) cache: usize,
    /// Programs of real mode and of segments with bases and limits.
    #[arg(long)]
    pub(crate) segments: bool,
    /// With the translator's own comparison, which says where.
    #[arg(long, requires = "segments")]
    pub(crate) lockstep: bool,
    /// Only print the program of the seed.
    #[arg(long)]
    pub(crate) list: bool,
    /// Do not stop before 20 programs differ.
    #[arg(long)]
    pub(crate) all: bool,
}

/// Options of `ioctl`.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Calls {
    /// How long.
    #[arg(long, default_value_t = 60)]
    pub(crate) seconds: u64,
    /// The first sequence's seed.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Calls of each thread of a sequence.
    #[arg(long, default_value_t = 400)]
    pub(crate) length: u64,
    /// Only the sequence of the seed, in this process.
    #[arg(long)]
    pub(crate) one: bool,
    /// As the child that makes a batch of sequences.
    #[arg(long, hide = true)]
    pub(crate) worker: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_is_no_option_is_refused() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        assert!(parse("fuzzing insn --bits 32 --family fp --all").is_ok());
        assert!(parse("fuzzing jit --seed 80244 --cases 1").is_ok());
        for wrong in [
            "fuzzing insn --bits 16",
            "fuzzing jit --case 1",
            "fuzzing ioctl --seed x",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
