"""The whole road on a tiny model: real training, a real server process, a real report."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from lockstep.core.errors import ConfigError
from lockstep.core.run_folder import read_metrics
from lockstep.demo.config import DemoConfig
from lockstep.demo.outcome import Outcome
from lockstep.demo.run import make_room, run_demo
from lockstep.demo.table import print_outcome


@pytest.fixture(scope="module")
def walked(toy_demo: DemoConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("walked") / "demo"
    return run_demo(toy_demo, folder), folder


def test_every_promise_is_kept(walked: tuple[Outcome, Path]) -> None:
    outcome, _ = walked
    assert outcome.is_success, outcome.checks
    assert outcome.measured["rl"].task.accuracy.mean > outcome.measured["sft"].task.accuracy.mean
    assert (outcome.first_ratios.low, outcome.first_ratios.high) == (1.0, 1.0)
    assert outcome.first_ratios.num_tokens > 0
    assert outcome.agreement.max_difference == 0.0
    assert outcome.agreement.num_answers == 7
    assert outcome.agreement.num_tokens == 6 * 8 + len(outcome.streamed.token_ids)
    assert outcome.server_exit_code == 0
    assert len(outcome.phase_seconds) == 9


def test_every_number_is_in_a_file(walked: tuple[Outcome, Path]) -> None:
    outcome, folder = walked
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["comparisons"]["sft_rl"]["test"]["p_value"] < 0.01
    assert summary["total_s"] == outcome.total_s
    phases = read_metrics(folder / "metrics.jsonl")
    assert {row["phase"]: row["seconds"] for row in phases} == outcome.phase_seconds
    answers = read_metrics(folder / "server/answers.jsonl")
    assert all(answer["logprobs"] == answer["trainer_logprobs"] for answer in answers)
    for model in ("base", "sft", "rl"):
        assert len(read_metrics(folder / "measurements" / model / "task/results.jsonl")) == 30


def test_the_server_is_gone(walked: tuple[Outcome, Path]) -> None:
    _, folder = walked
    log = (folder / "server/server.log").read_text()
    url = log.split(" at ")[1].split()[0]
    with pytest.raises(URLError):
        urlopen(f"{url}/models", timeout=5)


class Page(HTMLParser):
    """What a report refers to, and whether its tags close."""

    VOID = ("meta", "br", "path", "use", "rect", "line", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.pictures: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.references += [
            values[name] or "" for name in ("href", "src", "xlink:href") if name in values
        ]
        if tag == "svg":
            self.pictures.append(values.get("aria-label"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_report_is_one_file(walked: tuple[Outcome, Path]) -> None:
    _, folder = walked
    text = (folder / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert len(page.pictures) == 5
    assert all(page.pictures)
    assert all(reference.startswith("#") for reference in page.references)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(http" not in text


def test_a_broken_promise_is_said_plainly(
    walked: tuple[Outcome, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, folder = walked
    print_outcome(outcome, folder)
    assert "BROKEN" not in capsys.readouterr().out
    (first, *others) = outcome.checks
    broken = replace(outcome, checks=(replace(first, is_kept=False), *others))
    assert not broken.is_success
    print_outcome(broken, folder)
    assert f"1 of {len(outcome.checks)} promises broken" in capsys.readouterr().out


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    assert not make_room(demo)
    demo.mkdir()
    assert not make_room(demo)
    (demo / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no demo"):
        make_room(demo)
    (demo / "config.json").write_text('{"model": "smollm2"}')
    with pytest.raises(ConfigError, match="holds no demo"):
        make_room(demo)
    (demo / "config.json").write_text('{"kind": "lockstep demo"}')
    assert make_room(demo)
    assert not demo.exists()
