//! What can be wrong with a profile, said in one line.

use std::fmt;

/// Why a profile could not be had. `Display` is one line that names the file, the platform and
/// the field where they are known, and the nearest known names where one was misspelt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileError {
    file: Option<String>,
    message: String,
}

impl ProfileError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { file: None, message: one_line(&message.into()) }
    }

    /// A key that names no platform, with the names it may have meant.
    pub(super) fn unknown_platform<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Self {
        let near = nearest(key, known, 3);
        let hint = if near.is_empty() { "there are none".to_owned() } else { format!("nearest: {}", near.join(", ")) };
        Self::new(format!("no platform named `{}` ({hint})", shown(key)))
    }

    /// Names the file the profile was read from.
    #[must_use]
    pub fn in_file(mut self, file: impl Into<String>) -> Self {
        self.file = Some(one_line(&file.into()));
        self
    }
}

impl fmt::Display for ProfileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "{file}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for ProfileError {}

/// A name out of a file of unknown origin, fit for a terminal: no control characters, not endless.
pub(super) fn shown(name: &str) -> String {
    const LONGEST: usize = 80;
    let mut text: String = name.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if name.chars().nth(LONGEST).is_some() {
        text.push('…');
    }
    text
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The `count` names nearest to `name`, nearest first.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>, count: usize) -> Vec<String> {
    let mut ranked: Vec<(usize, &str)> = known.map(|other| (distance(name, other), other)).collect();
    ranked.sort_unstable();
    ranked.into_iter().take(count).map(|(_, other)| shown(other)).collect()
}

/// Edit distance in which what is missing at the end costs little: `h200` is nearer to
/// `x86_h200_sxm_gen5` than to `wsl2_rtx`.
fn distance(name: &str, other: &str) -> usize {
    const LONGEST: usize = 64;
    const CHANGED: usize = 6;
    let a: Vec<char> = name.chars().flat_map(char::to_lowercase).take(LONGEST).collect();
    let b: Vec<char> = other.chars().flat_map(char::to_lowercase).take(LONGEST).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = (i + 1) * CHANGED;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + if x == y { 0 } else { CHANGED };
            diagonal = row[j + 1];
            // A character that only the known name has is cheap: people abbreviate.
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + CHANGED);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abbreviations_and_slips_find_their_name() {
        let known = ["dgx_spark_gb10", "x86_h200_sxm_gen5", "wsl2_rtx", "x86_t4_gen3"];
        for (typed, meant) in [
            ("h200", "x86_h200_sxm_gen5"),
            ("dgx_spark_gb1O", "dgx_spark_gb10"),
            ("spark", "dgx_spark_gb10"),
            ("WSL2", "wsl2_rtx"),
            ("x86_t4", "x86_t4_gen3"),
        ] {
            assert_eq!(nearest(typed, known.into_iter(), 1), [meant], "{typed}");
        }
        assert!(nearest("a", std::iter::empty(), 3).is_empty());
    }

    #[test]
    fn a_message_stays_on_one_line() {
        let error = ProfileError::new("bad\nthing\u{1b}[31m").in_file("a\nb.toml");
        assert_eq!(error.to_string(), "a b.toml: bad thing [31m");
        assert_eq!(shown("x\ny"), "x\\ny");
        assert!(shown(&"é".repeat(500)).chars().count() <= 81);
    }
}
