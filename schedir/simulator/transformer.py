"""Closed forms of a GPT-like transformer: what each stage computes and keeps, from its sizes.

The model is that of Narayanan et al. (2021, arXiv 2104.04473, section 5.1 and appendix): token and
position embeddings, layers of attention and a feed-forward part with biases, dropout and two layer
norms, a last layer norm, and a head that is the token embedding once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

_WHOLE = ("hidden", "heads", "vocabulary", "sequence", "microbatch", "feed_forward", "tensor")


def _check_layers(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not value or any(type(each) is not int or each < 0 for each in value):
        raise ValueError(f"layers must be one number >= 0 for each stage, not {value!r}")


@attrs.frozen(kw_only=True)
class Transformer:
    """The sizes of a model, as they are divided over devices.

    `layers` are those of each stage. `tensor` devices share each stage (Megatron's tensor
    parallelism), what is left over too where `sequence_parallel` is set. `selective`: the scores
    of the attention are computed again in the backward, and not kept. An activation's element has
    `activation_element` bytes.
    """

    layers: tuple[int, ...] = attrs.field(validator=_check_layers)
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    microbatch: int
    feed_forward: int
    tensor: int = 1
    sequence_parallel: bool = False
    selective: bool = False
    activation_element: float = 2

    def __attrs_post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int >= 1, not {value!r}")
        for name in ("hidden", "heads", "feed_forward"):
            many = getattr(self, name)
            if many % self.tensor:
                raise ValueError(f"{name} must be a multiple of tensor, {self.tensor}, not {many}")

    @property
    def _embedded(self) -> int:
        """The elements of a microbatch between two layers: s b h."""
        return self.sequence * self.microbatch * self.hidden

    @property
    def _scores(self) -> float:
        """The elements of a layer's attention scores: a s² b."""
        return self.heads * self.sequence**2 * self.microbatch

    def _by_stage(self, layer: float, first: float, last: float) -> tuple[float, ...]:
        """What layers have, by stage, and what the first and the last stage have besides."""
        found = [layers * layer for layers in self.layers]
        found[0] += first
        found[-1] += last
        return tuple(found)

    def parameters(self) -> tuple[float, ...]:
        """Those of each stage on one device."""
        h, f, t = self.hidden, self.feed_forward, self.tensor
        matrices = 4 * h * h + 2 * h * f
        layer = (matrices + 3 * h + f) / t + 6 * h  # the rest of the biases, and two norms
        embedding = self.vocabulary * h / t
        # The head is a copy of the embedding, where they are on two stages.
        head = embedding if len(self.layers) > 1 else 0
        return self._by_stage(layer, embedding + self.sequence * h, head + 2 * h)

    def flops(self) -> tuple[float, ...]:
        """Of each stage's forward of one microbatch, on one device."""
        head = 2 * self._embedded * self.vocabulary / self.tensor
        return self._by_stage(self._multiplied + self._attended, 0, head)

    def input_flops(self) -> tuple[float, ...]:
        """Of the backward for the input; with `selective` the attention's forward once more."""
        head = 2 * self._embedded * self.vocabulary / self.tensor
        attended = (3 if self.selective else 2) * self._attended
        return self._by_stage(self._multiplied + attended, 0, head)

    def weight_flops(self) -> tuple[float, ...]:
        """Of the backward for the weights: attention's own products have none."""
        head = 2 * self._embedded * self.vocabulary / self.tensor
        return self._by_stage(self._multiplied, 0, head)

    @property
    def _multiplied(self) -> float:
        """A layer's products with weights: 24 b s h² where the feed-forward part has 4 h."""
        return 4 * self._embedded * (2 * self.hidden + self.feed_forward) / self.tensor

    @property
    def _attended(self) -> float:
        """A layer's products of activations with each other: 4 b s² h."""
        return 4 * self._embedded * self.sequence / self.tensor

    def activations(self) -> tuple[float, ...]:
        """The bytes that each stage keeps of a microbatch for its backward, on one device."""
        e, t = self.activation_element, self.tensor
        around = t if self.sequence_parallel else 1
        # Queries, keys, values and the projection's input; both inputs of the feed-forward part's
        # second half.
        shared = (4 * e + 2 * e * self.feed_forward / self.hidden) / t
        # The inputs of attention, feed-forward part and norms, and two masks of dropout.
        whole = (4 * e + 2) / around
        # Softmax, its dropout's mask and output.
        scores = 0 if self.selective else (2 * e + 1) * self._scores / t
        layer = self._embedded * (shared + whole) + scores
        logits = 4 * self.sequence * self.microbatch * self.vocabulary / t
        last = 2 * e * self._embedded / around + logits
        return self._by_stage(layer, self._embedded / around, last)

    def deferred(self) -> tuple[float, ...]:
        """The bytes that each stage keeps of a microbatch between its I and its W, on one device:
        the inputs of products with weights, and the gradients of what these made."""
        e, t = self.activation_element, self.tensor
        around = t if self.sequence_parallel else 1
        # Queries, keys, values, the projection's input, and what is between the feed-forward parts.
        shared = (4 + 2 * self.feed_forward / self.hidden) / t
        # The inputs of attention and feed-forward part, and what these add to the residual.
        layer = e * self._embedded * (shared + 4 / around)
        logits = 4 * self.sequence * self.microbatch * self.vocabulary / t
        return self._by_stage(layer, 0, e * self._embedded / around + logits)

    def boundary(self) -> float:
        """The bytes of a microbatch between two stages, from one device to its peer."""
        shares = self.tensor if self.sequence_parallel else 1
        return self.activation_element * self._embedded / shares

    def inputs(self) -> tuple[float, ...]:
        """The bytes of each stage's input: of the first one's, the tokens."""
        tokens = 8 * self.sequence * self.microbatch
        return (tokens, *(self.boundary() for _ in self.layers[1:]))


