//! `anykvm bench dirtylog`: measures what it costs to learn which pages a guest has written, and what that costs the
//! guest.
//!
//! The experiment is Xiao Guangrong's of 2013, whose figures are printed beside ours: KVM_GET_DIRTY_LOG while vCPUs
//! write, with and without the lock that their faults need. If the engine has several ways, ANYKVM_DIRTY chooses one
//! for the whole run, and the table names it.

mod guest;
mod load;
mod migration;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::plot::{self, Bar, OURS, SOURCE, Scale};
use super::report::{self, Verdict};
use crate::cli::BenchArgs;
use crate::error::BootError;
use guest::{COMPUTE, Counts, Guest, Method, PASS, RANDOM};

/// Number of pages that all vCPUs together write: 256 MiB.
const PAGES: u64 = 65_536;
const PAGE: u64 = 4096;
/// Size of the sparse slot in bytes.
const SPARSE: u64 = 64 << 30;
/// Number of pages of the small working set.
const FEW: u64 = 1024;
/// Time between two harvests, about that of a live migration.
const PERIOD: Duration = Duration::from_millis(100);
/// Number of harvests that are averaged, as in the source.
const HARVESTS: u32 = 10;
/// Nanoseconds of one KVM_GET_DIRTY_LOG, before and after (source 3).
const SOURCE_NS: [f64; 2] = [9_009_483.0, 4_807_343.0];
/// Maximum time that a guest may take to be warm, in fifths of a second.
const WARM_UP: u32 = 50;
/// Number of repetitions of single calls, of which the best counts.
const TRIES: u32 = 7;

/// The parts that `--only` may name.
pub(super) const PARTS: [&str; 9] = [
    "source",
    "source-once",
    "harvests",
    "outrun",
    "again",
    "sparse",
    "slowdown",
    "load",
    "migration",
];
/// The function of a part.
type Part<'a> = &'a mut dyn FnMut(&mut Verdict) -> Result<String, BootError>;

const METHODS: [(&str, Method); 4] = [
    ("bitmap", Method::Bitmap),
    ("bitmap, manual clear", Method::Manual),
    ("ring of 65536", Method::Ring(65_536)),
    ("ring of 4096", Method::Ring(4096)),
];

/// Runs the suite.
pub(super) fn run(args: &BenchArgs, verdict: &mut Verdict) -> Result<String, BootError> {
    let variant = std::env::var("ANYKVM_DIRTY").unwrap_or_else(|_| "default".to_owned());
    let mut text = format!("dirty log: {variant}\n");
    let mut bars: Vec<Bar> = vec![
        ("KVM, locked (2013)".to_owned(), SOURCE_NS[0] / 1e3, SOURCE),
        (
            "KVM, lockless (2013)".to_owned(),
            SOURCE_NS[1] / 1e3,
            SOURCE,
        ),
    ];
    let parts: [Part<'_>; PARTS.len()] = [
        &mut source,
        &mut source_once,
        &mut |verdict| harvests(verdict, &mut bars),
        &mut outrun,
        &mut again,
        &mut sparse,
        &mut slowdown,
        &mut |_| load::measure(args),
        &mut |verdict| migration::measure(args, verdict),
    ];
    for (name, part) in PARTS.into_iter().zip(parts) {
        // The part before this one starts it, so it only runs if it is named.
        let is_wanted = args.only.is_empty() && name != "source-once";
        if is_wanted || args.only.iter().any(|only| only == name) {
            text += &part(verdict)?;
            text.push('\n');
        }
    }
    if let Some(file) = &args.svg {
        let scale = Scale {
            from: 1.0,
            decades: 5,
        };
        std::fs::write(file, plot::draw(&bars, scale))
            .map_err(BootError::host("cannot write the plot"))?;
    }
    Ok(text)
}

