//! Cases that talk to QEMU while it runs: its monitor, snapshots, debugger stub, reboots.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use super::{
    LIMIT, Setup,
    guest::{self, GOOD},
};
use crate::tool::tool;
use testkit::boot::run_limited;

/// How long a machine may not print what is waited for. Time in which it waits for a processor does not count.
const PATIENCE: Duration = Duration::from_secs(100);
/// Maximum of that time together with waits for a processor. Beyond it, the host is too busy.
const PATIENCE_WITH_HOST: Duration = Duration::from_secs(500);

/// A running QEMU with its serial port's lines and its monitor.
struct Machine {
    child: Child,
    lines: Receiver<String>,
    monitor: PathBuf,
    since: Instant,
    /// The value of [`Machine::waited`] when patience began.
    waited: Duration,
}

impl Machine {
    fn start(setup: &Setup, arguments: &[&str], append: &str) -> Result<Self, String> {
        let monitor = setup.dir.join("monitor");
        let mut command = setup.command(arguments);
        setup.kernel(&mut command, append);
        command.args(["-serial", "stdio", "-monitor"]);
        command.arg(format!("unix:{},server,nowait", monitor.display()));
        let log = fs::File::create(setup.dir.join("stderr")).map_err(|e| e.to_string())?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let (sender, lines) = channel();
        let output = child.stdout.take().ok_or("no output")?;
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                // If nobody listens any more, the case is over.
                let _ = sender.send(String::from_utf8_lossy(&line).trim().to_owned());
            }
        });
        Ok(Self {
            child,
            lines,
            monitor,
            since: Instant::now(),
            waited: Duration::ZERO,
        })
    }

    /// Begins the patience again.
    fn be_patient(&mut self) {
        self.since = Instant::now();
        self.waited = self.waited();
    }

    /// Returns how much of the patience is left.
    fn left(&self) -> Duration {
        let waited = self.waited().saturating_sub(self.waited);
        (PATIENCE + waited.min(PATIENCE_WITH_HOST)).saturating_sub(self.since.elapsed())
    }

    /// Returns how long the thread that had to wait most has waited for a processor
    /// (Documentation/scheduler/sched-stats.rst).
    fn waited(&self) -> Duration {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return Duration::ZERO;
        };
        let waited = tasks.flatten().filter_map(|task| {
            let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split(' ').nth(1)?.parse().ok()
        });
        Duration::from_nanos(waited.max().unwrap_or(0))
    }

    /// Returns the next line that contains `text`.
    fn wait_for(&self, text: &str) -> Result<String, String> {
        let mut last = String::new();
        loop {
            match self.lines.recv_timeout(self.left()) {
                Ok(line) if line.contains(text) => return Ok(line),
                Ok(line) if line.contains("GUEST-IS-BAD") => return Err(line),
                Ok(line) => last = line,
                // The machine may have waited for a processor meanwhile.
                Err(RecvTimeoutError::Timeout) if !self.left().is_zero() => {}
                Err(_) => return Err(format!("no '{text}' after '{last}'")),
            }
        }
    }

    /// Returns the number behind the next "tick".
    fn tick(&self) -> Result<u64, String> {
        let line = self.wait_for("tick ")?;
        let number = line.rsplit(' ').next().and_then(|n| n.parse().ok());
        number.ok_or(line)
    }

    /// Sends the monitor a command. Returns its answer.
    fn monitor(&self, command: &str) -> Result<String, String> {
        let failed = |e: std::io::Error| format!("monitor, {command}: {e}");
        let mut stream = UnixStream::connect(&self.monitor).map_err(failed)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut prompt = Prompt::default();
        prompt.read(&mut stream).map_err(failed)?;
        stream
            .write_all(format!("{command}\n").as_bytes())
            .map_err(failed)?;
        prompt.read(&mut stream).map_err(failed)
    }

    /// Waits for the process's end. Returns an error if it has failed.
    fn wait(mut self) -> Result<(), String> {
        while !self.left().is_zero() {
            if let Some(status) = self.child.try_wait().map_err(|e| e.to_string())? {
                return if status.success() {
                    Ok(())
                } else {
                    Err(status.to_string())
                };
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("QEMU did not end".into())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // A case that fails leaves the process running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Collects what the monitor prints, up to its prompt.
#[derive(Default)]
struct Prompt {
    text: Vec<u8>,
}

impl Prompt {
    fn read(&mut self, stream: &mut UnixStream) -> std::io::Result<String> {
        const PROMPT: &[u8] = b"(qemu) ";
        self.text.clear();
        let mut buffer = [0; 4096];
        while !self.text.ends_with(PROMPT) {
            let count = stream.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            self.text.extend_from_slice(&buffer[..count]);
        }
        Ok(String::from_utf8_lossy(&self.text).into_owned())
    }
}

fn expect(text: &str, part: &str) -> Result<(), String> {
    if text.contains(part) {
        Ok(())
    } else {
        Err(format!("no '{part}' in '{text}'"))
    }
}

/// Tests `info`, `stop`, `cont`, memory, `system_reset`, `nmi` and `quit`.
pub(super) fn monitor(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let machine = Machine::start(setup, arguments, "ticks")?;
    machine.tick()?;
    expect(&machine.monitor("info kvm")?, "kvm support: enabled")?;
    let registers = machine.monitor("info registers -a")?;
    expect(&registers, "CPU#1")?;
    // The CPU is in long mode with paging and protection: the kernel runs.
    expect(&registers, "EFER=0000000000000d01")?;
    expect(&machine.monitor("info mem")?, "rw")?;
    expect(&machine.monitor("info lapic")?, "LVTT")?;
    expect(&machine.monitor("info cpus")?, "CPU #1")?;
    machine.monitor("stop")?;
    expect(&machine.monitor("info status")?, "paused")?;
    // These lines were on their way through the serial port.
    while machine
        .lines
        .recv_timeout(Duration::from_millis(500))
        .is_ok()
    {}
    if machine.lines.recv_timeout(Duration::from_secs(1)).is_ok() {
        return Err("the guest runs while it is stopped".into());
    }
    machine.monitor("cont")?;
    let before = machine.tick()?;
    if machine.tick()? != before + 1 {
        return Err("ticks were lost".into());
    }
    // The reset vector's first byte is read through QEMU.
    expect(&machine.monitor("xp /2xb 0xffff0")?, "0xea")?;
    machine.monitor("system_reset")?;
    machine.wait_for("tick 0")?;
    machine
        .monitor("quit")
        .or_else(|e| if e.contains("reset") { Ok(e) } else { Err(e) })?;
    machine.wait()
}

/// QEMU as packages that bring their own libraries start it: a script that starts the loader that starts the program.
pub(super) fn by_loader(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    const QEMU: &str = "qemu-system-x86_64";
    // It looks for its files from where it takes itself to be, which is the loader's place.
    let path = std::env::var("PATH").map_err(|e| e.to_string())?;
    let script = format!(
        "#!/bin/sh -e\nPATH={path}\nexec /lib64/ld-linux-x86-64.so.2 --inhibit-cache $(command -v {QEMU}) -L /usr/share/qemu -L /usr/share/seabios \"$@\"\n"
    );
    let wrapper = setup.dir.join(QEMU);
    fs::write(&wrapper, script).map_err(|e| e.to_string())?;
    tool(Command::new("chmod").arg("+x").arg(&wrapper))?;
    for through in [&["exec"][..], &["exec", "--launch"]] {
        let mut command = setup.command_through(through, arguments);
        command.env("PATH", format!("{}:{path}", setup.dir.display()));
        setup.kernel(&mut command, "");
        command.args(["-no-reboot", "-serial", "stdio"]);
        let outcome = run_limited(&mut command, LIMIT).map_err(|e| e.to_string())?;
        guest::verdict(&outcome).map_err(|e| format!("{through:?}: {e}"))?;
    }
    Ok(())
}

/// Processors that come while the guest runs.
pub(super) fn hotplug(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let machine = Machine::start(setup, arguments, "grows")?;
    machine.wait_for("processors 2")?;
    for (core, count) in [(2, 3), (3, 4)] {
        let answer = machine.monitor(&format!(
            "device_add host-x86_64-cpu,socket-id=0,core-id={core},thread-id=0,id=c{core}"
        ))?;
        if answer.contains("Error") {
            return Err(answer);
        }
        machine.wait_for(&format!("processors {count}"))?;
    }
    Ok(())
}

/// `savevm` and `loadvm`, twice; the guest goes on where it was.
pub(super) fn snapshot(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let disk = setup.dir.join("snapshots.qcow2");
    tool(
        Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(&disk)
            .arg("16M"),
    )?;
    let drive = format!("file={},if=virtio", disk.display());
    let mut arguments = arguments.to_vec();
    arguments.extend(["-drive", &drive]);
    let machine = Machine::start(setup, &arguments, "ticks")?;
    for name in ["a", "b"] {
        let saved = machine.tick()?;
        let answer = machine.monitor(&format!("savevm {name}"))?;
        if answer.contains("Error") {
            return Err(answer);
        }
        while machine.tick()? < saved + 20 {}
        machine.monitor(&format!("loadvm {name}"))?;
        let mut last = machine.tick()?;
        while last >= saved + 20 {
            // These lines were printed before.
            last = machine.tick()?;
        }
        let next = machine.tick()?;
        if next != last + 1 {
            return Err(format!("tick {next} after {last}"));
        }
    }
    Ok(())
}

/// Tests migration to a file, and from it into another process. The guest goes on where it was.
pub(super) fn migration(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    let state = setup.dir.join("state");
    let machine = Machine::start(setup, arguments, "ticks")?;
    while machine.tick()? < 10 {}
    // The guest runs while its memory is saved, so dirty pages are sent again.
    machine.monitor("migrate_set_parameter max-bandwidth 100M")?;
    machine.monitor(&format!("migrate -d \"exec:cat > {}\"", state.display()))?;
    loop {
        let status = machine.monitor("info migrate")?;
        if status.contains("completed") {
            break;
        }
        if status.contains("failed") || machine.left().is_zero() {
            return Err(status);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let mut last = None;
    while let Ok(line) = machine.lines.recv_timeout(Duration::from_millis(500)) {
        let tick = line
            .strip_prefix("tick ")
            .and_then(|n| n.parse::<u64>().ok());
        last = tick.or(last);
    }
    let last = last.ok_or("the guest did not run while it was saved")?;
    machine
        .monitor("quit")
        .or_else(|e| if e.contains("reset") { Ok(e) } else { Err(e) })?;
    machine.wait()?;
    let source = format!("exec:cat {}", state.display());
    let mut arguments = arguments.to_vec();
    arguments.extend(["-incoming", &source]);
    let machine = Machine::start(setup, &arguments, "ticks")?;
    let next = machine.tick()?;
    // The last line may have been on its way.
    if next != last + 1 && machine.tick()? != last + 1 {
        return Err(format!("tick {next} after {last}"));
    }
    while machine.tick()? < last + 20 {}
    Ok(())
}

/// Tests a debugger's breakpoints in the kernel, in software and in hardware, a watchpoint, and steps.
pub(super) fn debugger(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    // The port is free now.
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .map_err(|e| e.to_string())?
        .port();
    let stub = format!("tcp::{port}");
    let mut arguments = arguments.to_vec();
    arguments.extend(["-gdb", &stub]);
    let machine = Machine::start(setup, &arguments, "ticks")?;
    let mut symbols = std::collections::BTreeMap::new();
    while symbols.len() < 3 {
        let line = machine.wait_for("SYMBOL ")?;
        let mut words = line.rsplit(' ');
        if let (Some(address), Some(name)) = (words.next(), words.next()) {
            symbols.insert(name.to_owned(), format!("0x{address}"));
        }
    }
    machine.tick()?;
    let symbol = |name: &str| symbols.get(name).cloned().ok_or(format!("no {name}"));
    // The guest sleeps and writes in turn; each tick counts jiffies.
    let (sleep, write, jiffies) = (
        symbol("hrtimer_nanosleep")?,
        symbol("ksys_write")?,
        symbol("jiffies")?,
    );
    let mut gdb = Command::new("timeout");
    gdb.args(["120", "gdb", "-nx", "-batch"]);
    for command in [
        "set architecture i386:x86-64".to_owned(),
        format!("target remote :{port}"),
        format!("break *{sleep}"),
        "continue".to_owned(),
        "printf \"SOFT %#lx\\n\", $rip".to_owned(),
        "stepi".to_owned(),
        "stepi".to_owned(),
        "printf \"STEPPED %d\\n\", $rip != (unsigned long)0".to_owned(),
        "delete".to_owned(),
        format!("hbreak *{write}"),
        "continue".to_owned(),
        "printf \"HARD %#lx\\n\", $rip".to_owned(),
        "delete".to_owned(),
        format!("watch *(unsigned long *){jiffies}"),
        "continue".to_owned(),
        "printf \"WATCHED\\n\"".to_owned(),
        "delete".to_owned(),
        "detach".to_owned(),
    ] {
        gdb.args(["-ex", &command]);
    }
    let text = tool(&mut gdb)?;
    let plain = |address: &str| {
        format!(
            "0x{}",
            address.trim_start_matches("0x").trim_start_matches('0')
        )
    };
    expect(&text, &format!("SOFT {}", plain(&sleep)))?;
    expect(&text, "STEPPED 1")?;
    expect(&text, &format!("HARD {}", plain(&write)))?;
    expect(&text, "Hardware watchpoint")?;
    expect(&text, "Old value")?;
    expect(&text, "WATCHED")?;
    // The guest goes on afterwards.
    let tick = machine.tick()?;
    while machine.tick()? < tick + 10 {}
    Ok(())
}

pub(super) fn reboots_3(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    reboots(setup, arguments, 3)
}

pub(super) fn reboots_50(setup: &Setup, arguments: &[&str]) -> Result<(), String> {
    reboots(setup, arguments, 50)
}

/// Runs a guest that checks its machine and reboots itself.
fn reboots(setup: &Setup, arguments: &[&str], count: u32) -> Result<(), String> {
    let mut machine = Machine::start(setup, arguments, "again")?;
    for number in 1..=count {
        machine.be_patient();
        machine.wait_for(GOOD).map_err(|e| {
            let state = machine.monitor("info registers -a").unwrap_or_else(|e| e);
            format!("boot {number}: {e}\n{state}")
        })?;
    }
    Ok(())
}
