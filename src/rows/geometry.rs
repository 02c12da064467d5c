//! Where the bytes of rows lie on either side. Pure.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::error::{Error, Kind, Result};

/// Rows that are apart on the host, on the device, or both; all in bytes. The packed bytes are the rows one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) rows: usize,
    /// Bytes of a row.
    pub(crate) width: usize,
    /// Bytes of an element.
    pub(crate) element: usize,
    /// From the first element of a row to that of the next.
    pub(crate) host_pitch: usize,
    /// From an element to the next in its row.
    pub(crate) host_step: usize,
    pub(crate) device_pitch: usize,
}

/// Rows that are handled together where neighbours in memory belong to different rows: a cache line of them.
const TILE: usize = 64;

impl Geometry {
    /// # Errors
    /// The last element lies outside the address space, or rows overlap on the device.
    pub(crate) fn new(
        [rows, width]: [usize; 2],
        [host_pitch, host_step, device_pitch]: [usize; 3],
        element: usize,
    ) -> Result<Self> {
        let overflow = || Error::overflow(format!("{rows} rows of {width} elements, {host_pitch} apart"));
        let bytes = |elements: usize| elements.checked_mul(element).ok_or_else(overflow);
        let this = Self {
            rows,
            width: bytes(width)?,
            element,
            host_pitch: bytes(host_pitch)?,
            host_step: bytes(host_step)?,
            device_pitch: bytes(device_pitch)?,
        };
        this.rows.checked_mul(this.width).ok_or_else(overflow)?;
        this.reach(this.host_pitch, this.host_step).ok_or_else(overflow)?;
        this.reach(this.device_pitch, element).ok_or_else(overflow)?;
        if rows > 1 && this.device_pitch < this.width {
            let what = format!("rows of {width} elements on the device, {device_pitch} apart");
            return Err(Error::new(Kind::Overlap { what }));
        }
        Ok(this.simpler())
    }

    /// The same places, as fewer and longer rows.
    fn simpler(mut self) -> Self {
        if self.bytes() == 0 {
            return Self { rows: 0, width: 0, ..self };
        }
        if self.rows == 1 {
            (self.host_pitch, self.device_pitch) = (self.width, self.width);
        }
        if self.width == self.element {
            self.host_step = self.element;
            if self.device_pitch == self.width {
                // A column is one row of elements that are apart.
                self = Self { rows: 1, width: self.bytes(), host_step: self.host_pitch, ..self };
            }
        }
        if self.host_step == self.element && self.host_pitch == self.width && self.device_pitch == self.width {
            self = Self { rows: 1, width: self.bytes(), ..self };
        }
        if self.rows == 1 { Self { host_pitch: self.width, device_pitch: self.width, ..self } } else { self }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.width
    }

    fn reach(&self, pitch: usize, step: usize) -> Option<usize> {
        let columns = self.width / self.element.max(1);
        let (Some(rows), Some(columns)) = (self.rows.checked_sub(1), columns.checked_sub(1)) else { return Some(0) };
        rows.checked_mul(pitch)?.checked_add(columns.checked_mul(step)?)?.checked_add(self.element)
    }

    /// Bytes from the first to the last on the host.
    pub(crate) fn on_host(&self) -> usize {
        self.reach(self.host_pitch, self.host_step).unwrap_or(usize::MAX)
    }

    /// Bytes from the first to the last on the device.
    pub(crate) fn on_device(&self) -> usize {
        self.reach(self.device_pitch, self.element).unwrap_or(usize::MAX)
    }

    /// Whether the device's rows are one block.
    pub(crate) fn device_is_block(&self) -> bool {
        self.rows <= 1 || self.device_pitch == self.width
    }

    /// Whether the elements of a row lie one after the other on the host.
    pub(crate) fn host_has_rows(&self) -> bool {
        self.host_step == self.element
    }

    /// Whether all lies in one block on either side.
    pub(crate) fn is_block(&self) -> bool {
        self.rows <= 1 && self.host_has_rows()
    }

    /// Whether each element has a place of its own on the host, as far as pitch and step show it.
    pub(crate) fn check_apart_on_host(&self) -> Result<()> {
        let columns = self.width / self.element.max(1);
        let row = columns.saturating_sub(1).saturating_mul(self.host_step).saturating_add(self.element);
        let column = self.rows.saturating_sub(1).saturating_mul(self.host_pitch).saturating_add(self.element);
        let columns_apart = columns <= 1 || self.host_step >= self.element;
        let rows_apart = self.rows <= 1 || self.host_pitch >= self.element;
        let apart = self.rows <= 1 || columns <= 1 || self.host_pitch >= row || self.host_step >= column;
        if columns_apart && rows_apart && apart {
            return Ok(());
        }
        let (pitch, step) = (self.host_pitch, self.host_step);
        let what = format!(
            "{} rows of {} bytes on the host, {pitch} bytes apart with elements {step} bytes apart",
            self.rows, self.width
        );
        Err(Error::new(Kind::Overlap { what }))
    }

    /// Calls `each` with where the packed bytes `packed` lie on the host: from which of them on (0: the first of `packed`), at
    /// which byte of the host's memory, and how many.
    #[inline]
    pub(crate) fn each(&self, packed: Range<usize>, mut each: impl FnMut(usize, usize, usize)) {
        if self.width == 0 {
            return;
        }
        let start = packed.start;
        let mut at = start;
        while at < packed.end {
            let (row, column) = (at / self.width, at % self.width);
            let whole = (packed.end - at) / self.width;
            if column == 0 && whole > 1 && self.host_pitch < self.host_step {
                let rows = (TILE / self.element.max(1)).clamp(1, whole);
                self.tile(row, rows, at - start, &mut each);
                at += rows * self.width;
            } else {
                let end = self.width.min(column + (packed.end - at));
                self.part(row, column..end, at - start, &mut each);
                at += end - column;
            }
        }
    }

