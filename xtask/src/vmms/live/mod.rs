//! Live migration between two processes of an unmodified QEMU, while the guest writes memory.
//!
//! The guest checks that each page that it writes has what it wrote there last, and counts. Both consoles together have
//! each number once. All memory is compared when both machines stand still. `--times N` migrates N times in a row, each
//! target being the next source, and prints the distribution of downtimes; `--tcg` also times QEMU's own translator.

mod memory;
mod qmp;

use std::{
    fs,
    net::TcpListener,
    process::Command,
    time::{Duration, Instant},
};

use super::{How, Setup};
use crate::tool::tool;
use memory::Area;
use qmp::{PATIENCE, Qemu, number, value};

/// The program that writes memory, and that `live` on the guest's command line starts.
pub(super) const WRITER: &str = include_str!("writer.c");

/// The way of the stream from one process to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Unix,
    Tcp,
    /// By `exec:` into a file, and from the file when it is complete.
    File,
    /// By TCP between two network namespaces.
    Namespaces,
}

/// What interrupts a first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interruption {
    Cancelled,
    TargetDies,
}

/// A kind of migration.
#[derive(Clone, Copy, Debug)]
struct Plan {
    way: Way,
    /// Capabilities of both sides.
    capabilities: &'static [&'static str],
    /// Parameters of the source, as JSON without braces.
    parameters: &'static str,
    /// MiB that each processor writes, and pages per second (0: as many as it can).
    writes: (u32, u32),
    interruption: Option<Interruption>,
    /// True if the guest goes on before all of its memory has come.
    is_postcopy: bool,
    /// True if QEMU has to have slowed the guest down.
    is_throttled: bool,
}

/// Parameters that let a guest stand still for 30 ms, where QEMU's defaults allow 300 ms.
const QUICK_SWITCH: &str = "\"downtime-limit\":30,\"max-bandwidth\":1000000000";

const PLAN: Plan = Plan {
    way: Way::Unix,
    capabilities: &["return-path"],
    parameters: QUICK_SWITCH,
    writes: (32, 1000),
    interruption: None,
    is_postcopy: false,
    is_throttled: false,
};

pub(super) fn unix(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    live(setup, arguments, &PLAN)
}

pub(super) fn tcp(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let way = Way::Tcp;
    live(setup, arguments, &Plan { way, ..PLAN })
}

pub(super) fn file(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        way: Way::File,
        // The target does not answer.
        capabilities: &[],
        ..PLAN
    };
    live(setup, arguments, &plan)
}

pub(super) fn namespaces(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let way = Way::Namespaces;
    live(setup, arguments, &Plan { way, ..PLAN })
}

pub(super) fn multifd(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        capabilities: &["return-path", "multifd"],
        parameters: "\"downtime-limit\":30,\"max-bandwidth\":1000000000,\"multifd-channels\":4",
        ..PLAN
    };
    live(setup, arguments, &plan)
}

/// Tests a guest that writes more than can be sent, until QEMU slows the vCPUs down.
pub(super) fn converge(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        capabilities: &["return-path", "auto-converge"],
        parameters: "\"downtime-limit\":100,\"max-bandwidth\":50000000,\"cpu-throttle-initial\":50,\"cpu-throttle-increment\":20",
        writes: (16, 0),
        is_throttled: true,
        ..PLAN
    };
    live(setup, arguments, &plan)
}

const POSTCOPY: Plan = Plan {
    capabilities: &["return-path", "postcopy-ram"],
    parameters: "\"downtime-limit\":30,\"max-bandwidth\":50000000,\"max-postcopy-bandwidth\":0",
    writes: (32, 0),
    is_postcopy: true,
    ..PLAN
};

pub(super) fn postcopy(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    live(setup, arguments, &POSTCOPY)
}

/// Pages that the guest asks for come by a connection of their own.
pub(super) fn preempt(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        capabilities: &["return-path", "postcopy-ram", "postcopy-preempt"],
        ..POSTCOPY
    };
    live(setup, arguments, &plan)
}

