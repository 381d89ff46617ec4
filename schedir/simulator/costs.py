"""The costs of actions and transfers in time, and the bytes of what is kept.

A file of costs is an object with a key for each field, in JSON:

    {
      "forward": [1.5, 2],
      "latency": {"0->1": 0.1, "1->0": 0.2},
      "bandwidth": "inf",
      ...
    }

A field is a number, or a list with one for each stage (or boundary). What is by link has one key
`source->target` for each, `copy_engine` one for each rank. What is left out has its default.
`samples` are the columns of what the costs were fitted on.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import attrs
import numpy as np

from schedir.errors import LoadError, SchedirError
from schedir.files import write_text
from schedir.graph.compile import Transfers, graph_of
from schedir.graph.paths import Prices
from schedir.ir import COMPUTE, COPIES, HOMES, KINDS, Kind, Schedule
from schedir.ir.kinds import STAGE_WIDE, TIMED, moved
from schedir.ir.tokens import clip
from schedir.simulator.fit import fitted, fitted_times
from schedir.simulator.samples import COSTS, Samples, costs_and_stages, of_plain
from schedir.simulator.values import (
    Numbers,
    PerLink,
    PerStage,
    Sizes,
    Unit,
    by,
    check_unit,
    expect_stages,
    field_of,
    kind_of,
    one_each,
    read_json,
)

_FORWARDS = {kind.cost_name: kind.meaning.cost for kind in TIMED}
"""By the name of its cost, how many forwards a kind takes if nothing else is known."""
_KEY = re.compile(r"(\d{1,9})(?:->(\d{1,9}))?", re.ASCII)


def _with_all_kinds(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """The fields, and one like that of recomputations for each kind of action that has none."""
    names = [field.name for field in fields]
    like, place = fields[names.index("recompute")], names.index("overlapped")
    others = [like.evolve(name=name, alias=name) for name in _FORWARDS if name not in names]
    return fields[:place] + others + fields[place:]


@attrs.frozen(kw_only=True, field_transformer=_with_all_kinds)
class CostModel:
    """The cost of every kind of action and transfer, and the bytes of what is kept.

    Times are in any unit, the same for all; `unit` names it if it is known. Each cost is one number
    for all stages, or one per stage. `recompute=None` costs as much as `forward`. `overlapped` is
    the cost of an overlapped pair, by the stage of its FORWARD; None stands for the sum of the two.
    A kind of action that is not named here has a field of its own name, None by default, which
    stands for as many forwards as the table of kinds says.

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

    forward: PerStage = by("stage", Kind.FORWARD.meaning.cost)
    backward: PerStage = by("stage", Kind.BACKWARD.meaning.cost)
    backward_input: PerStage = by("stage", Kind.BACKWARD_INPUT.meaning.cost)
    backward_weight: PerStage = by("stage", Kind.BACKWARD_WEIGHT.meaning.cost)
    recompute: PerStage | None = by("stage", None)
    reduce_grad: PerStage = by("stage", Kind.REDUCE_GRAD.meaning.cost)
    unshard: PerStage = by("stage", Kind.UNSHARD.meaning.cost)
    optim_step: PerStage = by("stage", Kind.OPTIM_STEP.meaning.cost)
    overlapped: PerStage | None = by("stage", None)
    latency: PerLink = by("link")
    bandwidth: PerLink = by("link", math.inf)
    host_bandwidth: float = by("all", math.inf)
    copy_engine: Mapping[int, int] | None = by("rank", None)
    boundary_bytes: PerStage = by("boundary")
    input_bytes: PerStage = by("start")
    activation_bytes: PerStage = by("stage")
    deferred_bytes: PerStage | None = by("stage", None)
    weight_bytes: PerStage = by("stage")
    gradient_bytes: PerStage = by("stage")
    early_gradient_bytes: PerStage = by("stage")
    optimizer_bytes: PerStage = by("stage")
    shard_ways: float = by("all", 1)
    unit: Unit | None = attrs.field(default=None, validator=check_unit)
    samples: Samples | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.instance_of(Samples)),
        hash=False,
        repr=False,
    )

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file. Raises OSError if it can't be written."""
        lines = [
            f"  {json.dumps(name)}: {json.dumps(_written(value), allow_nan=False)}"
            for name, value in attrs.asdict(self, recurse=False).items()
            if name != "samples" or value is not None
        ]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The costs in a JSON file, with the default for every field that the file leaves out.

        Raises ParseError, with line and column, for a file that is not JSON, for example because it
        is cut short. Raises LoadError for a file that can't be read, an unknown or repeated key,
        and anything but a finite number >= 0.
        """
        try:
            return cls(**_read(read_json(path)))
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

        The model is that of Narayanan et al. (2021, arXiv 2104.04473, section 5.1 and appendix):
        token and position embeddings, layers of attention and a feed-forward part with biases,
        dropout and two layer norms, a last layer norm, and a head that is the token embedding once
        more.

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
        given = locals()
        each = _split(layers, stages)
        feed_forward = given["feed_forward"] = 4 * hidden if feed_forward is None else feed_forward
        for name in _WHOLE:
            _expect_whole(name, given[name])
        for name in ("hidden", "heads", "feed_forward"):
            if given[name] % tensor:
                raise ValueError(
                    f"{name} must be a multiple of tensor, {tensor}, not {given[name]}"
                )
        if not (_is_real(flops) and 0 < flops < math.inf):
            raise ValueError(f"flops must be a finite number > 0, not {flops!r}")
        if not (_is_real(utilisation) and 0 < utilisation <= 1):
            raise ValueError(f"utilisation must be above 0 and at most 1, not {utilisation!r}")

        def by_stage(layer: float, first: float, last: float, per: float = 1) -> tuple[float, ...]:
            """The sum over each stage's layers, plus what the first and the last stage have in
            addition; times `per`."""
            found = [many * layer for many in each]
            found[0] += first
            found[-1] += last
            return tuple(one * per for one in found)

        tokens = sequence * microbatch
        embedded = tokens * hidden

        # How long each stage computes. 24 b s h² where the feed-forward part has 4 h.
        multiplied = 4 * embedded * (2 * hidden + feed_forward) / tensor
        attended = 4 * embedded * sequence / tensor

        def seconds(attentions: int) -> tuple[float, ...]:
            """`attentions` is the number of products of activations with each other for one product
            with weights: 1 in the forward, 2 in the backward for the input (3 if it computes the
            forward's again), 0 in the backward for the weights."""
            head = 2 * embedded * vocabulary / tensor
            many = by_stage(multiplied + attentions * attended, 0, head)
            return tuple(one / (flops * utilisation) for one in many)

        of_input, of_weight = seconds(3 if selective else 2), seconds(0)

        # The parameters of each stage on one device. The last terms of a layer are the rest of the
        # biases, and two norms. The head is a copy of the embedding, where they are on two stages.
        embedding = vocabulary * hidden / tensor
        matrices = 4 * hidden * hidden + 2 * hidden * feed_forward
        parameters = partial(
            by_stage,
            (matrices + 3 * hidden + feed_forward) / tensor + 6 * hidden,
            embedding + sequence * hidden,
            (embedding if len(each) > 1 else 0) + 2 * hidden,
        )
        # A ring passes each byte on twice, but for what every copy has already. No bandwidth at all
        # is for the cost model to refuse.
        speed = bandwidth if _is_real(bandwidth) and bandwidth else math.inf
        ring = 2 * (data - 1) / data / speed
        gradient = parameters(gradient_element)

        # The bytes of a microbatch.
        element, around = activation_element, tensor if sequence_parallel else 1
        boundary, logits = element * embedded / around, 4 * tokens * vocabulary / tensor
        # Queries, keys, values and the projection's input; both inputs of the feed-forward part's
        # second half.
        shared = (4 * element + 2 * element * feed_forward / hidden) / tensor
        # The inputs of attention, feed-forward part and norms, and two masks of dropout.
        whole = (4 * element + 2) / around
        # Softmax, its dropout's mask and output.
        scores = (2 * element + 1) * (heads * sequence**2 * microbatch) / tensor
        layer = embedded * (shared + whole) + (0 if selective else scores)
        # Queries, keys, values, the projection's input, and what is between the feed-forward parts;
        # the inputs of attention and feed-forward part, and what these add to the residual.
        deferred = element * embedded * ((4 + 2 * feed_forward / hidden) / tensor + 4 / around)
        return cls(
            forward=seconds(1),
            backward=tuple(map(sum, zip(of_input, of_weight, strict=True))),
            backward_input=of_input,
            backward_weight=of_weight,
            reduce_grad=tuple(many * ring for many in gradient),
            latency=latency,
            bandwidth=bandwidth,
            boundary_bytes=boundary,
            input_bytes=(8 * tokens, *[boundary] * (len(each) - 1)),
            activation_bytes=by_stage(
                layer, embedded / around, 2 * element * embedded / around + logits
            ),
            # The inputs of products with weights, and the gradients of what these made.
            deferred_bytes=by_stage(deferred, 0, boundary + logits),
            weight_bytes=parameters(weight_element),
            gradient_bytes=gradient,
            optimizer_bytes=tuple(
                one / (data if shard_optimizer else 1) for one in parameters(optimizer_element)
            ),
            unit="s",
        )

    def by_stage(self, name: str, many: int) -> tuple[float, ...]:
        """The field `name`, as one number for each of so many stages, or of `boundary_bytes` for
        each boundary. A cost that is None is derived: as many forwards as the table of kinds says
        for that kind; so are `deferred_bytes`, all `activation_bytes`.

        Raises SchedirError if there are costs for another number of stages.

        >>> import schedir
        >>> schedir.CostModel(forward=(1, 2)).by_stage("recompute", 2)
        (1, 2)
        """
        value = getattr(self, name)
        if value is not None:
            return one_each(name, value, many)
        if name == "deferred_bytes":
            return self.by_stage("activation_bytes", many)
        return tuple(_FORWARDS[name] * one for one in self.by_stage("forward", many))

    def way(self, source: int, target: int, size: float, where: str = "") -> tuple[float, float]:
        """How long a transfer of `size` bytes takes from rank `source` to rank `target`, and for
        how long it occupies its channel, in the costs' unit of time; both 0 within a rank.

        Raises SchedirError for a link that has no number; `where` ends the message's sentence.

        >>> import schedir
        >>> schedir.CostModel(latency=1, bandwidth={(0, 1): 4}).way(0, 1, size=8)
        (3, 2)
        """
        if source == target:
            return 0, 0
        found = []
        for name in ("latency", "bandwidth"):
            value: PerLink = getattr(self, name)
            if isinstance(value, Mapping):
                link = source, target
                if link not in value:
                    raise SchedirError(f"{name} has no number for the link {link}{where}: add it")
                value = value[link]
            found.append(value)
        latency, bandwidth = found
        holds = _quotient(size, bandwidth)
        return latency + holds, holds

    def prices(self, schedule: Schedule) -> Prices:
        """What every action of a complete schedule costs.

        Raises SchedirError if there are costs for another number of stages, or none for a link.
        """
        expect_stages(self, schedule)
        columns, transfers, stages = schedule.columns, graph_of(schedule).transfers, schedule.stages
        rows: list[Sequence[float]] = [(0,) * stages] * len(KINDS)
        for code in np.flatnonzero(np.bincount(columns.kind)).tolist():
            kind = KINDS[code]
            if kind in COPIES:
                sizes = self.sizes.of(moved(kind.meaning), stages)
                rows[code] = [_quotient(size, self.host_bandwidth) for size in sizes]
            elif kind.cost_name in _FORWARDS:
                rows[code] = self.by_stage(kind.cost_name, stages)
        takes = _of_entries(schedule, np.array(rows)[columns.kind, columns.stage], self)
        arrive, busy = _of_transfers(schedule, transfers, self)
        takes = takes.astype(np.result_type(takes, arrive), copy=False)
        holds = takes.copy()
        for ends in (transfers.send, transfers.receive):
            takes[ends], holds[ends] = arrive, busy
        return Prices(takes, holds)

    @property
    def stages(self) -> int | None:
        """The number of stages that there are costs for; None if each cost is one number for
        all."""
        every = (getattr(self, name) for name in (*OF_A_PART, "input_bytes"))
        return next((len(value) for value in every if isinstance(value, tuple)), None)

    @property
    def ranks(self) -> int | None:
        """The number of ranks that the costs were measured on; None for costs that you give."""
        return None if self.samples is None else 1 + int(self.samples.rank.max(initial=-1)) or None

    @property
    def sizes(self) -> Sizes:
        """The bytes alone."""
        return Sizes(**{name: getattr(self, field_of(name)) for name in attrs.fields_dict(Sizes)})


OF_A_PART = tuple(
    field.name for field in attrs.fields(CostModel) if field.metadata.get("by") == "stage"
)
"""The costs and bytes that add up if two stages become one. The others belong to a boundary or a
link."""


# Of a transformer.

_WHOLE = "hidden", "heads", "vocabulary", "sequence", "microbatch", "feed_forward", "tensor", "data"


def _split(layers: int | Sequence[int], stages: int | None) -> tuple[int, ...]:
    """The layers of each stage. Raises ValueError for layers that can't be split evenly."""
    if not isinstance(layers, int):
        found = tuple(layers)
        if stages is not None and stages != len(found):
            raise ValueError(f"layers are given for {len(found)} stages, not {stages}")
    elif stages is None:
        raise ValueError("pass `stages`, the number of stages to split the layers into")
    else:
        _expect_whole("stages", stages)
        if layers % stages:
            raise ValueError(
                f"{layers} layers can't be split evenly into {stages} stages: give those of each "
                "stage"
            )
        found = (layers // stages,) * stages
    if not found or any(type(each) is not int or each < 0 for each in found):
        raise ValueError(f"layers must be one number >= 0 for each stage, not {found!r}")
    return found


def _expect_whole(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an int >= 1, not {value!r}")


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# In files.


def _written(value: Any) -> Any:
    if isinstance(value, Samples):
        return value.plain()
    if isinstance(value, Mapping):
        return {
            "->".join(map(str, key if isinstance(key, tuple) else (key,))): _written(one)
            for key, one in value.items()
        }
    return "inf" if value == math.inf else value


def _read(content: object) -> dict[str, Any]:
    """The fields in the content of a file. Raises ValueError for keys that are no fields."""
    known = attrs.fields_dict(CostModel)
    if not isinstance(content, dict):
        raise ValueError(f'costs must be an object, as in {{"forward": 1}}, not {clip(content)}')
    for name in content:
        if name not in known:
            if other := kind_of(dict.fromkeys(content.keys() - known)):
                raise ValueError(f"no costs{other}")
            close = difflib.get_close_matches(name, known, n=1)
            mend = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"unknown key {clip(name)}; {mend}")
    return {name: _field(name, value) for name, value in content.items()}


def _field(name: str, value: Any) -> Any:
    if name == "samples":
        return None if value is None else of_plain(value)
    if isinstance(value, dict):
        return {_key(name, key): _field(name, one) for key, one in value.items()}
    return math.inf if value == "inf" else value


def _key(name: str, key: str) -> int | tuple[int, int]:
    """A rank, or a link."""
    found, of_rank = _KEY.fullmatch(key), name == "copy_engine"
    if found is None or of_rank != (found[2] is None):
        form = (
            'rank is given as "0"' if of_rank else 'link is given as "0->1", from rank 0 to rank 1'
        )
        raise ValueError(f"{name}: a {form}, not {clip(key)}")
    return int(found[1]) if of_rank else (int(found[1]), int(found[2]))


# The prices of a list.


def _quotient(size: float, bandwidth: float) -> float:
    """How long bytes take: an integer where all are and nothing remains."""
    if not size or bandwidth == math.inf:
        return 0
    return size // bandwidth if size % bandwidth == 0 else size / bandwidth


def _of_entries(schedule: Schedule, alone: Numbers, costs: CostModel) -> Numbers:
    """What every action takes with those that it overlaps, where it takes so long alone."""
    columns, stages = schedule.columns, schedule.stages
    if not columns.together:
        return alone
    second = np.flatnonzero(columns.joined & columns.is_kind(*COMPUTE))
    both = alone[second - 1] + alone[second]
    if costs.overlapped is not None:
        forward = second - columns.is_kind(*HOMES)[second - 1]
        both = np.array(costs.by_stage("overlapped", stages))[columns.stage[forward]]
    takes = alone.astype(np.result_type(alone, both))
    takes[second - 1] = takes[second] = both
    return takes


def _of_transfers(
    schedule: Schedule, transfers: Transfers, costs: CostModel
) -> tuple[Numbers, Numbers]:
    """How long each transfer takes, and occupies its channel."""
    sizes = costs.by_stage("boundary_bytes", schedule.stages - 1)
    # An activation goes on to its stage, a gradient back to it.
    boundary = transfers.stage - ~transfers.is_gradient
    links = transfers.source * schedule.ranks + transfers.target
    key = links * schedule.stages + boundary
    if all(
        isinstance(one, int | float)
        for one in (costs.boundary_bytes, costs.latency, costs.bandwidth)
    ):
        key = key[:1]  # one stands for all
    used, which = np.unique(key, return_inverse=True)
    ways: list[tuple[float, float]] = [(0, 0)]
    for link, crossed in (divmod(one, schedule.stages) for one in used.tolist()):
        a, b = divmod(link, schedule.ranks)
        where = f", on which {schedule.name} sends from rank {a} to rank {b}"
        ways.append(costs.way(a, b, sizes[crossed], where))
    arrive, busy = np.array(ways).T
    return arrive[which + 1], busy[which + 1]


# Another number of stages.


def recut(costs: CostModel, stages: int, of: int) -> CostModel:
    """The costs of the same model, cut into `stages` stages.

    A cost that is one number is that of each of the stages that the lists are of, or if there is no
    list, of one of `of` equal stages. For example:

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
    of = costs.stages or of
    changed: dict[str, Any] = {}
    for field in attrs.fields(CostModel):
        name, what = field.name, field.metadata.get("by")
        if what == "stage":
            changed[name] = _parts(name, getattr(costs, name), stages, of)
        elif what in ("start", "boundary"):
            changed[name] = _edges(name, getattr(costs, name), stages, int(what == "boundary"))
    found = attrs.evolve(costs, **changed)
    return costs if found == costs else attrs.evolve(found, samples=None)


def _parts(name: str, value: PerStage | None, stages: int, of: int) -> PerStage | None:
    if value is None:
        return None
    if not isinstance(value, tuple):
        return _share(value * of, stages)
    _expect_multiple(name, len(value), stages)
    many = max(stages // len(value), 1)
    parts = [_share(one, many) for one in value for _ in range(many)]
    each = len(parts) // stages
    return tuple(sum(parts[s * each : (s + 1) * each]) for s in range(stages))


def _edges(name: str, value: PerStage, stages: int, every: int) -> PerStage:
    """The value at the beginning of each stage (`every` 0), or between two stages (`every` 1): of
    the old edge at the same place, or of the next one, or of the last."""
    if not isinstance(value, tuple):
        return value
    had, last = len(value) + every, len(value) - 1
    _expect_multiple(name, had, stages)
    after = (-(-(s + every) * had // stages) - every for s in range(stages - every))
    return tuple(value[min(edge, last)] for edge in after) or 0


def _expect_multiple(name: str, had: int, stages: int) -> None:
    if had % stages and stages % had:
        raise SchedirError(
            f"{name} is given for {had} stages, which can't be made {stages}: neither is a "
            "multiple of the other"
        )


def _share(value: float, many: int) -> float:
    """A part of a cost, whole where that is exact."""
    return value // many if isinstance(value, int) and value % many == 0 else value / many


# What no run has shown.


def _instead(kind: Kind) -> str:
    """What a kind costs that no run has shown."""
    cost = kind.meaning.cost
    forwards = "as the forward" if cost == 1 else f"{cost} forwards" if cost else "free"
    return f"{forwards}, or as at other stages" if kind in STAGE_WIDE else forwards


_DERIVED = {
    **{kind.cost_name: _instead(kind) for kind in TIMED if kind not in HOMES},
    "backward": "the sum of its two parts",
    "backward_input": "half of the backward",
    "backward_weight": "half of the backward",
    "overlapped": "the sum of the two",
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
    derived = {field.name: field.default for field in attrs.fields(CostModel)}
    derived |= fitted_times(costs.samples, stages)
    observed = costs_and_stages(schedule.columns, schedule.columns.heads)
    found = set()
    for code, stage in {*zip(*(column.tolist() for column in observed), strict=True)}:
        if field := _FIELDS.get(COSTS[code]):
            made_of = range(stage * each, (stage + 1) * each)
            seen = all((COSTS[code], one) in costs.samples.groups for one in made_of)
            if parts or not (seen or getattr(costs, field) != derived[field]):
                found.add(field)
    return tuple(name for name in dict.fromkeys(_FIELDS.values()) if name in found)


def how_derived(names: Iterable[str]) -> str:
    """The costs in words, with what was used for each, in parentheses.

    >>> import schedir
    >>> schedir.simulator.how_derived(["backward_input"])
    'backward_input (half of the backward)'
    """
    return ", ".join(f"{name} ({_DERIVED[name]})" if name in _DERIVED else name for name in names)


_FIELDS = {
    **{cost: cost for cost in COSTS if hasattr(CostModel, cost)},
    **{kind.cost_name: "host_bandwidth" for kind in COPIES},
}
"""The field of CostModel that holds the cost of each thing observed."""
