"""Built-in sources, files and the stream they become: prompts, ids, order, limits, restoring, and one clear line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DataError, MissingExtra
from headrace.rollout.config import TasksConfig
from headrace.rollout.sources.arithmetic import EXAMPLE, largest_problems, sums_problems
from headrace.rollout.sources.rows import Rows, RowSource
from headrace.rollout.tasks import heldout_source, open_source
from headrace.types import Task

HERE = Path()


def take(source, n=10**6) -> list[Task]:
    tasks = []
    while len(tasks) < n and (task := source.next()) is not None:
        tasks.append(task)
    return tasks


def sums(**config):
    seed = config.pop("seed", 0)
    return open_source(TasksConfig(source="sums", **config), seed=seed, folder=HERE)


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def open_jsonl(path: Path, **config):
    return open_source(TasksConfig(source=f"jsonl:{path}", shuffle=False, epochs=1, **config), seed=0, folder=HERE)


# --------------------------------------------------------------------------------------------------------- built in


def test_sums_prompts_one_shot_and_plain() -> None:
    task = take(sums(), 1)[0]
    a, b = task.payload["a"], task.payload["b"]
    assert task.payload == {"prompt": f"27 + 41 = 68\n{a} + {b} =", "answer": str(a + b), "a": a, "b": b}
    plain = take(sums(options={"style": "plain"}), 1)[0].payload
    assert plain["prompt"] == f"{plain['a']}+{plain['b']}="


def test_bounded_sums_keep_to_the_bound_in_both_parts() -> None:
    config = TasksConfig(source="sums", epochs=1, options={"max_sum": 99})
    training = take(open_source(config, seed=0, folder=HERE), 10_000)
    heldout = take(heldout_source(config, folder=HERE))
    assert len(training) + len(heldout) == 80 * 81 // 2 - 2 and len(heldout) > 200
    assert all(int(task.payload["answer"]) <= 99 for task in [*training, *heldout])


@pytest.mark.parametrize("problems", [sums_problems, largest_problems])
def test_training_and_heldout_problems_are_disjoint_in_any_order_of_the_numbers(problems) -> None:
    training = {tuple(sorted(numbers)) for numbers in problems(heldout=False)}
    heldout = {tuple(sorted(numbers)) for numbers in problems(heldout=True)}
    assert not training & heldout
    assert len(training) > 8 * len(heldout) > 8 * 200
    assert tuple(sorted(EXAMPLE)) not in training | heldout


def test_the_two_parts_of_sums_are_all_pairs_but_the_example() -> None:
    parts = [*sums_problems(heldout=False), *sums_problems(heldout=True)]
    assert len(parts) == len(set(parts)) == 90 * 90 - 2


def test_heldout_source_is_the_same_every_time_and_ends() -> None:
    config = TasksConfig(source="sums", limit=5, epochs=0)
    tasks = take(heldout_source(config, folder=HERE))
    assert len(tasks) == len(sums_problems(heldout=True))
    assert tasks == take(heldout_source(config, folder=HERE))
    assert take(heldout_source(config, folder=HERE, limit=20)) == tasks[:20]


def test_largest_asks_for_the_largest_and_starts_the_answer() -> None:
    for task in take(open_source(TasksConfig(source="largest"), seed=0, folder=HERE), 50):
        numbers = task.payload["numbers"]
        assert task.payload["answer"] == str(max(numbers)) and len(set(numbers)) == 3
        assert all(str(number) in task.payload["prompt"][0]["content"] for number in numbers)
        assert task.payload["prefill"]


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"source": "sums", "options": {"style": "fancy"}}, ["style", "'fancy'", "one_shot, plain"]),
        ({"source": "sums", "options": {"stile": "plain"}}, ["tasks.options.stile", "style"]),
        ({"source": "sums", "options": {"max_sum": 20}}, ["tasks.options.max_sum", "20", "from 40 to 198"]),
        ({"source": "sums", "options": {"max_sum": "99"}}, ["tasks.options.max_sum", "'99'"]),
        ({"source": "largest", "options": {"n": 4}}, ["tasks.options.n"]),
        ({"source": "sumz"}, ["tasks.source", "'sumz'", "did you mean 'sums'"]),
        ({"source": ""}, ["tasks.source", "no source", "jsonl:PATH"]),
        ({"source": "jsonl:nowhere/x.jsonl"}, ["nowhere/x.jsonl", "cannot be read"]),
        ({"source": "no_such_module_:thing"}, ["no_such_module_", "cannot be imported"]),
        ({"source": "nothere.py:thing"}, ["no file", "nothere.py"]),
    ],
)
def test_a_mistake_gives_one_line_with_the_value_found(config, parts) -> None:
    with pytest.raises(DataError) as caught:
        open_source(TasksConfig(**config), seed=0, folder=HERE)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_heldout_of_a_file_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"evaluation\.source"):
        heldout_source(TasksConfig(source="jsonl:x.jsonl"), folder=HERE)


# ----------------------------------------------------------------------------------------------- order and position


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = (take(sums(limit=50, epochs=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert [task.task_id for task in first] != [task.task_id for task in other]
    one, two = first[:50], first[50:]
    assert [task.payload for task in one] != [task.payload for task in two]
    assert {task.payload["prompt"] for task in one} == {task.payload["prompt"] for task in two}
    assert len({task.task_id for task in first}) == 100


def test_without_shuffling_rows_come_in_order_and_epochs_0_never_ends(tmp_path) -> None:
    path = jsonl(tmp_path / "t.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    config = TasksConfig(source=f"jsonl:{path}", shuffle=False, epochs=0, limit=2)
    assert [task.payload["prompt"] for task in take(open_source(config, seed=0, folder=HERE), 7)] == list("abababa")


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 7),
    epochs=st.integers(1, 3),
    limit=st.integers(0, 9),
    cut=st.integers(0, 25),
    seed=st.integers(0, 9),
)
def test_restoring_continues_exactly_where_the_state_was_taken(length, epochs, limit, cut, seed) -> None:
    rows = Rows(name="r", length=length, get=lambda i: (str(i), {"prompt": str(i)}), fingerprint="f")
    whole = take(RowSource(rows, seed=seed, shuffle=True, epochs=epochs, limit=limit))
    assert len(whole) == (min(length, limit) if limit else length) * epochs
    before = RowSource(rows, seed=seed, shuffle=True, epochs=epochs, limit=limit)
    head = take(before, cut)
    after = RowSource(rows, seed=seed + 1, shuffle=True, epochs=epochs, limit=limit)
    after.restore(json.loads(json.dumps(before.state())))
    assert head + take(after) == whole
    assert after.next() is None


def test_a_position_is_not_restored_onto_other_data(tmp_path) -> None:
    old = open_jsonl(jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    new = open_jsonl(jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "c"}))
    with pytest.raises(DataError, match="not those of the checkpoint"):
        new.restore(old.state())


def test_given_back_tasks_are_counted_by_reason() -> None:
    source = sums()
    task = take(source, 1)[0]
    source.give_back(task, "stale")
    assert source.given_back == {"stale": 1}


# ------------------------------------------------------------------------------------------------------------ files


def test_jsonl_other_columns_reach_the_payload_and_the_prompt_column_is_renamed(tmp_path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = jsonl(tmp_path / "t.jsonl", {"q": "why", "level": 3}, {"q": messages, "tags": ["x"]})
    first, second = take(open_jsonl(path, prompt_column="q"))
    assert first.payload == {"prompt": "why", "level": 3}
    assert second.payload == {"prompt": messages, "tags": ["x"]}
    assert [first.task_id, second.task_id] == ["t:1#0", "t:2#0"]


def test_relative_paths_start_at_the_folder(tmp_path) -> None:
    jsonl(tmp_path / "t.jsonl", {"prompt": "a"})
    assert take(open_source(TasksConfig(source="jsonl:t.jsonl", epochs=1), seed=0, folder=tmp_path))


def test_empty_lines_are_skipped_counted_and_change_no_id(tmp_path, caplog) -> None:
    source = open_jsonl(jsonl(tmp_path / "t.jsonl", "", {"prompt": "a"}, "   ", {"prompt": "b"}, ""))
    assert [(task.task_id, task.payload["prompt"]) for task in take(source)] == [("t:2#0", "a"), ("t:4#0", "b")]
    assert source.notes == (f"{tmp_path / 't.jsonl'}: 3 empty lines were skipped",)
    assert "3 empty lines" in caplog.text


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([{"prompt": "a"}, '{"prompt": '], ["t.jsonl:2", "not valid JSON"]),
        ([{"prompt": "a"}, "", {"question": "b", "level": 1}], ["t.jsonl:3", "'prompt'", "question, level"]),
        ([["a"]], ["t.jsonl:1", "list"]),
        ([{"prompt": 7}], ["t.jsonl:1", "int"]),
        ([{"prompt": ""}], ["t.jsonl:1", "empty"]),
        ([{"prompt": []}], ["t.jsonl:1", "empty"]),
        ([{"prompt": [{"role": "user"}]}], ["t.jsonl:1", "message 0", "content"]),
        ([], ["no tasks", "empty"]),
        (["", ""], ["no tasks", "2 lines are empty"]),
    ],
)
def test_a_bad_file_is_refused_when_it_is_opened(tmp_path, lines, parts) -> None:
    path = jsonl(tmp_path / "t.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        open_jsonl(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"t\.jsonl:2"):
        open_jsonl(tmp_path / "t.jsonl")


def test_unicode_line_separators_inside_a_string_do_not_split_a_line(tmp_path) -> None:
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"prompt": "a\u2028b\x85"}, ensure_ascii=False) + "\r\n", encoding="utf-8"
    )
    assert take(open_jsonl(tmp_path / "t.jsonl"))[0].payload["prompt"] == "a\u2028b\x85"


def test_datasets_folder(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "level": [1, 2]})
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "two"))

    def opened(folder: str, **config):
        return open_source(
            TasksConfig(source=f"hf:{folder}", shuffle=False, epochs=1, **config), seed=0, folder=tmp_path
        )

    assert [task.payload for task in take(opened("one"))] == [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 2}]
    assert len(take(opened("two"))) == 2
    assert [task.payload["prompt"] for task in take(opened("two", options={"split": "test"}))] == ["b"]
    with pytest.raises(DataError, match="train, test"):
        opened("two", options={"split": "dev"})
    with pytest.raises(DataError, match="prompt, level"):
        opened("one", prompt_column="question")
    with pytest.raises(DataError, match="save_to_disk"):
        opened("three")


@pytest.mark.parametrize(("source", "package"), [("hf:x", "datasets"), ("reasoning_gym:gcd", "reasoning_gym")])
def test_a_missing_package_names_its_extra(monkeypatch, source, package) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(MissingExtra, match=rf"{package}.*pip install 'headrace\["):
        open_source(TasksConfig(source=source), seed=0, folder=HERE)


# ---------------------------------------------------------------------------------------------------- reasoning_gym


def test_reasoning_gym_entries_satisfy_their_own_verifier_after_json() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    config = TasksConfig(source="reasoning_gym:gcd", options={"size": 40, "max_value": 50}, epochs=1)
    tasks = take(open_source(config, seed=0, folder=HERE))
    assert len(tasks) == 40
    for task in tasks[:5]:
        column = json.loads(json.dumps(task.payload["reasoning_gym"]))
        score = reasoning_gym.get_score_answer_fn(column["dataset"])
        assert score(task.payload["answer"], column["entry"]) == 1.0
        assert score("-1", column["entry"]) < 1.0
        assert task.payload["prompt"] == column["entry"]["question"]


def test_reasoning_gym_heldout_shows_no_training_question() -> None:
    pytest.importorskip("reasoning_gym")
    config = TasksConfig(source="reasoning_gym:gcd", options={"size": 100, "max_value": 20}, epochs=1)
    training = {task.payload["prompt"] for task in take(open_source(config, seed=0, folder=HERE))}
    heldout = take(heldout_source(config, folder=HERE))
    assert heldout and not training & {task.payload["prompt"] for task in heldout}


def test_a_verifier_that_json_breaks_is_said(monkeypatch) -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.arithmetic.gcd import GCDDataset

    config = TasksConfig(source="reasoning_gym:gcd", options={"size": 3})
    assert open_source(config, seed=0, folder=HERE).notes == ()

    def wants_tuples(self, answer, entry):
        return float(isinstance(entry["metadata"]["difficulty"]["num_terms"], tuple))

    monkeypatch.setattr(GCDDataset, "score_answer", wants_tuples)
    assert "verifier" in open_source(config, seed=0, folder=HERE).notes[0]


@pytest.mark.parametrize(
    ("task", "options", "part"),
    [("gdc", {}, "gcd"), ("gcd", {"max_valu": 3}, "max_valu"), ("gcd", {"max_value": -3}, "refuses")],
)
def test_reasoning_gym_mistakes(task, options, part) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=part):
        open_source(TasksConfig(source=f"reasoning_gym:{task}", options=options), seed=0, folder=HERE)
