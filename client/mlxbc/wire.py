"""Owns the wire: every message of protocol 1 as a msgspec Struct, and the sans-IO framing of both codecs.

One Unix stream socket carries many requests at once. A connection speaks either

* **msgpack**: a 4-byte big-endian length followed by one msgpack map, or
* **JSON lines**: one JSON object per line, chosen by a first byte of ``{``.

Since a frame is shorter than 2**24 bytes, the first byte of a msgpack length is always zero, so the first byte of a
connection tells the codec. Requests forbid unknown fields (a typo is an error that names the field); replies may grow
fields, and an older client ignores what it doesn't know.

This module does no input or output and imports nothing but msgspec.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Struct

PROTOCOL: Final = 1
FRAME_LIMIT: Final = 4 * 1024 * 1024
"""Largest inbound frame in bytes unless `hello` negotiates another."""
FRAME_CEILING: Final = 2**24 - 1
"""No frame is ever longer, so that the first length byte is always zero."""

Id: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""Chosen by the client, unique among its running requests; exact in JSON."""
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
KeepAlive: TypeAlias = Annotated[float, Meta(ge=-1, le=1e9)]
"""Seconds without a request after which a model is dropped; -1 keeps it for ever, 0 drops it with its last request."""
Scalar: TypeAlias = str | int | float | bool | None

ErrorCode: TypeAlias = Literal[
    "bad_frame",
    "bad_request",
    "proto_mismatch",
    "unauthorized",
    "frame_too_large",
    "unknown_model",
    "load_failed",
    "out_of_memory",
    "context_too_long",
    "grammar_invalid",
    "queue_full",
    "timeout",
    "shutting_down",
    "device_error",
    "internal",
]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "superseded", "deadline"]
Priority: TypeAlias = Literal["interactive", "normal", "background"]
Channel: TypeAlias = Literal["text", "reasoning", "tool_calls"]
CacheMode: TypeAlias = Literal["none", "ram", "disk"]
"""Where the states that a request computes may be kept for others; `disk` is RAM too, and `none` reads none either."""
SessionName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
"""Names a conversation: what is kept of it is let go together."""


class _Request(Struct, tag_field="type", forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True):
    """A message from a client to the daemon."""


class _Reply(Struct, tag_field="type", omit_defaults=True, kw_only=True, frozen=True):
    """A message from the daemon to a client."""


class _Part(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True):
    """A value inside a request."""


# ---------------------------------------------------------------------------------------------- client -> daemon


class Hello(_Request, frozen=True, tag="hello", forbid_unknown_fields=False):
    """First message of a msgpack connection; optional on JSON lines, where protocol 1 is assumed.

    The one request that may have fields this version doesn't know: a newer client must hear `proto_mismatch`, not that
    a field of its hello is unknown.
    """

    proto: int
    client: Annotated[str, Meta(max_length=256)] = ""
    version: Annotated[str, Meta(max_length=64)] = ""
    max_frame: Annotated[int, Meta(ge=4096, le=FRAME_CEILING)] = FRAME_LIMIT
    """Largest frame in bytes the client wants to send."""


class PastCall(_Part, frozen=True):
    """A tool call of an earlier turn."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str = "{}"
    """JSON text of an object."""
    id: Annotated[str, Meta(max_length=256)] = ""


class Message(_Part, frozen=True):
    """One chat message. A `tool` message is the result of the call that it names."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: Annotated[list[PastCall], Meta(max_length=128)] = []
    """What an assistant message called."""
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    """The call that a tool message answers."""
    name: Annotated[str, Meta(max_length=256)] | None = None
    """The function that a tool message comes from, for templates that show it."""


