//! What is written to a guest while it moves.

use std::io::{Write, pipe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::{Folder, Process, place, wait_for, wait_for_file};

/// Numbers come without a pause through one pipe, which is the standard input of both processes; the guest says each, once. By
/// virtio and by a serial port.
#[test]
fn input_follows_a_guest() {
    const SCRIPT: &str = "while read n; do echo got $n; done; exit 7";
    for console in [None, Some("--console=ttyS0")] {
        let folder = Folder::new("input");
        let (reader, mut writer) = pipe().unwrap();
        let mut options = vec!["--mem", "192M"];
        options.extend(console);
        let start = |name: &str, options: &[&str], command: &[&str]| {
            let mut anykvm = Process::command(&folder, name, options, command);
            anykvm.stdin(reader.try_clone().unwrap());
            Process::spawn(&folder, name, &mut anykvm)
        };
        let source = start("source", &options, &["sh", "-c", SCRIPT]);
        let has_moved = AtomicBool::new(false);
        let (count, mut all) = thread::scope(|threads| {
            let feeder = threads.spawn(|| {
                let mut count = 0;
                // It ends where a guest goes on that takes nothing.
                while !has_moved.load(Ordering::Acquire) && count < 30_000 {
                    writeln!(writer, "{count}").unwrap();
                    count += 1;
                    thread::sleep(Duration::from_millis(2));
                }
                drop(writer);
                count
            });
            wait_for(|| source.read("out").contains("got 20\n"));
            let way = place("unix", &folder.path("way"));
            let target = start("target", &["--incoming", &way], &[]);
            wait_for_file(&folder.path("way"));
            source.do_migrate(&["--to", &way, "--verify"]);
            wait_for(|| target.read("out").lines().count() > 100);
            has_moved.store(true, Ordering::Release);
            (feeder.join().unwrap(), [source, target])
        });
        let statuses = all.each_mut().map(Process::end);
        let said: String = all.iter().map(|process| process.read("out")).collect();
        let want: String = (0..count).map(|n| format!("got {n}\n")).collect();
        assert_eq!(said, want, "{console:?}");
        assert_eq!(statuses, [Some(0), Some(7)]);
    }
}
