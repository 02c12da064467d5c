//! What the process has mapped, and how.

#![deny(unsafe_code)]

use std::fs;

/// Whether all of `[address, address + len)` is mapped, readable, and writable if asked.
pub(crate) fn allows(address: u64, len: u64, write: bool) -> bool {
    let Ok(text) = fs::read_to_string("/proc/self/maps") else { return true };
    let Some(end) = address.checked_add(len) else { return false };
    let mut reached = address;
    for line in text.lines() {
        let Some((from, to, mode)) = parse(line) else { continue };
        if to <= reached {
            continue;
        }
        if from > reached || !mode.starts_with('r') || (write && !mode[1..].starts_with('w')) {
            return false;
        }
        reached = to;
        if reached >= end {
            return true;
        }
    }
    false
}

fn parse(line: &str) -> Option<(u64, u64, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (from, to) = range.split_once('-')?;
    let mode = rest.get(..4)?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?, mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps() {
        let line = "7f0000000000-7f0000001000 r--p 00000000 00:00 0    [x]";
        assert_eq!(parse(line), Some((0x7f00_0000_0000, 0x7f00_0000_1000, "r--p")));
    }

    #[test]
    fn own_memory_is_mapped() {
        let bytes = vec![0u8; 10_000];
        assert!(allows(bytes.as_ptr() as u64, bytes.len() as u64, true));
        assert!(!allows(16, 16, false));
    }
}
