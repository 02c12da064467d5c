//! What the header of a safetensors file says, checked against the file's length; and the index of a sharded model. Pure.
#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path};

use safetensors::tensor::Metadata;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

/// The format's own limit, which an index gets too.
pub(super) const LARGEST_HEADER: u64 = 100_000_000;

/// The length of the length of the header.
pub(super) const LENGTH_BYTES: u64 = 8;

/// One tensor, as the header has it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Of the file.
    pub(super) range: Range<u64>,
}

/// The header's length, from its first bytes; `file` is the file's length.
pub(super) fn length(first: [u8; LENGTH_BYTES as usize], file: u64) -> Result<usize, String> {
    let length = u64::from_le_bytes(first);
    if length > LARGEST_HEADER {
        return Err(format!("a header of {length} bytes is more than the format allows ({LARGEST_HEADER})"));
    }
    let have = file.saturating_sub(LENGTH_BYTES);
    if length > have {
        return Err(format!("truncated: the header has {length} bytes, the file only {have} after its length"));
    }
    Ok(length as usize)
}

/// The tensors of a file of `file` bytes, in the order in which they lie.
pub(super) fn parse(header: &[u8], file: u64) -> Result<Vec<Entry>, String> {
    let json = |error: serde_json::Error| shortened(&error.to_string());
    // `Metadata` and not `SafeTensors`: that one adds up the lengths unchecked, and takes the whole file as a slice.
    let metadata: Metadata = serde_json::from_slice(header).map_err(json)?;
    // Of two equal names `Metadata` keeps the second.
    let Names(names) = serde_json::from_slice(header).map_err(json)?;
    unique(names.iter())?;

    // Offsets begin at 0 and leave no gap (checked by the crate), so the last one ends the file.
    let data = LENGTH_BYTES + header.len() as u64;
    let (bytes, have) = (metadata.data_len() as u64, file.saturating_sub(data));
    if bytes > have {
        return Err(format!("truncated: its tensors have {bytes} bytes, the file only {have}"));
    }
    if bytes < have {
        return Err(format!("its tensors have {bytes} bytes, {} more follow", have - bytes));
    }
    let entry = |name: String| {
        let info = metadata.info(&name)?;
        let (start, end) = info.data_offsets;
        let range = data + start as u64..data + end as u64;
        Some(Entry { dtype: info.dtype.to_string(), shape: info.shape.clone(), range, name })
    };
    Ok(metadata.offset_keys().into_iter().filter_map(entry).collect())
}

/// The file of each tensor, by an index.
pub(super) fn parse_index(index: &[u8]) -> Result<BTreeMap<String, String>, String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: Pairs,
    }
    let Index { weight_map: Pairs(pairs) } =
        serde_json::from_slice(index).map_err(|error| shortened(&error.to_string()))?;
    unique(pairs.iter().map(|(name, _)| name))?;
    for (name, file) in &pairs {
        // An index comes from outside: it may not point out of its folder.
        let mut parts = Path::new(file).components();
        if file.is_empty() || !parts.all(|part| matches!(part, Component::Normal(_))) {
            return Err(format!(
                "the file of tensor {} is {}, which is no name inside its folder",
                quoted(name),
                quoted(file)
            ));
        }
    }
    Ok(pairs.into_iter().collect())
}

fn unique<'a>(names: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(format!("tensor {} is named twice", quoted(name)));
        }
    }
    Ok(())
}

/// A name from a file, for a message: escaped, and cut to what a person reads.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", shortened(name))
}

/// A message that may quote the file: escaped, and cut to what a person reads.
fn shortened(text: &str) -> String {
    const MOST: usize = 240;
    let mut shown = String::new();
    for c in text.chars().take(MOST) {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            c => shown.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

/// The keys of a map, each as often as it is there.
struct Names(Vec<String>);

impl<'de> serde::Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let pairs = from.deserialize_map(PairsVisitor::<IgnoredAny>(std::marker::PhantomData))?;
        Ok(Names(pairs.into_iter().map(|(name, _)| name).collect()))
    }
}

/// A map from strings to strings, each key as often as it is there.
struct Pairs(Vec<(String, String)>);

impl<'de> serde::Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(PairsVisitor::<String>(std::marker::PhantomData)).map(Pairs)
    }
}

struct PairsVisitor<V>(std::marker::PhantomData<V>);

impl<'de, V: serde::Deserialize<'de>> Visitor<'de> for PairsVisitor<V> {
    type Value = Vec<(String, V)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_gives_ranges_of_the_file() {
        let header = br#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#;
        let start = 8 + header.len() as u64;
        let entries = parse(header, start + 9).unwrap();
        assert_eq!(entries[0], Entry { name: "a".into(), dtype: "U8".into(), shape: vec![], range: start..start + 1 });
        assert_eq!((entries[1].name.as_str(), entries[1].range.clone()), ("b", start + 1..start + 9));
        assert!(parse(header, start + 8).unwrap_err().contains("truncated: its tensors have 9 bytes, the file only 8"));
        assert!(parse(header, start + 12).unwrap_err().contains("3 more follow"));
        assert!(parse(header, 0).is_err());
    }

    #[test]
    fn a_name_that_is_there_twice_is_refused() {
        let header = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        assert_eq!(parse(header, 9 + header.len() as u64).unwrap_err(), r#"tensor "a" is named twice"#);
        let index = br#"{"weight_map":{"a":"x","a":"y"}}"#;
        assert_eq!(parse_index(index).unwrap_err(), r#"tensor "a" is named twice"#);
    }

    #[test]
    fn an_index_stays_in_its_folder() {
        let index = |file: &str| {
            parse_index(format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{"a":{file:?}}}}}"#).as_bytes())
        };
        assert_eq!(index("one.safetensors").unwrap()["a"], "one.safetensors");
        assert!(index("part/one.safetensors").is_ok());
        for bad in ["", "/etc/passwd", "../one", "part/../../one", "."] {
            assert!(index(bad).unwrap_err().contains("inside its folder"), "{bad}");
        }
        for bad in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#] {
            parse_index(bad.as_bytes()).unwrap_err();
        }
    }

    #[test]
    fn lengths_are_checked_before_anything_is_read() {
        assert_eq!(length(3u64.to_le_bytes(), 11), Ok(3));
        assert!(length(3u64.to_le_bytes(), 10).unwrap_err().contains("truncated"));
        assert!(length(u64::MAX.to_le_bytes(), u64::MAX).unwrap_err().contains("more than the format allows"));
    }
}
