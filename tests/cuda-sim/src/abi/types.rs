//! Pointer arguments of the C interface, with the one place that dereferences each kind.
//!
//! Values of these types come only from a C caller of an exported function, which promises what the driver interface
//! promises: a pointer is null or valid for what the function says it reads or writes.

use crate::status::{INVALID_VALUE, Res};
use std::ffi::{CStr, c_char};

/// A pointer the function writes its answer to.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub(crate) fn null() -> Self {
        Self(std::ptr::null_mut())
    }

    /// Writes the answer; a null pointer is an invalid value.
    pub(crate) fn set(self, value: T) -> Res {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised that it is valid for one write (see the module's text).
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the answer if the caller asked for it.
    pub(crate) fn set_if(self, value: T) {
        let _ = self.set(value);
    }

    /// An error if there is nowhere to write the answer to.
    pub(crate) fn check(self) -> Res {
        if self.0.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// The same address as a place for another type.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The place `index` elements on.
    pub(crate) fn at(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }
}

impl<T: Copy> Out<T> {
    /// Reads what the caller put there.
    pub(crate) fn get(self) -> Res<T> {
        In(self.0.cast_const()).get()
    }
}

/// A pointer the function reads from.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// Reads the value; a null pointer is an invalid value.
    pub(crate) fn get(self) -> Res<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised that it is valid for one read (see the module's text).
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Reads element `index` of an array.
    pub(crate) fn at(self, index: usize) -> Res<T> {
        In(self.0.wrapping_add(index)).checked(self.0.is_null())
    }

    fn checked(self, null: bool) -> Res<T> {
        if null { Err(INVALID_VALUE) } else { self.get() }
    }
}

impl<T> In<T> {
    pub(crate) fn null() -> Self {
        Self(std::ptr::null())
    }

    /// A pointer the caller passed as a number.
    pub(crate) fn from_address(address: u64) -> Self {
        Self(address as *const T)
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl In<u8> {
    /// Copies bytes.
    pub(crate) fn bytes(self, len: usize) -> Res<Vec<u8>> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised that many readable bytes (see the module's text).
        Ok(unsafe { std::slice::from_raw_parts(self.0, len) }.to_vec())
    }
}

/// A text with a terminating zero.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Res<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller promised a zero-terminated text (see the module's text).
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Writes a text and its terminating zero into a buffer of `len` bytes, cut off where it does not fit.
pub(crate) fn put_text(to: Out<c_char>, len: i32, text: &str) -> Res {
    let len = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
    if len == 0 {
        return Err(INVALID_VALUE);
    }
    to.check()?;
    let bytes = text.as_bytes();
    let used = bytes.len().min(len - 1);
    for (index, &byte) in bytes[..used].iter().enumerate() {
        to.at(index).set(byte as c_char)?;
    }
    to.at(used).set(0)
}
