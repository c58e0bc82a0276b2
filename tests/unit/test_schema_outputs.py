"""Whatever a model would rather say: with a JSON Schema, each output that was finished satisfies it."""

from __future__ import annotations

import json
from typing import Any, Final

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemas import SCHEMAS, Schema
from test_constrained_rows import make_driver, ruled
from test_grammar import BACKEND, EOS, TOKENS
from tiny import make_request

from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.sampling.grammar import Grammar
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.text.detokenizer import Detokenizer
from mlxbcd.text.metadata import TextMetadata
from mlxbcd.text.tokenizer import Tokenizer

TOKENIZER: Final = Tokenizer(BACKEND, TextMetadata({"eos_token": "<|end|>"}, {}, {}, None))
ROWS: Final = 8
HASTE: Final = tuple(sorted((BACKEND.token_to_id(piece), 5.0) for piece in '"}],:nul0123'))
"""A model with random weights would hardly ever end a string."""


def outputs(schemas: list[Schema], ahead: Ahead) -> list[tuple[str, str]]:
    """Text and end of one row for each schema, all of them in one batch."""
    driver = make_driver(ahead)
    for key, schema in enumerate(schemas):
        request = make_request(
            [40 + key, 3],
            200,
            [EOS],
            constraint=ruled(Source.of_schema(schema)).copy,
            temperature=1.0,
            seed=key,
            logit_bias=HASTE,
        )
        driver.prefill(key, request)
    driver.finish()
    results = []
    for key in range(len(schemas)):
        detokenizer = Detokenizer(TOKENIZER)
        text = "".join(map(detokenizer.push, driver.tokens(key))) + detokenizer.finish()
        (end,) = driver.ends(key)
        results.append((text, end))
    return results


def check(schemas: list[Schema], ahead: Ahead) -> int:
    """How many outputs were finished. Each of them is valid, and what isn't finished could have gone on."""
    finished = 0
    for schema, (text, end) in zip(schemas, outputs(schemas, ahead), strict=True):
        if end in ("stop", "complete"):
            finished += 1
            value: Any = json.loads(text)
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            problems = [problem.message for problem in validator.iter_errors(value)]
            assert not problems, (schema, text)
        else:
            assert end == "length", (schema, text, end)
    return finished


def satisfiable(schema: Schema) -> bool:
    """A `const` may not fit what else is asked; such a schema has been refused, with a reason."""
    return isinstance(TOKENS.compile(Source.of_schema(schema)), Grammar)


def run(examples: int) -> None:
    finished = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas=st.lists(SCHEMAS.filter(satisfiable), min_size=ROWS, max_size=ROWS), ahead=st.sampled_from(Ahead))
    def outputs_are_valid(schemas: list[Schema], ahead: Ahead) -> None:
        finished.append(check(schemas, ahead))

    outputs_are_valid()
    share = sum(finished) / (ROWS * len(finished))
    print(f"{sum(finished)} of {ROWS * len(finished)} outputs were finished, all of them valid")
    assert share > 0.7


def test_finished_outputs_satisfy_their_schema() -> None:
    run(3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_finished_outputs_of_two_hundred_schemas_satisfy_them() -> None:
    run(25)
