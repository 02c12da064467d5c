//! Shapes and checked byte arithmetic. Pure.
#![deny(unsafe_code)]

use std::fmt;
use std::ops::{Bound, Range, RangeBounds};

use smallvec::SmallVec;

use crate::error::{Error, Kind, Result};

/// The extents of a tensor, outermost axis first; row-major and contiguous. An empty list is a scalar (one element); an
/// extent of 0 makes a tensor without elements.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(SmallVec<[usize; 4]>);

impl Shape {
    /// The extents.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// The number of axes; 0 for a scalar.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The number of elements.
    ///
    /// # Errors
    /// The product does not fit a `usize`. (A 0 anywhere makes it 0, whatever the others are.)
    pub fn elements(&self) -> Result<usize> {
        if self.0.contains(&0) {
            return Ok(0);
        }
        self.0.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent)).ok_or_else(|| self.too_large())
    }

    /// The number of bytes at `size` bytes an element. At most `isize::MAX`, the largest object Rust allows.
    ///
    /// # Errors
    /// The product is larger.
    pub fn bytes(&self, size: usize) -> Result<usize> {
        self.elements()?.checked_mul(size).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(|| self.too_large())
    }

    /// How many elements a row of the first axis has; a scalar is one row.
    pub(crate) fn row_elements(&self) -> Result<usize> {
        Shape(self.0.get(1..).unwrap_or_default().into()).elements()
    }

    /// The shape of rows `rows` of the first axis, and the elements they span.
    ///
    /// # Errors
    /// A scalar has no first axis; the range must lie within it.
    pub(crate) fn rows(&self, rows: impl RangeBounds<usize>) -> Result<(Shape, Range<usize>)> {
        let Some((&extent, inner)) = self.0.split_first() else {
            return Err(Error::new(Kind::Shape { shape: vec![], needs: 1, got: 0 }));
        };
        let rows = resolve(rows, extent, "rows of the first axis")?;
        let stride = Shape(inner.into()).elements()?;
        let span = rows.start.checked_mul(stride).zip(rows.end.checked_mul(stride)).ok_or_else(|| self.too_large())?;
        let mut dims = self.0.clone();
        dims[0] = rows.len();
        Ok((Shape(dims), span.0..span.1))
    }

    fn too_large(&self) -> Error {
        Error::overflow(format!("shape {self:?} is too large"))
    }
}

/// A range within `0..len`, its ends resolved.
///
/// # Errors
/// The range is reversed or reaches outside.
pub(crate) fn resolve(range: impl RangeBounds<usize>, len: usize, unit: &'static str) -> Result<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(&start) => Some(start),
        Bound::Excluded(&start) => start.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.checked_add(1),
        Bound::Excluded(&end) => Some(end),
        Bound::Unbounded => Some(len),
    };
    match (start, end) {
        (Some(start), Some(end)) if start <= end && end <= len => Ok(start..end),
        (start, end) => Err(Error::new(Kind::Range {
            start: start.unwrap_or(usize::MAX),
            end: end.unwrap_or(usize::MAX),
            len,
            unit,
        })),
    }
}

/// Checks that `shape` with `strides` (in elements) is one contiguous row-major block.
///
/// Axes of extent 1 may have any stride, and where there are no elements the strides do not matter.
///
/// # Errors
/// The number of strides differs from that of the axes, or the view is strided, overlapping (broadcast) or reversed.
pub(crate) fn check_contiguous(shape: &Shape, strides: &[isize]) -> Result<()> {
    let strided = || Error::new(Kind::NonContiguous { shape: shape.dims().to_vec(), strides: strides.to_vec() });
    if strides.len() != shape.rank() {
        return Err(strided());
    }
    if shape.elements()? == 0 {
        return Ok(());
    }
    let mut expected: usize = 1;
    for (&extent, &stride) in shape.dims().iter().zip(strides).rev() {
        if extent != 1 && usize::try_from(stride) != Ok(expected) {
            return Err(strided());
        }
        expected = expected.saturating_mul(extent);
    }
    Ok(())
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims.into())
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(dims.into())
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.as_slice().into())
    }
}

impl From<usize> for Shape {
    fn from(elements: usize) -> Self {
        Shape(smallvec::smallvec![elements])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn scalars_and_empty_tensors_have_sizes() {
        assert_eq!(Shape::from([]).elements().unwrap(), 1);
        assert_eq!(Shape::from([0, usize::MAX, usize::MAX]).elements().unwrap(), 0);
        assert!(Shape::from([usize::MAX, 2]).elements().unwrap_err().is_invalid_input());
        assert!(Shape::from([isize::MAX as usize]).bytes(8).is_err());
    }

    #[test]
    fn rows_of_a_scalar_are_refused() {
        assert!(Shape::from([]).rows(0..1).unwrap_err().is_invalid_input());
        assert!(Shape::from([4, 3]).rows(2..5).is_err());
        let (shape, span) = Shape::from([4, 3]).rows(1..=2).unwrap();
        assert_eq!((shape.dims(), span), (&[2, 3][..], 3..9));
    }

    #[test]
    fn strided_overlapping_and_reversed_views_are_refused() {
        let check = |shape: &[usize], strides: &[isize]| check_contiguous(&shape.into(), strides).is_ok();
        assert!(check(&[2, 3], &[3, 1]));
        assert!(check(&[2, 1, 3], &[3, 77, 1]));
        assert!(check(&[0, 5], &[9, 9]));
        assert!(!check(&[2, 2], &[1, 2]), "transposed");
        assert!(!check(&[4, 3], &[0, 1]), "broadcast");
        assert!(!check(&[3], &[-1]), "reversed");
        assert!(!check(&[2, 3], &[4, 1]), "row gap");
        assert!(!check(&[2], &[]), "no strides");
    }

    proptest! {
        #[test]
        fn elements_agree_with_wide_arithmetic(dims in prop::collection::vec(0usize..1 << 20, 0..5)) {
            let wide: u128 = dims.iter().map(|&d| d as u128).product();
            match Shape::from(dims).elements() {
                Ok(elements) => prop_assert_eq!(elements as u128, wide),
                Err(_) => prop_assert!(wide > usize::MAX as u128),
            }
        }

        #[test]
        fn rows_span_what_they_say(dims in prop::collection::vec(0usize..50, 1..4), a in 0usize..60, b in 0usize..60) {
            let shape = Shape::from(dims.clone());
            match shape.rows(a..b) {
                Ok((part, span)) => {
                    prop_assert!(a <= b && b <= dims[0]);
                    prop_assert_eq!(part.elements().unwrap(), span.len());
                    prop_assert!(span.end <= shape.elements().unwrap());
                }
                Err(_) => prop_assert!(a > b || b > dims[0]),
            }
        }
    }
}
