"""Train AlexNet on images, in two stages with balanced parameters, by one pipeline or several.

    torchrun --nproc-per-node 2 examples/train_alexnet.py --verify
    torchrun --nproc-per-node 4 examples/train_alexnet.py --verify

Four processes are two pipelines, each on its half of every batch. The images are scikit-learn's
digits, or CIFAR-10 from `--cifar FOLDER`.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from alexnet import alexnet
from common import RANKS, Losses, Parser, build, run, show, verify
from images import CLASSES, Pair, cifar, digits
from reference import Reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from schedir import Schedule
from schedir.runtime import Executor
from schedir.training import (
    Batches,
    Stages,
    Trainer,
    accuracy,
    gathered_state,
    measured_costs,
    partition,
)


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    data = args.cifar or digits()
    pipelines = RANKS // args.ranks or 1
    mesh = None
    if pipelines > 1:
        mesh = init_device_mesh(
            args.device.partition(":")[0], (pipelines, args.ranks), mesh_dim_names=("dp", "pp")
        )
    pipeline = mesh.get_local_rank("dp") if mesh else 0

    sched = build(args)
    layers = alexnet(args.width, data.channels, CLASSES, args.size)
    how: dict[str, Any] = {"by": args.partition}
    if args.partition == "measured":
        pixels, classes = data.train[: args.batch // pipelines // sched.microbatches]
        how = {"costs": measured_costs(layers, pixels, cross_entropy, classes)}

    def cut(stages: Schedule | int, rank: int | None = None) -> Stages:
        return partition(layers, stages, rank=rank, seed=args.seed, device=args.device, **how)

    stages = cut(sched, rank=mesh.get_local_rank("pp") if mesh else None)
    show(sched, stages)

    def batches(pipeline: int, *, repeat: bool = False) -> Batches:
        part: DistributedSampler[Pair] = DistributedSampler(
            data.train, pipelines, pipeline, seed=args.seed, drop_last=True
        )
        loader = DataLoader(data.train, args.batch // pipelines, sampler=part, drop_last=True)
        return Batches(loader, repeat=repeat)

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    losses = Losses()
    with Executor(
        *(sched, stages, cross_entropy, optimizer),
        mesh=mesh,
        seed=args.seed,
        in_process=bool(args.in_process),
    ) as executor:
        trainer = Trainer(
            executor,
            batches(pipeline),
            epochs=args.epochs,
            evaluation=Batches(DataLoader(data.test, args.batch)),
            metrics={"test accuracy": accuracy},
            callbacks=[losses],
        )
        trainer.fit()
        weights = gathered_state(executor)
    if mesh:  # it has made the process group, which ends with it, once all are done
        dist.barrier()
        dist.destroy_process_group()

    if not args.verify:
        return True
    reference = Reference(
        *(sched, list(cut(sched.stages).values()), cross_entropy, optimizer, args.seed),
        replicas=pipelines,
    )
    each = zip(*(batches(i, repeat=True) for i in range(pipelines)), strict=True)
    together = (tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in each)
    # Two gradients give one sum; the order in which more are added up is the transport's.
    return verify(reference, together, losses, weights, tolerance=0 if pipelines < 3 else 1e-4)


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = Parser(
        __doc__,
        microbatches=4,
        lr=1e-3,
        batch=(64, "images per step, over all microbatches and pipelines"),
        epochs=(10, "times to go through the images"),
        size=(64, "rows and columns that images are stretched to"),
        width=(16, "channels of the first convolution"),
        ranks=(2, "processes of a pipeline; what more there are make another"),
    )
    add = parser.add_argument
    text = "how to cut: parameters, uniform, measured, type:REGEX (parameters)"
    add("--partition", default="parameters", metavar="BY", help=text)
    add("--cifar", type=cifar, metavar="FOLDER", help="where CIFAR-10 for Python is unpacked")
    args = parser.arguments()
    if not args.in_process and RANKS % args.ranks:
        parser.error(f"{RANKS} processes are no pipelines of {args.ranks} ranks each")
    if args.size < 63:
        parser.error("--size has to be 63 or more: AlexNet pools three times")
    return args


if __name__ == "__main__":
    run(train, parse_arguments())