/// Pages that are sent again are sent as differences.
pub(super) fn xbzrle(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        capabilities: &["return-path", "xbzrle"],
        ..PLAN
    };
    live(setup, arguments, &plan)
}

pub(super) fn cancelled(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        interruption: Some(Interruption::Cancelled),
        ..PLAN
    };
    live(setup, arguments, &plan)
}

pub(super) fn target_dies(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let plan = Plan {
        interruption: Some(Interruption::TargetDies),
        ..PLAN
    };
    live(setup, arguments, &plan)
}

/// What a migration took, as the source reports it.
#[derive(Debug, Clone, Copy)]
struct Measured {
    downtime_ms: f64,
    total_ms: f64,
    rounds: f64,
    /// Milliseconds of the vCPUs' time that dirty logging has taken; 0 with QEMU's own translator.
    stall_ms: f64,
}

/// Maximum median of that time, if the guest does not write as fast as it can. (A wait for a processor counts, and 16
/// times if it falls into a fault that is timed.)
const STALL_MAX_MS: f64 = 10.0;
/// Number of migrations from which on there is a median to judge: one alone says how busy the machine is.
const STALL_TIMES: usize = 5;

/// A chain of machines.
struct Chain<'a> {
    setup: &'a Setup,
    arguments: &'a [&'a str],
    plan: &'a Plan,
    /// Number of machines that have been started.
    started: u32,
    /// Output of earlier consoles.
    said: String,
    areas: Vec<Area>,
}

fn live(setup: &Setup, arguments: &[&str], plan: &Plan) -> Result<(), String> {
    let _namespaces = match plan.way {
        Way::Namespaces => Some(Namespaces::new()?),
        _ => None,
    };
    let How { times, tcg } = setup.how;
    chain(setup, arguments, plan, times)?;
    if tcg {
        let setup = setup.with_tcg();
        chain(&setup, arguments, plan, times)?;
    }
    Ok(())
}

/// Migrates `times` times, and prints what that took.
fn chain(setup: &Setup, arguments: &[&str], plan: &Plan, times: u32) -> Result<(), String> {
    let mut chain = Chain {
        setup,
        arguments,
        plan,
        started: 0,
        said: String::new(),
        areas: Vec::new(),
    };
    let mut source = chain.start(None)?;
    source.wait_for_tick(5)?;
    let console = fs::read(&source.console).unwrap_or_default();
    chain.areas = memory::areas(&String::from_utf8_lossy(&console));
    if chain.areas.is_empty() && setup.engine.is_some() {
        return Err("the guest does not say where the hypervisor writes".to_owned());
    }
    if let Some(interruption) = plan.interruption {
        chain.interrupted(&mut source, interruption)?;
    }
    let mut measured = Vec::new();
    for time in 1..=times {
        let at = |e: String| format!("migration {time}: {e}");
        let (target, one) = chain.migrate(source).map_err(at)?;
        measured.push(one);
        if times > 1 {
            // The line is printed at once, for a long chain that is stopped.
            eprintln!(
                "  {time}: downtime {} ms, in all {} ms, stalled {:.2} ms",
                one.downtime_ms, one.total_ms, one.stall_ms
            );
        }
        source = target;
    }
    let last = source.last_tick().unwrap_or(0);
    source.wait_for_tick(last + 10)?;
    chain.judge(&source, true)?;
    source.quit()?;
    report(setup.accelerator(), &measured);
    let [stall, ..] = spread(&measured, |m| m.stall_ms);
    let (_, rate) = plan.writes;
    if rate != 0 && measured.len() >= STALL_TIMES && stall > STALL_MAX_MS {
        return Err(format!("dirty logging stalled the guest for {stall:.1} ms"));
    }
    Ok(())
}

