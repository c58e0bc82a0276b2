"""What a request may ask of a real daemon besides its text: candidates, a deadline, a plan, to end an older one."""

from __future__ import annotations

import pytest
from real_daemon import Daemon, Solo, ask, tokens
from stories import LONG, STORIES

from mlxbc import Client, RequestFailed, wire

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

STORY = "Once upon a time there was"


def test_several_candidates_share_a_prefill_and_draw_each_its_own(shared: Daemon) -> None:
    with shared.client() as client:
        asked = {"prompt": STORY, "temperature": 1.0, "seed": 7, "max_tokens": 12, "resumable": True}
        one = client.generate(**asked).wait()
        three = client.generate(**asked, n=3).wait()
        again = client.generate(**asked, n=3, priority="background").wait()
    assert one.outputs == []
    assert three.ids == one.ids, "the first candidate is what one alone would be"
    assert len({tuple(output.ids) for output in three.outputs}) == 3
    assert [output.ids for output in again.outputs] == [output.ids for output in three.outputs]
    assert three.outputs[0].text == three.text == one.text
    assert three.usage.prompt == one.usage.prompt
    assert three.usage.generated == sum(len(output.ids) for output in three.outputs) == 36
    assert [output.reason for output in three.outputs] == ["length"] * 3


def test_greedy_candidates_are_alike_and_each_ends_by_itself(shared: Daemon) -> None:
    with shared.client() as client:
        both = client.generate(STORY, temperature=0, max_tokens=10, n=2).wait().outputs
        assert both[0].text == both[1].text
        seeded = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "n": 3}
        free = client.generate(STORY, **seeded).wait().outputs
        # A stop string that the second one's text alone has.
        stop = next(word for word in free[1].text.split(" ")[2:] if word and word not in free[0].text + free[2].text)
        cut = client.generate(STORY, **seeded, stop=[stop]).wait().outputs
    assert [output.reason for output in cut] == ["length", "stop", "length"]
    assert cut[1].stop == stop
    assert cut[1].text == free[1].text[: free[1].text.index(stop)]
    assert [cut[0].text, cut[2].text] == [free[0].text, free[2].text]


def test_candidates_beside_others_change_nothing(shared: Daemon, solo: Solo) -> None:
    with shared.frames() as frames:
        frames.say(*(ask(n, story, max_tokens=20) for n, story in enumerate(STORIES)))
        frames.say(ask(9, {"prompt": STORY, "temperature": 1.0, "seed": 3}, max_tokens=10, n=4))
        journal: list[wire.Reply] = []
        while sum(isinstance(frame, wire.Done) for frame in journal) < len(STORIES) + 1:
            frame = frames.read()
            assert frame is not None
            journal.append(frame)
    for n, story in enumerate(STORIES):
        assert tokens(journal, n) == solo.ids(story, 20)


def test_a_deadline_ends_a_request_with_what_it_has(shared: Daemon) -> None:
    with shared.client() as client:
        result = client.generate(STORY, temperature=0, max_tokens=4000, deadline_ms=1500).wait()
        assert result.reason == "deadline"
        assert 0 < result.usage.generated < 4000
        assert result.text
        late = client.generate(LONG, temperature=0, max_tokens=10, deadline_ms=300).wait()
        assert (late.reason, late.text, late.usage.generated) == ("deadline", "", 0)
    shared.until(lambda report: report.running + report.queued == 0)


def test_an_older_request_of_the_same_key_makes_way(shared: Daemon) -> None:
    with shared.frames() as frames:
        frames.say(ask(1, {"prompt": LONG, "temperature": 0}, supersede="line", priority="interactive"))
        while not isinstance(frames.read(), wire.Progress):
            pass
        frames.say(ask(2, {"prompt": STORY, "temperature": 0}, supersede="line", max_tokens=3))
        ends = []
        while len(ends) < 2:
            frame = frames.read()
            if isinstance(frame, wire.Done):
                ends.append((frame.id, frame.reason))
    assert ends == [(1, "superseded"), (2, "length")]


def test_a_plan_is_told_before_and_after(shared: Daemon) -> None:
    with shared.client() as client:
        explained = client.explain(LONG, logprobs=True, resumable=True)
        done = client.generate(STORY, temperature=0, max_tokens=2, explain=True).wait()
        count = client.count(LONG)
    assert explained.prompt == count == sum(explained.plan.chunks)
    assert set(explained.plan.chunks[:-1]) == {512}
    assert (explained.plan.method, explained.plan.mechanism) == ("autoregressive", "continuous")
    assert explained.plan.off["grammar jump"] == "the request has no grammar"
    assert explained.first_token_ms is not None
    assert explained.first_token_ms > 0
    assert done.plan is not None
    assert sum(done.plan.chunks) == done.usage.prompt


def refused(client: Client, **fields: object) -> str:
    with pytest.raises(RequestFailed) as refusal:
        client.generate(STORY, **fields).wait()
    return str(refusal.value)


def test_what_makes_no_sense_is_refused(shared: Daemon) -> None:
    with shared.client() as client:
        resume = {"stream": "0" * 32, "tokens": [1, 2]}
        assert "n: 1" in refused(client, n=2, resume=resume, seed=1)
