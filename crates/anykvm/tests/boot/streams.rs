//! Standard input, output and error of a guest's shell or command: each combination of terminals,
//! pipes and nothing, on each console.

use std::fs::OpenOptions;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::guest::wait;
use crate::linux::{linux, run, run_without_input};
use crate::terminal::Terminal;

/// Options for the console: none, with which the guest has both consoles, and each of the two.
const CONSOLES: [&[&str]; 3] = [&[], &["--console", "ttyS0"], &["--console", "hvc0"]];

#[test]
fn a_shell_without_input_ends_at_once() {
    for _ in 0..3 {
        let outcome = run_without_input(&mut linux(&[], &[]));
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert_eq!(outcome.text(), "", "nothing of a terminal's on a pipe");
    }
}

#[test]
fn a_shell_on_a_pipe_executes_what_comes() {
    for console in CONSOLES {
        let outcome = run(&mut linux(console, &[]), b"uname\necho a; exit 5\n");
        assert_eq!(outcome.status, Some(5), "{console:?} {outcome:?}");
        assert_eq!(outcome.text(), "Linux\na\n", "{console:?}");
    }
}

#[test]
fn three_streams_pass_bytes_unchanged() {
    let script = "cat; echo 'to the side' >&2; exit 7";
    for console in CONSOLES {
        // A serial port is slow, so it gets less.
        let len = if console.is_empty() { 3 << 20 } else { 50_000 };
        let bytes: Vec<u8> = (0..len)
            .map(|n: u32| (n.wrapping_mul(n) >> 7) as u8)
            .collect();
        let outcome = run(&mut linux(console, &["sh", "-c", script]), &bytes);
        assert_eq!(outcome.status, Some(7), "{console:?}: {}", outcome.stderr);
        assert!(
            outcome.stdout == bytes,
            "{console:?}: {} bytes",
            outcome.stdout.len()
        );
        assert!(
            outcome.stderr.ends_with("to the side\n"),
            "{console:?}: {}",
            outcome.stderr
        );
    }
}

/// A serial port's speed would take a minute.
#[test]
fn much_goes_through_a_command_in_little_time() {
    const LEN: usize = 128 << 20;
    const AT_MOST: Duration = Duration::from_secs(30);
    let start = Instant::now();
    let outcome = run(&mut linux(&[], &["cat"]), &vec![b'x'; LEN]);
    assert_eq!((outcome.status, outcome.stdout.len()), (Some(0), LEN));
    assert!(start.elapsed() < AT_MOST, "{:?}", start.elapsed());
}

#[test]
fn streams_can_be_opened_again_and_need_not_be_read() {
    let script = "cat /dev/stdin; echo out >/dev/stdout; echo err >/dev/stderr; (sleep 1000 &)";
    let outcome = run(&mut linux(&[], &["sh", "-c", script]), b"in\n");
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert_eq!(outcome.text(), "in\nout\n");
    assert!(outcome.stderr.ends_with("err\n"), "{outcome:?}");
    let outcome = run(&mut linux(&[], &["false"]), &vec![b'x'; 4 << 20]);
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
}

#[test]
fn a_command_has_a_terminal_where_we_have_one() {
    for console in CONSOLES {
        let script = "test -t 0 && test -t 1 && test -t 2 && read x && echo got-$x; exit 4";
        let mut terminal = Terminal::start(&linux(console, &["sh", "-c", script]), [true; 3]);
        terminal.type_keys(b"word\r");
        terminal.read_until("got-word");
        assert_eq!(wait(&mut terminal.child), Some(4), "{console:?}");
        assert!(terminal.is_cooked());
    }
}

#[test]
fn a_shell_on_a_terminal() {
    for console in CONSOLES {
        let mut terminal = Terminal::start(&linux(console, &[]), [true; 3]);
        terminal.read_until("# ");
        // Ctrl-C goes to the shell, and Ctrl-D ends it.
        terminal.type_keys(b"sleep 1000\r");
        terminal.read_until("sleep 1000");
        std::thread::sleep(Duration::from_millis(500));
        terminal.type_keys(b"\x03");
        terminal.read_until("# ");
        terminal.type_keys(b"(exit 6)\r");
        terminal.read_until("# ");
        terminal.type_keys(b"\x04");
        assert_eq!(wait(&mut terminal.child), Some(6), "{console:?}");
        assert!(terminal.is_cooked());
    }
}

#[test]
fn a_shell_whose_output_is_copied() {
    let mut terminal = Terminal::start(&linux(&[], &[]), [true, false, true]);
    terminal.type_keys(b"echo $((6 * 7)); exit 3\r");
    assert_eq!(wait(&mut terminal.child), Some(3));
    let mut text = String::new();
    terminal
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert!(text.contains("\r\n42\r\n"), "{text}");
    assert!(terminal.is_cooked());
}

