"""How large the rooms are: `python -m tests.sizes` counts files and lines of code of each, by what git knows.

Docstrings, comments, blank lines and imports are no code; tests and benchmarks have a line of their own below the sum.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = ("tests", "benchmarks")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Of one file."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            without = node.body[:1] if has_docstring else []
        else:
            without = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for statement in without:
            left_out.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - left_out)


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files, lines = Counter[str](), Counter[str]()
    for path in map(Path, listed.stdout.splitlines()):
        room = path.parts[0] if path.parts[0] in BESIDE else "/".join(path.parts[:-1][:2]) or "."
        for name in (room,) if room in BESIDE else (room, "all"):
            files[name] += 1
            lines[name] += code_lines((ROOT / path).read_text())
    for name in sorted(lines, key=lambda name: (name in BESIDE, name == "all", name)):
        print(f"{name:32} {files[name]:4} files {lines[name]:6} lines")


if __name__ == "__main__":
    main()
