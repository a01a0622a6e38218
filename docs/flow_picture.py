"""Draws flow.svg: one small attention before conservation, with conserved sinks, and with conserved sources.

python docs/flow_picture.py
"""

from pathlib import Path

import torch

from flowformer import flow_maps

WIDTH, HEIGHT, PANEL = 960, 400, 320
SOURCES, SINKS, TOP, STEP = 92, 228, 110, 62  # x of both columns, y of the first token, y between tokens
BLUE, ORANGE, INK, GREY = "#2a5db0", "#d9730d", "#1f2933", "#5b6770"


def example():
    """φ(Q) and φ(K) of four tokens with two features, chosen so that the differences can be seen, and their flows."""
    q = torch.tensor([[0.15, 0.85], [0.55, 0.35], [0.90, 0.12], [0.30, 0.25]])
    k = torch.tensor([[0.92, 0.15], [0.45, 0.50], [0.10, 0.25], [0.12, 0.95]])
    maps = flow_maps(q.logit()[None, None], k.logit()[None, None])
    return q @ k.T, {name: values[0, 0] for name, values in maps._asdict().items()}


def text(x, y, words, size=14, color=INK, anchor="middle", weight="normal"):
    style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def panel(index, title, words, flows, sent, received, labels):
    """One graph: flows (sinks, sources) as lines, what is sent and received as circles, a label at every token."""
    left = index * PANEL
    lines = [text(left + PANEL / 2, 34, title, 17, weight="bold")]
    lines += [text(left + PANEL / 2, 56 + 18 * row, line, 13, GREY) for row, line in enumerate(words)]
    for i, row in enumerate(flows.tolist()):
        for j, flow in enumerate(row):
            ends = f'x1="{left + SOURCES}" y1="{TOP + j * STEP}" x2="{left + SINKS}" y2="{TOP + i * STEP}"'
            lines.append(f'<line {ends} stroke="{GREY}" stroke-opacity="0.45" stroke-width="{11 * flow:.1f}"/>')
    columns = (SOURCES, sent, BLUE, labels[0], "end", -24), (SINKS, received, ORANGE, labels[1], "start", 24)
    for x, amounts, color, names, anchor, shift in columns:
        for row, (amount, name) in enumerate(zip(amounts.tolist(), names, strict=True)):
            y = TOP + row * STEP
            lines.append(f'<circle cx="{left + x}" cy="{y}" r="{15 * amount**0.5:.1f}" fill="{color}"/>')
            lines.append(text(left + x + shift, y + 5, name, 14, color, anchor, "bold"))
    bottom = TOP + 3 * STEP + 42
    lines += [text(left + SOURCES, bottom, "sources", 13, BLUE), text(left + SINKS, bottom, "sinks", 13, ORANGE)]
    return lines


def draw():
    capacity, maps = example()
    ones = torch.ones(4)
    tokens = range(1, 5)

    def numbers(name, values):
        return [f"{name} {value:.2f}" for value in values.tolist()]

    panels = [
        panel(
            0,
            "Flow",
            ["every sink draws from every source", ""],
            capacity,
            maps["outgoing"] / 1.5,
            maps["incoming"] / 1.5,
            ([f"k<tspan dy='3' font-size='10'>{j}</tspan>" for j in tokens],
             [f"q<tspan dy='3' font-size='10'>{i}</tspan>" for i in tokens]),
        ),
        panel(
            1,
            "Competition",
            ["each sink receives 1: a source that", "sends more wins weight c"],
            capacity / maps["incoming"][:, None],
            maps["conserved_outgoing"],
            ones,
            (numbers("c", maps["competition"]), ["1"] * 4),
        ),
        panel(
            2,
            "Allocation",
            ["each source sends 1: a sink that", "receives more opens its gate α"],
            capacity / maps["outgoing"],
            ones,
            maps["conserved_incoming"],
            (["1"] * 4, numbers("α", maps["allocation"])),
        ),
    ]  # fmt: skip
    dividers = [f'<line x1="{x}" y1="24" x2="{x}" y2="{HEIGHT - 60}" stroke="#d5dae0"/>' for x in (PANEL, 2 * PANEL)]
    result = "R = α ⊙ (φ(Q) / I) · (φ(K)ᵀ (c ⊙ V)): competition weighs the values, allocation gates the results"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Arial, sans-serif">',
        "<title>Flow-Attention: sources send flow to sinks; conservation gives competition and allocation</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
        *dividers,
        *(line for lines in panels for line in lines),
        text(WIDTH / 2, HEIGHT - 18, result, 15),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("flow.svg").write_text(draw())
