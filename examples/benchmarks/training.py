"""Images per second of a site's training, against a plain PyTorch loop, in both precisions.

    python examples/benchmarks/training.py --network resnet18 --size 64

Both train the same network on the same synthetic images in memory, with the same batches, optimizer
and learning rate, on --threads threads, in this process. The site is FedAvg's source: the time is
that of answering a request for one round, without loading and packing the model. All arms take
turns, and every figure is a median over --repeats turns, as other programs disturb single ones.

    ratio_float32     seconds of the site / seconds of the plain loop, in float32
    ratio_bfloat16    the same in bfloat16, the plain loop with torch.autocast around the network
    bfloat16_speedup  the site's seconds in float32 / its seconds in bfloat16
    images_per_s      of each arm, by name; `predicted` are those of `models.predict`, in float32

And with a pretrained network, --frozen, under a bottleneck (needs fedda[pretrained]):

    frozen_speedup      seconds of a round that trains all of it / of one on kept features
    frozen_bytes_share  bytes of the model that travels if only the bottleneck learns / if all does
    frozen_accuracy     in %, of a bottleneck trained on kept features, and on features that are
                        computed again for every batch: the same training twice

    load_before       the machine's load average when the benchmark began

The last line of the output is one JSON object with these keys.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedda import models
from fedda.config import IMAGES_HIDE
from fedda.halves import load
from fedda.settings import RunConfig
from fedda.train import batches, make_optimizer, round_images, seed_for
from fedda.wire import packing

CLASSES = 10
NAME = "source"
PRECISIONS = ("float32", "bfloat16")


def make_data(path: Path, args: argparse.Namespace) -> None:
    """Write images of noise with labels; a class has a slightly brighter band of rows."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (args.images, args.size, args.size, 3), dtype=np.uint8)
    y = np.arange(args.images) % CLASSES
    band = np.arange(args.size) * CLASSES // args.size  # (H,)
    x += (30 * (band == y[:, None])).astype(np.uint8)[:, :, None, None]
    np.savez(path, x_train=x, y_train=y)


def configure(
    args: argparse.Namespace, precision: str, model: Mapping[str, Any] | None = None
) -> RunConfig:
    """A run of FedAvg that trains the network in this precision."""
    flat = {
        "method": "fedavg",
        "rounds": 2,
        "run.name": precision,
        "model.name": args.network,
        "train.batch-size": args.batch,
        "train.precision": precision,
        "train.layout": args.layout,
        **{f"model.{key}": value for key, value in (model or {}).items()},
    }
    return RunConfig.parse(flat)


def site_arm(config: RunConfig, path: Path, args: argparse.Namespace) -> Callable[[], None]:
    """One round of a source, as a request makes it train."""
    device, threads = args.device, args.threads
    node = {"role": "source", "name": NAME, "data": str(path), "device": device, "threads": threads}
    site = load("clients", "site.memory").Site(node | {"compile": args.compile})
    classes = tuple(map(str, range(CLASSES)))
    task = config.task("fedavg", 0, (3, args.size, args.size), classes, 2)
    if config.model.freezes:
        task = task.model_copy(update={"frozen": models.digest(config.model, task.dims)})
    model = models.build(config.model, task.dims, CLASSES, 0)
    arrays = {"model": packing.pack(models.to_arrays(model), packing.Kind.MODEL)}
    request = load("clients", "site.request").Request(
        task, 1, task.stage(1), "train", "source", arrays, {}
    )
    client = load("clients", "fedavg").Source(site)

    def train() -> None:
        client.begin(request)
        client.model.train()
        start = time.perf_counter()
        client.train()
        client.settle()
        train.seconds = time.perf_counter() - start  # type: ignore[attr-defined]

    return train


