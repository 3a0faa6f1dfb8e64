"""Which format a file has: by its name, its header and its first rows, and only where one reading is possible."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from stager.bars.detect import NULL_WORDS, Decision, Refuse, normalise, time_form
from stager.bars.formats import Format, built_in, named
from stager.bars.numbers import Marks, marks_of, read_numbers
from stager.bars.options import PRICES, ReadOptions
from stager.bars.patterns import parse, possible
from stager.bars.sample import Sample

# The share of first rows whose high and low must enclose open and close.
_LEAST_SOUND = 0.9


def choose(
    sample: Sample, file_name: str, options: ReadOptions, refuse: Refuse
) -> tuple[Format | None, list[Decision]]:
    """The format of a text file; None: its header says all.

    Parameters
    ----------
    sample : Sample
    file_name : str
        Without folders.
    options : ReadOptions
    refuse : callable
        Makes the error of a message.

    Raises
    ------
    BarsError
        If several formats are possible, if none is and there is no header, or if the format must be told.
    """
    if options.format is not None:
        described = named(options.format)
        return described, [Decision("format", described.name, "as told")]
    if all(role in options.columns for role in ("time", *PRICES)):
        return None, []
    found = [each for each in built_in().values() if _fits(each, sample, file_name)]
    found = [each for each in found if each.files is not None] or found
    most = max((len(each.header) for each in found if sample.has_header), default=0)
    found = [each for each in found if not sample.has_header or len(each.header) == most]
    if len(found) == 1 and sample.has_header and _is_answered(found[0], options):
        return None, []
    if len(found) == 1 and not found[0].confirm:
        what = "the header" if sample.has_header else "the first rows"
        source = f"{what} and the file's name" if found[0].files is not None else what
        return found[0], [Decision("format", found[0].name, source)]
    if found:
        several = " or ".join(f"--format {each.name} ({each.confirm or each.title})" for each in found)
        raise refuse(f"the file itself can't tell its format for certain; if it is right, say {several}")
    if not sample.has_header:
        raise refuse(
            f"the first line is data, not a header, and no known format has such rows: {sample.header.strip()[:80]!r}; "
            "say which columns are which with --column time=1 --column open=2 and so on, or describe the format in a "
            "TOML file (`stager formats new FILE` drafts one)"
        )
    return None, []


def choose_named(
    schema: pa.Schema, file_name: str, options: ReadOptions, refuse: Refuse
) -> tuple[Format | None, list[Decision]]:
    """The format of a table, by its names and types; None: they say all. Raises as :func:`choose`."""
    if options.format is not None:
        return named(options.format), [Decision("format", named(options.format).name, "as told")]
    plain = [normalise(name) for name in schema.names]
    prices = [schema.field(plain.index(role)).type for role in PRICES if role in plain]
    is_whole = bool(prices) and all(pa.types.is_integer(kind) for kind in prices)
    found = [
        each
        for each in built_in().values()
        if each.header
        and all(normalise(name) in plain for name in each.header)
        and (each.files is None or re.search(each.files, file_name) is not None)
        and (is_whole or each.numbers.price_scale == 1)
        and not _is_answered(each, options)
    ]
    most = max((len(each.header) for each in found), default=0)
    found = [each for each in found if len(each.header) == most]
    if len(found) == 1 and not found[0].confirm:
        return found[0], [Decision("format", found[0].name, "the names of the columns")]
    if found:
        several = " or ".join(f"--format {each.name} ({each.confirm or each.title})" for each in found)
        raise refuse(f"the file itself can't tell its format for certain; if it is right, say {several}")
    return None, []


def _is_answered(described: Format, options: ReadOptions) -> bool:
    """Whether all that a format would add is a zone, and the zone was told."""
    is_zone_only = described.numbers.price_scale == 1 and described.time.zone is not None
    return bool(described.confirm) and is_zone_only and options.zone is not None


def _fits(described: Format, sample: Sample, file_name: str) -> bool:
    if described.files is not None and re.search(described.files, file_name) is None:
        return False
    if described.delimiter is not None and described.delimiter != sample.delimiter:
        return False
    plain = [normalise(name) for name in sample.names]
    if sample.has_header:
        if not described.header or not all(normalise(name) in plain for name in described.header):
            return False
    elif len(described.positions) != len(sample.names):
        return False
    else:
        plain = [normalise(name) for name in described.positions]
    rows = [cells for _, cells in sample.rows if len(cells) == len(plain)]
    return not rows or _reads(described, plain, rows)


def _reads(described: Format, plain: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first rows can be read so, and are bars."""

    def cells(name: str) -> list[str]:
        i = plain.index(normalise(name))
        return [row[i].strip() for row in rows]

    time_names = [name for name in described.names_of("time") if normalise(name) in plain]
    names = [described.names_of(role)[0] for role in PRICES]
    if not time_names or any(normalise(name) not in plain for name in names):
        return False
    times = [" ".join(parts) for parts in zip(*(cells(name) for name in time_names), strict=True)]
    times = [time for time in times if time not in NULL_WORDS]
    if times and not _reads_times(described, times, len(time_names) == len(described.names_of("time"))):
        return False
    if described.numbers.price_scale > 1 and any(
        not cell.lstrip("+-").isdigit() for name in names for cell in cells(name) if cell not in NULL_WORDS
    ):
        return False
    texts = [pa.chunked_array([pa.array(cells(name), pa.string())]) for name in names]
    marks = marks_of(texts, described.numbers, None, None)
    if not isinstance(marks, Marks):
        marks = Marks(".", ",")
    prices = []
    for text in texts:
        numbers, bad = read_numbers(text, marks, described.numbers)
        if bad >= 0:
            return False
        prices.append(numbers.to_pylist())
    bars = [bar for bar in zip(*prices, strict=True) if None not in bar]
    sound = sum(high >= max(open_, close) and low <= min(open_, close) for open_, high, low, close in bars)
    return bool(sound >= _LEAST_SOUND * len(bars))


def _reads_times(described: Format, times: Sequence[str], is_whole: bool) -> bool:
    """Whether these texts are such times; without all of their columns a pattern says nothing."""
    rule = described.time
    if rule.pattern is not None and is_whole:
        return bool(parse(pa.chunked_array([pa.array(times, pa.string())]), rule.pattern)[1] < 0)
    if rule.unit is not None:
        return all(time_form(time) == "integer" for time in times)
    return None not in map(time_form, times) or bool(possible(times, None))
