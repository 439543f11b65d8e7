"""Breaks the flow, control and the engine on purpose, one fault at a time, in a copy of the sources: each must turn some test red.

Run by `make mutants`; writes the table of `tests/mutants.md`. A mutant that survives is a missing test.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.rollout.engines.native import tiles

LONGEST_S = 60
"""Processor time, so that a busy machine breaks nothing; the unbroken suite takes less than half of it."""
ROOT = Path(__file__).parent.parent
FLOW = ("tests/flow/test_flow.py",)
PARTS = ("tests/rollout/engines/test_parts.py",)
LAWS = ("tests/flow/test_flow.py", "tests/flow/test_laws.py")


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = LAWS
    unit: bool = False
    """Of what runs on processors with a matrix unit only; left out on others."""


MUTANTS = [
    Mutant("admit does not wait for room", "exchange/buffer.py", "if self.room() > 0:", "if True:"),
    Mutant(
        "a lease can be settled twice",
        "exchange/ledger.py",
        'if lease.state == "settled":',
        "if False:",
        ("tests/contracts/test_buffer.py", "tests/exchange/test_ledger.py"),
    ),
    Mutant("the version grows by 2", "exchange/staleness.py", "self.version += 1", "self.version += 2"),
    Mutant(
        "staleness is not checked at take",
        "exchange/buffer.py",
        "            self._evict_stale()\n",
        "",
    ),
    Mutant(
        "leases are settled before the weights are live",
        "orchestrator/controller.py",
        "            self.not_live.extend((self.step, lease) for lease in leases)\n",
        "            self.not_live.extend((self.step, lease) for lease in leases)\n            self._settle_live(self.step)\n",
    ),
    Mutant(
        "a filtered unit keeps its lease",
        "orchestrator/controller.py",
        '                    self.buffer.settle(lease, "filtered")\n',
        "                    pass\n",
    ),
    Mutant(
        "a dead engine is not fenced",
        "orchestrator/dispatcher.py",
        "            settle(call.reply, error)\n            self.fence(slot, str(error))\n",
        "            settle(call.reply, error)\n",
        ("tests/orchestrator/test_dispatcher_cancel.py",),
    ),
    Mutant(
        "a loop that steps gives one turn at a time",
        "rollout/acting.py",
        "_TURNS = 5",
        "_TURNS = 1",
        ("tests/contracts/test_action_engine.py",),
    ),
    Mutant(
        "an engine that dies under submitted requests is not missed",
        "orchestrator/mailbox.py",
        "        except Exception as error:\n            self._broken(error)\n",
        "        except Exception:\n            pass\n",
        ("tests/orchestrator/test_dispatcher_cancel.py",),
    ),
    Mutant(
        "who listens to an engine is not replaced",
        "orchestrator/mailbox.py",
        "        if self._listener is None or self._listener.done():\n",
        "        if self._listener is None:\n",
        ("tests/orchestrator/test_dispatcher_cancel.py",),
    ),
    Mutant(
        "a lost reply is waited for",
        "orchestrator/dispatcher.py",
        "            if slot.unknown[request_id] >= 3:",
        "            if False:",
    ),
    Mutant(
        "commit does not reach the engines",
        "orchestrator/weight_sync.py",
        "        await slot.proxy.commit(ticket, self.interruption.running)\n",
        "",
    ),
    Mutant(
        "the gate stays closed after a drained sync",
        "orchestrator/weight_sync.py",
        "            self.dispatcher.open_gate()\n",
        "            if not self.interruption.drain:\n                self.dispatcher.open_gate()\n",
    ),
    Mutant(
        "a resumed generation gets a new budget",
        "rollout/token_rollout.py",
        "            prefix = generation\n",
        "            prefix = generation\n            sampling = replace(sampling, max_tokens=sampling.max_tokens + len(generation.token_ids), seed=attempt)\n",
    ),
    Mutant(
        "a group is used below min_complete",
        "rollout/token_rollout.py",
        "        if len(scored) < self.min_complete:",
        "        if not scored:",
    ),
    Mutant(
        "members of a closed group run on",
        "orchestrator/dispatcher.py",
        "            if not slot.fenced:\n                in_background(self._quietly(self._abort(slot, request_id)))\n",
        "",
        ("tests/orchestrator/test_dispatcher_cancel.py",),
    ),
    Mutant(
        "a version is passed on that the disk does not cover",
        "orchestrator/narrator.py",
        "if version > self._written:",
        "if version > self._written + 1:",
        ("tests/orchestrator/test_checkpoint.py",),
    ),
    Mutant(
        "the version is written after the sync",
        "orchestrator/controller.py",
        "        self.observer.version_written(version)\n        ticket = await self._trainer(self.learner.publish(version))\n",
        "        ticket = await self._trainer(self.learner.publish(version))\n        self.observer.version_written(version + 1)\n",
    ),
    Mutant(
        "a recycled task is lost",
        "exchange/buffer.py",
        "            self.pool.appendleft((lease.task, remainder))\n",
        "            pass\n",
        ("tests/contracts/test_buffer.py",),
    ),
    Mutant(
        "a batch is taken in the order of arrival",
        "exchange/buffer.py",
        "picked = sorted(list(self.ready.values())[:n], key=lambda lease: lease.index)",
        "picked = list(self.ready.values())[:n]",
        ("tests/contracts/test_buffer.py",),
    ),
    Mutant(
        "a joiner keeps the weights it came with",
        "orchestrator/weight_sync.py",
        "            if (ticket := self.ticket) is not None:\n",
        "            if (ticket := None) is not None:\n",
    ),
    # ------------------------------------------------------------------------------------------------------ control
    Mutant(
        "the reset row of next-step autoreset counts as a step",
        "rollout/environments/gymnasium_vector.py",
        "        valid = ~self._after_end\n",
        "        valid = np.ones(self.count, bool)\n",
        ("tests/rollout/test_gymnasium_vector.py",),
    ),
    Mutant(
        "a final observation is the reset one",
        "rollout/environments/gymnasium_vector.py",
        "        final = {name: leaf[ended].copy() for name, leaf in observations.items()}\n",
        "        final = {name: leaf[ended] * 0 for name, leaf in observations.items()}\n",
        ("tests/rollout/test_gymnasium_vector.py",),
    ),
    Mutant(
        "a step may be terminated and truncated at once",
        "rollout/environments/gymnasium_vector.py",
        "made = self._finish(observations, rewards, terminated, truncated & ~terminated, info)",
        "made = self._finish(observations, rewards, terminated, truncated, info)",
        ("tests/rollout/test_gymnasium_vector.py",),
    ),
    Mutant(
        "all actors' environments start from the same seeds",
        "rollout/environments/gymnasium_vector.py",
        "np.random.SeedSequence([seed, index])",
        "np.random.SeedSequence([0, index])",
        ("tests/conformance/test_control.py",),
    ),
    Mutant(
        "a memory outlives its episode",
        "rollout/control_rollout.py",
        "            if begins.any():\n",
        "            if False:\n",
        ("tests/rollout/test_gymnasium_vector.py",),
    ),
    Mutant(
        "a time-out bootstraps from the observation after the reset",
        "training/backends/step_credit.py",
        "    if cut_values is not None:\n",
        "    if False:\n",
        ("tests/conformance/test_control.py",),
    ),
    Mutant(
        "GAE flows back over a cut",
        "training/advantages.py",
        "np.where(cut[t], 0.0, discounts[t] * lam) * running",
        "discounts[t] * lam * running",
        ("tests/training/test_credit_reference.py",),
    ),
    Mutant(
        "V-trace does not bound its weights",
        "training/advantages.py",
        "clipped, traces = np.minimum(rhos, clip_rho), lam",
        "clipped, traces = rhos, lam",
        ("tests/conformance/test_control.py",),
    ),
    Mutant(
        "a clipped action's log-probability is kept",
        "policies/distributions.py",
        "        return mean + log_std.exp() * noise\n",
        "        return (mean + log_std.exp() * noise).clamp(-1, 1)\n",
        ("tests/conformance/test_control.py",),
    ),
    Mutant(
        "a trajectory's steps all name the version that it began with",
        "rollout/control_rollout.py",
        "            recorded.act(t, actions, outputs, engine.version)\n",
        "            recorded.act(t, actions, outputs, engine.version if not t else int(recorded.versions[0, 0]))\n",
        ("tests/contracts/test_action_engine.py",),
    ),
    Mutant(
        "running figures move before the update",
        "training/backends/control_device.py",
        '        rows = Rows(batch)\n        with self._event("forward_backward"), self._threads',
        "        rows = Rows(batch)\n        for name, normalisers in self._network.normalisers():\n            for normaliser in normalisers:\n"
        '                normaliser.update(rows.observations[name].float())\n        with self._event("forward_backward"), self._threads',
        ("tests/training/test_control_device.py",),
    ),
    Mutant(
        "a hanging rollout worker is waited for",
        "rollout/policy_worker.py",
        "            late = worker.outstanding and time.monotonic() - worker.sent_at > limit\n",
        "            late = False\n",
        ("tests/rollout/test_policy_worker.py",),
    ),
    Mutant(
        "a slot goes on with what its dead worker had begun",
        "rollout/policy_worker.py",
        "            slot.t, slot.waits, slot.request, slot.answer = 0, False, None, None\n",
        "            slot.waits, slot.request, slot.answer = False, None, None\n",
        ("tests/rollout/test_policy_worker.py",),
    ),
    Mutant(
        "a replayed transition runs over an end",
        "exchange/stores/replay.py",
        "        goes_on &= np.logical_and.accumulate(~ended, axis=1)\n",
        "",
        ("tests/exchange/test_replay.py",),
    ),
    Mutant(
        "an evicted unit keeps its lease",
        "exchange/replay.py",
        "            super().settle(lease, TRAINED)\n",
        "            pass\n",
        ("tests/exchange/test_replay.py",),
    ),
    Mutant(
        "a simulator's steps are copied for the policy",
        "rollout/tensor_rollout.py",
        "act({PLAIN: observations[t]}, {}, noise[t])",
        "act({PLAIN: observations[t].clone()}, {}, noise[t])",
        ("tests/rollout/test_tensor_rollout.py",),
    ),
    Mutant(
        "the first episodes to end are the ones that are judged",
        "rollout/episodes.py",
        "(left > 0)):",
        "(left.sum() > 0)):",
        ("tests/rollout/test_episodes.py",),
    ),
    # ------------------------------------------------------------------------------------------------------ engine
    Mutant(
        "a generation has one version for all its tokens",
        "rollout/engines/core.py",
        "if sequence.under is not None else self.version\n            sequence.append",
        "if sequence.under is not None else [*sequence.versions, self.version][0]\n            sequence.append",
        (
            "tests/conformance/test_versions_engine.py::test_v1_tokens_before_a_swap_carry_the_old_version_and_tokens_after_it_the_new",
        ),
    ),
    Mutant(
        "the prefix tree outlives a swap",
        "rollout/engines/native/core.py",
        "                self.requeue(sequence)\n        self.table.clear()\n",
        "                self.requeue(sequence)\n",
        (
            "tests/conformance/test_versions_engine.py::test_v5_after_a_large_update_the_same_prompt_is_answered_as_by_a_cold_engine",
        ),
    ),
    Mutant(
        "what older weights made is shared",
        "rollout/engines/native/core.py",
        "            sequence.kv_pure = False\n",
        "",
        (
            "tests/rollout/engines/test_native.py::test_a_sibling_admitted_after_the_swap_does_not_share_the_older_prompt",
        ),
    ),
    Mutant(
        "an unfinished prefill goes on under the new weights",
        "rollout/engines/native/core.py",
        "if recompute or unfinished:",
        "if recompute:",
        ("tests/rollout/engines/test_native.py::test_an_unfinished_prefill_starts_again_under_the_new_weights",),
    ),
    Mutant(
        "recompute keeps older keys and values",
        "rollout/engines/native/core.py",
        "if recompute or unfinished:",
        "if unfinished:",
        ("tests/rollout/engines/test_native.py::test_older_keys_and_values_stay_or_go_as_asked",),
    ),
    Mutant(
        "siblings that part go on in one block",
        "rollout/engines/native/siblings.py",
        "whose.setdefault(last, history) == history:",
        "whose.setdefault(last, history):",
        ("tests/rollout/engines/test_siblings.py",),
    ),
    Mutant(
        "who needs the whole store waits for the block that it would copy",
        "rollout/engines/native/siblings.py",
        "if own is None and tail:",
        "if False:",
        ("tests/rollout/engines/test_siblings.py",),
    ),
    Mutant(
        "who shares a row has no keys and values of it",
        "rollout/engines/native/core.py",
        "if slot != first}",
        "if slot == first}",
        ("tests/rollout/engines/test_siblings.py",),
    ),
    Mutant(
        "siblings share whatever they draw",
        "rollout/engines/native/siblings.py",
        "(one.history, one.ids[-1])",
        "(one.history, 0)",
        ("tests/rollout/engines/test_siblings.py",),
    ),
    Mutant(
        "a decoding row does not see its newest token",
        "rollout/engines/native/attention.py",
        "counts.append(self.lengths)\n",
        "counts.append(self.lengths - 1)\n",
        ("tests/rollout/engines/test_parts.py",),
    ),
    Mutant(
        "what is not a number becomes one",
        "rollout/engines/native/kernels.py",
        "x = _f(-87.0) if x < _f(-87.0) else x",
        "x = x if x > _f(-87.0) else _f(-87.0)",
        ("tests/rollout/engines/test_parts.py::test_what_is_not_a_number_stays_none",),
    ),
    Mutant(
        "a product of many inputs keeps the last of them alone",
        "rollout/engines/native/kernels.py",
        "first, last, piece == 0, ahead",
        "first, last, True, ahead",
        ("tests/rollout/engines/test_parts.py::test_a_compiled_product_is_that_with_its_weights",),
    ),
    Mutant(
        "the matrix unit leaves out the bytes that weigh least",
        "rollout/engines/native/tiles.py",
        "FLOAT: Form(64, 4, 3, 4, 256.0, 65536.0 /",
        "FLOAT: Form(64, 4, 3, 3, 256.0, 16777216.0 /",
        PARTS,
        unit=True,
    ),
    Mutant(
        "rows are multiplied before they are all split",
        "rollout/engines/native/tiles.py",
        "        wait_for(address + to_settled, splits)\n",
        "",
        PARTS,
        unit=True,
    ),
    Mutant(
        "an input is three bytes, not four",
        "rollout/engines/native/tiles.py",
        "_LARGEST = {4: 1 << 30,",
        "_LARGEST = {4: 1 << 22,",
        PARTS,
        unit=True,
    ),
    Mutant(
        "weights packed in pieces are all put first",
        "rollout/engines/native/compiled.py",
        "self.panels[first].data_ptr(), by[first]",
        "self.panels[0].data_ptr(), by[0]",
        PARTS,
        unit=True,
    ),
    Mutant(
        "loops of one constant are taken for those of another",
        "rollout/engines/native/tiles.py",
        "    return types.int64(size), generate",
        "    return types.int64(types.int64), generate",
        PARTS,
        unit=True,
    ),
    Mutant(
        "a later stretch of inputs takes the place of the first",
        "rollout/engines/native/tiles.py",
        "(out, outputs) if stretch else",
        "(out, outputs) if stretch > 1 else",
        PARTS,
        unit=True,
    ),
    Mutant(
        "all stretches of a row have the scale of the first",
        "rollout/engines/native/tiles.py",
        "job[2] + 4 * (at * stretches + stretch)",
        "job[2] + 4 * (at * stretches)",
        PARTS,
        unit=True,
    ),
    Mutant(
        "the last block of rows of a panel is not put together",
        "rollout/engines/native/tiles.py",
        "        _end()\n        if due:",
        "        _end()\n        if due > 1:",
        PARTS,
        unit=True,
    ),
    Mutant(
        "the matrix unit takes what is no number for nothing",
        "rollout/engines/native/tiles.py",
        "return _f(0.0), _f(np.nan)",
        "return _f(0.0), _f(0.0)",
        PARTS,
        unit=True,
    ),
    Mutant(
        "a backend's call learns from the batch before",
        "training/backends/control_device.py",
        "        self._fused.turn_to(rows)\n",
        "        self._fused.turn_to(self._fused._rows or rows)\n",
        ("tests/training/test_fused_steps.py",),
    ),
    Mutant(
        "a core's share of the gradient is lost",
        "training/backends/control_device.py",
        "for _, gradients in found:",
        "for _, gradients in found[1:]:",
        ("tests/training/test_control_device.py",),
    ),
    Mutant(
        "the last rows of weights are not copied",
        "cores.py",
        "for first in range(0, rows, piece):",
        "for first in range(0, rows - 1, piece):",
        ("tests/test_cores.py",),
    ),
    Mutant(
        "the deviation of drawn numbers is not learned",
        "training/backends/fused_steps.py",
        "if held == log_std[k]:",
        "if held != log_std[k]:",
        ("tests/training/test_fused_steps.py",),
    ),
    Mutant(
        "one sibling of a prompt computes its last token again",
        "rollout/engines/native/blocks.py",
        "            best = next((child for child in alike if longest in child.ends), best)\n",
        "            best = next((child for child in alike if longest not in child.ends), best)\n",
        ("tests/rollout/engines/test_blocks.py",),
    ),
    Mutant(
        "each part of a pass runs with all threads",
        "cores.py",
        "    use_threads(1)\n    return call()",
        "    return call()",
        ("tests/test_cores.py",),
    ),
    Mutant(
        "saved keys come back as values",
        "rollout/engines/native/core.py",
        "self.store.write(layer, slots, keys, values)\n        sequence.kv_length",
        "self.store.write(layer, slots, keys, keys)\n        sequence.kv_length",
        ("tests/rollout/engines/test_saves.py::test_a_kept_generation_goes_on_bit_for_bit",),
    ),
    Mutant(
        "a handle is taken whatever its tokens are",
        "rollout/engines/native/saves.py",
        "if saved is None or saved.ids != ids:",
        "if saved is None:",
        ("tests/rollout/engines/test_saves.py::test_a_handle_of_other_tokens_is_not_taken",),
    ),
    Mutant(
        "what dead engines left stays for ever",
        "rollout/engines/native/saves.py",
        "            self._take_over(folder)\n",
        "",
        (
            "tests/rollout/engines/test_saves.py::test_what_dead_engines_left_is_bounded_and_then_deleted_and_what_living_ones_hold_is_left_alone",
        ),
    ),
    Mutant(
        "a retry draws other random numbers",
        "rollout/engines/sequences.py",
        "seeds = [one.seed & _MASK64 for one in sequences]",
        "seeds = [one.seed + one.request.key.attempt & _MASK64 for one in sequences]",
        ("tests/rollout/engines/test_saves.py::test_a_handle_that_is_gone_falls_back_to_the_prefix",),
    ),
    Mutant(
        "min_tokens holds the first end token back only",
        "rollout/engines/sequences.py",
        "return self.stop_ids if",
        "return self.stop_ids[:1] if",
        ("tests/rollout/engines/test_stops.py::test_min_tokens_holds_every_end_token_and_every_stop_string_back",),
    ),
    Mutant(
        "a stop string must begin in the last token",
        "rollout/engines/sequences.py",
        "at = text.find(stop, max(0, len(before) - len(stop) + 1))",
        "at = text.find(stop, len(before))",
        ("tests/rollout/engines/test_stops.py::test_a_stop_string_ends_where_it_is_complete_across_token_borders",),
    ),
    Mutant(
        "the log-probability is that of the whole vocabulary",
        "rollout/engines/sampling.py",
        "logprobs = weights.gather(1, at)[:, 0].log() - total.log()",
        "logprobs = weights.gather(1, at)[:, 0].log() - (whole - values[:, 0]).double()",
        ("tests/rollout/engines/test_sampling.py::test_logprobs_sum_to_one_over_the_kept_set",),
    ),
    Mutant(
        "top-p keeps one token more",
        "rollout/engines/sampling.py",
        "keep &= (shares.cumsum(dim=-1) - shares < top_p[:, None])",
        "keep &= (shares.cumsum(dim=-1) - 2 * shares < top_p[:, None])",
        ("tests/rollout/engines/test_sampling.py::test_draws_stay_inside",),
    ),
    Mutant(
        "the penalty forgets the prompt",
        "rollout/engines/core.py",
        "seen=one.ids)",
        "seen=one.ids[one.prompt_length :])",
        ("tests/conformance/test_engine_against_trainer.py::test_ratio_is_one_over_the_recorded_support",),
    ),
    Mutant(
        "the trainer normalises over the whole vocabulary",
        "training/logprobs.py",
        "if rows.support_offsets is not None:",
        "if False:",
        ("tests/conformance/test_engine_against_trainer.py::test_ratio_is_one_over_the_recorded_support",),
    ),
    Mutant(
        "the trainer knows no penalty and no bias",
        "training/batching.py",
        "return shapes if any(shape != (1.0, ()) for shape in shapes) else None",
        "return None",
        ("tests/conformance/test_engine_against_trainer.py::test_ratio_is_one_over_the_recorded_support",),
    ),
    Mutant(
        "a prompt's experts are not forced",
        "rollout/token_rollout.py",
        "pieces += [one.prompt_routing[known:], one.expert_routing]",
        "pieces += [one.prompt_routing[known:] * 0, one.expert_routing]",
        (
            "tests/conformance/test_engine_against_trainer.py::test_the_trainer_computes_with_the_experts_that_the_engine_used",
        ),
    ),
]


def run(mutant: Mutant, scratch: Path) -> tuple[bool, str]:
    """(killed, the first test that turned red)."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(ROOT / "src", scratch / "src")
    shutil.copytree(ROOT / "tests", scratch / "tests")
    shutil.copy(ROOT / "pyproject.toml", scratch)
    file = scratch / "src" / "headrace" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return False, f"the text to change stands {text.count(mutant.old)} times in {mutant.file}"
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", *mutant.tests],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(scratch / "src"), "HEADRACE_FUZZ_EXAMPLES": "60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=_bounds,
    )
    try:
        out, _ = process.communicate(timeout=30 * LONGEST_S)  # a mutant may also wait for ever
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    if process.returncode < 0:
        return True, f"the suite does not end within {LONGEST_S} s"
    red = [line.removeprefix("FAILED ").split(" - ")[0] for line in out.splitlines() if line.startswith("FAILED")]
    return process.returncode != 0 and bool(red), red[0] if red else out[-300:]


def _bounds() -> None:
    """A flow that admits without end must not take the machine along."""
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


def main() -> int:
    wanted = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not wanted or any(word in mutant.name for word in wanted)]
    chosen = [mutant for mutant in chosen if not mutant.unit or tiles.available()]
    rows, survivors = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for mutant in chosen:
            killed, by = run(mutant, Path(folder) / "copy")
            survivors += not killed
            print(f"{'killed  ' if killed else 'SURVIVED'} {mutant.name}: {by}", flush=True)
            rows.append(f"| {mutant.name} | `{mutant.file}` | {'`' + by + '`' if killed else '**survived**'} |")
    if not wanted:
        head = (
            "# Mutants of the flow, of control and of the engine\n\nEach row breaks one rule in a copy of the sources; the last column is the first test "
            "that turns red.\nMade by `make mutants` (`tests/run_mutants.py`).\n\n| what is broken | where | turned red |\n|---|---|---|\n"
        )
        (ROOT / "tests" / "mutants.md").write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
