"""Owns priming: a generation of one token that nobody wants, told to its client as what it is for."""

from __future__ import annotations

from mlxbc import wire
from mlxbcd.errors import ServeError
from mlxbcd.serve.contract import Send
from mlxbcd.serve.replies import error_reply


def generation_of(request: wire.Prime) -> wire.Generate:
    """The generation that processes a prompt."""
    return wire.Generate(
        id=request.id,
        messages=request.messages,
        prompt=request.prompt,
        fim=request.fim,
        model=request.model,
        template_options=request.template_options,
        tools=request.tools,
        thinking=request.thinking,
        priority=request.priority or "background",
        cache=request.cache,
        session=request.session,
        temperature=0.0,
        max_tokens=1,
    )


def primed(reply: Send) -> Send:
    """Takes the frames of such a generation, and passes on what concerns the prompt."""
    model = ""

    def send(frame: wire.Reply) -> None:
        nonlocal model
        match frame:
            case wire.Accepted():
                model = frame.model
            case wire.Token():
                pass
            case wire.Done(reason="cancelled" | "superseded"):
                by = "the client" if frame.reason == "cancelled" else "a newer request"
                reply(error_reply(ServeError("bad_request", f"{frame.reason} by {by}"), frame.id))
            case wire.Done():
                usage = wire.Usage(prompt=frame.usage.prompt, generated=0, cached=frame.usage.cached)
                reply(wire.Primed(id=frame.id, model=model, usage=usage, timings=frame.timings))
            case _:
                reply(frame)

    return send
