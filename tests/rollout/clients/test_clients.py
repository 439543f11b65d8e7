"""The openai package, and programs that know nothing but HTTP, against the server: what they get and what is trained on."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from urllib.error import URLError

import numpy as np
import openai
import pytest

from headrace.errors import RequestRefused, RolloutDropped
from headrace.types import NO_VERSION
from rollout.clients.speaker import END, TOKEN, Stand

DOCS = Path(__file__).parents[3] / "docs" / "serve.md"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'


@pytest.fixture
async def stand():
    """Opens a stand; all are closed at the end."""
    opened: list[Stand] = []

    def build(say=lambda text, number: "hello", **options) -> Stand:
        opened.append(Stand(say, **options))
        return opened[-1]

    yield build
    for one in opened:
        await one.close()


def uses_a_tool(text: str, number: int) -> str:
    return "it is 42" if "tool:42" in text else CALL


async def talk(client, messages, **options):
    return await client.chat.completions.create(model="speaker", messages=messages, **options)


async def agent(client, question: str) -> str:
    """A tool loop as its users write it: what the client library gives is sent back as it is."""
    messages = [{"role": "user", "content": question}]
    while True:
        answer = await talk(client, messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})


# ----------------------------------------------------------------------------------------------------- episodes


async def test_an_agent_with_a_tool_becomes_one_sample_of_the_sampled_ids(stand):
    server = stand(uses_a_tool)
    group = server.lease({"question": "17+25"})
    for reward in (1.0, 0.0):
        session = await server.session()
        assert session["task"]["payload"] == {"question": "17+25"}
        assert await agent(server.openai(session), "17+25?") == "it is 42"
        assert (await server.score(session, reward=reward, parts={"right": reward})).json()["reward"] == reward
    group = await group
    assert [score.reward for score in group.scores] == [1.0, 0.0] and group.scores[0].parts == {"right": 1.0}
    for episode in group.episodes:
        (sample,) = episode.samples
        shown = server.tokenizer.decode(sample.token_ids, skip_special_tokens=False)
        assert shown.endswith(f"{CALL}{END}\n<turn>tool:42{END}\n<turn>assistant:it is 42{END}")
        sampled = server.tokenizer.decode(sample.token_ids[sample.loss_mask == 1], skip_special_tokens=False)
        assert sampled == f"{CALL}{END}it is 42{END}"
        assert set(sample.policy_versions[sample.loss_mask == 1]) == {3}
        assert set(sample.policy_versions[sample.loss_mask == 0]) == {NO_VERSION}
        assert sample.behavior_logprobs[sample.loss_mask == 1][0] == np.float32(-0.1)
    assert server.engine.prompts[1][: len(server.engine.prompts[0])] == server.engine.prompts[0]


async def test_the_program_of_the_documentation_produces_episodes(stand, tmp_path, monkeypatch):
    """As it stands in docs/serve.md, over several turns with its tool, until the server is gone."""
    program = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL).group(1)
    server = stand(uses_a_tool, size=2)
    lease = server.lease({"prompt": "What is 17 + 25?", "answer": "42"})
    (tmp_path / "runs/my-run").mkdir(parents=True)
    (tmp_path / "runs/my-run/clients.json").write_text(json.dumps({"url": server.url, "token": TOKEN}))
    monkeypatch.chdir(tmp_path)
    running = asyncio.create_task(asyncio.to_thread(exec, program, {"__name__": "agent"}))
    group = await asyncio.wait_for(lease, 30)
    assert [score.reward for score in group.scores] == [1.0, 1.0]
    for episode in group.episodes:
        (sample,) = episode.samples
        text = server.tokenizer.decode(sample.token_ids, skip_special_tokens=False)
        assert "What is 17 + 25?" in text and "tool:42" in text and "it is 42" in text
    await server.server.close()
    with pytest.raises((URLError, ConnectionError)):  # nobody listens, or the answer awaited never comes
        await asyncio.wait_for(running, 30)


async def test_a_prefix_is_matched_to_ids_that_tokenising_would_not_give(stand):
    """The model says two tokens for what the tokenizer would make one; the next prompt has the sampled ones."""
    server = stand(lambda text, number: "x" * 3)
    vocabulary = server.tokenizer.get_vocab()
    odd = [vocabulary["a"], vocabulary["?"], vocabulary["b"]]

    async def generate(request, report=None):
        server.engine.prompts.append(request.prompt_ids.tolist())
        return server.engine._generation(request, [*odd, vocabulary[END]], "stop", vocabulary[END])

    server.format.text = lambda generation: "something else"
    server.engine.generate = generate
    server.lease()
    client = server.openai(await server.session())
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "something else"}]
    await talk(client, messages[:1])
    await talk(client, [*messages, {"role": "user", "content": "r"}])
    first, second = server.engine.prompts
    assert second[: len(first) + 3] == first + odd
    assert "something" not in server.tokenizer.decode(second, skip_special_tokens=False)


async def test_a_changed_history_opens_a_new_segment_and_nothing_is_trained_twice(stand):
    server = stand(lambda text, number: f"say{number}", size=1)
    group = server.lease()
    session = await server.session()
    client = server.openai(session)
    user = {"role": "user", "content": "a"}
    said = [{"role": "assistant", "content": f"say{n}"} for n in range(4)]
    await talk(client, [user])
    await talk(client, [user, said[0], user])
    await talk(client, [user, said[0], {"role": "user", "content": "another way"}])
    await talk(client, [{"role": "system", "content": "shorter"}, said[1], user])
    assert (await server.score(session, reward=1)).status_code == 200
    (episode,) = (await group).episodes
    assert [sample.sample_id for sample in episode.samples] == ["0-0/0", "0-0/0.1", "0-0/0.2"]
    sampled = [
        server.tokenizer.decode(sample.token_ids[sample.loss_mask == 1], skip_special_tokens=True)
        for sample in episode.samples
    ]
    assert sampled == ["say0say1", "say2", "say3"]
    first, second, third = (sample.token_ids.tolist() for sample in episode.samples)
    shared = len(server.engine.prompts[0]) + len("say0") + 1
    assert first[:shared] == second[:shared], "the branch keeps the sampled ids of what it shares"
    assert "shorter" in server.tokenizer.decode(third)


async def test_a_reply_that_was_cut_is_closed_by_the_template_and_not_trained_on(stand):
    server = stand(lambda text, number: "abcdef", size=1)
    group = server.lease()
    session = await server.session()
    client = server.openai(session)
    cut = await talk(client, [{"role": "user", "content": "a"}], max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.content == "abc"
    await talk(client, [{"role": "user", "content": "a"}, cut.choices[0].message, {"role": "user", "content": "b"}])
    await server.score(session, reward=1)
    (sample,) = (await group).episodes[0].samples
    shown = server.tokenizer.decode(sample.token_ids, skip_special_tokens=False)
    assert f"abc{END}\n<turn>user:b" in shown
    sampled = server.tokenizer.decode(sample.token_ids[sample.loss_mask == 1], skip_special_tokens=False)
    assert sampled == f"abcabcdef{END}"


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_completions_continue_too(stand, form):
    server = stand(lambda text, number: "yes", size=1)
    group = server.lease()
    session = await server.session()
    ask = server.openai(session).completions.create
    options = {"model": "m", "extra_body": {"return_token_ids": True}}
    first = await ask(prompt="a b", **options)
    if form == "text":
        second = await ask(prompt="a b" + first.choices[0].text + " more", **options)
    else:
        more = server.tokenizer(" more", add_special_tokens=False)["input_ids"]
        second = await ask(prompt=first.prompt_token_ids + first.choices[0].token_ids + more, **options)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert first.choices[0].policy_versions == [3] * 4
    await server.score(session, reward=1)
    (sample,) = (await group).episodes[0].samples
    assert sample.loss_mask.sum() == 8


async def test_the_session_is_named_by_its_path_or_its_key(stand):
    server = stand(size=3)
    group = server.lease()
    by_key = await server.session()
    await talk(server.openai(key=by_key["api_key"]), [{"role": "user", "content": "a"}])
    mine = {"base_url": f"{server.url}/session/mine/v1", "api_key": "a token for tests", "session": "mine"}
    await talk(server.openai(mine), [{"role": "user", "content": "a"}])
    both = await server.session(session="both")
    await talk(server.openai(both), [{"role": "user", "content": "a"}])
    for session in (by_key, mine, both):
        assert (await server.score(session, reward=0.5)).status_code == 200
    assert len((await group).episodes) == 3


async def test_named_groups_keep_their_sessions_together(stand):
    server = stand()
    groups = [server.lease(), server.lease()]
    opened = {}
    for name in ("x", "y", "y", "x"):
        session = await server.session(group=name)
        opened.setdefault(name, set()).add(session["task"]["task_id"])
        await talk(server.openai(session), [{"role": "user", "content": name}])
        await server.score(session, reward=1)
    assert opened == {"x": {"t0"}, "y": {"t1"}}
    for name, group in zip("xy", await asyncio.gather(*groups), strict=True):
        assert all(f"user:{name}" in server.tokenizer.decode(e.samples[0].token_ids) for e in group.episodes)


async def test_reward_functions_score_what_comes_without_a_reward(stand):
    class Rewarder:
        unit = "sample"

        async def score(self, requests):
            from headrace.types import Score

            return [Score(reward=float(len(request.completion))) for request in requests]

    server = stand(rewarder=Rewarder(), size=1)
    group = server.lease()
    session = await server.session()
    await talk(server.openai(session), [{"role": "user", "content": "a"}])
    assert (await server.score(session)).json()["reward"] == 5.0
    assert (await group).scores[0].reward == 5.0


# ------------------------------------------------------------------------------------------------------ streaming


async def test_a_stream_gives_the_text_of_the_whole_answer(stand):
    server = stand(lambda text, number: "a stopped b")
    client = server.openai()
    options = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stop": ["stopped"]}
    whole = await client.chat.completions.create(**options)
    assert whole.choices[0].message.content == "a " and whole.choices[0].finish_reason == "stop"
    pieces = [piece async for piece in await client.chat.completions.create(**options, stream=True)]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "a "
    assert pieces[-1].choices[0].finish_reason == "stop"


async def test_a_streamed_tool_call_comes_whole_and_its_text_is_not_shown(stand):
    server = stand(lambda text, number: "Let me see. " + CALL, size=1)
    group = server.lease()
    session = await server.session()
    stream = await talk(
        server.openai(session),
        [{"role": "user", "content": "a"}],
        tools=TOOLS,
        stream=True,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    pieces = [piece async for piece in stream]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Let me see."
    last = pieces[-1].choices[0]
    assert last.finish_reason == "tool_calls"
    assert json.loads(last.delta.tool_calls[0].function.arguments) == {"a": 17, "b": 25}
    assert len(last.logprobs.content) == len(last.token_ids) == len(last.policy_versions)
    await server.score(session, reward=1)
    assert (await group).episodes[0].completion_length == len(last.token_ids)


async def test_a_client_that_leaves_its_stream_leaves_nothing_on_the_engine(stand):
    server = stand(lambda text, number: "a long answer " * 10)
    server.engine.token_s = 0.01
    server.lease()
    session = await server.session()
    stream = await talk(server.openai(session), [{"role": "user", "content": "a"}], stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(5):
        while not server.engine.cancelled:
            await asyncio.sleep(0.01)
    assert not server.rollout.sessions[session["session"]].dialogue.turns


# ------------------------------------------------------------------------------------------------------- bad days


async def test_a_client_that_vanishes_is_noticed_and_its_request_ends(stand):
    server = stand(lambda text, number: None)
    server.lease()
    session = await server.session()
    call = asyncio.create_task(talk(server.openai(session), [{"role": "user", "content": "a"}]))
    while not server.engine.prompts:
        await asyncio.sleep(0.01)
    call.cancel()
    async with asyncio.timeout(5):
        while not server.engine.cancelled:
            await asyncio.sleep(0.01)


async def test_an_idle_session_ends_in_the_ledger_with_its_reason(stand):
    server = stand(idle_s=0.1)
    group = server.lease()
    session = await server.session()
    await talk(server.openai(session), [{"role": "user", "content": "a"}])
    with pytest.raises(RolloutDropped) as dropped:
        await group
    assert dropped.value.reason == "idle"
    late = await server.score(session, reward=1)
    assert late.status_code == 410 and "nothing was heard" in late.json()["error"]["message"]
    with pytest.raises(openai.APIStatusError, match="has ended") as gone:
        await talk(server.openai(session), [{"role": "user", "content": "a"}])
    assert gone.value.status_code == 410


async def test_the_place_of_a_session_that_was_given_up_is_free_again(stand):
    server = stand(size=1, retries=1)
    group = server.lease()
    first = await server.session()
    assert (await server.http.delete(f"/session/{first['session']}")).status_code == 200
    second = await server.session()
    await talk(server.openai(second), [{"role": "user", "content": "a"}])
    assert (await server.score(first, reward=9)).status_code == 410
    assert (await server.score(second, reward=1)).status_code == 200
    assert [score.reward for score in (await group).scores] == [1.0]


async def test_a_score_that_is_posted_twice_counts_once(stand):
    server = stand(size=2)
    group = server.lease()
    sessions = [await server.session(), await server.session()]
    for session in sessions:
        await talk(server.openai(session), [{"role": "user", "content": "a"}])
    first = await asyncio.gather(*(server.score(sessions[0], reward=1) for _ in range(2)))
    assert 200 in [answer.status_code for answer in first]
    again, other = await server.score(sessions[0], reward=1), await server.score(sessions[0], reward=0)
    assert (again.status_code, again.json()["reward"], other.status_code) == (200, 1.0, 409)
    await server.score(sessions[1], reward=0)
    assert [score.reward for score in (await group).scores] == [1.0, 0.0]


GARBAGE = [
    ("/v1/chat/completions", b"{", 400, "JSON"),
    ("/v1/chat/completions", b"\xff\xfe\x00", 400, ""),
    ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [{"role": "king", "content": "x"}]}', 400, "king"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "image_url"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "n": 4}', 400, "n: found 4"),
    ("/v1/completions", b'{"prompt": [1], "max_tokens": 99999999}', 400, "max_tokens"),
    ("/v1/completions", b'{"prompt": [-1]}', 400, "prompt"),
    ("/v1/completions", b'{"prompt": "1", "max_tokens": "many"}', 400, "found 'many'"),
    ("/v1/completions", b'{"prompt": "1", "logit_bias": {"3": "x"}}', 400, "logit_bias"),
    ("/v1/completions", b"[1, 2]", 400, "found [1, 2]"),
    ("/v1/chat/completions", b'{"messages": [{"role": "king"}], "messages": 5}', 400, "king"),
    ("/v1/chat/completions", b'{"messages": [], "x": ' + b"[" * 50_000, 400, ""),
    ("/v1/completions", b'{"prompt": [1180591620717411303424]}', 400, ""),
    ("/v1/completions", b'{"prompt": "1", "top_k": 1000000000000000000000000}', 400, ""),
    ("/v1/completions", b'{"prompt": "1", "logit_bias": {"3": 1e308}}', 400, "logit_bias"),
    ("/v1/completions", b'{"prompt": ""}', 400, ""),
    ("/v1/completions", b"[" * 50_000, 400, ""),
    ("/session", b'{"session": "../../etc"}', 400, "session"),
    ("/session", b'{"what": 1}', 400, "what"),
    ("/session/none/score", b'{"reward": 1}', 404, "no session"),
    ("/pause", b'{"mode": "hard"}', 400, "hard"),
    ("/nowhere", b"", 404, "no such address"),
]


@pytest.mark.parametrize(("path", "body", "status", "word"), GARBAGE)
async def test_garbage_gets_one_line_and_the_server_goes_on(stand, path, body, status, word):
    server = stand()
    answer = await server.http.post(path, content=body)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert word in message and "\n" not in message and "Traceback" not in message
    assert (await server.http.get("/v1/models")).json()["data"][0]["id"] == "speaker"


async def test_what_the_engine_refuses_is_the_callers_fault(stand):
    server = stand()

    async def refuse(request, text, report):
        raise RequestRefused("request r: a prompt of 9 tokens leaves no room in a context of 8 tokens")

    server.engine._speak = refuse
    answer = await server.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 400 and "leaves no room" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "posted", [b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": "high"}', b'{"parts": {"a": null}}']
)
async def test_a_score_that_is_none_leaves_the_session_open(stand, posted):
    server = stand(size=1)
    group = server.lease()
    session = await server.session()
    assert (await server.score(session, reward=1)).status_code == 400, "nothing was sampled yet"
    await talk(server.openai(session), [{"role": "user", "content": "a"}])
    answer = await server.http.post(f"/session/{session['session']}/score", content=posted)
    assert answer.status_code == 400
    assert (await server.score(session, reward=1)).status_code == 200
    await group


async def test_strangers_get_401_and_keys_open_their_own_session_alone(stand):
    server = stand()
    server.lease()
    one, other = await server.session(), await server.session()
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN_ALONE},
        {"Authorization": "Basic YTph"},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", "/session"), ("POST", "/update"), ("GET", "/stats")):
            answer = await server.http.request(method, path, headers={"Authorization": "", **header})
            assert answer.status_code == 401, (method, path, answer.text)
    key = {"Authorization": f"Bearer {one['api_key']}"}
    for path in ("/pause", "/resume", "/update", "/session", f"/session/{other['session']}/score"):
        assert (await server.http.post(path, json={}, headers=key)).status_code == 403, path
    assert not server.steering.told
    assert (await server.http.get(f"/session/{one['session']}", headers=key)).status_code == 200


TOKEN_ALONE = "a token for tests"


async def test_a_body_beyond_the_bound_is_refused_declared_or_not(stand):
    server = stand()

    async def drops():
        for _ in range(200):
            yield b" " * 1000

    declared = await server.http.post("/v1/completions", content=b" " * 100_001)
    streamed = await server.http.post("/v1/completions", content=drops())
    assert (declared.status_code, streamed.status_code) == (413, 413)
    assert (await server.http.get("/v1/models")).status_code == 200


async def test_a_session_keeps_to_the_sampling_that_is_trained_with(stand):
    server = stand()
    server.lease()
    session = await server.session()
    with pytest.raises(openai.BadRequestError, match=r"rollout\.sampling\.temperature"):
        await talk(server.openai(session), [{"role": "user", "content": "a"}], temperature=0.3)
    await talk(server.openai(session), [{"role": "user", "content": "a"}], temperature=1.0, seed=5)
    await talk(server.openai(session), [{"role": "user", "content": "b"}], seed=5, max_tokens=999_999)
    await talk(server.openai(), [{"role": "user", "content": "a"}], temperature=0.3, seed=5)
    first, second, plain = (request.sampling for request in server.engine.requests)
    seeds = [request.seed for request in server.engine.requests]
    assert first.temperature == 1.0 and seeds[0] != seeds[1], "turns of one seed differ"
    assert second.max_tokens == 200
    assert (plain.temperature, seeds[2]) == (0.3, 5)


async def test_what_can_never_fit_is_the_clients_to_mend(stand):
    server = stand()
    server.lease()
    session = await server.session()
    with pytest.raises(openai.BadRequestError, match="shorten"):
        await talk(server.openai(session), [{"role": "user", "content": "a" * 3000}])
    await talk(server.openai(session), [{"role": "user", "content": "a"}])


async def test_without_a_free_place_a_client_is_told_to_come_again(stand):
    server = stand(size=1)
    none = await server.http.post("/session", json={"wait_s": 0.05})
    assert none.status_code == 503 and none.headers["retry-after"]
    waiting = asyncio.create_task(server.session(wait_s=5))
    await asyncio.sleep(0.05)
    server.lease()
    assert (await waiting)["task"]["task_id"] == "t0"


async def test_a_group_that_the_run_gives_up_ends_its_sessions(stand):
    server = stand(lambda text, number: None)
    group = server.lease()
    session = await server.session()
    call = asyncio.create_task(talk(server.openai(session), [{"role": "user", "content": "a"}]))
    while not server.engine.prompts:
        await asyncio.sleep(0.01)
    group.cancel()
    with pytest.raises(openai.APIStatusError, match="gave its group up"):
        await call
    assert server.engine.cancelled == 1


async def test_pause_resume_and_update_reach_the_engines(stand):
    server = stand()
    await server.http.post("/pause", json={"mode": "wait"})
    await server.http.post("/resume")
    assert (await server.http.post("/update", json={"path": "/models/next"})).json() == {"version": 7}
    assert server.steering.told == [("pause", "wait"), "resume", ("update", "/models/next")]
