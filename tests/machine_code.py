"""Compiles the kernels of random calls for a Hopper GPU, without one, and looks at what came out.

    python tests/machine_code.py --calls 20 --seed 0

What no interpreter shows: whether a kernel fits into shared memory, whether its SASS reads a uniform register that
nothing has written, as ptxas 12.8 (Triton 3.6) makes some wgmma do, and whether its parameters are those that are
replayed. Needs Triton with its cuobjdump.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace

if __name__ == "__main__":
    # read when the kernels are imported; tests that collect this file want them interpreted
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

from flowformer import FlowVariant
from flowformer.ops.common import Options
from flowformer.ops.triton import launch, replay
from flowformer.ops.triton.bidirectional.plan import BidirectionalPlan
from flowformer.ops.triton.causal.cut import CutPlan
from flowformer.ops.triton.causal.plan import CausalPlan
from flowformer.ops.triton.plan import flat_options

SHARED_MEMORY = 232_448  # bytes that a program may have on an H100 or H200
SMS = 132
DEVICE = torch.device("cuda", 0)


class Hopper:
    """Stands for the driver of a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def pretend_hopper() -> None:
    triton.runtime.driver.set_active(Hopper())
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=SMS)


def reads_unwritten(sass: str) -> list[str]:
    """The instructions that read a uniform register which some way to them leaves unwritten."""
    blocks, labels = _blocks(sass)
    following = [_following(block, index, labels, len(blocks)) for index, block in enumerate(blocks)]
    written = [frozenset(range(64))] * len(blocks)
    written[0] = frozenset()
    changed = True
    while changed:
        changed = False
        for index, block in enumerate(blocks):
            after = written[index].union(*(_uniform_registers(line)[1] for line in block))
            for other in following[index]:
                both = written[other] & after
                changed |= both != written[other]
                written[other] = both
    found = []
    for index, block in enumerate(blocks):
        there = set(written[index])
        for line in block:
            reads, writes = _uniform_registers(line)
            if not reads <= there:
                found.append(line)
            there |= writes
    return found


def _blocks(sass: str) -> tuple[list[list[str]], dict[str, int]]:
    """Runs of instructions without a branch inside, and which of them each label stands for."""
    blocks: list[list[str]] = [[]]
    labels = {}
    for line in sass.splitlines():
        if re.fullmatch(r"\w+:", line):
            if blocks[-1]:
                blocks.append([])
            labels[line[:-1]] = len(blocks) - 1
        elif "\t" in line:
            blocks[-1].append(line.split("\t", 1)[1].rstrip(" ;"))
            if re.search(r"\b(BRA|EXIT|RET)\b", line):
                blocks.append([])
    return [block for block in blocks if block] if not blocks[-1] else blocks, labels


def _following(block: list[str], index: int, labels: dict[str, int], count: int) -> list[int]:
    last = block[-1]
    targets = [labels[word] for word in re.findall(r"\w+", last) if word in labels and "BRA" in last]
    if last.startswith("@") or not re.search(r"\b(BRA|EXIT|RET)\b", last):
        targets.append(index + 1)
    return [target for target in targets if target < count]


# instructions of the uniform data path that write no register
_SILENT = ("UBLKCP", "UTMALDG", "UTMASTG", "USETMAXREG", "UCGABAR_ARV", "UCGABAR_WAIT")


def _uniform_registers(line: str) -> tuple[set[int], set[int]]:
    """Those that an instruction reads, and those that it writes."""
    operation, _, rest = re.sub(r"^@!?\w+ ", "", line).partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    name, reads, writes = operation.split(".")[0], set(), set()
    if (name.startswith("U") and name not in _SILENT) or name in ("R2UR", "S2UR", "REDUX"):
        for index, operand in enumerate(operands):
            match = re.fullmatch(r"UR(\d+|Z)", operand)
            if match:
                if match[1] != "Z":
                    width = 2 if ".64" in operation or "WIDE" in operation else 1
                    writes.update(range(int(match[1]), int(match[1]) + width))
                del operands[index]
                break
            if not re.fullmatch(r"!?UP[\dT]", operand):
                break
    for index, operand in enumerate(operands):
        for register in map(int, re.findall(r"\bUR(\d+)\b", operand)):
            if "gdesc" in operand:
                # descriptors of both factors, but for a factor that comes in registers
                in_registers = index >= 2 and re.match(r"R\d", operands[index - 1])
                reads.update(range(register + 2 if in_registers else register, register + 4))
            else:
                reads.update(range(register, register + (2 if ".64" in operand or "desc[" in operand else 1)))
    return reads, writes


