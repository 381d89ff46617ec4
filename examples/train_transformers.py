"""Train a GPT-2 or a Llama of transformers, cut into stages by its config alone.

    torchrun --nproc-per-node 4 examples/train_transformers.py --model gpt2 --verify
    torchrun --nproc-per-node 4 examples/train_transformers.py --model llama --verify

Each process makes only its own part of the model. The text is Python's own source, byte by byte.
`--verify` trains the uncut model of transformers in the same way in a single process, and compares.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from common import Losses, Parser, build, console, run, show, verify
from gpt import BYTES, batch, corpus, loss_fn
from reference import Reference
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from schedir.runtime import Executor
from schedir.training import Trainer, gathered_state, perplexity, stages_of, warmup_cosine


def config_of(args: argparse.Namespace) -> Any:
    """The model's config: the sizes of the options, without dropout."""
    if args.model == "gpt2":
        return GPT2Config(
            vocab_size=BYTES,
            eos_token_id=None,
            bos_token_id=None,
            n_positions=args.context,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    return LlamaConfig(
        vocab_size=BYTES,
        eos_token_id=None,
        bos_token_id=None,
        max_position_embeddings=args.context,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
    )


def train(args: argparse.Namespace) -> bool:
    """Train, and print what came of it. False where --verify found a difference."""
    sched = build(args)
    config = config_of(args)
    stages = stages_of(config, sched, seed=args.seed, device=args.device)
    show(sched, stages)

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=args.lr)

    def scheduler(of: torch.optim.Optimizer) -> LRScheduler:
        return warmup_cosine(of, warmup=args.warmup, steps=args.epochs * args.steps)

    text, held_out = corpus()
    batches = [batch(text, args.batch, args.context, args.seed, i) for i in range(args.steps)]
    losses = Losses()
    with Executor(
        *(sched, stages, loss_fn, optimizer),
        ties=stages.ties,
        seed=args.seed,
        in_process=bool(args.in_process),
    ) as executor:
        history = Trainer(
            executor,
            batches,
            epochs=args.epochs,
            scheduler=scheduler(executor.optimizer),
            evaluation=[batch(held_out, args.batch, args.context, args.seed, 0)],
            callbacks=[losses],
        ).fit()
        weights = gathered_state(executor)
    console.print(
        f"perplexity {perplexity(history[-1].evaluation_loss or 0.0):.1f} on held-out text"
    )

    if not args.verify:
        return True
    # Tied weights are two here, as they are for the stages, so that their gradients are added up in
    # the same order.
    untied = type(config)(**{**config.to_dict(), "tie_word_embeddings": False})
    whole: Any = AutoModelForCausalLM.from_config(untied)  # type: ignore[no-untyped-call]
    whole.load_state_dict(stages_of(config, 1, seed=args.seed)[0].state_dict())
    whole.to(args.device)
    ties = [[(0, name) for _, name in tie] for tie in stages.ties]

    def loss_of(output: Any, target: Tensor) -> Tensor:
        return loss_fn(output.logits, target)

    reference = Reference(
        *(sched, [whole], loss_of, optimizer, args.seed), ties=ties, scheduler=scheduler
    )
    return verify(reference, batches * args.epochs, losses, weights)


if __name__ == "__main__":
    parser = Parser(
        __doc__,
        layers=(4, "transformer blocks, over all stages"),
        width=(64, "size of a token's vector"),
        heads=(4, "attention heads per block"),
        context=(64, "bytes per row"),
        batch=(16, "rows per step, over all microbatches"),
        steps=(50, "batches per epoch"),
        epochs=(2, "times to go through them"),
        warmup=(10, "steps over which the learning rate rises"),
    )
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2", help="whose (gpt2)")
    run(train, parser.arguments())
