#!/usr/bin/env python3
"""An article's experiment: how fast a segmentation model runs whose outputs have to leave the GPU, step by step of the
article, and with this library. See README.md beside this file.

Ends with 0; with 1 if a variant failed; with 2 where it can not run at all.
"""

import argparse
import faulthandler
import gc
import os
import sys
import traceback
import warnings
from pathlib import Path

NAMES = ["compute", "baseline", "processes", "buffers", "pinned", "stream", "ours"]
# What of the article's consumer does not apply: nothing is consumed, or straight from the library's buffer.
CONSUMER = {"compute": "none", "ours": "direct"}


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def variants(text):
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(NAMES)}")
    return names


def parse():
    library = Path(__file__).resolve().parents[2] / "target" / "release" / "examples" / "libtorch_egress.so"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtype", choices=["fp32", "bf16"], default="fp32")
    add("--steps", type=positive, default=12, metavar="N", help="steps that count (12)")
    add("--warmup", type=positive, default=10, metavar="N", help="steps before them, which do not (10)")
    add("--batch", type=positive, metavar="N", help="images a step (64; 8 with --model tiny)")
    add("--size", type=positive, metavar="N", help="their height and width (512; 64 with --model tiny), even")
    add("--variants", type=variants, default=NAMES, metavar="A,B,...", help=f"some of {','.join(NAMES)} (all)")
    add("--consumer", choices=["article", "direct"], default="article",
        help="of the baseline and steps 1 to 4: `article` copies the bytes once more and writes them to the null "
        "device, as the article does; `direct` writes straight from the buffer, as ours always does (article)")
    add("--model", choices=["deeplab", "tiny"], default="deeplab",
        help="DeepLabV3-ResNet50 with random weights, or one convolution for a quick look (deeplab)")
    add("--workers", type=positive, default=8, metavar="N", help="worker processes of the article's steps (8)")
    add("--buffers", type=positive, default=8, metavar="N", help="their buffers, and the capacity of ours (8)")
    add("--device", type=int, default=0, metavar="N", help="number of the GPU (0)")
    add("--lib", type=Path, default=library, metavar="PATH", help="libtorch_egress.so (of this repository's build)")
    add("--json", type=Path, metavar="FILE")
    add("--svg", type=Path, metavar="FILE")
    add("--timeout", type=float, default=120.0, metavar="S", help="the longest wait for one step (120)")
    add("--limit", type=float, default=1800.0, metavar="S", help="when the process ends, whatever it does (1800)")
    arguments = parser.parse_args()
    tiny = arguments.model == "tiny"
    arguments.batch = arguments.batch or (8 if tiny else 64)
    arguments.size = arguments.size or (64 if tiny else 512)
    if arguments.size % 2 != 0:
        parser.error("--size must be even")
    return arguments


def needs(line):
    print(f"torch_egress: {line}", file=sys.stderr)
    sys.exit(2)


def model_of(arguments, torch, torchvision):
    torch.manual_seed(0)
    if arguments.model == "tiny":
        return torch.nn.Conv2d(3, 21, 3, padding=1)
    # Both weights named: else those of the backbone would be downloaded.
    return torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)


def measure(arguments, variant, experiment):
    import torch

    import report
    from variants import VARIANTS
    from workers import Skipped

    label, run = VARIANTS[variant]
    row = {"variant": variant, "label": label, "consumer": CONSUMER.get(variant, arguments.consumer)}
    row.update(seconds=None, mean=None, note="")
    try:
        times = run(experiment)
        row["seconds"], row["mean"] = report.seconds_a_step(times, arguments.warmup, arguments.steps)
        first = min(times)
        row["times"] = [round(at - first, 6) for at in sorted(times)]
    except Skipped as why:
        row["note"] = f"skipped: {why}"
    except Exception as error:
        traceback.print_exc()
        row["note"] = f"failed: {type(error).__name__}: {error}"
    gc.collect()
    torch.cuda.empty_cache()
    return row


def main():
    arguments = parse()
    try:
        import numpy
        import torch
        import torchvision
    except ImportError as error:
        needs(f"needs PyTorch, torchvision and NumPy ({error})")
    if not torch.cuda.is_available() or torch.cuda.device_count() <= arguments.device:
        needs(f"needs a CUDA device {arguments.device}; PyTorch {torch.__version__} sees {torch.cuda.device_count()}")
    if "ours" in arguments.variants and not arguments.lib.is_file():
        needs(f"needs {arguments.lib}: `cargo build --release --example torch_egress` makes it, --lib names another")

    import report
    from variants import Experiment, Job, Settings

    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    # The forked processes use neither CUDA nor the parent's threads.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    torch.cuda.set_device(arguments.device)
    device = torch.device("cuda", arguments.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    model = model_of(arguments, torch, torchvision).to(device=device, dtype=dtype).eval()
    batch = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device, dtype=dtype)
    job = Job(model, batch, device)
    settings = Settings(arguments.steps, arguments.warmup, arguments.workers, arguments.buffers, arguments.consumer,
                        arguments.timeout, os.fspath(arguments.lib))
    about = {
        "model": arguments.model, "dtype": arguments.dtype, "batch": arguments.batch, "size": arguments.size,
        "bytes_a_step": job.size, "steps": arguments.steps, "warmup": arguments.warmup, "workers": arguments.workers,
        "buffers": arguments.buffers, "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__,
        "torchvision": torchvision.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    gigabytes = f"{job.size / 1e9:.3g} GB a step"
    title = f"{arguments.model}, {arguments.dtype}, batch {arguments.batch}, {gigabytes}, {about['gpu']}"
    print(title, flush=True)
    experiment, rows = Experiment(job, settings), []
    try:
        for variant in arguments.variants:
            print(f"  {variant} ...", file=sys.stderr, flush=True)
            rows.append(measure(arguments, variant, experiment))
            # After each: what was measured stays, if a later one ends the process.
            if arguments.json:
                report.write_json(arguments.json, about, rows)
    finally:
        experiment.close()
    print(report.table(rows))
    if arguments.svg:
        report.write_svg(arguments.svg, f"Steps a second: {title}", rows)
    return 1 if any(row["note"].startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
