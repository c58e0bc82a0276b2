"""Owns how languages write comments: by a language's name, as editors give it, or by a file's name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Final, NamedTuple


class Comment(NamedTuple):
    """What is before and after a comment of one line."""

    before: str
    after: str = ""

    def line(self, text: str) -> str:
        """A text of one line as a comment."""
        return f"{self.before} {text}{' ' if self.after else ''}{self.after}".rstrip()

    def block(self, lines: Iterable[str]) -> list[str]:
        """Several lines, each as a comment of its own: nesting and ends of comments within them do no harm."""
        return [self.line(text.replace(self.after, "") if self.after else text) for text in lines]


_HASH: Final = Comment("#")
_SLASHES: Final = Comment("//")
_DASHES: Final = Comment("--")
_SEMICOLON: Final = Comment(";")
_PERCENT: Final = Comment("%")
_MARKUP: Final = Comment("<!--", "-->")
_STARS: Final = Comment("/*", "*/")
_PARENTHESES: Final = Comment("(*", "*)")

_LANGUAGES: Final[dict[Comment, str]] = {
    _HASH: """
        python py pyi ruby rb shellscript shell bash sh zsh fish perl pl pm r yaml yml toml makefile make mk dockerfile
        docker cmake elixir ex exs julia jl nim powershell ps1 tcl awk coffeescript coffee conf properties nix terraform
        tf hcl gitignore crystal cr starlark bzl graphql gql
    """,
    _SLASHES: """
        c h cpp c++ cc cxx hpp cuda-cpp cu csharp c# cs java javascript js mjs cjs javascriptreact jsx typescript ts
        typescriptreact tsx go rust rs swift kotlin kt kts scala dart php zig objective-c objc m mm groovy gradle
        solidity sol v verilog systemverilog sv proto proto3 jsonc json5 less scss sass glsl hlsl wgsl metal fsharp f#
        fs d
    """,
    _DASHES: "sql lua haskell hs ada adb ads vhdl vhd elm applescript purescript purs",
    _SEMICOLON: "lisp el emacs-lisp elisp scheme scm clojure clj cljs ini asm assembly nasm racket rkt common-lisp",
    _PERCENT: "latex tex matlab octave erlang erl prolog",
    _MARKUP: "html htm xml svg markdown md vue svelte xhtml",
    _STARS: "css",
    _PARENTHESES: "ocaml ml mli coq",
    Comment('"'): "vim viml",
    Comment("!"): "fortran f90 f95 f03",
    Comment("'"): "vb vbnet vba bas",
    Comment("REM"): "bat cmd",
}
_BY_NAME: Final = {name: comment for comment, names in _LANGUAGES.items() for name in names.split()}


def comment(language: str, path: str) -> Comment | None:
    """How to write a comment, by the language if it is known, else by the file's extension or name."""
    file = PurePath(path)
    for name in (language, file.suffix.lstrip("."), file.name):
        if found := _BY_NAME.get(name.lower()):
            return found
    return None
