"""A stage's backward in two parts, as zero bubble has them (arXiv 2401.10241): I, then W.

    outputs ── place ── ○ ── place ── ○ ── inputs     the path, which I runs along, once
                 │             │
                 W             W                      the sides, each run by W from its place

The path is every autograd node between an output and an input. A *place* is a node of it, a linear
layer's product for one, from which a side leads to parameters. I is one run of the engine that
asks for the inputs' gradients only, so the nodes compute no gradient of a weight; a prehook keeps
what comes to each place. From there W runs the sides, so it computes no gradient of an input. A
matrix product of the plain backward is thus in one of the two, and none is in both.

Some gradients I computes as well, since leaving them to W would do work twice:

* of a parameter that several places lead to (a layer called twice, autocast's cached cast): a run
  from the upper place would come by the lower one;
* from a custom Function: it computes all its gradients at once;
* where saved tensors come from hooks: activation checkpointing would recompute for every place.
  Those of what is offloaded (`memory`) do nothing of the kind, and count as none.

I adds these to `.grad` at once where microbatches are still added in the order of their Ws: if the
list allows it, and no earlier microbatch has a gradient of the parameter left for its W. Otherwise
W adds them.

So every sum is the engine's, in its order, and a parameter's gradient is bit for bit the plain one.

torch.distributed.pipelining splits alike (`_backward.py`), but it runs all places that share a
parameter again in W, with what lies between them, keeps until W all that the path has saved, lets
tensor hooks change a gradient twice, and adds to `.grad` past AccumulateGrad and its hooks.

A hook on what a place computes runs in W once more; what it returns then is not used. Such a
tensor's own `.grad`, if `retain_grad` asked for it, counts twice. The engine looks at all of the
graph below a place before it runs a side (some 0.2 µs a node), though it runs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from schedir.runtime.memory import Held, Occupied, keep_apart, unpacked

Grads: TypeAlias = tuple[Tensor | None, ...]

_RELEASED = Held(None, version=0)

_WHOLE = frozenset(
    [
        "NativeGroupNormBackward0",  # in channels last it crashes unless asked for the input's
        "CudnnRnnBackward0",
        "MkldnnRnnLayerBackward0",
    ]
)
"""Nodes that compute the input's gradient in any case."""


@attrs.frozen(eq=False)
class Side:
    """One run of W: from a place, and the gradients that came to it, to its own parameters.

    `place` is None where it is from the outputs, beside the path.
    """

    place: Node | None
    starts: list[GradientEdge]
    arrived: Grads
    parameters: list[GradientEdge]

    def run(self) -> None:
        """Add to the parameters' `.grad`."""
        grads = [grad for grad in self.arrived if grad is not None]
        if not grads:
            return
        # The place's hooks have changed in I what arrived, and would do so again.
        clamp = self.place and self.place.register_prehook(lambda _: self.arrived)
        leaves = [cast(Any, edge.node).variable for edge in self.parameters]
        fresh = [leaf for leaf in leaves if leaf.grad is None]
        torch.autograd.backward(self.starts, grads, inputs=self.parameters)
        if clamp:
            clamp.remove()
        keep_apart(fresh, grads)  # others read what arrived, and `.grad` is added to


@attrs.frozen(eq=False)
class WeightPart:
    """What I leaves to W, which must find the gradients that I was given as they were.

    `found` are the gradients that I has computed, by the accumulators of their parameters.
    """

    sides: list[Side]
    found: dict[Node, Tensor]

    def kept(self) -> list[Tensor]:
        """The gradients that wait for W."""
        arrived = (grad for side in self.sides for grad in side.arrived if grad is not None)
        return [*arrived, *self.found.values()]

    def accumulators(self) -> set[Node]:
        """Those of the parameters whose gradients wait for W."""
        return {*self.found, *(edge.node for side in self.sides for edge in side.parameters)}

    def add_found(self, earlier: Iterable[WeightPart] = ()) -> None:
        """Add to `.grad` what I has found, but for parameters that wait for `earlier` parts."""
        waiting = {node for part in earlier for node in part.accumulators()}
        for accumulate in [node for node in self.found if node not in waiting]:
            grad = self.found.pop(accumulate)
            with torch.no_grad():  # not by the engine: the parameter's tensor hooks have run in I
                cast(Callable[[Tensor], object], accumulate)(grad)

    def run(self) -> None:
        """W, once: add to `.grad` what is left of what the plain backward would add."""
        while self.sides:
            self.sides.pop().run()  # and forget it, so that the next one can use its memory
        self.add_found()


