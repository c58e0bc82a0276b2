"""The VS Code extension, in node: what the editor asks, what it is given, and what the daemon hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from fake_service import FakeDaemon, FakeJob
from listeners import refusing
from real_daemon import Daemon
from real_node import EXTENSION, Node, installed, missing, node

from mlxbc import wire
from mlxbc.framing import Codec
from mlxbc.paths import socket_path

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

Scripted: TypeAlias = Callable[[], AbstractContextManager[FakeDaemon]]

CODE = "def add(a, b):\\n    ret\\n\\nprint(add(1, 2))\\n"
ABSENT = "mlxbc: no daemon is running; start one with: mlxbc serve --detach"
NEW_CANCELLATION = "host.source = new vscode.CancellationTokenSource();"


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("extension"))


@pytest.fixture
def editor(entry: Path, socket: Path) -> Iterator[Node]:
    with node(entry, socket) as host:
        host.run("host.settings['mlxbc.completion.debounceMs'] = 0")
        yield host


def typed(editor: Node, line: int = 1, character: int = 7, *, invoked: bool = False) -> Future[Any]:
    """What the editor does when something was typed; the suggestions' texts."""
    kind = "Invoke" if invoked else "Automatic"
    return editor.start(
        f"{NEW_CANCELLATION} const items = await host.provider.provideInlineCompletionItems("
        f"vscode.window.activeTextEditor.document, new vscode.Position({line}, {character}), "
        f"{{ triggerKind: vscode.InlineCompletionTriggerKind.{kind} }}, host.source.token); "
        "return items.map((item) => item.insertText)"
    )


def suggest(fake: FakeDaemon, job: FakeJob, *pieces: str, reason: wire.FinishReason = "stop") -> None:
    for piece in pieces:
        fake.do(job.token, piece)
    fake.do(job.done, reason)


def new_job(fake: FakeDaemon, count: int) -> FakeJob:
    """The newest job, once there have been so many."""
    fake.until(lambda service: len(service.jobs) >= count)
    return fake.job()


def generate(job: FakeJob) -> wire.Generate:
    assert isinstance(job.request, wire.Generate)
    return job.request


def fim(job: FakeJob) -> wire.Fim:
    around = generate(job).fim
    assert around
    return around


def contents(job: FakeJob) -> list[str]:
    return [message.content for message in generate(job).messages or []]


def test_its_package_has_what_it_needs_and_no_more(entry: Path) -> None:
    root = entry.parents[1]
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {
        "package.json",
        "readme.md",
        *(f"out/{path.stem}.js" for path in (EXTENSION / "src").glob("*.ts")),
    }


def test_the_socket_is_the_one_that_the_client_finds(editor: Node, entry: Path, socket: Path) -> None:
    find = f"require({str(entry.with_name('connection.js'))!r}).socketPath"
    # `require` is the driver's own.
    editor.run("globalThis.require = process.mainModule.require.bind(process.mainModule)")
    assert editor.value(f"{find}()") == str(socket)
    assert editor.value(f"{find}('/x/../y')") == "/y"
    assert editor.value(f"(delete process.env.MLXBC_SOCKET, {find}())") == str(socket_path())


def test_a_suggestion_is_all_that_came(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}')")
        suggestion = typed(editor)
        request = generate(fake.job())
        assert (request.supersede, request.priority) == ("completion", "interactive")
        assert (request.deadline_ms, request.max_tokens) == (3000, 96)
        assert request.fim == wire.Fim(
            prefix="def add(a, b):\n    ret", suffix="\n\nprint(add(1, 2))\n", path="sums.py", language="python"
        )
        suggest(fake, fake.job(), "urn a", " + b\n    # \U0001f600", "\n")
        assert suggestion.result(10) == ["urn a + b\n    # \U0001f600"]


