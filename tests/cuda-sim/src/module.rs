//! Modules, and the functions found in them.

#![deny(unsafe_code)]

use crate::kernels::{KernelFn, Registry};
use crate::ptx::{self, Entry};
use crate::status::{INVALID_HANDLE, INVALID_PTX, NO_BINARY_FOR_GPU, NOT_FOUND, Res};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

/// The kernels this driver knows.
pub(crate) fn registry() -> &'static Registry {
    static REGISTRY: LazyLock<Registry> = LazyLock::new(Registry::default);
    &REGISTRY
}

/// All modules and functions of the process.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: HashMap<u64, Module>,
    functions: HashMap<u64, Function>,
}

#[derive(Debug)]
struct Module {
    ctx: u64,
    entries: Vec<Entry>,
}

/// An entry of a module and the Rust function that stands for it.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    module: u64,
    pub(crate) ctx: u64,
    pub(crate) name: &'static str,
    pub(crate) params: Vec<usize>,
    pub(crate) kernel: KernelFn,
    pub(crate) attributes: HashMap<u32, i32>,
}

/// Names of kernels are kept for the life of the process: reports about steps use them.
fn intern(name: &str) -> &'static str {
    static NAMES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    let mut names = NAMES.lock();
    let names = names.get_or_insert_default();
    match names.get(name) {
        Some(known) => known,
        None => {
            let name: &'static str = Box::leak(name.into());
            names.insert(name);
            name
        }
    }
}

/// Reads the text of a module.
pub(crate) fn parse(image: &str) -> Res<Vec<Entry>> {
    if !image.contains(".version") {
        // A cubin or a fat binary: machine code for a real GPU.
        return Err(NO_BINARY_FOR_GPU);
    }
    ptx::parse(image).map_err(|_| INVALID_PTX)
}

impl Modules {
    pub(crate) fn load(&mut self, handle: u64, ctx: u64, entries: Vec<Entry>) {
        self.modules.insert(handle, Module { ctx, entries });
    }

    pub(crate) fn unload(&mut self, module: u64) -> Res {
        self.modules.remove(&module).ok_or(INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    /// Makes a function handle for an entry; `handle` is used if there is none yet.
    pub(crate) fn function(&mut self, handle: u64, module: u64, name: &str) -> Res<u64> {
        let found = self.modules.get(&module).ok_or(INVALID_HANDLE)?;
        let entry = found.entries.iter().find(|entry| entry.name == name).ok_or(NOT_FOUND)?;
        let mut known = self.functions.iter();
        if let Some((handle, _)) = known.find(|(_, known)| known.module == module && known.name == name) {
            return Ok(*handle);
        }
        // An entry nobody registered a function for cannot run: better said here than at the launch.
        let kernel = registry().get(name).ok_or(NOT_FOUND)?;
        let function = Function {
            module,
            ctx: found.ctx,
            name: intern(name),
            params: entry.params.clone(),
            kernel,
            attributes: HashMap::new(),
        };
        self.functions.insert(handle, function);
        Ok(handle)
    }

    pub(crate) fn has_module(&self, module: u64) -> bool {
        self.modules.contains_key(&module)
    }

    pub(crate) fn count(&self, module: u64) -> Res<usize> {
        self.modules.get(&module).map(|module| module.entries.len()).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn get(&self, function: u64) -> Res<&Function> {
        self.functions.get(&function).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn get_mut(&mut self, function: u64) -> Res<&mut Function> {
        self.functions.get_mut(&function).ok_or(INVALID_HANDLE)
    }

    /// The module a function is of.
    pub(crate) fn module_of(&self, function: u64) -> Res<u64> {
        self.get(function).map(|function| function.module)
    }

    pub(crate) fn drop_context(&mut self, ctx: u64) {
        self.modules.retain(|_, module| module.ctx != ctx);
        self.functions.retain(|_, function| function.ctx != ctx);
    }

    /// The modules that are loaded in a context.
    pub(crate) fn live(&self, ctx: u64) -> Vec<String> {
        let ours = self.modules.iter().filter(|(_, module)| module.ctx == ctx);
        ours.map(|(handle, _)| format!("module {handle:#x}")).collect()
    }
}
