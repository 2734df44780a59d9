//! `anykvm bench memory`: measures accesses beyond the reach of TLBs. The program is memory.c. Two programs of Debian's whose
//! data is as large run beside it, where they are installed.

use std::path::{Path, PathBuf};

use super::machines::{self, Files, Guest, Machine};
use super::plot::{self, Bar, NATIVE, OURS, Scale, TCG};
use super::report::{self, Column, Row, Verdict};
use super::workloads::{Suite, Workload};
use super::{is_plausible, note};
use crate::cli::BenchArgs;
use crate::error::BootError;

/// Number of accesses that a workload makes, as in memory.c.
const COUNT: f64 = 2e6;
/// The scale, which begins at a nanosecond.
const SCALE: Scale = Scale {
    from: 0.001,
    decades: 4,
};
/// Size of the guest's memory: the largest table, and what the kernel needs.
const RAM: &str = "4G";
/// The table in pages of 1 GiB, which a kernel has to find while its memory is free.
const WORDS: &str = "hugepagesz=1G hugepages=1";

const fn table(name: &'static str, script: &'static str) -> Workload {
    Workload {
        name,
        suite: Suite::Memory,
        groups: &[],
        script,
    }
}

/// All workloads.
const WORKLOADS: &[Workload] = &[
    table("write-16-4k", "./memory write 16 4k"),
    table("write-64-4k", "./memory write 64 4k"),
    table("write-256-4k", "./memory write 256 4k"),
    table("write-1024-4k", "./memory write 1024 4k"),
    table("write-2048-4k", "./memory write 2048 4k"),
    table("write-256-2m", "./memory write 256 2m"),
    table("write-1024-2m", "./memory write 1024 2m"),
    table("write-2048-2m", "./memory write 2048 2m"),
    table("write-1024-1g", "./memory write 1024 1g"),
    table("read-256-4k", "./memory read 256 4k"),
    table("read-1024-4k", "./memory read 1024 4k"),
    table("read-1024-2m", "./memory read 1024 2m"),
    table("read-1024-1g", "./memory read 1024 1g"),
    table("chase-16-4k", "./memory chase 16 4k"),
    table("chase-256-4k", "./memory chase 256 4k"),
    table("chase-1024-4k", "./memory chase 1024 4k"),
    table("chase-1024-2m", "./memory chase 1024 2m"),
    table("chase-1024-1g", "./memory chase 1024 1g"),
    table("join-512-4k", "./memory join 512 4k"),
    table("join-512-2m", "./memory join 512 2m"),
    table("collect-512-4k", "./memory collect 512 4k"),
    table("collect-512-2m", "./memory collect 512 2m"),
];

/// A program whose memory is larger than what the first level reaches; milliseconds a run.
struct Program {
    workload: Workload,
    /// What has to be there on the host, and Debian's package of it.
    path: &'static str,
    package: &'static str,
    /// Makes its files and starts its servers, unmeasured.
    prepare: &'static str,
}

/// 310 MB in an in-memory database, then a million rows at random; a server with two million keys, then half a million
/// requests of each kind.
const PROGRAMS: &[Program] = &[
    Program {
        workload: table(
            "sqlite-310",
            "./program run sqlite-310 out sqlite3 :memory: '.read memory.sql'",
        ),
        path: "/usr/bin/sqlite3",
        package: "sqlite3",
        prepare: "cat >memory.sql <<'END'
create table t(a integer primary key, b blob);
insert into t with recursive n(i) as (select 1 union all select i + 1 from n where i < 1000000)
    select i, zeroblob(300) from n;
with recursive r(i, x) as (select 1, 1 union all
    select i + 1, (x * 1103515245 + 12345) & 0x7fffffff from r where i < 1000000)
    select sum(length(b)), sum(a) from r join t on t.a = x % 1000000 + 1;
END",
    },
    Program {
        workload: table(
            "redis",
            "./program run redis none redis-benchmark -s redis.sock -t get,set -r 2000000 -n 500000 -P 16 -c 8 -d 100 -q",
        ),
        path: "/usr/bin/redis-server",
        package: "redis-server",
        prepare: "ip link set lo up 2>/dev/null
redis-server --port 0 --unixsocket redis.sock --save '' --daemonize yes >/dev/null
n=0; until redis-cli -s redis.sock ping >/dev/null 2>&1 || [ $n = 100 ]; do sleep 0.1; n=$((n + 1)); done
redis-benchmark -s redis.sock -t set -r 2000000 -n 2000000 -P 64 -c 8 -d 100 -q >/dev/null",
    },
];
/// Stops what the programs have started.
const END: &str = "redis-cli -s redis.sock shutdown nosave >/dev/null 2>&1; true";

/// Time over native, at most.
const BARS: &[(&str, f64)] = &[
    ("write-256-4k", 3.5),
    ("write-1024-4k", 4.0),
    ("write-256-2m", 3.0),
    ("write-1024-2m", 3.0),
];