def kernels(random: Random, width: int | None = None) -> tuple[str, bool, list[launch.Kernel]]:
    """A call in words, whether it may use wgmma, and its kernels, forward and backward.

    Args:
        width: of queries and values, instead of a random one.
    """
    is_causal = random.random() < 0.6
    dtype = random.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    dim = random.choice([random.randint(1, 256), 64, 128])
    value_dim = random.choice([dim, dim, random.randint(1, 256)])
    dim, value_dim = (width, width) if width else (dim, value_dim)
    heads, key_heads = random.choice([(2, 2), (4, 2), (8, 1)])
    length, masked, packed = random.choice([100, 5000]), random.random() < 0.3, random.random() < 0.3
    variant = FlowVariant(
        feature_map=random.choice(["sigmoid", "sigmoid", "elu+1", "relu"]),
        competition=random.choice(["softmax", "softmax", "sigmoid", "none"]),
        allocation=random.choice(["sigmoid", "sigmoid", "none"]),
    )
    scale, packed = random.choice([1.0, 0.125]), packed and not masked
    variant = replace(variant, renormalize=random.random() < 0.5)
    has_powers = random.random() < 0.7 and variant.renormalize and variant.competition != "sigmoid"
    # one rank's part of a sequence, which has a state before it and the gradient of one after it
    is_cut = random.random() < 0.3 and is_causal and not packed
    words = f"{'causal' if is_causal else 'bidirectional'} {dtype} D={dim} E={value_dim} heads={heads}/{key_heads} "
    words += f"N={length} masked={masked} packed={packed} cut={is_cut} scale={scale} powers={has_powers} {variant}"

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query, result = tensor(2, heads, length, dim), tensor(2, heads, length, value_dim)
    key, value = tensor(2, key_heads, length, dim), tensor(2, key_heads, length, value_dim)
    mask = tensor(2, length, dtype=torch.bool) if masked else None
    bounds = tensor(4, dtype=torch.int32) if packed else None
    powers = tensor(2, heads, dtype=torch.float32) if has_powers else None
    options = flat_options(Options(scale, variant))
    if is_causal:
        # what follows in the call has the same shapes as what comes before
        tensors = _signature(query, key, value, mask, bounds, powers)
        plan = (
            CutPlan(tensors, DEVICE, length, True, False, *options)
            if is_cut
            else CausalPlan(tensors, DEVICE, length, True, *options)
        )
        positions = tensor(2, length, dtype=torch.int32) if masked else None
        inputs, state = (query, key, value, positions, bounds, powers), [None, None, None]
        kept, end = _flat(plan.kept), _flat(plan.state)
        if is_cut:
            state = [_flat([size]) for size in plan.state]
        grads = tensor(2, heads, length, dim), tensor(2, heads, length, value_dim)
        forward = *inputs, *state, result, kept, end, _flat(plan.forward_scratch)
        outs = query, *grads, _flat(plan.start), _flat(plan.backward_scratch)
        backward = *inputs, result, end if is_cut else None, state[2], result, kept, *outs
        described = [*plan.forward(*launch.arguments(forward)), *plan.backward(*launch.arguments(backward))]
        return words, plan.launches.wgmma, described
    extras = mask, mask, bounds, bounds, powers
    precision = "ieee" if dtype == torch.float32 else None

    def plan_of(*tensors: torch.Tensor) -> BidirectionalPlan:
        return BidirectionalPlan(_signature(*tensors, *extras), DEVICE, length, True, precision, *options)

    plan = plan_of(query, key, value, result)
    forward = query, key, value, *extras, result, _flat(plan.kept), _flat(plan.forward_scratch)
    described = list(plan.forward(*launch.arguments(forward)))
    inputs = query, key, value, result, query, key, value
    plan = plan_of(*inputs)
    backward = *inputs, *extras, _flat(plan.kept), _flat(plan.backward_scratch)
    return words, True, [*described, *plan.backward(*launch.arguments(backward))]


def _signature(*tensors: torch.Tensor | None) -> tuple:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, 0) for x in tensors)


def _flat(sizes: list[int]) -> torch.Tensor:
    return torch.empty(sum(sizes), device="meta")


def faults(kernel: launch.Kernel, wgmma: bool) -> Iterator[str]:
    tensors = [None if x is None else MockTensor(x.tensor.dtype) for x in kernel.arguments]
    options = {**launch._options(kernel), "grid": kernel.grid}
    if wgmma:
        compiled = kernel.function.warmup(*tensors, *kernel.numbers, **options)
    else:
        with launch._without_wgmma():
            compiled = kernel.function.warmup(*tensors, *kernel.numbers, **options)
    if compiled.metadata.shared > SHARED_MEMORY:
        yield f"needs {compiled.metadata.shared} bytes of shared memory"
    for line in reads_unwritten(compiled.asm["sass"]):
        yield f"reads a register that nothing wrote: {line}"
    if replay.describe(kernel, compiled) is None:
        yield f"has parameters that cannot be replayed: {replay.ptx_parameters(compiled.asm['ptx'])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, help="of queries and values, instead of random ones")
    options = parser.parse_args()
    pretend_hopper()
    count = failed = 0
    for index in range(options.calls):
        words, wgmma, described = kernels(Random(f"{options.seed}, {index}"), options.width)
        for kernel in described:
            count += 1
            for fault in faults(kernel, wgmma):
                failed += 1
                print(f"{kernel.function.__name__} {fault}\n  in {words}", flush=True)
    print(f"{count} kernels of {options.calls} calls, {failed} faults, Triton {triton.__version__}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
