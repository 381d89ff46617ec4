"""The costs of actions and transfers in time, and the bytes of what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from schedir.errors import LoadError, SchedirError
from schedir.graph.paths import Prices
from schedir.ir import COPIES, HOMES, KINDS, Kind, Schedule
from schedir.simulator import files
from schedir.simulator.fit import fitted, fitted_times
from schedir.simulator.prices import prices
from schedir.simulator.samples import COSTS, Samples
from schedir.simulator.transformer import Transformer, split
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
    check_ways,
    field_of,
)


@attrs.frozen(kw_only=True)
class CostModel:
    """The cost of every kind of action and transfer, and the bytes of what is kept.

    Times are in any unit, the same for all; `unit` names it if it is known. Each cost is one number
    for all stages, or one per stage. `recompute=None` costs as much as `forward`. `overlapped` is
    the cost of an overlapped pair, by the stage of its FORWARD; None stands for the sum of the two.

    A transfer occupies its channel for `boundary_bytes` / `bandwidth`, and arrives `latency` later.
    `latency` and `bandwidth` are one number, or one per link, {(source rank, target rank): number}.
    `boundary_bytes` are those of one microbatch between stages s and s + 1.

    An OFFLOAD or RELOAD takes `activation_bytes` / `host_bandwidth`. The copies of one rank run one
    after the other. `copy_engine`, {rank: number of its engine}, names ranks that share an engine;
    their copies run one after the other too, in the order in which they would be posted if copies
    took no time.

    A (stage, microbatch) keeps `activation_bytes` from its FORWARD to its backward, or
    `input_bytes` until it is recomputed. Between its I and its W it keeps `deferred_bytes`: the
    inputs of the layers with weights, and the gradients of their outputs. None counts the whole
    activation. `weight_bytes`, `gradient_bytes` and `optimizer_bytes` are per stage; each weight
    version counts. Gradients are kept from the first B or W on, the `early_gradient_bytes` of them
    from the first I on: an I computes those of a checkpoint inside its stage, say. Of a stage that
    lists UNSHARDs a rank keeps the shard_ways-th part of these, with all weights from an UNSHARD to
    its RESHARD, and all gradients up to the REDUCE_GRAD.

    `samples` are the measurements that the costs were fitted on, None for costs that you give.

    The defaults are the textbook's: a backward takes twice as long as a forward, half of it for the
    input and half for the weights, and everything else is free.

    Raises TypeError or ValueError, with the name of the field, for anything but a finite number >=
    0.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    >>> costs = schedir.CostModel(forward=(1.0, 1.5), backward=(2.0, 3.0), unit="ms")
    >>> schedir.simulate(schedule, costs).makespan
    21.0
    """

    forward: PerStage = attrs.field(default=Kind.FORWARD.meaning.cost, **BY_STAGE)
    backward: PerStage = attrs.field(default=Kind.BACKWARD.meaning.cost, **BY_STAGE)
    backward_input: PerStage = attrs.field(default=Kind.BACKWARD_INPUT.meaning.cost, **BY_STAGE)
    backward_weight: PerStage = attrs.field(default=Kind.BACKWARD_WEIGHT.meaning.cost, **BY_STAGE)
    recompute: PerStage | None = attrs.field(default=None, **BY_STAGE)
    reduce_grad: PerStage = attrs.field(default=Kind.REDUCE_GRAD.meaning.cost, **BY_STAGE)
    unshard: PerStage = attrs.field(default=Kind.UNSHARD.meaning.cost, **BY_STAGE)
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
    early_gradient_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    optimizer_bytes: PerStage = attrs.field(default=0, **BY_STAGE)
    shard_ways: float = attrs.field(default=1, validator=check_ways)
    unit: Unit | None = attrs.field(default=None, validator=check_unit)
    samples: Samples | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.instance_of(Samples)),
        hash=False,
        repr=False,
    )

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file. Raises OSError if it can't be written."""
        files.write_costs(attrs.asdict(self, recurse=False), path)

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The costs in a JSON file, with the default for every field that the file leaves out.

        Raises ParseError, with line and column, for a file that is not JSON, for example because it
        is cut short. Raises LoadError for a file that can't be read, an unknown or repeated key,
        and anything but a finite number >= 0.
        """
        try:
            return cls(**files.read_costs(path, attrs.fields_dict(cls)))
        except (TypeError, ValueError) as error:
            raise LoadError(f"{path}: {error}") from None

    @classmethod
    def fit(cls, timelines: Sequence[Any]) -> CostModel:
        """The costs that measured runs show. `timelines` holds each run's Timelines, in the order
        of its steps.

        Each kind of action at each stage costs the median of its measured times, with the time that
        its rank needed before it could continue. A transfer costs the time that its receiver waited
        for it. Latency and bandwidth can be told apart if boundaries differ in size; otherwise all
        of it is latency. The first step of a run, in which tensor shapes are found, counts only if
        there is no other. Costs that no step shows are derived: half of a backward that was never
        split is the gradient of the input and half the gradient of the weights; a backward that was
        always split is the sum of its parts; a recomputation costs a forward; an overlapped pair
        costs the sum of its parts; sums of gradients and updates that were never seen are free.
        Bytes and unit are those of the timelines.

        `samples` holds the measurements, for `schedir.forecast`. The costs hold for this cut of the
        model into stages.

        Raises SchedirError if there is no timeline, if the timelines differ in stages or unit, or
        if they show no forward or backward of a stage.
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

        `layers` are split evenly into `stages`, or given for each stage. The other sizes are
        `hidden` h, `heads` a, `vocabulary` V, `sequence` s, and `microbatch` b samples;
        `feed_forward` is 4 h by default. A device computes `flops` × `utilisation` a second; choose
        `utilisation` to include the communication of tensor parallelism. `latency` is in seconds
        and `bandwidth` in bytes a second.

        The FLOPs of a layer, with t = `tensor` (Narayanan et al. 2021, arXiv 2104.04473, appendix;
        split into input and weights as in Qi et al. 2023, arXiv 2401.10241, table 1):

            FORWARD              (24 b s h² + 4 b s² h) / t
            BACKWARD_INPUT       (24 b s h² + 8 b s² h) / t
            BACKWARD_WEIGHT       24 b s h² / t           BACKWARD the sum of the two

        The head, on the last stage, adds 2 b s h V / t to each of the three. A recomputation costs
        a forward. `selective` computes the attention again in the backward (4 b s² h).

        The bytes that a layer keeps of a microbatch, with elements of `activation_element` = 2
        bytes (Korthikanti et al. 2022, arXiv 2205.05198, table 2):

            s b h (10 + 24 / t + 5 a s / (h t))           34 + 5 a s / h for t = 1
            s b h (34 / t + 5 a s / (h t))                with `sequence_parallel`
                                                          without the last term with `selective`

        The first stage keeps s b h more, for the embedding's dropout. The last stage keeps 4 s b h
        more for the last norm and the head, and 4 s b V / t for the logits in 32 bit (section 4.3).
        A boundary, and the input kept for a recomputation, have 2 s b h bytes; the input of the
        first stage is the tokens, 8 bytes each.

        For its W alone, a layer keeps the inputs of its products with weights, and the gradients of
        their outputs (Qi et al. 2023, table 1: 32 s b h for t = 1):

            s b h (8 + 24 / t)                            32 / t with `sequence_parallel`

        The head keeps its input, 2 s b h, and the gradient of the logits, 4 s b V / t.

        Parameters: 12 h² + 13 h in a layer, (V + s) h on the first stage, and V h + 2 h on the
        last, which uses the embedding again; matrices are divided by t. Mixed precision with Adam
        keeps 2 + 2 + 12 bytes of each parameter: `weight_element`, `gradient_element`,
        `optimizer_element` (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3.1; 4 for
        gradients summed in 32 bit). With `shard_optimizer`, ZeRO's first stage, the optimiser's
        bytes are divided by `data`, the number of data-parallel copies d. A sum of gradients over
        these copies is a ring's, 2 (d - 1) / d of the gradients' bytes / bandwidth, if bandwidth is
        one number. Updates are free.

        Raises ValueError or TypeError for sizes that are not whole numbers >= 1, layers that can't
        be split evenly, and parts that `tensor` does not divide.

        >>> import schedir
        >>> costs = schedir.CostModel.of_transformer(
        ...     layers=8, hidden=1024, heads=16, vocabulary=50257, sequence=1024, microbatch=1,
        ...     flops=300e12, utilisation=0.5, stages=4,
        ... )
        >>> costs.stages, costs.unit, costs.forward[0] < costs.forward[3]
        (4, 's', True)
        """
        sizes = locals()
        sizes["layers"] = split(layers, stages)
        sizes["feed_forward"] = 4 * hidden if feed_forward is None else feed_forward
        model = Transformer(
            **{field.name: sizes[field.name] for field in attrs.fields(Transformer)}
        )
        return cls(**model.costs(), latency=latency, bandwidth=bandwidth, unit="s")

    def prices(self, schedule: Schedule) -> Prices:
        """What every action of a complete schedule costs.

        Raises SchedirError if there are costs for another number of stages, or none for a link.
        """
        return prices(schedule, attrs.asdict(self, recurse=False))

    @property
    def stages(self) -> int | None:
        """The number of stages that there are costs for; None if each cost is one number for
        all."""
        every = attrs.asdict(self, recurse=False)
        every.pop("boundary_bytes")
        return next((len(value) for value in every.values() if isinstance(value, tuple)), None)

    @property
    def ranks(self) -> int | None:
        """The number of ranks that the costs were measured on; None for costs that you give."""
        return None if self.samples is None else 1 + int(self.samples.rank.max(initial=-1)) or None

    @property
    def sizes(self) -> Sizes:
        """The bytes alone."""
        return Sizes(**{name: getattr(self, field_of(name)) for name in attrs.fields_dict(Sizes)})


# Another number of stages.

OF_A_PART = tuple(
    name
    for name, field in attrs.fields_dict(CostModel).items()
    if str(field.type).startswith("PerStage") and name not in ("boundary_bytes", "input_bytes")
)
"""The costs and bytes that add up if two stages become one. The others belong to a boundary or a
link."""


def recut(costs: CostModel, stages: int, of: int) -> CostModel:
    """The costs of the same model, cut into `stages` stages.

    A cost that is one number is that of one of `of` equal stages. For example:

        4 stages        1   1   1   2        of forward = (1, 1, 1, 2)
        2 stages          2       3          exact: the sums
        8 stages       ½ ½ ½ ½ ½ ½ 1 1       as if each stage were made of equal parts

    A new boundary has the bytes of the next old boundary, or of the last one; the input that a new
    part keeps is that of the next old stage, or of the last one. The samples are dropped, because
    they belong to other stages.

    Raises SchedirError if neither number of stages is a multiple of the other.

    >>> from schedir import CostModel, simulator
    >>> simulator.recut(CostModel(forward=(1, 1, 1, 2)), stages=2, of=4).forward
    (2, 3)
    """
    changed: dict[str, Any] = {}
    for name in OF_A_PART:
        changed[name] = _parts(name, getattr(costs, name), stages, of)
    for name, every in (("input_bytes", 0), ("boundary_bytes", 1)):
        changed[name] = _edges(name, getattr(costs, name), stages, every)
    found = attrs.evolve(costs, **changed)
    return costs if found == costs else attrs.evolve(found, samples=None)


def _parts(name: str, value: PerStage | None, stages: int, of: int) -> PerStage | None:
    if value is None:
        return None
    if not isinstance(value, tuple):
        return _share(value * of, stages)
    if len(value) == stages:
        return value
    many, rest = divmod(len(value), stages)
    if not rest:
        return tuple(sum(value[s * many : (s + 1) * many]) for s in range(stages))
    many = _multiple(name, len(value), stages)
    return tuple(_share(one, many) for one in value for _ in range(many))


def _edges(name: str, value: PerStage, stages: int, every: int) -> PerStage:
    """The value at the beginning of each stage (`every` 0), or between two stages (`every` 1)."""
    if not isinstance(value, tuple) or len(value) == stages - every:
        return value
    had = len(value) + every
    many, rest = divmod(had, stages)
    if not rest:
        return value[every * (many - 1) :: many][: stages - every]
    many = _multiple(name, had, stages)
    # Stage s becomes `many`: where the first of them begins and the last ends was known before.
    return tuple(_edge(value, s, many, every) for s in range(stages - every))


def _edge(value: Sequence[float], stage: int, many: int, every: int) -> float:
    old, part = divmod(stage, many)
    known = part == (many - 1 if every else 0)
    after = old if known or every else old + 1
    return value[min(after, len(value) - 1)]


def _multiple(name: str, had: int, stages: int) -> int:
    many, rest = divmod(stages, had)
    if rest:
        raise SchedirError(
            f"{name} is given for {had} stages, which can't be made {stages}: neither is a "
            "multiple of the other"
        )
    return many


def _share(value: float, many: int) -> float:
    """A part of a cost, whole where that is exact."""
    return value // many if isinstance(value, int) and value % many == 0 else value / many


# What no run has shown.

_DERIVED = {
    "backward": "the sum of its two parts",
    "backward_input": "half of the backward",
    "backward_weight": "half of the backward",
    "recompute": "as the forward",
    "overlapped": "the sum of the two",
    "reduce_grad": "free, or as at other stages",
    "unshard": "free, or as at other stages",
    "optim_step": "free, or as at other stages",
    "host_bandwidth": "copies are free",
}


def unmeasured(schedule: Schedule, costs: CostModel) -> tuple[str, ...]:
    """The costs that the schedule uses but no run has shown: names of CostModel's fields, in their
    order.

    Empty if the costs were not fitted. A cost that was set by hand is not named. A schedule with
    fewer stages, each made of measured stages, has the sums of their costs. A schedule with more
    stages has parts of them, and no part was measured.

    >>> import schedir
    >>> schedule = schedir.build("zb-h1", ranks=2, microbatches=4)
    >>> schedir.simulator.unmeasured(schedule, schedir.CostModel())
    ()
    """
    if costs.samples is None or not isinstance(costs.forward, tuple):
        return ()
    stages = len(costs.forward)
    each, parts = divmod(stages, schedule.stages)
    used = _used(schedule)
    if parts or not each:
        fields = {_FIELDS[cost] for cost, _ in used}
        return tuple(name for name in dict.fromkeys(_FIELDS.values()) if name in fields)
    derived = {"host_bandwidth": math.inf, **fitted_times(costs.samples, stages)}
    found = {
        _FIELDS[cost]
        for cost, stage in used
        for one in range(stage * each, (stage + 1) * each)
        if (cost, one) not in costs.samples.groups
    }
    return tuple(
        name
        for name in dict.fromkeys(_FIELDS.values())
        if name in found and getattr(costs, name) == derived[name]
    )


def how_derived(names: Iterable[str]) -> str:
    """The costs in words, with what was used for each, in parentheses.

    >>> import schedir
    >>> schedir.simulator.how_derived(["backward_input"])
    'backward_input (half of the backward)'
    """
    return ", ".join(f"{name} ({_DERIVED[name]})" if name in _DERIVED else name for name in names)


_FIELDS = {
    **{cost: cost for cost in COSTS if hasattr(CostModel, cost)},
    **{kind.name.lower(): "host_bandwidth" for kind in COPIES},
}
"""The field of CostModel that holds the cost of each thing observed."""


def _used(schedule: Schedule) -> set[tuple[str, int]]:
    """The things in a schedule that have a cost, each with its stage."""
    columns = schedule.columns
    pairs = columns.shared & columns.is_kind(*HOMES)
    found = {("overlapped", stage) for stage in columns.stage[pairs].tolist()}
    kinds, stages = (column[~columns.shared].tolist() for column in (columns.kind, columns.stage))
    found |= {(KINDS[k].name.lower(), s) for k, s in {*zip(kinds, stages, strict=True)}}
    return {(cost, stage) for cost, stage in found if cost in _FIELDS}
