"""ListOps: nested operations on digits, such as `[MAX 4 [MIN 2 3 ] 1 ]`, which is 4.

The generator follows the published parameters of the Long-Range Arena. The same seed gives the same files, whatever the
number of processes.
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

# ids by byte; of an operator, its bracket and the second letter after it decide
_IDS = np.zeros(256, np.uint8)
_IDS[[ord(digit) for digit in DIGITS]] = np.arange(1, 11)
_IDS[ord(END)] = VOCABULARY.index(END)
_OPERATOR_IDS = np.zeros((256, 256), np.uint8)
for _operator in OPERATORS:
    _OPERATOR_IDS[ord(_operator[1]), ord(_operator[2])] = VOCABULARY.index(_operator)
_KNOWN = np.zeros(256, bool)
_KNOWN[list(b"0123456789[]() \t\r\nMINAXEDS")] = True


def tokenise(block: bytes, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids of whole lines "expression, tab, digit" end to end, where each line's ids end, and the digits.

    >>> ids, ends, values = tokenise(b"( ( [MAX 4 ) ( [SM 2 ) ] ) ]\\t4\\n7\\t7\\n", "here")
    >>> [VOCABULARY[i] for i in ids], ends, values
    (['[MAX', '4', '[SM', '2', ']', ']', '7'], array([6, 7]), array([4, 7]))
    """
    text = np.frombuffer(block, np.uint8)
    lines, tabs = np.flatnonzero(text == ord("\n")), np.flatnonzero(text == ord("\t"))
    # a carriage return may stand before the end of a line
    values = text[np.minimum(tabs + 1, len(text) - 1)].astype(np.int64) - ord("0")
    after = lines - (text[lines - 1] == ord("\r"))
    if (
        not _KNOWN[text].all()
        or len(lines) != len(tabs)
        or not ((after - tabs == 2) & (values >= 0) & (values < 10)).all()
    ):
        raise DamagedDataError(f"{where}: not lines of an expression, a tab and a digit.")
    ids = _IDS[text]
    opening = np.flatnonzero(text == ord("["))
    ids[opening] = _OPERATOR_IDS[text[opening + 1], text[opening + 2]]
    if not ids[opening].all():
        raise DamagedDataError(f"{where}: an operator is none of {', '.join(OPERATORS)}.")
    ids[tabs + 1] = 0
    places = np.flatnonzero(ids)
    ends = np.searchsorted(places, lines)
    if not np.diff(ends, prepend=0).all():
        raise DamagedDataError(f"{where}: an expression is empty.")
    return ids[places], ends, values


def generate(
    home: Path,
    *,
    seed: int = 0,
    sizes: dict[str, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes home/basic_{train,val,test}.tsv; a stopped run goes on where it was.

    The parentheses of the published files, which readers drop, are left out.

    Args:
        sizes: rows of "train", "val" and "test"; None is as published.
        workers: processes; None is one for each core.
        progress: called with the parts done and all parts.
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
    """An endless stream of expressions of the published lengths, with their values; a different one for each part."""
    draw = random.Random(f"listops {seed} {part}").random
    while True:
        tokens: list[str] = []
        value = _grow(draw, 1, tokens)
        if _SHORTEST <= len(tokens) <= _LONGEST:
            yield tokens, value


def _grow(draw, depth: int, tokens: list[str]) -> int:
    """Appends a random expression to tokens and returns its value."""
    if depth == _MAX_DEPTH or draw() >= _OPERATOR_SHARE:
        digit = int(draw() * 10)
        tokens.append(DIGITS[digit])
        return digit
    operator = OPERATORS[int(draw() * len(OPERATORS))]
    tokens.append(operator)
    arguments = [_grow(draw, depth + 1, tokens) for _ in range(2 + int(draw() * (_MAX_ARGUMENTS - 1)))]
    tokens.append(END)
    return evaluate(operator, arguments)


def evaluate(operator: str, arguments: list[int]) -> int:
    """The value of one operation; a median between two digits is rounded down, SM is the sum modulo 10."""
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered, middle = sorted(arguments), len(arguments) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def _write_part(folder: Path, seed: int, part: int) -> None:
    # expressions of 500 or more tokens practically never repeat, so duplicates are not looked for
    rows = (f"{' '.join(tokens)}\t{value}\n" for tokens, value in islice(expressions(seed, part), _ROWS_PER_PART))
    write_atomically(folder / f"{part}.tsv", "".join(rows))


def _lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with path.open() as file:
            yield from file
