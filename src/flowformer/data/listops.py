"""ListOps: expressions of nested operations on digits, such as `[MAX 4 [MIN 2 3 ] 1 ]`, whose value is 4.

The generator uses the published parameters of the Long-Range Arena. The files depend only on the seed and the sizes,
not on the number of processes.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from .._utils import atomic_file, check_positive, write_atomically
from .generate import Progress, check_whole, claim, run
from .store import DamagedDataError

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
VOCABULARY = ("<pad>", *DIGITS, *OPERATORS, END, "<unk>")
SIZES = {"train": 96_000, "val": 2_000, "test": 2_000}

_MAX_DEPTH, _MAX_ARGUMENTS, _OPERATOR_SHARE = 10, 10, 0.25
_SHORTEST, _LONGEST = 501, 1999
_ROWS_PER_PART = 1000

# The id of a digit or a closing bracket is looked up by its byte. The id of an operator is assigned to its opening
# bracket and looked up by the two letters after it; all other bytes have id 0 and are dropped.
_IDS = np.zeros(256, np.uint8)
_IDS[[ord(digit) for digit in DIGITS]] = np.arange(1, 11)
_IDS[ord(END)] = VOCABULARY.index(END)
_OPERATOR_IDS = np.zeros((256, 256), np.uint8)
for _operator in OPERATORS:
    _OPERATOR_IDS[ord(_operator[1]), ord(_operator[2])] = VOCABULARY.index(_operator)
_VALID_BYTES = np.zeros(256, bool)
_VALID_BYTES[list(b"0123456789[]() \t\r\nMINAXEDS")] = True


def tokenise(block: bytes, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenise lines of an expression, a tab and its value.

    Args:
        block: complete lines, each ending with a line feed.
        where: the place of the block in the file, for error messages.

    Returns:
        the ids of all expressions end to end, the end of each expression in them, and the values.

    >>> ids, ends, values = tokenise(b"( ( [MAX 4 ) ( [SM 2 ) ] ) ]\\t4\\n7\\t7\\n", "here")
    >>> [VOCABULARY[i] for i in ids], ends, values
    (['[MAX', '4', '[SM', '2', ']', ']', '7'], array([6, 7]), array([4, 7]))
    """
    text = np.frombuffer(block, np.uint8)
    lines, tabs = np.flatnonzero(text == ord("\n")), np.flatnonzero(text == ord("\t"))
    values = text[np.minimum(tabs + 1, len(text) - 1)].astype(np.int64) - ord("0")
    line_ends = lines - (text[lines - 1] == ord("\r"))  # lines may end with CR LF
    if (
        not _VALID_BYTES[text].all()
        or len(lines) != len(tabs)
        or not ((line_ends - tabs == 2) & (values >= 0) & (values < 10)).all()
    ):
        raise DamagedDataError(f"{where}: not lines of an expression, a tab and a digit.")
    ids = _IDS[text]
    opening = np.flatnonzero(text == ord("["))
    ids[opening] = _OPERATOR_IDS[text[opening + 1], text[opening + 2]]
    if not ids[opening].all():
        raise DamagedDataError(f"{where}: an operator is none of {', '.join(OPERATORS)}.")
    ids[tabs + 1] = 0  # the value is not part of the expression
    token_positions = np.flatnonzero(ids)
    ends = np.searchsorted(token_positions, lines)
    if not np.diff(ends, prepend=0).all():
        raise DamagedDataError(f"{where}: an expression is empty.")
    return ids[token_positions], ends, values


def generate(
    home: Path,
    *,
    seed: int = 0,
    sizes: dict[str, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write home/basic_{train,val,test}.tsv. Calling it again resumes an interrupted generation.

    The files have no parentheses, unlike the published ones: readers drop them.

    Args:
        sizes: number of rows of "train", "val" and "test"; None means the published numbers.
        workers: number of processes; None means one per core.
        progress: called after each part with the number of finished parts and the total number of parts.
    """
    sizes = SIZES if sizes is None else sizes
    if not isinstance(sizes, dict) or set(sizes) != set(SIZES):
        example = json.dumps({"train": 960, "val": 20, "test": 20})
        raise ValueError(
            f"sizes must say how many rows {', '.join(SIZES)} have, got {sizes!r}; accepted: such as {example}."
        )
    check_positive(**{f"the size of {part}": size for part, size in sizes.items()})
    check_whole("seed", seed)
    claim(home, {"seed": seed, **sizes})
    if all((home / f"basic_{part}.tsv").exists() for part in sizes):
        return
    parts = home / "parts"
    parts.mkdir(exist_ok=True)
    wanted = range(-(-sum(sizes.values()) // _ROWS_PER_PART))
    run(
        partial(_write_part, parts, seed),
        [part for part in wanted if not (parts / f"{part}.tsv").exists()],
        workers,
        progress,
    )
    rows = _lines([parts / f"{part}.tsv" for part in wanted])
    for name, size in sizes.items():
        with atomic_file(home / f"basic_{name}.tsv") as file:
            file.write("Source\tTarget\n")
            file.writelines(islice(rows, size))
    shutil.rmtree(parts)


def expressions(seed: int, part: int) -> Iterator[tuple[list[str], int]]:
    """Yield random expressions of the published lengths and their values, without end.

    Each (seed, part) gives a different stream.
    """
    draw = random.Random(f"listops {seed} {part}").random
    while True:
        tokens: list[str] = []
        value = _append_expression(draw, 1, tokens)
        if _SHORTEST <= len(tokens) <= _LONGEST:
            yield tokens, value


def _append_expression(draw, depth: int, tokens: list[str]) -> int:
    """Append a random expression to `tokens` and return its value."""
    if depth == _MAX_DEPTH or draw() >= _OPERATOR_SHARE:
        digit = int(draw() * 10)
        tokens.append(DIGITS[digit])
        return digit
    operator = OPERATORS[int(draw() * len(OPERATORS))]
    tokens.append(operator)
    arguments = [_append_expression(draw, depth + 1, tokens) for _ in range(2 + int(draw() * (_MAX_ARGUMENTS - 1)))]
    tokens.append(END)
    return evaluate(operator, arguments)


def evaluate(operator: str, arguments: list[int]) -> int:
    """Return the value of one operation: minimum, maximum, median (rounded down), or sum modulo 10 (SM)."""
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered, middle = sorted(arguments), len(arguments) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def _write_part(folder: Path, seed: int, part: int) -> None:
    # no check for duplicates: expressions of 500 or more random tokens practically never repeat
    rows = (f"{' '.join(tokens)}\t{value}\n" for tokens, value in islice(expressions(seed, part), _ROWS_PER_PART))
    write_atomically(folder / f"{part}.tsv", "".join(rows))


def _lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with path.open() as file:
            yield from file
