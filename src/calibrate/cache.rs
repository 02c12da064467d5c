//! Where calibrations are kept between runs. Whatever lies there: what can not be used is passed over, never an error.
#![deny(unsafe_code)]

use std::path::{Path, PathBuf};

/// What a file in the cache is about. It is used only if all of it is the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    /// The GPU's UUID as the driver tells it.
    pub(crate) uuid: String,
    /// The driver's version.
    pub(crate) driver: String,
    /// This crate's.
    pub(crate) version: &'static str,
}

impl Key {
    /// `None` where the GPU has no UUID: then nothing tells it from another one.
    pub(crate) fn new(uuid: Option<&str>, driver: String) -> Option<Self> {
        let uuid = uuid.filter(|uuid| !uuid.is_empty())?.to_owned();
        Some(Self { uuid, driver, version: env!("CARGO_PKG_VERSION") })
    }

    fn file_name(&self) -> String {
        // What comes from the driver becomes a path: only a plain alphabet passes.
        let plain = |text: &str| -> String {
            let allowed = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_') { c } else { '_' };
            text.chars().map(allowed).take(64).collect()
        };
        format!("{}-{}-{}.json", plain(&self.uuid), plain(&self.driver), plain(self.version))
    }
}

/// `$XDG_CACHE_HOME` or `~/.cache`, with a folder of this crate's; as the XDG base directory specification has it, only
/// absolute paths count.
pub(crate) fn default_folder() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("transfer-tensor"))
}

pub(crate) fn path(folder: &Path, key: &Key) -> PathBuf {
    folder.join(key.file_name())
}

#[cfg(feature = "serde")]
pub(crate) use files::{load, store};

#[cfg(feature = "serde")]
mod files {
    use std::fs;
    use std::io::{Read, Write};
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::SystemTime;

    use super::{Key, path};
    use crate::calibrate::Calibration;
    use crate::platform::Ceiling;

    /// No calibration is as long.
    const LONGEST: u64 = 1 << 20;

    /// What is kept under `key`, if that is a calibration, of this device, and one that the machine can have.
    pub(crate) fn load(folder: &Path, key: &Key, ceiling: &Ceiling) -> Option<Calibration> {
        let path = path(folder, key);
        let mut text = String::new();
        // Never a device or a pipe, which could hold us up.
        let file = fs::metadata(&path).ok().filter(fs::Metadata::is_file).and_then(|_| fs::File::open(&path).ok())?;
        file.take(LONGEST).read_to_string(&mut text).ok()?;
        let mut found: Calibration = serde_json::from_str(&text).ok()?;
        found.is_sound(key, ceiling).then(|| {
            found.cached_in = Some(path);
            found
        })
    }

    /// Keeps it: in a new file that then takes the old one's place, so that nobody ever reads half of one.
    pub(crate) fn store(folder: &Path, key: &Key, calibration: &Calibration) -> std::io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        create(folder)?;
        let target = path(folder, key);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Processes of several containers may share the folder, and the process number.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let fresh = folder.join(format!(".{}.{}.{number}.{now}", key.file_name(), std::process::id()));
        let write = || {
            let mut file = fs::File::create_new(&fresh)?;
            serde_json::to_writer_pretty(&mut file, calibration)?;
            file.write_all(b"\n")?;
            fs::rename(&fresh, &target)
        };
        write().inspect_err(|_| drop(fs::remove_file(&fresh)))
    }

    fn create(folder: &Path) -> std::io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(folder)
    }
}
