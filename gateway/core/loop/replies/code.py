"""Code in replies: fenced blocks, whole programs, signatures, and the form in which two programs compare. Pure.

Python is read by `ast`. Other languages are known by the name on their fence, and compared by their text.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

PARSED = "<reply>"  # the file that a parser's warnings name
warnings.filterwarnings("ignore", module=PARSED)  # of how others write Python; 3.12 prints one for each "\s"
CODE_CHARS_MAX = 30_000  # that are parsed: about 20 ms
BLOCKS_MAX = 64
PYTHON = ("python", "python3", "py", "py3")
DATA = ("json", "jsonl", "text", "txt", "plaintext", "markdown", "md", "output", "csv", "latex", "math")  # no programs
_FENCED = re.compile(  # possessive, so that its time is linear in the text
    r"^[ \t]*+```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```[ \t]*+$|\Z)", re.DOTALL | re.MULTILINE
)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BRANCHES = (ast.For, ast.While, ast.If, ast.With, ast.Try)
_PROGRAM = (_Definition, ast.Import, ast.ImportFrom, *_BRANCHES)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block, or a whole reply that is a program. `language`: as its fence names it, in lower case; empty for
    none. `begin` and `end`: its place in the reply."""

    language: str
    text: str
    begin: int = 0
    end: int = 0


def fenced(reply: str) -> list[CodeBlock]:
    """The first fenced blocks of a reply, in order. A last fence without end runs to the end of the reply."""
    matches = islice(_FENCED.finditer(reply), BLOCKS_MAX)
    return [CodeBlock(m[1].lower(), m[2].rstrip("\n"), m.start(), m.end()) for m in matches]


def programs(reply: str) -> list[CodeBlock]:
    """The blocks of a reply that are code: fenced under the name of a language, or Python without a name; where nothing
    is fenced, the reply itself if it is a Python program."""
    blocks = fenced(reply)
    if not blocks:
        return [CodeBlock("python", reply, 0, len(reply))] if is_program(reply) else []
    return [block for block in blocks if _is_code(block)]


def _is_code(block: CodeBlock) -> bool:
    return block.language not in DATA if block.language else is_program(block.text)


def is_program(text: str) -> bool:
    """Whether a text is a Python program: it parses, and defines, imports or decides something. `Answer: 4` and `x = 5`
    parse, too, and are answers."""
    tree = python_tree(text)
    return tree is not None and any(isinstance(node, _PROGRAM) for node in tree.body)


def python_tree(text: str) -> ast.Module | None:
    """The tree of a Python program; None for any other text."""
    if len(text) > CODE_CHARS_MAX or "\0" in text:
        return None
    try:
        return ast.parse(textwrap.dedent(text), PARSED)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def normal_form(block: CodeBlock) -> str:
    """A program without what does not change it: of Python the tree without docstrings, of other languages the lines
    without trailing space. Equal forms are equal programs; of unequal ones nothing is known."""
    tree = python_tree(block.text) if block.language in (*PYTHON, "") else None
    if tree is None:
        return "\n".join(line.rstrip() for line in block.text.strip().splitlines() if line.strip())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | _Definition) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    try:
        return ast.dump(tree)
    except RecursionError:
        return block.text


def signatures(block: CodeBlock) -> list[str]:
    """The imports, classes and functions of a Python program, one line each; empty for other languages."""
    tree = python_tree(block.text) if block.language in (*PYTHON, "") else None
    try:
        return list(_signatures(tree.body, "")) if tree is not None else []
    except RecursionError:
        return []


def _signatures(body: list[ast.stmt], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield f"{indent}{ast.unparse(node)}"
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, node.bases))
            yield f"{indent}class {node.name}{f'({bases})' if bases else ''}"
            yield from _signatures(node.body, f"{indent}  ")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            yield f"{indent}{word} {node.name}({ast.unparse(node.args)}){returns}"
