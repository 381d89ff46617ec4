# mypy: ignore-errors
"""torchtitan's own trainer on the CPU, with its schedule or with schedir's.

    torchrun --nproc-per-node 2 tests/integrations/torchtitan_run.py '{"steps": 9, "schedir": "zb"}'

Prints the losses, of training and of validation, as JSON, from the ranks that have them. torchtitan
wants a GPU, a tokenizer and data: here the CPU stands in for the first, and random tokens for the
rest.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": lambda device=None: "cpu",
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 34),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
    "set_device": lambda device: None,
    "manual_seed": torch.manual_seed,
}.items():
    setattr(torch.cpu, name, value)

import torchtitan.distributed.utils as dist_utils  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools import utils  # noqa: E402


class Tokens(BaseDataLoader):
    """The same random tokens for each step in every run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **others):
        self.shape = local_batch_size, seq_len + 1
        self.rank, self.at = dp_rank, 0

    def __iter__(self):
        while True:
            drawn = torch.Generator().manual_seed(1000 * self.at + self.rank)
            self.at += 1
            tokens = torch.randint(2000, self.shape, generator=drawn)
            labels = tokens[:, 1:].clone()
            labels[:, : self.at % 5] = -100  # padding, so that microbatches weigh differently
            yield {"input": tokens[:, :-1]}, labels

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class NoTokenizer(BaseTokenizer):
    """No text is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *given, **others):
        return []

    def decode(self, *given, **others):
        return ""

    def get_vocab_size(self):
        return 2048


def for_gloo(parallelize, model, **given):
    """torchtitan's factor of gradients needs a reduction that gloo lacks."""
    for part in (made := parallelize(model, **given)).modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    return made


def main(given) -> None:
    utils.device_type = dist_utils.device_type = "cpu"
    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    config.dump_folder = given.get("folder", "/tmp/none")
    config.checkpoint = CheckpointManager.Config(
        enable="folder" in given,
        interval=5,
        last_save_model_only=False,
        load_step=given.get("from", -1),
    )
    config.training.steps, config.training.seq_len = given["steps"], 64
    config.training.disable_cuda_graphs = True
    config.training.dtype = "float32"
    config.training.mixed_precision_param = "float32"
    config.compile.enable, config.compile.backend = given.get("compile", False), "aot_eager"
    config.validator.dataloader, config.validator.steps = Tokens.Config(), 2
    config.validator.enable, config.validator.freq = True, 2
    if "Zero" in given.get("schedule", ""):
        config.activation_checkpoint = None  # no selective one runs backward in two parts
        config.validator.enable = False  # torch's own eval fails
    config.debug.seed = 1
    config.metrics.log_freq = 1
    if not given.get("chunked", True):
        config.loss = config.loss.loss_fn
    config.parallelism = ParallelismConfig(
        pipeline_parallel_schedule=given.get("schedule", "1F1B"),
        pipeline_parallel_degree=2,
        **given.get("parallel", {}),
    )
    spec = config.model_spec
    spec = replace(spec, parallelize_fn=partial(for_gloo, spec.parallelize_fn))
    for _, _, held_by, name in [*spec.model.traverse(FlexAttention.Config)]:
        setattr(held_by, name, ScaledDotProductAttention.Config())  # flex trains on GPUs alone
    if "schedir" in given:
        from schedir.integrations.torchtitan import pipelining_fn

        own = pipelining_fn(spec.pipelining_fn, given["schedir"], **given.get("options", {}))
        spec = replace(spec, pipelining_fn=own)
    config.model_spec = spec
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *given, device_ids=None, **others: barrier(*given, **others)
    losses = []
    trainer = config.build()
    trainer.metrics_processor.log = lambda step, loss, *rest, **others: losses.append(loss)
    trainer.metrics_processor.log_validation = lambda loss, step: losses.append(loss)
    try:
        trainer.train()
        if trainer.pp_has_last_stage:
            print("LOSSES", json.dumps(losses), flush=True)
    finally:
        if "schedir" in given:
            trainer.pp_schedule.close()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
