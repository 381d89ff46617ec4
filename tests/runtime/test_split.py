"""The split of a stage's backward into I and W, against torch's plain backward on a deep copy."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from schedir.runtime.stage.split_backward import input_part
from tests.runtime.kit import assert_equal_gradients
from tests.sweeps import examples, long, sweep

Grads = tuple[Tensor | None, ...]


def run(
    module: Callable[..., Any],
    inputs: Sequence[Tensor],
    split: bool,
    weigh: Callable[[Tensor], Tensor] = torch.cos,
) -> Grads:
    """One microbatch; the gradients of the inputs. `weigh` makes the outputs' gradients."""
    torch.manual_seed(1)
    leaves = [t.detach().clone().requires_grad_(t.dtype.is_floating_point) for t in inputs]
    outputs = module(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    roots = [output for output in outputs if output.requires_grad]
    grads = [weigh(root.detach()) for root in roots]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not split:
        torch.autograd.backward(roots, grads)
        return tuple(leaf.grad for leaf in wanted)
    found, rest = input_part(roots, grads, wanted)
    del outputs, roots
    rest.run()
    assert all(leaf.grad is None for leaf in wanted)
    return found


def gradients(module: nn.Module) -> Grads:
    grads = [p.grad for p in module.parameters()]
    return tuple(grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads)


def assert_same_grads(mine: Sequence[Tensor | None], plain: Sequence[Tensor | None]) -> None:
    """Bit for bit and of the same type, and None where the other is."""
    assert_equal_gradients(mine, plain)
    assert [g.dtype for g in mine if g is not None] == [g.dtype for g in plain if g is not None]


def assert_same(module: nn.Module, inputs: Sequence[Tensor], times: int = 1, **weigh: Any) -> None:
    """Bit for bit the gradients of the plain backward of a copy, also when they add to those of a
    microbatch."""
    twin = copy.deepcopy(module)
    for _ in range(times):
        plain = run(twin, inputs, split=False, **weigh)
        assert_same_grads(run(module, inputs, split=True, **weigh), plain)
        assert_same_grads(gradients(module), gradients(twin))


def check(module: nn.Module, *inputs: Tensor) -> None:
    module.zero_grad()
    assert_same(module, inputs, times=2)
    assert any(p.grad is not None for p in module.parameters())


class Calls(nn.Module):
    """A stage whose forward is a function of its parts."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(self, *inputs)


def linear(width: int = 4) -> nn.Linear:
    return nn.Linear(4, width)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Doubled(torch.autograd.Function):
    """x @ w, with a gradient for either at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Half(torch.autograd.Function):
    """The second output gets no gradient from `Stops`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, w * 2

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 2


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


doubled: Callable[..., Tensor] = Doubled.apply
half: Callable[..., tuple[Tensor, Tensor]] = Half.apply
stops: Callable[..., Tensor] = Stops.apply


def recompute(module: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    result: Tensor = checkpoint(module, *inputs, use_reentrant=False)
    return result


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def in_place(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    x[:, 1] = m.w
    x[:, 2].mul_(m.w)
    return m.b(F.relu_(x.add_(m.v)))


def attention(m: Any, x: Tensor) -> Any:
    q, k, v = (part.view(2, 3, 2, 2).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return x + m.down(F.gelu(m.up(m.norm(x + m.out(mixed)))))


def autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        x = m.b(F.relu(m.a(x)))
        return m.b(x).float() + m.a(x).float()  # the cast of a weight is cached


def unrolled(m: Any, x: Tensor) -> Any:
    h = x.new_zeros(x.shape[1:])
    for step in x:
        h = m.cell(step, h)
    return h


def recomputed(m: Any, x: Tensor) -> Any:
    return m.c(recompute(m.b, m.a(x)))


def two_roads(m: Any, x: Tensor) -> Any:
    """Uses of one weight that don't lead to each other, one through a node of its own."""
    w = m.w * 2
    return torch.cat([x @ w, x.tanh() @ w.t(), torch.addcmul(x[:1], m.w, m.w.t())])


def in_halves(m: Any, x: Tensor) -> Any:
    return torch.cat([m.b(p) * p for p in m.a(x).split([2, 2], -1)], -1)


def beside(m: Any, x: Tensor) -> Any:
    return m.a(x), (m.b.weight @ m.w).tanh(), m.w * 2


def stopped(m: Any, x: Tensor) -> Any:
    return sum(half(m.a(x), m.w)) + stops(half(x, m.v)[1])


def tied_embedding(m: Any, n: Tensor, x: Tensor) -> Any:
    return m.e(n) + m.a(x) @ m.e.weight.t() @ m.e.weight


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


STAGES: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "mlp": lambda: nn.Sequential(linear(8), nn.GELU(), nn.Linear(8, 4), nn.Tanh(), linear()),
    "no bias": lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)),
    "norms": lambda: nn.Sequential(
        linear(), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.PReLU(4), nn.RMSNorm(4)
    ),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear()),
    "frozen": lambda: frozen(nn.Sequential(linear(), linear(), linear()), "0.weight", "1.bias"),
    "unused": lambda: Calls(lambda m, x: m.a(x), a=linear(), b=linear()),
    "residual": lambda: Calls(lambda m, x: x + m.b(F.relu(m.a(x))) + x, a=linear(), b=linear()),
    "called twice": lambda: Calls(lambda m, x: m.b(m.a(m.a(x).tanh())), a=linear(), b=linear()),
    "called thrice": lambda: Calls(lambda m, x: m.a(m.b(m.a(m.a(x)))), a=linear(), b=linear()),
    "bias twice": lambda: Calls(lambda m, x: m.a(x + m.w) + m.w, a=linear(), w=weight(4)),
    "norm twice": lambda: Calls(lambda m, x: m.n(m.a(m.n(x))), a=linear(), n=nn.LayerNorm(4)),
    "one node, two ways": lambda: Calls(two_roads, w=weight(4, 4)),
    "weight of weights": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "its own matrix": lambda: Calls(lambda m, x: x @ (m.w @ m.w.t()), w=weight(4, 4)),
    "in place": lambda: Calls(in_place, a=linear(), b=linear(), w=weight(3), v=weight(4)),
    "split": lambda: Calls(in_halves, a=linear(), b=nn.Linear(2, 2)),
    "einsum": lambda: Calls(
        lambda m, x: torch.einsum("bi,ij,kj->bk", x, m.w, m.v), w=weight(4, 5), v=weight(3, 5)
    ),
    "outputs": lambda: Calls(lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear()),
    "output of an output": lambda: Calls(
        lambda m, x: ((h := m.a(x)), h.view(-1), m.b(h), h), a=linear(), b=linear()
    ),
    "input as output": lambda: Calls(lambda m, x: (x, x.view(-1), m.a(x)), a=linear()),
    "parameter as output": lambda: Calls(lambda m, x: (m.w, m.w.view(-1), x * m.w), w=weight(4)),
    "output beside the input": lambda: Calls(beside, a=linear(), b=linear(), w=weight(4)),
    "shared beside the input": lambda: Calls(
        lambda m, x: (m.a(x), m.a.weight.sum(), m.w.tanh()), a=linear(), w=weight(4)
    ),
    "input cut off": lambda: Calls(lambda m, x: m.a(x.detach()), a=linear()),
    "custom": lambda: Calls(lambda m, x: m.a(doubled(x.tanh(), m.w)), a=linear(), w=weight(4, 4)),
    "custom beside": lambda: Calls(
        lambda m, x: x @ doubled(m.w, m.v), w=weight(4, 4), v=weight(4, 4)
    ),
    "custom, no gradient": lambda: Calls(stopped, a=linear(), w=weight(4), v=weight(4)),
    "no gradient": lambda: Calls(lambda m, x: stops(x * m.w) + m.a(x), a=linear(), w=weight(4)),
    "autocast": lambda: Calls(autocast, a=linear(), b=linear()),
    "checkpoint": lambda: Calls(recomputed, a=linear(), b=small(), c=linear()),
    "checkpoint first": lambda: Calls(lambda m, x: recompute(m.b, x), b=small()),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_gradients_are_those_of_the_plain_backward(name: str) -> None:
    torch.manual_seed(0)
    check(STAGES[name](), torch.randn(3, 4))


