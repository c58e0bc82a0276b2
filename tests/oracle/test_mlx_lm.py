"""Our tokens equal mlx-lm's for the same weights, alone and in a crowd, by the exactness rule (see `agreement`)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlxbcd.plan.request import Request, Sampling
from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer
from oracle.agreement import Tally
from oracle.inprocess import alone, engine, together
from oracle.prompts import PROMPTS

sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))

from real_daemon import daemon, socket_path

if TYPE_CHECKING:
    from oracle.teacher import Teacher

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TRIMMED = 12
FULL = pytest.param(96, marks=pytest.mark.slow)
LENGTHS = pytest.mark.parametrize("length", [TRIMMED, FULL])
"""Tokens compared of each prompt: a trimmed set, and the full one."""
STAYING = 1_000_000
"""More tokens than anyone draws: such a row stays in the crowd until it is cancelled."""

SETTINGS: dict[str, dict[str, Any]] = {
    "warm": {"temperature": 0.7},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.6, "min_p": 0.1},
    "nucleus": {"temperature": 1.0, "top_p": 0.9},
    "narrow nucleus": {"temperature": 0.8, "top_p": 0.5, "repetition_penalty": 1.1},
    "top k": {"temperature": 1.2, "top_k": 40},
    "everything": {"temperature": 0.9, "top_k": 100, "top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.3},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.3},
    "presence": {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 1.5, "logit_bias": ((28, 2.0), (30, -100.0))},
    "greedy, penalised": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
}


@pytest.fixture(scope="module")
def ids(model_directory: Path) -> dict[str, tuple[int, ...]]:
    """Every prompt as the model sees it, by name."""
    tokenizer = Tokenizer.load(model_directory)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return {prompt.name: prompt.ids(tokenizer, template) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def teacher(model_directory: Path) -> Teacher:
    """mlx-lm with the same model."""
    # Here, since mlx-lm's loop brings transformers: nobody who leaves these tests out should wait for it.
    from oracle.teacher import Teacher

    return Teacher(model_directory)


@pytest.fixture
def tally(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Tally]:
    """A test's comparisons; what they exempt is always printed."""
    tally = Tally()
    yield tally
    with capsys.disabled():
        print(f"\n{request.node.name}: {tally}")


def test_the_prompts_are_as_varied_as_they_claim(ids: dict[str, tuple[int, ...]]) -> None:
    lengths = sorted(map(len, ids.values()))
    assert len(set(ids.values())) == 20
    assert (lengths[0], lengths[-1]) == (1, 2000)
    assert sum(bool(prompt.turns) for prompt in PROMPTS) >= 6


def test_prompts_have_the_tokens_that_the_peers_tokenizer_gives_them(
    model_directory: Path, ids: dict[str, tuple[int, ...]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    for prompt in PROMPTS:
        if prompt.text is not None:
            theirs = tokenizer.encode(prompt.text)[: prompt.limit]
        else:
            theirs = tokenizer.apply_chat_template(
                [dict(turn) for turn in prompt.turns], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        assert ids[prompt.name] == tuple(theirs), prompt.name


# ---------------------------------------------------------------------------------------------------------- greedy


@LENGTHS
async def test_greedy_tokens_alone_equal_mlx_lms(
    length: int, ids: dict[str, tuple[int, ...]], teacher: Teacher, tally: Tally, model_directory: Path
) -> None:
    # The crowd below has the longer ones too; alone they would take as long as all the rest.
    longest = 300 if length == TRIMMED else 2000
    async with engine(model_directory) as ours:
        for name, prompt in ids.items():
            if len(prompt) > longest:
                continue
            request = Request(prompt=prompt, max_tokens=length, eos=frozenset())
            tokens = await alone(ours, request)
            tally.compare(name, tokens, teacher.greedy(prompt, length), partial(teacher.scores, request, tokens))
    tally.check()


@LENGTHS
async def test_greedy_tokens_of_all_prompts_at_once_equal_mlx_lms(
    length: int, ids: dict[str, tuple[int, ...]], teacher: Teacher, tally: Tally, model_directory: Path
) -> None:
    order = random.Random(length).sample(list(ids.items()), len(ids))
    if length == TRIMMED:
        # Among nineteen that decode, the long prompts would take most of the time.
        order.sort(key=lambda item: len(item[1]) < 300)
    requests = [Request(prompt=prompt, max_tokens=STAYING, eos=frozenset()) for _, prompt in order]
    async with engine(model_directory) as ours:
        drawn, running = await together(ours, requests, length, one_at_a_time=length == TRIMMED)
    assert running == 20, "all are still running when the last one has its tokens"
    for (name, prompt), request, tokens in zip(order, requests, drawn, strict=True):
        tally.compare(name, tokens, teacher.greedy(prompt, length), partial(teacher.scores, request, tokens))
    tally.check()


# ---------------------------------------------------------------------------------------------------------- seeded


@LENGTHS
async def test_seeded_tokens_alone_equal_those_in_a_crowd_and_those_drawn_from_mlx_lms_logits(
    length: int, ids: dict[str, tuple[int, ...]], teacher: Teacher, tally: Tally, model_directory: Path
) -> None:
    shorter = [prompt for prompt in ids.values() if len(prompt) <= 300]
    requests = [
        Request(prompt=prompt, max_tokens=length * 2, eos=frozenset(), sampling=Sampling(seed=seed, **settings))
        for seed, (prompt, settings) in enumerate(zip(shorter, SETTINGS.values(), strict=False))
    ]
    assert len(requests) == len(SETTINGS)
    async with engine(model_directory) as ours:
        solo = [await alone(ours, request) for request in requests]
        crowd, _ = await together(ours, requests, length * 2)
    for name, request, mine, others in zip(SETTINGS, requests, solo, crowd, strict=True):
        tally.compare_forced(f"{name} alone", mine, partial(teacher.scores, request, mine))
        tally.compare(f"{name} in a crowd", others, mine, partial(teacher.scores, request, others))
    tally.check()
    assert len(set(map(tuple, solo))) == len(solo)


# ------------------------------------------------------------------------------------------------------ the socket


@LENGTHS
def test_streams_over_the_socket_say_what_mlx_lm_says_up_to_its_end_token(
    length: int, ids: dict[str, tuple[int, ...]], teacher: Teacher, tally: Tally, model_directory: Path
) -> None:
    tokenizer = Tokenizer.load(model_directory)
    (end,) = tokenizer.eos_ids
    asked = [prompt for prompt in PROMPTS if prompt.limit is None and len(ids[prompt.name]) < 60]
    assert len(asked) >= 8
    with socket_path() as path, daemon(path, model_directory) as serving, serving.client() as client:
        streams = [
            client.generate(**prompt.fields, temperature=0.0, max_tokens=2 * length, resumable=True) for prompt in asked
        ]
        results = [stream.wait() for stream in streams]
    for prompt, result in zip(asked, results, strict=True):
        tokens = [*result.ids, end] if result.reason == "stop" else result.ids
        reference = teacher.greedy(ids[prompt.name], 2 * length)
        if end in reference:
            reference = reference[: reference.index(end) + 1]
        request = Request(prompt=ids[prompt.name], max_tokens=2 * length, eos=frozenset({end}))
        tally.compare(prompt.name, tokens, reference, partial(teacher.scores, request, tokens))
        assert result.text == tokenizer.decode(result.ids)
        assert result.usage.prompt == len(ids[prompt.name])
        assert result.usage.generated == len(tokens)
    tally.check()
    assert {result.reason for result in results} == {"stop", "length"}
