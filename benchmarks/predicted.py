"""What benchmark.py tells below its table: predictions beside measurements, and the microbatches that peers chose."""

from collections.abc import Iterator, Sequence

from rows import Measurement, Row

from mobius.units import GIB


def remarks(rows: Sequence[Row], num_parameters: int) -> list[str]:
    """A line or two for each row that has numbers; pure text."""
    return [
        f"{row.name}: {line}"
        for row in rows
        if row.measurement is not None
        for line in (*_predictions(row.measurement, num_parameters), *_microbatch(row.measurement))
    ]


def _predictions(measured: Measurement, num_parameters: int) -> Iterator[str]:
    plan = measured.plan
    if plan is None:
        return
    yield f"{plan['num_stages']} stages, {plan['num_chunks']} microbatches, resident stages {plan['resident']}"
    parts = [
        beside("GPU GiB", plan["gpu_gib"], measured.allocated_gib),
        beside("host GiB", plan["host_gib"] or None, measured.host_gib),
        beside("s/step", plan["step_seconds"], measured.step_seconds),
    ]
    yield f"predicted {'; '.join(parts)}; host {measured.host_gib * GIB / num_parameters:.2f} bytes per parameter"


def _microbatch(measured: Measurement) -> Iterator[str]:
    if measured.microbatch is None:
        return
    tried = ", ".join(
        f"{rows}: {seconds:.3f}" for rows, seconds in measured.microbatch["trial_seconds_per_row"].items()
    )
    yield f"{measured.microbatch['rows_per_microbatch']} rows per microbatch; tried, s per row: {tried}"


def beside(name: str, predicted: float | None, measured: float | None) -> str:
    """Both numbers, and the share of the predicted one by which the measured one differs; "-" where one is missing."""
    texts = ["-" if number is None else f"{number:.2f}" for number in (predicted, measured)]
    share = f" ({measured / predicted - 1:+.1%})" if predicted and measured is not None else ""
    return f"{name} {texts[0]}, measured {texts[1]}{share}"
