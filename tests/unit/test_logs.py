"""The log: which request a line is about, one JSON object a line where asked for, and rotation."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxbcd.serve import logs


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    """The root logger, with its handlers and level put back."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    for handler in set(logger.handlers) - set(handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)


def test_a_line_names_the_request_it_is_about(tmp_path: Path) -> None:
    logs.start("info", tmp_path / "log")
    log = logging.getLogger("somebody")
    log.info("nobody's: %d", 1)
    token = logs.request_id.set("0123456789abcdef")
    log.info("its own: %d", 2)
    logs.request_id.reset(token)
    log.info("given: %d", 3, extra={"request": "fedcba9876543210"})
    lines = [line.partition(" somebody: ")[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == ["nobody's: 1", "[01234567] its own: 2", "[fedcba98] given: 3"]


def test_json_lines_carry_everything(tmp_path: Path) -> None:
    logs.start("debug", tmp_path / "log", "json")
    logs.request_id.set("abc")
    try:
        raise ValueError("odd\nthing")
    except ValueError:
        logging.getLogger("x").exception("two\nlines", extra={"tokens": 3, "path": Path("/p")})
    (line,) = (tmp_path / "log").read_text().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "two\nlines"
    assert (entry["level"], entry["logger"], entry["request"]) == ("error", "x", "abc")
    assert (entry["tokens"], entry["path"]) == (3, "/p")
    assert "odd" in entry["exception"]
    assert entry["time"].endswith("Z")


def test_the_level_can_be_changed(tmp_path: Path) -> None:
    logs.start("error", tmp_path / "log")
    logging.getLogger("x").info("unheard")
    logs.set_level("info")
    logging.getLogger("x").info("heard")
    assert "unheard" not in (tmp_path / "log").read_text()


def test_a_full_log_is_rotated_and_all_of_its_files_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 1000)
    monkeypatch.setattr(logs, "FILES_KEPT", 2)
    monkeypatch.setattr("os.umask", lambda mask: mask)
    logs.start("info", tmp_path / "logs" / "log")
    for n in range(100):
        logging.getLogger("x").info("line %d %s", n, "x" * 80)
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert "line 99" in files[0].read_text()


def test_no_name_begins_a_line_of_the_log() -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "for %s: done", ("me\n2030 INFO a: \x1b[2Jünü",), None)
    assert logs.Text().format(record).endswith("INFO a: for me\\n2030 INFO a: \\x1b[2Jünü: done")
