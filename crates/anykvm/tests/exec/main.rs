//! `anykvm exec`: a small VMM in C, unmodified by anything that this project knows.

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Builds `vmm.c` with `options` for the compiler.
fn build(name: &str, options: &[&str]) -> PathBuf {
    compile("vmm.c", name, options)
}

fn compile(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/exec")
        .join(source);
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("gcc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .args(options)
        .status()
        .expect("gcc is installed");
    assert!(status.success());
    program
}

fn exec(arguments: &[&str]) -> Output {
    command(arguments).output().expect("timeout is installed")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["-k", "5", "400", env!("CARGO_BIN_EXE_anykvm"), "exec", "--"])
        .args(arguments);
    command
}

/// Runs `mode` of the VMM, linked dynamically and statically.
fn passes(name: &str, mode: &[&str]) {
    run(&build(name, &[]), mode);
    run(&build(&format!("{name}-static"), &["-static"]), mode);
}

fn run(program: &Path, mode: &[&str]) {
    let mut arguments = vec![program.to_str().expect("a path in UTF-8")];
    arguments.extend(mode);
    let output = exec(&arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert!(error.contains("in place of /dev/kvm"), "{error}");
}

#[test]
fn a_signal_ends_kvm_run_and_its_handler_runs_once() {
    passes("vmm-spin", &["spin", "5000"]);
    passes("vmm-port", &["port", "2000"]);
    passes("vmm-halt", &["halt", "2000"]);
}

#[test]
fn a_signal_that_only_kvm_run_lets_through_stays_pending() {
    passes("vmm-mask", &["mask", "3000"]);
    passes("vmm-default", &["default", "500"]);
    passes("vmm-default-halt", &["default-halt", "500"]);
}

#[test]
fn immediate_exit_set_by_a_handler_is_never_missed() {
    passes("vmm-immediate", &["immediate", "5000"]);
}

#[test]
fn immediate_exit_of_another_thread_ends_kvm_run_with_its_signal() {
    passes("vmm-sender", &["sender", "5000"]);
}

#[test]
fn a_trace_has_a_line_for_each_call() {
    let program = build("vmm-traced", &[]);
    let trace = Path::new(env!("CARGO_TARGET_TMPDIR")).join("trace.jsonl");
    let output = Command::new("timeout")
        .args([
            "-k",
            "5",
            "100",
            env!("CARGO_BIN_EXE_anykvm"),
            "trace",
            "-o",
        ])
        .arg(&trace)
        .arg("--")
        .arg(&program)
        .arg("descriptors")
        .output()
        .expect("timeout is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    let text = std::fs::read_to_string(&trace).unwrap();
    let find = |what: &str| {
        let line = text.lines().find(|line| line.contains(what));
        line.unwrap_or_else(|| panic!("no {what} in {text}"))
    };
    for line in text.lines() {
        assert!(
            line.starts_with("{\"time\":") && line.ends_with('}'),
            "{line}"
        );
    }
    let version = find("\"kind\":\"system\",\"ioctl\":\"KVM_GET_API_VERSION\"");
    assert!(version.contains("\"result\":12,"), "{version}");
    let region = find("KVM_SET_USER_MEMORY_REGION");
    assert!(region.contains("\"memory_size\":\"0x10000\""), "{region}");
    let sregs = find("KVM_SET_SREGS");
    assert!(
        sregs.contains("\"in\":{\"cs\":{\"base\":\"0x0\","),
        "{sregs}"
    );
    let exit = find("\"reason\":\"IO\"");
    assert!(
        exit.contains(
            "\"direction\":\"out\",\"port\":\"0x10\",\"size\":1,\"count\":1,\"data\":\"00\""
        ),
        "{exit}"
    );
    // KVM_RUN by a system call of the program's own, by one of a child, and on a descriptor that is closed.
    assert!(text.matches("\"KVM_RUN\"").count() >= 4, "{text}");
    assert!(find("\"errno\":\"EIO\"").contains("\"result\":-1,"));
}

#[test]
fn a_trace_of_a_real_device_leaves_the_program_alone() {
    let program = build("vmm-real", &[]);
    let trace = Path::new(env!("CARGO_TARGET_TMPDIR")).join("real.jsonl");
    // A place without /dev/kvm: this machine, or a namespace in which /dev is empty.
    let mut command = if Path::new("/dev/kvm").exists() {
        let script = "mount -t tmpfs none /dev && exec \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
            .args([script, "sh", env!("CARGO_BIN_EXE_anykvm")]);
        command
    } else {
        Command::new(env!("CARGO_BIN_EXE_anykvm"))
    };
    let output = command
        .args(["trace", "--real", "-o"])
        .arg(&trace)
        .arg("--")
        .arg(&program)
        .arg("spin")
        .output()
        .expect("the program can be started");
    let error = String::from_utf8_lossy(&output.stderr);
    // The program's open fails: `trace --real` does not put anykvm in the place of /dev/kvm.
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("kvm >= 0 (errno 2)"), "{error}");
    assert!(error.contains("the machine's own /dev/kvm"), "{error}");
}

#[test]
fn the_doctor_tries_a_guest_and_judges_programs() {
    let run = |programs: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_anykvm"))
            .arg("doctor")
            .args(programs)
            .output()
            .unwrap()
    };
    let good = run(&["sh"]);
    let text = String::from_utf8_lossy(&good.stdout);
    assert_eq!(good.status.code(), Some(0), "{text}");
    assert!(text.contains("ok    trial"), "{text}");
    assert!(text.contains("by a preloaded library"), "{text}");
    assert_eq!(run(&["/etc/passwd"]).status.code(), Some(1));
}

