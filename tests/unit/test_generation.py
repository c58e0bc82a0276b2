"""One generation: frames whose text and ids add up, one terminal frame, and nothing after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_directory import EOS, write_text

from mlxbc import wire
from mlxbcd.engine.entry import Held
from mlxbcd.errors import ServeError
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Sample
from mlxbcd.serve.generation import Generation
from mlxbcd.text.channels import ChannelSplitter
from mlxbcd.text.stage import TextStage
from mlxbcd.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("text")
    write_text(directory)
    return Tokenizer.load(directory)


class Engine:
    """Takes one request, and knows whether it was cancelled."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.cancelled: list[Any] = []
        self.how: list[tuple[int | None, bool]] = []

    def submit(self, request: Request, listener: Generation, client: str = "", *, held: Held | None = None) -> int:
        self.submitted.append(request)
        return 42

    def cancel(
        self, key: Any, candidate: int | None = None, *, stopped: int | None = None, superseded: bool = False
    ) -> None:
        self.cancelled.append(key)
        self.how.append((stopped, superseded))


class Session:
    """A generation with its frames, driven by hand."""

    def __init__(self, tokenizer: Tokenizer, *, inside: bool = False, **fields: Any) -> None:
        self.tokenizer = tokenizer
        self.inside = inside
        self.frames: list[wire.Reply] = []
        self.forgotten = 0
        self.engine = Engine()
        self.react: Callable[[wire.Reply], None] = lambda frame: None
        self.generation = Generation(wire.Generate(id=5, prompt="x", **fields), self.reply, self.forget)

    def reply(self, frame: wire.Reply) -> None:
        self.frames.append(frame)
        self.react(frame)

    def forget(self, generation: Generation) -> None:
        self.forgotten += 1

    def start(self, *, stop: Sequence[str] = (), forced: Sequence[int] = (), max_tokens: int = 1000) -> Session:
        request = Request(
            prompt=(1, 2, 3),
            max_tokens=max_tokens,
            eos=self.tokenizer.eos_ids,
            stop=tuple(stop),
            forced=tuple(forced),
        )
        channels = ChannelSplitter(self.tokenizer.reasoning, inside=self.inside)
        stage = TextStage(self.tokenizer, request.stop, channels)
        stage.prime(request.forced)
        self.generation.start(self.engine, request, self.tokenizer, [stage])
        return self

    def draw(self, *tokens: int) -> None:
        for token in tokens:
            self.generation.sampled(Sample(token, finite=True), eos=token in self.tokenizer.eos_ids)

    def say(self, text: str) -> None:
        self.draw(*self.tokenizer.encode(text, special=False))

    @property
    def tokens(self) -> list[wire.Token]:
        return [frame for frame in self.frames if isinstance(frame, wire.Token)]

    def text(self, channel: str = "text") -> str:
        return "".join(frame.text for frame in self.tokens if frame.channel == channel)

    @property
    def ids(self) -> list[int]:
        return [token for frame in self.tokens for token in frame.ids]

    @property
    def done(self) -> wire.Done:
        (frame,) = self.terminal
        assert isinstance(frame, wire.Done)
        return frame

    @property
    def terminal(self) -> list[wire.Reply]:
        found: list[wire.Reply] = [frame for frame in self.frames if isinstance(frame, wire.TERMINAL)]
        assert not found or self.frames[-1] is found[-1], "nothing follows the terminal frame"
        return found


