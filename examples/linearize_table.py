"""Compare options of `flowformer linearize` on the same model and text, one run per row of a table.

    python examples/linearize_table.py MODEL OUT --text train.txt --eval valid.txt transfer_tokens=10000000

Other options are passed to the command. After Ctrl-C or `timeout 570 python …`, the same command continues where it
stopped; a failed row is tried again. The table is written to OUT/table.md.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig

LINEAR = 'variant={"feature_map": "elu+1", "competition": "none", "allocation": "none"}'
PAPER = "variant={}"
ROWS = {
    "linear, elu+1": [LINEAR, "features=none", "powers=false"],
    "linear, hedgehog": [LINEAR, "powers=false"],
    "flow": [PAPER, "features=none", "powers=false"],
    "flow, hedgehog": [PAPER, "powers=false"],
    "flow, hedgehog, powers": [],
    "the same, window 64": ["window=64"],
    "the same, 1 layer in EVERY kept": ["keep_layers=KEPT"],
}


def layers_of(model):
    path = Path(model)
    place, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (model, {})
    return AutoConfig.from_pretrained(place, **options).num_hidden_layers


def linearize(arguments):
    """The last line that the command prints. Signals to stop are passed on, and its checkpoint is waited for."""
    command = [sys.executable, "-m", "flowformer.cli", "linearize", *arguments, "--resume", "--json"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.terminate())
    printed, _ = run.communicate()
    if run.returncode:
        sys.exit(run.returncode)
    return printed.splitlines()[-1]


def table(results):
    """One row per option; one column per score and stage, and the minutes of training."""
    first = next(iter(results.values()))
    columns = [(name, i) for name in first[0]["scores"] if not name.startswith("teacher") for i in range(len(first))]
    lines = ["| | " + " | ".join(f"{name}, {first[i]['name']}" for name, i in columns) + " | minutes |"]
    lines.append("| --- " * (len(columns) + 2) + "|")
    for row, stages in results.items():
        scores = " | ".join(f"{stages[i]['scores'][name]:.4g}" for name, i in columns)
        lines.append(f"| {row} | {scores} | {sum(stage['minutes'] for stage in stages):.1f} |")
    return "\n".join(lines) + "\n"


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--every", type=int, default=4, help="one layer in so many is kept in the last row")
arguments, options = parser.parse_known_args()
model, out, every = arguments.model, arguments.out, arguments.every
out.mkdir(parents=True, exist_ok=True)
results = {}
for number, (row, exchange) in enumerate(ROWS.items()):
    done, row = out / f"{number}.json", row.replace("EVERY", str(every))
    if not done.exists():
        kept = str(list(range(every - 1, layers_of(model), every)))
        exchange = [option.replace("KEPT", kept) for option in exchange]
        print(f"{row}: {' '.join(exchange)}", flush=True)
        done.write_text(linearize([model, "--out", str(out / str(number)), *options, *exchange]))
    results[row] = json.loads(done.read_text())["stages"]
    (out / "table.md").write_text(table(results))
print(table(results))
