"""The commands around `ask` and `chat`: what they ask of the daemon, and what they show."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import command_line
import msgspec
import pytest
from fake_daemon import FakeDaemon, Session

from mlxbc import __version__, cli, variables, wire
from mlxbc.cli import exits, explain, hints, table
from mlxbcd.config.settings import KEYS


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command looks for its daemon. Standard input is closed, so that no command waits for it."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        socket = Path(directory) / "s"
        monkeypatch.setenv("MLXBC_SOCKET", str(socket))
        monkeypatch.setattr(sys, "stdin", None)
        yield socket


Output = Callable[[], tuple[str, str]]


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Output:
    """What came out since the last call: standard output, standard error."""
    return lambda: tuple(capfd.readouterr())


PROCESS = wire.Process(
    model="smollm2",
    path="/m",
    bytes=90_000_000,
    dtype="float32",
    context=8192,
    kv_bytes=1_500,
    running=0,
    queued=2,
    idle_s=75.0,
    placement="continuous",
)


# ------------------------------------------------------------ the command itself


def test_help_lists_every_command(output: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown, _ = output()
    for name in cli.COMMANDS:
        assert f"\n  {name} " in shown


def test_without_a_command_the_help_is_an_error(output: Output) -> None:
    assert cli.main([]) == exits.USAGE
    shown, complained = output()
    assert shown == ""
    assert "usage: mlxbc" in complained


def test_version_is_told(output: Output) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert output()[0] == f"mlxbc {__version__}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("aks", "did you mean 'ask'?"),
        ("statsu", "'status'"),
        ("zzzzz", "mlxbc --help"),
        ("start", "mlxbc serve --detach --wait, or mlxbc service start"),
        ("Restart", "mlxbc service restart"),
        ("list", "mlxbc models"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(name: str, hint: str, output: Output) -> None:
    assert cli.main([name]) == exits.USAGE
    assert hint in output()[1]


def test_what_people_try_is_answered_with_what_there_is() -> None:
    for word, meant in hints._OTHERWISE.items():
        assert word not in cli.COMMANDS
        named = re.findall(r"mlxbc ([a-z]+)", meant)
        assert set(named) <= set(cli.COMMANDS), word


def test_the_plan_of_what_will_not_run_has_no_times() -> None:
    plan = wire.Plan(method="speculative", mechanism="unsupported", reason="no such drafter", chunks=[31])
    reply = wire.Explained(
        id=1, model="one", prompt=31, context=400, priority="normal", plan=plan, first_token_ms=120.0
    )
    assert explain.lines(reply) == [
        "model     one",
        "prompt    31 tokens of 400",
        "priority  normal",
        "runs      not at all: no such drafter",
    ]


# ------------------------------------------------------------ variables


def test_a_variable_that_is_nearly_one_of_ours_is_told(
    path: Path, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXBC_SOCKT", "/nowhere")
    monkeypatch.setenv("MLXBC_LOGLEVEL", "debug")
    monkeypatch.setenv("MLXBC_API_KEY", "another program's")
    cli.main(["ps"])
    assert output()[1].splitlines()[:2] == [
        "mlxbc: nothing reads the variable MLXBC_LOGLEVEL; did you mean MLXBC_LOG_LEVEL?",
        "mlxbc: nothing reads the variable MLXBC_SOCKT; did you mean MLXBC_SOCKET?",
    ]


def test_the_names_of_variables_are_those_of_the_daemons_settings() -> None:
    assert {key.variable for key in KEYS.values()} == variables.SETTINGS
    assert variables.doubts(variables.OWN | variables.SETTINGS | {"PATH", "MLXBC_TEST_KILL_AT"}) == []


def test_variables_that_are_ours_cost_no_import(path: Path) -> None:
    program = "import sys; from mlxbc.cli import main; main(['ps']); print('mlxbc.variables' in sys.modules)"
    for name, loaded in (("MLXBC_DATA", b"False\n"), ("MLXBC_DATTA", b"True\n")):
        environ = command_line.environment(path, **{name: "/d"})
        ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True)
        assert ended.stdout == loaded


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"serve"}))
def test_every_command_has_a_manual_with_examples_that_fits_a_terminal(
    name: str, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown, _ = output()
    assert f"usage: mlxbc {name} " in shown
    assert f"examples:\n  mlxbc {name}" in shown
    assert "environment:\n  MLXBC_SOCKET " in shown
    assert "exit status:\n  0 " in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_is_a_module_that_says_what_it_owns(name: str) -> None:
    module = importlib.import_module(f"mlxbc.cli.{name}")
    assert (module.__doc__ or "").startswith(f"Owns `mlxbc {name}`")
    assert callable(module.run)


@pytest.mark.parametrize("name", ["status", "ps", "models", "load", "chat"])
def test_without_a_daemon_one_line_says_how_to_start_it(path: Path, name: str, output: Output) -> None:
    assert cli.main([name]) == exits.UNAVAILABLE
    shown, complained = output()
    assert shown == ""
    assert complained.count("\n") == 1
    assert "mlxbc serve --detach" in complained


# ------------------------------------------------------------ looking


def report(session: Session, **fields: object) -> None:
    request = session.receive(wire.Status)
    usual: dict[str, object] = {
        "pid": 42,
        "version": __version__,
        "uptime_s": 3661.0,
        "state": "ready",
        "device": "cpu",
        "connections": 1,
        "running": 2,
        "queued": 3,
        "served": 4,
        "failed": 5,
        "generated_tokens": 600,
        "memory_active": 1_234_000_000,
        "memory_cache": 0,
        "memory_used": 900_000_000,
        "memory_limit": 6_000_000_000,
        "footprint": 1_500_000_000,
        "footprint_measure": "rss",
        "models": [PROCESS],
        "drafted_tokens": 40,
        "accepted_tokens": 30,
    }
    session.send(wire.StatusReport(id=request.id, **{**usual, **fields}))


def test_status_tells_a_person_how_the_daemon_is(path: Path, output: Output) -> None:
    with FakeDaemon(path, lambda session: report(session, notes=["the BLAS is slow"])):
        assert cli.main(["status"]) == 0
    shown, _ = output()
    assert shown.splitlines() == [
        f"ready, pid 42, version {__version__}, up 1 h 1 min",
        "device    cpu, 1.2 GB in use, 0 B spare",
        "memory    900 MB of 6.0 GB for models, 1.5 GB in all (rss)",
        "models    smollm2",
        "requests  2 running, 3 queued, 4 served, 5 failed",
        "tokens    600 generated, 30 of 40 guesses right",
        "clients   1 connected",
        "note      the BLAS is slow",
    ]


def test_status_notes_a_daemon_older_than_the_command(path: Path, output: Output) -> None:
    with FakeDaemon(path, lambda session: report(session, version="0.0.9")):
        cli.main(["status"])
    assert "mlxbc serve --replace --detach" in output()[0]


def test_status_tells_a_program_everything(path: Path, output: Output) -> None:
    with FakeDaemon(path, report):
        assert cli.main(["status", "--json"]) == 0
    assert msgspec.json.decode(output()[0], type=wire.StatusReport).models == [PROCESS]


def test_ps_is_a_table(path: Path, output: Output) -> None:
    busy = msgspec.structs.replace(
        PROCESS, model="org/mamba", running=1, placement="alone", reason="windows", expires_s=5.4
    )
    pinned = msgspec.structs.replace(PROCESS, pinned=True, draft="a")

    def script(session: Session) -> None:
        session.send(wire.ProcessList(id=session.receive(wire.Ps).id, models=[pinned, busy]))

    with FakeDaemon(path, script):
        assert cli.main(["ps"]) == 0
    shown, _ = output()
    assert shown.splitlines() == [
        "NAME         SIZE     DTYPE    KV      CONTEXT  RUNNING  QUEUED  IDLE        UNTIL   BATCHING",
        "smollm2 + a  90.0 MB  float32  1.5 kB  8192     0        2       1 min 15 s  pinned  together",
        "org/mamba    90.0 MB  float32  1.5 kB  8192     1        2       -           in 5 s  one at a time (windows)",
    ]


def test_ps_of_no_models_is_its_header_and_an_empty_array(path: Path, output: Output) -> None:
    def script(session: Session) -> None:
        session.send(wire.ProcessList(id=session.receive(wire.Ps).id, models=[]))

    with FakeDaemon(path, script):
        cli.main(["ps"])
        assert output()[0].count("\n") == 1
        cli.main(["ps", "--json"])
        assert output()[0] == "[]\n"


def test_models_tells_what_can_be_loaded(path: Path, output: Output) -> None:
    sizes = {"org/small": 1_000_000_000, "org/large": 5_500_000_000, "org/huge": 7_000_000_000, "org/odd": 0}
    entries = [
        wire.ModelEntry(
            name="smollm2", source="embedded", path="/m", bytes=90_000_000, resident=True, default=True, memory=1
        ),
        *(
            wire.ModelEntry(name=name, source="hub", path="/h", bytes=size // 2, memory=size)
            for name, size in sizes.items()
        ),
    ]

    def script(session: Session) -> None:
        request = session.receive(wire.Models)
        assert request.memory
        session.send(wire.ModelList(id=request.id, models=entries))
        report(session)

    with FakeDaemon(path, script):
        assert cli.main(["models"]) == 0
        shown, _ = output()
        assert cli.main(["models", "--json"]) == 0
        assert msgspec.json.decode(output()[0], type=list[wire.ModelEntry]) == entries
    assert shown.splitlines() == [
        "NAME       SIZE     MEMORY  FITS          SOURCE    STATE",
        "smollm2    90.0 MB  1 B     yes           embedded  resident, default",
        "org/small  500 MB   1.0 GB  yes           hub       -",
        "org/large  2.8 GB   5.5 GB  if others go  hub       -",
        "org/huge   3.5 GB   7.0 GB  no            hub       -",
        "org/odd    0 B      -       -             hub       -",
    ]


def test_texts_are_tokenized_and_counted(path: Path, output: Output) -> None:
    def script(session: Session) -> None:
        tokenize = session.receive(wire.Tokenize)
        assert (tokenize.text, tokenize.messages, tokenize.model) == ("Hello there", None, "tiny")
        session.send(wire.Tokens(id=tokenize.id, tokens=[5, 66, 7]))

    with FakeDaemon(path, script):
        assert cli.main(["tokenize", "-m", "tiny", "Hello", "there"]) == 0
    assert output()[0] == "5 66 7\n"


def test_a_chat_is_counted_with_its_template(path: Path, output: Output) -> None:
    def script(session: Session) -> None:
        count = session.receive(wire.Count)
        assert [(m.role, m.content) for m in count.messages or ()] == [("system", "Be brief."), ("user", "Hi")]
        session.send(wire.Counted(id=count.id, count=17))

    with FakeDaemon(path, script):
        assert cli.main(["count", "--chat", "-s", "Be brief.", "Hi"]) == 0
    assert output()[0] == "17\n"


def test_a_system_prompt_without_a_template_is_a_usage_error(output: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["count", "-s", "Be brief.", "Hi"])
    assert ended.value.code == exits.USAGE
    assert "--chat" in output()[1]


# ------------------------------------------------------------ changing


def test_loading_and_unloading_say_what_they_did(path: Path, output: Output) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Load)
        assert request.model == "tiny"
        session.send(wire.Progress(id=request.id, phase="load", done=1, total=2))
        session.send(wire.Loaded(id=request.id, model="tiny", bytes=2_000_000, seconds=0.42))

    def unload(session: Session) -> None:
        request = session.receive(wire.Unload)
        session.send(wire.Unloaded(id=request.id, model=request.model))

    with FakeDaemon(path, script):
        assert cli.main(["load", "tiny"]) == 0
    assert output() == ("loaded tiny (2.0 MB) in 0.4 s\n", "")
    with FakeDaemon(path, unload):
        assert cli.main(["unload", "tiny"]) == 0
        assert output() == ("unloaded tiny\n", "")
        assert cli.main(["unload", "-q", "tiny"]) == 0
        assert output() == ("", "")


def test_a_model_that_is_not_there_is_a_configuration_error(path: Path, output: Output) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Load)
        session.send(wire.Error(id=request.id, code="unknown_model", message="pull it first"))

    with FakeDaemon(path, script):
        assert cli.main(["load", "nobody/nothing"]) == exits.CONFIG
    assert output() == ("", "mlxbc: pull it first\n")


# ------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_456_789, "123 MB"), (8_000_000_000, "8.0 GB")],
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert table.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (180_000, "2 d 2 h")]
)
def test_durations_are_their_two_largest_units(seconds: float, text: str) -> None:
    assert table.duration(seconds) == text