/// Runs the suite.
pub(super) fn run(
    args: &BenchArgs,
    files: &mut Files,
    verdict: &mut Verdict,
) -> Result<String, BootError> {
    files.add_program("memory", include_str!("memory.c"))?;
    let is_wanted = |w: &Workload| args.only.is_empty() || args.only.iter().any(|n| n == w.name);
    let tables = WORKLOADS.iter().filter(|w| is_wanted(w));
    let programs: Vec<&'static Program> = PROGRAMS
        .iter()
        .filter(|p| is_wanted(&p.workload) && p.is_there())
        .collect();
    let workloads: Vec<&'static Workload> =
        tables.chain(programs.iter().map(|p| &p.workload)).collect();
    if !programs.is_empty() {
        host_files().iter().for_each(|file| files.add_file(file));
    }
    let script = script(&workloads, &programs, args.repeats);
    let mut machines = vec![Machine::Native, Machine::Anykvm];
    machines.extend((!args.no_tcg).then_some(Machine::Tcg));
    let mut rows: Vec<Row> = workloads.iter().map(|w| Row::new(w)).collect();
    for round in 1..=args.rounds {
        for machine in &machines {
            let guest = Guest {
                words: WORDS,
                ..Guest::new(*machine, 1, RAM)
            };
            let run = files.run_script(&guest, Some(Suite::Memory), &script)?;
            note(&format!(
                "round {round} of {}: {machine:?}: {:.1} s",
                args.rounds,
                run.total.as_secs_f64()
            ));
            is_plausible(*machine, &run)?;
            for row in &mut rows {
                row.add(Column::of(*machine), &run)?;
            }
        }
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, plot::draw(&bars_of(&rows), SCALE))
            .map_err(BootError::host("cannot write the plot"))?;
    }
    Ok(table_of(&rows, verdict))
}

impl Program {
    /// False, and said so, if it is not installed.
    fn is_there(&self) -> bool {
        let is_there = Path::new(self.path).exists();
        if !is_there {
            let (name, package) = (self.workload.name, self.package);
            note(&format!("{name} is left out: apt-get install {package}"));
        }
        is_there
    }
}

/// What `--only` may name.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let programs = PROGRAMS.iter().map(|p| p.workload.name);
    WORKLOADS.iter().map(|w| w.name).chain(programs)
}

/// The programs that a guest needs.
fn host_files() -> Vec<PathBuf> {
    let of_redis = ["/usr/bin/redis-cli", "/usr/bin/redis-benchmark"];
    let all = PROGRAMS.iter().map(|p| p.path).chain(of_redis);
    all.map(PathBuf::from)
        .filter(|path| path.exists())
        .collect()
}

/// What a machine runs: each workload, `repeats` times in turn.
fn script(workloads: &[&Workload], programs: &[&Program], repeats: u32) -> String {
    let mut lines = vec!["export PATH=$PATH:."];
    lines.extend(programs.iter().map(|p| p.prepare));
    let body: Vec<&str> = workloads.iter().map(|w| w.script).collect();
    let repeated = machines::repeated(&body.join("\n"), repeats);
    lines.push(&repeated);
    lines.extend((!programs.is_empty()).then_some(END));
    lines.join("\n")
}

/// Whether a row is one of accesses to a table, and not of a program.
fn is_table(row: &Row) -> bool {
    WORKLOADS.iter().any(|w| w.name == row.workload().name)
}

/// The same as bars.
fn bars_of(rows: &[Row]) -> Vec<Bar> {
    let columns = [
        (Column::Native, "native", NATIVE),
        (Column::Anykvm, "anykvm", OURS),
        (Column::Tcg, "TCG", TCG),
    ];
    let of_row = |row: &Row| {
        let name = row.workload().name;
        columns.map(|(column, who, colour)| {
            let us = row.best(column)? * 1e3 / COUNT;
            Some((format!("{name}: {who}"), us, colour))
        })
    };
    let tables = rows.iter().filter(|row| is_table(row));
    tables.flat_map(of_row).flatten().collect()
}

/// Returns the table of nanoseconds per access, of milliseconds per program, and ratios, each by the best of its runs.
fn table_of(rows: &[Row], verdict: &mut Verdict) -> String {
    let head = [
        "ns an access (table, MiB, pages); ms a program",
        "native",
        "anykvm",
        "TCG",
        "anykvm/native",
        "TCG/anykvm",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let name = row.workload().name;
        let ratio = |of, to| Some(row.best(of)? / row.best(to)?);
        let slower = ratio(Column::Anykvm, Column::Native);
        if let (Some(slower), Some((_, bar))) = (slower, BARS.iter().find(|(n, _)| *n == name)) {
            verdict.at_most(&format!("{name} over native"), slower, *bar);
        }
        let mut line = vec![name.to_owned()];
        let times = [Column::Native, Column::Anykvm, Column::Tcg];
        let unit = if is_table(row) { 1e6 / COUNT } else { 1.0 };
        line.extend(times.map(|c| report::cell(row.best(c).map(|ms| ms * unit))));
        line.push(report::cell(slower));
        line.push(report::cell(ratio(Column::Tcg, Column::Anykvm)));
        lines.push(line);
    }
    report::aligned(&lines)
}
