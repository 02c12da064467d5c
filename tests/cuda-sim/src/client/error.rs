//! Errors of this half.

#![deny(unsafe_code)]

use std::fmt;

/// Why the simulated driver is not in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallError {
    pub(super) message: String,
}

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for InstallError {}

/// Why there is no such device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SimError {
    /// The driver is not in place.
    Install(InstallError),
    /// The profile: unknown, or its text is wrong.
    Profile(String),
    /// The files that stand in for /proc and /sys could not be written.
    HostTree(String),
}

impl fmt::Display for SimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Install(error) => error.fmt(f),
            Self::Profile(message) => f.write_str(message),
            Self::HostTree(message) => write!(f, "cannot write the host's files: {message}"),
        }
    }
}

impl std::error::Error for SimError {}

impl From<InstallError> for SimError {
    fn from(error: InstallError) -> Self {
        Self::Install(error)
    }
}
