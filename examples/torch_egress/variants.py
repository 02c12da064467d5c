"""The variants: compute only, the article's baseline and its four steps, and this library.

Each gives the times at which its steps were done, warm-up and all.
"""

import dataclasses
import os
import queue
import threading
import time

import numpy
import torch

import transfer_tensor
from workers import CONSUMERS, Buffers, Failed, Skipped, Workers, checksum, checksum_on_device, open_sink, write_out


@dataclasses.dataclass
class Settings:
    steps: int
    warmup: int
    workers: int
    buffers: int
    consumer: str
    timeout: float
    lib: str

    @property
    def all(self):
        return self.warmup + self.steps


class Job:
    """The model and its input, which stays the same, on the device."""

    def __init__(self, model, batch, device):
        self.model, self.batch, self.device = model, batch, device
        self.expected = None
        self.size = self._compute().nbytes
        torch.cuda.synchronize(device)

    def _compute(self):
        with torch.inference_mode():
            output = self.model(self.batch)
            output = output["out"] if isinstance(output, dict) else output
            return output.contiguous().reshape(-1).view(torch.uint8)

    def step(self, number):
        """The output of one step as bytes, maybe still being computed; of the first the checksum is kept."""
        flat = self._compute()
        if number == 0:
            self.expected = checksum_on_device(flat)
        return flat

    def check(self, array):
        if (sums := checksum(array)) != self.expected:
            raise Failed(f"the bytes are wrong: checksums {sums}, the device's are {self.expected}")


