"""Pathfinder32: images of dashed curves and two discs; the label says whether one curve joins the discs.

Follows the published procedure with the parameters of the Long-Range Arena. Two target curves start near the middle,
seven pixels apart, and are extended alternately by one dash; shorter curves are distractors. A dash claims the pixels
around it, and a dash that overlaps the claims of other dashes is rejected. One disc is at the start of a target curve,
the other at the end of the same curve (label 1) or of the other target curve (label 0). The images depend only on the
seed, not on the number of processes.

Shapes: the image is 32 x 32, in the middle of a canvas with a border of `_WALL` pixels; a stamp is 9 x 9. Positions are
(y, x) in the image.
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
# brightness relative to a disc; the image is normalised by its maximum at the end
_TARGET_CONTRAST, _DISTRACTOR_CONTRAST = 0.75 * 2, 2.0
_DASH_TRIALS, _DISTRACTOR_TRIALS = 3, 5
# A claim on a pixel is from 0 to 1. A dash is rejected if its claim plus the existing claim on any pixel is at least
# _CONFLICT; a curve may start where claims are at most _FREE.
_CONFLICT, _FREE = 1.8, 0.3

_RADIUS = 4  # a stamp is 2 * _RADIUS + 1 pixels wide
_WALL = 10  # width of the canvas's border; curves look ahead at most this far beyond the image


class Direction(NamedTuple):
    """Precomputed values for dashes of one direction.

    `step` is the unit vector; `weights` are the weights of the turns of `_turns` after a dash of this direction;
    `ahead` is the stamp of a dash that starts at a position and `behind` of one that ends there; `footprint` has the
    offsets of the pixels that must be free for a curve to start.
    """

    step: tuple[float, float]
    weights: np.ndarray
    ahead: Stamp
    behind: Stamp
    footprint: np.ndarray


class Stamp(NamedTuple):
    """Brightness and claim of a dash around its position, which is the middle pixel; (9, 9) each, from 0 to 1."""

    ink: np.ndarray
    claim: np.ndarray


class _Curve:
    """A growing curve.

    `start` and `tip` are its ends. `pivot`, `direction`, `position` and `claim` belong to the last dash: the point
    around which it was turned, its direction, and its claim, which is stamped at `position` after the next dash.
    """

    def __init__(self, start: tuple[int, int], direction: Direction) -> None:
        head = _shifted(start, direction, _DASH)
        self.pivot = _shifted(head, direction, -(_DASH + _MARGIN))
        self.inside = _inside(head) and _inside(self.pivot)
        self.direction, self.position, self.claim = direction, start, direction.ahead.claim
        self.start = self.tip = start


def generate(
    home: Path,
    *,
    seed: int = 0,
    images: int = IMAGES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write home/imgs/<part>/sample_<i>.png and home/metadata/<part>.npy.

    As in the release, the metadata files are text in spite of their suffix. Calling it again resumes an interrupted
    generation.

    Args:
        images: number of images; the release has 200,000.
        workers: number of processes; None means one per core.
        progress: called after each part with the number of finished parts and the total number of parts.
    """
    check_positive(images=images)
    check_whole("seed", seed)
    claim(home, {"seed": seed, "images": images})
    (home / "metadata").mkdir(exist_ok=True)
    parts = range(-(-images // IMAGES_PER_PART))
    pending = [part for part in parts if not (home / "metadata" / f"{part}.npy").exists()]
    run(partial(_write_part, home, seed, images), pending, workers, progress)


def draw(random_state: random.Random) -> tuple[np.ndarray, int]:
    """Draw one image, (32, 32) uint8, and its label, 1 if one curve joins the discs."""
    label = random_state.randrange(2)
    targets = None
    while targets is None:
        image, claimed = _empty_canvas()
        targets = _draw_targets(random_state, image, claimed)
    for _ in range(_DISTRACTORS):
        for _ in range(_DISTRACTOR_TRIALS):
            if _draw_distractor(random_state, image, claimed):
                break
    first = random_state.randrange(2)
    _stamp(image, targets[first].start, _disc_stamp())
    _stamp(image, targets[first if label else 1 - first].tip, _disc_stamp())
    inner = image[_WALL:-_WALL, _WALL:-_WALL]
    return (inner * (255 / inner.max()) + 0.5).astype(np.uint8), label


def _draw_targets(random_state: random.Random, image: np.ndarray, claimed: np.ndarray) -> list[_Curve] | None:
    """Draw two curves of full length into an empty image; return None if one of them got stuck."""
    direction = _directions()[random_state.randrange(360)]
    blocked = claimed.copy()
    border = _WALL + 2 * _SEED_DISTANCE
    blocked[:border] = blocked[-border:] = blocked[:, :border] = blocked[:, -border:] = 1
    start = _free_start(random_state, blocked, direction)
    if start is None:
        return None
    curves = [_Curve(start, direction)]
    for _ in range(_DASH_TRIALS):
        angle = math.radians(random_state.randrange(360))
        second_start = (
            round(start[0] + _SEED_DISTANCE * math.sin(angle)),
            round(start[1] + _SEED_DISTANCE * math.cos(angle)),
        )
        curve = _Curve(second_start, _directions()[random_state.randrange(360)])
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
    # reproduces an error of the published procedure, which does not claim the last dash of the first curve
    _stamp(claimed, curves[-1].position, curves[-1].claim)
    return curves


def _draw_distractor(random_state: random.Random, image: np.ndarray, claimed: np.ndarray) -> bool:
    """Draw one short curve and return True, or leave the image unchanged and return False if the curve got stuck."""
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
    new_image, new_claimed = image.copy(), claimed.copy()
    _stamp(new_image, start, direction.ahead.ink, _DISTRACTOR_CONTRAST)
    for _ in range(_DISTRACTOR_LENGTH - 1):
        if not _extend(random_state, curve, new_image, new_claimed, _DISTRACTOR_CONTRAST):
            return False
    _stamp(new_claimed, curve.position, curve.claim)
    image[:], claimed[:] = new_image, new_claimed
    return True


def _extend(
    random_state: random.Random, curve: _Curve, image: np.ndarray, claimed: np.ndarray, contrast: float
) -> bool:
    """Draw one more dash at a random turn; return False if there is no room for it.

    The weight of a turn is cos² of its angle, times the share of its end that is not claimed. The claim of the previous
    dash is stamped only afterwards, since a dash may touch the one that it continues.
    """
    turns, directions, neighbourhoods = _turns()
    pivot = _shifted(curve.pivot, curve.direction, _DASH + 2 * _MARGIN)
    flat_pivot = (pivot[0] + _WALL) * claimed.shape[1] + pivot[1] + _WALL
    weights = (1 - claimed.ravel()[neighbourhoods + flat_pivot].max(1)) * curve.direction.weights
    sums = weights.cumsum()
    if sums[-1] < 1e-4:
        return False
    for _ in range(_DASH_TRIALS):
        turn = int(np.searchsorted(sums, random_state.random() * sums[-1], side="right"))
        head = (pivot[0] + turns[turn][0], pivot[1] + turns[turn][1])
        dash = directions[turn].behind
        if (_window(claimed, head) + dash.claim).max() < _CONFLICT:
            _stamp(image, head, dash.ink, contrast)
            _stamp(claimed, curve.position, curve.claim)
            curve.pivot, curve.direction = pivot, directions[turn]
            curve.position, curve.claim, curve.tip = head, dash.claim, head
            return True
    return False


def _free_start(random_state: random.Random, claimed: np.ndarray, direction: Direction) -> tuple[int, int] | None:
    """Return a random position with room for a first dash, or None if there is none."""
    is_claimed = claimed > _FREE
    blocked = np.zeros((SIZE, SIZE), bool)
    for y, x in direction.footprint:
        blocked |= is_claimed[_WALL + y : _WALL + y + SIZE, _WALL + x : _WALL + x + SIZE]
    free = np.flatnonzero(~blocked)
    if not len(free):
        return None
    y, x = divmod(int(free[random_state.randrange(len(free))]), SIZE)
    return y, x


def _empty_canvas() -> tuple[np.ndarray, np.ndarray]:
    """Return an empty canvas and its claims: the border and the outermost pixels of the image are claimed."""
    claimed = np.ones((SIZE + 2 * _WALL, SIZE + 2 * _WALL))
    claimed[_WALL + 1 : -_WALL - 1, _WALL + 1 : -_WALL - 1] = 0
    return np.zeros_like(claimed), claimed


def _shifted(position: tuple[int, int], direction: Direction, distance: float) -> tuple[int, int]:
    return math.ceil(position[0] + distance * direction.step[0]), math.ceil(position[1] + distance * direction.step[1])


def _inside(position: tuple[int, int]) -> bool:
    return 0 <= position[0] < SIZE and 0 <= position[1] < SIZE


def _window(canvas: np.ndarray, position: tuple[int, int]) -> np.ndarray:
    """Return the view of a canvas, (9, 9), that a stamp at this position covers."""
    y, x = position[0] + _WALL, position[1] + _WALL
    return canvas[y - _RADIUS : y + _RADIUS + 1, x - _RADIUS : x + _RADIUS + 1]


def _stamp(canvas: np.ndarray, position: tuple[int, int], stamp: np.ndarray, contrast: float = 1.0) -> None:
    window = _window(canvas, position)
    np.maximum(window, stamp * contrast, out=window)


@functools.cache
def _directions() -> list[Direction]:
    """Return the directions in which a curve can start, one per degree."""
    return [_build_direction(math.radians(degree)) for degree in range(-180, 180)]


@functools.cache
def _turns() -> tuple[list[tuple[int, int]], list[Direction], np.ndarray]:
    """Return the turns that a dash can make at a pivot.

    Returns:
        for each turn the offset (y, x) of the dash's end from the pivot, the dash's direction, and (turns, 5) the
        offsets of its end and the four neighbours of its end in the flattened canvas.
    """
    turns = _turn_offsets()
    width = SIZE + 2 * _WALL
    flat = np.array([y * width + x for y, x in turns])
    neighbourhoods = flat[:, None] + np.array([0, -1, 1, -width, width])
    return turns, [_build_direction(math.atan2(y, x)) for y, x in turns], neighbourhoods


@functools.cache
def _turn_offsets() -> list[tuple[int, int]]:
    """Return the pixels (y, x) on a circle whose radius is a dash and its margin, sampled at steps of one pixel."""
    reach = _DASH + _MARGIN
    angles = np.arange(0, 2 * math.pi, 1 / reach)
    return sorted({(math.floor(reach * math.sin(a)), math.floor(reach * math.cos(a))) for a in angles})


def _build_direction(angle: float) -> Direction:
    ahead, behind = _build_dash_stamp(angle), _build_dash_stamp(angle + math.pi)
    turn = [math.remainder(math.atan2(y, x) - angle, 2 * math.pi) for y, x in _turn_offsets()]
    weights = np.array([math.cos(t) ** 2 if abs(t) < math.pi / 2 else 0.0 for t in turn])
    # + 1 reproduces an error of the published procedure, which checks the pixels one further down and to the right
    footprint = np.argwhere(ahead.claim == 1) - _RADIUS + 1
    return Direction((math.sin(angle), math.cos(angle)), weights, ahead, behind, footprint)


def _build_dash_stamp(angle: float) -> Stamp:
    """Return the stamp of a dash that starts in its middle, drawn at twice the size with a line of one pixel."""
    middle = _RADIUS * _SUPERSAMPLING
    length = _DASH * _SUPERSAMPLING
    # round first: in floating point, sin(π) is slightly above 0, and ceil would add a pixel
    head = tuple(math.ceil(round(middle + length * part, 9)) for part in (math.cos(angle), math.sin(angle)))
    picture = optional_import("PIL.Image", "train").new("L", (2 * middle + 1, 2 * middle + 1))
    optional_import("PIL.ImageDraw", "train").Draw(picture).line([(middle, middle), head], fill=255, width=1)
    line = np.asarray(picture)
    reach = _MARGIN * _SUPERSAMPLING
    padded = np.pad(line, reach)
    shifted = [
        padded[reach + y : reach + y + len(line), reach + x : reach + x + len(line)]
        for y in range(-reach, reach + 1)
        for x in range(-reach, reach + 1)
        if y * y + x * x <= reach * reach
    ]
    # the claim is the line dilated by the margin
    return Stamp(_downsample(line), _downsample(np.max(shifted, 0)))


@functools.cache
def _disc_stamp() -> np.ndarray:
    """Return the stamp of a disc, drawn at twice the size."""
    wide = 2 * _RADIUS + 4  # larger than the stamp, so that the resampling filter does not reach the border
    y, x = np.ogrid[-wide : wide + 2, -wide : wide + 2]
    disc = (y * y + x * x <= (_MARKER_RADIUS * _SUPERSAMPLING) ** 2) * np.uint8(255)
    small = _downsample(disc, len(disc) // _SUPERSAMPLING)
    middle = wide // _SUPERSAMPLING
    return small[middle - _RADIUS : middle + _RADIUS + 1, middle - _RADIUS : middle + _RADIUS + 1]


def _downsample(picture: np.ndarray, size: int = 2 * _RADIUS + 1) -> np.ndarray:
    """Scale a picture (uint8) down to (size, size), with values from 0 to 1."""
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
    # written last: the metadata file marks a part as complete
    write_atomically(home / "metadata" / f"{part}.npy", "".join(rows))