@attrs.frozen(kw_only=True)
class Device:
    """What a device computes in a second, and how much it keeps of each parameter, in bytes.

    `data` copies of the model are trained together, and share the optimiser's state where
    `shard_optimizer` is set.
    """

    flops: float
    utilisation: float
    data: int
    shard_optimizer: bool
    weight_element: float
    gradient_element: float
    optimizer_element: float

    def __attrs_post_init__(self) -> None:
        if not (_is_real(self.flops) and 0 < self.flops < math.inf):
            raise ValueError(f"flops must be a finite number > 0, not {self.flops!r}")
        if not (_is_real(self.utilisation) and 0 < self.utilisation <= 1):
            raise ValueError(f"utilisation must be above 0 and at most 1, not {self.utilisation!r}")
        if type(self.data) is not int or self.data < 1:
            raise ValueError(f"data must be an int >= 1, not {self.data!r}")

    def costs(self, model: Transformer, bandwidth: Any) -> dict[str, Any]:
        """The fields of a cost model, in seconds and bytes."""
        parameters = model.parameters()
        forward, of_input, of_weight = (
            self._seconds(each)
            for each in (model.flops(), model.input_flops(), model.weight_flops())
        )
        gradient = tuple(many * self.gradient_element for many in parameters)
        # A ring passes each byte on twice, but for what every copy has already. No bandwidth at all
        # is for the cost model to refuse.
        speed = bandwidth if _is_real(bandwidth) and bandwidth else math.inf
        ring = 2 * (self.data - 1) / self.data / speed
        shares = self.data if self.shard_optimizer else 1
        return {
            "forward": forward,
            "backward": tuple(map(sum, zip(of_input, of_weight, strict=True))),
            "backward_input": of_input,
            "backward_weight": of_weight,
            "reduce_grad": tuple(many * ring for many in gradient),
            "boundary_bytes": model.boundary(),
            "input_bytes": model.inputs(),
            "activation_bytes": model.activations(),
            "deferred_bytes": model.deferred(),
            "weight_bytes": tuple(many * self.weight_element for many in parameters),
            "gradient_bytes": gradient,
            "optimizer_bytes": tuple(many * self.optimizer_element / shares for many in parameters),
        }

    def _seconds(self, flops: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(many / (self.flops * self.utilisation) for many in flops)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def split(layers: int | Sequence[int], stages: int | None) -> tuple[int, ...]:
    """The layers of each stage. Raises ValueError where they are not given so."""
    if not isinstance(layers, int):
        found = tuple(layers)
        if stages is not None and stages != len(found):
            raise ValueError(f"layers are given for {len(found)} stages, not {stages}")
        return found
    if stages is None:
        raise ValueError("stages are missing: into how many are the layers split?")
    if type(stages) is not int or stages < 1:
        raise ValueError(f"stages must be an int >= 1, not {stages!r}")
    if layers % stages:
        raise ValueError(
            f"{layers} layers can't be split evenly into {stages} stages: give those of each stage"
        )
    return (layers // stages,) * stages
