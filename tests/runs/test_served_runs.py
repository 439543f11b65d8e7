"""Runs whose episodes come from programs that use the openai package and never import headrace, and a server alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx2 as httpx
import numpy as np
import openai
import pytest

from headrace.config import ModelConfig
from headrace.exchange.codec import read_groups
from runs.launch import assert_accounted, assert_one_line


class Clients(threading.Thread):
    """Waits for the run's note, then plays sessions until the server is gone or `enough` are scored."""

    def __init__(
        self, folder: Path, enough: int = 10_000, then=lambda http: None, address=lambda note: True, play=None
    ) -> None:
        super().__init__(daemon=True)
        if play is not None:
            self.play = play.__get__(self)  # type: ignore[method-assign]
        self.address = address
        self.note, self.enough, self.then = folder / "clients.json", enough, then
        self.scored: list[float] = []
        self.versions: set[int] = set()
        self.problem: Exception | None = None
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.note.exists() and (text := self.note.read_text()) and self.address(json.loads(text)):
                break
            time.sleep(0.05)
        assert self.note.stat().st_mode & 0o077 == 0, "nobody else may read the token"
        note = json.loads(self.note.read_text())
        headers = {"Authorization": f"Bearer {note['token']}"}
        try:
            with httpx.Client(base_url=note["url"], headers=headers, timeout=60) as http:
                while len(self.scored) < self.enough:
                    self.play(http)
                self.then(http)
        except (httpx.HTTPError, openai.APIError):
            pass  # the run is over
        except Exception as error:
            self.problem = error

    def play(self, http: httpx.Client) -> None:
        session = http.post("/session", json={"wait_s": 5})
        if session.status_code != 200:
            return
        session = session.json()
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            text = session["task"]["payload"]["prompt"]
            for _ in range(2):
                answer = client.completions.create(model="m", prompt=text, extra_body={"return_token_ids": True})
                self.versions |= set(answer.choices[0].policy_versions)
                text += answer.choices[0].text + " 1+1="
        reward = len(set(text)) + 0.1 * len(text)
        if http.post(f"/session/{session['session']}/score", json={"reward": reward}).status_code == 200:
            self.scored.append(reward)


def test_a_run_trains_on_what_clients_produce(lab):
    clients = Clients(lab.folder / "runs" / "r")
    ran = lab.here(
        "rollout.source=http", "training.steps=3", "training.groups=2", "group.size=2", "reward.functions=[]"
    )
    clients.join(30)
    assert clients.problem is None
    assert ran.code == 0, ran.err
    assert_accounted(ran)
    assert ran.counts["trained"] == 6
    assert len(clients.scored) >= 12 and clients.versions >= {0, 1, 2}
    assert [row["group/size_mean"] for row in ran.steps] == [2.0] * 3
    rewards = [row["reward/mean"] for row in ran.steps]
    assert all(min(clients.scored) <= reward <= max(clients.scored) for reward in rewards)
    assert ran.events, "the timeline is that of every run"


def test_a_served_run_goes_on_and_its_clients_with_it(lab):
    """The token is that of the first start, so that a program with it finds its way back; counts and steps go on."""
    note = lab.folder / "runs" / "r" / "clients.json"
    words = (
        "rollout.source=http",
        "training.groups=2",
        "group.size=2",
        "reward.functions=[]",
        "checkpoint.every_steps=1",
    )
    first = Clients(note.parent)
    started = lab.here(*words, "training.steps=2")
    first.join(30)
    before = json.loads(note.read_text())
    second = Clients(note.parent, address=lambda found: found["url"] != before["url"])
    resumed = lab.here("training.steps=4", resume="r")
    second.join(30)
    assert (first.problem, second.problem) == (None, None) and started.code == resumed.code == 0, resumed.err
    assert json.loads(note.read_text())["token"] == before["token"]
    assert [row["step"] for row in resumed.steps] == [1, 2, 3, 4]
    assert resumed.counts["trained"] == 8 and second.versions and min(second.versions) > max(first.versions)
    assert_accounted(resumed)


