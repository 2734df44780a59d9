//! Developer tasks: `cargo xtask help` lists them.

#![forbid(unsafe_code)]

mod bench;
mod boots;
mod build;
mod ci;
mod cli;
mod debian;
mod debian_guest;
mod fresh_debian;
mod guests;
mod kernel_module;
mod kvm_ioctls;
mod kvm_unit_tests;
mod lockstep;
mod loom;
mod needs;
mod random_bytes;
mod selftests;
mod stress;
mod tidy;
mod tool;
mod vmms;

use std::process::ExitCode;

use clap::Parser;

use cli::Task;

fn main() -> ExitCode {
    let result = match cli::Cli::parse().task {
        Task::Ci => ci::run(),
        Task::Tidy(o) if o.shrink => tidy::ratchet::shrink(&tidy::root()),
        Task::Tidy(o) if o.cycles => tidy::ratchet::show_cycles(&tidy::root()),
        Task::Tidy(_) => tidy::run(),
        Task::Docs => tidy::quirks::write(&tidy::root()),
        Task::Bench(o) => bench::run(&o),
        Task::Boots(o) => boots::run(&o),
        Task::Guests(o) => guests::run(&o),
        Task::FreshDebian(o) => fresh_debian::run(&o),
        Task::DebianGuest(o) => debian_guest::run(&o),
        Task::KvmIoctls => kvm_ioctls::run(),
        Task::KvmUnitTests(o) => kvm_unit_tests::run(&o),
        Task::Stress(o) => stress::run(&o),
        Task::RandomBytes(o) => random_bytes::run(&o),
        Task::Loom => loom::run(),
        Task::Lockstep(o) => lockstep::run(&o),
        Task::Selftests(o) => selftests::run(&o),
        Task::Vmms(o) => vmms::run(&o),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