class Function(_Part, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of an object; left out, it takes nothing."""


class Tool(_Part, frozen=True):
    """A definition in OpenAI's form."""

    function: Function
    type: Literal["function"] = "function"


class Excerpt(_Part, frozen=True):
    """Text of another file."""

    text: str
    path: Annotated[str, Meta(max_length=4096)] = ""


class Fim(_Part, frozen=True):
    """A place in a file to write something at."""

    prefix: str
    """Text before it."""
    suffix: str = ""
    """Text after it."""
    path: Annotated[str, Meta(max_length=4096)] = ""
    language: Annotated[str, Meta(max_length=64)] = ""
    """As editors name it; left out, the path's extension tells."""
    context: Annotated[list[Excerpt], Meta(max_length=256)] = []
    """Other text that helps, what matters most last. What doesn't fit is left out from the first on."""
    single_line: bool = False
    """End at the end of the line."""


class Resume(_Part, frozen=True):
    """Continue an earlier generation: the rest of the `generate` message repeats the original request."""

    stream: Annotated[str, Meta(min_length=1, max_length=64)]
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]
    """The token ids the client already has; they are teacher-forced and not sent again."""


class Generate(_Request, frozen=True, tag="generate"):
    """Generate from exactly one of `messages` (chat), `prompt` (raw text) and `fim` (a place in a file)."""

    id: Id
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    prompt: str | None = None
    fim: Fim | None = None
    model: ModelName | None = None
    """None asks for the daemon's default model."""
    template_options: dict[str, Scalar] = {}
    """Passed to the chat template by name (`enable_thinking`, …)."""
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    """Functions that a chat's answer may call. Calls come in the channel `tool_calls`, each once and whole."""
    tool_choice: Annotated[str, Meta(min_length=1, max_length=64)] = "auto"
    """auto; none; required (the answer begins with a call); or the name of the function it has to call."""
    thinking: bool | None = None
    """Whether a chat's answer is thought about first. Left out, the model's template decides."""
    thinking_budget: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    """Tokens of reasoning, after which it is closed and the answer begins."""
    schema: dict[str, Any] | bool | None = None
    """JSON Schema that the text satisfies. At most one of schema, grammar, regex and choice can be given."""
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    """Lark grammar of the text, as llguidance reads it."""
    regex: Annotated[str, Meta(min_length=1)] | None = None
    """Regular expression that the whole text matches."""
    choice: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    """The text is one of these. They may have 40,000 bytes in all, common beginnings counted once."""
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    """0 is greedy. Sampling fields left out come from the model's generation_config.json."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """0 switches the filter off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = {}
    seed: Seed | None = None
    """Draw i depends on (seed, i) alone. Left out: random, and told in `accepted`."""
    max_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    """Left out: what fits the model's context, at most 2048; for `fim` 256, or 64 for a single line."""
    stop: Annotated[list[StopString], Meta(max_length=16)] = []
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    draft: Annotated[str, Meta(min_length=1, max_length=64)] = "auto"
    """Whose guesses of the next tokens are verified, several in one forward: `auto`, `off`, or a drafter's name. They
    change how long an answer takes, never what it says."""
    echo: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1_000_000)]], Meta(max_length=16)] = []
    """Texts that the answer may repeat in part, such as the file it edits or what a tool has said."""
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    """Outputs to draw from one prefill, each with noise of its own; their frames tell them apart by `candidate`."""
    priority: Priority | None = None
    """None is normal."""
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    """Milliseconds after its arrival at which the request ends, with what it has by then."""
    supersede: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Ends this connection's earlier request with the same key, in the same moment."""
    cache: CacheMode | None = None
    """None is what the daemon's settings say."""
    session: SessionName | None = None
    explain: bool = False
    """`done` tells how the request was run."""
    keep_alive: KeepAlive | None = None
    """How long the model stays without being asked, from now on."""
    resumable: bool = False
    """Token frames carry token ids, which `resume` wants back."""
    resume: Resume | None = None
    on_disconnect: Literal["cancel", "keep"] = "cancel"
    """`keep` goes on without the client, and holds the answer for it to `resume`. Needs `resumable`."""
    keep_s: Annotated[int, Meta(ge=0, le=600)] | None = None
    """Seconds from the disconnect for which it does; left out: 60."""


class Explain(Generate, frozen=True, tag="explain"):
    """How a `generate` of the same fields would be run. Nothing is generated; the model is loaded if need be."""