impl Chain<'_> {
    /// Starts a machine: the guest itself, or one that waits for the guest at `incoming`.
    fn start(&mut self, incoming: Option<&str>) -> Result<Qemu, String> {
        let mut command = self.setup.command(self.arguments);
        let (mib, rate) = self.plan.writes;
        self.setup
            .kernel(&mut command, &format!("live={mib},{rate}"));
        if self.plan.way == Way::Namespaces {
            let name = if incoming.is_some() { TARGET } else { SOURCE };
            command = within(name, &command);
        }
        if incoming.is_some() {
            command.args(["-incoming", "defer"]);
            if !self.plan.is_postcopy {
                command.arg("-S");
            }
        }
        self.started += 1;
        let name = format!("machine-{}", self.started);
        let mut qemu = Qemu::start(command, &self.setup.dir, &name)?;
        for capability in self.plan.capabilities {
            let arguments = format!(
                "{{\"capabilities\":[{{\"capability\":\"{capability}\",\"state\":true}}]}}"
            );
            qemu.ask("migrate-set-capabilities", &arguments)?;
        }
        let parameters = format!("{{{}}}", self.plan.parameters);
        qemu.ask("migrate-set-parameters", &parameters)?;
        if let Some(uri) = incoming {
            qemu.ask("migrate-incoming", &format!("{{\"uri\":\"{uri}\"}}"))?;
        }
        Ok(qemu)
    }

    /// Returns where the source sends to, and where the target gets it from.
    fn uris(&self) -> Result<(String, String), String> {
        let file = self.setup.dir.join(format!("stream-{}", self.started));
        let file = file.display();
        let one = match self.plan.way {
            Way::Unix => format!("unix:{file}"),
            Way::Tcp => format!("tcp:127.0.0.1:{}", free_port()?),
            Way::Namespaces => format!("tcp:{TARGET_IP}:4444"),
            Way::File => return Ok((format!("exec:cat > {file}"), format!("exec:cat {file}"))),
        };
        Ok((one.clone(), one))
    }

    /// Migrates. Returns the machine that goes on.
    fn migrate(&mut self, mut source: Qemu) -> Result<(Qemu, Measured), String> {
        let (to, from) = self.uris()?;
        let mut target = None;
        if self.plan.way != Way::File {
            target = Some(self.start(Some(&from))?);
        }
        let before = self.stalled(&mut source)?;
        source.ask("migrate", &format!("{{\"uri\":\"{to}\"}}"))?;
        let mut measured = self.wait(&mut source)?;
        measured.stall_ms = self.stalled(&mut source)? - before;
        let mut target = match target {
            Some(target) => target,
            None => self.start(Some(&from))?,
        };
        wait_for(&mut target, "the target's arrival", |t| {
            Ok(!matches!(
                t.status()?.as_str(),
                "inmigrate" | "finish-migrate"
            ))
        })?;
        if !self.plan.is_postcopy {
            if source.status()? != "postmigrate" {
                return Err(format!("the source is {}", source.status()?));
            }
            self.compare(&mut source, &mut target)?;
            target.ask("cont", "{}")?;
        }
        let said = fs::read(&source.console).unwrap_or_default();
        self.said += &String::from_utf8_lossy(&said);
        let last = source.last_tick().unwrap_or(0);
        source.quit()?;
        let begin = Instant::now();
        target.wait_for_tick(last + 3)?;
        let (now, passed) = (target.last_tick().unwrap_or(0), begin.elapsed());
        if (now - last) as f64 > 50.0 + passed.as_secs_f64() * 20.0 {
            return Err(format!(
                "the guest's clock ran from {last} to {now} in {passed:?}"
            ));
        }
        self.judge(&target, false)?;
        Ok((target, measured))
    }

    /// Checks that all memory is the same. QEMU's own translator is only timed, because some of its migrations lose
    /// pages.
    fn compare(&self, source: &mut Qemu, target: &mut Qemu) -> Result<(), String> {
        let Setup { dir, mem_mib, .. } = self.setup;
        if self.setup.engine.is_none() {
            return Ok(());
        }
        let known = memory::compare(dir, source, target, *mem_mib, &self.areas)?;
        if !known.is_empty() && self.setup.how.times == 1 {
            eprintln!("  written by the hypervisor since: {}", known.join(" "));
        }
        Ok(())
    }

    /// Returns the milliseconds that dirty logging has taken of the vCPUs' time.
    fn stalled(&self, qemu: &mut Qemu) -> Result<f64, String> {
        if self.setup.engine.is_none() {
            return Ok(0.0);
        }
        Ok(qemu.vcpus_sum("dirty_stall_ns")? / 1e6)
    }

    /// Waits until the source has sent everything.
    fn wait(&self, source: &mut Qemu) -> Result<Measured, String> {
        let begin = Instant::now();
        let (mut throttle, mut is_started) = (0f64, false);
        loop {
            let answer = source.ask("query-migrate", "{}")?;
            let status = value(&answer, "status").unwrap_or_default();
            throttle = throttle.max(number(&answer, "cpu-throttle-percentage").unwrap_or(0.0));
            match status {
                "completed" => {
                    if self.plan.is_throttled && throttle == 0.0 {
                        return Err("the vCPUs were not slowed down".to_owned());
                    }
                    let asked = number(&answer, "postcopy-requests").unwrap_or(0.0);
                    if self.plan.is_postcopy && asked == 0.0 {
                        return Err("the target never asked for a page".to_owned());
                    }
                    let field = |key| number(&answer, key).ok_or(format!("no {key} in {answer}"));
                    return Ok(Measured {
                        downtime_ms: field("downtime")?,
                        total_ms: field("total-time")?,
                        rounds: field("dirty-sync-count")?,
                        stall_ms: 0.0,
                    });
                }
                "failed" | "cancelled" => {
                    return Err(format!("{}; {}", answer.trim(), source.errors()));
                }
                // All memory is sent once, most of which nobody writes.
                "active"
                    if self.plan.is_postcopy
                        && !is_started
                        && number(&answer, "dirty-sync-count") >= Some(2.0) =>
                {
                    source.ask("migrate-start-postcopy", "{}")?;
                    is_started = true;
                }
                _ => {}
            }
            if begin.elapsed() > PATIENCE {
                return Err(format!("not migrated in time: {}", answer.trim()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes a migration that does not succeed. The source goes on as if nothing had happened.
    fn interrupted(&mut self, source: &mut Qemu, how: Interruption) -> Result<(), String> {
        let (to, from) = self.uris()?;
        let target = self.start(Some(&from))?;
        // The migration is slow enough to be stopped on its way.
        source.ask("migrate-set-parameters", "{\"max-bandwidth\":5000000}")?;
        source.ask("migrate", &format!("{{\"uri\":\"{to}\"}}"))?;
        wait_for(source, "memory to be sent", |source| {
            let answer = source.ask("query-migrate", "{}")?;
            Ok(number(&answer, "transferred") > Some(4e6))
        })?;
        let end = match how {
            Interruption::Cancelled => {
                source.ask("migrate_cancel", "{}")?;
                "cancelled"
            }
            Interruption::TargetDies => {
                target.kill();
                "failed"
            }
        };
        wait_for(source, end, |source| {
            let answer = source.ask("query-migrate", "{}")?;
            Ok(value(&answer, "status") == Some(end))
        })?;
        if source.status()? != "running" {
            return Err(format!(
                "the source of a {end} migration is {}",
                source.status()?
            ));
        }
        let last = source.last_tick().unwrap_or(0);
        source.wait_for_tick(last + 5)?;
        self.judge(source, false)?;
        let parameters = format!("{{{}}}", self.plan.parameters);
        source.ask("migrate-set-parameters", &parameters)?;
        Ok(())
    }

    /// Checks that nothing is lost, and that each number of the ticks is there once.
    fn judge(&self, now: &Qemu, at_end: bool) -> Result<(), String> {
        if self.setup.engine.is_none() {
            return Ok(());
        }
        let last = fs::read(&now.console).unwrap_or_default();
        let all = format!("{}{}", self.said, String::from_utf8_lossy(&last));
        let bad = ["LOST", "GUEST-IS-BAD", "Kernel panic", "BUG:", "stuck for"];
        if let Some(line) = all
            .lines()
            .find(|l| bad.iter().any(|word| l.contains(word)))
        {
            return Err(format!("the guest says {line}"));
        }
        // The last line may be on its way.
        let whole = all.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let ticks: Vec<u64> = whole.lines().filter_map(qmp::tick).collect();
        let is_whole = (0..).zip(&ticks).all(|(want, tick)| want == *tick);
        if is_whole && (!at_end || ticks.len() > 10) {
            Ok(())
        } else {
            let wrong = (0..).zip(&ticks).find(|(want, tick)| want != *tick);
            Err(format!("{} ticks, wrong first: {wrong:?}", ticks.len()))
        }
    }
}

fn wait_for(
    qemu: &mut Qemu,
    what: &str,
    mut is_so: impl FnMut(&mut Qemu) -> Result<bool, String>,
) -> Result<(), String> {
    let begin = Instant::now();
    while !is_so(qemu)? {
        if begin.elapsed() > PATIENCE {
            return Err(format!("waited for {what} in vain; {}", qemu.errors()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns a port that is free now.
fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
    listener
        .local_addr()
        .map(|a| a.port())
        .map_err(|e| e.to_string())
}

/// Returns median, 90th and 99th percentile, and maximum.
fn spread(measured: &[Measured], of: fn(&Measured) -> f64) -> [f64; 4] {
    let mut values: Vec<f64> = measured.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let at = |part: usize| {
        values
            .get(values.len().saturating_sub(1) * part / 100)
            .copied()
    };
    [50, 90, 99, 100].map(|part| at(part).unwrap_or(0.0))
}

fn report(accelerator: &str, measured: &[Measured]) {
    let [downtime, total, rounds, stall] = [
        spread(measured, |m| m.downtime_ms),
        spread(measured, |m| m.total_ms),
        spread(measured, |m| m.rounds),
        spread(measured, |m| (m.stall_ms * 100.0).round() / 100.0),
    ];
    if measured.len() == 1 {
        let (downtime, total, rounds, stall) = (downtime[0], total[0], rounds[0], stall[0]);
        eprintln!(
            "  {accelerator}: downtime {downtime} ms, in all {total} ms, {rounds} rounds, vCPUs stalled {stall} ms"
        );
        return;
    }
    eprintln!(
        "  {accelerator}, {} migrations: median, 90 %, 99 %, most",
        measured.len()
    );
    for (name, [a, b, c, d]) in [
        ("downtime, ms", downtime),
        ("in all, ms", total),
        ("rounds", rounds),
        ("stalled, ms", stall),
    ] {
        eprintln!("    {name:14} {a:8} {b:8} {c:8} {d:8}");
    }
    let over = measured.iter().filter(|m| m.downtime_ms > 100.0).count();
    eprintln!("    downtimes above 100 ms: {over}");
}

const SOURCE: &str = "anykvm-source";
const TARGET: &str = "anykvm-target";
const SOURCE_IP: &str = "192.0.2.1";
const TARGET_IP: &str = "192.0.2.2";

/// Two network namespaces, and a wire between them.
struct Namespaces;

impl Namespaces {
    fn new() -> Result<Self, String> {
        let ip = |line: &str| tool(Command::new("ip").args(line.split(' ')));
        // A run that was killed may have left its namespaces.
        drop(Self);
        let add = |name: &str| ip(&format!("netns add {name}"));
        add(SOURCE).map_err(|e| format!("namespaces need root and CAP_SYS_ADMIN: {e}"))?;
        // From here on, dropping this removes the namespaces.
        let this = Self;
        add(TARGET)?;
        ip(&format!(
            "link add wire netns {SOURCE} type veth peer name wire netns {TARGET}"
        ))?;
        for (name, address) in [(SOURCE, SOURCE_IP), (TARGET, TARGET_IP)] {
            ip(&format!("-n {name} address add {address}/24 dev wire"))?;
            ip(&format!("-n {name} link set wire up"))?;
        }
        Ok(this)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in [SOURCE, TARGET] {
            // The namespace may not exist.
            let _ = tool(Command::new("ip").args(["netns", "delete", name]));
        }
    }
}

/// Returns the same command in a network namespace.
fn within(namespace: &str, command: &Command) -> Command {
    let mut out = Command::new("ip");
    out.args(["netns", "exec", namespace]);
    out.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            out.env(name, value);
        }
    }
    out
}
