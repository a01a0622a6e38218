"""Does a fault in the code make a test fail? Makes faults by hand in a copy of the tree, and runs the tests that know.

    python tests/mutation.py            all faults, after the same tests without any
    python tests/mutation.py nn/ data/  those in files whose name contains one of these

Exits with 1 if a fault survives, or if the text it replaces does not occur exactly once any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MODULES = Path("src/flowformer")


class Fault(NamedTuple):
    """A line that is wrong, and the tests of which one must fail; files are below src/flowformer and tests."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def occurrences(self) -> int:
        return (ROOT / MODULES / self.file).read_text().count(self.old)


def fault(file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(file, old, new, tests)


FAULTS = [
    # ops
    fault("ops/reference.py", "conserved_query_sum = _running_sum(before[3], q / incoming",
          "conserved_query_sum = _running_sum(before[3], q * incoming", "ops/test_reference.py"),
    fault("ops/torch/bidirectional.py", "flow = flow.masked_fill(~mask, torch.finfo(flow.dtype).min)",
          "flow = flow.masked_fill(~mask, 0)", "ops/test_laws.py::TestPadding"),
    fault("ops/torch/bidirectional.py", ".abs() > variant.clamp", ".abs() < variant.clamp",
          "ops/test_torch_backend.py"),
    fault("ops/torch/flows.py", "return n / at_least_one(m) if variant.rescale else 1", "return 1",
          "ops/test_torch_backend.py"),
    fault("ops/torch/causal_segment.py", "lower, upper = products * ones.tril(), products * ones.triu()",
          "lower, upper = products * ones.tril(1), products * ones.triu()", "ops/test_laws.py::TestCausality"),
    fault("ops/torch/causal_segment.py", "flow_out = -grad_inverse_out * inverse_out * inverse_out / position",
          "flow_out = -grad_inverse_out * inverse_out / position", "ops/test_torch_backend.py"),
    fault("ops/torch/causal.py", "count[:, None] + tokens", "0 * count[:, None] + tokens",
          "ops/test_laws.py::TestState"),
    fault("ops/torch/packed.py", "order = sorted((i for i in range(len(longer)) if longer[i])",
          "order = sorted((i for i in range(len(longer)) if longer[i] > 1)", "ops/test_laws.py"),
    fault("ops/native/bidirectional.h", "h.memory[i] = h.total.matrix[i] * factor;", "h.memory[i] = h.total.matrix[i];",
          "ops/test_native.py"),
    fault("ops/native/bidirectional.h", "add_outer(tokens, D, number, h.raised[COMPETING_SUM], grad_q);", ";",
          "ops/test_native.py"),
    fault("ops/native/causal.h", "flow * h.tau / position[i]", "flow / position[i]", "ops/test_native.py"),
    fault("ops/native/causal.h", "grad.log *= number[DECAY][i];", ";", "ops/test_native.py"),
    fault("ops/state.py", "torch.where(rows, empty.scalars, self.scalars)", "self.scalars",
          "models/test_models_decision.py"),
    fault("ops/triton/bidirectional/forward.py", "weight = tl.where(valid, weight, 0.0)", "weight = weight",
          "ops/test_kernels_bidirectional.py::test_padded_is_alone",
          "ops/test_kernels_bidirectional.py::test_masks_with_holes"),
    fault("ops/triton/bidirectional/backward.py",
          "weight = tl.where(valid & (tl.abs(flow) <= clamp), weight, 0.0)", "weight = tl.where(valid, weight, 0.0)",
          "ops/test_kernels_bidirectional.py::test_variants"),
    fault("ops/triton/causal/tokens.py", "else tokens[:, None] >= tokens[None, :]",
          "else tokens[:, None] > tokens[None, :]",
          "ops/test_kernels_causal.py::test_values_and_gradients_are_the_oracles"),
    fault("ops/triton/causal/backward_qk.py", "b_weights = tl.where(tokens[:, None] > tokens[None, :], b_from_earlier",
          "b_weights = tl.where(tokens[:, None] >= tokens[None, :], b_from_earlier",
          "ops/test_kernels_causal.py::test_values_and_gradients_are_the_oracles"),
    # the order of the ranks: forward, backward, and that of the logarithms
    fault("ops/context/exchange.py", "before = before.flip(0)", "before = before.clone()",
          "ops/test_context.py::test_cut_equals_whole"),
    fault("ops/triton/causal/cut.py", "_log(before).copy_(running[exchange.rank])",
          "_log(before).copy_(running[exchange.rank + 1])", "ops/test_context.py::test_cut_equals_whole"),
    fault("ops/triton/causal/cut.py", "_add(earlier, level(before))",
          "_add(found if total is None else total, level(before))",
          "ops/test_context.py::test_kernels_pass_a_state_from_call_to_call"),
    fault("ops/triton/causal/cut.py", "- decay[..., -1] * grad_log[..., None]", "- grad_log[..., None]",
          "ops/test_context.py::test_cut_equals_whole"),
    # baselines
    fault("baselines/tokens.py", "return (mask.cumsum(-1) - 1).clamp_min(0)",
          "return torch.arange(mask.shape[1]).expand_as(mask)", "baselines/test_attention_laws.py"),
    fault("baselines/decay.py", "memory = (k * (end - log).exp()[..., None]).mT @ v",
          "memory = (k * (end - log)[..., None]).mT @ v", "baselines/test_dense_kernels.py"),
    # nn
    fault("nn/attention.py", "query_mask = key_mask = joint_mask(query_mask, key_mask)",
          "key_mask = joint_mask(query_mask, key_mask)", "nn/test_nn_attention.py"),
    fault("nn/attention.py", "past = None if state is None else state.count", "past = None", "nn/test_nn_attention.py"),
    fault("nn/matrix.py", "q, k = module._rotated(q, k, query, key, key_mask, None)", "pass",
          "nn/test_nn_matrix.py::test_is_that_of_the_module_with_all_its_options"),
    fault("nn/transformer.py", "variant=independent_sinks(variant)", "variant=variant", "nn/test_nn_transformer.py"),
    fault("nn/transformer.py", "else norm(x + branch(x))", "else x + norm(branch(x))", "nn/test_nn_transformer.py"),
    fault("nn/multihead.py", "(is_causal or not self._is_cross_attention(query, key, value))", "is_causal",
          "nn/test_nn_multihead.py"),
    fault("nn/positions.py", "angle = (positions + 2)[..., None]", "angle = (positions + 1)[..., None]",
          "nn/test_nn_transformer.py"),
    # models
    fault("models/lm.py", "total / scored.clamp_min(1)", "total / len(targets)",
          "models/test_models_lm.py"),
    fault("models/lm.py", "token = token.masked_fill(finished, eos)", "token = token.clone()",
          "models/test_models_lm.py"),
    fault("models/classifier.py", "first = mask.int().argmax(1)", "first = mask.int().argmin(1)",
          "models/test_models_classifier.py"),
    fault("models/timeseries.py", "x.sum(1) / mask.sum(1, keepdim=True).clamp_min(1)", "x.mean(1)",
          "models/test_models_timeseries.py"),
    fault("models/decision.py", "_, at_state, at_action = x.unflatten", "at_state, _, at_action = x.unflatten",
          "models/test_models_decision.py"),
    fault("models/vision.py", "return branch * (kept / (1 - self.rate))", "return branch * kept",
          "models/test_models_vision.py"),
    # data
    fault("data/splits.py", "torch.arange(longest) < lengths[:, None]", "torch.arange(longest) <= lengths[:, None]",
          "data/test_data_contract.py", "data/test_data_uea.py"),
    fault("data/text.py", "ends = (firsts + step + 1).clamp(max=len(flat))",
          "ends = (firsts + step).clamp(max=len(flat))", "data/test_data_text.py"),
    fault("data/uea.py", "(x[:length] - mean) / deviation", "(x[:length] - x.mean(0)) / deviation",
          "data/test_data_uea.py"),
    fault("data/offline_rl.py", "min(index + self.window, int(self.ends[index]))",
          "min(index + self.window, int(self.ends[index]) + 1)", "data/test_data_rl.py"),
    fault("data/lra.py", "train_size = len(labels) * 9 // 10", "train_size = len(labels) * 8 // 10",
          "data/test_data_lra.py"),
    # train
    fault("train/loop.py", "sign * record[self.task.metric] > sign * best[self.task.metric]",
          "sign * record[self.task.metric] < sign * best[self.task.metric]", "train/test_train_loop.py::TestRun"),
    fault("train/loop.py", "loss = self.objective(batch) / count", "loss = self.objective(batch) / len(batch)",
          "train/test_train_loop.py::TestSplitting"),
    fault("train/methods/awac.py", "self.std_logits.sigmoid()", "self.std_logits.sigmoid().detach()",
          "train/test_methods_policies.py::TestAWAC"),
    fault("train/methods/awac.py", "steps[~is_last | windows.terminated]", "steps[~is_last]",
          "train/test_methods_policies.py::TestTransitions"),
    fault("train/optim.py", "max(steps - 1 - self.warmup, 1)", "max(steps - self.warmup, 1)",
          "train/test_train_config.py", "train/test_train_optimiser.py"),
    fault("train/optim.py", "(p.dim() > 1 and id(p) not in positions)", "p.dim() > 1",
          "train/test_train_optimiser.py"),
    fault("train/batches.py", "self.config.seed * 1_000_003 + epoch", "self.config.seed * 1_000_003",
          "train/test_train_order.py"),
    fault("train/batches.py", "batch[i::per_step] or batch[:1]", "batch[i :: per_step + 1] or batch[:1]",
          "train/test_train_order.py"),
    fault("train/tasks.py", 'position < batch["context"][:, None]', 'position <= batch["context"][:, None]',
          "train/test_train_tasks.py::test_language_scores_each_token_once"),
    fault("train/checkpoints.py", "if found.get(name) != written[name]", "if name not in found",
          "train/test_train_claims.py::test_a_damaged_checkpoint_says_what_to_do"),
    fault("train/methods/resume.py", 'torch.set_rng_state(random["cpu"])', "pass",
          "train/test_methods_policies.py::TestResume"),
    # integrations
    fault("integrations/gymnasium.py", "for episode in row[:number]", "for episode in row",
          "integrations/test_integrations_gymnasium.py::test_short_episodes_are_not_preferred",
          "integrations/test_integrations_gymnasium.py::test_fewer_episodes_than_environments"),
    fault("integrations/aeon.py", "held_out[order[chosen & not_first]] = True", "held_out[order[chosen]] = True",
          "integrations/test_integrations_aeon.py::TestEarlyStopping"),
    fault("integrations/timm/attention.py", "kept = attn_mask == 0", "kept = attn_mask != 0",
          "integrations/test_integrations_timm_attention.py"),
    fault("integrations/transformers/attention.py", 'sequence = index.clamp_min(0) // closure["chunk_size"]',
          'sequence = index.clamp_min(0) // (closure["chunk_size"] + 1)',
          "integrations/test_integrations_transformers_attention.py", "integrations/test_integrations_transformers.py"),
    fault("integrations/transformers/attention.py", "(all if _factory_name(mask_function) == OR_MASK else any)", "any",
          "integrations/test_integrations_transformers_served.py::test_embedding_gemma_is_bidirectional"),
    fault("integrations/transformers/models.py", "else positions.flatten()[rows.tokens]", "else None",
          "integrations/test_integrations_transformers.py::test_packed_sequences_keep_the_positions_that_are_passed"),
    # linearize
    fault("linearize/pair.py", "if gradient[:, :4].any():", "if gradient.isnan().any():",
          "linearize/test_linearize_models.py::test_documents_do_not_see_each_other"),
    fault("linearize/text.py", "document[:room] for document in documents", "document for document in documents",
          "linearize/test_linearize_models.py::test_rows_are_no_longer_than_the_model_has_positions"),
]  # fmt: skip


def fails(tree: Path, tests: list[str]) -> bool:
    """Whether a test fails with the package of a tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    # a fault that keeps a test from ending is no good one
    ended = subprocess.run([*command, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=3600)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest gave no verdict:\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")
    return ended.returncode == 1


def main(patterns: list[str]) -> int:
    chosen = [each for each in FAULTS if not patterns or any(pattern in each.file for pattern in patterns)]
    lost = [each for each in chosen if each.occurrences != 1]
    for each in lost:
        print(f"lost      {each.file}: {each.old!r} occurs {each.occurrences} times; find the line it has become")
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "runs", "__pycache__"))
        if fails(tree, sorted({f"tests/{test}" for each in chosen for test in each.tests})):
            print("some of these tests fail without a fault")
            return 1
        for each in chosen:
            if each in lost:
                continue
            path, started = tree / MODULES / each.file, time.monotonic()
            whole = path.read_text()
            path.write_text(whole.replace(each.old, each.new))
            caught = fails(tree, [f"tests/{test}" for test in each.tests])
            path.write_text(whole)
            survived += not caught
            verdict = "caught" if caught else "SURVIVED"
            print(f"{verdict:9} {each.file}: {each.new}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - len(lost) - survived} of {len(chosen)} faults are caught")
    return 1 if survived or lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