class Prime(_Request, frozen=True, tag="prime"):
    """Process a prompt, so that a `generate` which begins with it starts at once. Exactly one of its prompt forms."""

    id: Id
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    prompt: str | None = None
    fim: Fim | None = None
    model: ModelName | None = None
    template_options: dict[str, Scalar] = {}
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    thinking: bool | None = None
    priority: Priority | None = None
    """None is background."""
    supersede: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """As for `generate`, whose keys these are too."""
    cache: Literal["ram", "disk"] | None = None
    session: SessionName | None = None


class Cancel(_Request, frozen=True, tag="cancel"):
    """End request `id`; its terminal frame says `cancelled`. An unknown id is ignored."""

    id: Id


class Tokenize(_Request, frozen=True, tag="tokenize"):
    """Token ids of exactly one of `text` and `messages`."""

    id: Id
    text: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    template_options: dict[str, Scalar] = {}
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    thinking: bool | None = None
    model: ModelName | None = None


class Count(_Request, frozen=True, tag="count"):
    """Like `tokenize`, but only the number of tokens comes back."""

    id: Id
    text: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    template_options: dict[str, Scalar] = {}
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    thinking: bool | None = None
    model: ModelName | None = None


class Models(_Request, frozen=True, tag="models"):
    """What can be loaded: the embedded model, the hub cache, and what is resident."""

    id: Id
    memory: bool = False
    """Tell what each would take in memory, which needs a look into its files."""


class Load(_Request, frozen=True, tag="load"):
    """Make a model resident; `progress` frames come until `loaded`."""

    id: Id
    model: ModelName | None = None
    keep_alive: KeepAlive | None = None


class Unload(_Request, frozen=True, tag="unload"):
    """Drop a resident model; refused while requests run on it."""

    id: Id
    model: ModelName


class Status(_Request, frozen=True, tag="status"):
    id: Id


class Ps(_Request, frozen=True, tag="ps"):
    id: Id


class Watch(_Request, frozen=True, tag="watch"):
    """Status, at once and whenever it changes, until the request is cancelled."""

    id: Id
    interval_ms: Annotated[int, Meta(ge=50, le=60_000)] = 250
    """Changes are told no more often than this."""


class Trace(_Request, frozen=True, tag="trace"):
    """Spans of what happens from now on, until the request is cancelled."""

    id: Id


class Config(_Request, frozen=True, tag="config"):
    """The settings in force, and where each comes from."""

    id: Id


class Probe(_Request, frozen=True, tag="probe"):
    """Time a small test piece on the device, once what runs there now has ended."""

    id: Id


class Cache(_Request, frozen=True, tag="cache"):
    """What the prefix cache holds, and how much it helped."""

    id: Id


class CacheClear(_Request, frozen=True, tag="cache_clear"):
    """Empty the prefix cache, on the disk too, and forget the generations that could be resumed."""

    id: Id


class Ping(_Request, frozen=True, tag="ping"):
    id: Id


class Shutdown(_Request, frozen=True, tag="shutdown"):
    """Stop the daemon. With `drain` running requests finish first; else they end with `shutting_down`."""

    id: Id
    drain: bool = True
    handover: bool = False
    """Another daemon takes the path: give it up before answering. Running requests may finish, but not for long."""


Request: TypeAlias = (
    Hello
    | Generate
    | Explain
    | Prime
    | Cancel
    | Tokenize
    | Count
    | Models
    | Load
    | Unload
    | Status
    | Ps
    | Watch
    | Trace
    | Config
    | Probe
    | Cache
    | CacheClear
    | Ping
    | Shutdown
)

# ---------------------------------------------------------------------------------------------- daemon -> client


class Welcome(_Reply, frozen=True, tag="welcome"):
    """Answer to `hello`."""

    proto: int
    server: str
    version: str
    pid: int
    models: list[str]
    """Resident models."""
    max_frame: int
    """Largest inbound frame in bytes on this connection."""


class Accepted(_Reply, frozen=True, tag="accepted"):
    """The request is valid and queued."""

    id: int
    stream: str
    """128 random bits in hex: names this generation across connections."""
    seed: int
    model: str
    position: int = 0
    """Requests ahead of this one in the queue."""


class Progress(_Reply, frozen=True, tag="progress"):
    """At most every 250 ms: bytes while loading, prompt tokens while prefilling."""

    id: int
    phase: Literal["load", "prefill"]
    done: int
    total: int