def test_typing_along_is_answered_without_the_daemon(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}')")
        suggestion = typed(editor)
        suggest(fake, fake.job(), "urn a + b")
        assert suggestion.result(10) == ["urn a + b"]
        editor.run("host.documents[0].replace(new vscode.Range(1, 7, 1, 7), 'urn ')")
        assert typed(editor, 1, 11).result(10) == ["a + b"]
        editor.run("host.documents[0].replace(new vscode.Range(1, 11, 1, 11), 'b')")
        suggestion = typed(editor, 1, 12)
        suggest(fake, new_job(fake, 2), " + a")
        assert suggestion.result(10) == [" + a"]


def test_the_next_key_cancels(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}')")
        suggestion = typed(editor)
        job = fake.job()
        fake.do(job.token, "urn")
        editor.run("host.source.cancel()")
        assert suggestion.result(10) == []
        fake.until(lambda _: job.cancelled == 1)
        assert editor.value("host.told") == []


def test_a_burst_of_keys_asks_once(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}'); host.settings['mlxbc.completion.debounceMs'] = 400")
        for _ in range(3):
            stale = typed(editor)
            editor.run("await new Promise((resolve) => setTimeout(resolve, 50)); host.source.cancel()")
            assert stale.result(10) == []
        suggestion = typed(editor)
        suggest(fake, fake.job(), "urn")
        assert suggestion.result(10) == ["urn"]
        assert len(fake.service.jobs) == 1


def test_what_was_cut_or_stands_there_already_is_left_out(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}')")
        suggestion = typed(editor)
        suggest(fake, fake.job(), "urn a + b\n    # the su", reason="length")
        assert suggestion.result(10) == ["urn a + b"]
        editor.run("host.open('other.py', 'print(add(1))')")
        suggestion = typed(editor, 0, 11)
        job = new_job(fake, 2)
        assert fim(job).single_line
        suggest(fake, job, ", 2))")
        assert suggestion.result(10) == [", 2"]


