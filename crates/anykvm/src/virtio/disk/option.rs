//! The option `--disk`.

use std::path::PathBuf;
use std::str::FromStr;

/// Maximum length of a serial number in bytes.
pub(in crate::virtio) const SERIAL_MAX: usize = 20;
/// Words that may follow a file's name.
pub(super) const WORDS: &str = ",ro ,serial=NAME ,format=raw|qcow2 and ,backing=PATH";

/// How a file's bytes are a disk's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Raw,
    Qcow2,
}

/// A disk of `--disk PATH[,ro][,serial=NAME][,format=raw|qcow2][,backing=PATH…]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskOption {
    pub(super) path: PathBuf,
    pub(super) is_read_only: bool,
    pub(super) serial: Option<String>,
    /// The format, whatever the file looks like.
    pub(super) format: Option<Format>,
    /// The backing files: the image's, that one's, and so on.
    pub(super) backing: Vec<PathBuf>,
}

impl DiskOption {
    /// Makes the option of a disk that is written to.
    pub(crate) fn new(path: PathBuf, serial: &str) -> Self {
        Self {
            serial: Some(serial.into()),
            ..Self::at(path)
        }
    }

    fn at(path: PathBuf) -> Self {
        Self {
            path,
            is_read_only: false,
            serial: None,
            format: None,
            backing: Vec::new(),
        }
    }
}

impl FromStr for DiskOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut option = Self::at(PathBuf::new());
        // The words are taken from the end, so that a path may have commas before them.
        let mut rest = text;
        while let Some((before, word)) = rest.rsplit_once(',') {
            if ["ro", "readonly", "readonly=on", "ro=on"].contains(&word) {
                option.is_read_only = true;
            } else if ["rw", "readonly=off", "ro=off"].contains(&word) {
                option.is_read_only = false;
            } else if let Some(format) = word.strip_prefix("format=") {
                option.format = Some(match format {
                    "raw" => Format::Raw,
                    "qcow2" => Format::Qcow2,
                    _ => return Err(format!("format={format}: {}", advice(&rest_of(before)))),
                });
            } else if let Some(path) = word.strip_prefix("backing=") {
                option.backing.insert(0, path.into());
            } else if let Some(serial) = word.strip_prefix("serial=") {
                if serial.len() > SERIAL_MAX || !serial.is_ascii() {
                    return Err(format!(
                        "the serial number '{serial}' is not {SERIAL_MAX} ASCII characters or less"
                    ));
                }
                option.serial = Some(serial.into());
            } else {
                break;
            }
            rest = before;
        }
        if rest.is_empty() {
            return Err("a file name is needed".into());
        }
        option.path = rest_of(rest).into();
        Ok(option)
    }
}

/// Returns the path, without the word that QEMU has before it.
fn rest_of(text: &str) -> String {
    text.strip_prefix("file=").unwrap_or(text).to_owned()
}

/// Returns what a user can do with an image of another format.
pub(super) fn advice(path: &str) -> String {
    format!(
        "only raw disks and qcow2 images can be used; convert it: qemu-img convert -O raw {path} {path}.raw"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        let disk = |path: &str| DiskOption::at(path.into());
        let ro = |path: &str| DiskOption {
            is_read_only: true,
            ..disk(path)
        };
        let serial = |serial: &str, disk: DiskOption| DiskOption {
            serial: Some(serial.into()),
            ..disk
        };
        let format = |format, disk: DiskOption| DiskOption {
            format: Some(format),
            ..disk
        };
        let backed = DiskOption {
            backing: vec!["b,c".into(), "d".into()],
            ..disk("a")
        };
        let rows = [
            (
                "file=a,format=raw,readonly=on",
                Some(format(Format::Raw, ro("a"))),
            ),
            ("a,format=qcow2", Some(format(Format::Qcow2, disk("a")))),
            ("a,format=vmdk", None),
            ("a,backing=b,backing=d", {
                let backing = vec!["b".into(), "d".into()];
                Some(DiskOption {
                    backing,
                    ..disk("a")
                })
            }),
            ("a.img,readonly", Some(ro("a.img"))),
            ("a.img", Some(disk("a.img"))),
            ("a.img,ro", Some(ro("a.img"))),
            ("a,b.img", Some(disk("a,b.img"))),
            ("a,b,serial=x,ro", Some(serial("x", ro("a,b")))),
            ("x,serial=", Some(serial("", disk("x")))),
            ("", None),
            (",ro", None),
            ("x,serial=123456789012345678901", None),
        ];
        for (text, want) in rows {
            assert_eq!(text.parse().ok(), want, "{text}");
        }
        // A comma in a backing file's name ends the options.
        assert_ne!("a,backing=b,c,backing=d".parse(), Ok(backed));
    }
}