/// Tests `anykvm boot -- COMMAND | less`, and `| cat`.
#[test]
fn a_pipe_behind_a_command_leaves_the_terminal_alone() {
    let endless = ["sh", "-c", "echo up; while :; do sleep 1; done"];
    let ends = [(b"\x03".as_slice(), 130), (b"\x1c", 131), (b"\x01x\n", 0)];
    for (console, (keys, status)) in CONSOLES.iter().flat_map(|c| ends.map(|end| (c, end))) {
        let mut terminal = Terminal::start(&linux(console, &endless), [true, false, true]);
        let mut ready = [0; 3];
        terminal
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut ready)
            .unwrap();
        assert!(terminal.is_cooked(), "while the guest runs");
        terminal.type_keys(keys);
        assert_eq!(wait(&mut terminal.child), Some(status));
    }
    // Lines are the command's input, until a pager takes the keys.
    let echo = ["sh", "-c", "while read x; do echo got-$x; done"];
    let mut terminal = Terminal::start(&linux(&[], &echo), [true, false, true]);
    terminal.type_keys(b"one\n");
    let mut line = [0; 8];
    terminal
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut line)
        .unwrap();
    assert_eq!(&line, b"got-one\n");
    terminal.take_keys();
    std::thread::sleep(Duration::from_millis(300));
    terminal.type_keys(b"q");
    assert_eq!(terminal.read_key(), b'q');
    let pid = rustix::process::Pid::from_child(&terminal.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(wait(&mut terminal.child), Some(143));
}

#[test]
fn a_standard_error_of_its_own_stays_apart() {
    for console in CONSOLES {
        let script = "test -t 0 && test -t 1 && ! test -t 2 && echo shown; echo aside >&2; exit 9";
        let mut terminal =
            Terminal::start(&linux(console, &["sh", "-c", script]), [true, true, false]);
        let mut errors = terminal.stderr.take().unwrap();
        terminal.read_until("shown");
        assert_eq!(wait(&mut terminal.child), Some(9), "{console:?}");
        let mut text = String::new();
        errors.read_to_string(&mut text).unwrap();
        // On a serial console the guest's shell may say "Killed" of a job of its own behind it.
        let own = text.strip_suffix("Killed\n").unwrap_or(&text);
        assert!(own.ends_with("aside\n"), "{console:?}: {text}");
    }
}

#[test]
fn output_on_a_terminal_without_input_from_it() {
    let mut terminal = Terminal::start(&linux(&[], &["echo", "shown"]), [false, true, true]);
    terminal.read_until("shown");
    assert_eq!(wait(&mut terminal.child), Some(0));
}

#[test]
fn the_guest_learns_the_windows_size() {
    for console in CONSOLES {
        let script = "while read -t 1 x; [ -z \"$x\" ]; do echo size-$(stty size); done";
        let mut terminal = Terminal::start(&linux(console, &["sh", "-c", script]), [true; 3]);
        terminal.read_until("size-");
        for (rows, columns) in [(33, 111), (50, 200)] {
            terminal.resize(rows, columns);
            terminal.read_until(&format!("size-{rows} {columns}"));
        }
        terminal.type_keys(b"enough\r");
        assert_eq!(wait(&mut terminal.child), Some(0), "{console:?}");
    }
}

#[test]
fn closed_and_full_streams() {
    let full = || Stdio::from(OpenOptions::new().write(true).open("/dev/full").unwrap());
    let status = |command: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut child = linux(&[], command);
        child.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        wait(&mut child.spawn().unwrap())
    };
    let (null, noise) = (Stdio::null, ["sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(status(&noise, full(), null()), Some(2));
    assert_eq!(status(&noise, null(), full()), Some(3));
    let crash = ["sh", "-c", "echo c >/proc/sysrq-trigger"];
    assert_eq!(status(&crash, null(), full()), Some(125));
    // A closed pipe as standard error.
    let mut child = linux(&[], &crash);
    child.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(wait(&mut child), Some(125));
    // None of the three streams is open.
    let anykvm = env!("CARGO_BIN_EXE_anykvm");
    let script = format!("exec {anykvm} boot -- sh -c 'echo a; exit 3' <&- >&- 2>&-");
    let mut child = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    assert_eq!(wait(&mut child), Some(3));
}

#[test]
fn kernels_that_panic_or_halt() {
    for command in [&[][..], &["sh", "-c", "echo c >/proc/sysrq-trigger"]] {
        let outcome = run(&mut linux(&[], command), b"echo c >/proc/sysrq-trigger\n");
        assert_eq!(outcome.status, Some(125), "{outcome:?}");
        let want = "anykvm: the guest's kernel panicked: sysrq triggered crash\n";
        assert!(outcome.stderr.ends_with(want), "{outcome:?}");
    }
    for cpus in ["1", "2"] {
        let outcome = run(&mut linux(&["--cpus", cpus], &[]), b"halt -f\n");
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let outcome = run(&mut linux(&["--cpus", cpus], &["halt", "-f"]), b"");
        assert_eq!(outcome.status, Some(125), "{outcome:?}");
        assert!(outcome.stderr.contains("the guest halted"), "{outcome:?}");
    }
    for command in ["reboot -f", "poweroff -f"] {
        let outcome = run(&mut linux(&[], &[]), format!("{command}\n").as_bytes());
        assert_eq!(outcome.status, Some(0), "{command}: {outcome:?}");
    }
    // A command's text that looks like a kernel's last words is not taken for them.
    let liar = "echo '[ 1.0] reboot: System halted' >/dev/ttyS1; sleep 1; exit 3";
    let outcome = run(&mut linux(&[], &["sh", "-c", liar]), b"");
    assert_eq!(outcome.status, Some(3), "{outcome:?}");
}

#[test]
fn a_guest_that_is_too_small_says_so() {
    let hungry = ["sh", "-c", "x=$(yes | head -c 500000000)"];
    let outcome = run_without_input(&mut linux(&[], &hungry));
    assert_eq!(outcome.status, Some(137), "{outcome:?}");
    assert!(outcome.stderr.contains("see --mem"), "{outcome:?}");
}
