"""`schedir docs`: open a page of the documentation, or print where it is.

    schedir docs
    schedir docs S301

Open a page of the documentation in the browser. Without a display, or in a pipe, print the path of
the page. `make docs` in a checkout of schedir builds the pages; until then the command prints the
path of the Markdown source. Exit code: 0 there is such a page, 2 there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import schedir
from schedir.cli.explain import rule_of
from schedir.cli.terminal import say
from schedir.errors import SchedirError
from schedir.render.text import is_terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
    built = _pages(package.parent / "build" / "docs")
    # In a checkout, or as it is installed.
    pages = built or _pages(package.parent / "docs") or _pages(package / "docs")
    if not pages:
        raise SchedirError("this installation of schedir has no documentation; install it again")
    name, fragment = _find(args.page.lower(), args, pages)
    path = pages[name]
    if not built:
        say("note", "the pages are not built: `make docs` in a checkout of schedir builds them")
        print(path)
    elif not (_has_display() and _opened(path.as_uri() + fragment)):
        print(f"{path}{fragment}")
    return 0


def _pages(folder: Path) -> dict[str, Path]:
    """The pages below a folder by name, such as `how-to/read-a-diagnostic`."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".html", ".md", ".rst")
    }


def _find(wanted: str, args: argparse.Namespace, pages: dict[str, Path]) -> tuple[str, str]:
    """The name of the page that the user asks for, and the place in it: `#s301-wait-cycle`, or
    empty. Raises SchedirError, with near names, if there is none."""
    if wanted in args.commands:
        return "reference/commands", f"#schedir-{wanted}"
    if rule := rule_of(wanted):
        return "reference/rules", f"#{rule.code.lower()}-{rule.name}"
    found = [name for name in pages if wanted in (name, name.rpartition("/")[2].lower())]
    if wanted in found or len(found) == 1:
        return (wanted if wanted in found else found[0]), ""
    near = found or _near(wanted, [*args.commands, *pages])
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    what = "several pages are" if found else "no page is"
    raise SchedirError(f"{what} named {args.page!r}{hint}")


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
