"""launchd's agent as it is rendered: a property list that launchd can read, with the values that it needs."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_managers import a_program

from mlxbcd.serve.activation import LISTENERS
from mlxbcd.serve.limits import Limits
from mlxbcd.service import agent
from mlxbcd.service.agent import AQUA, BACKGROUND, render, starts_at_login
from mlxbcd.service.launchd import EXIT_TIMEOUT_S
from mlxbcd.service.program import program

XMLLINT = shutil.which("xmllint")

GRAMMAR = """\
<!ENTITY % value "array | data | date | dict | false | integer | real | string | true">
<!ELEMENT plist (%value;)>
<!ATTLIST plist version CDATA "1.0">
<!ELEMENT array (%value;)*>
<!ELEMENT dict (key, (%value;))*>
<!ELEMENT key (#PCDATA)>
<!ELEMENT string (#PCDATA)>
<!ELEMENT integer (#PCDATA)>
<!ELEMENT real (#PCDATA)>
<!ELEMENT data (#PCDATA)>
<!ELEMENT date (#PCDATA)>
<!ELEMENT true EMPTY>
<!ELEMENT false EMPTY>
"""
"""Which elements a property list is made of."""

CATALOG = """\
<catalog xmlns="urn:oasis:names:tc:entity:xmlns:xml:catalog">
  <public publicId="-//Apple//DTD PLIST 1.0//EN" uri="plist.dtd"/>
</catalog>
"""
"""Where the grammar that a property list names is found: here, not at Apple."""

TYPES: dict[str, type | dict[str, Any]] = {
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "Sockets": {"Listeners": {"SockPathName": str, "SockPathMode": int}},
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "LimitLoadToSessionType": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "WorkingDirectory": str,
    "Umask": int,
    "SoftResourceLimits": {"Core": int, "NumberOfFiles": int},
}
"""The keys of the agent and the types that launchd.plist(5) gives them. launchd ignores a key that it doesn't know."""


def rendered(tmp_path: Path, *, on_demand: bool = False, session: str = AQUA) -> dict[str, Any]:
    read = plistlib.loads(render(a_program(tmp_path, on_demand=on_demand), session))
    assert isinstance(read, dict)
    return read


def mistyped(found: dict[str, Any], types: dict[str, Any], where: str = "") -> list[str]:
    wrong = [f"{where}{key}" for key in found.keys() ^ types.keys()]
    for key in found.keys() & types.keys():
        kind = types[key]
        if isinstance(kind, dict):
            wrong += mistyped(found[key], kind, f"{where}{key}.")
        elif type(found[key]) is not kind:  # a bool is an int, but not to launchd
            wrong.append(f"{where}{key}")
    return wrong


@pytest.mark.parametrize("on_demand", [False, True])
def test_every_key_is_known_and_of_its_type(tmp_path: Path, on_demand: bool) -> None:
    assert mistyped(rendered(tmp_path, on_demand=on_demand), TYPES) == []


def test_the_table_of_types_finds_what_is_wrong(tmp_path: Path) -> None:
    read = rendered(tmp_path) | {"KeepAlve": True, "Umask": True}
    read["Sockets"]["Listeners"]["SockPathMode"] = "0600"
    assert set(mistyped(read, TYPES)) == {"KeepAlve", "Umask", "Sockets.Listeners.SockPathMode"}


def test_the_values_that_matter(tmp_path: Path) -> None:
    read = rendered(tmp_path)
    assert read["Label"] == agent.LABEL
    assert read["ProcessType"] == "Interactive", "else the device is throttled"
    assert (read["ExitTimeOut"], read["ThrottleInterval"]) == (EXIT_TIMEOUT_S, 10)
    assert (read["Umask"], read["Sockets"]["Listeners"]["SockPathMode"]) == (0o077, 0o600)
    assert list(read["Sockets"]) == [LISTENERS], "the name that the daemon asks for"
    assert read["SoftResourceLimits"]["Core"] == 0, "prompts are in memory"


def test_the_daemon_ends_well_before_launchd_kills_it() -> None:
    limits = Limits()
    assert limits.drain_s + limits.close_s + limits.linger_s < EXIT_TIMEOUT_S


def test_a_resident_daemon_starts_at_login_and_again_after_a_failure(tmp_path: Path) -> None:
    read = rendered(tmp_path)
    assert (read["RunAtLoad"], read["KeepAlive"]) == (True, {"SuccessfulExit": False})


def test_a_daemon_on_demand_has_no_key_that_would_start_it_at_login(tmp_path: Path) -> None:
    read = rendered(tmp_path, on_demand=True)
    assert read["RunAtLoad"] is False
    assert "SuccessfulExit" not in read["KeepAlive"], "which implies RunAtLoad"


@pytest.mark.parametrize("session", [AQUA, BACKGROUND])
def test_an_agent_is_for_one_kind_of_session(tmp_path: Path, session: str) -> None:
    assert rendered(tmp_path, session=session)["LimitLoadToSessionType"] == session


def test_everything_that_launchd_does_not_expand_is_absolute_and_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/someone")
    monkeypatch.delenv("MLXBC_SOCKET", raising=False)
    read = plistlib.loads(render(program(platform="darwin"), AQUA))
    (option,) = [word for word in read["ProgramArguments"] if word.startswith("--log-file=")]
    paths = [
        read["ProgramArguments"][0],
        option.partition("=")[2],
        read["Sockets"]["Listeners"]["SockPathName"],
        read["StandardOutPath"],
        read["StandardErrorPath"],
        read["WorkingDirectory"],
    ]
    for path in paths:
        assert os.path.isabs(path), path
        assert not set("~$") & set(path), path
    assert paths[1:3] == [
        "/Users/someone/Library/Logs/mlxbc/mlxbcd.log",
        "/Users/someone/Library/Application Support/mlxbc/mlxbc.sock",
    ]
    assert paths[1] != paths[4], "launchd does not rotate what it writes"


def test_variables_are_strings(tmp_path: Path) -> None:
    read = rendered(tmp_path)
    assert read["EnvironmentVariables"] == {"MLXBC_SOCKET": str(tmp_path / "run" / "mlxbc.sock")}
    assert all(type(value) is str for value in read["EnvironmentVariables"].values())


def test_what_was_rendered_can_be_read_back(tmp_path: Path) -> None:
    for on_demand in (False, True):
        installed = render(a_program(tmp_path, on_demand=on_demand), AQUA)
        assert starts_at_login(installed) is not on_demand
        assert agent.logs(installed) == [tmp_path / "logs" / "mlxbcd.log", tmp_path / "logs" / "mlxbcd.stderr.log"]


@pytest.mark.parametrize("broken", [b"", b"<plist><dict>", b"\xff", plistlib.dumps(["a list"])])
def test_a_broken_agent_says_nothing(broken: bytes) -> None:
    assert not starts_at_login(broken)
    assert agent.logs(broken) == []


# ----------------------------------------------------------------------------------------------------- the grammar


def complaints(tmp_path: Path, plist: bytes) -> str:
    if XMLLINT is None:
        pytest.skip("xmllint is not here (Debian: package libxml2-utils)")
    (tmp_path / "plist.dtd").write_text(GRAMMAR)
    (tmp_path / "catalog.xml").write_text(CATALOG)
    ended = subprocess.run(
        [XMLLINT, "--nonet", "--noout", "--valid", "-"],
        env={**os.environ, "XML_CATALOG_FILES": str(tmp_path / "catalog.xml")},
        input=plist,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return ended.stderr.decode() + (f"exit code {ended.returncode}" if ended.returncode else "")


def test_the_agent_and_its_template_are_valid_property_lists(tmp_path: Path) -> None:
    from mlxbcd.service.files import template

    assert complaints(tmp_path, render(a_program(tmp_path, model='<&>"'), AQUA)) == ""
    assert complaints(tmp_path, template(agent.FILE)) == ""


@pytest.mark.parametrize(
    ("before", "after"), [(b"<true/>", b"<yes/>"), (b"<key>Umask</key>", b""), (b"</integer>", b"</string>")]
)
def test_a_list_that_is_not_valid_is_found(tmp_path: Path, before: bytes, after: bytes) -> None:
    plist = render(a_program(tmp_path), AQUA)
    assert before in plist
    assert complaints(tmp_path, plist.replace(before, after, 1)) != ""
