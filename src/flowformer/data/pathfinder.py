"""Pathfinder32: two discs on an image of dashed curves; does one curve join them?

Written after the published procedure and the Long-Range Arena's parameters. Two target curves start near the middle,
seven pixels apart, and grow by turns, dash after dash; shorter curves distract. A dash claims the pixels around it, and
no dash may enter what others claimed. One disc lies on the start of a target, the other on the end of the same target
or of the other one. The same seed gives the same images, whatever the number of processes.

Shapes: the image is 32 x 32, inside a canvas with a wall around it; a stamp is 9 x 9. Places are (y, x).
"""

from __future__ import annotations

import functools
import io
import math
import random
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._utils import check_positive, optional_import, write_atomically
from .generate import Progress, check_whole, claim, run

SIZE = 32
IMAGES = 200_000
IMAGES_PER_PART = 1000

_CONTOUR_LENGTH = 14
_DISTRACTOR_LENGTH = _CONTOUR_LENGTH // 3
_DISTRACTORS = 20 // _DISTRACTOR_LENGTH
_DASH, _MARGIN, _SUPERSAMPLING = 2, 1, 2
_SEED_DISTANCE = 7
_MARKER_RADIUS = 1.5
# of a target's dash and a distractor's, beside a disc's 1
_TARGET_CONTRAST, _DISTRACTOR_CONTRAST = 0.75 * 2, 2.0
_DASH_TRIALS, _DISTRACTOR_TRIALS = 3, 5
# two claims on a pixel, each up to 1, must stay below; a pixel claimed by less than this may be a start
_CONFLICT, _FREE = 1.8, 0.3

_RADIUS = 4  # of a stamp
_WALL = 10  # a curve that leaves the image looks no further ahead than this


class Direction(NamedTuple):
    """A direction of dashes, with everything that depends on it alone.

    `step` is a unit; `weights` are the chances of the `_TURNS` after it; `ahead` draws a dash that starts at a place,
    `behind` one that ends there; `footprint` are the offsets that must be free for a curve to start.
    """

    step: tuple[float, float]
    weights: np.ndarray
    ahead: Stamp
    behind: Stamp
    footprint: np.ndarray


class Stamp(NamedTuple):
    """What a dash paints and what it claims, both (9, 9) with values up to 1, and its place in the middle."""

    ink: np.ndarray
    claim: np.ndarray


class _Curve:
    """A growing curve: the pivot before its last dash, the dash's direction, claim and place, and the tip."""

    def __init__(self, start: tuple[int, int], direction: Direction) -> None:
        head = _moved(start, direction, _DASH)
        self.pivot = _moved(head, direction, -(_DASH + _MARGIN))
        self.inside = _inside(head) and _inside(self.pivot)
        self.direction, self.place, self.claim = direction, start, direction.ahead.claim
        self.start = self.tip = start