    /// Some bytes of one row.
    #[inline]
    fn part(&self, row: usize, bytes: Range<usize>, at: usize, each: &mut impl FnMut(usize, usize, usize)) {
        let first = row * self.host_pitch;
        if self.host_has_rows() {
            return each(at, first + bytes.start, bytes.len());
        }
        let (column, within) = (bytes.start / self.element, bytes.start % self.element);
        let (mut host, mut from) = (first + column * self.host_step, bytes.start);
        if within > 0 {
            let len = (self.element - within).min(bytes.len());
            each(at, host + within, len);
            from += len;
            host = host.wrapping_add(self.host_step);
        }
        while from + self.element <= bytes.end {
            each(at + (from - bytes.start), host, self.element);
            from += self.element;
            host = host.wrapping_add(self.host_step);
        }
        if from < bytes.end {
            each(at + (from - bytes.start), host, bytes.end - from);
        }
    }

    /// Whole rows, neighbours on the host one after the other.
    #[inline]
    fn tile(&self, row: usize, rows: usize, at: usize, each: &mut impl FnMut(usize, usize, usize)) {
        for column in 0..self.width / self.element {
            let host = row * self.host_pitch + column * self.host_step;
            for i in 0..rows {
                each(at + i * self.width + column * self.element, host + i * self.host_pitch, self.element);
            }
        }
    }

    /// The rows that some bytes of the device's block touch: which packed bytes, and where those begin in the given ones.
    pub(crate) fn rows_in(&self, block: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (width, pitch) = (self.width, self.device_pitch.max(1));
        let rows = block.start / pitch..self.rows.min(block.end.div_ceil(pitch));
        rows.filter_map(move |row| {
            let first = row * pitch;
            let (start, end) = (block.start.max(first), block.end.min(first + width));
            let packed = row * width + (start - first)..row * width + end.saturating_sub(first);
            (start < end).then(|| (packed, start - block.start))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against the plain definition, for every kind of pitch and step, cut anywhere.
        #[test]
        fn every_packed_byte_has_its_place(
            rows in 0usize..40, columns in 0usize..40, size in 0usize..4, pitch in 0usize..50, step in 0usize..50,
            gap in 0usize..3, cut in 1usize..90,
        ) {
            let element = 1 << size;
            let geometry = Geometry::new([rows, columns], [pitch, step, columns + gap], element).unwrap();
            let packed = rows * columns * element;
            prop_assert_eq!(geometry.bytes(), packed);
            let mut places = vec![None; packed];
            for (_, range) in crate::copy::chunks(packed, cut) {
                let start = range.start;
                geometry.each(range, |at, host, len| {
                    (0..len).for_each(|i| assert!(places[start + at + i].replace(host + i).is_none()));
                });
            }
            for (at, place) in places.iter().enumerate() {
                let (row, column, within) = (at / (columns * element), at / element % columns, at % element);
                prop_assert_eq!(*place, Some((row * pitch + column * step) * element + within));
            }
            let reach = places.iter().map(|place| place.unwrap() + 1).max().unwrap_or(0);
            prop_assert_eq!(geometry.on_host(), reach);
            let mut sorted: Vec<_> = places.clone();
            sorted.sort_unstable();
            if geometry.check_apart_on_host().is_ok() {
                prop_assert!(sorted.windows(2).all(|pair| pair[0] != pair[1]), "two in one place");
            }
            // And on the device.
            let mut seen = vec![false; packed];
            for (_, range) in crate::copy::chunks(geometry.on_device(), cut) {
                for (part, at) in geometry.rows_in(range.clone()) {
                    for (i, byte) in part.enumerate() {
                        let device = byte / geometry.width * geometry.device_pitch + byte % geometry.width;
                        assert_eq!(device, range.start + at + i);
                        assert!(!std::mem::replace(&mut seen[byte], true));
                    }
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }
    }

    #[test]
    fn what_does_not_fit_or_overlaps_is_refused() {
        assert!(Geometry::new([usize::MAX, 2], [2, 1, 2], 4).unwrap_err().is_invalid_input());
        assert!(Geometry::new([3, 2], [usize::MAX / 4, 1, 2], 4).unwrap_err().is_invalid_input());
        assert!(Geometry::new([2, 4], [4, 1, 3], 4).unwrap_err().to_string().contains("overlap"));
        for (pitch, step, apart) in
            [(4, 1, true), (3, 1, false), (1, 2, true), (1, 1, false), (0, 1, false), (4, 0, false)]
        {
            let geometry = Geometry::new([2, 4], [pitch, step, 4], 4).unwrap();
            assert_eq!(geometry.check_apart_on_host().is_ok(), apart, "{pitch} {step}");
        }
    }

    #[test]
    fn blocks_and_columns_are_seen() {
        let simple = |shape, strides| Geometry::new(shape, strides, 4).unwrap();
        assert!(simple([5, 3], [3, 1, 3]).is_block() && simple([1, 3], [99, 1, 99]).is_block());
        let column = simple([1 << 20, 1], [2, 1, 1]);
        assert_eq!((column.rows, column.host_step, column.device_is_block()), (1, 8, true));
        assert!(!simple([5, 3], [3, 1, 4]).device_is_block());
    }
}
