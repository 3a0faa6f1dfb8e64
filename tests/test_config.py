"""Configuration: argument > environment > TOML > default, and what is wrong with a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from stager.config import format_nbytes, parse_nbytes, read_toml, resolve
from stager.errors import ConfigError


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    name: str = "default"
    share: float = 0.5
    trace: bool = False
    mode: Literal["full"] | bool = "full"
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class CacheData:
    size: int
    _: dataclasses.KW_ONLY
    name: str = "default"
    share: float = 0.5
    trace: bool = False
    mode: Literal["full"] | bool = "full"
    limit: int | None = None
    words: Sequence[str] = dataclasses.field(default_factory=tuple)
    made: str = dataclasses.field(init=False, default="")


KINDS = [Cache, CacheData]


@pytest.mark.parametrize("kind", KINDS)
class TestResolve:
    def test_precedence(self, kind: type[Any]) -> None:
        toml: dict[str, Any] = {"size": 1, "name": "toml"}
        environ = {"STAGER_CACHE_NAME": "environment"}
        assert resolve(kind, "cache", toml={"size": 1}, environ={}).name == "default"
        assert resolve(kind, "cache", toml=toml, environ={}).name == "toml"
        assert resolve(kind, "cache", toml=toml, environ=environ).name == "environment"
        given = resolve(kind, "cache", toml=toml, environ=environ, arguments={"name": "argument"})
        assert (given.name, given.size) == ("argument", 1)

    def test_an_argument_of_none_is_not_given(self, kind: type[Any]) -> None:
        found = resolve(kind, "cache", toml={"size": 1, "name": "toml"}, arguments={"name": None}, environ={})
        assert found.name == "toml"

    def test_the_process_environment_is_the_default(self, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAGER_CACHE_SIZE", "12")
        assert resolve(kind, "cache").size == 12

    def test_text_of_the_environment_becomes_typed(self, kind: type[Any]) -> None:
        environ = {
            "STAGER_CACHE_SIZE": "3",
            "STAGER_CACHE_SHARE": "0.25",
            "STAGER_CACHE_TRACE": "true",
            "STAGER_CACHE_MODE": "false",
            "STAGER_CACHE_LIMIT": "null",
            "STAGER_CACHE_NAME": "12",
        }
        found = resolve(kind, "cache", environ=environ)
        assert (found.size, found.share, found.trace, found.mode) == (3, 0.25, True, False)
        assert (found.limit, found.name) == (None, "12")
        assert resolve(kind, "cache", environ={"STAGER_CACHE_SIZE": "1", "STAGER_CACHE_MODE": "full"}).mode == "full"

    def test_whole_numbers_are_shares_too(self, kind: type[Any]) -> None:
        assert resolve(kind, "cache", toml={"size": 1, "share": 1}, environ={}).share == 1.0

    @pytest.mark.parametrize(
        ("toml", "environ", "arguments", "words"),
        [
            ({"size": "3"}, {}, {}, ["[cache] size", "'3'", "int"]),
            ({"size": 1.5}, {}, {}, ["[cache] size", "1.5"]),
            ({"size": True}, {}, {}, ["[cache] size", "True"]),
            ({"size": 1, "trace": "true"}, {}, {}, ["[cache] trace", "bool"]),
            ({"size": 1, "mode": "half"}, {}, {}, ["[cache] mode", "'half'"]),
            ({"size": 1}, {"STAGER_CACHE_SIZE": "many"}, {}, ["STAGER_CACHE_SIZE", "'many'"]),
            ({"size": 1}, {"STAGER_CACHE_SIZE": ""}, {}, ["STAGER_CACHE_SIZE", "''"]),
            ({"size": 1}, {"STAGER_CACHE_TRACE": "maybe"}, {}, ["STAGER_CACHE_TRACE", "'maybe'"]),
            ({"size": 1}, {}, {"size": "3"}, ["size", "'3'"]),
            ({"size": 1}, {}, {"name": 7}, ["name", "7", "str"]),
            ({"size": 1, "seize": 2}, {}, {}, ["[cache] seize", "no option", "share, size"]),
            ({"size": 1}, {}, {"seize": 2}, ["seize", "no option", "size"]),
            ({}, {}, {}, ["[cache] size", "not given", "STAGER_CACHE_SIZE"]),
            ({}, {}, {"size": None}, ["[cache] size", "not given"]),
        ],
    )
    def test_refuses(
        self, kind: type[Any], toml: Any, environ: dict[str, str], arguments: dict[str, Any], words: list[str]
    ) -> None:
        with pytest.raises(ConfigError) as refused:
            resolve(kind, "cache", toml=toml, environ=environ, arguments=arguments)
        for word in words:
            assert word in str(refused.value)

    @pytest.mark.parametrize("table", [3, "text", [1, 2], True])
    def test_refuses_a_value_where_a_table_belongs(self, kind: type[Any], table: Any) -> None:
        with pytest.raises(ConfigError, match=r"\[cache\]"):
            resolve(kind, "cache", toml=table, environ={})


def test_fields_made_by_the_class_are_no_options() -> None:
    with pytest.raises(ConfigError, match="made"):
        resolve(CacheData, "cache", toml={"size": 1, "made": "x"}, environ={})


def test_sequences_come_from_toml() -> None:
    assert list(resolve(CacheData, "cache", toml={"size": 1, "words": ["a", "b"]}, environ={}).words) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5KiB", 1536),
        ("3k", 3072),
        ("1T", 1 << 40),
        ("1TB", 10**12),
        ("100", 100),
        ("7b", 7),
        (" 8MB ", 8 * 10**6),
        (1234, 1234),
        ("9007199254740993", 2**53 + 1),
        ("0.3TB", 3 * 10**11),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


def test_shares_are_of_a_total() -> None:
    assert parse_nbytes("40%", total=1000) == 400
    assert parse_nbytes("100 %", total=1000) == 1000
    assert parse_nbytes("12.5%", total=1000) == 125


@pytest.mark.parametrize(
    "text",
    ["0", 0, "-1", -1, "abc", "1e3", "", " ", "MiB", "1.MiB", ".5GB", "1,000", "5XB", "40%", "nan", "inf", "0x10",
     True, 1.5, None, "0.5", "1 2"],
)  # fmt: skip
def test_no_sizes(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"^size is ") as refused:
        parse_nbytes(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "1" * 400 + "TiB"])
def test_endless_numbers_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^size is "):
        parse_nbytes(text)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%"])
def test_no_shares(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^capacity is "):
        parse_nbytes(text, total=1000, name="capacity")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 30, "5.00 GiB"), (3 << 40, "3.00 TiB"),
     (5000 << 40, "5000.00 TiB")],
)  # fmt: skip
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_toml_is_read(tmp_path: Path) -> None:
    file = tmp_path / "stager.toml"
    file.write_text('source = "bars.pack"\n[batches]\nwindow = 64\n')
    assert read_toml(file) == {"source": "bars.pack", "batches": {"window": 64}}


def test_toml_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "stager.toml"
    with pytest.raises(ConfigError, match=r"stager.toml: there is no such"):
        read_toml(file)
    file.write_text("[batches\n")
    with pytest.raises(ConfigError, match=r"stager.toml: .*line 1"):
        read_toml(file)
    file.write_bytes(b"name = '\xff'\n")
    with pytest.raises(ConfigError, match=r"stager.toml: "):
        read_toml(file)
    with pytest.raises(ConfigError, match="not readable"):
        read_toml(tmp_path)