#[test]
fn a_program_that_asks_the_processor_is_told_of_its_extension() {
    let build = |name: &str, options: &[&str]| compile("asks.c", name, options);
    let dynamic = build("asks", &[]);
    let others = [
        build("asks-fixed", &["-no-pie", "-O0"]),
        build("asks-static", &["-static"]),
        build("asks-static-pie", &["-static-pie"]),
        build("asks-O3", &["-O3", "-march=native"]),
    ];
    run(&dynamic, &[]);
    for other in &others {
        run(other, &[]);
        run(&dynamic, &["again", other.to_str().unwrap()]);
        run(other, &["again", dynamic.to_str().unwrap()]);
    }
    let anykvm = env!("CARGO_BIN_EXE_anykvm");
    let mut doctor = Command::new(anykvm);
    let output = doctor.arg("doctor").args(&others).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("  extension "), "{text}");
    let answered = text.matches("CPUID instructions").count();
    let is_lacking = text.contains("shows neither VMX nor SVM");
    assert_eq!(
        answered,
        if is_lacking { others.len() } else { 0 },
        "{text}"
    );
    // A dynamically linked program can be launched, too.
    let launched = Command::new(anykvm)
        .args(["exec", "--launch", "--"])
        .arg(&dynamic)
        .status();
    assert_eq!(launched.unwrap().code(), Some(0));
}

#[test]
fn handlers_are_called_as_the_kernel_would() {
    passes("vmm-handlers", &["handlers"]);
}

#[test]
fn a_handler_on_its_own_stack_runs_the_vcpu() {
    passes("vmm-nested", &["nested", "3000"]);
    passes("vmm-nested-calls", &["nested-calls", "50000"]);
}

/// Signals come in at any instruction of the way into a child, a thread or another program.
#[test]
fn children_and_other_programs_begin_under_fire() {
    let dynamic = compile("children.c", "children", &[]);
    let fixed = compile("children.c", "children-static", &["-static"]);
    let other = dynamic.to_str().expect("a path in UTF-8");
    for program in [&dynamic, &fixed] {
        run(program, &["frames", "2000"]);
        run(program, &["masks", "500", other]);
    }
    run(&fixed, &["masks", "10"]);
}

#[test]
fn descriptors_live_as_long_as_one_of_their_numbers() {
    passes("vmm-descriptors", &["descriptors"]);
}

#[test]
fn a_strict_filter_of_system_calls_is_obeyed() {
    passes("vmm-seccomp", &["seccomp"]);
    passes("vmm-seccomp-all", &["seccomp-all"]);
}