# -- text and ids add up


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 262) | st.integers(264, 266), max_size=40))
def test_text_ids_and_counts_of_all_frames_add_up_to_the_output(tokenizer: Tokenizer, ids: list[int]) -> None:
    session = Session(tokenizer, resumable=True).start()
    session.draw(*ids)
    session.generation.ended("length")
    assert session.text() == tokenizer.decode(ids)
    assert session.ids == ids
    assert sum(frame.n for frame in session.tokens) == len(ids) == session.done.usage.generated


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 262), min_size=1, max_size=30), st.data())
def test_an_output_resumed_after_any_frame_says_exactly_what_is_missing(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    broke_off = data.draw(st.integers(0, len(ids)))
    whole, before, after = (Session(tokenizer, resumable=True) for _ in range(3))
    whole.start().draw(*ids)
    before.start().draw(*ids[:broke_off])
    after.start(forced=before.ids).draw(*ids[len(before.ids) :])
    for session in (whole, after):
        session.generation.ended("length")
    assert before.text() + after.text() == whole.text()
    assert before.ids + after.ids == whole.ids
    assert after.done.usage.generated == len(ids)


def test_every_frame_is_valid_text_even_when_a_character_is_split(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, resumable=True).start()
    session.say("a👩‍👩‍👧é")
    assert all(frame.text for frame in session.tokens)
    assert session.text() == "a👩‍👩‍👧é"
    assert session.ids == tokenizer.encode("a👩‍👩‍👧é")


def test_ids_come_only_to_clients_that_asked(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer).start()
    session.say("the end")
    session.generation.ended("length")
    assert session.ids == []


def test_reasoning_has_its_own_channel(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, inside=True).start()
    session.say("hm, in</think>the answer")
    session.generation.ended("length")
    assert session.text("reasoning") == "hm, in"
    assert session.text("text") == "the answer"


def test_logprobs_ride_with_their_tokens(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, logprobs=True).start()
    the, a = tokenizer.encode("the")[0], tokenizer.encode("a")[0]
    session.generation.sampled(Sample(the, finite=True, logprob=-0.5, top=((the, -0.5), (a, -2.0))), eos=False)
    (frame,) = session.tokens
    assert frame.logprobs == [
        wire.TokenLogprob(the, "the", -0.5, [wire.TopToken(the, "the", -0.5), wire.TopToken(a, "a", -2.0)])
    ]


# -- ends


def test_the_end_token_is_counted_but_has_no_text_no_id_and_no_logprobs(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, resumable=True, logprobs=True).start()
    session.say("in")
    (eos,) = tokenizer.encode(EOS)
    session.generation.sampled(Sample(eos, finite=True, logprob=-0.1), eos=True)
    session.generation.ended("stop")
    assert session.text() == "in"
    assert session.ids == tokenizer.encode("in")
    assert not any(frame.logprobs for frame in session.tokens)
    assert (session.done.reason, session.done.stop) == ("stop", None)
    assert session.done.usage == wire.Usage(prompt=3, generated=2)


@pytest.mark.parametrize("parts", [["###"], ["#", "##"], ["##", "#"], ["#", "#", "#"], ["a###b"], ["the#", "##the"]])
def test_a_stop_string_is_found_however_tokens_split_it(tokenizer: Tokenizer, parts: list[str]) -> None:
    session = Session(tokenizer).start(stop=["###"])
    session.say("before ")
    for part in parts:
        session.say(part)
    expected = "before " + "".join(parts).split("###")[0]
    assert session.text() == expected
    assert session.done.stop == "###"
    assert session.done.reason == "stop"
    assert session.engine.cancelled == [42]
    assert session.engine.how == [(session.generation.generated - 1, False)], "what is kept ends before the stop"


def test_what_is_drawn_after_a_stop_is_neither_sent_nor_counted(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, resumable=True).start(stop=["in"])
    session.say("the in")
    sent, generated = len(session.frames), session.done.usage.generated
    session.say("the")
    session.generation.ended("length")
    session.generation.failed(ServeError("internal", "late"))
    session.generation.cancel()
    assert len(session.frames) == sent
    assert session.generation.generated == generated
    assert session.forgotten == 1


def test_what_might_have_become_a_stop_string_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer).start(stop=["###"])
    session.say("a##")
    assert session.text() == "a"
    session.generation.ended("length")
    assert session.text() == "a##"
    assert session.done.stop is None


@pytest.mark.parametrize("said", [0, 1, 3])
def test_a_cancel_ends_with_what_was_generated(tokenizer: Tokenizer, said: int) -> None:
    session = Session(tokenizer).start()
    session.say("the"[:said])
    session.generation.cancel()
    session.generation.cancel()
    assert session.text() == "the"[:said]
    assert session.done.reason == "cancelled"
    assert session.engine.cancelled == [42]
    assert session.forgotten == 1


def test_an_error_is_the_terminal_frame_and_says_whether_to_retry(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer).start()
    session.generation.failed(ServeError("out_of_memory", "shorter", free=3))
    session.generation.ended("length")
    (error,) = session.terminal
    assert error == wire.Error(id=5, code="out_of_memory", message="shorter", retryable=True, data={"free": 3})
    assert session.generation.ended_with == "out_of_memory"


