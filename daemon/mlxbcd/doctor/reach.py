"""Owns examining whether a client reaches the daemon: the socket's path, its lock, who answers, which version."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mlxbc.errors import ConfigError
from mlxbcd import __version__ as installed
from mlxbcd.doctor.findings import Finding, fault, note, ok
from mlxbcd.doctor.patient import Patient
from mlxbcd.serve.listen import holder, shared

_START = "mlxbc serve --detach --wait, or mlxbc service start if it is a service"


def socket(patient: Patient) -> Iterator[Finding]:
    """The path's length, and who may enter it."""
    try:
        path = patient.socket()
    except ConfigError as error:
        yield fault("socket", str(error), "export MLXBC_SOCKET=/a/shorter/path, for the daemon and all clients")
        return
    directory = path.parent
    try:
        found = directory.stat()
    except OSError:
        yield note("socket", f"there is no directory {directory} yet; the daemon makes it")
        return
    if found.st_uid != os.geteuid():
        yield fault(
            "socket", f"{directory} belongs to user {found.st_uid}", "export MLXBC_SOCKET= to a path of your own"
        )
    elif found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        own = "export MLXBC_SOCKET= to a path in a directory of your own"
        mend = own if shared(found) else f"chmod 700 {directory}"
        yield fault("socket", f"others may enter {directory} (mode {mode:04o})", mend)
    yield from _socket_itself(path)


def _socket_itself(path: Path) -> Iterator[Finding]:
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield fault("socket", f"{path} is not a socket, so no daemon can listen there", f"mv {path} {path}.old")
    elif found.st_uid != os.geteuid():
        yield fault("socket", f"{path} belongs to user {found.st_uid}", f"ask them to remove it: rm {path}")
    elif found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        yield fault("socket", f"others may connect to {path} (mode {mode:04o})", f"chmod 600 {path}")
    else:
        yield ok("socket", f"{path}, for you alone")


def daemon(patient: Patient) -> Iterator[Finding]:
    """Who holds the lock, and who answers."""
    answer = patient.answer
    try:
        path = patient.socket()
    except ConfigError:
        return
    holds = holder(path)
    if answer.welcome is not None:
        pid = answer.welcome.pid
        if holds is not None and holds != pid:
            yield fault(
                "daemon",
                f"process {pid} answers, but process {holds} holds the lock of {path}: two daemons of one path",
                f"kill {holds}",
            )
        else:
            yield ok("daemon", f"process {pid} answers")
        yield from _state(patient)
    elif holds is not None:
        reason = answer.error or "it says nothing"
        yield fault(
            "daemon", f"process {holds} holds the lock of {path} and does not answer: {reason}", f"kill {holds}"
        )
    elif answer.absent and path.exists():
        yield note("daemon", f"no daemon runs; a dead one has left {path}, which the next one replaces", _START)
    elif answer.absent:
        yield note("daemon", "no daemon runs", _START)
    else:
        yield fault("daemon", answer.error or "somebody listens, but doesn't speak as a daemon", f"rm {path}")


def _state(patient: Patient) -> Iterator[Finding]:
    status = patient.answer.status
    if status is None:
        yield fault("daemon", f"it doesn't tell how it is: {patient.answer.error}", "mlxbc stop --now, then start it")
        return
    if status.state == "degraded":
        yield fault("daemon", "its device has failed or hangs", "mlxbc stop --now, then start it again")
    for each in status.notes:
        yield note("daemon", each)


def versions(patient: Patient) -> Iterator[Finding]:
    """Of this command, of the package it would start, and of the daemon that runs."""
    if installed != patient.version:
        yield fault(
            "version",
            f"this command is version {patient.version}, the daemon's package {installed}",
            "pip install --force-reinstall 'mlxbc[daemon]'",
        )
    welcome = patient.answer.welcome
    if welcome is not None and welcome.version != patient.version:
        yield fault(
            "version",
            f"the running daemon is version {welcome.version}, this command {patient.version}",
            "mlxbc service restart, or mlxbc serve --replace --detach --wait if it is no service",
        )
    elif installed == patient.version:
        yield ok("version", patient.version)
