#!/usr/bin/env python3
"""What PyTorch and CuPy do with the cases of benches/bandwidth.rs, in its rows, to run beside it on the same machine.

    cargo bench --bench bandwidth -- --json ours.json
    python3 benches/peers/bandwidth.py [--quick] [--json FILE]

`ours` is the peer's copy and a synchronisation; `raw` is a copy of as many bytes from or to pinned memory that exists, by torch, in
the same rounds; `peer` is empty. Rounds are interleaved, medians are reported, the first round is not counted. CuPy is left out where
it is not installed.
"""

import argparse
import json
import statistics
import time

import numpy
import torch

try:
    import cupy
except ImportError:
    cupy = None

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]


def seconds(run):
    torch.cuda.synchronize()
    start = time.perf_counter()
    kept = run()
    torch.cuda.synchronize()
    if cupy:
        cupy.cuda.Device().synchronize()
    taken = time.perf_counter() - start
    del kept
    return taken


def cases(size):
    pageable = torch.full((size,), 0x5A, dtype=torch.uint8)
    pinned = torch.full((size,), 0x5A, dtype=torch.uint8).pin_memory()
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    yield "h2d raw", lambda: device.copy_(pinned, non_blocking=True)
    yield "d2h raw", lambda: pinned.copy_(device, non_blocking=True)
    yield "h2d pageable, torch .cuda()", lambda: pageable.cuda()
    yield "h2d pageable, torch .pin_memory().cuda()", lambda: pageable.pin_memory().cuda(non_blocking=True)
    yield "h2d pinned, torch .cuda()", lambda: pinned.cuda(non_blocking=True)
    yield "d2h fresh, torch .cpu()", lambda: device.cpu()
    yield "d2h pageable, torch copy_", lambda: pageable.copy_(device)
    if cupy:
        array = numpy.full(size, 0x5A, dtype=numpy.uint8)
        there = cupy.asarray(array)
        yield "h2d pageable, cupy asarray", lambda: cupy.asarray(array)
        yield "d2h fresh, cupy asnumpy", lambda: cupy.asnumpy(there)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 16 MiB, three rounds")
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()
    rows = []
    for size in SIZES:
        if args.quick and size > 16 << 20:
            break
        rounds = 3 if args.quick else 101 if size < 1 << 20 else 21 if size < 64 << 20 else 7
        runs = list(cases(size))
        times = {name: [] for name, _ in runs}
        for _ in range(rounds + 1):
            for name, run in runs:
                times[name].append(seconds(run))
        median = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        large = size >= 1 << 20

        def shown(taken):
            return size / taken * 1e-9 if large else taken * 1e6

        for name, taken in median.items():
            if name.endswith("raw"):
                continue
            raw = median[name[:3] + " raw"]
            row = {"case": name, "bytes": size, "ours": shown(taken), "raw": shown(raw), "peer": None}
            row |= {"ratio": raw / taken, "unit": "GB/s" if large else "us", "clock": "wall"}
            rows.append(row)
            print(f"{name:45} {size:>11}  {row['ours']:10.2f}  raw {row['raw']:10.2f} {row['unit']:5} ratio {row['ratio']:.3f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
