"""The second half of the road: serve what was trained, ask it, compare with the trainer, stop."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.core.files import write_text
from lockstep.core.progress import Progress
from lockstep.core.sampling import SamplingParams
from lockstep.demo.agreement import (
    Agreement,
    ServedAnswer,
    measure_agreement,
    trainer_logprobs,
)
from lockstep.demo.config import DemoConfig
from lockstep.demo.measuring import load_trained
from lockstep.demo.phases import Phases
from lockstep.demo.server_process import ServerProcess
from lockstep.demo.streaming import StreamedAnswer, stream_chat
from lockstep.evaluate.http_completer import HttpCompleter
from lockstep.evaluate.multiple_choice import read_choice_items
from lockstep.evaluate.tasks import load_environment

SERVED_NAME = "demo"
TEMPERATURE = 1.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the server said and did."""

    streamed: StreamedAnswer
    agreement: Agreement
    tokens_per_s: float
    """Drawn tokens of the concurrent requests over the time from the first to the last of them."""
    exit_code: int


def serve_and_compare(
    config: DemoConfig, phases: Phases, folder: Path, *, model: Path, adapter: Path
) -> Served:
    """Three phases; the server's log and answers are left in `folder`."""
    arguments = [str(model), "--adapter", str(adapter), "--precision", config.precision]
    arguments += ["--port", str(config.port), "--served-model-name", SERVED_NAME]
    with ServerProcess(arguments, log=folder / "server.log") as server:
        with phases.phase("Serve", "the trained model over the OpenAI API, one answer streaming"):
            with Progress() as progress:
                url = server.wait_until_healthy(progress)
            phases.say(f"ready at {url}/v1")
            streamed = _ask_streaming(config, url, phases)
        with phases.phase(
            "Agree", f"{config.num_questions} answers at once, then the trainer's logprobs of them"
        ):
            answers, tokens_per_s = _ask_at_once(config, url)
            answers.append(
                ServedAnswer(
                    question=config.question,
                    prompt_token_ids=streamed.prompt_token_ids,
                    token_ids=streamed.token_ids,
                    logprobs=streamed.logprobs,
                    text=streamed.text,
                )
            )
            logprobs = trainer_logprobs(load_trained(model, adapter, config).model, answers)
            _write_answers(folder / "answers.jsonl", answers, logprobs)
            agreement = measure_agreement(answers, logprobs)
            phases.say(
                f"max |logprob(trainer) - logprob(server)| = {agreement.max_difference:g} "
                f"over {agreement.num_tokens:,} tokens of {agreement.num_answers} answers"
            )
        with phases.phase("Shut down", "SIGTERM to the server"):
            exit_code = server.stop()
            phases.say(f"exit code {exit_code}; nothing answers at {url} any more")
    return Served(
        streamed=streamed, agreement=agreement, tokens_per_s=tokens_per_s, exit_code=exit_code
    )


def _ask_streaming(config: DemoConfig, url: str, phases: Phases) -> StreamedAnswer:
    phases.say(f"question: {config.question}")
    sys.stderr.write("  answer: ")
    answer = stream_chat(
        url, config.question, max_tokens=config.question_tokens, on_text=_write_piece
    )
    sys.stderr.write("\n")
    mean = sum(answer.logprobs) / len(answer.logprobs)
    phases.say(f"{len(answer.token_ids)} tokens, mean logprob {mean:.3f}, {answer.finish_reason}")
    return answer


def _write_piece(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _ask_at_once(config: DemoConfig, url: str) -> tuple[list[ServedAnswer], float]:
    """Half of the questions from the task, half from the multiple choice; all of one length, so
    that the server computes them together to the end.
    """
    questions = _questions(config)
    completer = HttpCompleter(url, max_concurrency=len(questions))
    prompts = [
        completer.chat_prompt([{"role": "user", "content": question}]) for question in questions
    ]
    params = [
        SamplingParams(
            max_tokens=config.answer_tokens,
            temperature=TEMPERATURE,
            seed=config.seed + number,
            ignore_eos=True,
            logprobs=0,
        )
        for number in range(len(questions))
    ]
    with Progress() as progress:
        bar = progress.add("answers", total=len(questions), unit="answers")
        started_s = time.perf_counter()
        completions = completer.complete(prompts, params, on_finish=lambda _: bar.advance())
        elapsed_s = time.perf_counter() - started_s
        bar.finish()
    answers = [
        ServedAnswer(
            question=question,
            prompt_token_ids=completion.prompt_token_ids,
            token_ids=completion.samples[0].token_ids,
            logprobs=tuple(entry.logprob for entry in completion.samples[0].logprobs),
            text=completion.samples[0].text,
        )
        for question, completion in zip(questions, completions, strict=True)
    ]
    return answers, sum(len(answer.token_ids) for answer in answers) / elapsed_s


def _questions(config: DemoConfig) -> list[str]:
    environment = load_environment(config.held_out_task or config.task, config.posing)
    num_task = config.num_questions // 2
    items = [environment.item(index, split="held_out") for index in range(num_task)]
    asked = [item.prompt if isinstance(item.prompt, str) else _last(item.prompt) for item in items]
    others = read_choice_items(config.choices)[: config.num_questions - num_task]
    return asked + [item.question for item in others]


def _last(messages: Sequence[dict[str, object]]) -> str:
    return str(messages[-1]["content"])


def _write_answers(
    path: Path, answers: Sequence[ServedAnswer], logprobs: Sequence[Sequence[float]]
) -> None:
    """Every token's two logprobs side by side."""
    lines = [
        json.dumps(asdict(answer) | {"trainer_logprobs": of_trainer}, ensure_ascii=False) + "\n"
        for answer, of_trainer in zip(answers, logprobs, strict=True)
    ]
    write_text(path, "".join(lines))
