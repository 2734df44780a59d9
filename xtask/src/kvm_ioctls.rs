//! `cargo xtask kvm-ioctls`: tests with the kvm-ioctls crate, which is fetched from the registry.
//!
//! The crate's own unit tests run through `anykvm exec`. The VMM of its documentation is built twice: with this crate,
//! and with `anykvm-ioctls` in its place, which is one line of the manifest.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::tool::tool;

/// The version whose API `anykvm-ioctls` implements.
const VERSION: &str = "0.25.1";
/// Minimum number of tests. A run with fewer has not run what it should.
const LEAST: usize = 60;

/// Fetches, builds and runs the tests.
pub(crate) fn run() -> Result<(), String> {
    let folder = crate::build::cache().join("kvm-ioctls");
    let source = fetch(&folder)?;
    let anykvm = crate::build::anykvm()?;
    tests(&anykvm, &source, &folder)?;
    example(&anykvm, &source, &folder)
}

/// Fetches the crate's source by an ordinary dependency on it, and copies it to where it may be built.
fn fetch(folder: &Path) -> Result<PathBuf, String> {
    let source = folder.join(format!("kvm-ioctls-{VERSION}"));
    if source.exists() {
        return Ok(source);
    }
    let user = folder.join("fetch");
    let dependency = format!("kvm-ioctls = \"={VERSION}\"");
    package(&user, &dependency, "fn main() {}")?;
    let metadata = cargo(&user, &["metadata", "--format-version", "1"])?;
    // No reader of JSON is needed: the manifest's path is the only string with this end.
    let end = format!("/kvm-ioctls-{VERSION}/Cargo.toml");
    let path = metadata
        .split('"')
        .find(|text| text.ends_with(&end))
        .ok_or("cargo metadata does not name kvm-ioctls")?;
    let original = Path::new(path).parent().ok_or("no folder")?;
    let partial = folder.join("partial");
    let _ = fs::remove_dir_all(&partial);
    let cannot = |e: std::io::Error| format!("{}: {e}", partial.display());
    copy(original, &partial).map_err(cannot)?;
    // The folder is below our workspace, but is not a part of it.
    fs::OpenOptions::new()
        .append(true)
        .open(partial.join("Cargo.toml"))
        .and_then(|mut file| file.write_all(b"\n[workspace]\n"))
        .map_err(cannot)?;
    fs::rename(&partial, &source).map_err(|e| format!("{}: {e}", source.display()))?;
    Ok(source)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Makes a package outside of the workspace, with one dependency and what the example needs.
fn package(folder: &Path, dependency: &str, main: &str) -> Result<(), String> {
    let manifest = format!(
        "[package]\nname = \"example\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\n[dependencies]\n\
         {dependency}\nkvm-bindings = {{ version = \"0.14\", features = [\"fam-wrappers\"] }}\n\
         libc = \"0.2\"\n\n[workspace]\n"
    );
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, text))
            .map_err(|e| format!("{}: {e}", path.display()))
    };
    write("Cargo.toml", &manifest)?;
    write("src/main.rs", main)
}

/// Runs cargo in a folder. Returns its standard output.
fn cargo(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(arguments)
        .current_dir(folder)
        .env_remove("CARGO_TARGET_DIR");
    tool(&mut cargo).map_err(|e| format!("cargo {} failed: {e}", arguments.join(" ")))
}

/// Runs a program under `anykvm exec`, or by itself. Returns its standard output and status.
fn outcome(
    anykvm: Option<&Path>,
    program: &Path,
    arguments: &[&str],
) -> Result<(String, bool), String> {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "120"]);
    if let Some(anykvm) = anykvm {
        command.arg(anykvm).args(["exec", "--quiet", "--"]);
    }
    let output = command
        .arg(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok((text, output.status.success()))
}