def test_the_gradients_of_other_shapes_of_input() -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 6, 6)
    convolution = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip
    check(convolution, image)
    channels_last: Any = {"memory_format": torch.channels_last}
    check(convolution.to(**channels_last), image)
    tokens = torch.randn(2, 3, 4)
    parts = {"out": linear(), "norm": nn.LayerNorm(4), "up": linear(8), "down": nn.Linear(8, 4)}
    check(Calls(attention, qkv=linear(12), **parts), tokens)
    check(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), tokens)
    check(Calls(lambda m, x: m.r(x)[0], r=nn.LSTM(4, 5, num_layers=2)), tokens)
    check(Calls(lambda m, x: m.r(x), r=nn.GRU(4, 5, bidirectional=True)), tokens)
    check(Calls(unrolled, cell=nn.GRUCell(4, 4)), tokens)
    check(Calls(lambda m, x, y: m.a(x) * y, a=linear()), tokens, tokens)
    check(Calls(lambda m, x, y: m.a(x), a=linear()), tokens, tokens)
    check(nn.Bilinear(4, 4, 3), tokens, tokens)
    number = torch.tensor([[1, 2, 1]])
    for sparse in (False, True):
        table = nn.Embedding(5, 4, sparse=sparse)
        check(Calls(lambda m, x, n: m.a(x) + m.e(n), a=linear(), e=table), tokens[:1], number)
        check(nn.Sequential(table, linear()), number)
    check(Calls(tied_embedding, a=linear(), e=nn.Embedding(5, 4)), number, tokens[:1])


