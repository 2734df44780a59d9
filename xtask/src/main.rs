//! Developer tasks: `cargo xtask ci`, `tidy`, `docs` (writes the generated documents),
//! `boots` (kernels to a shell), `guests` (real programs in a guest), `vmms` (unmodified VMMs),
//! `selftests` (the kernel's KVM selftests), `debian-guest` (a whole Debian under QEMU),
//! `fresh-debian` (README's commands on a new machine), `kvm-ioctls` (that crate's tests),
//! `kvm-unit-tests` (that suite, built elsewhere), `stress` (signals and
//! KVM_RUN), `lockstep` (JIT against interpreter),
//! `loom` (models of lock-free code) and `bench`.

#![forbid(unsafe_code)]

mod bench;
mod boots;
mod build;
mod ci;
mod debian;
mod debian_guest;
mod fresh_debian;
mod guests;
mod kvm_ioctls;
mod kvm_unit_tests;
mod lockstep;
mod loom;
mod needs;
mod selftests;
mod stress;
mod tidy;
mod tool;
mod vmms;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let task = arguments.next().unwrap_or_default();
    let arguments: Vec<String> = arguments.collect();
    let result = match task.as_str() {
        "ci" => ci::run(),
        "tidy" if arguments == ["--shrink"] => tidy::ratchet::shrink(&tidy::root()),
        "tidy" if arguments == ["--cycles"] => tidy::ratchet::show_cycles(&tidy::root()),
        "tidy" => tidy::run(),
        "docs" => tidy::quirks::write(&tidy::root()),
        "bench" => bench::run(&arguments),
        "boots" => boots::run(&arguments),
        "guests" => guests::run(&arguments),
        "fresh-debian" => fresh_debian::run(&arguments),
        "debian-guest" => debian_guest::run(&arguments),
        "kvm-ioctls" => kvm_ioctls::run(&arguments),
        "kvm-unit-tests" => kvm_unit_tests::run(&arguments),
        "stress" => stress::run(&arguments),
        "lockstep" => lockstep::run(&arguments),
        "loom" => loom::run(),
        "selftests" => selftests::run(&arguments),
        "vmms" => vmms::run(&arguments),
        _ => Err(
            "usage: cargo xtask <ci | tidy | docs | boots | guests | vmms | selftests | debian-guest | fresh-debian | kvm-ioctls | kvm-unit-tests | stress | lockstep | loom | bench>"
                .to_owned(),
        ),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