def test_of_long_lines_only_a_part_is_sent(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run("host.open('long.txt', 'x'.repeat(300000))")
        suggestion = typed(editor, 0, 200_000)
        job = fake.job()
        assert 16384 <= len(fim(job).prefix) <= 32768
        suggest(fake, job)
        suggestion.result(10)


def test_a_prefix_begins_at_a_line_that_moves_in_steps(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(
            "host.settings['mlxbc.completion.linesBefore'] = 4; host.settings['mlxbc.completion.linesAfter'] = 1"
        )
        editor.run("host.open('lines.txt', Array.from({ length: 12 }, (_, n) => `${n}\\n`).join(''))")
        begins = []
        for count, line in enumerate(range(3, 9), 1):
            suggestion = typed(editor, line, 1)
            job = new_job(fake, count)
            assert (fim(job).prefix.split("\n")[-1], fim(job).suffix) == (str(line), f"\n{line + 1}")
            begins.append(fim(job).prefix.split("\n")[0])
            suggest(fake, job)
            suggestion.result(10)
        assert begins == ["0", "0", "2", "2", "4", "4"]


def test_the_other_visible_editors_are_context(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run("host.open('other.py', 'x = 1\\n'); host.other = vscode.window.activeTextEditor")
        editor.run(f"host.open('sums.py', '{CODE}'); vscode.window.visibleTextEditors.push(host.other)")
        suggestion = typed(editor)
        job = fake.job()
        assert fim(job).context == [wire.Excerpt(text="x = 1\n", path="other.py")]
        suggest(fake, job)
        suggestion.result(10)


def test_half_a_character_is_asked_about_as_well(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run("host.open('odd.py', 'a\\ud83d \\ud83d\\ude00')")
        suggestion = typed(editor, 0, 5)
        job = fake.job()
        assert fim(job).prefix == "a\ufffd \U0001f600"
        suggest(fake, job)
        assert suggestion.result(10) == []


def test_completion_can_be_switched_off_and_still_be_asked_for(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}'); host.settings['mlxbc.completion.enabled'] = false")
        assert typed(editor).result(10) == []
        suggestion = typed(editor, invoked=True)
        suggest(fake, fake.job(), "urn")
        assert suggestion.result(10) == ["urn"]


def test_without_a_daemon_one_message_says_what_to_do(editor: Node) -> None:
    editor.run(f"host.open('sums.py', '{CODE}')")
    # Long pauses between the keys: it is looked for each time.
    editor.run("const now = Date.now; let hours = 0; Date.now = () => now() + 3600000 * hours++")
    assert [typed(editor).result(10) for _ in range(5)] == [[]] * 5
    assert editor.value("host.told") == [ABSENT]
    assert typed(editor, invoked=True).result(10) == []
    assert editor.value("host.told") == [ABSENT] * 2, "whoever asks is answered"


def test_without_a_daemon_it_is_not_looked_for_at_every_key(scripted: Scripted, editor: Node) -> None:
    editor.run(f"host.open('sums.py', '{CODE}'); Date.now = () => 0")
    assert typed(editor).result(10) == []
    with scripted() as fake:
        assert typed(editor).result(10) == []
        assert not fake.service.jobs
        editor.run("Date.now = () => 3000")
        suggestion = typed(editor)
        suggest(fake, fake.job(), "urn")
        assert suggestion.result(10) == ["urn"]


def test_a_daemon_that_was_restarted_is_found_again(scripted: Scripted, editor: Node) -> None:
    with scripted() as fake:
        editor.run(f"host.open('sums.py', '{CODE}')")
        suggestion = typed(editor)
        fake.do(fake.job().token, "urn")
    assert suggestion.result(10) == []
    with scripted() as fake:
        suggestion = typed(editor)
        suggest(fake, fake.job(), "urn")
        assert suggestion.result(10) == ["urn"]
    assert editor.value("host.told") == []


def test_a_daemon_of_another_version_is_told_of_once(editor: Node, socket: Path) -> None:
    with refusing(socket, Codec.JSON):
        editor.run(f"host.open('sums.py', '{CODE}')")
        assert [typed(editor).result(10) for _ in range(3)] == [[]] * 3
        editor.run("await host.commands['mlxbc.status']()")
        refusal = "mlxbc: the daemon speaks protocol 9; install one version of both"
        # Once for all that nobody asked for, and once for what somebody did.
        assert editor.value("host.told") == [refusal] * 2


def test_the_chat_view_streams_and_knows_what_was_said(scripted: Scripted, editor: Node) -> None:
    ask = (
        NEW_CANCELLATION + "host.said = []; host.steps = [];"
        "return await host.participant({ prompt: 'And you?' }, { history: ["
        "{ prompt: 'Hello' }, { response: [new vscode.ChatResponseMarkdownPart('Hi.')] }] },"
        "{ markdown: (text) => host.said.push(text), progress: (text) => host.steps.push(text) }, host.source.token)"
    )
    with scripted() as fake:
        editor.run("host.settings['mlxbc.chat.system'] = 'Be brief.'")
        answer = editor.start(ask)
        job = fake.job()
        assert contents(job) == ["Be brief.", "Hello", "Hi.", "And you?"]
        fake.do(job.token, "let me see", channel="reasoning")
        fake.do(job.token, "Fine")
        editor.until(lambda: editor.value("host.said") == ["Fine"])
        suggest(fake, job, ".")
        assert answer.result(10) == {}
        assert editor.value("[host.said, host.steps]") == [["Fine", "."], ["thinking"]]
        answer = editor.start(ask)
        job = new_job(fake, 2)
        editor.run("host.source.cancel()")
        assert answer.result(10) == {}
        fake.until(lambda _: job.cancelled == 1)
    assert editor.run(ask) == {"errorDetails": {"message": ABSENT.removeprefix("mlxbc: ")}}


def test_a_chat_document_is_the_conversation(scripted: Scripted, editor: Node) -> None:
    text = "vscode.window.activeTextEditor.document.text"
    write = "vscode.window.activeTextEditor.document.text += {!r}"
    with scripted() as fake:
        editor.run("await host.commands['mlxbc.chat']()")
        editor.run("await host.commands['mlxbc.chat.send']()")
        assert "write your message" in editor.value("host.told.pop()")
        editor.run(write.format("Who are you?"))
        sent = editor.start("await host.commands['mlxbc.chat.send']()")
        job = fake.job()
        assert contents(job) == ["Who are you?"]
        fake.do(job.token, "A mod")
        editor.until(lambda: editor.value(text).endswith("─── mlxbc ───\nA mod"))
        suggest(fake, job, "el.\nAnd ", "you?")
        sent.result(10)
        assert editor.value(text).endswith("A model.\nAnd you?\n\n─── you ───\n")
        editor.run(write.format("A person."))
        sent = editor.start("await host.commands['mlxbc.chat.send']()")
        job = new_job(fake, 2)
        assert contents(job) == ["Who are you?", "A model.\nAnd you?", "A person."]
        fake.do(job.token, "I s")
        editor.until(lambda: editor.value(text).endswith("I s"))
        editor.run("host.commands['mlxbc.cancel']()")
        sent.result(10)
        fake.until(lambda _: job.cancelled == 1)
        assert editor.value(text).endswith("I s\n\n─── you ───\n")
        assert editor.value("host.told") == []


def test_rewriting_replaces_the_selection(scripted: Scripted, editor: Node) -> None:
    select = (
        "vscode.window.activeTextEditor.selection = new vscode.Selection(1, 0, 3, 0); host.answers = ['in capitals'];"
    )
    with scripted() as fake:
        editor.run("host.open('sums.txt', 'one\\ntwo\\nthree\\nfour\\n')")
        rewriting = editor.start(f"{select} await host.commands['mlxbc.rewrite']()")
        job = fake.job()
        assert "in capitals" in contents(job)[-1]
        assert contents(job)[-1].endswith("two\nthree")
        suggest(fake, job, "```text\nTW", "O\nTHREE\n```")
        rewriting.result(10)
        assert editor.value("host.documents[0].text") == "one\nTWO\nTHREE\nfour\n"

        rewriting = editor.start(f"{select} await host.commands['mlxbc.rewrite']()")
        job = new_job(fake, 2)
        editor.run("host.documents[0].replace(new vscode.Range(1, 0, 1, 0), 'changed ')")
        suggest(fake, job, "2\n3")
        rewriting.result(10)
        assert editor.value("host.documents[0].text") == "one\nchanged TWO\nTHREE\nfour\n"
        assert editor.value("host.clipboard") == "2\n3\n"

        rewriting = editor.start(f"{select} await host.commands['mlxbc.rewrite']()")
        job = new_job(fake, 3)
        editor.run("host.progress.cancel()")
        rewriting.result(10)
        fake.until(lambda _: job.cancelled == 1)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_completes_and_chats(entry: Path, real: Daemon) -> None:
    with node(entry, real.path) as editor:
        editor.run("host.settings['mlxbc.completion.maxTokens'] = 12")
        editor.run("host.settings['mlxbc.completion.deadlineMs'] = 60000")
        editor.run("host.open('sums.py', 'def add(a, b):\\n    return')")
        assert typed(editor, 1, 10).result(60)[0].strip()
        editor.run("await host.commands['mlxbc.chat']()")
        editor.run("vscode.window.activeTextEditor.document.text += 'What is the capital of France?'")
        sent = editor.start("await host.commands['mlxbc.chat.send']()")
        editor.until(lambda: "Paris" in editor.value("vscode.window.activeTextEditor.document.text"))
        editor.run("host.commands['mlxbc.cancel']()")
        sent.result(10)
        assert editor.value("host.told") == []
        editor.run("await host.commands['mlxbc.status']()")
        assert "smollm2" in editor.value("host.told.join()")
        real.until(lambda report: report.running == 0)
