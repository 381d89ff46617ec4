"""Writes the list of names of torch that this project uses, from the files of the oldest torch.

The tests run with a newer torch than a user may have. `tests/runtime/test_torch_names.py` compares
the names in the code with that list. This tool reads torch's files and never imports them, so a
wheel for another Python or another device will do:

    pip download torch==2.11.0 --no-deps --only-binary :all: --python-version 3.12 -d DIR
    unzip DIR/torch-*.whl 'torch/*.py' 'torch/*.pyi' torch/lib/libtorch_python.so -d UNPACKED
    python tools/torch_names.py UNPACKED

Nothing is written if that torch lacks a name, or a keyword of a call. A name that only C++ binds is
looked up by its last part among the strings of libtorch_python.so, which do not tell its module.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from attrs import field, frozen

from schedir.files import write_text

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "runtime" / "torch_names.json"
SOURCES = (
    "schedir/**/*.py",
    "examples/reference.py",
    "tools/on_gpu/*.py",
    "tests/runtime/features.py",
    "tests/runtime/kit.py",
    "tests/runtime/lists.py",
    "tests/runtime/parity.py",
    "tests/runtime/test_cuda.py",
)
"""What runs on a machine with a GPU."""

OF_OBJECTS: Mapping[str, Sequence[str]] = {
    "torch._C._autograd.SavedTensor": ("data", "register_hooks", "unpack_hook"),
    "torch._C._distributed_c10d.Backend": (
        *("_end_coalescing", "_start_coalescing", "allreduce", "recv", "send", "shutdown"),
    ),
    "torch._C._distributed_c10d.ProcessGroup": ("_device_types", "_get_backend"),
    "torch._C._distributed_c10d.Store": ("check", "compare_set", "get", "set"),
    "torch._C._distributed_c10d.Work": ("is_completed", "wait"),
    "torch.Tensor": (
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_version", "record_stream"),
    ),
    "torch.UntypedStorage": ("_cdata",),
    "torch.autograd.graph.Node": ("next_functions", "register_prehook"),
    "torch.cuda": (  # `Accelerator` asks for them in the module of a device
        *("Event", "Event.elapsed_time", "Event.query", "Event.synchronize", "Event.wait"),
        *("Stream", "Stream.record_event", "current_stream", "default_generators", "device"),
        *("get_device_properties", "is_initialized", "stream", "synchronize"),
    ),
    "torch.distributed.ProcessGroupGloo": ("_set_default_timeout", "options"),
    "torch.distributed.ProcessGroupNCCL": (
        *("Options._timeout", "Options.config", "Options.config.max_ctas"),
        *("Options.global_ranks_in_group", "Options.group_name", "abort"),
    ),
    "torch.distributed.fsdp.FSDPModule": (
        *(
            "_get_fsdp_state",
            "reshard",
            "set_custom_all_gather",
            "set_force_sum_reduction_for_comms",
        ),
        *("set_gradient_divide_factor", "set_is_last_backward", "set_requires_gradient_sync"),
        *("set_reshard_after_backward", "set_reshard_after_forward", "unshard"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": ("post_backward",),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": (
        "_root_post_backward_final_callback",
    ),
    "torch.distributed.device_mesh.DeviceMesh": ("_get_root_mesh",),
    "torch.distributed.pipelining.schedules._PipelineSchedule": (
        *("_check_inputs", "_merge_outputs", "_split_inputs"),
    ),
    "torch.nn.Module": ("_forward_hooks", "_forward_pre_hooks"),
}
"""What is used of objects whose type the code does not tell: that which matters, by type."""

CALLS_OF_OBJECTS = {"torch.cuda.Event": ("blocking", "enable_timing")}
"""And the keywords of such calls."""

_LIBRARY = "torch/lib/libtorch_python.so"


@frozen
class Use:
    """A name of torch's, and the keywords that a call gives it."""

    name: str
    keywords: frozenset[str] = frozenset()


def used() -> dict[str, frozenset[str]]:
    """The names that this project uses, each with the keywords of all its calls."""
    found = {
        f"{kind}.{name}": frozenset(CALLS_OF_OBJECTS.get(f"{kind}.{name}", ()))
        for kind, names in OF_OBJECTS.items()
        for name in names
    }
    for path in sources():
        for use in uses(path.read_text()):
            found[use.name] = found.get(use.name, frozenset()) | use.keywords
    return dict(sorted(found.items()))