class TopToken(Struct, omit_defaults=True, frozen=True):
    token: int
    text: str
    logprob: float


class TokenLogprob(Struct, omit_defaults=True, frozen=True):
    """Natural log of the model's own probability of a sampled token, before penalties and temperature."""

    token: int
    text: str
    logprob: float
    top: list[TopToken] = []


class Token(_Reply, frozen=True, tag="token"):
    """Newly generated text. Concatenated per channel it is the whole output, always valid UTF-8."""

    id: int
    text: str
    n: int = 1
    """Tokens that became part of the output with this frame (text can wait for a later token)."""
    channel: Channel = "text"
    call: ToolCall | None = None
    """In the channel `tool_calls`, whose frames have no text."""
    candidate: int = 0
    """Which of the request's outputs this is part of."""
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []


class ToolCall(Struct, omit_defaults=True, frozen=True):
    """A function that the model wants called, with what."""

    index: int
    """Calls before it in this output."""
    id: str
    """Goes into `tool_call_id` of the message that brings the result."""
    name: str
    arguments: str
    """JSON text of an object."""


class Usage(Struct, omit_defaults=True, frozen=True):
    """Token counts of one request."""

    prompt: int
    generated: int
    cached: int = 0
    drafted: int = 0
    """Guesses that were verified, of drafters and of texts to echo."""
    accepted: int = 0
    """Those of them that were right."""
    forwards: int = 0
    """Passes of the model that decoding took, where guesses were possible; at most one token each without them."""


class Timings(Struct, omit_defaults=True, frozen=True):
    """Milliseconds. `first_token` counts from the arrival of the request; the others are spans."""

    queue: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0


class Candidate(Struct, omit_defaults=True, frozen=True):
    """How one of several outputs ended."""

    reason: FinishReason
    generated: int
    stop: str | None = None
    mean_logprob: float | None = None
    unparsed: list[str] = []


class Plan(Struct, omit_defaults=True, frozen=True):
    """How a request is run, and why not otherwise."""

    method: Literal["autoregressive", "speculative", "denoising"]
    mechanism: Literal["continuous", "alone", "unsupported"]
    reason: str = ""
    """Why it runs alone, or not at all."""
    on: list[str] = []
    """Features that apply."""
    off: dict[str, str] = {}
    """Features that don't, each with its reason."""
    drafters: list[str] = []
    """Whose drafts are verified: `lookup`, and a drafter of the model's."""
    chunks: list[int] = []
    """Prompt tokens of each prefill forward: those planned (`explained`), or those run (`done`)."""


class Guesses(Struct, omit_defaults=True, frozen=True):
    """Guesses of one kind that were verified."""

    rounds: int = 0
    """Forwards that had any."""
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = []
    """How many stood at each place behind a known token, from the first on."""
    accepted_at: list[int] = []
    lengths: dict[str, int] = {}
    """How many rounds had how many right."""


class Speculation(Struct, omit_defaults=True, frozen=True):
    """What guessing did for one request."""

    forwards: int = 0
    forwards_saved: int = 0
    drafts: Guesses = Guesses()
    """Of drafters, text that was looked up and grammars."""
    echo: Guesses = Guesses()
    """Of texts in `echo`."""
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    """Both counted whole for each request that shared the work: they don't add up."""


class Done(_Reply, frozen=True, tag="done"):
    """Terminal frame of a generation."""

    id: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | None = None
    """The stop string that ended it, if one did."""
    mean_logprob: float | None = None
    """Mean of the tokens' log-probabilities, if they were asked for and there are any."""
    unparsed: list[str] = []
    """Tool calls that were cut off or made no sense, as the model wrote them; nothing of them is in the text."""
    candidates: list[Candidate] = []
    """One for each output where `n` asked for several; `reason` and `stop` are the first one's, `usage` counts all."""
    plan: Plan | None = None
    """With `explain`."""
    speculation: Speculation | None = None
    """With `explain`, of all outputs together."""


class Cached(Struct, omit_defaults=True, frozen=True):
    """What the prefix cache has of a prompt, in tokens."""

    ram: int
    """Reusable at once."""
    disk: int
    """Reusable with what has to be read from the disk."""
    matched: int
    """Stored, though perhaps not reusable up to there."""
    why: str
    """Why it isn't more."""


