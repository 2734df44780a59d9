//! Measures live migrations of a guest of 1 GiB that compiles and writes memory: under QEMU on anykvm, under QEMU's TCG, and by `anykvm boot`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::bench::machines::{Files, TCG_CPU, WORDS, own};
use crate::bench::note;
use crate::bench::report::{self, Verdict, median};
use crate::bench::workloads::Suite;
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Two vCPUs write so many pages a second of as many MiB, and compile one file after the other.
const SCRIPT: &str = "./writer 64 1000 &
while :; do gcc -O1 -S -o /tmp/made program.i && echo compiled; done";
const BOARD: (u32, &str) = (2, "1G");
/// Maximum time in milliseconds for which the guest may stand still while the rest of its memory is sent.
const DOWNTIME_LIMIT: u32 = 30;
const DOWNTIME_BAR: f64 = 50.0;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kvm,
    Tcg,
    Own,
}

const KINDS: [(&str, Kind); 3] = [
    ("QEMU on anykvm", Kind::Kvm),
    ("QEMU's TCG", Kind::Tcg),
    ("anykvm boot", Kind::Own),
];

/// A migration, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Moved {
    downtime: f64,
    total: f64,
    rounds: f64,
    /// True if the guest compiled on.
    goes_on: bool,
}

/// Measures the migrations, and returns the table.
pub(super) fn measure(args: &BenchArgs, verdict: &mut Verdict) -> Result<String, BootError> {
    let mut files = Files::new(args.kernel.as_deref(), &args.qemu)?;
    files.add_program("writer", include_str!("writer.c"))?;
    let kinds = KINDS
        .into_iter()
        .filter(|(_, kind)| !(args.no_tcg && *kind == Kind::Tcg));
    let mut rows: Vec<(&str, Kind, Vec<Moved>)> =
        kinds.map(|(name, kind)| (name, kind, Vec::new())).collect();
    for round in 1..=args.rounds {
        for (name, kind, moved) in &mut rows {
            moved.push(one(&files, *kind)?);
            note(&format!("round {round} of {}: {name}", args.rounds));
        }
    }
    let head = [
        "1 GiB, 2 vCPUs, compiling, 1,000 pages a second",
        "downtime, ms",
        "most",
        "in all, ms",
        "rounds",
        "the guest went on",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let of = |moved: &[Moved], what: fn(&Moved) -> f64| {
        let all: Vec<f64> = moved.iter().map(what).collect();
        median(&all)
    };
    let mut downtimes = Vec::new();
    for (name, kind, moved) in &rows {
        let downtime = of(moved, |m| m.downtime);
        let most = moved.iter().map(|m| m.downtime).fold(0.0, f64::max);
        let rest = [Some(most), of(moved, |m| m.total), of(moved, |m| m.rounds)];
        let cells = [downtime].into_iter().chain(rest).map(report::cell);
        let survived = moved.iter().filter(|m| m.goes_on).count();
        let survived = format!("{survived} of {}", moved.len());
        let line = [(*name).to_owned()].into_iter().chain(cells);
        lines.push(line.chain([survived]).collect());
        // A migration that loses pages is quick, so it is no yardstick.
        if moved.iter().all(|m| m.goes_on) {
            downtimes.extend(downtime.map(|ms| (*kind, ms)));
        }
    }
    let find = |kind| {
        downtimes
            .iter()
            .find(|(k, _)| *k == kind)
            .map(|(_, ms)| *ms)
    };
    if let Some(ours) = find(Kind::Kvm) {
        verdict.at_most(
            "QEMU's migration of 1 GiB: downtime, ms",
            ours,
            DOWNTIME_BAR,
        );
        if let Some(theirs) = find(Kind::Tcg) {
            verdict.at_most("… over TCG's", ours / theirs, 1.0 / 3.0);
        }
    }
    Ok(report::aligned(&lines))
}

/// Starts a guest, lets it work, and moves it.
fn one(files: &Files, kind: Kind) -> Result<Moved, BootError> {
    let initrd = files.initrd(Some(Suite::Smp), SCRIPT)?;
    let way = format!("unix:{}", files.file("way").display());
    let _ = fs::remove_file(files.file("way"));
    let mut sides = Vec::new();
    for (name, is_target) in [("source", false), ("target", true)] {
        let (socket, console) = (files.file(name), files.file(&format!("{name}.console")));
        let _ = fs::remove_file(&socket);
        let mut command = match kind {
            Kind::Own if is_target => Command::new(own()?),
            Kind::Own => files.boot(&own()?, BOARD.0, BOARD.1, WORDS, &initrd),
            Kind::Kvm => Command::new(own()?),
            Kind::Tcg => Command::new(&files.qemu),
        };
        match kind {
            Kind::Own if is_target => {
                command.args(["boot", "--incoming", &way]);
            }
            Kind::Own => {
                command.arg("--control").arg(&socket);
            }
            Kind::Kvm => {
                command.args(["exec", "--quiet", "--"]).arg(&files.qemu);
                command.args(["-accel", "kvm", "-cpu", "host"]);
            }
            Kind::Tcg => {
                command.args(["-accel", "tcg", "-cpu", TCG_CPU]);
            }
        }
        if kind != Kind::Own {
            files.qemu_board(&mut command, BOARD, WORDS, &initrd);
            command.args(["-serial", "stdio", "-qmp"]);
            command.arg(format!("unix:{},server,nowait", socket.display()));
            command.args(is_target.then_some(["-incoming", &way]).iter().flatten());
        }
        let cannot = BootError::host("cannot make a file");
        let output = fs::File::create(&console).map_err(cannot)?;
        command.stdin(Stdio::null()).stdout(output);
        let child = command
            .spawn()
            .map_err(BootError::host("cannot start a guest"))?;
        sides.push(Side {
            child,
            socket,
            console,
        });
        if !is_target {
            // From here on each part of the load has been executed once.
            wait_for("the guest compiles", || {
                sides.iter().all(|side| side.has_compiled())
            })?;
        }
    }
    let [source, target] = sides.as_slice() else {
        return Err(BootError::NoImage("no guests".to_owned()));
    };
    let moved = if kind == Kind::Own {
        wait_for("the target waits", || files.file("way").exists())?;
        by_anykvm(source, &way)
    } else {
        by_qemu(source, target, &way)
    };
    let moved = moved.map_err(BootError::host("the guest was not moved"))?;
    match wait_for("the guest goes on", || target.has_compiled()) {
        // Busy guests do not survive it in QEMU 7.2: kernels panic, or hang.
        Err(_) if kind == Kind::Tcg => Ok(Moved {
            goes_on: false,
            ..moved
        }),
        goes_on => goes_on.map(|()| moved),
    }
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) -> Result<(), BootError> {
    let begin = Instant::now();
    while !is_so() {
        if begin.elapsed() > PATIENCE {
            return Err(BootError::NoImage(format!("in vain: {what}")));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A process that has the guest, or waits for it; killed with its value.
struct Side {
    child: Child,
    socket: PathBuf,
    console: PathBuf,
}

impl Drop for Side {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Side {
    fn has_compiled(&self) -> bool {
        let said = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&said).contains("compiled")
    }

    fn connect(
        &self,
    ) -> std::io::Result<(
        UnixStream,
        impl Iterator<Item = std::io::Result<String>> + use<>,
    )> {
        let stream = super::connect(&self.socket, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let lines = BufReader::new(stream.try_clone()?).lines();
        Ok((stream, lines))
    }
}

fn other<T>(line: &str) -> std::io::Result<T> {
    Err(std::io::Error::other(line.to_owned()))
}

/// Moves the guest by the command of its control socket, whose answer says how long that took.
fn by_anykvm(source: &Side, way: &str) -> std::io::Result<Moved> {
    let (mut stream, lines) = source.connect()?;
    stream.write_all(format!("migrate {DOWNTIME_LIMIT} 0 {way}\n").as_bytes())?;
    for line in lines {
        let line = line?;
        if let Some(report) = line.strip_prefix("ok ") {
            return read_report(report).map_or_else(|| other(&line), Ok);
        }
        if line.starts_with("error") {
            return other(&line);
        }
    }
    other("it has ended")
}

/// `downtime X ms, in all Y ms, …, N rounds, …`.
fn read_report(report: &str) -> Option<Moved> {
    let mut parts = report.split(", ");
    let ms = |part: &str, name: &str| part.strip_prefix(name)?.strip_suffix(" ms")?.parse().ok();
    Some(Moved {
        downtime: ms(parts.next()?, "downtime ")?,
        total: ms(parts.next()?, "in all ")?,
        rounds: parts.find_map(|part| part.strip_suffix(" rounds")?.parse().ok())?,
        goes_on: true,
    })
}

/// Moves the guest by QEMU's machine protocol: a line of JSON each way, and events between.
fn by_qemu(source: &Side, target: &Side, way: &str) -> std::io::Result<Moved> {
    // The target listens for the guest once it answers here.
    let (mut stream, mut lines) = target.connect()?;
    ask(&mut stream, &mut lines, "qmp_capabilities", "{}")?;
    let (mut stream, mut lines) = source.connect()?;
    let mut ask = |command: &str, arguments: &str| ask(&mut stream, &mut lines, command, arguments);
    ask("qmp_capabilities", "{}")?;
    let limits = format!("{{\"downtime-limit\":{DOWNTIME_LIMIT},\"max-bandwidth\":1000000000}}");
    ask("migrate-set-parameters", &limits)?;
    ask("migrate", &format!("{{\"uri\":\"{way}\"}}"))?;
    let begin = Instant::now();
    loop {
        thread::sleep(Duration::from_millis(20));
        let answer = ask("query-migrate", "{}")?;
        if answer.contains("\"completed\"") {
            let moved = || {
                Some(Moved {
                    downtime: number(&answer, "downtime")?,
                    total: number(&answer, "total-time")?,
                    rounds: number(&answer, "dirty-sync-count")?,
                    goes_on: true,
                })
            };
            return moved().map_or_else(|| other(&answer), Ok);
        }
        if answer.contains("\"failed\"") || begin.elapsed() > PATIENCE {
            return other(&answer);
        }
    }
}

fn ask(
    stream: &mut UnixStream,
    lines: &mut impl Iterator<Item = std::io::Result<String>>,
    command: &str,
    arguments: &str,
) -> std::io::Result<String> {
    let line = format!("{{\"execute\":\"{command}\",\"arguments\":{arguments}}}\n");
    stream.write_all(line.as_bytes())?;
    for line in lines {
        let line = line?;
        if line.starts_with("{\"return\"") {
            return Ok(line);
        }
        if line.starts_with("{\"error\"") {
            return other(&line);
        }
    }
    other("QEMU has ended")
}

/// Returns the number behind `"key":`.
fn number(line: &str, key: &str) -> Option<f64> {
    let (_, rest) = line.split_once(&format!("\"{key}\":"))?;
    let rest = rest.trim_start();
    let end = rest.find([',', '}'])?;
    rest.get(..end)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let report =
            "downtime 7.5 ms, in all 420.0 ms, vCPUs stalled 1.20 ms, 3 rounds, 50.0 MiB sent";
        let moved = Moved {
            downtime: 7.5,
            total: 420.0,
            rounds: 3.0,
            goes_on: true,
        };
        assert_eq!(read_report(report), Some(moved));
        assert_eq!(read_report("downtime 7.5 ms"), None);
        let line = r#"{"return": {"status": "completed", "downtime": 31, "ram": {"dirty-sync-count": 4}}}"#;
        assert_eq!(number(line, "downtime"), Some(31.0));
        assert_eq!(number(line, "dirty-sync-count"), Some(4.0));
        assert_eq!(number(line, "status"), None);
    }
}
