//! Element types: what may lie in a tensor.

use std::fmt;
use std::str::FromStr;

use cudarc::driver::DeviceRepr;

use crate::error::{Error, Kind, Result};

mod sealed {
    #[allow(unnameable_types)]
    pub trait Sealed {}
}

/// A plain element type: its bytes are its value, on the host and on the device.
///
/// Implemented for `bool`, the integers of 8 to 64 bits, `f32`, `f64`, with feature `half` for `half::f16` and
/// `half::bf16`, with feature `float8` for `float8::F8E4M3` and `float8::F8E5M2`. Types of 4 bits travel as bytes
/// (`u8`), two to a byte.
///
/// The trait is sealed: a type that is not listed travels as its bytes (`u8`).
///
/// # Safety
/// The type has no padding, no pointer and no drop; every pattern of `size_of::<Self>()` zero bytes is a value, and so is
/// every other pattern for which [`first_invalid`](Element::first_invalid) finds nothing.
pub unsafe trait Element: DeviceRepr + Copy + fmt::Debug + Send + Sync + 'static + sealed::Sealed {
    /// The run-time name of this type.
    const DTYPE: DType;

    /// The index of the first element among `bytes` that is not a value of this type.
    ///
    /// A device may have written anything, so this is asked before bytes become `&[Self]`. Only `bool` can say other
    /// than `None`.
    #[doc(hidden)]
    fn first_invalid(bytes: &[u8]) -> Option<usize> {
        let _ = bytes;
        None
    }
}

macro_rules! elements {
    ($($(#[$attribute:meta])* $type:ty => $dtype:ident;)*) => {$(
        $(#[$attribute])*
        impl sealed::Sealed for $type {}
        $(#[$attribute])*
        // SAFETY: a number without padding; every bit pattern is a value.
        unsafe impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    u8 => U8;
    i8 => I8;
    u16 => U16;
    i16 => I16;
    u32 => U32;
    i32 => I32;
    u64 => U64;
    i64 => I64;
    f32 => F32;
    f64 => F64;
    #[cfg(feature = "half")] half::f16 => F16;
    #[cfg(feature = "half")] half::bf16 => BF16;
    #[cfg(feature = "float8")] float8::F8E4M3 => F8E4M3;
    #[cfg(feature = "float8")] float8::F8E5M2 => F8E5M2;
}

impl sealed::Sealed for bool {}
// SAFETY: one byte; 0 and 1 are its values, all others are found by `first_invalid`.
unsafe impl Element for bool {
    const DTYPE: DType = DType::Bool;

    fn first_invalid(bytes: &[u8]) -> Option<usize> {
        bytes.iter().position(|&byte| byte > 1)
    }
}

/// The run-time name of an element type.
///
/// The text form is that of the safetensors format: `BOOL`, `U8`, `F8_E4M3`, `BF16`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DType {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 15] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::U16,
        DType::I16,
        DType::F16,
        DType::BF16,
        DType::U32,
        DType::I32,
        DType::F32,
        DType::U64,
        DType::I64,
        DType::F64,
    ];

    /// Bytes of one element; also its alignment.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 => 8,
        }
    }

    /// The name in the safetensors format.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "BOOL",
            DType::U8 => "U8",
            DType::I8 => "I8",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E5M2 => "F8_E5M2",
            DType::U16 => "U16",
            DType::I16 => "I16",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::U32 => "U32",
            DType::I32 => "I32",
            DType::F32 => "F32",
            DType::U64 => "U64",
            DType::I64 => "I64",
            DType::F64 => "F64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        DType::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(text)).ok_or_else(|| {
            let expected = format!("one of {}", DType::ALL.map(DType::name).join(", "));
            Error::new(Kind::Parse { what: "dtype", value: text.into(), expected })
        })
    }
}

/// The bytes of `elements`.
pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: an `Element` has no padding, so each of its bytes is initialised; the length in bytes is that of the slice.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Has `write` write to the bytes of `elements`. Where it fails, panics or writes what is no `T`, they are zeros.
pub(crate) fn write_bytes<T: Element>(elements: &mut [T], write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
    /// Zeros for what nobody has checked.
    struct Unchecked<'a>(&'a mut [u8]);

    impl Drop for Unchecked<'_> {
        fn drop(&mut self) {
            self.0.fill(0);
        }
    }

    // SAFETY: an `Element` has no padding, and is as long as its bytes. Nobody sees what is written as a `T` before it was checked, or
    // became zeros, which are values of every `T`.
    let bytes = unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast::<u8>(), size_of_val(elements)) };
    let unchecked = Unchecked(bytes);
    write(unchecked.0)?;
    validate::<T>(unchecked.0)?;
    std::mem::forget(unchecked);
    Ok(())
}

/// Fails with the first element among `bytes` that is no `T`.
pub(crate) fn validate<T: Element>(bytes: &[u8]) -> Result<()> {
    match T::first_invalid(bytes) {
        None => Ok(()),
        Some(index) => {
            Err(Error::new(Kind::InvalidValue { dtype: T::DTYPE.name(), index, byte: bytes[index * T::DTYPE.size()] }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_the_types() {
        fn agree<T: Element>() {
            assert_eq!(T::DTYPE.size(), size_of::<T>());
            assert_eq!(T::DTYPE.size(), align_of::<T>());
        }
        agree::<bool>();
        agree::<u8>();
        agree::<i8>();
        agree::<u16>();
        agree::<i16>();
        agree::<u32>();
        agree::<i32>();
        agree::<f32>();
        agree::<u64>();
        agree::<i64>();
        agree::<f64>();
        #[cfg(feature = "half")]
        {
            agree::<half::f16>();
            agree::<half::bf16>();
        }
        #[cfg(feature = "float8")]
        {
            agree::<float8::F8E4M3>();
            agree::<float8::F8E5M2>();
        }
    }

    #[test]
    fn what_is_no_value_becomes_zeros() {
        let mut flags = [true; 3];
        write_bytes(&mut flags, |bytes| {
            bytes[1] = 0;
            Ok(())
        })
        .unwrap();
        assert_eq!(flags, [true, false, true]);
        let two = |bytes: &mut [u8]| {
            bytes[2] = 2;
            Ok(())
        };
        assert!(write_bytes(&mut flags, two).unwrap_err().is_invalid_input());
        assert_eq!(flags, [false; 3]);
        let panics = std::panic::AssertUnwindSafe(|| {
            write_bytes(&mut flags, |bytes| {
                bytes[0] = 7;
                panic!("a reader's own")
            })
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(flags, [false; 3]);
    }

    #[test]
    fn names_are_read_back_and_unknown_ones_are_named() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
        }
        let error = "F4".parse::<DType>().unwrap_err();
        assert!(error.is_invalid_input() && error.to_string().contains("F4"), "{error}");
    }

    #[test]
    fn a_byte_that_is_no_bool_is_found() {
        assert!(validate::<bool>(&[0, 1, 1]).is_ok());
        let error = validate::<bool>(&[0, 2]).unwrap_err();
        assert_eq!(error.to_string(), "element 1 holds byte 0x02, which is no BOOL");
        assert!(validate::<u8>(&[255]).is_ok());
    }
}
