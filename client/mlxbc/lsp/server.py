"""Owns the language server: documents in, inline completions out, and cancellation passed on to the daemon."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lsprotocol import types
from msgspec import Struct
from pygls.lsp.server import LanguageServer

from mlxbc import __version__
from mlxbc.aio import AsyncClient
from mlxbc.errors import ConnectionLost, MlxbcError, ShuttingDown
from mlxbc.link import Link
from mlxbc.lsp.around import Reach, around, behind, trimmed
from mlxbc.result import Result


class Options(Struct, frozen=True, kw_only=True):
    """How completions are asked for."""

    model: str | None = None
    max_tokens: int = 96
    deadline_ms: int = 3000
    reach: Reach = Reach()


class Server(LanguageServer):
    """A server over standard input and output.

    What goes wrong is told once, until something works again: an error at every key helps nobody.
    """

    def __init__(self, options: Options) -> None:
        super().__init__("mlxbc", __version__)
        self.options = options
        self._link: Link | None = None
        self._told: str | None = None

    async def complete(self, params: types.InlineCompletionParams) -> str:
        """The text to suggest at a position; empty where there is nothing to suggest.

        Cancelling the task that waits for it cancels the request.
        """
        document = self.workspace.get_text_document(params.text_document.uri)
        source, offset = document.source, document.offset_at_position(params.position)
        fields = around(source, offset, self.options.reach)
        fields |= {"path": self._path(params.text_document.uri), "language": document.language_id or ""}
        try:
            result = await self._ask({name: value for name, value in fields.items() if value != ""})
        except (ConnectionLost, ShuttingDown):  # daemons come and go
            return ""
        except MlxbcError as error:
            self._tell(error)
            return ""
        self._told = None
        cut = result.reason in ("length", "deadline")
        return trimmed(result.text, behind(source, offset), cut=cut)

    async def _ask(self, fim: dict[str, object]) -> Result:
        if self._link is None:
            self._link = Link(None, "mlxbc-lsp")
        options = self.options

        async def question(client: AsyncClient) -> Result:
            request = client.generate(
                fim=fim,
                model=options.model,
                supersede="completion",
                priority="interactive",
                deadline_ms=options.deadline_ms,
                max_tokens=options.max_tokens,
                temperature=0,
            )
            async with request as stream:
                return await stream.wait()

        return await self._link.ask(question)

    def _tell(self, error: MlxbcError) -> None:
        kind = type(error).__name__
        if kind != self._told:
            self._told = kind
            message = types.ShowMessageParams(types.MessageType.Warning, f"mlxbc: {error}")
            self.window_show_message(message)

    def _path(self, uri: str) -> str:
        """A document's path from its workspace's folder, or its name."""
        path = Path(unquote(urlsplit(uri).path))
        for folder in self.workspace.folders.values():
            root = Path(unquote(urlsplit(folder.uri).path))
            if path.is_relative_to(root):
                return str(path.relative_to(root))
        return path.name


def server(options: Options) -> Server:
    """A server that is ready to be started."""
    made = Server(options)

    @made.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
    async def inline_completion(params: types.InlineCompletionParams) -> types.InlineCompletionList:
        text = await made.complete(params)
        # Without a range it goes where the cursor is; with one, some editors show it over what stands there.
        return types.InlineCompletionList([types.InlineCompletionItem(text)] if text else [])

    return made
