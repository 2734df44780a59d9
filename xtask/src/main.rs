//! Developer tasks: `cargo xtask ci`, `tidy` and `docs` (writes the generated documents).

#![forbid(unsafe_code)]

mod ci;
mod tidy;

use std::process::ExitCode;

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let result = match task.as_str() {
        "ci" => ci::run(),
        "tidy" => tidy::run(),
        "docs" => tidy::quirks::write(&tidy::root()),
        _ => Err("usage: cargo xtask <ci | tidy | docs>".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
