"""Whether stages run one after the other: tried without values before anything is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.training.pretrained.outline import fake_values, fakes_of, faking


def try_out(stages: Sequence[nn.Module], inputs: Mapping[str, Tensor], kind: str) -> None:
    """Run all stages of a model on fake tensors; `inputs` are those of a small microbatch.

    Raises ExecutionError where one does not run: the model's code may do with what stands for a
    module of the first stage what it can't do with hidden states.
    """
    whole = nn.ModuleList(stages).eval()
    with faking(whole), torch.no_grad():
        boundary: Any = fakes_of(inputs)
        for number, stage in enumerate(stages):
            try:
                boundary = torch.func.functional_call(stage, fake_values(stage), (boundary,))
            except Exception as error:  # of the model's own code
                raise ExecutionError(
                    f"{kind} can't be cut: stage {number} of {len(stages)} does not run without "
                    f"the modules of the others: {error}"
                ) from error
