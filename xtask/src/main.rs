//! Developer tasks: `cargo xtask ci` and `cargo xtask tidy`.

#![forbid(unsafe_code)]

mod ci;
mod tidy;

use std::process::ExitCode;

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let result = match task.as_str() {
        "ci" => ci::run(),
        "tidy" => tidy::run(),
        _ => Err("usage: cargo xtask <ci | tidy>".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
