//! Where a guest goes or comes from: `unix:PATH`, `tcp:HOST:PORT`, `file:PATH`.

use std::path::PathBuf;
use std::str::FromStr;

/// A place as the user writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A socket.
    Unix(PathBuf),
    /// A connection over a network, which others can read and write.
    Tcp(String),
    /// A saved machine.
    File(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}': write unix:PATH, tcp:HOST:PORT or file:PATH");
        match text.split_once(':').ok_or_else(wrong)? {
            (_, "") => Err(wrong()),
            ("unix", path) => Ok(Self::Unix(path.into())),
            ("file", path) => Ok(Self::File(path.into())),
            ("tcp", address) if address.contains(':') => Ok(Self::Tcp(address.into())),
            _ => Err(wrong()),
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        let rows = [
            ("unix:/tmp/a", Some(Endpoint::Unix("/tmp/a".into()))),
            ("file:a:b", Some(Endpoint::File("a:b".into()))),
            ("tcp:[::1]:77", Some(Endpoint::Tcp("[::1]:77".into()))),
            ("tcp:host", None),
            ("unix:", None),
            ("/tmp/a", None),
            ("exec:cat", None),
        ];
        for (text, want) in rows {
            assert_eq!(text.parse().ok(), want, "{text}");
            if let Some(place) = want {
                assert_eq!(place.to_string(), text);
            }
        }
    }
}
