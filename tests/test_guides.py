"""The guides' blocks of Python are scripts that run as printed, on two ranks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from schedir.cli import main
from tests.runtime.on_ranks import on_ranks

DOCS = Path(__file__).resolve().parents[1] / "docs"


def script(guide: str) -> str:
    """All blocks of Python of a guide, each in its lines."""
    lines = (DOCS / guide).read_text().splitlines()
    inside = False
    kept = []
    for line in lines:
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        kept.append(line if inside and not fence else "")
    return "\n".join(kept)


@on_ranks(2)
@pytest.mark.parametrize("guide", ["training.md", "migration.md", "full_pipeline.md"])
def test_a_guide_runs_as_printed(
    guide: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = [tmp_path]
    dist.broadcast_object_list(folder)  # checkpoints are where all ranks can see them
    monkeypatch.chdir(folder[0])
    code = compile(script(guide), str(DOCS / guide), "exec")
    exec(code, {"__name__": "__main__"})


def test_statements_are_counted_as_told() -> None:
    guide = (DOCS / "migration.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    torch, deepspeed, colossal, megatron = (
        sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(block)))
        for block in blocks[1:]
    )
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \|$", guide, re.MULTILINE)
    told = [int(ours) for _, ours in rows]
    assert told == [torch, deepspeed, colossal, colossal - 1, megatron]  # ViT has no scheduler
    assert all(int(theirs) >= int(ours) for theirs, ours in rows)


def test_a_full_pipeline_is_drawn_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "full_pipeline.md").read_text()
    shown = re.findall(r"^```\n\$ schedir ([^\n]*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [command.split()[1] for command, _ in shown] == ["1f1b", "pipedream"]
    for command, text in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.startswith(text)
