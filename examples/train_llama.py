"""Train a small Llama: pipeline, tensor and fully sharded data parallelism in one training.

    torchrun --nproc-per-node 4 examples/train_llama.py --verify
    torchrun --nproc-per-node 4 examples/train_llama.py --tp 2 --verify
    torchrun --nproc-per-node 8 examples/train_llama.py --tp 2 --verify

A pipeline has `--ranks` stages' ranks, and each of its stages `--tp` processes. What more processes
there are make pipelines with data of their own, over which each stage's weights are sharded.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from common import RANKS, Losses, Parser, build, console, fail, run, show, verify
from gpt import batch, corpus, loss_fn
from llama import Block, Config, llama, split
from reference import Reference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import schedir
from schedir.runtime import Executor
from schedir.training import Batches, Trainer, gathered_state, partition


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    sched = build(args)
    if args.in_process:
        fail("--in-process has no mesh: start it by torchrun")
    pipelines = RANKS // (args.ranks * args.tp)
    # Neighbours in the mesh's last dimension are neighbours on a node, where tp needs them.
    mesh = init_device_mesh(
        args.device.partition(":")[0],
        (pipelines, args.ranks, args.tp),
        mesh_dim_names=("dp", "pp", "tp"),
    )
    if pipelines > 1:
        sched = schedir.shard(sched)  # lists when weights are gathered and given up

    config = Config(args.layers, args.width, args.heads, args.context)
    layers = llama(config, args.seed)
    if args.tp > 1:
        for name, layer in layers.items():
            if isinstance(layer, Block):
                layers[name] = split(layer, mesh["tp"])
    stages = partition(layers, sched, rank=mesh.get_local_rank("pp"), device=args.device)
    if pipelines > 1:
        for stage in stages.values():
            for module in stage.modules():
                if isinstance(module, Block):
                    fully_shard(module, mesh=mesh["dp"])
            fully_shard(stage, mesh=mesh["dp"])
    show(sched, stages)

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    text, _ = corpus()

    def batches(pipeline: int | None) -> Batches:
        """One pipeline's part of each batch, or the whole."""

        def draw(step: int) -> tuple[Tensor, ...]:
            whole = batch(text, args.batch, config.context, args.seed, step)
            if pipeline is None:
                return whole
            return tuple(tensor.chunk(pipelines)[pipeline] for tensor in whole)

        steps: Any = range(args.steps)
        collate: Any = draw
        return Batches(DataLoader(steps, batch_size=None, collate_fn=collate))

    losses = Losses()
    with Executor(sched, stages, loss_fn, optimizer, mesh=mesh, seed=args.seed) as executor:
        Trainer(executor, batches(mesh.get_local_rank("dp")), epochs=1, callbacks=[losses]).fit()
        weights = gathered_state(executor)
    dist.barrier()  # the mesh has made the process group: it ends once all are done
    dist.destroy_process_group()
    console.print(
        f"pp {args.ranks} x fsdp {pipelines} x tp {args.tp}: "
        f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
    )

    if not args.verify:
        return True
    whole = partition(llama(config, args.seed), sched.stages, device=args.device)
    reference = Reference(
        *(sched, list(whole.values()), loss_fn, optimizer, args.seed), replicas=pipelines
    )
    # A sum over tp, or over more than two pipelines, is added up in another order.
    exact = args.tp == 1 and pipelines < 3
    return verify(reference, batches(None), losses, weights, tolerance=0 if exact else 1e-4)


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = Parser(
        __doc__,
        microbatches=4,
        layers=(4, "transformer blocks, over all stages"),
        width=(64, "size of a token's vector"),
        heads=(4, "attention heads per block"),
        context=(64, "bytes per row"),
        batch=(16, "rows per step, over all microbatches and pipelines"),
        steps=(40, "batches to train on"),
        ranks=(2, "ranks of a pipeline"),
        tp=(1, "processes that share each rank's stages"),
    )
    args = parser.arguments()
    if not args.in_process and RANKS % (args.ranks * args.tp):
        parser.error(f"{RANKS} processes are no pipelines of {args.ranks} x {args.tp}")
    if args.width % (2 * args.heads) or args.heads % args.tp:
        parser.error("--heads has to be a multiple of --tp, and --width of twice --heads")
    return args


if __name__ == "__main__":
    run(train, parse_arguments())
