"""Runs whose episodes come from programs that use the openai package and never import headrace, and a server alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx2 as httpx
import openai

from headrace.exchange.codec import read_groups
from runs.launch import assert_accounted, assert_one_line


class Clients(threading.Thread):
    """Waits for the run's note, then plays sessions until the server is gone or `enough` are scored."""

    def __init__(self, folder: Path, enough: int = 10_000, then=lambda http: None) -> None:
        super().__init__(daemon=True)
        self.note, self.enough, self.then = folder / "clients.json", enough, then
        self.scored: list[float] = []
        self.versions: set[int] = set()
        self.problem: Exception | None = None
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while not self.note.exists() and time.monotonic() < deadline:
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
