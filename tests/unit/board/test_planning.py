"""The page asks the planner in a process of its own: newer questions end older ones, and bad ones end nothing."""

import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from typing import Any

import pytest

from mobius.board.planning import OUTDATED, PlanningProcess, answer_questions
from mobius.errors import PlanError
from mobius.planner.forecast import forecast

WORDS = shlex.split("--card RTX4090 --num_ranks 2 --num_stages 8 --num_chunks 4 --batch_size 8 --seq_length 512")
CONFIG = """{"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 4096}"""


@pytest.fixture
def own_signals() -> Iterator[None]:
    kept = {each: signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGINT)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("own_signals")
def test_its_answers_are_forecasts_and_errors_are_told() -> None:
    ours, theirs = Pipe()
    answers: list[Mapping[str, Any]] = []
    questions: list[dict[str, Any]] = [
        {"words": [*WORDS, "--model_path", "3b"]},
        {"words": WORDS, "config": CONFIG, "is_draft": True},
        {"words": [*WORDS, "--batchsize", "3"]},
        {"words": WORDS, "config": "no JSON"},
        {"words": 7},
        {"words": [*WORDS, "--model_path", "3b", "--host_memory_limit", "20"], "is_draft": True},
    ]

    def ask() -> None:
        answers.append(theirs.recv())
        assert theirs.recv() == {"is_ready": True}
        for question in questions:
            theirs.send(question)
            answers.append(theirs.recv())
        theirs.close()

    asking = threading.Thread(target=ask)
    asking.start()
    answer_questions(ours)
    asking.join()
    names, plan, own_model, wrong_option, no_json, nonsense, short = answers
    assert names["cards"]["RTX4090"] == 24
    assert "7b" in names["models"]
    expected = forecast([*WORDS, "--model_path", "3b"])
    assert (plan["fits"], plan["step_seconds"]) == (True, expected.step_seconds)
    assert plan["command"] == expected.command
    assert own_model["num_parameters"] > 1_000_000
    assert "--model_path MODEL" in own_model["command"]
    assert "did you mean `--batch_size`?" in wrong_option["problem"]
    assert "no JSON" in no_json["problem"]
    assert "TypeError" in nonsense["problem"]
    assert short["fits"] is False


@pytest.mark.usefixtures("own_signals")
def test_a_signal_gives_up_the_question_at_work_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def slow(*_: object, **__: object) -> None:
        began.set()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr("mobius.planner.forecast.forecast", slow)
    ours, theirs = Pipe()
    answers: list[object] = []

    def ask() -> None:
        assert "cards" in theirs.recv()
        assert theirs.recv() == {"is_ready": True}
        theirs.send({"words": []})
        began.wait()
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)
        answers.append(theirs.recv())
        os.kill(os.getpid(), signal.SIGUSR1)  # nothing is at work
        time.sleep(0.05)
        theirs.close()

    asking = threading.Thread(target=ask)
    asking.start()
    answer_questions(ours)
    asking.join()
    assert answers == [OUTDATED]


class Stubborn:
    """A question that is planned in C code, where no signal is heard, until the process ends."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_wait_in_c, ())


def _wait_in_c() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    time.sleep(600)


@pytest.mark.extended
def test_a_question_that_nobody_waits_for_ends_and_so_does_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mobius.board.planning.GONE_SECONDS", 0.5)
    planning = PlanningProcess()
    try:
        assert planning.answer({"words": [*WORDS, "--model_path", "3b"], "is_draft": True})["fits"]
        begun = time.monotonic()
        words = [*WORDS, "--model_path", "70b", "--host_memory_limit", "20"]
        assert planning.answer({"words": words}, lambda: time.monotonic() > begun + 0.5) == OUTDATED
        while planning._process is not None:  # nobody asks
            assert time.monotonic() < begun + 60
            time.sleep(0.1)
        assert planning.answer({}, lambda: True)["cards"]
        assert planning.answer({"words": [*WORDS, "--model_path", "3b"], "is_draft": True})["fits"]
        begun = time.monotonic()
        process = planning._process
        assert planning.answer({"words": Stubborn()}, lambda: True) == OUTDATED
        assert process is not None
        assert not process.is_alive()
        assert time.monotonic() < begun + 20
    finally:
        planning.close()


@pytest.mark.extended
def test_a_newer_question_ends_an_older_one_and_a_dead_process_is_replaced() -> None:
    planning = PlanningProcess()
    try:
        assert planning.answer({})["cards"]
        assert planning.answer({"words": [*WORDS, "--model_path", "3b"], "is_draft": True})["fits"]
        older: list[object] = []
        words = [*WORDS, "--model_path", "70b", "--host_memory_limit", "20"]
        asking = threading.Thread(target=lambda: older.append(planning.answer({"words": words})))
        asking.start()
        time.sleep(1.0)
        assert planning.answer({"words": [*WORDS, "--model_path", "3b"], "is_draft": True})["fits"]
        asking.join()
        assert older == [OUTDATED]
        process = planning._process
        assert process is not None
        process.kill()
        with pytest.raises(PlanError, match="has ended with code -9"):
            planning.answer({"words": WORDS})
        assert planning.answer({})["cards"]
    finally:
        planning.close()
