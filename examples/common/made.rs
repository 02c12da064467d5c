//! Outputs that a device makes step after step: a state that changes, and a copy of it as each step's output.

use transfer_tensor::{Access, Direction, TransferTensor};

use super::Failure;
use super::steps::{Gpu, pattern};

#[derive(Debug)]
pub struct Made<'g> {
    gpu: &'g Gpu<'g>,
    state: TransferTensor<f32>,
    shape: Vec<usize>,
    passes: u64,
}

impl<'g> Made<'g> {
    /// From the beginning, in outputs of this shape.
    pub fn new(gpu: &'g Gpu<'g>, shape: &[usize], passes: u64) -> Result<Self, Failure> {
        let begin: Vec<f32> = (0..shape.iter().product::<usize>() as u64).map(pattern).collect();
        let state = gpu.device.tensor().access(Access::reuse(100)?).from_slice(&begin, shape.to_vec())?;
        Ok(Self { gpu, state, shape: shape.to_vec(), passes })
    }

    /// An output, to be written on the device; where that shares the host's memory, it is read there without a copy.
    pub fn output(&self) -> Result<TransferTensor<f32>, Failure> {
        Ok(self.gpu.device.tensor().direction(Direction::DeviceToHost).zeros(self.shape.clone())?)
    }

    /// Submits a step.
    pub fn step(&mut self, output: &mut TransferTensor<f32>) -> Result<(), Failure> {
        self.gpu.add_ones(&mut self.state, self.passes)?;
        self.gpu.copy(&self.state, output)
    }

    /// How long the device takes for so many steps without anything else. The state is not at its beginning any more.
    pub fn alone(mut self, steps: u64) -> Result<f64, Failure> {
        let mut ring = (0..steps.min(4)).map(|_| self.output()).collect::<Result<Vec<_>, _>>()?;
        self.gpu.alone(steps, &mut ring, |output| self.step(output))
    }
}

/// Element `index` of the output of step `step`.
pub fn element(index: u64, passes: u64, step: u64) -> f32 {
    pattern(index) + ((step + 1) * passes) as f32
}
