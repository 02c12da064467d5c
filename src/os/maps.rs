//! Which memory belongs to a file, from `/proc/self/maps`.
#![deny(unsafe_code)]

use std::ops::Range;

/// Whether a byte of the range lies in a mapping of a file (of memory that only looks like one, not). `false` where that can
/// not be found out.
pub(crate) fn is_file_backed(range: Range<usize>) -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| in_file(&maps, &range))
}

/// The pure part: `maps` as proc(5) has it, "start-end permissions offset device inode path" a line.
fn in_file(maps: &str, range: &Range<usize>) -> bool {
    maps.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        let bounds = fields.next().and_then(|bounds| bounds.split_once('-'));
        let bounds = bounds.and_then(|(start, end)| {
            Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
        });
        let (inode, path) = (fields.nth(3).unwrap_or("0"), fields.next().unwrap_or(""));
        let in_memory = ["/memfd:", "/dev/", "/SYSV", "anon_inode:"].iter().any(|prefix| path.starts_with(prefix));
        bounds.is_some_and(|bounds| bounds.start < range.end && range.start < bounds.end) && inode != "0" && !in_memory
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000002000 r--p 00000000 fe:00 1234   /models/a file.safetensors
7f0000002000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000006000 rw-s 00000000 00:01 99     /memfd:shared (deleted)
7f0000006000-7f0000008000 rw-p 00000000 00:00 0      [heap]
nonsense
";

    #[test]
    fn files_are_told_from_memory() {
        let base = 0x7f00_0000_0000;
        assert!(in_file(MAPS, &(base..base + 1)));
        assert!(in_file(MAPS, &(base + 0x1fff..base + 0x2001)), "the last byte of the file");
        assert!(!in_file(MAPS, &(base + 0x2000..base + 0x8000)));
        assert!(!in_file(MAPS, &(0..base)));
        assert!(!in_file("", &(0..usize::MAX)));
    }
}