def sources() -> list[Path]:
    """The files whose names are looked for."""
    return sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)})


def uses(source: str) -> Iterator[Use]:
    """All of torch's names in a module of Python, by what it imports them as."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torchs(alias.name):
                    imported[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield Use(alias.name)
        elif isinstance(node, ast.ImportFrom) and _is_torchs(node.module or ""):
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{node.module}.{alias.name}")
    yield from _uses_in(tree, imported)


def _is_torchs(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _uses_in(node: ast.AST, imported: Mapping[str, str]) -> Iterator[Use]:
    name = _name(node, imported)
    if name is not None:
        yield Use(name)
        return
    if isinstance(node, ast.Call) and (called := _name(node.func, imported)) is not None:
        yield Use(called, frozenset(each.arg for each in node.keywords if each.arg is not None))
    for child in ast.iter_child_nodes(node):
        yield from _uses_in(child, imported)


def _name(node: ast.AST, imported: Mapping[str, str]) -> str | None:
    """What an expression is called in torch; None for any other one."""
    parts = _parts(node)
    if not parts or parts[0] not in imported:
        return None
    return ".".join((imported[parts[0]], *parts[1:]))


def _parts(node: ast.AST) -> list[str]:
    """The parts of a dotted name; none for another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (owner := _parts(node.value)):
        return [*owner, node.attr]
    return []


@frozen(eq=False)
class Place:
    """Where a name is bound: the statements that do so, in a file of a module; none, where the name
    is that of the module itself."""

    module: str
    file: str = ""
    by: Sequence[ast.AST] = ()


@frozen(eq=False)
class Torch:
    """A torch, by the files of its wheel in a folder."""

    root: Path
    _looking: set[tuple[str, str]] = field(factory=set, init=False)

    @property
    def version(self) -> str:
        """As it says itself."""
        found = re.search(r"__version__ = '(.*)'", (self.root / "torch/version.py").read_text())
        return found[1] if found else "unknown"

    def find(self, name: str) -> Place | None:
        """Where a name is bound; None where it is not."""
        return self._below(Place("torch"), name.split(".")[1:])

    def file_of(self, name: str) -> str | None:
        """The file that has a name; None where none does."""
        found = self.find(name)
        if found is not None:
            return found.file or str(self._files(found.module)[0].relative_to(self.root))
        known = name.encode().rsplit(b".", 1)[-1] + b"\0" in _content(self.root / _LIBRARY)
        return _LIBRARY if known else None

    def keywords(self, name: str) -> frozenset[str] | None:
        """What a call takes by keyword; None where nobody can tell, or it takes any."""
        place = self.find(name)
        if place is None:
            return None
        called = [*place.by]  # overloads are several
        if called and isinstance(called[0], ast.ClassDef):
            made = (self._member(place, each) for each in ("__new__", "__init__"))
            called = [by for each in made if each is not None for by in each.by]
        found: set[str] = set()
        for function in called:
            if not isinstance(function, ast.FunctionDef) or function.args.kwarg is not None:
                return None
            found |= {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        return frozenset(found) if called else None

    def _below(self, place: Place | None, parts: Iterable[str]) -> Place | None:
        for part in parts:
            if place is None:
                return None
            place = self._member(place, part)
        return place

    def _member(self, of: Place, name: str) -> Place | None:
        if of.by:
            return next((p for n in of.by if (p := self._of_value(of, n, name)) is not None), None)
        if (of.module, name) in self._looking:  # modules that import each other
            return None
        self._looking.add((of.module, name))
        try:
            return self._of_module(of.module, name)
        finally:
            self._looking.remove((of.module, name))

    def _of_module(self, module: str, name: str) -> Place | None:
        stars: list[str] = []
        for file in self._files(module):
            for node in _bindings(file).get(name, ()):
                if (found := self._bound(module, file, node, name)) is not None:
                    return found
            stars += [_absolute(module, file, star) for star in _bindings(file).get("*", ())]
        if self._files(f"{module}.{name}"):
            return Place(f"{module}.{name}")
        whole = map(Place, filter(_is_torchs, stars))
        return next((p for other in whole if (p := self._member(other, name)) is not None), None)

    def _bound(self, module: str, file: Path, node: ast.AST, name: str) -> Place | None:
        """What a statement binds a name to: what it imports, or itself."""
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if name in (a.asname, a.name.split(".")[0]))
            target = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if name in (a.asname, a.name))
            target = f"{_absolute(module, file, node)}.{alias.name}"
        else:
            target = ""
        if _is_torchs(target):
            return self.find(target)
        same = [each for each in _bindings(file)[name] if type(each) is type(node)]
        return Place(module, str(file.relative_to(self.root)), same)

    def _of_value(self, of: Place, node: ast.AST, name: str) -> Place | None:
        """What a class has itself or of its bases, and a value of its type or its other name."""
        above: Sequence[ast.AST] = ()
        if isinstance(node, ast.ClassDef):
            if by := [*_bound_in(node.body).get(name, ()), *_assigned_to_self(node, name)]:
                return Place(of.module, of.file, by)
            above = node.bases
        elif isinstance(node, ast.AnnAssign):
            above = [node.annotation]
        elif isinstance(node, ast.Assign):
            above = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:  # a property
            above = [node.returns]
        for other in above:
            if parts := _parts(other):
                place = self._below(Place(of.module), parts)
                if place is not None and (found := self._member(place, name)) is not None:
                    return found
        return None

    def _files(self, module: str) -> list[Path]:
        path = self.root.joinpath(*module.split("."))
        tried = [path.parent / f"{path.name}{end}" for end in ("/__init__.py", ".py")]
        return [file for each in tried for file in (each, Path(f"{each}i")) if file.is_file()]


