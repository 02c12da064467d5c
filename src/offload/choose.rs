//! Which layers are kept on the host: pure.

use crate::error::{Error, Kind, Result};

/// How much of a model an [`Offloader`](crate::Offloader) keeps on the host.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Share {
    /// Of the bytes that can be moved, from 0 to 1.
    Fraction(f64),
    /// These layers.
    Layers(Vec<usize>),
}

impl Share {
    /// For layers with so many bytes each that can be moved, whether each is to be. Layers are spread evenly: the ones between give the link
    /// time. The bytes are off from the fraction by no more than half of the largest layer.
    pub(super) fn choose(&self, bytes: &[u64]) -> Result<Vec<bool>> {
        let fraction = match self {
            Share::Layers(list) => {
                let mut chosen = vec![false; bytes.len()];
                for &layer in list {
                    *chosen.get_mut(layer).ok_or_else(|| Error::absent(layer, bytes.len(), "layers"))? = true;
                }
                return Ok(chosen);
            }
            Share::Fraction(fraction) if (0.0..=1.0).contains(fraction) => *fraction,
            Share::Fraction(fraction) => {
                let why = format!("{fraction} is not from 0 to 1");
                return Err(Error::new(Kind::Workload { what: "fraction", why }));
            }
        };
        let (mut seen, mut moved) = (0.0, 0.0);
        let choose = |&bytes: &u64| {
            let bytes = bytes as f64;
            seen += bytes;
            let chosen = bytes > 0.0 && moved + bytes / 2.0 <= fraction * seen;
            moved += if chosen { bytes } else { 0.0 };
            chosen
        };
        Ok(bytes.iter().map(choose).collect())
    }
}
