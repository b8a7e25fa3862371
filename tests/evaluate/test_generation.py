from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.errors import ConfigError
from lockstep.evaluate.generation import GenerationConfig, evaluate_generation, select_items
from lockstep.evaluate.results import ItemResult, read_results, summarise, write_results
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.evaluate.tasks import load_environment


@pytest.fixture
def environment(tmp_path: Path):
    path = tmp_path / "sums.jsonl"
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": i + 1, "group": i % 3}) for i in range(12)]
    path.write_text("\n".join(lines))
    return load_environment(f"free_answer:{path}", TaskConfig(match="numeric"))


def add(prompt: str) -> str:
    number = int(prompt.split(">")[1].split("+")[0])
    return str(number + 1 if number < 9 else 0)


def test_results_record_what_was_asked_and_answered(environment, scripted_completer) -> None:
    config = GenerationConfig(max_tokens=8)
    items = select_items(environment, config)
    done: list[int] = []
    results = evaluate_generation(
        scripted_completer(add), environment, items, config, on_finish=done.append
    )
    assert done == list(range(12))
    assert [result.score for result in results] == [1.0] * 9 + [0.0] * 3
    assert bytes(results[3].prompt_token_ids).decode() == "<user>3+1=\n"
    assert (results[3].completion, results[3].answer, results[3].expected) == ("4", "4", "4")

    summary = summarise(results, task=environment.name, model="scripted")
    assert summary.accuracy.mean == 0.75
    assert summary.accuracy.method == "clustered t"
    assert summary.accuracy.num_groups == 3
    assert summary.truncated_share == 0.0


def test_truncation_is_counted(environment, scripted_completer) -> None:
    config = GenerationConfig(max_tokens=1, num_items=11)
    items = select_items(environment, config)
    results = evaluate_generation(scripted_completer(lambda _: "12"), environment, items, config)
    assert summarise(results, task="t", model="m").truncated_share == 1.0


def test_several_samples_are_clustered_by_item(tmp_path: Path, scripted_completer) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{i}+1=", "answer": {i + 1}}}' for i in range(12)))
    environment = load_environment(f"free_answer:{path}")
    config = GenerationConfig(samples_per_item=4, temperature=1.0)
    items = select_items(environment, config)
    results = evaluate_generation(scripted_completer(add), environment, items, config)
    summary = summarise(results, task="t", model="m")
    assert (summary.num_items, summary.num_samples) == (12, 48)
    assert summary.accuracy.num_groups == 12
    seeds = {config.sampling_of(position).seed for position in range(12)}
    assert len(seeds) == 12


def test_results_survive_the_disk(environment, scripted_completer, tmp_path: Path) -> None:
    config = GenerationConfig()
    items = select_items(environment, config)
    results = evaluate_generation(scripted_completer(add), environment, items, config)
    summary = summarise(results, task="t", model="m")
    write_results(tmp_path / "out", results, summary)
    again = read_results(tmp_path / "out")
    assert [result.key for result in again] == [result.key for result in results]
    assert summarise(again, task="t", model="m") == summary
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written["estimates"]["accuracy"]["mean"] == 0.75


def test_what_cannot_be_estimated_is_null_on_disk(tmp_path: Path) -> None:
    results = [ItemResult(item_id="a", prompt="p", expected="x", score=0.5)]
    write_results(tmp_path, results, summarise(results, task="t", model="m"))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["estimates"]["score"]["standard_error"] is None


def test_sampling_twice_greedily_is_refused() -> None:
    with pytest.raises(ConfigError, match="same completion each time"):
        GenerationConfig(samples_per_item=2)


def test_more_items_than_there_are_is_refused(environment) -> None:
    with pytest.raises(ConfigError, match="from 1 to 12 here, got 13"):
        select_items(environment, GenerationConfig(num_items=13))


def test_evaluation_never_imports_torch() -> None:
    code = (
        "import sys\n"
        "from lockstep.evaluate import compare, generation, multiple_choice\n"
        "from lockstep.evaluate.tasks import load_environment\n"
        "load_environment('reasoning_gym:chain_sum').item(0, split='train')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