def plain_arm(config: RunConfig, path: Path, args: argparse.Namespace) -> Callable[[], None]:
    """The same round as a training loop is usually written."""
    with np.load(path) as file:
        x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"])
    x, device = x.permute(0, 3, 1, 2).contiguous(), torch.device(args.device)
    model = models.build(config.model, (3, args.size, args.size), CLASSES, 0).to(device)
    low = config.train.precision == "bfloat16"
    blocks = torch.arange(len(x)).tensor_split(max(1, len(x) // IMAGES_HIDE))
    model.compute(models.Arithmetic(layout=args.layout))
    last = args.layout == "channels-last"
    layout = torch.channels_last if last else torch.contiguous_format

    def train() -> None:
        optimizer = make_optimizer(model.groups(config.train.lr), config.train, config.train.lr)
        model.train()
        shares = round_images(blocks, 1, 1.0, seed_for(0, NAME))
        total = torch.zeros((), device=device)
        start = time.perf_counter()
        for indices in batches(shares, config.train.batch_size):
            images = x[indices].to(device).float().div(255).contiguous(memory_format=layout)
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), y[indices].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        float(total)  # waits for the device
        train.seconds = time.perf_counter() - start  # type: ignore[attr-defined]

    return train


def predicting_arm(config: RunConfig, path: Path, args: argparse.Namespace) -> Callable[[], None]:
    """The classes of all images, as in a test."""
    with np.load(path) as file:
        x = torch.from_numpy(file["x_train"]).permute(0, 3, 1, 2).contiguous()
    model = models.build(config.model, tuple(x.shape[1:]), CLASSES, 0).to(args.device)
    model.compute(models.Arithmetic(layout=args.layout))

    def predict() -> None:
        start = time.perf_counter()
        models.predict(model, x, args.batch)
        predict.seconds = time.perf_counter() - start  # type: ignore[attr-defined]

    return predict


def frozen_figures(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What it saves to leave a pretrained network as it is, and that it costs no accuracy."""
    sized = {"images": args.frozen_images, "size": args.frozen_size, "network": args.frozen}
    args = argparse.Namespace(**(vars(args) | sized))
    path = folder / f"{args.frozen}.npz"
    make_data(path, args)
    learn = ("all", "bottleneck")
    configs = {
        part: configure(args, "float32", {"train": part, "weights": "package", "bottleneck": 256})
        for part in learn
    }
    arms: dict[str, Any] = {part: site_arm(configs[part], path, args) for part in learn}
    seconds: dict[str, list[float]] = {part: [] for part in learn}
    for number in range(args.repeats + 1):
        for part, arm in arms.items():
            arm()
            if number:  # the first turn computes the features
                seconds[part].append(arm.seconds)
    shape = (3, args.size, args.size)
    sizes = [
        len(
            packing.pack(
                models.to_arrays(models.blank(c.model, shape, CLASSES)), packing.Kind.MODEL
            ).buffer
        )
        for c in configs.values()
    ]
    return {
        "frozen_speedup": round(ratio(*(seconds[part] for part in learn)), 1),
        "frozen_bytes_share": round(sizes[1] / sizes[0], 3),
        "frozen_accuracy": accuracies(configs["bottleneck"], path, args),
    }


def accuracies(config: RunConfig, path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Train a bottleneck twice, on kept features and on features computed batch by batch."""
    with np.load(path) as file:
        x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"])
    x = x.permute(0, 3, 1, 2).contiguous()
    part = models.backbone(config.model, tuple(x.shape[1:]))
    with torch.no_grad():
        kept = torch.cat(
            [part(models.as_inputs(some, torch.device("cpu"))) for some in x.split(64)]
        )
    found = {}
    for name, inputs in (("kept", kept), ("recomputed", x)):
        model = models.build(config.model, tuple(x.shape[1:]), CLASSES, 0).attach(part).train()
        optimizer = make_optimizer(model.groups(config.train.lr), config.train, config.train.lr)
        draws = torch.Generator().manual_seed(0)
        for _ in range(args.frozen_epochs):
            for indices in torch.randperm(len(x), generator=draws).split(args.batch):
                loss = F.cross_entropy(
                    model(models.as_inputs(inputs[indices], y.device)), y[indices]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        right = models.predict(model, inputs).argmax(dim=1) == y
        found[name] = round(100 * right.float().mean().item(), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="digit-cnn", help="a value of model.name")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--images", type=int, default=512, help="of one round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--layout", choices=("channels-first", "channels-last"), default="channels-first"
    )
    parser.add_argument(
        "--frozen", default="efficientnet-lite0", help="a network with packaged weights, or none"
    )
    parser.add_argument(
        "--frozen-size", type=int, default=96, help="height and width of its images"
    )
    parser.add_argument("--frozen-images", type=int, default=128, help="of one of its rounds")
    parser.add_argument("--frozen-epochs", type=int, default=5, help="for its accuracy")
    parser.add_argument("--compile", action="store_true", help="the site's networks")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    load_before = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"{NAME}.npz")
        make_data(path, args)
        arms: dict[str, Any] = {}
        for precision in PRECISIONS:
            config = configure(args, precision)
            arms[f"site_{precision}"] = site_arm(config, path, args)
            arms[f"plain_{precision}"] = plain_arm(config, path, args)
        arms["predicted"] = predicting_arm(configure(args, "float32"), path, args)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(args.repeats + 1):
            for name, arm in arms.items():
                arm()
                if number:  # the first turn loads data and sets up kernels
                    seconds[name].append(arm.seconds)
        frozen = {} if args.frozen == "none" else frozen_figures(Path(scratch), args)
    figures: dict[str, Any] = {
        f"ratio_{p}": round(ratio(seconds[f"site_{p}"], seconds[f"plain_{p}"]), 3)
        for p in PRECISIONS
    }
    figures["bfloat16_speedup"] = round(ratio(*(seconds[f"site_{p}"] for p in PRECISIONS)), 3)
    figures["images_per_s"] = {
        name: round(args.images / statistics.median(each), 1) for name, each in seconds.items()
    }
    print(json.dumps(figures | frozen | {"load_before": load_before}))


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median ratio of two arms' times, turn by turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
