"""Files of data are no programs: whatever they hold, they are read, or refused with a SchedirError,
in memory that their size bounds."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, SchedirError, Timeline
from schedir.ir import loads_torch_csv
from schedir.library import load
from schedir.simulator import load_timelines, save_timelines
from tests.sweeps import sweep

Read = Callable[[Path], object]


def of_list(path: Path) -> object:
    return schedir.check(load(path)).ok


READERS: dict[str, Read] = {
    "list.sched": of_list,
    "list.csv": of_list,
    "timelines.json": load_timelines,
    "timeline.json": Timeline.load,
    "costs.json": CostModel.load,
}
LINE = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound files of every sort."""
    folder = tmp_path_factory.mktemp("files")
    Path(folder, "list.sched").write_text(schedir.dumps(LINE.schedule))
    Path(folder, "list.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    for file in ("timelines.json", "timeline.json"):
        save_timelines([LINE], folder / file)
    CostModel(forward=(1, 2), latency={(0, 1): 0.5, (1, 0): 2}).save(folder / "costs.json")
    return folder


def refused_or_read(read: Read, path: Path) -> bool:
    """Whether it was read; where it was not, the error names the file and is of one short line."""
    try:
        read(path)
    except SchedirError as error:
        said = str(error)
    else:
        return True
    assert path.name in said
    assert len(said) < 600
    return False


@pytest.mark.parametrize("name", READERS)
def test_sound_files_are_read(folder: Path, name: str) -> None:
    assert refused_or_read(READERS[name], folder / name)


@pytest.mark.parametrize("name", READERS)
@given(st.data())
def test_any_bytes(folder: Path, name: str, data: st.DataObject) -> None:
    sound = (folder / name).read_bytes()
    content = data.draw(st.binary() | st.text().map(lambda text: text.encode(errors="replace")))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(sound))] * 2)))
    kept = data.draw(st.booleans())
    path = folder / f"drawn-{name}"
    path.write_bytes(sound[:first] + content + sound[last:] if kept else content)
    refused_or_read(READERS[name], path)


ODD: list[Any] = [None, True, -1, 0.5, 1e308, 10**400, 1e-320, "", "inf", "0->1", [], {}, [[]]]
JSON = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def replaced(value: Any, data: st.DataObject) -> Any:
    """The value with one part of it, however deep, in whose place another one stands."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 3)):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(list(keys)))
        value[key] = replaced(value[key], data)
        return value
    return data.draw(JSON)


@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
@given(st.data())
def test_any_json(folder: Path, name: str, data: st.DataObject) -> None:
    content = replaced(json.loads((folder / name).read_bytes()), data)
    path = folder / f"drawn-{name}"
    path.write_text(json.dumps(content))
    refused_or_read(READERS[name], path)


@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
@pytest.mark.parametrize("form", ["[{}]", '{{"forward": {}}}', '{{"schedir timelines": {}}}'])
def test_nesting(folder: Path, name: str, form: str) -> None:
    path = folder / f"deep-{name}"
    depths = [10, 300, *range(700, 1000, 7), 10**5]
    for depth, (opening, closing) in product(depths, (("[", "]"), ('{"a":', "}"))):
        path.write_text(form.format(opening * depth + "1" + closing * depth))
        assert not refused_or_read(READERS[name], path)


@pytest.mark.parametrize(
    "number", ["1e999999", "-1e999999", "9" * 4000, "9" * 5000, "NaN", "Infinity"]
)
def test_numbers_beyond(folder: Path, number: str) -> None:
    whole = (folder / "timelines.json").read_text()
    texts = {
        "costs.json": f'{{"forward": {number}}}',
        "timelines.json": whole.replace('"starts": [0', f'"starts": [{number}'),
        "timeline.json": whole.replace('"schedule":0', f'"schedule":{number}'),
    }
    for name, text in texts.items():
        assert number in text
        path = folder / f"number-{name}"
        path.write_text(text)
        assert not refused_or_read(READERS[name], path)


HEAD = "schedir 1\nname a\nmicrobatches {many}\nplacement 0\nrank 0: "
QUICK = ["check", "show", "compare 1f1b", "export --format torch-csv"]
MORE = ["check --output-format json", "show --why"]
MORE += [f"export --format {form}" for form in ("svg", "html", "perfetto")]
LIMITED = """\
import resource, sys
from schedir.cli import main
codes = [main([*command.split(), sys.argv[1]]) for command in ("check", "show", "compare")]
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
codes = [main([*command.split(), sys.argv[1]]) for command in sys.argv[2:]]
sys.exit(0 if set(codes) <= {0, 1, 2} else 9)
"""


@pytest.mark.parametrize(
    "text",
    [
        HEAD.format(many=1000000000000) + "0F0 0B0\n",
        HEAD.format(many=999999999)
        + "0F0@999999999 0I0 0W0 0OPTIM_STEP 0F1 0B1 0F999999998 0B999999998\n",
        HEAD.format(many=1) + "999999998F0 999999998B0 0F999999999 0F999999999999\n",
    ],
)
@sweep("commands", [QUICK, MORE], quick=[QUICK], ids=len)
def test_numbers_in_lists_cost_no_memory(tmp_path: Path, text: str, commands: list[str]) -> None:
    Path(tmp_path, "a.sched").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "a.sched", *commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_csv_of_any_numbers() -> None:
    for text in ("0F999999998,0B999999998\n", "999999998F0\n", "0F99999999999\n"):
        try:
            found = loads_torch_csv(text)
        except SchedirError:
            continue
        assert not schedir.check(found).ok


def test_what_may_run_what_it_reads_stands_in_one_place() -> None:
    """Where processes of one job talk, as SECURITY.md says; files are read by other means."""
    package = Path(schedir.__file__).parent
    may_run = re.compile(
        r"pickle\.(loads?|Unpickler)\(|(eval|exec|marshal\.loads?)\(|torch\.load\((?!.*weights_only=True)"
    )
    texts = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    found = {
        file.relative_to(package).as_posix()
        for file, text in texts.items()
        if re.search(r"(pickle|marshal)\.|torch\.load|(?<!\.)\b(eval|exec)\(", text)
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and may_run.match(ast.unparse(call))
    }
    assert found == {"runtime/processes/control.py"}
