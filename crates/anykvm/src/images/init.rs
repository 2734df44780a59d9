//! The script that is the guest's first process. It connects the streams, runs the shell or the command, and reports
//! the status.
//!
//! COM1 is the console, COM2 has the kernel's messages and our standard error, and COM4 is the control port
//! (`devices/control.rs`). A command's streams are ports of the virtio console. On a kernel without virtio they are
//! COM1, COM2 and, for input, COM3.

use super::modules::Module;
use crate::cli::ConsoleKind;
use crate::streams::Shape;

/// The task of the guest's first process.
#[derive(Debug)]
pub(crate) struct Init<'a> {
    /// The command. Empty: a shell on a terminal is started.
    pub(crate) command: &'a [String],
    /// What the command or the shell has for standard input, output and error.
    pub(crate) shape: Shape,
    /// Rows and columns of the terminal.
    pub(crate) size: Option<(u16, u16)>,
    /// The console device, if the user names it.
    pub(crate) console: Option<ConsoleKind>,
    /// True if the machine has a virtio console; the kernel may not know it.
    pub(crate) uses_virtio: bool,
    /// Serial number of the disk that the command or the shell runs on, if it runs on one.
    pub(crate) root_serial: Option<&'a str>,
    /// The init of that disk that takes over, if there is one.
    pub(crate) own_init: Option<&'a str>,
    /// Kernel modules to load first, in this order.
    pub(crate) modules: Vec<Module>,
    /// What to say if there is no disk: where its module was searched for.
    pub(crate) missing: Option<String>,
}

const START: &str = r#"#!/bin/busybox sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=${TERM:-linux}
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm /run
mount -t devpts pts /dev/pts
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr
hostname anykvm
ip link set lo up 2>/dev/null
"#;

