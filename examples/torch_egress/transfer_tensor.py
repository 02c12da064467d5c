"""transfer_tensor.h for Python: memory of the device on its way to the host. Needs neither PyTorch nor NumPy.

    with Library(path).pool(device=0, capacity=4, budget=8 << 30) as pool:
        pool.submit(tensor.data_ptr(), tensor.nbytes, stream=stream.cuda_stream, tag=step, keep=tensor)
        ...
        output = pool.next(timeout=1.0)  # on any thread
        with output:
            file.write(output.view())
"""

import ctypes
import itertools
import threading

ABI = 1
FOREVER = 0xFFFFFFFF
COMPLETION, SUBMISSION = 0, 1
CODES = ("OK TIMEOUT END INVALID NO_DEVICE CLOSED FULL TOO_LARGE CAPTURING FAULT OUT_OF_MEMORY INTERNAL OTHER "
         "FORKED IN_USE").split()
OK, TIMEOUT, END, IN_USE = 0, 1, 2, 14

_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Options(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("budget", ctypes.c_uint64),
        ("room_timeout_ms", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class RawOutput(ctypes.Structure):
    _fields_ = [
        ("output", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class Shutdown(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("delivered", "failed", "abandoned")]


class Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "submitted in_flight delivered failed bytes kept kept_bytes copying_ns lent released".split()
        )
    ] + [("faulted", ctypes.c_uint32), ("closed", ctypes.c_uint32)]


class EgressError(Exception):
    """A call, or an item, that failed."""

    def __init__(self, code, text):
        name = CODES[code] if 0 <= code < len(CODES) else str(code)
        super().__init__(f"{name}: {text}")
        self.code = code


class Library:
    """libtorch_egress.so."""

    def __init__(self, path):
        self._c = ctypes.CDLL(path)
        u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER
        signatures = {
            "create": [pointer(Options), pointer(u64)],
            "submit": [u64, u64, u64, u64, u64, _Release, ctypes.c_void_p],
            "next": [u64, u32, pointer(RawOutput)],
            "release": [u64],
            "drain": [u64, u32],
            "shutdown": [u64, u32, pointer(Shutdown)],
            "stats": [u64, pointer(Stats)],
            "destroy": [u64, u32],
        }
        for name, arguments in signatures.items():
            function = getattr(self._c, f"tt_egress_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int32
        self._c.tt_egress_abi.restype = u32
        self._c.tt_egress_last_error.restype = ctypes.c_char_p
        if (found := self._c.tt_egress_abi()) != ABI:
            raise RuntimeError(f"{path} has interface {found}, this file is for {ABI}")

    def call(self, name, *arguments, allow=()):
        code = getattr(self._c, f"tt_egress_{name}")(*arguments)
        if code != OK and code not in allow:
            raise self.error(code)
        return code

    def error(self, code):
        return EgressError(code, self._c.tt_egress_last_error().decode(errors="replace"))

    def pool(self, **options):
        return Pool(self, **options)


def milliseconds(seconds):
    return FOREVER if seconds is None else min(max(int(seconds * 1000), 0), FOREVER - 1)


class Pool:
    """A pool; its methods may be called from any thread. Seconds are floats, None: without end."""

    # What must stay: pools that could not be destroyed, whose callbacks may be called yet, and memory that the device may be at.
    _left = []

    def __init__(self, library, device=0, workers=0, capacity=0, budget=0, order=COMPLETION, room_timeout=None):
        self._library = library
        self._keys = itertools.count(1)
        self._lent = {}
        self._lock = threading.Lock()
        self._release = _Release(self._give_back)
        self._number = ctypes.c_uint64()
        options = Options(device, workers, capacity, order, budget, milliseconds(room_timeout), 0)
        library.call("create", ctypes.byref(options), ctypes.byref(self._number))

    def _give_back(self, key):
        # On a thread of the library, and perhaps the last reference: PyTorch takes its memory back on any thread.
        with self._lock:
            keep = self._lent.pop(key, None)
        del keep

    def submit(self, address, size, stream=0, tag=0, keep=None):
        """Hands `size` bytes of the device over; `keep` is kept until they were copied. Waits for room."""
        with self._lock:
            key = next(self._keys)
            self._lent[key] = keep
        try:
            self._library.call("submit", self._number, address, size, stream, tag, self._release, key)
        except EgressError as error:
            if error.code == IN_USE:
                Pool._left.append(keep)
            self._give_back(key)
            raise

    def next(self, timeout=None):
        """The next output; None at the end. Raises TimeoutError, and EgressError with `tag` for an item that failed."""
        raw = RawOutput()
        code = self._library.call("next", self._number, milliseconds(timeout), ctypes.byref(raw), allow=(TIMEOUT, END))
        if code == TIMEOUT:
            raise TimeoutError("nothing has come in time")
        if code == END:
            return None
        if raw.error != OK:
            error = self._library.error(raw.error)
            error.tag = raw.tag
            raise error
        return Output(self._library, raw)

    def drain(self, timeout=None):
        self._library.call("drain", self._number, milliseconds(timeout))

    def shutdown(self, timeout=None):
        """Takes nothing any more; what became of what was open. `next` gives the rest, then None."""
        report = Shutdown()
        number, most = self._number, milliseconds(timeout)
        self._library.call("shutdown", number, most, ctypes.byref(report), allow=(TIMEOUT,))
        return {name: getattr(report, name) for name, _ in report._fields_}

    def stats(self):
        stats = Stats()
        self._library.call("stats", self._number, ctypes.byref(stats))
        return {name: getattr(stats, name) for name, _ in stats._fields_}

    def close(self, timeout=60.0):
        if not self._number:
            return
        try:
            self._library.call("destroy", self._number, milliseconds(timeout))
        except EgressError:
            Pool._left.append(self)
            raise
        self._number = ctypes.c_uint64()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Output:
    """Bytes on the host, until they are released."""

    def __init__(self, library, raw):
        self._library, self._number = library, raw.output
        self.tag, self.address, self.size = raw.tag, raw.data, raw.bytes

    def view(self):
        """The bytes, in place; not to be used after `release`."""
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.address)).cast("B")

    def release(self):
        number, self._number = self._number, 0
        if number:
            self._library.call("release", number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()