#[test]
fn a_filtered_program_can_be_stopped_and_go_on() {
    passes("vmm-stopped", &["stopped"]);
}

#[test]
fn a_child_under_a_filter_of_its_own_sets_handlers() {
    passes("vmm-filtered-child", &["filtered-child"]);
}

#[test]
fn a_filtered_vcpu_thread_gets_its_steal_time() {
    passes("vmm-seccomp-steal", &["seccomp-steal"]);
}

#[test]
fn a_filtered_vcpu_thread_assigns_irqfds_and_doorbells() {
    passes("vmm-seccomp-chips", &["seccomp-chips"]);
    passes("vmm-seccomp-chips-all", &["seccomp-chips-all"]);
}

#[test]
fn a_write_to_an_irqfd_has_injected_when_it_returns() {
    for (name, options) in [("irqfd", [].as_slice()), ("irqfd-static", &["-static"])] {
        run(&compile("irqfd.c", name, options), &[]);
    }
}

#[test]
fn a_thread_is_cancelled_behind_its_call() {
    passes("vmm-cancel", &["cancel", "500"]);
    passes("vmm-cancel-halt", &["cancel-halt", "500"]);
}

#[test]
fn a_dirty_ring_tells_each_page_once() {
    run(&compile("ring.c", "ring", &[]), &[]);
    run(&compile("ring.c", "ring-static", &["-static"]), &[]);
}

#[test]
fn a_full_dirty_ring_has_all_pages_that_were_written() {
    run(&compile("ring_full.c", "ring-full", &[]), &[]);
}

#[test]
fn memory_that_a_vmm_takes_away_is_a_fault_of_kvm_run() {
    let programs = [
        compile("memory.c", "memory", &[]),
        compile("memory.c", "memory-static", &["-static"]),
    ];
    let modes: [&[&str]; 8] = [
        &["calls"],
        &["running", "1"],
        &["running", "2"],
        &["toggle", "1", "300"],
        &["toggle", "2", "300"],
        &["toggle", "2", "300", "harvest"],
        &["toggle", "1", "20", "clock"],
        &["toggle", "2", "20", "clock"],
    ];
    for engine in ["jit", "interp"] {
        for (program, mode) in programs.iter().flat_map(|p| modes.map(|m| (p, m))) {
            let program = program.to_str().expect("a path in UTF-8");
            let output = command(&[&[program], mode].concat())
                .env("ANYKVM_ENGINE", engine)
                .output()
                .expect("timeout is installed");
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(
                output.status.code(),
                Some(0),
                "{engine} {program} {mode:?}: {error}"
            );
        }
    }
}

#[test]
fn a_handler_of_faults_learns_of_the_vmms_own_alone() {
    passes("vmm-faults", &["faults"]);
}

#[test]
fn launched_programs_are_processes_like_others() {
    for (name, options) in [
        ("process-static", ["-static"].as_slice()),
        ("process-static-pie", &["-static-pie"]),
    ] {
        run(&compile("process.c", name, options), &[]);
    }
}

