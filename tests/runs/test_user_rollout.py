"""`rollout.function`: a user's own coroutine makes the group, and the rest of the flow goes on as ever."""

from __future__ import annotations

from runs.launch import assert_accounted

ROLLOUT = '''
import numpy as np

from headrace.types import NO_VERSION, Episode, GenerateRequest, Group, RequestKey, TokenSample


async def twice(task, tools):
    """Two answers, the second to the same prompt; unscored, so the reward plane scores them."""
    prompt = np.array(tools.tokenizer(task.payload["prompt"], add_special_tokens=False)["input_ids"])
    episodes = []
    for member in range(2):
        key = RequestKey(lease_id=tools.lease.lease_id, member=member)
        request = GenerateRequest(key=key, group_id=tools.lease.lease_id, prompt_ids=prompt, sampling=tools.sampling)
        made = await tools.engine.generate(request)
        n, m = len(prompt), len(made.token_ids)
        sample = TokenSample(
            sample_id=str(key),
            token_ids=np.concatenate([prompt, made.token_ids]),
            loss_mask=np.repeat([0, 1], [n, m]),
            behavior_logprobs=np.concatenate([np.zeros(n, np.float32), made.logprobs]),
            policy_versions=np.concatenate([np.full(n, NO_VERSION), made.policy_versions]),
            sampling=made.sampling,
            finish_reason=made.finish_reason,
        )
        episodes.append(Episode(episode_id=str(key), samples=(sample,)))
    return Group(group_id="", task=task, expected_size=2, episodes=tuple(episodes), scores=())


async def nothing(task, tools):
    return None
'''


def test_a_users_own_rollout_is_scored_and_trained(lab):
    (lab.folder / "own.py").write_text(ROLLOUT)
    ran = lab.here("rollout.function=own.py:twice", "training.steps=2")
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert [row["group/size_mean"] for row in ran.steps] == [2.0, 2.0]
    assert all(row["reward/unscored"] == 0 for row in ran.steps)


def test_a_rollout_that_gives_no_group_is_named(lab):
    (lab.folder / "own.py").write_text(ROLLOUT)
    ran = lab.here("rollout.function=own.py:nothing", "limits.max_dropped=6")
    assert ran.code != 0
    assert "Group" in ran.out + ran.err + ran.messages and "Traceback" not in ran.err
