//! The words of a plan: strategies, backings, directions, and how they are spelled.
#![deny(unsafe_code)]

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::error::{Error, Kind, Result};

/// Spelling of a plain enum: `Display`, `FromStr` (whose error names the nearest spelling), `Serialize`, and the list of
/// all values.
macro_rules! spelled {
    ($type:ident, $what:literal, { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $type {
            /// Every value, in the order of declaration.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// The spelling that `Display` writes and `FromStr` reads.
            pub const fn as_str(self) -> &'static str {
                match self { $($type::$variant => $word),+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::Error;

            fn from_str(text: &str) -> $crate::error::Result<Self> {
                let text = text.trim();
                Self::ALL.iter().copied().find(|value| value.as_str().eq_ignore_ascii_case(text)).ok_or_else(|| {
                    let words: Vec<_> = Self::ALL.iter().map(|value| value.as_str()).collect();
                    $crate::plan::kinds::unknown_word($what, text, &words)
                })
            }
        }

        #[cfg(feature = "serde")]
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    };
}
pub(crate) use spelled;

/// How the bytes get from where the CPU has them to where the GPU uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Strategy {
    /// One allocation in host memory that both sides use in place; over PCIe every touch crosses the link.
    ZeroCopy,
    /// The GPU uses host memory in place over a cache-coherent link (NVLink-C2C).
    Coherent,
    /// Copies into device memory, in pieces and overlapped where that pays.
    Streamed,
    /// Ordinary memory; no device takes part.
    Host,
}
spelled!(Strategy, "strategy", { ZeroCopy = "zero-copy", Coherent = "coherent", Streamed = "streamed", Host = "host" });

/// What kind of memory holds the bytes while the GPU uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Backing {
    /// Page-locked memory that the driver allocated (`cuMemHostAlloc`).
    Pinned,
    /// Managed memory (`cuMemAllocManaged`).
    Managed,
    /// Ordinary memory that is registered with the driver (`cuMemHostRegister`).
    Registered,
    /// Device memory (`cuMemAlloc`).
    Device,
    /// Ordinary memory, unknown to the driver.
    Pageable,
}
spelled!(Backing, "backing", {
    Pinned = "pinned", Managed = "managed", Registered = "registered", Device = "device", Pageable = "pageable",
});

/// Who produces the bytes and who uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Direction {
    /// The CPU writes, the GPU reads.
    #[default]
    HostToDevice,
    /// The GPU writes, the CPU reads.
    DeviceToHost,
}
spelled!(Direction, "direction", { HostToDevice = "h2d", DeviceToHost = "d2h" });

/// What the bytes live in on the host side before the plan is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HostMemory {
    /// Nothing yet: the plan chooses, we allocate.
    #[default]
    Any,
    /// The caller's page-locked memory.
    Pinned,
    /// The caller's ordinary memory, such as a `Vec`.
    Pageable,
    /// The caller's memory, already registered with the driver.
    Registered,
    /// The caller's managed memory.
    Managed,
    /// Ordinary memory that may only be read, such as a read-only file mapping.
    ReadOnly,
}
spelled!(HostMemory, "host memory", {
    Any = "any", Pinned = "pinned", Pageable = "pageable", Registered = "registered", Managed = "managed",
    ReadOnly = "read-only",
});

/// How often the GPU touches every byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Access {
    /// Once.
    #[default]
    Streaming,
    /// This many times; `Reuse(1)` plans like `Streaming`.
    Reuse(NonZeroU32),
}

impl Access {
    /// `times` touches of every byte.
    ///
    /// # Errors
    /// Zero touches is not an access.
    pub fn reuse(times: u32) -> Result<Self> {
        NonZeroU32::new(times).map(Access::Reuse).ok_or_else(|| bad_access(&format!("reuse={times}")))
    }

    /// How many times the GPU touches every byte: at least 1.
    pub const fn touches(self) -> u32 {
        match self {
            Access::Streaming => 1,
            Access::Reuse(times) => times.get(),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Streaming => f.pad("streaming"),
            Access::Reuse(times) => f.pad(&format!("reuse={times}")),
        }
    }
}

impl FromStr for Access {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text.eq_ignore_ascii_case("streaming") {
            return Ok(Access::Streaming);
        }
        text.strip_prefix("reuse=")
            .and_then(|times| times.parse().ok())
            .map(Access::Reuse)
            .ok_or_else(|| bad_access(text))
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Access {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn bad_access(text: &str) -> Error {
    let expected = format!("streaming or reuse=K with K from 1 to {}", u32::MAX);
    Error::new(Kind::Parse { what: "access", value: text.into(), expected })
}

/// The strategy that the environment names.
pub(crate) fn strategy_variable(word: &str) -> Result<Strategy> {
    let words: Vec<_> = Strategy::ALL.iter().map(|strategy| strategy.as_str()).collect();
    word.parse().map_err(|_: Error| unknown_word("TRANSFER_TENSOR_STRATEGY", word, &words))
}

/// The error for a word that is none of `words`: it lists them and points at the nearest.
#[cold]
pub(crate) fn unknown_word(what: &'static str, text: &str, words: &[&str]) -> Error {
    let mut expected = format!("one of {}", words.join(", "));
    if let Some(near) = words.iter().min_by_key(|word| distance(text, word)) {
        expected += &format!(" (nearest: {near})");
    }
    Error::new(Kind::Parse { what, value: text.into(), expected })
}

/// Edit distance, case and punctuation aside. The texts are words; the input is cut so that a hostile one costs nothing.
fn distance(left: &str, right: &str) -> usize {
    let letters = |text: &str| -> Vec<char> {
        text.chars().filter(|c| c.is_alphanumeric()).map(|c| c.to_ascii_lowercase()).take(64).collect()
    };
    let (left, right) = (letters(left), letters(right));
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.iter().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_reads_back() {
        for &strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse::<Strategy>().unwrap(), strategy);
        }
        for &backing in Backing::ALL {
            assert_eq!(backing.to_string().parse::<Backing>().unwrap(), backing);
        }
        assert_eq!("reuse=8".parse::<Access>().unwrap().touches(), 8);
        assert_eq!(" Zero-Copy ".parse::<Strategy>().unwrap(), Strategy::ZeroCopy);
    }

    #[test]
    fn an_unknown_word_names_the_nearest() {
        let error = "zerocpy".parse::<Strategy>().unwrap_err();
        assert!(error.is_invalid_input());
        assert!(error.to_string().contains("nearest: zero-copy"), "{error}");
        assert!("strm".parse::<Strategy>().unwrap_err().to_string().contains("nearest: streamed"));
        "".parse::<Backing>().unwrap_err();
        for bad in ["reuse=0", "reuse=-1", "reuse=", "reuse", "reuse=4294967296", "often", "reuse=1.5"] {
            assert!(bad.parse::<Access>().unwrap_err().is_invalid_input(), "{bad}");
        }
        assert!(Access::reuse(0).is_err());
    }
}