fn tests(anykvm: &Path, source: &Path, folder: &Path) -> Result<(), String> {
    let target = folder.join("target");
    let target = target.to_str().ok_or("a path that is not UTF-8")?;
    let messages = cargo(
        source,
        &[
            "test",
            "--lib",
            "--no-run",
            "--message-format=json",
            "--target-dir",
            target,
        ],
    )?;
    let program = messages
        .split("\"executable\":\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next())
        .ok_or("cargo test does not name its program")?;
    let (output, _) = outcome(Some(anykvm), Path::new(program), &["--test-threads=1"])?;
    let (passed, wrong) = judge(&output);
    eprintln!("kvm-ioctls {VERSION}: {passed} of its unit tests pass");
    if wrong.is_empty() && passed >= LEAST {
        Ok(())
    } else {
        Err(format!("not as expected: {}\n{output}", wrong.join(" ")))
    }
}

/// Returns how many tests have passed, and those that have ended in a wrong way.
fn judge(output: &str) -> (usize, Vec<String>) {
    let mut passed = 0;
    let mut wrong = Vec::new();
    for line in output.lines() {
        let Some((name, result)) = line
            .strip_prefix("test ")
            .and_then(|line| line.split_once(" ... "))
        else {
            continue;
        };
        let name = name.trim_end_matches(" - should panic");
        match result {
            "ok" => passed += 1,
            _ if result.starts_with("ignored") => {}
            _ => wrong.push(name.to_owned()),
        }
    }
    // After a crash, the last test has no result.
    if !output.contains("test result:") {
        wrong.push("no result: it did not come to its end".to_owned());
    }
    (passed, wrong)
}

fn example(anykvm: &Path, source: &Path, folder: &Path) -> Result<(), String> {
    let library = source.join("src/lib.rs");
    let text = fs::read_to_string(&library).map_err(|e| format!("{}: {e}", library.display()))?;
    let main = documented(&text).ok_or("kvm-ioctls documents no example")?;
    let ours = crate::tidy::root().join("crates/anykvm-ioctls");
    let theirs = format!("kvm-ioctls = \"={VERSION}\"");
    let ours = format!(
        "kvm-ioctls = {{ package = \"anykvm-ioctls\", path = \"{}\" }}",
        ours.display()
    );
    for (name, dependency, runner) in [("with", theirs, Some(anykvm)), ("without", ours, None)] {
        let package_folder = folder.join(format!("example-{name}"));
        package(&package_folder, &dependency, &main)?;
        cargo(&package_folder, &["build", "--quiet"])?;
        let program = package_folder.join("target/debug/example");
        let (output, good) = outcome(runner, &program, &[])?;
        if !good {
            return Err(format!("the example {name} kvm-ioctls failed: {output}"));
        }
    }
    eprintln!("the VMM of its documentation runs with it and with anykvm-ioctls in its place");
    Ok(())
}

/// Returns the first example in the documentation of a crate.
fn documented(library: &str) -> Option<String> {
    let mut lines = library
        .lines()
        .skip_while(|line| !line.starts_with("//! ```rust"));
    lines.next()?;
    let mut main = String::new();
    for line in lines {
        let line = line.strip_prefix("//!")?;
        let line = line.strip_prefix(' ').unwrap_or(line);
        if line == "```" {
            // An example is a function's body, unless it has a main function.
            let is_whole = main.contains("fn main()");
            return Some(if is_whole {
                main
            } else {
                format!("fn main() {{\n{main}}}\n")
            });
        }
        // The documentation hides lines that begin with "# ".
        main.push_str(line.strip_prefix("# ").unwrap_or(line));
        main.push('\n');
    }
    None
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn results_are_judged() {
        let good =
            "test a ... ok\ntest b - should panic ... ok\ntest c ... ignored\n\ntest result: ok";
        assert_eq!(judge(good), (2, vec![]));
        assert_eq!(judge("test a ... FAILED\ntest result: x").1, ["a"]);
        assert_eq!(judge("test a ... ok\n").1.len(), 1);
    }

    #[test]
    fn examples_are_found() {
        let text =
            "//! Text\n//! ```rust\n//! use a;\n//! # hidden();\n//!\n//! ```\n//! ```rust\n";
        let main = "fn main() {\nuse a;\nhidden();\n\n}\n";
        assert_eq!(documented(text).as_deref(), Some(main));
        assert_eq!(documented("//! none\n"), None);
    }
}