@pytest.mark.parametrize("kind", [wire.Accepted, wire.Progress, wire.Token, wire.Done])
@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_ending_from_within_a_reply_still_gives_one_terminal_frame(
    tokenizer: Tokenizer, kind: type[wire.Reply], how: str
) -> None:
    session = Session(tokenizer, resumable=True)

    def react(frame: wire.Reply) -> None:
        if isinstance(frame, kind):
            session.generation.cancel() if how == "cancel" else session.generation.failed(ServeError("internal", "-"))

    session.react = react
    session.generation.accept(wire.Accepted(id=5, stream="s", seed=1, model="m"))
    session.start(stop=["###"])
    session.generation.prefilled(1, 3)
    session.say("the ##")
    session.generation.ended("length")
    assert len(session.terminal) == 1
    assert session.forgotten == 1


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_ending_from_within_the_last_text_still_gives_one_terminal_frame(tokenizer: Tokenizer, how: str) -> None:
    session = Session(tokenizer).start(stop=["###"])
    session.say("##")

    def react(frame: wire.Reply) -> None:
        if isinstance(frame, wire.Token):
            session.generation.cancel() if how == "cancel" else session.generation.failed(ServeError("internal", "-"))

    session.react = react
    session.generation.ended("length")
    assert session.text() == "##"
    assert len(session.terminal) == 1
    assert session.forgotten == 1
    assert session.generation.ended_with == ("cancelled" if how == "cancel" else "internal")


@pytest.mark.parametrize(
    ("forced", "stop", "max_tokens", "reason"),
    [("the###", ["###"], 99, "stop"), ("the" + EOS, [], 99, "stop"), ("the", [], 1, "length")],
)
def test_an_output_that_was_complete_when_resumed_ends_at_once(
    tokenizer: Tokenizer, forced: str, stop: list[str], max_tokens: int, reason: str
) -> None:
    session = Session(tokenizer).start(forced=tokenizer.encode(forced), stop=stop, max_tokens=max_tokens)
    assert session.done.reason == reason
    assert session.tokens == []
    assert session.engine.submitted == []


# -- before the engine


async def test_a_cancel_while_preparing_ends_the_preparation(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer)
    forever = asyncio.get_running_loop().create_task(asyncio.Event().wait())
    session.generation.preparing(forever)
    session.generation.cancel()
    assert session.done.usage == wire.Usage(prompt=0, generated=0)
    with pytest.raises(asyncio.CancelledError):
        await forever
    session.start()
    assert session.engine.submitted == []


async def test_a_preparation_that_ends_its_own_generation_is_not_cancelled_by_it(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer)

    async def prepare() -> str:
        session.generation.failed(ServeError("context_too_long", "-"))
        await asyncio.sleep(0)
        return "to its end"

    task = asyncio.get_running_loop().create_task(prepare())
    session.generation.preparing(task)
    assert await task == "to its end"
    assert len(session.terminal) == 1


def test_an_engine_that_refuses_leaves_the_ending_to_the_caller(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tokenizer)

    def refuse(request: Request, listener: Generation, client: str, *, held: Held | None) -> int:
        raise ServeError("shutting_down", "-")

    monkeypatch.setattr(session.engine, "submit", refuse)
    with pytest.raises(ServeError):
        session.start()
    session.generation.failed(ServeError("shutting_down", "-"))
    assert len(session.terminal) == 1
    assert session.engine.cancelled == []


# -- progress and time


def test_progress_is_told_at_most_every_quarter_of_a_second(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("mlxbcd.serve.generation.time.monotonic", lambda: now[0])
    session = Session(tokenizer)
    for done in range(10):
        session.generation.progress("load", done, 10)
        now[0] += 0.1
    told = [frame.done for frame in session.frames if isinstance(frame, wire.Progress)]
    assert told == [0, 3, 6, 9]


def test_a_prefill_that_begins_or_has_finished_needs_no_progress_frame(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer).start()
    session.generation.prefilled(0, 3)
    session.generation.prefilled(3, 3)
    assert session.frames == []


def test_timings_are_the_spans_between_stages(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("mlxbcd.serve.generation.time.monotonic", lambda: now[0])
    session = Session(tokenizer)

    def later(seconds: float) -> None:
        now[0] += seconds

    session.generation.clock.arrived = 1000.0
    later(2)
    session.generation.clock.loaded = now[0]
    later(1)
    session.start()
    later(0.5)
    session.generation.prefilled(0, 3)
    later(0.125)
    session.generation.prefilled(2, 3)
    later(0.125)
    session.say("a")
    later(4)
    session.generation.ended("length")
    assert session.done.timings == wire.Timings(queue=500, load=2000, prefill=250, first_token=3750, decode=4000)


def test_stages_never_reached_take_no_time(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer)
    session.generation.cancel()
    assert session.done.timings == wire.Timings()


def test_a_generation_shows_its_state(tokenizer: Tokenizer, tmp_path: Path) -> None:
    session = Session(tokenizer).start()
    session.draw(5)
    assert repr(session.generation) == "Generation(5, 1 tokens, running)"
    session.generation.cancel()
    assert repr(session.generation) == "Generation(5, 1 tokens, cancelled)"
