"""Images on disk: how much memory a site needs for a set that is larger than memory.

    python examples/benchmarks/cache.py

Makes --images JPEG files of --size pixels in a temporary folder, as a source with ten classes.
Then a fresh process loads them with a cache on disk and goes through two epochs of shuffled
batches of 50, as a training does, without a network. A third process has the images in memory.

- Resident is the kernel's VmHWM: the highest resident memory of the process, mapped files included.
- The first epoch includes decoding, and the second only reading from the cache.
- A restart finds the cache, checks it and goes through one epoch.

    resident_mb      highest resident memory of the process with the cache, in megabytes
    base_mb          resident memory before it reads the first image
    decoded_mb       what all decoded images take
    in_memory_mb     resident_mb without the cache
    first_epoch_s    seconds for the first epoch, decoding included
    second_epoch_s   seconds for the second
    restart_s        seconds for an epoch after a restart, the check of the cache included
    in_memory_first_epoch_s   the first epoch without the cache
    check_s          of these, seconds until the cache is found and checked
    equal            whether all images are the same, bit by bit, with and without the cache

The last line of the output is one JSON object with these keys.
"""

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from processes import peak, resident

from fedda import data, models

BATCH = 50


def make(folder: Path, images: int, size: int) -> None:
    """Write JPEG files of smooth noise in ten class folders; a few pictures, each with its mark."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    whole = (size + 32, size)
    pictures = [Image.fromarray(c).resize(whole, Image.Resampling.BICUBIC) for c in coarse]
    for k in range(10):
        (folder / "train" / str(k)).mkdir(parents=True)

    def write(i: int) -> None:
        picture = pictures[i % len(pictures)].copy()
        picture.paste((i % 256, i // 256 % 256, 0), (0, 0, 8, 8))
        out = io.BytesIO()
        picture.save(out, "JPEG", quality=85)
        (folder / "train" / str(i % 10) / f"{i}.jpg").write_bytes(out.getvalue())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(images)))


def epochs(folder: Path, size: int, cache: str, count: int) -> dict[str, Any]:
    """What a process needs to load the images and to go through them so many times."""
    kept = data.Cache(Path(cache), always=True) if cache else None
    base, seconds, digest = resident(os.getpid()), [], hashlib.blake2b()
    start = time.perf_counter()
    images = data.load_source(folder, channels=3, size=size, cache=kept)
    loaded = time.perf_counter() - start
    images = images.take(torch.arange(len(images)))  # as a site leaves out what fills no block
    for epoch in range(count):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(BATCH):
            x = models.as_inputs(images.x[indices], torch.device("cpu"))
            x.mean()
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    for part in images.x.split(BATCH):
        digest.update(part.numpy().tobytes())
    return {
        "peak": peak(os.getpid()),
        "base": base,
        "loaded": loaded,
        "seconds": seconds,
        "digest": digest.hexdigest(),
    }


def fresh(*args: Any) -> dict[str, Any]:
    """Measure `epochs` in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=224, help="pixels per side")
    parser.add_argument("--dir", default=None, help="make the temporary folder here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, *others = json.loads(args.child)
        print(json.dumps(epochs(Path(folder), *others)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        folder, cache = Path(scratch) / "site", Path(scratch) / "cache"
        make(folder, args.images, args.size)
        first = fresh(str(folder), args.size, str(cache), 2)
        again = fresh(str(folder), args.size, str(cache), 1)
        plain = fresh(str(folder), args.size, "", 1)
    figures = {
        "resident_mb": round(max(first["peak"], again["peak"]) / 1e6),
        "base_mb": round(first["base"] / 1e6),
        "decoded_mb": round(args.images * 3 * args.size**2 / 1e6),
        "in_memory_mb": round(plain["peak"] / 1e6),
        "first_epoch_s": round(first["seconds"][0], 2),
        "second_epoch_s": round(first["seconds"][1], 2),
        "restart_s": round(again["seconds"][0], 2),
        "check_s": round(again["loaded"], 2),
        "in_memory_first_epoch_s": round(plain["seconds"][0], 2),
        "equal": first["digest"] == again["digest"] == plain["digest"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
