//! A guest that moves while it works.

use std::io::{Write, pipe};
use std::process::Command;

use super::{Folder, Process, place, wait_for, wait_for_file};

/// Who works beside each other: a program that writes its memory, three processes with pipelines, a compiler.
const WORKERS: usize = 5;

/// All check what they find, and say each turn once, until there is a line of input. `sum`: of what the host's compiler
/// makes of the source.
fn script(sum: &str) -> String {
    format!(
        r#"
seq 4000 | md5sum >/tmp/want
work() {{
    i=0
    until [ -e /tmp/enough ]; do
        seq 4000 | sort -r | gzip -c >/tmp/packed.$1
        gunzip -c </tmp/packed.$1 | sort -n >/tmp/sorted.$1
        md5sum </tmp/sorted.$1 | cmp -s - /tmp/want || echo LOST file $1 $i
        [ "$(true; echo $((i * 3)) | sed 's/$/./')" = "$((i * 3))." ] || echo LOST process $1 $i
        echo turn $1 $i
        i=$((i + 1))
    done
    echo turn $1 end
}}
compile() {{
    i=0
    until [ -e /tmp/enough ]; do
        /opt/cc1 -quiet -fpreprocessed -O2 /opt/source.i -o /tmp/made
        [ "$(md5sum </tmp/made)" = "{sum}  -" ] || echo LOST compilation $i
        echo turn 4 $i
        i=$((i + 1))
    done
    echo turn 4 end
}}
awk 'BEGIN {{
    for (t = 0; (getline line <"/tmp/enough") < 0; t++) {{
        for (i = 0; i < 5000; i++) a[i] = a[i] + i + t
        for (i = 0; i < 5000; i++) if (a[i] != i * (t + 1) + t * (t + 1) / 2) print "LOST memory", i, t
        print "turn 0", t; fflush()
    }}
    print "turn 0 end"
}}' &
for n in 1 2 3; do work $n & done
compile &
read line
echo $line >/tmp/enough
wait
exit 7"#
    )
}

/// The turns of a worker that these lines have.
fn turns(said: &str, worker: usize) -> Vec<&str> {
    let start = format!("turn {worker} ");
    let turns = said.lines().filter_map(|line| line.strip_prefix(&start));
    turns.collect()
}

/// The compiler proper and a source for it, as overlays, and the sum of what it makes of that here.
fn compiler(folder: &Folder) -> ([String; 2], String) {
    let output = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let cc1 = output(Command::new("gcc").arg("-print-prog-name=cc1"));
    let cc1 = cc1.trim();
    let (source, made) = (folder.path("source.i"), folder.path("made.s"));
    let function = |n| {
        format!(
            "unsigned f{n}(unsigned *p, unsigned n) {{ unsigned s = {n}; \
             for (unsigned i = 0; i < n; i++) {{ p[i] ^= s * {n}u; s = s << {} | p[i] % {}; }} return s; }}\n",
            n % 30 + 1,
            n + 3
        )
    };
    std::fs::write(&source, (0..40).map(function).collect::<String>()).unwrap();
    let options = ["-quiet", "-fpreprocessed", "-O2", &source, "-o", &made];
    output(Command::new(cc1).args(options));
    let sum = output(Command::new("md5sum").arg(&made));
    let overlays = [format!("{cc1}:/opt/cc1"), format!("{source}:/opt/source.i")];
    (overlays, sum.split(' ').next().unwrap().to_owned())
}

/// Also where vCPUs' threads may make almost no system call.
#[test]
fn a_busy_guest_goes_on_elsewhere() {
    for confine in [None, Some("--confine")] {
        let folder = Folder::new("busy");
        let (overlays, sum) = compiler(&folder);
        let mut options = vec!["--cpus", "2", "--mem", "512M"];
        options.extend(overlays.iter().flat_map(|one| ["--overlay", one]));
        options.extend(confine);
        let (reader, mut writer) = pipe().unwrap();
        let start = |name: &str, options: &[&str], command: &[&str]| {
            let mut anykvm = Process::command(&folder, name, options, command);
            anykvm.stdin(reader.try_clone().unwrap());
            Process::spawn(&folder, name, &mut anykvm)
        };
        let works = |process: &Process| {
            let said = process.read("out");
            (0..WORKERS).all(|n| turns(&said, n).len() > 1)
        };
        let mut source = start("source", &options, &["sh", "-c", &script(&sum)]);
        wait_for(|| works(&source));
        let way = place("unix", &folder.path("way"));
        let mut incoming = vec!["--incoming", &way];
        incoming.extend(confine);
        let mut target = start("target", &incoming, &[]);
        wait_for_file(&folder.path("way"));
        let report = source.do_migrate(&["--to", &way, "--verify"]);
        assert!(report.contains("vCPUs stalled"), "{report}");
        assert_eq!(source.end(), Some(0), "{}", source.read("err"));
        wait_for(|| works(&target));
        writeln!(writer, "enough").unwrap();
        assert_eq!(target.end(), Some(7), "{}", target.read("err"));
        let said = source.read("out") + &target.read("out");
        assert!(!said.contains("LOST"), "{said}");
        for n in 0..WORKERS {
            let turns = turns(&said, n);
            let mut want: Vec<String> = (0..turns.len() - 1).map(|turn| turn.to_string()).collect();
            want.push("end".to_owned());
            assert_eq!(turns, want, "{n}: {said}");
        }
    }
}
