//! `anykvm bench wp --module`: a Linux guest whose kernel toggles CR0.WP at each switch of tasks, as PaX's KERNEXEC does.
//!
//! The load is `ssdd`: processes that trace others step by step, so that tasks switch all the time. The module
//! (guests/linux-wp-toggle) is loaded for all runs, and toggles in every other one.

use std::path::Path;
use std::time::Duration;

use super::machines::{self, Files, Guest, Machine, Run};
use super::report::{self, Verdict};
use super::{is_plausible, note};
use crate::cli::BenchArgs;
use crate::error::BootError;

const PROGRAM: &str = "/usr/bin/ssdd";
const ITERATIONS: u32 = 3000;
/// Names of samples: without toggling, with it, and how often the module has toggled.
const STILL: &str = "ssdd";
const TOGGLES: &str = "ssdd-toggles";
const WRITTEN: &str = "written";
/// Time with toggling over the time without, at most.
const BAR: f64 = 1.05;
/// Source 5, `ssdd 10 50000` on a kernel with KERNEXEC in a guest of Linux 6.1's KVM, seconds: before its patches and after
/// them, with two-dimensional paging and with shadow pages.
const SOURCE: &str =
    "source 5, seconds: TDP 8.23 before, 3.36 after; shadow 68.7 before, 69.1 after\n";

/// The table of all machines.
pub(super) fn run(
    args: &BenchArgs,
    files: &mut Files,
    module: &Path,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    if !Path::new(PROGRAM).exists() {
        return Err(machines::missing("rt-tests"));
    }
    files.add_file(Path::new(PROGRAM));
    files.add_file(module);
    let name = module.file_name().unwrap_or_default().to_string_lossy();
    let ssdd =
        |sample| format!("PATH=$PATH:. ./program run {sample} none ssdd -f 10 -i {ITERATIONS}");
    let repeated = |body: &str| machines::repeated(body, args.repeats);
    let in_guest = format!(
        "insmod ./{name} toggle=0 || exit 1\np=/sys/module/wp_toggle/parameters\n{}\necho @ {WRITTEN} $(cat $p/written) 0",
        repeated(&format!(
            "{}\necho 1 >$p/toggle\n{}\necho 0 >$p/toggle",
            ssdd(STILL),
            ssdd(TOGGLES)
        ))
    );
    let mut machines = vec![Machine::Native, Machine::Anykvm];
    machines.extend((!args.no_tcg).then_some(Machine::Tcg));
    let mut times: Vec<[Option<f64>; 2]> = vec![[None; 2]; machines.len()];
    for round in 1..=args.rounds {
        for (machine, best) in machines.iter().zip(&mut times) {
            let script = match machine {
                Machine::Native => repeated(&ssdd(STILL)),
                _ => in_guest.clone(),
            };
            let run = files.run_script(&Guest::new(*machine, 1, "512M"), None, &script)?;
            note(&format!(
                "round {round} of {}: {machine:?}: {:.1} s",
                args.rounds,
                run.total.as_secs_f64()
            ));
            is_plausible(*machine, &run)?;
            has_toggled(*machine, &run, args.repeats)?;
            for (name, best) in [STILL, TOGGLES].iter().zip(best) {
                let of = run.samples.iter().filter(|s| s.name == *name);
                let seconds = of.map(|s| Duration::from_nanos(s.ns).as_secs_f64());
                *best = seconds.chain(*best).reduce(f64::min);
            }
        }
    }
    Ok(table(&machines, &times, verdict))
}

/// An error unless the module has written while CR0.WP was clear, at least once for each iteration of each process.
fn has_toggled(machine: Machine, run: &Run, repeats: u32) -> Result<(), BootError> {
    let written = run.samples.iter().find(|s| s.name == WRITTEN);
    let least = u64::from(10 * ITERATIONS * repeats);
    if machine == Machine::Native || written.is_some_and(|s| s.ns >= least) {
        return Ok(());
    }
    let written = written.map_or(0, |s| s.ns);
    Err(BootError::NoImage(format!(
        "{machine:?}: the module has toggled CR0.WP {written} times, not {least}"
    )))
}

fn table(machines: &[Machine], times: &[[Option<f64>; 2]], verdict: &mut Verdict) -> String {
    let head = [
        "ssdd -f 10 -i 3000, s",
        "CR0.WP stays",
        "toggled at each switch",
        "ratio",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (machine, [still, toggles]) in machines.iter().zip(times) {
        let ratio = still.zip(*toggles).map(|(still, toggles)| toggles / still);
        if let (Machine::Anykvm, Some(ratio)) = (machine, ratio) {
            verdict.at_most("ssdd with CR0.WP toggled", ratio, BAR);
        }
        lines.push(vec![
            format!("{machine:?}"),
            report::cell(*still),
            report::cell(*toggles),
            report::cell(ratio),
        ]);
    }
    format!("{}{SOURCE}", report::aligned(&lines))
}
