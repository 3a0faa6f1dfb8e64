"""The command ``stager``: options in, calls, tables out; what is done is done by the package."""

from __future__ import annotations

import errno
from typing import Any

import click

from stager.cli.arena_report import arena_report
from stager.cli.bench import bench
from stager.cli.check import check
from stager.cli.compact import compact
from stager.cli.formats import formats
from stager.cli.info import info
from stager.cli.leaktest import leaktest
from stager.cli.output import fail
from stager.cli.pack import pack
from stager.cli.plan import plan
from stager.cli.serve import release, serve, stage
from stager.cli.smoke import smoke
from stager.cli.top import top
from stager.cli.verify import verify
from stager.errors import StagerError
from stager.version import __version__


class _Group(click.Group):
    """A group whose commands end with one clear line and exit code 1 on a StagerError."""

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


for _command in (
    arena_report, bench, check, compact, formats, info, leaktest, pack, plan, release, serve, smoke, stage, top,
    verify,
):  # fmt: skip
    # Also where a command is called by itself: Click keeps the help option that it made first.
    _command.context_settings = main.context_settings
    main.add_command(_command)