class Explained(_Reply, frozen=True, tag="explained"):
    """Answer to `explain`."""

    id: int
    model: str
    prompt: int
    """Tokens of the prompt."""
    context: int
    """Tokens the model's rows may hold."""
    priority: Priority
    plan: Plan
    first_token_ms: float | None = None
    """Expected if nothing else runs, from what forwards have cost so far; None where nothing has been measured."""
    cached: Cached | None = None
    """None where the prefix cache doesn't apply."""


class Primed(_Reply, frozen=True, tag="primed"):
    """A prompt has been processed."""

    id: int
    model: str
    usage: Usage
    timings: Timings


class CacheReport(_Reply, frozen=True, tag="cache_report"):
    """What the prefix cache holds. Sizes are bytes; counts are since the daemon's start."""

    id: int
    mode: CacheMode
    """For requests that don't say."""
    ram_bytes: int = 0
    ram_limit: int = 0
    """0: there is no cache."""
    ram_entries: int = 0
    disk_bytes: int = 0
    disk_limit: int = 0
    """0: nothing is kept on the disk."""
    disk_entries: int = 0
    directory: str = ""
    pending: int = 0
    """Pieces that wait to be written."""
    leases: int = 0
    """Prefixes in use."""
    lookups: int = 0
    hits: int = 0
    tokens: int = 0
    """Of the prompts that were looked up."""
    reused: int = 0
    """Tokens of these that were restored."""
    from_disk: int = 0
    """Tokens that were read from the disk to be restored."""
    evicted: int = 0
    trouble: str = ""
    """Why nothing is kept on the disk, or written at present."""


class CacheCleared(_Reply, frozen=True, tag="cache_cleared"):
    id: int
    bytes: int
    streams: int = 0
    """Generations that can't be resumed any more."""


class Error(_Reply, frozen=True, tag="error"):
    """Terminal frame of any request that failed; without an id the connection itself is at fault."""

    code: ErrorCode
    message: str
    id: int | None = None
    retryable: bool = False
    data: dict[str, Any] = {}


class Tokens(_Reply, frozen=True, tag="tokens"):
    id: int
    tokens: list[int]
    text: str = ""
    """What the model sees, if a chat was asked about."""


class Counted(_Reply, frozen=True, tag="counted"):
    id: int
    count: int


class ModelEntry(Struct, omit_defaults=True, frozen=True):
    name: str
    source: Literal["embedded", "hub", "directory"]
    path: str
    bytes: int
    resident: bool = False
    default: bool = False
    memory: int = 0
    """About how many bytes its weights take in memory; 0 where that is not known."""


class ModelList(_Reply, frozen=True, tag="model_list"):
    id: int
    models: list[ModelEntry]


class Loaded(_Reply, frozen=True, tag="loaded"):
    id: int
    model: str
    bytes: int
    seconds: float


class Unloaded(_Reply, frozen=True, tag="unloaded"):
    id: int
    model: str


class Process(Struct, omit_defaults=True, frozen=True):
    """One resident model, as `ps` shows it."""

    model: str
    path: str
    bytes: int
    """Bytes of the weights, a draft model's among them."""
    dtype: str
    context: int
    """Tokens a row may hold."""
    kv_bytes: int
    running: int
    queued: int
    idle_s: float
    placement: Literal["continuous", "alone"]
    reason: str = ""
    """Why requests run alone, where they do."""
    pinned: bool = False
    """It stays whatever happens."""
    expires_s: float | None = None
    """Seconds until it is dropped if nobody asks it; None is never."""
    draft: str = ""
    """The model that drafts for it, if one does."""


class ProcessList(_Reply, frozen=True, tag="process_list"):
    id: int
    models: list[Process]


class Loading(Struct, omit_defaults=True, frozen=True):
    """A model that is being loaded: bytes of its weights."""

    model: str
    done: int
    total: int


class Histogram(Struct, omit_defaults=True, frozen=True):
    """How many values fell into each bucket; there is one more than there are bounds, above them all."""

    bounds: list[float]
    counts: list[int]
    sum: float