def test_a_server_alone_writes_groups_and_takes_new_weights(lab):
    told = {}

    def then(http: httpx.Client) -> None:
        told["update"] = http.post("/update", json={"path": str(lab.model)}).json()
        told["wrong"] = http.post("/update", json={"path": str(lab.folder)})
        told["version"] = http.get("/stats").json()["version"]
        told["pause"] = http.post("/pause", json={"mode": "keep"}).status_code
        told["paused"] = http.get("/stats").json()["engines"][0]["paused"]
        http.post("/resume")
        os.kill(os.getpid(), signal.SIGINT)

    clients = Clients(lab.folder / "runs" / "s", enough=4, then=then)
    words = ["serve", "c.toml", "--name", "s", "--port", "0", "runtime=local", "group.size=2", "--token", "short"]
    ran = lab.cli(words)
    clients.join(30)
    assert clients.problem is None
    assert ran.code == 130, ran.err
    assert told["update"] == {"version": 1} == {"version": told["version"]}
    assert told["wrong"].status_code == 400 and "config.json" in told["wrong"].json()["error"]["message"]
    assert told["pause"] == 200 and told["paused"]
    groups = list(read_groups(lab.folder / "runs" / "s" / "groups"))
    assert sorted(score.reward for group in groups for score in group.scores) == sorted(clients.scored)
    assert all(len(episode.samples) == 1 for group in groups for episode in group.episodes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_chat_model_is_talked_to_over_several_turns_and_becomes_one_sample(lab):
    """SmolLM2-135M-Instruct behind the openai package: its own template, end token and answers."""
    from headrace.models import load_tokenizer, resolve_model

    folder = resolve_model(ModelConfig(path="smollm2"))
    (lab.folder / "chat.toml").write_text('model.path = "smollm2"\ngroup.size = 1\nrollout.sampling = { max_tokens = 48, temperature = 0.2 }\n')  # fmt: skip
    told: list[dict] = []

    def play(self, http: httpx.Client) -> None:
        session = http.post("/session", json={"wait_s": 5}).json()
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            for question in ("And of Italy?", None):
                answer = client.chat.completions.create(
                    model="m", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
                )
                told.append({"text": answer.choices[0].message.content, **answer.choices[0].model_extra})
                told[-1]["prompt"] = answer.model_extra.get("prompt_token_ids") or told[-1].get("prompt_token_ids")
                messages += [answer.choices[0].message, {"role": "user", "content": question}]
        assert http.post(f"/session/{session['session']}/score", json={"reward": 1.0}).status_code == 200
        self.scored.append(1.0)

    def then(http: httpx.Client) -> None:
        deadline = time.monotonic() + 60
        while http.get("/stats").json()["groups"]["trained"] < 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    clients = Clients(lab.folder / "runs" / "s", enough=1, then=then, play=play)
    ran = lab.cli(["serve", "chat.toml", "--name", "s", "--port", "0", "runtime=local"])
    clients.join(60)
    assert clients.problem is None and ran.code == 130, ran.err
    first, second = told
    assert "Paris" in first["text"] and second["text"], told
    (group,) = read_groups(lab.folder / "runs" / "s" / "groups")
    (sample,) = group.episodes[0].samples
    ids, tokenizer = sample.token_ids.tolist(), load_tokenizer(folder)
    assert ids[: len(first["prompt"])] == first["prompt"]
    assert ids[: len(second["prompt"])] == second["prompt"], "the second turn goes on from the first one's ids"
    trained = [token for token, mask in zip(ids, sample.loss_mask, strict=True) if mask]
    assert trained == [*first["token_ids"], *second["token_ids"]]
    text = tokenizer.decode(ids)
    assert text.count("<|im_start|>assistant") == 2 and text.count("What is the capital of France?") == 1
    assert (sample.policy_versions[sample.loss_mask == 1] == 0).all()
    assert np.isfinite(sample.behavior_logprobs[sample.loss_mask == 1]).all()


def test_a_short_token_is_refused_where_others_can_reach_it(lab):
    words = ["serve", "c.toml", "--host", "0.0.0.0", "--port", "0", "--token", "short", "runtime=local"]
    ran = lab.cli([*words, "--name", "x"])
    assert ran.code == 2
    assert_one_line(ran, "--token", "16")


def test_a_port_that_is_taken_is_said_in_a_line(lab):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = lab.here("rollout.source=http", f"clients.port={port}")
    assert ran.code == 2
    assert_one_line(ran, "clients.port", "cannot listen")