#[test]
fn what_is_started_by_others_gets_anykvm_too() {
    let fixed = build("vmm-started-static", &["-static"]);
    let dynamic = build("vmm-started", &[]);
    let (fixed, dynamic) = (fixed.to_str().unwrap(), dynamic.to_str().unwrap());
    let busybox = "/usr/bin/busybox";
    for (how, vmm) in [
        // A preloaded shell starts a static VMM, and a static shell both kinds.
        (["sh", "-c"], fixed),
        (["env", "-S"], fixed),
        ([busybox, "ash"], fixed),
        ([busybox, "ash"], dynamic),
    ] {
        let command = format!("{vmm} exits 1000");
        let mut arguments = how.to_vec();
        if how[0] == busybox {
            arguments.push("-c");
        }
        arguments.push(&command);
        let output = exec(&arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{how:?} {vmm}: {error}");
        assert!(String::from_utf8_lossy(&output.stdout).ends_with(" ns\n"));
    }
}

#[test]
fn what_is_started_by_a_descriptor_or_by_a_system_call_gets_anykvm_too() {
    let fixed = build("vmm-descriptor-static", &["-static"]);
    let dynamic = build("vmm-descriptor", &[]);
    for (name, options) in [("starts", [].as_slice()), ("starts-static", &["-static"])] {
        let starts = compile("starts.c", name, options);
        for (how, vmm) in ["fd", "at", "memory", "call", "call-at"]
            .into_iter()
            .flat_map(|how| [(how, &fixed), (how, &dynamic)])
        {
            let (starts, vmm) = (starts.to_str().unwrap(), vmm.to_str().unwrap());
            let output = exec(&[starts, how, vmm, "exits", "1000"]);
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{name} {how} {vmm}: {error}");
            assert!(String::from_utf8_lossy(&output.stdout).ends_with(" ns\n"));
        }
    }
}

#[test]
fn a_dynamically_linked_program_can_be_launched() {
    let program = compile("process.c", "process-dynamic", &[]);
    let output = Command::new("timeout")
        .args([
            "-k",
            "5",
            "400",
            env!("CARGO_BIN_EXE_anykvm"),
            "exec",
            "--launch",
            "--",
        ])
        .arg(program)
        .output()
        .expect("timeout is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
}

/// Makes an executable script of `text`.
fn script(name: &str, text: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).expect("the folder can be written");
    let permissions = Permissions::from_mode(0o755);
    std::fs::set_permissions(&path, permissions).expect("the file is ours");
    path
}

#[test]
fn a_script_starts_a_loader_that_starts_the_program() {
    const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
    let vmm = build("vmm-by-loader", &[]);
    let vmm = vmm.to_str().unwrap();
    let text = format!(
        "#!/bin/sh -e\n{LOADER} --inhibit-cache {vmm} exits 1000\n{vmm} exits 1000\ncat /proc/self/cmdline\n"
    );
    let wrapper = script("by-loader", &text);
    let wrapper = wrapper.to_str().unwrap();
    let output = exec(&[wrapper]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    let output = Command::new(env!("CARGO_BIN_EXE_anykvm"))
        .args(["exec", "--launch", "--", wrapper])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.matches(" ns\n").count(), 2, "{text}");
    // What the script starts is launched, too.
    assert!(text.contains("exec\0--quiet\0--launch\0--\0"), "{text}");
    let doctor = Command::new(env!("CARGO_BIN_EXE_anykvm"))
        .args(["doctor", wrapper])
        .output();
    let text = String::from_utf8(doctor.unwrap().stdout).unwrap();
    assert!(
        text.contains("a script, whose interpreter is /bin/sh"),
        "{text}"
    );
}

#[test]
fn a_script_of_a_static_interpreter_is_launched() {
    let vmm = build("vmm-of-busybox", &[]);
    let text = format!(
        "#!/usr/bin/busybox ash\nexec {} exits 1000\n",
        vmm.display()
    );
    let wrapper = script("of-busybox", &text);
    for through in [None, Some("sh")] {
        let start = format!("{}", wrapper.display());
        let command = through.map_or_else(|| vec![&*start], |shell| vec![shell, "-c", &start]);
        let output = exec(&command);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{command:?}: {error}");
        assert!(String::from_utf8_lossy(&output.stdout).ends_with(" ns\n"));
    }
}

#[test]
fn a_program_that_empties_the_environment_does_not_lose_anykvm() {
    let vmm = build("vmm-without-environment", &[]);
    let vmm = vmm.to_str().unwrap();
    let by_shell = format!("unset LD_PRELOAD; exec {vmm} exits 1000");
    for command in [
        &["env", "-i", vmm, "exits", "1000"][..],
        &["bash", "-c", &by_shell],
    ] {
        let output = exec(command);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{command:?}: {error}");
    }
}

/// Only root can make such a file, and only others get something by it: as another user this test says so
/// and ends.
#[test]
fn a_program_with_capabilities_of_its_own_is_launched() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("only root can give a file capabilities: not tested");
        return;
    }
    // A folder that other users may enter, as they may not always enter the build's.
    let folder = PathBuf::from(format!("/tmp/anykvm-capable-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (vmm, anykvm) = (folder.join("vmm"), folder.join("anykvm"));
    std::fs::copy(build("vmm-capable", &[]), &vmm).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_anykvm"), &anykvm).unwrap();
    for path in [&folder, &vmm, &anykvm] {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    // CAP_NET_ADMIN, permitted and effective (struct vfs_cap_data of version 2).
    let value: [u32; 5] = [0x0200_0001, 1 << 12, 0, 0, 0];
    let value: Vec<u8> = value.iter().flat_map(|word| word.to_le_bytes()).collect();
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&vmm, "security.capability", &value, none).unwrap();
    let as_nobody = |how: &[&str]| {
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&anykvm)
            .args(["exec", "--"])
            .args(how)
            .env("HOME", "/nonexistent")
            .output()
            .expect("setpriv is installed");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let vmm = vmm.to_str().unwrap();
    let (status, error) = as_nobody(&[vmm, "exits", "1000"]);
    let (child, child_error) = as_nobody(&["sh", "-c", &format!("{vmm} exits 1000")]);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(status, Some(0), "{error}");
    assert!(
        error.contains("without the capabilities of its file"),
        "{error}"
    );
    assert_eq!(child, Some(0), "{child_error}");
}

#[test]
fn an_input_is_not_what_the_last_output_was() {
    passes("vmm-input", &["input"]);
}

#[test]
fn programs_that_look_for_kvm_by_files_find_it() {
    // Each way to open a file: the C library's `fopen` and `open`, and a launched program's system call.
    let script = "grep -E -w -c '^flags.*(vmx|svm)' /proc/cpuinfo && test -e /dev/kvm";
    let of_busybox = format!("/usr/bin/busybox {script}");
    for command in [
        ["sh", "-c", script].as_slice(),
        &["/usr/bin/busybox", "ash", "-c", &of_busybox],
    ] {
        let output = exec(command);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{command:?}: {error}");
    }
    let awk = "BEGIN { while ((getline line < \"/proc/cpuinfo\") > 0) if (line ~ / (vmx|svm)( |$)/) exit 0; exit 3 }";
    for program in ["awk", "/usr/bin/busybox"] {
        let mut command = vec![program];
        command.extend((program != "awk").then_some("awk"));
        command.push(awk);
        let output = exec(&command);
        assert_eq!(output.status.code(), Some(0), "{command:?}");
    }
    let parameters = "read pmu </sys/module/kvm/parameters/enable_pmu
        read avic </sys/module/kvm_amd/parameters/avic
        read apicv </sys/module/kvm_intel/parameters/enable_apicv
        test $pmu$avic$apicv = YNN";
    for shell in [&["sh"][..], &["/usr/bin/busybox", "ash"]] {
        let output = exec(&[shell, &["-c", parameters]].concat());
        assert_eq!(output.status.code(), Some(0), "{shell:?}");
    }
    for (tool, arguments) in [("kvm-ok", &[][..]), ("virt-host-validate", &["qemu"])] {
        // The places where Debian's packages cpu-checker and libvirt-clients put the tools.
        let is_there = ["/usr/sbin", "/usr/bin"]
            .iter()
            .any(|f| Path::new(f).join(tool).exists());
        if !is_there {
            eprintln!("{tool} is not installed: not tested");
            continue;
        }
        let mut command = vec![tool];
        command.extend(arguments);
        let text = String::from_utf8(exec(&command).stdout).unwrap();
        let yes = if tool == "kvm-ok" {
            text.contains("KVM acceleration can be used")
        } else {
            let line = text.lines().find(|l| l.contains("hardware virtualization"));
            line.is_some_and(|l| l.contains("PASS"))
        };
        assert!(yes, "{text}");
    }
}

#[test]
fn what_would_run_without_anykvm_is_refused() {
    for (program, reason) in [
        ("/nonexistent", "No such file"),
        ("/etc/passwd", "is not a program"),
        ("/usr/bin/su", "set-user-ID"),
    ] {
        let output = exec(&[program, "spin"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn other_programs_are_not_disturbed() {
    let script = "echo out; (exit 7); echo $?; exec cat < /dev/null";
    let output = exec(&["sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, b"out\n7\n");
}
