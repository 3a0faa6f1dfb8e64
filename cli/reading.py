"""The options that say how bar files are to be read, the same for every command that reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from stager.bars.options import ROLES, ReadOptions


def _columns(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for value in values:
        role, _, name = value.partition("=")
        if not name or role not in ROLES:
            raise click.BadParameter(f"{value!r} is not ROLE=NAME with a role of {', '.join(ROLES)}")
        if role in columns:
            raise click.BadParameter(f"the role {role} is given twice: {columns[role]!r} and {name!r}")
        columns[role] = name
    return columns


_OPTIONS = (
    click.option(
        "--column",
        "columns",
        multiple=True,
        callback=_columns,
        metavar="ROLE=NAME",
        help="The column of a role (time, symbol, open, high, low, close, volume); repeat it.",
    ),
    click.option("--zone", help="Zone of time stamps that carry none: America/New_York, UTC, -05:00."),
    click.option("--symbol", help="The symbol, if no column holds it."),
    click.option(
        "--label",
        type=click.Choice(["open", "close"]),
        help="Whether a stamp marks the start or the end of its bar [from the format, else open].",
    ),
    click.option("--interval", help="Spacing of the bars: 1min, 5min, 1h, 1d, 1w, 1mo [inferred]."),
    click.option(
        "--session-close",
        metavar="'HH:MM ZONE'",
        help="When sessions of daily files close: '16:00 America/New_York' [the next 00:00 UTC].",
    ),
    click.option(
        "--adjustment",
        type=click.Choice(["raw", "split", "total", "unknown"]),
        default="unknown",
        show_default=True,
        help="What prices and volume were adjusted for.",
    ),
    click.option("--allow-years", nargs=2, type=int, metavar="FIRST LAST", help="Plausible years [1980 to next year]."),
    click.option(
        "--nan",
        type=click.Choice(["error", "null"]),
        default="error",
        show_default=True,
        help="What a literal NaN or infinity in a price is: an error, or no bar.",
    ),
    click.option("--delimiter", help="Character between the fields [from the header]."),
    click.option(
        "--format",
        metavar="NAME|FILE.toml",
        help="The files' format, see `stager formats` [from names, headers and first rows].",
    ),
    click.option("--time-pattern", help="How times are written, such as '%d.%m.%Y %H:%M'."),
    click.option("--date-order", type=click.Choice(["dmy", "mdy"]), help="Whether the day or the month stands first."),
    click.option("--encoding", help="Encoding of text that is no UTF-8: latin-1, gbk, utf-16-le."),
    click.option("--decimal", type=click.Choice([".", ","]), help="The mark before a fraction [from the cells]."),
    click.option("--thousands", help="The marks between thousands [from the cells]."),
    click.option(
        "--field",
        type=click.Choice(["open", "high", "low", "close", "volume"]),
        help="What the cells hold where every column is a symbol.",
    ),
    click.option(
        "--duplicates",
        type=click.Choice(["error", "first", "last"]),
        default="error",
        show_default=True,
        help="Which row of one symbol and time is kept where several differ, in the order of files.",
    ),
)


def read_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of reading, which it gets as one argument ``read``."""

    @wraps(command)
    def with_options(**values: Any) -> None:
        read = ReadOptions(**{name: values.pop(name) for name in ReadOptions.__struct_fields__})
        command(read=read, **values)

    decorated: Callable[..., None] = with_options
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
