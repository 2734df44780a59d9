//! Drives a QEMU by its machine protocol (QMP): lines of JSON in both directions, and events between.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// How long each step may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// A QEMU process, which is killed when this is dropped.
pub(super) struct Qemu {
    child: Child,
    lines: BufReader<UnixStream>,
    socket: UnixStream,
    /// The file with what the guest writes to its serial port.
    pub(super) console: PathBuf,
    errors: PathBuf,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    /// Starts QEMU. Its files are in `dir`, and their names begin with `name`.
    pub(super) fn start(mut command: Command, dir: &Path, name: &str) -> Result<Self, String> {
        let file = |kind: &str| dir.join(format!("{name}.{kind}"));
        let (path, console, errors) = (file("qmp"), file("console"), file("errors"));
        command.args(["-serial", &format!("file:{}", console.display())]);
        command.args(["-qmp", &format!("unix:{},server,nowait", path.display())]);
        let log = fs::File::create(&errors).map_err(|e| format!("{}: {e}", errors.display()))?;
        let null = Stdio::null;
        command.stdin(null()).stdout(null()).stderr(log);
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let begin = Instant::now();
        let socket = loop {
            match UnixStream::connect(&path) {
                Ok(socket) => break socket,
                Err(_) if begin.elapsed() < PATIENCE && matches!(child.try_wait(), Ok(None)) => {}
                Err(error) => {
                    let said = fs::read_to_string(&errors).unwrap_or_default();
                    return Err(format!("no QMP: {error}: {said}"));
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let failed = |e: std::io::Error| format!("QMP: {e}");
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let lines = BufReader::new(socket.try_clone().map_err(failed)?);
        let mut qemu = Self {
            child,
            lines,
            socket,
            console,
            errors,
        };
        let said = qemu.line()?;
        if !said.contains("QMP") {
            return Err(format!("QMP begins with {said}"));
        }
        qemu.ask("qmp_capabilities", "{}")?;
        Ok(qemu)
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line);
        match read {
            Ok(1..) => Ok(line),
            Ok(0) => Err(format!("QEMU has ended: {}", self.errors())),
            Err(error) => Err(format!("QMP: {error}: {}", self.errors())),
        }
    }

    /// Returns what QEMU itself has printed.
    pub(super) fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// Sends a command with its arguments. Returns the line that answers it.
    pub(super) fn ask(&mut self, command: &str, arguments: &str) -> Result<String, String> {
        let line = format!("{{\"execute\":\"{command}\",\"arguments\":{arguments}}}\n");
        self.socket
            .write_all(line.as_bytes())
            .map_err(|e| format!("{command}: {e}"))?;
        loop {
            let line = self.line()?;
            if line.starts_with("{\"return\"") {
                return Ok(line);
            }
            if line.starts_with("{\"error\"") || line.starts_with("{\"id\"") {
                return Err(format!("{command}: {}", line.trim()));
            }
        }
    }

    /// Returns the status of the machine: running, postmigrate and so on.
    pub(super) fn status(&mut self) -> Result<String, String> {
        let answer = self.ask("query-status", "{}")?;
        Ok(value(&answer, "status").unwrap_or_default().to_owned())
    }

    /// Returns the sum of a statistic over all vCPUs (KVM_GET_STATS_FD).
    pub(super) fn vcpus_sum(&mut self, name: &str) -> Result<f64, String> {
        let arguments = format!(
            "{{\"target\":\"vcpu\",\"providers\":[{{\"provider\":\"kvm\",\"names\":[\"{name}\"]}}]}}"
        );
        let answer = self.ask("query-stats", &arguments)?;
        sum(&answer).ok_or(format!("no {name} in {}", answer.trim()))
    }

    /// Returns the guest's last tick.
    pub(super) fn last_tick(&self) -> Option<u64> {
        let bytes = fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        // A line without an end is not a whole number.
        let (whole, _) = text.rsplit_once('\n')?;
        whole.lines().rev().find_map(tick)
    }

    /// Waits until the guest has counted to `number`.
    pub(super) fn wait_for_tick(&mut self, number: u64) -> Result<(), String> {
        let begin = Instant::now();
        while self.last_tick().is_none_or(|last| last < number) {
            if begin.elapsed() > PATIENCE {
                let said = fs::read(&self.console).unwrap_or_default();
                let said = String::from_utf8_lossy(&said);
                let tail: Vec<&str> = said.lines().rev().take(5).collect();
                let state = self.status()?;
                return Err(format!(
                    "no tick {number}, the machine is {state}, the guest said, last line first: {tail:?}; {}",
                    self.errors()
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Kills the process, as a crash would.
    pub(super) fn kill(self) {}

    /// Lets the process end.
    pub(super) fn quit(mut self) -> Result<(), String> {
        self.ask("quit", "{}")?;
        let status = self.child.wait().map_err(|e| e.to_string())?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("QEMU ended with {status}: {}", self.errors()))
        }
    }
}

/// Returns the number in a line of the guest.
pub(super) fn tick(line: &str) -> Option<u64> {
    line.trim().strip_prefix("tick ")?.parse().ok()
}

/// Returns the word behind `"key":`, without its quotes.
pub(super) fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{key}\":"))?;
    let rest = rest.trim_start();
    let end = rest.find([',', '}'])?;
    Some(rest.get(..end)?.trim_matches('"'))
}

/// Returns the sum of all words behind `"value":`. `None` if there is none.
fn sum(line: &str) -> Option<f64> {
    let ends: Vec<usize> = line.match_indices("\"value\":").map(|(at, _)| at).collect();
    let values = ends.iter().map(|at| number(line.get(*at..)?, "value"));
    let values: Option<Vec<f64>> = values.collect();
    values.filter(|v| !v.is_empty()).map(|v| v.iter().sum())
}

/// Returns the word behind `"key":` as a number.
pub(super) fn number(line: &str, key: &str) -> Option<f64> {
    value(line, key)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let line = r#"{"return": {"status": "completed", "downtime": 31, "mbps": 1.5}}"#;
        assert_eq!(value(line, "status"), Some("completed"));
        assert_eq!(number(line, "downtime"), Some(31.0));
        assert_eq!(number(line, "mbps"), Some(1.5));
        assert_eq!(number(line, "status"), None);
        assert_eq!(value(line, "other"), None);
        let stats = r#"{"return": [{"stats": [{"name": "x", "value": 3}]}, {"stats": [{"value": 4, "name": "x"}]}]}"#;
        assert_eq!(sum(stats), Some(7.0));
        assert_eq!(sum(r#"{"return": []}"#), None);
        assert_eq!(tick("tick 7\r"), Some(7));
        assert_eq!(tick("x tick 7"), None);
    }
}