const FUNCTIONS: &str = r#"exec 9>/dev/ttyS3
stty -F /dev/ttyS3 raw -echo
# say TEXT: to standard error.
say() { echo "$1" >/dev/ttyS1; }
# end STATUS: the port is given time to send everything.
end() {
    sync
    stty -F /dev/ttyS1 -echo
    stty -F /dev/ttyS0 -echo
    echo exit $1 >&9
    while :; do sleep 1; done
}
# find_port NAME: sets $port.
find_port() {
    port=
    for place in /sys/class/virtio-ports/vport*; do
        [ "$(cat $place/name 2>/dev/null)" = $1 ] && port=/dev/${place##*/}
    done
    [ -n "$port" ]
}
# wait_for COMMAND...: for half a second, while there is a virtio console.
wait_for() {
    tries=0
    while ! "$@"; do
        [ -n "$(ls /sys/bus/virtio/drivers/virtio_console/ 2>/dev/null | grep virtio)" ] || return 1
        [ $tries = 50 ] && return 1
        tries=$((tries + 1))
        sleep 0.01
    done
}
# hold: one end of a pipe, until the others are open.
hold() {
    exec 6<&- 7>&- 8>&- 9>&-
    until [ -e /run/open ]; do sleep 0.01; done
}
wait_for_pipe() {
    until [ "$(readlink /proc/$1/fd/0 | cut -c1-5)" = pipe: ]; do sleep 0.01; done
}
# find_program ROOT NAME: sets $program to the file that PATH names, so that no applet of this
# busybox comes before it.
find_program() {
    program=$2
    case $2 in */*) return ;; esac
    rest=$PATH:
    while [ -n "$rest" ]; do
        folder=${rest%%:*}
        rest=${rest#*:}
        if [ -x "$1$folder/$2" ] || [ -L "$1$folder/$2" ]; then
            program=$folder/$2
            return
        fi
    done
}
"#;

/// Connects the streams to ports of the virtio console, or else to serial ports.
const PORTS: &str = r#"    find_port anykvm.in
    in=$port
    find_port anykvm.out
    out=$port
    find_port anykvm.err
    err=$port
    connection=port
"#;
const SERIAL_PORTS: &str = r#"    in=/dev/ttyS2
    out=/dev/ttyS0
    err=/dev/ttyS1
    stty -F $in raw -echo icanon iexten crtscts eof '^D' lnext '^V' intr undef quit undef kill undef erase undef werase undef rprnt undef susp undef start undef stop undef eol undef eol2 undef
    stty -F $out raw -echo
    stty -F $err raw -echo
    connection=ttyS2
"#;

/// Connects the command to pipes, which pumps fill and empty. A port can be opened only once, a serial port is a
/// terminal, and a command may want to open /dev/stdin again. (A FIFO would make it wait when the other side is gone.)
/// `$out` and `$err` become the pumps whose end is waited for.
const PUMPS: &str = r#"dd bs=64k <$in 2>/dev/null 9>&- | hold &
wait_for_pipe $!
exec 6</proc/$!/fd/0
hold | dd bs=64k >$out 2>/dev/null 6<&- 9>&- &
out=$!
wait_for_pipe $out
exec 7>/proc/$out/fd/0
hold | dd bs=64k >$err 2>/dev/null 6<&- 7>&- 9>&- &
err=$!
wait_for_pipe $err
exec 8>/proc/$err/fd/0
>/run/open
echo ready $connection >&9
"#;

/// Closes the streams after the command. Processes that it has left behind hold its streams open, and are killed. The
/// shell would print "Killed" for those that it has started itself.
const CLOSE_STREAMS: &str = r#"exec 6<&- 7>&- 8>&- 2>/dev/null
for process in /proc/[0-9]*; do
    process=${process#/proc/}
    case " 1 $out $err " in *" $process "*) ;; *) kill -9 $process ;; esac
done
wait $out $err
"#;

/// Says whether a command was killed by the guest's kernel because of too little memory.
const KILLED: &str = r#"if [ $status = 137 ] && dmesg 2>/dev/null | grep -q 'Out of memory: Killed process'; then
    say 'anykvm: the guest had too little memory and its kernel killed a process: see --mem'
fi
"#;

/// Returns the script of `/init`.
pub(super) fn script(init: &Init<'_>) -> String {
    let mut script = String::from(START);
    for module in &init.modules {
        script.push_str(&format!("insmod {}\n", module.guest_path()));
    }
    script.push_str(FUNCTIONS);
    if let Some(missing) = &init.missing {
        script.push_str(&format!(
            "[ -e /sys/bus/virtio/drivers/virtio_blk ] || say {}\n",
            shell_quote(&format!("anykvm: {missing}"))
        ));
    }
    if let Some(serial) = init.root_serial {
        script.push_str(&mount_root(serial));
    }
    match init.shape {
        Shape::Streams => script.push_str(&streams(init)),
        Shape::Console { has_errors } => script.push_str(&console(init, has_errors)),
    }
    // The image may be written to, and is left clean.
    let unmount = match init.root_serial {
        Some(_) => "mount -o remount,ro /newroot 2>/dev/null\n",
        None => "",
    };
    script.push_str(&format!("{KILLED}{unmount}end $status\n"));
    script
}

/// Returns the part of the script for three streams.
fn streams(init: &Init<'_>) -> String {
    let choice = if init.uses_virtio {
        format!("if wait_for find_port anykvm.err; then\n{PORTS}else\n{SERIAL_PORTS}fi\n")
    } else {
        SERIAL_PORTS.to_owned()
    };
    let (before, run) = command(init);
    format!(
        "{choice}{PUMPS}{before}{run} <&6 >&7 2>&8 6<&- 7>&- 8>&- 9>&-\nstatus=$?\n{CLOSE_STREAMS}"
    )
}

/// Returns the part of the script for a terminal.
fn console(init: &Init<'_>, has_errors: bool) -> String {
    let mut script = String::new();
    let name = match init.console {
        Some(console) => console.device(),
        None => "ttyS0",
    };
    script.push_str(&format!("console={name}\n"));
    if init.console.is_none() && init.uses_virtio {
        script.push_str("wait_for test -c /dev/hvc0 && console=hvc0\n");
    }
    // The console stays open, as some consoles forget their size when the last user closes them.
    script.push_str("exec 5<>/dev/$console\n");
    if let Some((rows, columns)) = init.size {
        script.push_str(&format!("stty rows {rows} cols {columns} <&5\n"));
    }
    script.push_str(
        "while read -r word rows columns; do
    [ \"$word\" = size ] && stty rows $rows cols $columns <&5
done </dev/ttyS3 9>&- 2>/dev/null &
",
    );
    let mut errors = "2>&1";
    if has_errors {
        script.push_str(
            "out=
stty -F /dev/ttyS1 raw -echo
wait_for find_port anykvm.err || port=/dev/ttyS1
hold | dd bs=64k >$port 2>/dev/null 5<&- 9>&- &
err=$!
wait_for_pipe $err
exec 8>/proc/$err/fd/0
>/run/open
",
        );
        errors = "2>&8 8>&-";
    }
    let terminal = "</dev/$console >/dev/$console";
    if let Some(program) = init.own_init {
        let program = shell_quote(program);
        script.push_str(&format!(
            "echo ready $console >&9
mount --move /dev /newroot/dev
mount --move /proc /newroot/proc
mount --move /sys /newroot/sys
kill $! 2>/dev/null
exec 5<&- 9>&-
exec switch_root /newroot {program} <newroot/dev/console >/newroot/dev/console 2>&1
"
        ));
        return script;
    }
    let (before, run) = command(init);
    script.push_str(&format!(
        "{before}echo ready $console >&9\nsetsid -c {run} {terminal} {errors} 5<&- 9>&-\nstatus=$?\n"
    ));
    if has_errors {
        script.push_str(CLOSE_STREAMS);
    }
    script
}

/// Returns the part of the script that finds the command or the shell, and the part that runs it.
fn command(init: &Init<'_>) -> (String, String) {
    let shell = ["sh".to_owned(), "-l".to_owned()];
    let words = match init.command {
        [] => &shell,
        words => words,
    };
    let quoted: Vec<String> = words.iter().map(|word| shell_quote(word)).collect();
    let (name, arguments) = quoted
        .split_first()
        .map_or(("sh", &[][..]), |(n, a)| (n, a));
    let (root, chroot) = match init.root_serial {
        Some(_) => ("/newroot", "chroot /newroot "),
        None => ("''", ""),
    };
    let before = format!("find_program {root} {name}\n");
    (
        before,
        format!("{chroot}\"$program\" {}", arguments.join(" ")),
    )
}

/// Returns the part of the script that mounts the disk with this serial number, with the kernel's file systems in it. A
/// failure ends the guest with status 125.
fn mount_root(serial: &str) -> String {
    format!(
        "root=
for disk in /sys/block/vd*; do
    [ \"$(cat $disk/serial 2>/dev/null)\" = {serial} ] && root=/dev/${{disk##*/}}