def test_a_loss_has_the_gradient_one() -> None:
    torch.manual_seed(0)
    losses = [
        Calls(lambda m, x: m.a(x).square().mean(), a=linear()),
        Calls(lambda m, x: m.a(x.detach()).square().mean(), a=linear()),
        Calls(lambda m, x: (m.a(x).sum(), m.a.weight.sum(), m.w.sum()), a=linear(), w=weight(4)),
    ]
    for module in losses:
        assert_same(module, [torch.randn(3, 4)], weigh=torch.ones_like)


def test_nothing_to_do_is_done() -> None:
    found, rest = input_part([], [], [torch.ones(2, requires_grad=True)])
    rest.run()
    assert found == (None,)
    x = torch.ones(2, requires_grad=True)
    found, rest = input_part([x * 2], [torch.ones(2)], [x])
    rest.run()
    assert_same_grads(found, (torch.full((2,), 2.0),))


@long
def test_a_stage_may_be_compiled() -> None:
    """Its backward is one custom Function, which can't be run with the graph retained."""
    torch.manual_seed(0)
    compiled: Callable[..., Tensor] = torch.compile(small(), backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    check(compiled, torch.randn(3, 4))


def two_products(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() @ w


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda one, two, w: F.linear(one, w, w[0]),
    "matmul": lambda one, two, w: one @ (w + two),
    "bias": lambda one, two, w: one + w,
    "tanh": lambda one, two, w: one.tanh(),
    "mul": lambda one, two, w: one * two,
    "aside": lambda one, two, w: (w @ w).tanh(),
    "use twice": lambda one, two, w: torch.addcmul(one, w, w.tanh()),
    "split": lambda one, two, w: torch.cat(one.chunk(2)[::-1]) @ w,
    "norm": lambda one, two, w: F.layer_norm(one, (4,), w[0], w[1]),
    "in place": lambda one, two, w: one.clone().mul_(w).add_(two),
    "row": lambda one, two, w: one.index_fill(0, torch.tensor([1]), w[2, 1]),
    "custom": lambda one, two, w: doubled(one, w),
    "checkpoint": lambda one, two, w: recompute(two_products, one, w),
    "cut": lambda one, two, w: one.detach() @ w,
}


@attrs.frozen
class Program:
    """A random stage: each step makes a value of two earlier ones and a parameter."""

    steps: tuple[tuple[str, int, int, int], ...]
    outputs: tuple[int, ...]

    def __call__(self, module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for kind, a, b, p in self.steps:
            one, two = values[a % len(values)], values[b % len(values)]
            values.append(STEPS[kind](one, two, module.weights[p]))
        return tuple(values[number % len(values)] for number in self.outputs)


PLACES = st.integers(0, 20)
STEP = st.tuples(st.sampled_from(list(STEPS)), PLACES, PLACES, st.integers(0, 5))
PROGRAMS = st.builds(
    Program,
    st.lists(STEP, min_size=1, max_size=12).map(tuple),
    st.lists(PLACES, min_size=1, max_size=3).map(tuple),
)


@given(PROGRAMS, st.integers(0, 3))
@examples(300)
def test_any_stage_has_the_gradients_of_the_plain_backward(program: Program, frozen: int) -> None:
    torch.manual_seed(0)
    module = Calls(program, weights=nn.ParameterList(weight(4, 4) for _ in range(6)))
    for number in range(frozen):
        module.weights[number].requires_grad_(False)  # type: ignore[index]
    assert_same(module, [torch.randn(4, 4), torch.randn(4, 4)], times=2)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
        return func(*args, **(kwargs or {}))


def products(work: Callable[[], Any]) -> tuple[int, Any]:
    with Products() as mode:  # type: ignore[no-untyped-call]
        result = work()
    return mode.count, result


def count(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int, int]:
    """The matrix products of the plain backward, of I and of W."""
    y = module(x)
    plain, _ = products(lambda: torch.autograd.backward([y], [torch.ones_like(y)]))
    y = module(x)
    first, (_, rest) = products(lambda: input_part([y], [torch.ones_like(y)], [x]))
    second, _ = products(rest.run)
    return plain, first, second


def test_no_work_is_done_twice() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    deep = nn.Sequential(*(layer for _ in range(8) for layer in (linear(), nn.Tanh())))
    assert count(deep, x) == (16, 8, 8)
    deep[0].requires_grad_(False)
    assert count(deep, x) == (15, 8, 7)
    x3 = torch.randn(2, 3, 4, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True)
        assert count(layer, x3) == (8, 4, 4)


def test_what_cant_wait_is_done_in_the_first_part() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    a, b = linear(), linear()
    assert count(lambda x: a(b(a(x))), x) == (6, 5, 1)
    w = weight(4, 4)
    assert count(lambda x: b(doubled(x, w)), x) == (4, 3, 1)
    part = small()
    # Two of forward, which recomputing ends as soon as it has what is needed.
    plain, first, second = count(lambda x: b(recompute(part, x)), x)
    assert (first, second) == (plain - 1, 1)


def test_the_first_part_touches_no_grad() -> None:
    module = STAGES["called twice"]()
    x = torch.randn(3, 4, requires_grad=True)
    y = module(x)
    _, rest = input_part([y], [torch.ones_like(y)], [x])
    assert x.grad is None
    assert gradients(module) == (None,) * 4
    rest.run()
    assert None not in gradients(module)
    before = [grad.clone() for grad in gradients(module) if grad is not None]
    kept = [p.grad for p in module.parameters()]
    run(module, [torch.zeros(3, 4)], split=True, weigh=torch.zeros_like)
    assert all(p.grad is grad for p, grad in zip(module.parameters(), kept, strict=True))
    rest.run()  # there is nothing left to do
    assert_same_grads(before, gradients(module))


@contextlib.contextmanager
def no_cycles() -> Iterator[None]:
    """What is to be freed is freed without the garbage collector's help."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_the_first_part_frees_what_the_second_does_not_need() -> None:
    saved: list[StorageWeakRef] = []

    def watch(_: nn.Module, given: object, made: Tensor) -> None:
        saved.append(StorageWeakRef(made.untyped_storage()))

    module = nn.Sequential(linear(), nn.Sigmoid(), nn.Tanh(), linear(), nn.Tanh())
    for number in (1, 2, 4):
        module[number].register_forward_hook(watch)
    x = torch.randn(3, 4, requires_grad=True)
    with no_cycles():
        y = module(x)
        _, rest = input_part([y], [torch.ones_like(y)], [x])
        del y
        # The sigmoid's result, and the last one, served the path alone; the linear layer needs its
        # input to find the weight's gradient.
        assert [memory.expired() for memory in saved] == [True, False, True]
        rest.run()
        assert [memory.expired() for memory in saved] == [True, True, True]


KEEPING = ["mlp", "called twice", "custom", "outputs", "in place", "norms"]


@sweep("name", KEEPING, quick=["called twice"])
def test_the_second_part_keeps_nothing(name: str) -> None:
    module = STAGES[name]()
    memory: list[StorageWeakRef] = []

    def pack(tensor: Tensor) -> Tensor:
        memory.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor.detach()  # itself, it would be a cycle

    x = torch.randn(3, 4, requires_grad=True)
    weights = {StorageWeakRef(p.untyped_storage()).cdata for p in module.state_dict().values()}
    weights.add(StorageWeakRef(x.untyped_storage()).cdata)
    for hooked in (True, False):
        memory.clear()
        with no_cycles():
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks if hooked else contextlib.nullcontext():
                outputs = module(x)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            grads = [torch.ones_like(output) for output in outputs]
            memory += [StorageWeakRef(t.untyped_storage()) for t in (*outputs, *grads)]
            found, rest = input_part(outputs, grads, [x])
            del outputs, grads, found
            rest.run()
            kept = [m for m in memory if m.cdata not in weights and not m.expired()]
            assert not kept


def test_what_the_first_part_has_freed_says_so() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = linear()(x).tanh()
    input_part([y], [torch.ones_like(y)], [x])
    with pytest.raises(RuntimeError, match="freed what was saved"):
        y.sum().backward()


def test_hooks_change_a_gradient_once() -> None:
    """The parameters' run once; of those of what a place computes, once is heard."""
    calls: list[str] = []

    def threefold(grad: Tensor) -> Tensor:
        calls.append("hook")
        return grad * 3

    def hooked(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.register_hook(threefold)
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        return module

    def forward(m: Any, x: Tensor) -> Any:
        h = m.a(x)
        h.register_hook(lambda grad: grad * 2)
        h.grad_fn.register_prehook(lambda grads: tuple(grad * 5 for grad in grads))
        h.grad_fn.register_hook(lambda found, _: tuple(None if g is None else g * 7 for g in found))
        return m.b(m.b(h).tanh())

    torch.manual_seed(0)
    module, x = Calls(forward, a=linear(), b=linear()), [torch.randn(3, 4)]
    twin = hooked(copy.deepcopy(module))
    plain = run(twin, x, split=False)
    expected = sorted(calls)
    calls.clear()
    assert_same_grads(run(hooked(module), x, split=True), plain)
    assert_same_grads(gradients(module), gradients(twin))
    assert sorted(calls) == expected
    assert len(expected) == 8


def test_the_hooks_of_modules_run_once() -> None:
    calls: list[int] = []
    module = small()
    for layer in module:
        layer.register_full_backward_hook(lambda *_: calls.append(1))
        layer.register_full_backward_pre_hook(lambda *_: calls.append(2))
    assert_same(module, [torch.randn(3, 4)])
    assert sorted(calls) == [1] * 6 + [2] * 6


def test_a_gradient_shares_no_memory_with_what_others_read() -> None:
    torch.manual_seed(0)
    module = Calls(lambda m, x: x + m.p.view(3, 4) + m.q.view(3, 4), p=weight(12), q=weight(12))
    x = torch.randn(3, 4, requires_grad=True)
    found: Any
    (found,), rest = input_part([module(x)], [torch.randn(3, 4)], [x])
    rest.run()
    p, q = (grad for grad in gradients(module) if grad is not None)
    before = found.clone()
    p.add_(1)
    q.add_(1)
    assert torch.equal(found, before)
    assert torch.equal(p, before.view(12) + 1)
    assert torch.equal(q, before.view(12) + 1)


def test_the_parts_of_microbatches_interleave() -> None:
    torch.manual_seed(0)
    module = Calls(autocast, a=linear(), b=linear())
    twin = copy.deepcopy(module)
    inputs = [torch.randn(3, 4) for _ in range(3)]
    for x in inputs:
        run(twin, [x], split=False, weigh=torch.ones_like)
    outputs = [(leaf := x.clone().requires_grad_(), module(leaf)) for x in inputs]
    parts = [input_part([y], [torch.ones_like(y)], [leaf])[1] for leaf, y in outputs]
    for part in parts:
        part.run()
    assert_same_grads(gradients(module), gradients(twin))
