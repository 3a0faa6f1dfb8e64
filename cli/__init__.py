"""The command ``stager``: options in, calls, tables out; what is done is done by the package."""

from __future__ import annotations

import errno
from importlib import import_module
from typing import Any

import click

from stager.cli.output import fail
from stager.errors import StagerError
from stager.version import __version__

# Each in a module of its own name, but for two; imported when it is run, so that none waits for what others need.
_COMMANDS = (
    "arena-report", "bench", "check", "compact", "formats", "info", "leaktest", "pack", "plan", "release", "serve",
    "smoke", "stage", "top", "verify",
)  # fmt: skip
_MODULES = {"release": "serve", "stage": "serve"}


class _Group(click.Group):
    """A group whose commands end with one clear line and exit code 1 on a StagerError."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"stager.cli.{_MODULES.get(name, name)}"), name)
        # Also where a command is called by itself: Click keeps the help option that it made first.
        command.context_settings = self.context_settings
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StagerError as error:
            fail(str(error))
        except OSError as error:
            # Click ends quietly where a reader such as head has gone; what is left is a full disk and the like.
            if error.errno == errno.EPIPE:
                raise
            fail(f"{error.filename or 'output'}: {error.strerror or error}")
        ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stager")
def main() -> None:
    """Stage market bars on the GPU once; train at memory speed."""