/// Measures KVM_GET_DIRTY_LOG while vCPUs write, as the source does, by each way of harvesting. Each way has a process
/// of its own.
fn source(verdict: &mut Verdict) -> Result<String, BootError> {
    const ROUNDS: u32 = 3;
    let program = std::env::current_exe().map_err(BootError::host("no program"))?;
    let ways = ["locked", "everything", "lockless"];
    let mut best = [f64::INFINITY; 3];
    for _ in 0..ROUNDS {
        for (way, best) in ways.into_iter().zip(&mut best) {
            let output = std::process::Command::new(&program)
                .args(["bench", "dirtylog", "--only", "source-once"])
                .env("ANYKVM_DIRTY", way)
                .output()
                .map_err(BootError::host("cannot start the benchmark"))?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let us = text.lines().find_map(|line| line.strip_prefix(MEASURE));
            let us = us.and_then(|us| us.trim().parse::<f64>().ok());
            *best = best.min(us.ok_or(BootError::NoImage(format!("no measure in {text}")))?);
        }
    }
    let head = [
        "KVM_GET_DIRTY_LOG beside 2 writing vCPUs",
        "µs",
        "of locked",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let [locked, _, lockless] = best;
    for (way, us) in ways.into_iter().zip(best) {
        let of_locked = format!("{:.2}", us / locked);
        lines.push(vec![way.to_owned(), format!("{us:.0}"), of_locked]);
    }
    for (name, ns) in ["locked, KVM of 2013", "lockless, KVM of 2013"]
        .into_iter()
        .zip(SOURCE_NS)
    {
        let of_locked = format!("{:.2}", ns / SOURCE_NS[0]);
        lines.push(vec![name.to_owned(), format!("{:.0}", ns / 1e3), of_locked]);
    }
    verdict.at_most("lockless, part of locked", lockless / locked, 1.0 / 1.9);
    Ok(report::aligned(&lines))
}

/// The begin of the answer of [`source_once`].
const MEASURE: &str = "one harvest, µs:";

/// Measures the same by this process's way of harvesting.
fn source_once(_: &mut Verdict) -> Result<String, BootError> {
    let mut guest = Guest::new(Method::Bitmap, RANDOM, 2, PAGES * PAGE, PAGES / 2)?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        best = best.min(harvest(&mut guest, PERIOD, HARVESTS)?.ns / 1e3);
    }
    Ok(format!("{MEASURE} {best:.0}"))
}

/// The figures of harvests while vCPUs write.
struct Harvests {
    ns: f64,
    pages: u64,
    counts: Counts,
    /// Writes per second of the vCPUs' processor time.
    rate: f64,
}

/// Harvests `times` times, and lets the guest run for `pause` before each.
fn harvest(guest: &mut Guest, pause: Duration, times: u32) -> Result<Harvests, BootError> {
    let (mut spent, mut pages) = (Duration::ZERO, 0);
    guest.log(true)?;
    // The first harvest finds all pages that were ever written.
    guest.harvest()?;
    let counts = guest.run(PERIOD, |guest| {
        for _ in 0..times {
            thread::sleep(pause);
            let begin = Instant::now();
            pages += guest.harvest()?;
            spent += begin.elapsed();
        }
        Ok(())
    })?;
    guest.log(false)?;
    Ok(Harvests {
        ns: spent.as_secs_f64() * 1e9 / f64::from(times),
        pages: pages / u64::from(times),
        rate: counts.rate(),
        counts,
    })
}

