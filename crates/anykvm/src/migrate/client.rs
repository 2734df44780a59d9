//! `anykvm migrate`: sends one command to a running guest, and shows the answer.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::MigrateArgs;
use crate::endpoint::Endpoint;
use crate::error::BootError;
use crate::stdio;
use crate::terminal;

/// Does what the command line says.
pub(crate) fn migrate(args: &MigrateArgs) -> Result<(u8, Option<String>), BootError> {
    let path = &args.control;
    let cannot = |error: std::io::Error| {
        BootError::Usage(format!(
            "no guest answers at {}: {error} (anykvm boot --control {0} starts one that does)",
            path.display()
        ))
    };
    let command = command(args).map_err(cannot)?;
    let mut stream = UnixStream::connect(path).map_err(cannot)?;
    stream
        .write_all(format!("{command}\n").as_bytes())
        .map_err(cannot)?;
    let bar = args.to.as_ref().and_then(|_| bar());
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(cannot)?;
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "progress" => show(bar.as_ref(), rest),
            "ok" => {
                bar.inspect(ProgressBar::finish_and_clear);
                let printed = stdio::print(&format!("{rest}\n"));
                printed.map_err(BootError::host("cannot write standard output"))?;
                return Ok((0, None));
            }
            _ => {
                bar.inspect(ProgressBar::finish_and_clear);
                return Ok((1, Some(rest.to_owned())));
            }
        }
    }
    Ok((1, Some("the guest has ended".into())))
}

/// Returns the command in the control socket's words. Paths are absolute, as the guest's process has another working
/// folder.
fn command(args: &MigrateArgs) -> std::io::Result<String> {
    let absolute = |path: &PathBuf| std::path::absolute(path);
    let word = match &args.to {
        Some(place) => {
            let place = match place {
                Endpoint::Unix(path) => Endpoint::Unix(absolute(path)?),
                Endpoint::File(path) => Endpoint::File(absolute(path)?),
                Endpoint::Tcp(_) => place.clone(),
            };
            let verifies = u8::from(args.verify);
            return Ok(format!("migrate {} {verifies} {place}", args.downtime));
        }
        None if args.pause => "pause",
        None if args.resume => "resume",
        None if args.cancel => "cancel",
        None => "status",
    };
    Ok(word.to_owned())
}

/// Returns a progress bar, if standard error is a terminal.
fn bar() -> Option<ProgressBar> {
    if !terminal::is_terminal(rustix::stdio::stderr()) {
        return None;
    }
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    Some(bar)
}

/// Shows the progress from `ROUND DONE ALL SENT`.
fn show(bar: Option<&ProgressBar>, numbers: &str) {
    let numbers: Vec<u64> = numbers
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    if let (Some(bar), [round, done, all, sent]) = (bar, numbers.as_slice()) {
        bar.set_length(*all);
        bar.set_position(*done);
        bar.set_message(format!("round {round}, {} MiB sent", sent >> 20));
    }
}
