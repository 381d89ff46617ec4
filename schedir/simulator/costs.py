"""What actions and transfers cost in time, and what is kept in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from schedir.errors import LoadError
from schedir.ir import Kind
from schedir.simulator import cost_file
from schedir.simulator.fit import fitted
from schedir.simulator.samples import Samples
from schedir.simulator.transformer import Device, Transformer, split
from schedir.simulator.values import (
    BY_LINK,
    BY_STAGE,
    ENGINES,
    PerLink,
    PerStage,
    Sizes,
    Unit,
    check_bandwidth,
    check_unit,
)


@attrs.frozen(kw_only=True)
class CostModel:
    """The cost of every kind of action and transfer, and the bytes of what is kept.

    Times are in any unit, the same for all: `unit` says which where that is known. Each is one
    number for all stages, or one per stage. `recompute` of None is as `forward`; `overlapped`, that
    of an overlapped pair, by the stage of its FORWARD, is by default the sum of the two.

    A transfer occupies its channel for `boundary_bytes` / `bandwidth`, and arrives `latency` after
    that: each of these two is one number, or one per link, {(source rank, target rank): number}.
    `boundary_bytes` are those of one microbatch between stage s and s + 1.

    An OFFLOAD or RELOAD takes `activation_bytes` / `host_bandwidth`. Copies of one rank go one
    after the other; those of ranks that share an engine do too, where `copy_engine`, {rank: number
    of its engine}, says so: in the order in which they would be posted if no copy took any time.

    A (stage, microbatch) keeps `activation_bytes` from its FORWARD to its backward, or
    `input_bytes` until it is recomputed. Between its I and its W it keeps `deferred_bytes`: what
    the layers with weights were given, and the gradients of what they made; None is as
    `activation_bytes`. `weight_bytes`, `gradient_bytes` and `optimizer_bytes` are per stage; each
    weight version counts.

    `samples` are what the costs were fitted on, None for those that were given.

    The defaults are the textbook's: a backward takes twice as long as a forward, half of it for
    the input and half for the weights, and the rest is free.

    Raises TypeError or ValueError for what is no finite number >= 0, with the name of the field.
    """

    forward: PerStage = attrs.field(default=Kind.FORWARD.meaning.cost, **BY_STAGE)
    backward: PerStage = attrs.field(default=Kind.BACKWARD.meaning.cost, **BY_STAGE)
    backward_input: PerStage = attrs.field(default=Kind.BACKWARD_INPUT.meaning.cost, **BY_STAGE)
    backward_weight: PerStage = attrs.field(default=Kind.BACKWARD_WEIGHT.meaning.cost, **BY_STAGE)
    recompute: PerStage | None = attrs.field(default=None, **BY_STAGE)
    reduce_grad: PerStage = attrs.field(default=Kind.REDUCE_GRAD.meaning.cost, **BY_STAGE)
    optim_step: PerStage = attrs.field(default=Kind.OPTIM_STEP.meaning.cost, **BY_STAGE)
    overlapped: PerStage | None = attrs.field(default=None, **BY_STAGE)
    latency: PerLink = attrs.field(default=0, **BY_LINK)
    bandwidth: PerLink = attrs.field(default=math.inf, **BY_LINK)
    host_bandwidth: float = attrs.field(default=math.inf, validator=check_bandwidth)
    copy_engine: Mapping[int, int] | None = attrs.field(default=None, **ENGINES)
    boundary_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    input_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    activation_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    deferred_bytes: PerStage | None = attrs.field(default=None, **BY_STAGE)
    weight_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    gradient_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    optimizer_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    unit: Unit | None = attrs.field(default=None, validator=check_unit)
    samples: Samples | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.instance_of(Samples)),
        hash=False,
        repr=False,
    )

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file. Raises OSError where it can't be written."""
        cost_file.write(attrs.asdict(self, recurse=False), path)

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The costs in a JSON file: of what it leaves out, the default.

        Raises ParseError, with line and column, for what is no JSON, as where the file is cut
        short, LoadError for a file that can't be read, for a key that is unknown or stands there
        twice, and for what is no finite number >= 0.
        """
        try:
            return cls(**cost_file.read(path, attrs.fields_dict(cls)))
        except (TypeError, ValueError) as error:
            raise LoadError(f"{path}: {error}") from None

    @classmethod
    def fit(cls, timelines: Sequence[Any]) -> CostModel:
        """The costs that measured runs show, the Timelines of each run in the order of its steps.

        Each kind of action at each stage costs the median of what it took, with what its rank then
        did before it could go on; a transfer what its receiver waited for. Latency and bandwidth
        are told apart where boundaries differ in size; else all is latency. The first step of a
        measured run counts only where it is alone, as it finds the shapes of tensors. What no step
        shows is derived: a backward that was never split is half gradient of the input and half
        gradient of the weights, one that was always split their sum; a recomputation is as the
        forward; an overlapped pair is the sum of its parts; sums of gradients and updates that were
        never seen are free. Bytes are those of the timelines, and the unit is theirs.

        What was observed is kept as `samples`, for `schedir.forecast`. The costs are those of one
        cut of the model into stages.

        Raises SchedirError where there is no timeline, where they differ in stages or unit, or show
        no forward or backward of a stage.
        """
        return cls(**fitted(timelines))

    @classmethod
    def of_transformer(
        cls,
        *,
        layers: int | Sequence[int],
        hidden: int,
        heads: int,
        vocabulary: int,
        sequence: int,
        microbatch: int,
        flops: float,
        utilisation: float = 1,
        stages: int | None = None,
        feed_forward: int | None = None,
        latency: PerLink = 0,
        bandwidth: PerLink = math.inf,
        tensor: int = 1,
        sequence_parallel: bool = False,
        selective: bool = False,
        data: int = 1,
        shard_optimizer: bool = False,
        activation_element: float = 2,
        weight_element: float = 2,
        gradient_element: float = 2,
        optimizer_element: float = 12,
    ) -> CostModel:
        """The costs of a GPT-like transformer on paper, in seconds and bytes of one device.

        `layers` are split evenly into `stages`, or are given for each stage; `hidden` h, `heads` a,
        `vocabulary` V, `sequence` s, `microbatch` b samples; `feed_forward` is 4 h by default. A
        device computes `flops` × `utilisation` a second; what tensor parallelism communicates is
        for `utilisation` to hold. `latency` is in seconds and `bandwidth` in bytes a second.

        FLOPs of a layer (Narayanan et al. 2021, arXiv 2104.04473, appendix; split into input and
        weights as in Qi et al. 2023, arXiv 2401.10241, table 1), t = `tensor`:

            FORWARD              (24 b s h² + 4 b s² h) / t
            BACKWARD_INPUT       (24 b s h² + 8 b s² h) / t
            BACKWARD_WEIGHT       24 b s h² / t           BACKWARD the sum of the two

        and of the head, on the last stage, 2 b s h V / t in each of the three. A recomputation
        costs a forward. `selective` computes the attention once more in the backward (4 b s² h).

        Bytes that a layer keeps of a microbatch (Korthikanti et al. 2022, arXiv 2205.05198, table
        2), elements of `activation_element` = 2 bytes:

            s b h (10 + 24 / t + 5 a s / (h t))           34 + 5 a s / h for t = 1
            s b h (34 / t + 5 a s / (h t))                with `sequence_parallel`
                                                          without the last term with `selective`

        the first stage s b h more, for the embedding's dropout, and the last one 4 s b h for the
        last norm and the head, and 4 s b V / t for the logits in 32 bit (section 4.3). What goes
        from stage to stage, and what is kept to recompute from, is 2 s b h, of the first stage the
        tokens in 8 bytes each.

        Of that a layer needs for its W alone (Qi et al. 2023, table 1: 32 s b h for t = 1) the
        inputs of its products with weights, and the gradients of what these made:

            s b h (8 + 24 / t)                            32 / t with `sequence_parallel`

        and the head its input, 2 s b h, and the gradient of the logits, 4 s b V / t.

        Parameters: 12 h² + 13 h in a layer, (V + s) h on the first stage, V h + 2 h on the last,
        where the embedding is used once more; matrices are divided by t. Mixed precision with Adam
        keeps 2 + 2 + 12 bytes of each: `weight_element`, `gradient_element`, `optimizer_element`
        (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3.1; 4 where gradients are summed
        in 32 bit). With `shard_optimizer`, ZeRO's first stage, the last is divided by `data`, the
        number of data-parallel copies. A sum of gradients over them is a ring's, 2 (d - 1) / d of
        their bytes / bandwidth, where that is one number. Updates are free.

        Raises ValueError or TypeError for sizes that are no whole numbers >= 1, layers that can't
        be split evenly, and parts that `tensor` does not divide.
        """
        model = Transformer(
            layers=split(layers, stages),
            hidden=hidden,
            heads=heads,
            vocabulary=vocabulary,
            sequence=sequence,
            microbatch=microbatch,
            feed_forward=4 * hidden if feed_forward is None else feed_forward,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            selective=selective,
            activation_element=activation_element,
        )
        device = Device(
            flops=flops,
            utilisation=utilisation,
            data=data,
            shard_optimizer=shard_optimizer,
            weight_element=weight_element,
            gradient_element=gradient_element,
            optimizer_element=optimizer_element,
        )
        return cls(**device.costs(model, bandwidth), latency=latency, bandwidth=bandwidth, unit="s")

    @property
    def stages(self) -> int | None:
        """How many stages there are costs for; None where each is one number for all."""
        every = attrs.asdict(self, recurse=False)
        every.pop("boundary_bytes")
        return next((len(value) for value in every.values() if isinstance(value, tuple)), None)

    @property
    def sizes(self) -> Sizes:
        """The bytes alone."""
        return Sizes(
            self.boundary_bytes,
            self.input_bytes,
            self.activation_bytes,
            self.weight_bytes,
            self.gradient_bytes,
            self.optimizer_bytes,
            self.deferred_bytes,
        )
