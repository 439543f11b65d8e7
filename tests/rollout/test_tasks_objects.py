"""A user's own object as a source of tasks: what it may be, what it is told, and what its mistakes look like."""

from __future__ import annotations

import textwrap

import pytest

from headrace.errors import DataError
from headrace.rollout.config import TasksConfig
from headrace.rollout.tasks import open_source

SOURCE = """
    from headrace.types import Task

    LIST = ["a", "b", "c"]
    ROWS = [{"q": "a", "level": 1}]
    TASKS = [Task(task_id="mine", source="me", payload={"prompt": "a"})]
    TEXT = "abc"
    TABLE = {"prompt": "a"}
    NUMBER = 7
    EMPTY = []

    class Endless:
        def __init__(self, start=0, seed=None):
            self.n, self.seed, self.back = start, seed, []
        def next(self):
            self.n += 1
            return {"prompt": str(self.n)}
        def give_back(self, task, reason):
            self.back.append((task.task_id, reason))

    class Remembers(Endless):
        def state(self):
            return {"n": self.n}
        def restore(self, state):
            self.n = state["n"]

    class Finite:
        def __iter__(self):
            return iter(["a", "b"])

    class Nothing:
        def __iter__(self):
            return iter([])

    class Raises:
        def next(self):
            raise RuntimeError("database gone")

    ENDLESS = Endless()

    def numbers(count=2):
        return (str(n) for n in range(count))

    def broken():
        raise ValueError("no key")
"""


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(SOURCE))

    def open_(name: str, seed: int = 0, **config):
        return open_source(TasksConfig(source=f"mine.py:{name}", **config), seed=seed, folder=tmp_path)

    return open_


def prompts(source, n: int = 50) -> list[str]:
    found = []
    while len(found) < n and (task := source.next()) is not None:
        found.append(task.payload["prompt"])
    return found


def test_a_list_is_shuffled_repeated_and_limited_like_a_file(opened) -> None:
    assert sorted(prompts(opened("LIST", epochs=2))) == list("aabbcc")
    assert prompts(opened("LIST", shuffle=False, limit=2, epochs=1)) == ["a", "b"]


def test_rows_use_the_prompt_column_and_tasks_keep_their_payload(opened) -> None:
    assert opened("ROWS", prompt_column="q").next().payload == {"prompt": "a", "level": 1}
    task = opened("TASKS", epochs=1).next()
    assert task.payload == {"prompt": "a"} and "mine" in task.task_id
    with pytest.raises(DataError, match="q, level"):
        opened("ROWS").next()


def test_an_iterable_is_begun_again_for_each_epoch_and_a_generator_ends(opened) -> None:
    assert prompts(opened("Finite", epochs=2)) == list("abab")
    assert prompts(opened("Finite", epochs=0), 5) == list("ababa")
    assert prompts(opened("numbers", options={"count": 3})) == ["0", "1", "2"]


def test_an_iterable_without_items_ends_even_when_it_should_repeat_for_ever(opened) -> None:
    assert prompts(opened("Nothing", epochs=0)) == []


def test_a_class_gets_its_options_and_the_seed(opened) -> None:
    source = opened("Endless", seed=5, options={"start": 10})
    assert source.inner.seed == 5
    assert prompts(source, 2) == ["11", "12"]
    assert prompts(opened("ENDLESS", limit=3)) == ["1", "2", "3"]


def test_give_back_reaches_the_object(opened) -> None:
    source = opened("Endless")
    task = source.next()
    source.give_back(task, "stale")
    assert source.inner.back == [(task.task_id, "stale")]
    opened("LIST").give_back(task, "stale")


@pytest.mark.parametrize("name", ["Endless", "Remembers", "Finite", "LIST"])
def test_restoring_continues_where_the_state_was_taken(opened, name) -> None:
    whole = [
        (task.task_id, task.payload) for task in (source.next() for source in [opened(name)] * 1 for _ in range(9))
    ]
    before = opened(name)
    head = [(task.task_id, task.payload) for task in (before.next() for _ in range(4))]
    after = opened(name)
    after.restore(before.state())
    assert head + [(task.task_id, task.payload) for task in (after.next() for _ in range(5))] == whole
    assert len({task_id for task_id, _ in whole}) == 9


def test_restore_uses_the_objects_own_state(opened) -> None:
    before = opened("Remembers")
    before.next()
    state = before.state()
    assert state["own"] == {"n": 1}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("TEXT", "str"),
        ("TABLE", "dict"),
        ("NUMBER", "int"),
        ("EMPTY", "no tasks"),
        ("MISSING", "LIST"),
        ("broken", "ValueError: no key"),
    ],
)
def test_a_mistake_gives_one_line(opened, name, part) -> None:
    with pytest.raises(DataError, match=part) as caught:
        opened(name)
    assert "\n" not in str(caught.value)


def test_options_that_nothing_takes_are_refused(opened) -> None:
    with pytest.raises(DataError, match=r"tasks\.options"):
        opened("LIST", options={"count": 3})
    with pytest.raises(DataError, match="coutn"):
        opened("numbers", options={"coutn": 3})


def test_an_object_that_raises_while_giving_is_named(opened) -> None:
    with pytest.raises(DataError, match="RuntimeError: database gone"):
        opened("Raises").next()


def test_an_installed_module_is_imported_by_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "some_tasks_module.py").write_text("LIST = ['x']\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source(TasksConfig(source="some_tasks_module:LIST"), seed=0, folder=tmp_path)
    assert prompts(source, 1) == ["x"]