@cache
def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@cache
def _bindings(file: Path) -> dict[str, list[ast.AST]]:
    return _bound_in(ast.parse(file.read_text()).body)


def _bound_in(body: Iterable[ast.AST]) -> dict[str, list[ast.AST]]:
    """The statements that bind each name, those in branches too; "*" are the imports of all."""
    found: dict[str, list[ast.AST]] = {}
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = (each for target in targets for each in ast.walk(target))
            names = [each.id for each in inner if isinstance(each, ast.Name)]
        else:
            for name, by in _bound_in(ast.iter_child_nodes(node)).items():
                found.setdefault(name, []).extend(by)
            continue
        for name in names:
            found.setdefault(name, []).append(node)
    return found


def _assigned_to_self(node: ast.ClassDef, name: str) -> list[ast.AST]:
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Assign | ast.AnnAssign)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
        if _parts(target) == ["self", name]
    ]


def _absolute(module: str, file: Path, node: ast.AST) -> str:
    """The module that an import is of."""
    assert isinstance(node, ast.ImportFrom)
    if not node.level:
        return node.module or ""
    up = node.level - (file.stem == "__init__")
    above = module.split(".")[: len(module.split(".")) - up]
    return ".".join([*above, *([node.module] if node.module else [])])


@frozen
class Listed:
    """What the list says of a name: the file that has it, and the keywords that a call of it takes,
    of those that are used. None: nobody can tell, or it takes any."""

    file: str
    keywords: tuple[str, ...] | None = ()


def written(torch: Torch) -> str:
    """The list. Raises ValueError with what this torch lacks."""
    lines, missing = [], []
    for name, keywords in used().items():
        file, takes = torch.file_of(name), torch.keywords(name)
        if file is None:
            missing.append(name)
            continue
        if takes is not None:
            missing += [f"{name}({keyword}=…)" for keyword in sorted(keywords - takes)]
        known = sorted(keywords) if takes is not None or not keywords else None
        lines.append(f"    {json.dumps(name)}: {json.dumps([file, known])}")
    if missing:
        raise ValueError(f"torch {torch.version} lacks {', '.join(missing)}")
    names = ",\n".join(lines)
    return f'{{\n  "torch": {json.dumps(torch.version)},\n  "names": {{\n{names}\n  }}\n}}\n'


def read() -> tuple[str, dict[str, Listed]]:
    """The version of the list's torch, and what is said of each name."""
    held = json.loads(LIST.read_text())
    return held["torch"], {
        name: Listed(file, None if takes is None else tuple(takes))
        for name, (file, takes) in held["names"].items()
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        write_text(LIST, written(Torch(Path(sys.argv[1]))))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
