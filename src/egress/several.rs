//! Several sources of one step, and what of the caller's own goes with them.
#![deny(unsafe_code)]

use super::source::sealed::Sealed;
use super::source::{EgressSource, Way};
use crate::driver::lane::Passed;
use crate::error::{Refused, Result};

impl<S: EgressSource> EgressSource for Vec<S> {
    type Output = Vec<S::Output>;
}

impl<S: Sealed> Sealed for Vec<S> {
    type Flying = Vec<S::Flying>;
    type Landed = Vec<S::Landed>;

    fn bytes(&self) -> u64 {
        self.iter().map(S::bytes).fold(0, u64::saturating_add)
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let mut flying = Vec::with_capacity(self.len());
        let mut rest = self.into_iter();
        while let Some(source) = rest.next() {
            match source.begin(way) {
                Ok(begun) => flying.push(begun),
                Err(Refused { error, value }) => {
                    let begun = flying.into_iter().map(S::back);
                    let value = begun.chain([value]).chain(rest.map(Some)).collect();
                    return Err(Refused { error, value });
                }
            }
        }
        Ok(flying)
    }

    fn launch(flying: &mut Self::Flying) -> Result<()> {
        flying.iter_mut().try_for_each(S::launch)
    }

    fn land(flying: Self::Flying, passed: &Passed) -> Result<Self::Landed> {
        flying.into_iter().map(|flying| S::land(flying, passed)).collect()
    }

    fn back(flying: Self::Flying) -> Option<Self> {
        flying.into_iter().map(S::back).collect()
    }
}

impl<A: EgressSource, B: EgressSource> EgressSource for (A, B) {
    type Output = (A::Output, B::Output);
}

impl<A: Sealed, B: Sealed> Sealed for (A, B) {
    type Flying = (A::Flying, B::Flying);
    type Landed = (A::Landed, B::Landed);

    fn bytes(&self) -> u64 {
        self.0.bytes().saturating_add(self.1.bytes())
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let (a, b) = self;
        let a = match a.begin(way) {
            Ok(a) => a,
            Err(Refused { error, value }) => return Err(Refused { error, value: value.map(|a| (a, b)) }),
        };
        match b.begin(way) {
            Ok(b) => Ok((a, b)),
            Err(Refused { error, value }) => Err(Refused { error, value: A::back(a).zip(value) }),
        }
    }

    fn launch((a, b): &mut Self::Flying) -> Result<()> {
        A::launch(a)?;
        B::launch(b)
    }

    fn land((a, b): Self::Flying, passed: &Passed) -> Result<Self::Landed> {
        Ok((A::land(a, passed)?, B::land(b, passed)?))
    }

    fn back((a, b): Self::Flying) -> Option<Self> {
        A::back(a).zip(B::back(b))
    }
}

impl<A: EgressSource, B: EgressSource, C: EgressSource> EgressSource for (A, B, C) {
    type Output = (A::Output, B::Output, C::Output);
}

impl<A: Sealed, B: Sealed, C: Sealed> Sealed for (A, B, C) {
    type Flying = <((A, B), C) as Sealed>::Flying;
    type Landed = (A::Landed, B::Landed, C::Landed);

    fn bytes(&self) -> u64 {
        self.0.bytes().saturating_add(self.1.bytes()).saturating_add(self.2.bytes())
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let (a, b, c) = self;
        let flat = |((a, b), c)| (a, b, c);
        ((a, b), c).begin(way).map_err(|Refused { error, value }| Refused { error, value: value.map(flat) })
    }

    fn launch(flying: &mut Self::Flying) -> Result<()> {
        <((A, B), C) as Sealed>::launch(flying)
    }

    fn land(flying: Self::Flying, passed: &Passed) -> Result<Self::Landed> {
        let ((a, b), c) = <((A, B), C) as Sealed>::land(flying, passed)?;
        Ok((a, b, c))
    }

    fn back(flying: Self::Flying) -> Option<Self> {
        let ((a, b), c) = <((A, B), C) as Sealed>::back(flying)?;
        Some((a, b, c))
    }
}

/// A source, or what came out for it, with something of the caller's own: a step's number, a request, where to send the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tagged<S, K> {
    /// What is handed over.
    pub value: S,
    /// The caller's own.
    pub tag: K,
}

impl<S, K> Tagged<S, K> {
    /// A source with a tag.
    pub fn new(value: S, tag: K) -> Self {
        Self { value, tag }
    }
}

impl<S: EgressSource, K: Send + 'static> EgressSource for Tagged<S, K> {
    type Output = Tagged<S::Output, K>;
}

impl<S: Sealed, K: Send + 'static> Sealed for Tagged<S, K> {
    type Flying = Tagged<S::Flying, K>;
    type Landed = Tagged<S::Landed, K>;

    fn bytes(&self) -> u64 {
        self.value.bytes()
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let Self { value, tag } = self;
        match value.begin(way) {
            Ok(value) => Ok(Tagged { value, tag }),
            Err(Refused { error, value }) => Err(Refused { error, value: value.map(|value| Self { value, tag }) }),
        }
    }

    fn launch(flying: &mut Self::Flying) -> Result<()> {
        S::launch(&mut flying.value)
    }

    fn land(flying: Self::Flying, passed: &Passed) -> Result<Self::Landed> {
        Ok(Tagged { value: S::land(flying.value, passed)?, tag: flying.tag })
    }

    fn back(flying: Self::Flying) -> Option<Self> {
        Some(Self { value: S::back(flying.value)?, tag: flying.tag })
    }
}
