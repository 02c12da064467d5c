//! Typed reading of one table of a profile, with errors that say where.

use std::ops::RangeInclusive;

use toml::{Table, Value};

use super::error::{ProfileError, shown};

/// One table and the way to it, for messages.
pub(super) struct Section<'a> {
    platform: &'a str,
    name: &'static str,
    table: Option<&'a Table>,
}

impl<'a> Section<'a> {
    /// The sub-table `name` of a platform; a missing one reads as empty.
    pub(super) fn of(platform: &'a str, whole: &'a Table, name: &'static str) -> Result<Self, ProfileError> {
        let table = match whole.get(name) {
            None => None,
            Some(Value::Table(table)) => Some(table),
            Some(other) => {
                return Err(ProfileError::new(format!(
                    "platform `{}`: {name} must be a table, found {}",
                    shown(platform),
                    kind(other)
                )));
            }
        };
        Ok(Self { platform, name, table })
    }

    /// The platform's own table.
    pub(super) fn root(platform: &'a str, whole: &'a Table) -> Self {
        Self { platform, name: "", table: Some(whole) }
    }

    pub(super) fn is_present(&self) -> bool {
        self.table.is_some()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
        self.table.into_iter().flatten()
    }

    /// The first of `keys` that is there, as a whole number within `range`.
    pub(super) fn integer(&self, keys: &[&str], range: RangeInclusive<i64>) -> Result<Option<i64>, ProfileError> {
        self.first(keys).map(|(key, value)| self.as_integer(key, value, range)).transpose()
    }

    pub(super) fn as_integer(&self, key: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64, ProfileError> {
        let Value::Integer(number) = value else {
            return Err(self.wrong(key, "an integer", value));
        };
        if range.contains(number) {
            return Ok(*number);
        }
        Err(self.out_of_range(key, number.to_string(), range.start(), range.end()))
    }

    /// A rate or a time: a finite number above zero.
    pub(super) fn positive(&self, keys: &[&str]) -> Result<Option<f64>, ProfileError> {
        const LEAST: f64 = 1e-6;
        const MOST: f64 = 1e9;
        let Some((key, value)) = self.first(keys) else {
            return Ok(None);
        };
        let number = match value {
            Value::Float(number) => *number,
            // Only the range check below reads it; precision beyond 2^53 is beyond the range too.
            #[allow(clippy::cast_precision_loss)]
            Value::Integer(number) => *number as f64,
            other => return Err(self.wrong(key, "a number", other)),
        };
        if (LEAST..=MOST).contains(&number) {
            return Ok(Some(number));
        }
        Err(self.out_of_range(key, number.to_string(), &LEAST, &MOST))
    }

    pub(super) fn boolean(&self, keys: &[&str]) -> Result<Option<bool>, ProfileError> {
        match self.first(keys) {
            None => Ok(None),
            Some((_, Value::Boolean(flag))) => Ok(Some(*flag)),
            Some((key, other)) => Err(self.wrong(key, "true or false", other)),
        }
    }

    pub(super) fn string(&self, key: &'static str) -> Result<Option<&'a str>, ProfileError> {
        match self.first(&[key]) {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some((key, other)) => Err(self.wrong(key, "a string", other)),
        }
    }

    /// An error about one field of this table.
    pub(super) fn error(&self, key: &str, what: impl std::fmt::Display) -> ProfileError {
        let dot = if self.name.is_empty() { "" } else { "." };
        ProfileError::new(format!("platform `{}`: {}{dot}{} {what}", shown(self.platform), self.name, shown(key)))
    }

    fn first<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, &'a Value)> {
        let table = self.table?;
        keys.iter().find_map(|key| table.get(*key).map(|value| (*key, value)))
    }

    fn wrong(&self, key: &str, wanted: &str, found: &Value) -> ProfileError {
        self.error(key, format_args!("must be {wanted}, found {}", kind(found)))
    }

    fn out_of_range(
        &self,
        key: &str,
        found: String,
        least: &impl std::fmt::Display,
        most: &impl std::fmt::Display,
    ) -> ProfileError {
        self.error(key, format_args!("is {found}, outside {least} to {most}"))
    }
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "an integer",
        Value::Float(_) => "a float",
        Value::Boolean(_) => "a boolean",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "an array",
        Value::Table(_) => "a table",
    }
}