def generate(
    home: Path,
    *,
    seed: int = 0,
    images: int = IMAGES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes home/imgs/<part>/sample_<i>.png and home/metadata/<part>.npy, text as published; a stopped run goes on.

    Args:
        images: how many; 200,000 are published.
        workers: processes; None is one for each core.
        progress: called with the parts done and all parts.
    """
    check_positive(images=images)
    check_whole("seed", seed)
    claim(home, {"seed": seed, "images": images})
    (home / "metadata").mkdir(exist_ok=True)
    parts = range(-(-images // IMAGES_PER_PART))
    pending = [part for part in parts if not (home / "metadata" / f"{part}.npy").exists()]
    run(partial(_write_part, home, seed, images), pending, workers, progress)


def draw(random_state: random.Random) -> tuple[np.ndarray, int]:
    """One image, (32, 32) uint8, and its label: 1 where one curve joins the discs."""
    label = random_state.randrange(2)
    targets = None
    while targets is None:
        image, claimed = _blank()
        targets = _targets(random_state, image, claimed)
    for _ in range(_DISTRACTORS):
        for _ in range(_DISTRACTOR_TRIALS):
            if _distract(random_state, image, claimed):
                break
    first = random_state.randrange(2)
    _stamp(image, targets[first].start, _disc())
    _stamp(image, targets[first if label else 1 - first].tip, _disc())
    inner = image[_WALL:-_WALL, _WALL:-_WALL]
    return (inner * (255 / inner.max()) + 0.5).astype(np.uint8), label


def _targets(random_state: random.Random, image: np.ndarray, claimed: np.ndarray) -> list[_Curve] | None:
    """Two curves of full length in an empty image, or None where they got stuck."""
    direction = _directions()[random_state.randrange(360)]
    middle = claimed.copy()
    border = _WALL + 2 * _SEED_DISTANCE
    middle[:border] = middle[-border:] = middle[:, :border] = middle[:, -border:] = 1
    start = _free_start(random_state, middle, direction)
    if start is None:
        return None
    curves = [_Curve(start, direction)]
    for _ in range(_DASH_TRIALS):
        angle = math.radians(random_state.randrange(360))
        beside = (
            round(start[0] + _SEED_DISTANCE * math.sin(angle)),
            round(start[1] + _SEED_DISTANCE * math.cos(angle)),
        )
        curve = _Curve(beside, _directions()[random_state.randrange(360)])
        if curve.inside:
            curves.append(curve)
            break
    if len(curves) < 2 or not curves[0].inside:
        return None
    for curve in curves:
        _stamp(image, curve.start, curve.direction.ahead.ink, _TARGET_CONTRAST)
    for _ in range(_CONTOUR_LENGTH - 1):
        for curve in curves:
            if not _extend(random_state, curve, image, claimed, _TARGET_CONTRAST):
                return None
    for curve in curves:
        _stamp(claimed, curve.place, curve.claim)
    return curves


def _distract(random_state: random.Random, image: np.ndarray, claimed: np.ndarray) -> bool:
    """Adds one short curve if there is room for all of it."""
    for _ in range(_DASH_TRIALS):
        direction = _directions()[random_state.randrange(360)]
        start = _free_start(random_state, claimed, direction)
        if start is None:
            return False
        curve = _Curve(start, direction)
        if curve.inside:
            break
    else:
        return False
    painted, taken = image.copy(), claimed.copy()
    _stamp(painted, start, direction.ahead.ink, _DISTRACTOR_CONTRAST)
    for _ in range(_DISTRACTOR_LENGTH - 1):
        if not _extend(random_state, curve, painted, taken, _DISTRACTOR_CONTRAST):
            return False
    _stamp(taken, curve.place, curve.claim)
    image[:], claimed[:] = painted, taken
    return True


def _extend(
    random_state: random.Random, curve: _Curve, image: np.ndarray, claimed: np.ndarray, contrast: float
) -> bool:
    """Adds one dash, at a turn whose chance is cos² of its angle, or nothing where every turn is blocked.

    Only then the dash before it claims its pixels: a dash may touch the one it continues.
    """
    turns, directions, around = _turns()
    pivot = _moved(curve.pivot, curve.direction, _DASH + 2 * _MARGIN)
    here = (pivot[0] + _WALL) * claimed.shape[1] + pivot[1] + _WALL
    # (turns, 5): the end of the dash and its four neighbours
    chances = (1 - claimed.ravel()[around + here].max(1)) * curve.direction.weights
    sums = chances.cumsum()
    if sums[-1] < 1e-4:
        return False
    for _ in range(_DASH_TRIALS):
        turn = int(np.searchsorted(sums, random_state.random() * sums[-1], side="right"))
        head = (pivot[0] + turns[turn][0], pivot[1] + turns[turn][1])
        dash = directions[turn].behind
        if (_window(claimed, head) + dash.claim).max() < _CONFLICT:
            _stamp(image, head, dash.ink, contrast)
            _stamp(claimed, curve.place, curve.claim)
            curve.pivot, curve.direction = pivot, directions[turn]
            curve.place, curve.claim, curve.tip = head, dash.claim, head
            return True
    return False


def _free_start(random_state: random.Random, claimed: np.ndarray, direction: Direction) -> tuple[int, int] | None:
    """A random place with room for a first dash, or None."""
    taken = claimed > _FREE
    blocked = np.zeros((SIZE, SIZE), bool)
    for y, x in direction.footprint:
        blocked |= taken[_WALL + y : _WALL + y + SIZE, _WALL + x : _WALL + x + SIZE]
    free = np.flatnonzero(~blocked)
    if not len(free):
        return None
    y, x = divmod(int(free[random_state.randrange(len(free))]), SIZE)
    return y, x


def _blank() -> tuple[np.ndarray, np.ndarray]:
    """An empty canvas, and one where all but the image without its outermost pixels is claimed."""
    claimed = np.ones((SIZE + 2 * _WALL, SIZE + 2 * _WALL))
    claimed[_WALL + 1 : -_WALL - 1, _WALL + 1 : -_WALL - 1] = 0
    return np.zeros_like(claimed), claimed


def _moved(place: tuple[int, int], direction: Direction, distance: float) -> tuple[int, int]:
    return math.ceil(place[0] + distance * direction.step[0]), math.ceil(place[1] + distance * direction.step[1])


def _inside(place: tuple[int, int]) -> bool:
    return 0 <= place[0] < SIZE and 0 <= place[1] < SIZE


def _window(canvas: np.ndarray, place: tuple[int, int]) -> np.ndarray:
    y, x = place[0] + _WALL, place[1] + _WALL
    return canvas[y - _RADIUS : y + _RADIUS + 1, x - _RADIUS : x + _RADIUS + 1]


def _stamp(canvas: np.ndarray, place: tuple[int, int], stamp: np.ndarray, contrast: float = 1.0) -> None:
    window = _window(canvas, place)
    np.maximum(window, stamp * contrast, out=window)


@functools.cache
def _directions() -> list[Direction]:
    """The directions in which a curve can start: every degree."""
    return [_direction(math.radians(degree)) for degree in range(-180, 180)]


@functools.cache
def _turns() -> tuple[list[tuple[int, int]], list[Direction], np.ndarray]:
    """Where a dash can end, seen from its pivot; the direction it then has; and flat offsets for looking around."""
    turns = _turn_offsets()
    width = SIZE + 2 * _WALL
    flat = np.array([y * width + x for y, x in turns])
    around = flat[:, None] + np.array([0, -1, 1, -width, width])
    return turns, [_direction(math.atan2(y, x)) for y, x in turns], around


@functools.cache
def _turn_offsets() -> list[tuple[int, int]]:
    """The pixels on a circle of a dash and its margin, one sample for each pixel of its length."""
    reach = _DASH + _MARGIN
    angles = np.arange(0, 2 * math.pi, 1 / reach)
    return sorted({(math.floor(reach * math.sin(a)), math.floor(reach * math.cos(a))) for a in angles})


def _direction(angle: float) -> Direction:
    ahead, behind = _dash(angle), _dash(angle + math.pi)
    turn = [math.remainder(math.atan2(y, x) - angle, 2 * math.pi) for y, x in _turn_offsets()]
    weights = np.array([math.cos(t) ** 2 if abs(t) < math.pi / 2 else 0.0 for t in turn])
    # the published procedure looks for room one pixel too far down and right, which moves starts off the middle
    footprint = np.argwhere(ahead.claim == 1) - _RADIUS + 1
    return Direction((math.sin(angle), math.cos(angle)), weights, ahead, behind, footprint)


def _dash(angle: float) -> Stamp:
    """A dash from the middle of its stamp, drawn twice as large with a line of one pixel."""
    middle = _RADIUS * _SUPERSAMPLING
    length = _DASH * _SUPERSAMPLING
    # rounding hides that the sine of 180 degrees is not quite 0
    head = tuple(math.ceil(round(middle + length * part, 9)) for part in (math.cos(angle), math.sin(angle)))
    picture = optional_import("PIL.Image", "train").new("L", (2 * middle + 1, 2 * middle + 1))
    optional_import("PIL.ImageDraw", "train").Draw(picture).line([(middle, middle), head], fill=255, width=1)
    line = np.asarray(picture)
    reach = _MARGIN * _SUPERSAMPLING
    padded = np.pad(line, reach)
    around = [
        padded[reach + y : reach + y + len(line), reach + x : reach + x + len(line)]
        for y in range(-reach, reach + 1)
        for x in range(-reach, reach + 1)
        if y * y + x * x <= reach * reach
    ]
    return Stamp(_smaller(line), _smaller(np.max(around, 0)))


@functools.cache
def _disc() -> np.ndarray:
    """A disc, drawn twice as large."""
    wide = 2 * _RADIUS + 4  # the filter must not see the border
    y, x = np.ogrid[-wide : wide + 2, -wide : wide + 2]
    disc = (y * y + x * x <= (_MARKER_RADIUS * _SUPERSAMPLING) ** 2) * np.uint8(255)
    small = _smaller(disc, len(disc) // _SUPERSAMPLING)
    middle = wide // _SUPERSAMPLING
    return small[middle - _RADIUS : middle + _RADIUS + 1, middle - _RADIUS : middle + _RADIUS + 1]


def _smaller(picture: np.ndarray, size: int = 2 * _RADIUS + 1) -> np.ndarray:
    """Scaled down to (size, size), values up to 1."""
    images = optional_import("PIL.Image", "train")
    return np.asarray(images.fromarray(picture).resize((size, size), images.Resampling.LANCZOS)) / 255.0


def _write_part(home: Path, seed: int, images: int, part: int) -> None:
    folder = home / "imgs" / str(part)
    folder.mkdir(parents=True, exist_ok=True)
    random_state = random.Random(f"pathfinder {seed} {part}")
    rows = []
    for index in range(min(IMAGES_PER_PART, images - part * IMAGES_PER_PART)):
        image, label = draw(random_state)
        file = io.BytesIO()
        optional_import("PIL.Image", "train").fromarray(image).save(file, "png")
        (folder / f"sample_{index}.png").write_bytes(file.getvalue())
        rows.append(
            f"imgs/{part} sample_{index}.png {index} {label} 1.0 {_CONTOUR_LENGTH} {_DISTRACTOR_LENGTH} {_DASH} 0.5 "
            f"{_MARGIN} 1\n"
        )
    # written last: the images of a listed part are all there
    write_atomically(home / "metadata" / f"{part}.npy", "".join(rows))
