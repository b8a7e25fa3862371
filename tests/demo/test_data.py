"""The bundled files are what the demo's settings say, and nothing measured is trained on."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

from lockstep.demo.config import DemoConfig
from lockstep.evaluate.multiple_choice import read_choice_items
from lockstep.evaluate.tasks import load_environment

SCRIPT = Path(__file__).parents[2] / "scripts/make_demo_data.py"


def test_sft_data_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_demo_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    config = DemoConfig()
    assert config.sft_data.read_text() == "".join(script.sft_lines(config))


def test_no_measured_question_is_trained_on() -> None:
    config = DemoConfig()
    environment = load_environment(config.held_out_task or config.task, config.posing)
    records = [json.loads(line) for line in config.sft_data.read_text().splitlines()]
    trained = {record["messages"][-2]["content"] for record in records}
    assert len(trained) == config.sft_examples
    measured = {
        environment.item(index, split="held_out").prompt[-1]["content"]
        for index in range(config.num_items)
    }
    assert not trained & measured
    assert config.rl(Path("sft"), Path("out")).loop.held_out_items >= config.num_items


def test_common_knowledge_is_a_fair_test() -> None:
    items = read_choice_items(DemoConfig().choices)
    assert len(items) == len({item.question for item in items}) == 100
    assert all(len(set(item.choices)) == 4 for item in items)
    places = Counter(item.answer for item in items)
    assert all(15 <= places[place] <= 35 for place in range(4)), places