class Metrics(Struct, omit_defaults=True, frozen=True):
    """What is counted over the daemon's life, of generations that have ended. Times are milliseconds."""

    outcomes: dict[str, int]
    """How many ended for each reason, error codes included."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_ms: Histogram
    first_token_ms: Histogram
    decode_token_ms: Histogram
    """Of each generation, the mean time between two tokens."""


class StatusReport(_Reply, frozen=True, tag="status_report"):
    """A snapshot that never waits for the device."""

    id: int
    pid: int
    version: str
    uptime_s: float
    state: Literal["ready", "draining", "degraded"]
    device: str
    connections: int
    running: int
    queued: int
    served: int
    """Generations that ended as they should; those that were cancelled count too."""
    failed: int
    """Generations that ended with an error. None is counted twice."""
    generated_tokens: int
    memory_active: int
    """Bytes of live MLX arrays at the last step."""
    memory_cache: int
    models: list[Process]
    memory_used: int = 0
    """Bytes of weights, row states and prefix caches, as they count against `memory_limit`."""
    memory_limit: int = 0
    footprint: int = 0
    """Bytes of the whole process, as the system accounts them."""
    footprint_measure: str = ""
    """How it does: "rss" or "phys_footprint"."""
    drafted_tokens: int = 0
    """Guesses that were verified, of all requests that have ended."""
    accepted_tokens: int = 0
    loading: list[Loading] = []
    metrics: Metrics | None = None
    notes: list[str] = []
    """What a person should know: a slow BLAS, a model served one at a time, …"""


class Change(_Reply, frozen=True, tag="change"):
    """The answer to `watch`, again and again."""

    id: int
    status: StatusReport


class Span(Struct, omit_defaults=True, frozen=True, array_like=True):
    """Something that took time. `track` is a request's stream id, or a device's work."""

    name: str
    track: str
    begin_us: int
    """Microseconds of a clock that only the daemon knows."""
    micros: int
    facts: dict[str, int | float | str] = {}


class Spans(_Reply, frozen=True, tag="spans"):
    """The answer to `trace`, again and again."""

    id: int
    spans: list[Span]


class Ended(_Reply, frozen=True, tag="ended"):
    """`watch` or `trace` was cancelled."""

    id: int
    dropped: int = 0
    """Spans that came faster than they could be told."""


class Setting(Struct, omit_defaults=True, frozen=True):
    """One setting of the daemon.

    `value` is written as in TOML. `source` is an option, a variable, the file, or "default".
    """

    key: str
    value: str
    source: str
    live: bool = False
    """A running daemon takes another value over when it reads its file again."""


class Settings(_Reply, frozen=True, tag="settings"):
    id: int
    file: str
    settings: list[Setting]
    waiting: list[str] = []
    """Keys that the file gives another value, which needs another start of the daemon."""
    loads: int = 0
    """How often the file has been read again."""
    error: str = ""
    """Why the file could not be read when it was last tried."""


class Probed(_Reply, frozen=True, tag="probed"):
    """`seconds` is the best of several tries."""

    id: int
    seconds: float


class Pong(_Reply, frozen=True, tag="pong"):
    id: int


class Bye(_Reply, frozen=True, tag="bye"):
    """The daemon takes no more requests and exits once the running ones are done."""

    id: int


Reply: TypeAlias = (
    Welcome
    | Accepted
    | Progress
    | Token
    | Done
    | Explained
    | Primed
    | CacheReport
    | CacheCleared
    | Error
    | Tokens
    | Counted
    | ModelList
    | Loaded
    | Unloaded
    | ProcessList
    | StatusReport
    | Change
    | Spans
    | Ended
    | Settings
    | Probed
    | Pong
    | Bye
)

TERMINAL: Final = (
    Done,
    Explained,
    Primed,
    CacheReport,
    CacheCleared,
    Error,
    Tokens,
    Counted,
    ModelList,
    Loaded,
    Unloaded,
    ProcessList,
    StatusReport,
    Ended,
    Settings,
    Probed,
    Pong,
    Bye,
)
"""Exactly one of these ends every request."""