def input_part(
    roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Grads, WeightPart]:
    """I: the gradients of `leaves`, None for an unused one, and what is left to W.

    `roots` are outputs that require grad, or their edges, with their gradients. No `.grad` is
    touched.
    """
    outputs = [r if isinstance(r, GradientEdge) else get_gradient_edge(r) for r in roots]
    graph = _read(outputs, [get_gradient_edge(leaf) for leaf in leaves])
    kept: dict[Node, list[Grads]] = {place: [] for place in graph.by_place if place is not None}
    hooks = [place.register_prehook(arrived.append) for place, arrived in kept.items()]
    found: Grads = (None,) * len(leaves)
    if graph.path:
        asked = cast(list[Tensor], [*leaves, *graph.early_leaves])
        retain = bool(graph.by_place)
        found = torch.autograd.grad(outputs, asked, grads, retain_graph=retain, allow_unused=True)
    for hook in hooks:
        hook.remove()
    if graph.by_place:
        for node in graph.done:
            _free_saved(node)
    sides = [
        Side(
            place,
            [GradientEdge(place, n) for n, grad in enumerate(arrived) if grad is not None],
            arrived,
            graph.by_place[place],
        )
        for place, came in kept.items()
        for arrived in came
    ]
    if None in graph.by_place:
        sides.append(Side(None, outputs, tuple(grads), graph.by_place[None]))
    handed, early = found[: len(leaves)], found[len(leaves) :]
    occupied = Occupied((*grads, *handed))
    waiting = {
        edge.node: grad.clone() if occupied.add(grad) else grad
        for edge, grad in zip(graph.early_leaves, early, strict=False)
        if grad is not None
    }
    return handed, WeightPart(sides, waiting)


@attrs.frozen(eq=False)
class _Graph:
    """What there is to know of a stage's graph.

    `by_place` are the parameters that only one place leads to, `early_leaves` those that I has to
    see to; the nodes in `done` have nothing to do in W.
    """

    path: set[Node]
    by_place: dict[Node | None, list[GradientEdge]]
    early_leaves: list[GradientEdge]
    done: list[Node]


def _read(outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge]) -> _Graph:
    """Find the path, and go along it and down its sides."""
    below = nodes_below(edge.node for edge in outputs)
    ends = {edge.node for edge in inputs}
    path: set[Node] = set()
    for node, children in below.items():
        if node in ends or not path.isdisjoint(children):
            path.add(node)
    place: dict[Node, Node | None] = {e.node: None for e in outputs if e.node not in path}
    start: Node | None
    early: set[Node] = set()
    by_place: dict[Node | None, list[GradientEdge]] = {}
    early_leaves: list[GradientEdge] = []
    for node, children in reversed(below.items()):
        if node in path:
            start = node
            aside = [child for child in children if child not in path]
            is_early = bool(aside) and _computes_all_at_once(node)
        else:
            start, aside, is_early = place[node], children, node in early
            if not children:  # AccumulateGrad
                (early_leaves if is_early else by_place.setdefault(start, [])).append(
                    GradientEdge(node, 0)
                )
        for child in aside:
            if place.setdefault(child, start) is not start or is_early:
                early.add(child)
    return _Graph(path, by_place, early_leaves, [*(path - by_place.keys()), *early])


def nodes_below(outputs: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node that the outputs lead to, with the nodes that it leads to; these come first."""
    found: dict[Node, list[Node]] = {}
    below: dict[Node, list[Node]] = {}
    stack = list(outputs)
    while stack:
        node = stack[-1]
        if node in found:
            below[stack.pop()] = found[node]
            continue
        children = found[node] = []
        for child, _ in node.next_functions:
            if child is not None:
                children.append(child)
                if child not in found:
                    stack.append(child)
    return below


def _computes_all_at_once(place: Node) -> bool:
    """Whether to split the place's work would double it."""
    kind: type[Any] = type(place)
    if issubclass(kind, BackwardCFunction) or kind.__name__ in _WHOLE:
        return True
    # Not every torch lets one see the hook: a checkpoint is then recomputed for every place.
    return any(
        getattr(saved, "unpack_hook", None) not in (None, unpacked) for saved in _saved(place)
    )


def _free_saved(node: Node) -> None:
    """Free what the node has saved, for it won't run again."""
    for saved in _saved(node):
        with suppress(RuntimeError):  # it is no tensor, is freed, or has hooks already
            if getattr(saved, "unpack_hook", None) is unpacked:
                saved.data.tensor = None
            else:
                saved.register_hooks(lambda _: _RELEASED, unpacked)


def _saved(node: Node) -> Iterator[Any]:
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, tuple):
            yield from saved
        elif saved is not None:
            yield saved


@cache
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
