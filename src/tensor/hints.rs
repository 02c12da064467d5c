//! Hints to the driver about managed memory.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::TransferTensor;
use super::region::Region;
use crate::device::Device;
use crate::driver::managed::{self, Advice, Location};
use crate::driver::{Event, Stream};
use crate::element::Element;
use crate::error::{Error, Kind, Result};
use crate::plan::Backing;

impl<T: Element> TransferTensor<T> {
    /// Tells the driver how managed memory will be used (`cuMemAdvise`).
    ///
    /// # Errors
    /// The backing is not [`Backing::Managed`], or the driver refuses.
    pub fn advise(&self, advice: Advice, location: Location) -> Result<()> {
        let (device, region) = self.managed("advise")?;
        let _bound = device.context().enter()?;
        managed::advise(device.context(), region.device()?, region.bytes(), advice, location)
    }

    /// Moves managed memory to the device or the host ahead of its use, in the order of `stream`
    /// (`cuMemPrefetchAsync`).
    ///
    /// # Errors
    /// The backing is not [`Backing::Managed`], the stream is being captured or another context's, or the driver refuses.
    pub fn prefetch(&self, location: Location, stream: &Arc<CudaStream>) -> Result<()> {
        let (device, region) = self.managed("prefetch")?;
        if !device.owns(stream) {
            return Err(Error::new(Kind::WrongContext { operation: "prefetch" }));
        }
        let _bound = device.context().enter()?;
        let stream = Stream::of_caller(stream);
        stream.check_not_capturing("prefetch")?;
        // Noted as a read: the memory must not be freed under it, and its bytes do not change.
        let id = region.open(&stream, &(0..region.bytes()), false);
        let _range = crate::trace::range(c"prefetch", region.bytes());
        managed::prefetch(device.context(), region.device()?, region.bytes(), location, &stream)?;
        region.close(id, Arc::new(Event::record(device.context(), &stream)?));
        Ok(())
    }

    fn managed(&self, operation: &'static str) -> Result<(&Device, Arc<Region>)> {
        let device = self.store.need_device(operation)?;
        let region = self.store.with_state(|state| state.host.clone());
        match region.filter(|region| region.backing() == Backing::Managed) {
            Some(region) => Ok((device, region)),
            None => Err(Error::unsupported(operation, format!("the backing is {}, not managed", self.backing()))),
        }
    }
}
