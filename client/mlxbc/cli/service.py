"""Owns `mlxbc service`: let launchd or systemd keep the daemon running for this user."""

from __future__ import annotations

import argparse
from contextlib import suppress

from mlxbc.cli import exits, stop
from mlxbc.cli.options import model_name
from mlxbc.cli.serve import installed
from mlxbc.errors import ConfigError, MlxbcError
from mlxbc.paths import log_dir, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlxbcd.service.manager import Manager, State

_EPILOG = f"""\
verbs:
  install    write the unit and start it; again after an update, or to change
             an option: a daemon that runs by another unit is stopped first
  uninstall  stop the daemon and remove the unit; models and logs stay
  start      start what is installed
  stop       stop the daemon and listening, until the next login or start
  restart    replace the daemon
  status     show how the service is; exit status 0 if a client is answered
  logs       show the end of the log

The service keeps this environment's MLXBC_ and hub variables as they are when
it is installed. A daemon that fails is started again, one that is told to end
(mlxbc stop) is not, except by the next connection.

examples:
  mlxbc service install
  mlxbc service install --on-demand --model smollm2
  mlxbc service status
  mlxbc service logs -f

{exits.HELP}"""

_OWNERS = {"on_demand": "install", "model": "install", "no_preload": "install", "lines": "logs", "follow": "logs"}
"""Which verb each option is for."""

_LINES = 50
_QUIESCE_S = 60.0
"""How long running requests may take to finish before the service manager asks too."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Keep the daemon running as a service of this user."
    parser.epilog = _EPILOG
    parser.argument_default = argparse.SUPPRESS
    parser.set_defaults(parser=parser)
    parser.add_argument("verb", choices=list(_VERBS), metavar="VERB", help="one of those below")
    install = parser.add_argument_group("options of install")
    install.add_argument("--on-demand", action="store_true", help="start at the first connection, not at login")
    install.add_argument("-m", "--model", type=model_name, metavar="NAME", help="the model for requests that name none")
    install.add_argument("--no-preload", action="store_true", help="load no model before the first request")
    logs = parser.add_argument_group("options of logs")
    logs.add_argument("-n", "--lines", type=_count, metavar="N", help=f"how many lines (default: {_LINES})")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    parser: argparse.ArgumentParser = args.parser
    for option, owner in _OWNERS.items():
        if option in args and args.verb != owner:
            parser.error(f"--{option.replace('_', '-')} is an option of: mlxbc service {owner}")
    if not installed():
        return exits.UNAVAILABLE
    from mlxbcd.service.commands import NoManager
    from mlxbcd.service.manager import this_system

    try:
        manager = this_system(_quiesce)
    except NoManager as error:
        raise ConfigError(f"{error.reason}; without a service manager {_without_manager(args.verb)}") from None
    return _VERBS[args.verb](manager, args)


def _without_manager(verb: str) -> str:
    """What does the same as a verb where there is nobody to do it."""
    match verb:
        case "logs":
            return f"a daemon in the background logs to {log_dir() / 'mlxbcd.log'}"
        case "status":
            return "ask the daemon itself: mlxbc status"
        case "stop":
            return "stop the daemon with: mlxbc stop"
        case "restart":
            return "replace the daemon with: mlxbc serve --replace --detach --wait"
        case "uninstall":
            return "there is nothing to uninstall"
        case _:
            return "start the daemon with: mlxbc serve --detach --wait"


def _install(manager: Manager, args: argparse.Namespace) -> int:
    from mlxbcd.service.program import program

    wanted = program(
        on_demand="on_demand" in args, model=getattr(args, "model", None), preload="no_preload" not in args
    )
    _refuse_stranger(manager)
    manager.install(wanted)
    if wanted.on_demand:
        print("installed: the daemon starts at the first connection")
    else:
        print("installed: the daemon runs, and starts at every login")
    return exits.OK


def _uninstall(manager: Manager, _args: argparse.Namespace) -> int:
    if manager.uninstall():
        print("uninstalled")
    else:
        exits.explain("the service was not installed")
    return exits.OK


def _start(manager: Manager, _args: argparse.Namespace) -> int:
    _refuse_stranger(manager)
    manager.start()
    return exits.OK


def _stop(manager: Manager, _args: argparse.Namespace) -> int:
    manager.stop()
    return exits.OK


def _restart(manager: Manager, _args: argparse.Namespace) -> int:
    _refuse_stranger(manager)
    manager.restart()
    return exits.OK


def _status(manager: Manager, _args: argparse.Namespace) -> int:
    state = manager.state()
    print("\n".join(_describe(state)))
    return exits.OK if state.installed and state.up else exits.UNAVAILABLE


def _logs(manager: Manager, args: argparse.Namespace) -> int:
    code = manager.logs(getattr(args, "lines", _LINES), follow="follow" in args)
    return exits.OK if code == 0 else exits.FAILED


_VERBS = {
    "install": _install,
    "uninstall": _uninstall,
    "start": _start,
    "stop": _stop,
    "restart": _restart,
    "status": _status,
    "logs": _logs,
}


def _describe(state: State) -> list[str]:
    if not state.installed:
        when = "not installed; install it with: mlxbc service install"
    else:
        when = "starts at login" if state.at_login else "starts at the first connection"
    if state.pid is not None:
        now = f"running, pid {state.pid}"
    else:
        now = "no daemon; the next connection starts one" if state.listening else "stopped"
    lines = [f"service   {state.manager}, {when}", f"unit      {state.unit}", f"state     {now}"]
    if state.ended is not None:
        lines.append(f"ended     {state.ended}")
    return [*lines, *(f"note      {note}" for note in state.notes)]


def _refuse_stranger(manager: Manager) -> None:
    from mlxbcd.service.manager import refuse_stranger

    refuse_stranger(socket_path(), manager.state())


def _quiesce() -> None:
    """Let the daemon end by itself. If it can't, or not in time, the manager's signal comes next."""
    with suppress(MlxbcError):
        stop.run(argparse.Namespace(now=False, timeout=_QUIESCE_S))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)
