"""Owns `mlxbc http`: the OpenAI-compatible endpoint, as a command."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

from mlxbc.cli import exits

_NEEDED = ("starlette", "uvicorn", "uvloop")
_LOCAL = ("localhost", "127.0.0.1", "::1")

_EPILOG = f"""\
Programs that speak OpenAI's API are given the URL that is printed, and the
token as their API key. There are POST /v1/chat/completions and /v1/completions,
with and without streaming, GET /v1/models, and GET /health, which needs no
token. The model "default" is the daemon's own choice.

The token is made at first use and kept in a file that only you can read; the
variable MLXBC_HTTP_TOKEN goes before it. Requests that reach the server by a
name it doesn't know, or come from a web page, are refused: see --allow-host
and --allow-origin.

The server is a client of the daemon: it may start before it, and survives its
restarts. Ctrl-C lets running answers finish; pressed again, it ends at once.

examples:
  mlxbc http
  mlxbc http --port 11434 --allow-origin app://obsidian.md
  export OPENAI_BASE_URL=http://127.0.0.1:8642/v1
  export OPENAI_API_KEY=$(mlxbc http --show-token)

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Serve OpenAI's HTTP API, for programs that know no other."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8642, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--show-token", action="store_true", help="print the token and exit")
    parser.add_argument(
        "--no-token", action="store_true", help="let every program of this machine in, whoever runs it; not beyond it"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which this server may be called, beside localhost; may be repeated",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="the origin of web pages that may ask, such as http://localhost:3000; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Serve."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        exits.explain(
            f"the HTTP endpoint is not installed (no {', '.join(missing)}); "
            f"in mlxbc's checkout: {sys.executable} -m pip install '.[http]'"
        )
        return exits.UNAVAILABLE
    from mlxbc.http import server

    if args.no_token and args.host not in _LOCAL:
        args.parser.error("without a token it listens on this machine alone: leave --host or --no-token out")
    if not 0 <= args.port <= 65535:
        args.parser.error("a port is a number up to 65535")
    token = None if args.no_token else os.environ.get("MLXBC_HTTP_TOKEN") or server.token()
    if args.show_token:
        print(token or "")
        return exits.OK
    options = server.Options(
        host=args.host, port=args.port, token=token, hosts=args.allow_host, origins=args.allow_origin
    )
    server.run(options, _ready)
    return exits.OK


def _ready(url: str) -> None:
    print(url, flush=True)