done
mkdir /newroot
if [ -z \"$root\" ] || ! mount $root /newroot; then
    say 'anykvm: the root file system cannot be mounted'
    end 125
fi
mkdir -p /newroot/dev /newroot/proc /newroot/sys /newroot/tmp
for folder in dev proc sys; do mount --rbind /$folder /newroot/$folder; done
"
    )
}

/// Quotes a word for `sh`, whatever is in it.
fn shell_quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let words = ["a b", "it's", "$HOME", "", "\\", "\"", "*", "a\nb"];
        let quoted: Vec<String> = words.iter().map(|w| shell_quote(w)).collect();
        let output = Command::new("sh")
            .arg("-c")
            .arg(format!("printf '%s\\0' {}", quoted.join(" ")))
            .output()
            .unwrap();
        let want: String = words.iter().map(|w| format!("{w}\0")).collect();
        assert_eq!(String::from_utf8_lossy(&output.stdout), want);
    }

    #[test]
    fn the_script_is_one_that_a_shell_accepts() {
        let command = ["echo".to_owned(), "it's".to_owned()];
        let shapes = [
            Shape::Streams,
            Shape::Console { has_errors: true },
            Shape::Console { has_errors: false },
        ];
        for (command, shape) in [&[][..], &command]
            .into_iter()
            .flat_map(|command| shapes.map(|shape| (command, shape)))
        {
            for own_init in [None, Some("/sbin/init")] {
                let script = script(&Init {
                    command,
                    shape,
                    size: Some((24, 80)),
                    console: None,
                    uses_virtio: true,
                    root_serial: Some("x"),
                    own_init,
                    modules: vec![Module {
                        name: "virtio".into(),
                        bytes: Vec::new(),
                    }],
                    missing: Some("it's not there".into()),
                });
                let status = Command::new("sh")
                    .args(["-n", "-c", &script])
                    .status()
                    .unwrap();
                assert!(status.success(), "{script}");
            }
        }
    }
}
