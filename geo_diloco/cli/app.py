"""`geo-diloco`: the commands, and the one border where an error becomes a line of text and an exit status.

A command's module is imported when it is called or listed; none imports torch, hivemind or transformers before it runs.
Help is plain text: drawing it with rich would take most of its time.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from geo_diloco import __version__
from geo_diloco.errors import GeoDilocoError, UserError

_COMMANDS = {
    "demo": "demo:demo",
    "bootstrap": "bootstrap:bootstrap",
    "init": "init:init",
    "start": "start:start",
    "join": "join:join",
    "status": "status:status",
    "handover": "handover:handover",
    "amend": "amend:amend",
    "reform": "reform:reform",
    "export": "export:export",
    "replay": "replay:replay",
    "bench": "bench:app",
    "simulate": "simulate:app",
}
"""In the order of `--help`: module and attribute, a function or a group of its own."""


_Mistake: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What typer's parser raises; it brings its own copy of click, or imports one."""


_OF_A_PATH = frozenset({errno.ENAMETOOLONG, errno.EACCES, errno.EPERM})
"""What a path that a person gave may be, found by merely looking there: an invite where a folder is wanted, or a folder
of somebody else's."""


WIDTH_MAX = 120
"""Of help, on a terminal that is that wide."""


class _Group(TyperGroup):
    """Its help says of each command the whole first sentence, on as many lines as that takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, each.get_short_help_str(len(each.help or "") + 1))
            for name, each in commands
            if each and not each.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class _Commands(_Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _Mistake as exc:
            near = difflib.get_close_matches(args[0], _COMMANDS)
            if near:
                exc.message = f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, near))}?"
            raise

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands[cmd_name]


def _load(name: str) -> Any:
    module, _, attribute = _COMMANDS[name].partition(":")
    target = getattr(import_module(f"geo_diloco.cli.{module}"), attribute)
    if not isinstance(target, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(target)
        target = alone
    else:
        target.info.cls = _Group
    command = typer.main.get_command(target)
    command.name = name
    return command


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH_MAX},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"geo-diloco {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train one model on machines that are far apart."""


def main() -> None:
    """The console script. An error raised on purpose ends in one line on stderr; any other is a bug, with traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that this terminal can't show is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(prog_name="geo-diloco", standalone_mode=False)
    except _Mistake as exc:
        if not exc.format_message().startswith("Usage:"):
            _end(UserError(_mistyped(exc)))
        # A group called without a command: its help.
        with contextlib.suppress(OSError):
            print(exc.format_message(), file=sys.stderr)
        raise SystemExit(UserError.exit_status) from None
    except GeoDilocoError as exc:
        _end(exc)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except OSError as exc:
        if exc.errno not in _OF_A_PATH or exc.filename is None:
            raise
        name, reason = str(exc.filename), (exc.strerror or str(exc)).lower()
        shown = f"{name[:60]}..." if exc.errno == errno.ENAMETOOLONG else name
        _end(UserError(f"{shown}: {reason}; give a path that you can use"))
    raise SystemExit(status if isinstance(status, int) else 0)


def _end(failure: GeoDilocoError) -> NoReturn:
    with contextlib.suppress(OSError):
        print(f"error {failure.code}: {' '.join(str(failure).split())}", file=sys.stderr)
    raise SystemExit(failure.exit_status) from None


def _mistyped(exc: Any) -> str:
    """What is wrong with a command line, and where to look."""
    context = getattr(exc, "ctx", None)
    command = "geo-diloco" if context is None else context.command_path
    said = exc.format_message().rstrip(".")
    return f"{said}{' ' if said.endswith('?') else '; '}see `{command} --help`"
