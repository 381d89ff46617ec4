"""Train ResNet-50 or a vision transformer on images, two chunks of the model on each rank.

    torchrun --nproc-per-node 2 examples/train_images.py --verify
    torchrun --nproc-per-node 2 examples/train_images.py --model vit --verify

The images are scikit-learn's digits, or CIFAR-10 from `--cifar FOLDER`.
"""

import argparse
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from common import Losses, Parser, build, fail, run, show, verify
from images import CLASSES, Images, cifar, digits
from reference import Reference
from resnet import BLOCKS, resnet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from vit import vit

from schedir.runtime import Executor
from schedir.training import Batches, Trainer, accuracy, gathered_state, partition, warmup_cosine


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    data = args.cifar or digits()
    loader = DataLoader(data.train, args.batch, shuffle=True, drop_last=True)
    if not (steps := args.epochs * len(loader)):
        fail(f"--batch {args.batch} is more than the {len(data.train)} images to train on")

    sched = build(args)
    cut = partial(
        partition, model(args, data), by=args.partition, seed=args.seed, device=args.device
    )
    stages = cut(sched)
    show(sched, stages)

    def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    def scheduler(optimizer: Optimizer) -> LRScheduler:
        return warmup_cosine(optimizer, warmup=steps // 10, steps=steps)

    losses = Losses()
    with Executor(
        sched, stages, cross_entropy, optimizer, seed=args.seed, in_process=bool(args.in_process)
    ) as executor:
        trainer = Trainer(
            executor,
            Batches(loader, seed=args.seed),
            epochs=args.epochs,
            scheduler=scheduler(executor.optimizer),
            evaluation=Batches(DataLoader(data.test, args.batch)),
            metrics={"test accuracy": accuracy},
            callbacks=[losses],
        )
        trainer.fit()
        weights = gathered_state(executor)

    if not args.verify:
        return True
    whole = list(cut(sched.stages).values())
    reference = Reference(sched, whole, cross_entropy, optimizer, args.seed, scheduler=scheduler)
    return verify(reference, Batches(loader, seed=args.seed, repeat=True), losses, weights)


def model(args: argparse.Namespace, data: Images) -> Mapping[str, object]:
    """The layers by name, in order."""
    size = args.size or data.size
    shape = data.channels, CLASSES, size

    def resize(pixels: Tensor) -> Tensor:
        return interpolate(pixels, (size, size), mode="bilinear") if args.size else pixels

    if args.model == "resnet":
        if (args.depth or 50) not in BLOCKS:
            fail(f"--depth {args.depth}: a ResNet has {', '.join(map(str, BLOCKS))} layers here")
        return {"images": resize, **resnet(args.depth or 50, args.width or 16, *shape)}
    width = args.width or 64
    if width % args.heads or size % args.patch:
        fail(f"--width {width} has to be a multiple of --heads, the size {size} of --patch")
    return {"images": resize, **vit(args.depth or 4, width, args.heads, args.patch, *shape)}


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = Parser(
        __doc__,
        schedule="interleaved-1f1b",
        microbatches=4,
        chunks=2,
        lr=2e-3,
        batch=(64, "images per step, over all microbatches"),
        epochs=(10, "times to go through the images"),
        size=(None, "rows and columns that images are stretched to (their own)"),
        width=(None, "channels of ResNet's first blocks, values of ViT's vectors (16, 64)"),
        depth=(None, "layers of ResNet: 14, 26, 50 or 101; blocks of ViT (50, 4)"),
        heads=(4, "ViT's attention heads per block"),
        patch=(2, "rows and columns of ViT's patches"),
    )
    add = parser.add_argument
    add("--model", choices=("resnet", "vit"), default="resnet", help="(resnet)")
    add("--partition", default="uniform", metavar="BY", help="how layers are shared out (uniform)")
    add("--cifar", type=cifar, metavar="FOLDER", help="where CIFAR-10 for Python is unpacked")
    return parser.arguments()


if __name__ == "__main__":
    run(train, parse_arguments())
