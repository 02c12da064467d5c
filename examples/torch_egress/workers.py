"""What the article's steps are built of: worker processes behind a bounded queue, and buffers that they share.

The processes are forked: they inherit the buffers, and use no CUDA. All that waits ends: with an error when its time is
over or when a process is gone. A worker whose parent is gone ends too.
"""

import mmap
import os
import queue
import time

import numpy
import torch
import torch.multiprocessing

# How often who waits looks whether the others are there.
LOOK = 1.0


class Failed(Exception):
    """A variant that could not be run to its end."""


class Skipped(Exception):
    """A variant that this machine has no room for."""


def write_out(sink, array):
    """Writes straight from the buffer; one write takes 2 GiB at most."""
    view = memoryview(array)
    while len(view) > 0:
        view = view[sink.write(view) :]


def copy_and_write_out(sink, array):
    """As the article does: the bytes once more, then written."""
    write_out(sink, array.tobytes())


CONSUMERS = {"article": copy_and_write_out, "direct": write_out}


def open_sink():
    return open(os.devnull, "wb", buffering=0)


def checksum(array):
    """Two sums of the bytes as 32-bit words; `checksum_on_device` gives the same."""
    words = array.view(numpy.int32)
    return int(words.sum(dtype=numpy.int64)), int(words[1::97].sum(dtype=numpy.int64))


def checksum_on_device(flat):
    words = flat.view(torch.int32)
    return int(words.sum(dtype=torch.int64)), int(words[1::97].sum(dtype=torch.int64))


class Buffers:
    """Host memory that forked processes share. Anonymous: /dev/shm, which may be small, has no part in it."""

    def __init__(self, count, size):
        self.pinned = False
        self._maps = [mmap.mmap(-1, size) for _ in range(count)]
        self.tensors = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._maps]
        self.arrays = [numpy.frombuffer(memory, dtype=numpy.uint8) for memory in self._maps]
        for tensor in self.tensors:
            # Touched now, not in the steps that are timed.
            tensor.zero_()

    def pin(self, pinned):
        if pinned == self.pinned:
            return
        cudart = torch.cuda.cudart()
        for at, tensor in enumerate(self.tensors):
            if pinned:
                error = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            else:
                error = cudart.cudaHostUnregister(tensor.data_ptr())
            if int(error) != 0:
                for done in self.tensors[: at if pinned else 0]:
                    cudart.cudaHostUnregister(done.data_ptr())
                raise Failed(f"the buffers could not be {'pinned' if pinned else 'unpinned'}: CUDA error {int(error)}")
        self.pinned = pinned

    def close(self):
        self.pin(False)
        self.tensors, self.arrays, self._maps = [], [], []


def serve(parent, consumer, arrays, work, free, done):
    """A worker process: consumes what `work` names, and gives its buffer back."""
    sink = open_sink()
    consume = CONSUMERS[consumer]
    while os.getppid() == parent:
        try:
            job = work.get(timeout=LOOK)
        except queue.Empty:
            continue
        if job is None:
            break
        step, what, verify = job
        array = what.numpy() if arrays is None else arrays[what]
        consume(sink, array)
        at = time.monotonic()
        sums = checksum(array) if verify else None
        if arrays is not None:
            free.put(what)
        del array, what, job
        done.put((step, at, sums))


class Workers:
    """Processes that consume tensors or, where there are buffers, the buffers of given numbers."""

    def __init__(self, count, waiting, consumer, timeout, buffers=None):
        fork = torch.multiprocessing.get_context("fork")
        self._timeout = timeout
        self._work, self._done = fork.Queue(waiting), fork.Queue()
        self._free = fork.Queue() if buffers is not None else None
        arrays = None if buffers is None else buffers.arrays
        arguments = (os.getpid(), consumer, arrays, self._work, self._free, self._done)
        self._processes = [fork.Process(target=serve, args=arguments, daemon=True) for _ in range(count)]
        for process in self._processes:
            process.start()
        for number in range(len(arrays or ())):
            self._free.put(number)

    def _patiently(self, what, attempt):
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return attempt()
            except (queue.Empty, queue.Full):
                pass
            gone = [process.exitcode for process in self._processes if not process.is_alive()]
            if gone:
                raise Failed(f"{len(gone)} of {len(self._processes)} worker processes are gone (exit codes {gone})")
            if time.monotonic() > deadline:
                raise Failed(f"no {what} in {self._timeout:g} s")

    def free_buffer(self):
        return self._patiently("free buffer", lambda: self._free.get(timeout=LOOK))

    def put(self, step, what):
        job = (step, what, step == 0)
        self._patiently("room in the queue", lambda: self._work.put(job, timeout=LOOK))

    def finish(self, steps, expected):
        """When each of the steps was consumed."""
        times = []
        while len(times) < steps:
            step, at, sums = self._patiently("result of a worker", lambda: self._done.get(timeout=LOOK))
            times.append(at)
            if step == 0 and sums != expected:
                raise Failed(f"the bytes are wrong: checksums {sums}, the device's are {expected}")
        return times

    def close(self):
        for _ in self._processes:
            try:
                self._work.put(None, timeout=LOOK)
            except queue.Full:
                break
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5.0)
        for line in (self._work, self._done, self._free):
            if line is not None:
                line.cancel_join_thread()
                line.close()
