"""Owns recording what drafters would have been right about: the traces that adaptive depth is tested with.

`python tests/bench/acceptance.py MODEL OUT`: the model answers some of the tasks of `spec` greedily. Then its first
layers, as draft models, and prompt lookup are asked at every place of each answer how its next tokens go. A trace has
a letter for each place, `a` for none right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TESTS = str(Path(__file__).resolve().parents[1])
if _TESTS not in sys.path:
    sys.path[0] = _TESTS

LENGTH = 200
DEEPEST = 12
LAYERS = (20, 26, 28)
LETTERS = "abcdefghijklm"


def main() -> None:
    """Record."""
    from mlxbcd.model.blas import enable

    enable()
    import mlx.core as mx

    from bench import inprocess
    from bench.answers import Asking, answer
    from bench.edits import TASKS
    from bench.spec import CHATS
    from mlxbcd.text.tokenizer import Tokenizer

    directory, out = map(Path, sys.argv[1:])
    built = inprocess.built(directory)
    model = built.executor.forward.model
    asking = Asking(Tokenizer.load(directory), LENGTH)
    copying, others = ([task for task in TASKS if task.copies is copies] for copies in (True, False))
    requests = [*map(asking.edit, copying[:2]), *map(asking.chat, CHATS[:2]), *map(asking.edit, others[:2])]
    texts = [(list(request.prompt), answer(built.executor, [request]).tokens[0]) for request in requests]
    traces = {"lookup": [looked_up(prompt, drawn) for prompt, drawn in texts]}
    for layers in LAYERS:
        draft = inprocess.twin(directory, model, layers)

        def likeliest(tokens: Sequence[int], draft: Any = draft) -> list[int]:
            drawn: list[int] = mx.argmax(draft(mx.array([tokens]))[0], axis=-1).tolist()
            return drawn

        traces[f"{layers} layers"] = [by_model(prompt, drawn, likeliest([*prompt, *drawn])) for prompt, drawn in texts]
    out.write_text(json.dumps(traces, indent=1) + "\n", encoding="utf-8")


def by_model(prompt: Sequence[int], drawn: Sequence[int], likeliest: Sequence[int]) -> str:
    """Of a model that draws what is likeliest. What it drafts behind a right token it drafts behind the answer's."""
    places, run = [], 0
    for at in reversed(range(len(prompt), len(prompt) + len(drawn))):
        run = run + 1 if likeliest[at - 1] == drawn[at - len(prompt)] else 0
        places.append(LETTERS[min(run, DEEPEST)])
    return "".join(reversed(places))


def looked_up(prompt: Sequence[int], drawn: Sequence[int]) -> str:
    """Of what followed where the newest tokens stand already."""
    from mlxbcd.spec.echo import Echo

    echo, places = Echo(prompt), []
    for at, token in enumerate(drawn):
        proposed, actual = echo.propose(DEEPEST), drawn[at : at + DEEPEST]
        right = next((i for i, pair in enumerate(zip(proposed, actual, strict=False)) if pair[0] != pair[1]), None)
        places.append(LETTERS[min(len(proposed), len(actual)) if right is None else right])
        echo.observe(token)
    return "".join(places)


if __name__ == "__main__":
    main()
