//! The bytes of neighbouring tensors as one source for the copy engine.
#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::progress::Meter;
use crate::copy::Source;
use crate::error::{Error, Kind, Result};
use crate::os::{FileMap, ReadFile};

/// Bytes of a file, at their place in the run.
#[derive(Debug)]
struct Extent<'a> {
    run: Range<usize>,
    file: &'a ReadFile,
    map: Option<Arc<FileMap>>,
    offset: u64,
}

/// Tensors one after another, wherever they lie: what the engine sees as bytes from 0 on.
#[derive(Debug)]
pub(super) struct Run<'a, 'c> {
    extents: Vec<Extent<'a>>,
    /// Where each tensor ends.
    names: Vec<(usize, &'a str)>,
    meter: &'a Meter<'c>,
}

impl<'a, 'c> Run<'a, 'c> {
    pub(super) fn new(meter: &'a Meter<'c>) -> Self {
        Self { extents: Vec::new(), names: Vec::new(), meter }
    }

    pub(super) fn bytes(&self) -> usize {
        self.names.last().map_or(0, |(end, _)| *end)
    }

    /// Appends a tensor. What lies in the file right after the one before is read with it.
    pub(super) fn push(&mut self, name: &'a str, file: &'a ReadFile, range: &Range<u64>, map: Option<Arc<FileMap>>) {
        let start = self.bytes();
        let end = start + (range.end - range.start) as usize;
        self.names.push((end, name));
        if let Some(last) = self.extents.last_mut()
            && std::ptr::eq(last.file, file)
            && last.offset + last.run.len() as u64 == range.start
        {
            last.run.end = end;
        } else if end > start {
            self.extents.push(Extent { run: start..end, file, map, offset: range.start });
        }
    }

    /// The tensor that holds the byte before `end`.
    fn name(&self, end: usize) -> &'a str {
        let index = self.names.partition_point(|(tensor_end, _)| *tensor_end < end);
        self.names.get(index).map_or("", |(_, name)| *name)
    }

    fn read(&self, extent: &Extent<'_>, start: usize, into: &mut [u8]) -> Result<()> {
        let offset = extent.offset + (start - extent.run.start) as u64;
        let Some(map) = &extent.map else { return extent.file.read_at(offset, into) };
        let range = offset as usize..offset as usize + into.len();
        let from = (**map).as_ref().get(range.clone()).ok_or_else(|| outside(&range, map))?;
        // Pages come at faults, 16 at a time: asking for them beforehand is slower with several threads.
        into.copy_from_slice(from);
        map.drop_behind(&range);
        Ok(())
    }
}

fn outside(range: &Range<usize>, map: &FileMap) -> Error {
    Error::new(Kind::Range { start: range.start, end: range.end, len: map.as_ref().len(), unit: "bytes of the map" })
}

impl Source for Run<'_, '_> {
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.meter.check()?;
        let end = offset.saturating_add(into.len());
        let first = self.extents.partition_point(|extent| extent.run.end <= offset);
        let (mut at, mut rest) = (offset, &mut *into);
        for extent in self.extents.iter().skip(first) {
            if rest.is_empty() {
                break;
            }
            let len = extent.run.end.saturating_sub(at).min(rest.len());
            let (part, after) = rest.split_at_mut(len);
            self.read(extent, at, part)?;
            (at, rest) = (at + len, after);
        }
        if at != end {
            return Err(Error::new(Kind::Range { start: offset, end, len: self.bytes(), unit: "bytes of the run" }));
        }
        self.meter.add(into.len() as u64, self.name(end))
    }

    fn is_slow(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_run_is_its_tensors_one_after_another() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..=255).collect();
        file.write_all(&bytes).unwrap();
        let file = ReadFile::open(file.path()).unwrap();
        for mapped in [false, true] {
            let map = || mapped.then(|| file.map().unwrap());
            let meter = Meter::new(30, None);
            let mut run = Run::new(&meter);
            let parts: [(&str, Range<u64>); 5] =
                [("a", 3..13), ("b", 13..14), ("none", 14..14), ("c", 50..60), ("d", 20..29)];
            let mut expected = Vec::new();
            for (name, range) in &parts {
                run.push(name, &file, range, map());
                expected.extend_from_slice(&bytes[range.start as usize..range.end as usize]);
            }
            assert_eq!((run.bytes(), run.extents.len()), (30, 3), "a and b are neighbours");
            for start in 0..30 {
                for end in start..=30 {
                    let mut into = vec![0; end - start];
                    run.fill(start, &mut into).unwrap();
                    assert_eq!(into, expected[start..end], "{start}..{end}");
                }
            }
            let names: Vec<_> = [1, 10, 11, 12, 21, 22, 30].map(|end| run.name(end)).into();
            assert_eq!(names, ["a", "a", "b", "c", "c", "d", "d"]);
            assert!(run.fill(29, &mut [0; 2]).is_err());
        }
    }
}
