"""`schedir docs`: open a page of the documentation, or print where it is."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import attrs

import schedir
from schedir.checker import RETIRED, RULES
from schedir.cli.terminal import say
from schedir.errors import SchedirError
from schedir.render.text import is_terminal

EXAMPLES = ("schedir docs", "schedir docs S301")

_SOURCE = Path("docs")
_BUILT = Path("build", "docs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command and its description."""
    parser.description = (
        "Open a page of the documentation in the browser. Without a display, or in a pipe, print "
        "the path of the page. `make docs` in a checkout of schedir builds the pages; until then "
        "the command prints the path of the Markdown source. Exit code: 0 there is such a page, "
        "2 there is none."
    )
    parser.add_argument(
        "page",
        metavar="PAGE",
        nargs="?",
        default="index",
        help="the name of a page, such as read-a-diagnostic; the name of a command, such as check; "
        "or a code, such as S301 (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Open the page, or print its path."""
    package = Path(schedir.__file__).resolve().parent
    built = _pages(package.parent / _BUILT, ".html")
    pages = built or _pages(package.parent / _SOURCE, ".md", ".rst")
    pages = pages or _pages(package / _SOURCE, ".md", ".rst")  # as it is installed
    if not pages:
        raise SchedirError("this installation of schedir has no documentation; install it again")
    page = _find(args.page, [*args.commands], pages)
    if not built:
        say("note", "the pages are not built: `make docs` in a checkout of schedir builds them")
        print(pages[page.name])
    elif not (_has_display() and _opened(pages[page.name].as_uri() + page.fragment)):
        print(f"{pages[page.name]}{page.fragment}")
    return 0


@attrs.frozen
class _Place:
    """A page, such as `reference/rules`, and where in it: `#s301-wait-cycle`, or empty."""

    name: str
    fragment: str = ""


def _pages(folder: Path, *extensions: str) -> dict[str, Path]:
    """The pages below a folder by name, such as `how-to/read-a-diagnostic`."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix in extensions
    }


def _find(asked: str, commands: list[str], pages: dict[str, Path]) -> _Place:
    """The place that the user asks for. Raises SchedirError, with near names, if there is none."""
    wanted = asked.lower()
    if wanted in commands:
        return _Place("reference/commands", f"#schedir-{wanted}")
    wanted = RETIRED.get(wanted.upper(), wanted).lower()
    for rule in RULES.values():
        if wanted in (rule.code.lower(), rule.name):
            return _Place("reference/rules", f"#{rule.code.lower()}-{rule.name}")
    if wanted in pages:
        return _Place(wanted)
    found = [name for name in pages if name.lower().endswith(f"/{wanted}")]
    if len(found) == 1:
        return _Place(found[0])
    near = found or _near(wanted, [*commands, *pages])
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    what = "several pages are" if found else "no page is"
    raise SchedirError(f"{what} named {asked!r}{hint}")


def _near(wanted: str, names: list[str]) -> list[str]:
    """The names that contain what is wanted, or else the closest ones."""
    from difflib import get_close_matches

    last = {name: name.rpartition("/")[2].lower() for name in names}
    close = get_close_matches(wanted, last.values(), n=3, cutoff=0.5)
    return [name for name in last if wanted in last[name]] or [
        name for name in last if last[name] in close
    ]


def _has_display() -> bool:
    """Whether a person looks at stdout, on a machine that can open a window."""
    if not is_terminal(sys.stdout):
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _opened(url: str) -> bool:
    """Open a page in the browser; False if there is no browser."""
    import webbrowser

    return webbrowser.open(url)
