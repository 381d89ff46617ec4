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


@attrs.frozen(kw_only=True)
class Transformer:
    """The sizes of a model, as divided over devices, and the speed of a device.

    `layers` are those of each stage. `tensor` devices share each stage (Megatron's tensor
    parallelism); with `sequence_parallel` they share everything else too. With `selective`,
    attention scores are computed again in the backward, and not kept. `data` copies of the model
    train together, and share the optimiser's state if `shard_optimizer` is set. Each `…_element` is
    in bytes: of an element of an activation, and of what is kept of a parameter.
    """

    layers: tuple[int, ...]
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    microbatch: int
    feed_forward: int
    tensor: int
    sequence_parallel: bool
    selective: bool
    flops: float
    utilisation: float
    bandwidth: Any
    data: int
    shard_optimizer: bool
    activation_element: float
    weight_element: float
    gradient_element: float
    optimizer_element: float

    def __attrs_post_init__(self) -> None:
        if not self.layers or any(type(each) is not int or each < 0 for each in self.layers):
            raise ValueError(f"layers must be one number >= 0 for each stage, not {self.layers!r}")
        for name in _WHOLE:
            _expect_whole(name, getattr(self, name))
        for name in ("hidden", "heads", "feed_forward"):
            many = getattr(self, name)
            if many % self.tensor:
                raise ValueError(f"{name} must be a multiple of tensor, {self.tensor}, not {many}")
        if not (_is_real(self.flops) and 0 < self.flops < math.inf):
            raise ValueError(f"flops must be a finite number > 0, not {self.flops!r}")
        if not (_is_real(self.utilisation) and 0 < self.utilisation <= 1):
            raise ValueError(f"utilisation must be above 0 and at most 1, not {self.utilisation!r}")
        _expect_whole("data", self.data)

    def _by_stage(self, layer: float, first: float, last: float) -> tuple[float, ...]:
        """The sum over each stage's layers, plus what the first and the last stage have in
        addition."""
        found = [layers * layer for layers in self.layers]
        found[0] += first
        found[-1] += last
        return tuple(found)

    def costs(self) -> dict[str, Any]:
        """The fields of a cost model, in seconds and bytes of one device."""
        of_input, of_weight = self._seconds(3 if self.selective else 2), self._seconds(0)
        parameters = self._parameters()
        gradient = tuple(many * self.gradient_element for many in parameters)
        # A ring passes each byte on twice, but for what every copy has already. No bandwidth at all
        # is for the cost model to refuse.
        speed = self.bandwidth if _is_real(self.bandwidth) and self.bandwidth else math.inf
        ring = 2 * (self.data - 1) / self.data / speed
        shares = self.data if self.shard_optimizer else 1
        return {
            "forward": self._seconds(1),
            "backward": tuple(map(sum, zip(of_input, of_weight, strict=True))),
            "backward_input": of_input,
            "backward_weight": of_weight,
            "reduce_grad": tuple(many * ring for many in gradient),
            "weight_bytes": tuple(many * self.weight_element for many in parameters),
            "gradient_bytes": gradient,
            "optimizer_bytes": tuple(many * self.optimizer_element / shares for many in parameters),
            **self._kept(),
        }

    def _parameters(self) -> tuple[float, ...]:
        """Those of each stage on one device."""
        h, f, t = self.hidden, self.feed_forward, self.tensor
        matrices = 4 * h * h + 2 * h * f
        layer = (matrices + 3 * h + f) / t + 6 * h  # the rest of the biases, and two norms
        embedding = self.vocabulary * h / t
        # The head is a copy of the embedding, where they are on two stages.
        head = embedding if len(self.layers) > 1 else 0
        return self._by_stage(layer, embedding + self.sequence * h, head + 2 * h)

    def _seconds(self, attentions: int) -> tuple[float, ...]:
        """How long each stage computes on a microbatch.

        `attentions` is the number of products of activations with each other for one product with
        weights: 1 in the forward, 2 in the backward for the input (3 if it computes the forward's
        again), 0 in the backward for the weights.
        """
        embedded, t = self.sequence * self.microbatch * self.hidden, self.tensor
        # 24 b s h² where the feed-forward part has 4 h.
        multiplied = 4 * embedded * (2 * self.hidden + self.feed_forward) / t
        attended = 4 * embedded * self.sequence / t
        head = 2 * embedded * self.vocabulary / t
        flops = self._by_stage(multiplied + attentions * attended, 0, head)
        return tuple(many / (self.flops * self.utilisation) for many in flops)

    def _kept(self) -> dict[str, Any]:
        """The bytes of a microbatch: between stages, of a stage's input, those that it keeps for
        its backward, and those that it keeps between its I and its W, the inputs of products with
        weights and the gradients of what these made."""
        e, t, tokens = self.activation_element, self.tensor, self.sequence * self.microbatch
        around = t if self.sequence_parallel else 1
        embedded = tokens * self.hidden
        boundary, logits = e * embedded / around, 4 * tokens * self.vocabulary / t
        # Queries, keys, values and the projection's input; both inputs of the feed-forward part's
        # second half.
        shared = (4 * e + 2 * e * self.feed_forward / self.hidden) / t
        # The inputs of attention, feed-forward part and norms, and two masks of dropout.
        whole = (4 * e + 2) / around
        # Softmax, its dropout's mask and output.
        scores = (2 * e + 1) * (self.heads * self.sequence**2 * self.microbatch) / t
        layer = embedded * (shared + whole) + (0 if self.selective else scores)
        # Queries, keys, values, the projection's input, and what is between the feed-forward parts;
        # the inputs of attention and feed-forward part, and what these add to the residual.
        deferred = e * embedded * ((4 + 2 * self.feed_forward / self.hidden) / t + 4 / around)
        return {
            "boundary_bytes": boundary,
            "input_bytes": (8 * tokens, *[boundary] * (len(self.layers) - 1)),
            "activation_bytes": self._by_stage(
                layer, embedded / around, 2 * e * embedded / around + logits
            ),
            "deferred_bytes": self._by_stage(deferred, 0, boundary + logits),
        }


def _expect_whole(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an int >= 1, not {value!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def split(layers: int | Sequence[int], stages: int | None) -> tuple[int, ...]:
    """The layers of each stage. Raises ValueError for layers that can't be split evenly."""
    if not isinstance(layers, int):
        found = tuple(layers)
        if stages is not None and stages != len(found):
            raise ValueError(f"layers are given for {len(found)} stages, not {stages}")
        return found
    if stages is None:
        raise ValueError("pass `stages`, the number of stages to split the layers into")
    _expect_whole("stages", stages)
    if layers % stages:
        raise ValueError(
            f"{layers} layers can't be split evenly into {stages} stages: give those of each stage"
        )
    return (layers // stages,) * stages
