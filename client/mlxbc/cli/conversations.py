"""Owns the log of conversations: one file of JSON lines each, in the user's data directory, readable by the user alone.

Nothing is written unless the user has said so: `mlxbc log on` for everything, `--log` for one conversation. A
conversation that is in the log can be gone on with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from mlxbc import paths, wire
from mlxbc.errors import ConfigError
from mlxbc.result import Result

_ENDING = ".jsonl"
_ALWAYS = "always"
"""The file whose presence switches the log on."""


class Turn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question and its answer.

    Attributes:
        time: of the answer's end, in seconds since 1970.
        model: that answered.
        user: what was asked.
        assistant: what was said.
        reason: why it ended.
        usage: tokens.
        system: the system prompt from here on, where it is another than before; empty is none.
        reasoning: what was thought.
        raw: `user` was sent without a chat template.
    """

    time: float
    model: str
    user: str
    assistant: str
    reason: wire.FinishReason
    usage: wire.Usage
    system: str | None = None
    reasoning: str = ""
    raw: bool = False


class Conversation:
    """One conversation in the log.

    Attributes:
        cid: its name, which sorts by time.
        turns: what has been said.
    """

    def __init__(self, cid: str, turns: list[Turn]) -> None:
        self.cid = cid
        self.turns = turns

    def __repr__(self) -> str:
        return f"Conversation({self.cid}, {len(self.turns)} turns)"

    @property
    def model(self) -> str | None:
        """The model that answered last."""
        return self.turns[-1].model if self.turns else None

    @property
    def system(self) -> str | None:
        """The system prompt that holds."""
        return next((turn.system for turn in reversed(self.turns) if turn.system is not None), None)

    def messages(self, system: str | None) -> list[wire.Message]:
        """The conversation so far, with this system prompt or its own."""
        system = self.system if system is None else system
        messages = [wire.Message(role="system", content=system)] if system else []
        for turn in self.turns:
            messages.append(wire.Message(role="user", content=turn.user))
            messages.append(wire.Message(role="assistant", content=turn.assistant))
        return messages

    def add(self, turn: Turn) -> None:
        """Write a turn at its end.

        Raises:
            ConfigError: it can't be written.
        """
        now, before = turn.system or "", self.system or ""
        turn = msgspec.structs.replace(turn, system=None if now == before else now)
        self.turns.append(turn)
        self._write(lambda lines: [*lines, msgspec.json.encode(turn)])

    def take_back(self) -> None:
        """Take the last turn back.

        Raises:
            ConfigError: it can't be written.
        """
        if self.turns:
            self.turns.pop()
            self._write(lambda lines: lines[:-1])

    def _write(self, change: Callable[[list[bytes]], list[bytes]]) -> None:
        try:
            _directory().mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(_path(self.cid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "r+b", buffering=0) as file:
                # What follows the last newline is nothing: a full disk may have cut a line off.
                before = file.read().split(b"\n")[:-1]
                after = change(before)
                same = sum(len(line) + 1 for line in after[: len(before)])
                file.truncate(file.seek(same))
                file.write(b"".join(line + b"\n" for line in after[len(before) :]))
        except OSError as error:
            raise ConfigError(f"cannot write the log {_path(self.cid)}: {error.strerror or error}") from None


def turn(user: str, result: Result, *, system: str | None, raw: bool = False) -> Turn:
    """What was asked and what came of it."""
    return Turn(
        time=round(time.time(), 3),
        model=result.model,
        user=user,
        assistant=result.text,
        reason=result.reason,
        usage=result.usage,
        system=system,
        reasoning=result.reasoning,
        raw=raw,
    )


def new() -> Conversation:
    """A conversation that nothing was said in; it is written with its first turn."""
    now = time.time()
    cid = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{os.urandom(2).hex()}"
    return Conversation(cid, [])


def latest() -> Conversation:
    """The one that was last spoken in.

    Raises:
        ConfigError: there is none.
    """
    files = {entry.name: entry.stat().st_mtime_ns for entry in _entries()}
    if not files:
        raise ConfigError("no conversation is in the log; --log keeps one, and mlxbc log on keeps all from now on")
    return _read(max(files, key=files.__getitem__).removesuffix(_ENDING))


def find(cid: str) -> Conversation:
    """The one of this name, or the only one whose name begins or ends so.

    Raises:
        ConfigError: there is none, or several.
    """
    names = [entry.name.removesuffix(_ENDING) for entry in _entries()]
    fitting = [cid] if cid in names else [name for name in names if name.startswith(cid) or name.endswith(cid)]
    if len(fitting) != 1:
        few = f"{len(fitting)} conversations are called so" if fitting else "no conversation is called so"
        raise ConfigError(f"{few}: {cid[:80]!r}; mlxbc log lists them")
    return _read(fitting[0])


def every() -> list[Conversation]:
    """All of them, the newest last."""
    entries = sorted(_entries(), key=lambda entry: entry.stat().st_mtime_ns)
    return [_read(entry.name.removesuffix(_ENDING)) for entry in entries]


def remove(cid: str) -> None:
    """Delete one."""
    _path(cid).unlink(missing_ok=True)


def always() -> bool:
    """Whether the user keeps everything."""
    return (_directory() / _ALWAYS).exists()


def keep_always(on: bool) -> None:
    """Say whether everything is to be kept.

    Raises:
        ConfigError: it can't be noted down.
    """
    mark = _directory() / _ALWAYS
    try:
        if on:
            _directory().mkdir(mode=0o700, parents=True, exist_ok=True)
            mark.touch(mode=0o600)
        else:
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {mark}: {error.strerror or error}") from None


def directory() -> Path:
    """Where they are."""
    return _directory()


def _directory() -> Path:
    return paths.data_dir() / "conversations"


def _path(cid: str) -> Path:
    return _directory() / f"{cid}{_ENDING}"


def _entries() -> list[os.DirEntry[str]]:
    try:
        with os.scandir(_directory()) as entries:
            return [entry for entry in entries if entry.name.endswith(_ENDING)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read the log in {_directory()}: {error.strerror or error}") from None


def _read(cid: str) -> Conversation:
    """A conversation; a last line that was cut off by a full disk is left out."""
    turns = []
    try:
        lines = _path(cid).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the log {_path(cid)}: {error.strerror or error}") from None
    decoder = msgspec.json.Decoder(Turn)
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                turns.append(decoder.decode(line))
            except msgspec.MsgspecError:
                if number < len(lines):
                    raise ConfigError(f"{_path(cid)}, line {number}: that is no turn of a conversation") from None
    return Conversation(cid, turns)