/// Measures harvests beside 1, 2 and 4 vCPUs that write.
fn harvests(verdict: &mut Verdict, bars: &mut Vec<Bar>) -> Result<String, BootError> {
    let head = [
        "harvests beside writers of 256 MiB",
        "vCPUs",
        "harvest, µs",
        "pages",
        "writes over no log",
        "longest, µs",
        "99.99 %, µs",
        "back to back, µs",
        "writes",
        "longest",
        "99.99 %",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let cycles = cycles_a_us();
    for vcpus in [1, 2, 4] {
        let mut bitmap_writes = None;
        for (name, method) in METHODS {
            let mut guest = Guest::new(method, RANDOM, vcpus, PAGES * PAGE, PAGES / vcpus)?;
            // The guest runs until all code is translated and every part of the memory has been written.
            for _ in 0..WARM_UP {
                let counts = guest.run(PERIOD, |_| {
                    thread::sleep(PERIOD * 2);
                    Ok(())
                })?;
                if counts.writes > PAGES {
                    break;
                }
            }
            let plain = guest.run(PERIOD, |_| {
                thread::sleep(PERIOD * 5);
                Ok(())
            })?;
            let plain = plain.rate();
            let paced = harvest(&mut guest, PERIOD, HARVESTS)?;
            let busy = harvest(&mut guest, Duration::ZERO, HARVESTS * 10)?;
            let mut line = vec![name.to_owned(), vcpus.to_string()];
            line.extend([format!("{:.0}", paced.ns / 1e3), paced.pages.to_string()]);
            for one in [&paced, &busy] {
                if std::ptr::eq(one, &raw const busy) {
                    line.push(format!("{:.0}", one.ns / 1e3));
                }
                line.push(format!("{:.2}", one.rate / plain));
                line.push(format!("{:.0}", one.counts.longest as f64 / cycles));
                line.push(format!("{:.1}", quantile(&one.counts) / cycles));
            }
            lines.push(line);
            bars.push((format!("{name}, {vcpus} vCPUs"), paced.ns / 1e3, OURS));
            match (method, bitmap_writes) {
                (Method::Bitmap, _) => bitmap_writes = Some(paced.rate / plain),
                (Method::Ring(_), Some(bitmap)) => verdict.at_most(
                    &format!("{name}, {vcpus} vCPUs: time over the bitmap's"),
                    bitmap / (paced.rate / plain),
                    1.15,
                ),
                _ => {}
            }
            verdict.at_most(
                &format!("{name}, {vcpus} vCPUs, back to back: 99.99 % of writes, µs"),
                quantile(&busy.counts) / cycles,
                20.0,
            );
        }
    }
    let [before, after] = SOURCE_NS.map(|ns| format!("{:.0}", ns / 1e3));
    for (name, us) in [
        ("KVM_GET_DIRTY_LOG of 2013, locked", before),
        ("… lockless", after),
    ] {
        let mut line = vec![name.to_owned(), "12".to_owned(), us];
        line.resize(head.len(), "-".to_owned());
        lines.push(line);
    }
    Ok(report::aligned(&lines))
}

/// Measures where the time goes of a writer that outruns its ring. Beside it is one whose bitmap is harvested as often
/// as a live migration does, and one whose bitmap is harvested as often as the ring has to be.
fn outrun(_: &mut Verdict) -> Result<String, BootError> {
    let head = [
        "random writes over 256 MiB, one vCPU; of the processor's time",
        "ns a write",
        "over no log",
        "pages noted a write",
        "ns a page noted",
        "of that VMM's thread",
        "pages a harvest",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let kinds = [
        ("bitmap", Method::Bitmap, PERIOD),
        (
            "bitmap, as often as a ring of 4096",
            Method::Bitmap,
            Duration::from_micros(450),
        ),
        ("ring of 65536", Method::Ring(65_536), PERIOD),
        ("ring of 4096", Method::Ring(4096), PERIOD),
        ("ring of 1024", Method::Ring(1024), PERIOD),
    ];
    for (name, method, period) in kinds {
        let mut guest = Guest::new(method, RANDOM, 1, PAGES * PAGE, PAGES)?;
        let second = |guest: &mut Guest, is_on: bool| {
            let counts = guest.run(PERIOD, |guest| {
                let begin = Instant::now();
                while begin.elapsed() < PERIOD * 5 {
                    thread::sleep(period);
                    if is_on {
                        guest.harvest()?;
                    }
                }
                Ok(())
            })?;
            let (writes, ns) = counts.whole();
            Ok::<_, BootError>((writes as f64, ns as f64))
        };
        second(&mut guest, false)?;
        let mut plain = f64::INFINITY;
        let mut best = (f64::INFINITY, 0.0, 0.0, 0.0);
        for _ in 0..TRIES {
            let (writes, ns) = second(&mut guest, false)?;
            plain = plain.min(ns / writes);
            guest.log(true)?;
            guest.harvest()?;
            let before = guest.found();
            let (writes, ns) = second(&mut guest, true)?;
            let after = guest.found();
            guest.log(false)?;
            let pages = (after.pages - before.pages) as f64;
            if ns / writes < best.0 {
                let room = (after.making_room_ns - before.making_room_ns) as f64;
                let harvests = (after.harvests - before.harvests) as f64;
                best = (ns / writes, pages / writes, room / pages, pages / harvests);
            }
        }
        let (write, noted, room, pages) = best;
        lines.push(vec![
            name.to_owned(),
            format!("{write:.0}"),
            format!("{:.2}", write / plain),
            format!("{noted:.3}"),
            format!("{:.0}", (write - plain) / noted),
            format!("{room:.0}"),
            format!("{pages:.0}"),
        ]);
    }
    Ok(report::aligned(&lines))
}

/// Returns an upper bound, in cycles, of the time of all but one write in ten thousand.
fn quantile(counts: &Counts) -> f64 {
    let total: u64 = counts.histogram.iter().sum();
    let mut above = 0;
    for (log, count) in (0i32..64).zip(counts.histogram).rev() {
        above += count;
        if above as f64 > total as f64 / 1e4 {
            return 2f64.powi(log + 1);
        }
    }
    0.0
}

/// Returns the number of TSC cycles in a microsecond.
fn cycles_a_us() -> f64 {
    let begin = (host::cpu::rdtsc(), Instant::now());
    thread::sleep(Duration::from_millis(20));
    let cycles = host::cpu::rdtsc().wrapping_sub(begin.0);
    cycles as f64 / begin.1.elapsed().as_secs_f64() / 1e6
}

/// Returns the best of a few tries, in nanoseconds.
fn best(mut one: impl FnMut() -> Result<Duration, BootError>) -> Result<f64, BootError> {
    let mut best = f64::INFINITY;
    for _ in 0..TRIES * 60 {
        best = best.min(one()?.as_secs_f64() * 1e9);
    }
    Ok(best)
}

/// Measures the first write to a page after a harvest.
fn again(verdict: &mut Verdict) -> Result<String, BootError> {
    let head = ["a page dirtied again", "ns", "bar"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (name, method) in METHODS {
        let mut guest = Guest::new(method, PASS, 1, PAGES * PAGE, FEW)?;
        guest.log(true)?;
        guest.pass()?;
        let mut pass = |is_clean: bool| {
            if is_clean {
                guest.harvest()?;
            }
            let begin = Instant::now();
            guest.pass()?;
            Ok(begin.elapsed())
        };
        let clean = best(|| pass(true))?;
        let dirty = best(|| pass(false))?;
        let ns = (clean - dirty) / FEW as f64;
        verdict.at_most(&format!("{name}: a page dirtied again, ns"), ns, 130.0);
        lines.push(vec![name.to_owned(), format!("{ns:.0}"), "130".to_owned()]);
    }
    Ok(report::aligned(&lines))
}

/// Measures calls on a slot of 64 GiB of which little is used.
fn sparse(verdict: &mut Verdict) -> Result<String, BootError> {
    let head = [
        "64 GiB, 1024 pages dirty, µs",
        "begin",
        "harvest",
        "of which CLEAR",
        "harvest of nothing",
        "end",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let methods = [
        METHODS[0],
        METHODS[1],
        ("bitmap, initially set", Method::AllSet),
        METHODS[2],
    ];
    for (name, method) in methods {
        let mut guest = Guest::new(method, PASS, 1, SPARSE, FEW)?;
        guest.pass()?;
        let mut least = [f64::INFINITY; 4];
        let mut clear = f64::INFINITY;
        for _ in 0..TRIES {
            let mut step = |n: usize, guest: &Guest, is_on: Option<bool>| {
                let begin = Instant::now();
                match is_on {
                    Some(is_on) => guest.log(is_on)?,
                    None => drop(guest.harvest()?),
                }
                let us = begin.elapsed().as_secs_f64() * 1e6;
                if let Some(least) = least.get_mut(n) {
                    *least = least.min(us);
                }
                Ok::<(), BootError>(())
            };
            step(0, &guest, Some(true))?;
            guest.harvest()?;
            guest.pass()?;
            step(1, &guest, None)?;
            clear = clear.min(guest.clearing_us());
            step(2, &guest, None)?;
            step(3, &guest, Some(false))?;
        }
        let [begin, harvest, nothing, end] = least;
        verdict.at_most(&format!("64 GiB, {name}: begin, µs"), begin, 200.0);
        let clear = matches!(method, Method::Manual | Method::AllSet).then_some(clear);
        if let Some(clear) = clear {
            verdict.at_most(&format!("64 GiB, {name}: CLEAR, µs"), clear, 200.0);
        }
        verdict.at_most(&format!("64 GiB, {name}: end, µs"), end, 200.0);
        if matches!(method, Method::Ring(_)) {
            verdict.at_most(&format!("64 GiB, {name}: harvest, µs"), harvest, 500.0);
        }
        let mut line = vec![name.to_owned()];
        let cells = [Some(begin), Some(harvest), clear, Some(nothing), Some(end)];
        line.extend(cells.map(|us| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.0}"))));
        lines.push(line);
    }
    Ok(report::aligned(&lines))
}

/// Measures a guest that computes, and dirties about a thousand pages per second.
fn slowdown(verdict: &mut Verdict) -> Result<String, BootError> {
    /// Number of pages that are dirtied in a tenth of a second.
    const SHARE: u64 = 128;
    let head = ["1280 pages dirtied a second", "slower, %"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (name, method) in METHODS {
        let mut guest = Guest::new(method, COMPUTE, 1, PAGES * PAGE, SHARE)?;
        // The best round counts, as other load on the machine only makes it slower.
        let mut rates = [0f64; 2];
        for _ in 0..10 {
            for (rate, is_on) in rates.iter_mut().zip([false, true]) {
                guest.log(is_on)?;
                let counts = guest.run(PERIOD, |guest| {
                    for _ in 0..5 {
                        thread::sleep(PERIOD);
                        if is_on {
                            guest.harvest()?;
                        }
                    }
                    Ok(())
                })?;
                *rate = rate.max(counts.rate());
            }
        }
        let [plain, logged] = rates;
        let slower = (plain / logged - 1.0) * 100.0;
        verdict.at_most(&format!("{name}: slower, %"), slower, 2.0);
        lines.push(vec![name.to_owned(), format!("{slower:.1}")]);
    }
    Ok(report::aligned(&lines))
}

/// Connects to a guest's socket, which may take a moment to be there.
fn connect(socket: &Path, patience: Duration) -> std::io::Result<UnixStream> {
    let begin = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Err(_) if begin.elapsed() <= patience => thread::sleep(Duration::from_millis(5)),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_finds_each_page_once() {
        for (name, method) in METHODS {
            let mut guest = Guest::new(method, PASS, 1, 64 << 20, FEW).unwrap();
            guest.pass().unwrap();
            guest.log(true).unwrap();
            guest.harvest().unwrap();
            for _ in 0..3 {
                guest.pass().unwrap();
                assert_eq!(guest.harvest().unwrap(), FEW, "{name}");
                assert_eq!(guest.harvest().unwrap(), 0, "{name}");
            }
            guest.log(false).unwrap();
        }
    }

    #[test]
    fn all_pages_are_dirty_at_first_where_that_was_asked_for() {
        let mut guest = Guest::new(Method::AllSet, PASS, 1, 64 << 20, FEW).unwrap();
        guest.pass().unwrap();
        guest.log(true).unwrap();
        assert_eq!(guest.harvest().unwrap(), (64 << 20) / PAGE);
        assert_eq!(guest.harvest().unwrap(), 0);
    }

    #[test]
    fn writers_are_counted_while_they_are_harvested() {
        let mut guest = Guest::new(Method::Ring(1024), RANDOM, 2, 64 << 20, 4096).unwrap();
        let found = harvest(&mut guest, Duration::from_millis(1), 20).unwrap();
        assert!(found.pages > 0 && found.counts.writes > 0);
        let seen: u64 = found.counts.histogram.iter().sum();
        assert!(seen > 0 && quantile(&found.counts) > 1.0);
    }
}