class Experiment:
    """What the variants share, and what is to be cleaned up."""

    def __init__(self, job, settings):
        self.job, self.settings = job, settings
        self._buffers = None

    def close(self):
        if self._buffers is not None:
            self._buffers.close()

    def _workers_with_buffers(self, pinned):
        if self._buffers is None:
            self._buffers = Buffers(self.settings.buffers, self.job.size)
        # Forked before the memory is pinned: the children have nothing to do with that.
        self._buffers.pin(False)
        settings = self.settings
        workers = Workers(settings.workers, settings.buffers, settings.consumer, settings.timeout, self._buffers)
        try:
            self._buffers.pin(pinned)
        except BaseException:
            workers.close()
            raise
        return self._buffers, workers

    def compute(self):
        """The bound: nothing is done with the outputs."""
        events = []
        for step in range(self.settings.all):
            self.job.step(step)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        torch.cuda.synchronize()
        return [events[0].elapsed_time(event) / 1000.0 for event in events]

    def baseline(self):
        """Copied by `.cpu()` and consumed there and then."""
        times, sink, consume = [], open_sink(), CONSUMERS[self.settings.consumer]
        for step in range(self.settings.all):
            array = self.job.step(step).cpu().numpy()
            consume(sink, array)
            times.append(time.monotonic())
            if step == 0:
                self.job.check(array)
        return times

    def processes(self):
        """Step 1: worker processes behind a bounded queue, which moves each tensor to shared memory."""
        wanted, size = self.settings.workers, self.job.size
        shm = os.statvfs("/dev/shm")
        # One each at the workers, one in the queue for each, and one on its way.
        room = int(shm.f_bavail * shm.f_frsize * 0.9) // size - 1
        count, waiting = wanted, min(wanted, room - wanted)
        if waiting < 1:
            count, waiting = room - 1, 1
        if count < 1:
            raise Skipped(f"/dev/shm has no room for three outputs of {size / 1e9:.2f} GB")
        workers = Workers(count, waiting, self.settings.consumer, self.settings.timeout)
        try:
            for step in range(self.settings.all):
                workers.put(step, self.job.step(step).cpu())
            return workers.finish(self.settings.all, self.job.expected)
        finally:
            workers.close()

    def buffers(self):
        """Step 2: buffers that are made once, in memory that the processes share, and a queue of the free ones."""
        buffers, workers = self._workers_with_buffers(pinned=False)
        try:
            for step in range(self.settings.all):
                output = self.job.step(step)
                number = workers.free_buffer()
                buffers.tensors[number].copy_(output)
                workers.put(step, number)
            return workers.finish(self.settings.all, self.job.expected)
        finally:
            workers.close()

    def pinned(self):
        """Step 3: pinned buffers, copies that nobody waits for, a thread that passes buffers on after their events."""
        return self._watched(None)

    def stream(self):
        """Step 4: the copies on a stream of their own, which waits for that of the model."""
        return self._watched(torch.cuda.Stream())

    def _watched(self, copies):
        buffers, workers = self._workers_with_buffers(pinned=True)
        copied, wrong = queue.SimpleQueue(), []

        def monitor():
            try:
                while (item := copied.get()) is not None:
                    event, step, number = item
                    event.synchronize()
                    workers.put(step, number)
            except BaseException as error:  # The producer raises it.
                wrong.append(error)

        thread = threading.Thread(target=monitor, name="monitor", daemon=True)
        thread.start()
        try:
            for step in range(self.settings.all):
                output = self.job.step(step)
                number = workers.free_buffer()
                event = torch.cuda.Event()
                if copies is None:
                    buffers.tensors[number].copy_(output, non_blocking=True)
                    event.record()
                else:
                    copies.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(copies):
                        buffers.tensors[number].copy_(output, non_blocking=True)
                        event.record()
                    output.record_stream(copies)
                del output
                copied.put((event, step, number))
                if wrong:
                    raise wrong[0]
            times = workers.finish(self.settings.all, self.job.expected)
            if wrong:
                raise wrong[0]
            return times
        finally:
            copied.put(None)
            thread.join(self.settings.timeout)
            # No copy is at the buffers when they are unpinned.
            torch.cuda.synchronize()
            workers.close()

    def ours(self):
        """This library: an egress pool, and threads that write straight from its buffers."""
        settings, job = self.settings, self.job
        times, wrong = [], []
        pool = transfer_tensor.Library(settings.lib).pool(
            device=job.device.index or 0,
            capacity=settings.buffers,
            budget=settings.buffers * job.size,
            room_timeout=settings.timeout,
        )

        def consume():
            sink = open_sink()
            try:
                while True:
                    try:
                        output = pool.next(timeout=1.0)
                    except TimeoutError:
                        continue
                    if output is None:
                        return
                    with output:
                        write_out(sink, output.view())
                        times.append(time.monotonic())
                        if output.tag == 0:
                            job.check(numpy.frombuffer(output.view(), dtype=numpy.uint8))
            except BaseException as error:  # The producer raises it.
                wrong.append(error)

        consumers = []
        try:
            stream = torch.cuda.current_stream().cuda_stream
            # The library's buffers are made now, as those of the others are, and not in the steps that are timed.
            blank = torch.zeros(job.size, dtype=torch.uint8, device=job.device)
            for _ in range(settings.buffers):
                pool.submit(blank.data_ptr(), blank.nbytes, stream=stream, keep=blank)
            for output in [pool.next(settings.timeout) for _ in range(settings.buffers)]:
                output.release()
            del blank
            for number in range(2):
                consumers.append(threading.Thread(target=consume, name=f"consumer-{number}", daemon=True))
                consumers[-1].start()
            for step in range(settings.all):
                output = job.step(step)
                pool.submit(output.data_ptr(), output.nbytes, stream=stream, tag=step, keep=output)
                del output
                if wrong:
                    raise wrong[0]
            pool.drain(settings.timeout)
        finally:
            pool.shutdown(settings.timeout)
            for consumer in consumers:
                consumer.join(settings.timeout)
            pool.close(settings.timeout)
        if wrong:
            raise wrong[0]
        if len(times) != settings.all:
            raise Failed(f"{len(times)} of {settings.all} outputs came")
        return times


VARIANTS = {
    "compute": ("compute only", Experiment.compute),
    "baseline": ("0 baseline: .cpu(), inline", Experiment.baseline),
    "processes": ("1 worker processes", Experiment.processes),
    "buffers": ("2 + buffer pool", Experiment.buffers),
    "pinned": ("3 + pinned, events, monitor", Experiment.pinned),
    "stream": ("4 + copy stream", Experiment.stream),
    "ours": ("ours: EgressPool", Experiment.ours),
}
