//! Many files, of which some are open.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::file::{ReadFile, Stamp};
use crate::error::Result;

/// So many stay open: a process may often have no more than 1,024.
const OPEN: usize = 64;

/// Files that are read again and again. Those that were read last are open; the others are opened when they are read, and must be there yet, as
/// they were.
#[derive(Debug, Default)]
pub(crate) struct Files {
    numbers: BTreeMap<PathBuf, usize>,
    known: Vec<(PathBuf, Stamp)>,
    /// The one that was read last is the last.
    open: Mutex<VecDeque<(usize, Arc<ReadFile>)>>,
}

impl Files {
    /// The number of a file, which is open now.
    pub(crate) fn add(&mut self, path: &Path) -> Result<(usize, Arc<ReadFile>)> {
        if let Some(&number) = self.numbers.get(path) {
            return Ok((number, self.get(number)?));
        }
        let (number, file) = (self.known.len(), Arc::new(ReadFile::open(path)?));
        self.known.push((path.into(), file.stamp().clone()));
        self.numbers.insert(path.into(), number);
        self.keep(number, &file);
        Ok((number, file))
    }

    /// A file that was added.
    ///
    /// # Errors
    /// It can not be opened any more, or is another one than it was.
    pub(crate) fn get(&self, number: usize) -> Result<Arc<ReadFile>> {
        let found = {
            let mut open = self.open.lock();
            let at = open.iter().position(|(known, _)| *known == number);
            at.and_then(|at| open.remove(at)).map(|(_, file)| {
                open.push_back((number, file.clone()));
                file
            })
        };
        if let Some(file) = found {
            return Ok(file);
        }
        let (path, stamp) = &self.known[number];
        let file = Arc::new(ReadFile::open(path)?);
        if file.stamp() != stamp {
            return Err(file.changed());
        }
        self.keep(number, &file);
        Ok(file)
    }

    fn keep(&self, number: usize, file: &Arc<ReadFile>) {
        let mut open = self.open.lock();
        open.push_back((number, file.clone()));
        let closed = if open.len() > OPEN { open.pop_front() } else { None };
        drop(open);
        drop(closed);
    }
}
