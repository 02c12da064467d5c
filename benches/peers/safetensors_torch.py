#!/usr/bin/env python3
"""safetensors.torch.load_file(device="cuda") over the files of benches/loader.rs, in its rows.

    cargo bench --bench loader -- --bytes 8GiB --dir /dev/shm --keep --json ours.json
    python3 benches/peers/safetensors_torch.py FOLDER_THAT_WAS_KEPT [--json FILE] [--rounds N] [--quick]

`ours` is load_file of every file of a case and a synchronisation; `raw` is a copy of as many bytes from pinned memory that
exists to device memory that exists, by torch; `peer` is empty. Rounds are interleaved, medians are reported, the first
round (which reads the files and sets the device up) is not counted.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from safetensors.torch import load_file

PIECE = 256 << 20


def cases(folder):
    """A case for each file of the folder, and one for each sharded model."""
    for file in sorted(folder.glob("*.safetensors")):
        yield file.stem, [file]
    for index in sorted(folder.glob("**/*.safetensors.index.json")):
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        yield "sharded", [index.parent / name for name in names]


def seconds(run):
    torch.cuda.synchronize()
    start = time.perf_counter()
    kept = run()
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    del kept
    return taken


def measure(case, files, rounds):
    def load():
        tensors = {}
        for file in files:
            tensors.update(load_file(file, device="cuda"))
        return tensors

    total = sum(tensor.nbytes for tensor in load().values())
    piece = min(total, PIECE)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(piece, dtype=torch.uint8, device="cuda")

    def raw():
        left = total
        while left > 0:
            part = min(left, piece)
            device[:part].copy_(host[:part], non_blocking=True)
            left -= part

    loads, raws = [], []
    for _ in range(rounds + 1):
        loads.append(seconds(load))
        raws.append(seconds(raw))
    ours, bound = statistics.median(loads[1:]), statistics.median(raws[1:])
    return {
        "case": f"{case} safetensors.torch",
        "bytes": total,
        "ours": total / ours * 1e-9,
        "raw": total / bound * 1e-9,
        "peer": None,
        "ratio": bound / ours,
        "unit": "GB/s",
        "clock": "wall",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the folder that benches/loader.rs kept, or one with models")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds

    print(f"{torch.cuda.get_device_name()}: torch {torch.__version__}, wall clock")
    rows = []
    for case, files in cases(arguments.folder):
        row = measure(case, files, rounds)
        print(f"{row['case']:>28} {row['bytes']:>12} {row['ours']:8.2f} {row['raw']:8.2f} {row['ratio']:7.3f} GB/s")
        rows.append(row)
    if not rows:
        parser.error(f"{arguments.folder}: no safetensors files")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
